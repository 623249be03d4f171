"""The tutorials as notebooks that have been run, to download: ``make docs`` writes them beside the pages.

A page in Markdown is read well everywhere, and the tests run what is on it; a notebook is what a reader wants to run and
change. One is made of the other: a block of Python becomes a cell, and what stands below it the cell's output.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat import v4

DOCS = Path(__file__).parent
TUTORIALS = (
    "tutorials/submeshes", "tutorials/linen", "tutorials/stacked", "tutorials/no_edit", "nnx", "equinox",
    "tutorials/pipeline",
)  # fmt: skip
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:^```text(?: varies)?\n(?P<text>.*?)^```\n)?", re.M | re.S)
# Links inside the documentation lead nowhere from a file that was downloaded; their words stay.
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]+\)")
DEVICES = """\
# Eight simulated devices, where there are no others; JAX reads this when it is imported.
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")"""


def file_of(page: str) -> str:
    """Where the notebook of a page lies among the built pages."""
    return f"notebooks/{page.rpartition('/')[2]}.ipynb"


def notebook(markdown: str) -> nbformat.NotebookNode:
    """The notebook of a page.

    Args:
      markdown: the text of the page.
    """
    cells, end = [v4.new_code_cell(DEVICES)], 0
    for block in BLOCK.finditer(markdown):
        cells += _words(markdown[end : block.start()])
        printed = block["text"]
        outputs = [v4.new_output("stream", name="stdout", text=printed)] if printed else []
        cells.append(v4.new_code_cell(block["code"].rstrip("\n"), outputs=outputs))
        end = block.end()
    cells += _words(markdown[end:])
    for number, cell in enumerate(cells):
        cell["id"] = str(number)  # else drawn at random
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def _words(markdown: str) -> list[nbformat.NotebookNode]:
    text = LINK.sub(r"\1", markdown).strip()
    return [v4.new_markdown_cell(text)] if text else []


def write(folder: Path) -> None:
    """Writes all of them.

    Args:
      folder: of the built pages.
    """
    for page in TUTORIALS:
        path = folder / file_of(page)
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook((DOCS / f"{page}.md").read_text("utf-8")), path)
