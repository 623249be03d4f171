"""The pages show what the library does.

    python tests/test_docs.py

writes what the examples print into the pages.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / name for name in ("compiler.md", "metadata.md", "nnx.md", "equinox.md", "planning.md")]
# A block of code, and what it prints, if it prints something.
BLOCKS = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:^```text\n(?P<text>.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def run(code: str, page: Path, variables: dict[str, Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, page.name, "exec"), variables)
    return out.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_example_on_the_page_prints_what_stands_below_it(page: Path) -> None:
    """In order, with the variables of the blocks before."""
    variables: dict[str, Any] = {}
    blocks = list(BLOCKS.finditer(page.read_text("utf-8")))
    assert len(blocks) > 3
    for block in blocks:
        assert run(block["code"], page, variables) == (block["text"] or ""), block["code"]


def write(page: Path) -> None:
    """Fills in what each block prints."""
    variables: dict[str, Any] = {}

    def filled(block: re.Match[str]) -> str:
        printed = run(block["code"], page, variables)
        return f"```python\n{block['code']}```\n" + (f"```text\n{printed}```\n" if printed else "")

    page.write_text(BLOCKS.sub(filled, page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import conftest  # noqa: F401  # eight devices, before JAX is imported

    for page in PAGES:
        write(page)
