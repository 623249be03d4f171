"""The page on metadata shows what the library does.

    python tests/meta/test_docs.py

writes what the examples print into the page.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metadata.md"
# A block of code, and what it prints, if it prints something.
BLOCKS = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:^```text\n(?P<text>.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def run(code: str, variables: dict[str, Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, PAGE.name, "exec"), variables)
    return out.getvalue()


def test_every_example_on_the_page_prints_what_stands_below_it() -> None:
    variables: dict[str, Any] = {}
    blocks = list(BLOCKS.finditer(PAGE.read_text("utf-8")))
    assert len(blocks) > 5
    for block in blocks:
        assert run(block["code"], variables) == (block["text"] or ""), block["code"]


def write() -> None:
    variables: dict[str, Any] = {}

    def filled(block: re.Match[str]) -> str:
        printed = run(block["code"], variables)
        return f"```python\n{block['code']}```\n" + (f"```text\n{printed}```\n" if printed else "")

    PAGE.write_text(BLOCKS.sub(filled, PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    write()
