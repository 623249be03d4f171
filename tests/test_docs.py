"""The pages show what the library does.

    python tests/test_docs.py

writes what the examples print into the pages; with names of pages, into those.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "docs" / name
    for name in ("compiler.md", "inspect.md", "metadata.md", "nnx.md", "equinox.md", "checkpoints.md", "planning.md")
]
WRITING = ("inspect",)  # pages whose examples write files; their folder goes
# A block of code, or of calls of the command line, and what it prints, if it prints something.
BLOCKS = re.compile(
    r"^```(?P<language>python|sh)\n(?P<code>.*?)^```\n(?:^```text\n(?P<text>.*?)^```\n)?", re.MULTILINE | re.DOTALL
)


def run(block: re.Match[str], page: Path, variables: dict[str, Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if block["language"] == "sh":
            from manymesh._cli import main  # after conftest has set up JAX, also when this is a script

            for line in block["code"].splitlines():
                python, m, package, *words = shlex.split(line)
                assert (python, m, package) == ("python", "-m", "manymesh"), line
                assert main(words) == 0, line
        else:
            exec(compile(block["code"], page.name, "exec"), variables)
    return out.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_example_on_the_page_prints_what_stands_below_it(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, with the variables of the blocks before."""
    monkeypatch.chdir(tmp_path if page.stem in WRITING else ROOT)
    variables: dict[str, Any] = {}
    blocks = list(BLOCKS.finditer(page.read_text("utf-8")))
    assert len(blocks) > 3
    for block in blocks:
        assert run(block, page, variables) == (block["text"] or ""), block["code"]


def write(page: Path) -> None:
    """Fills in what each block prints."""
    variables: dict[str, Any] = {}

    def filled(block: re.Match[str]) -> str:
        printed = run(block, page, variables)
        return f"```{block['language']}\n{block['code']}```\n" + (f"```text\n{printed}```\n" if printed else "")

    page.write_text(BLOCKS.sub(filled, page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import conftest  # noqa: F401  # eight devices, before JAX is imported

    for page in PAGES:
        if len(sys.argv) == 1 or page.stem in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder if page.stem in WRITING else ROOT):
                write(page)
