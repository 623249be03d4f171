"""The notebooks to download hold what is on the pages, which tests/test_docs.py runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="comes with nbclient, which make setup installs")

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "notebooks.py"))


@pytest.mark.parametrize("page", SCRIPT["TUTORIALS"])
def test_a_notebook_has_the_code_and_the_outputs_of_its_page(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text("utf-8")
    notebook = SCRIPT["notebook"](text)
    nbformat.validate(notebook)
    devices, *cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert "device_count=8" in devices.source
    fences = re.findall(r"^```(\w+).*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [cell.source for cell in cells] == [code.rstrip("\n") for kind, code in fences if kind == "python"]
    assert [out.text for cell in cells for out in cell.outputs] == [out for kind, out in fences if kind == "text"]
    words = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert words.startswith(text.partition("\n")[0]) and "](" not in words and "```" not in words


def test_the_tutorials_without_a_notebook_are_those_that_are_one_or_are_a_script() -> None:
    listed = re.search(
        r":caption: Tutorials\n```|:caption: Tutorials\n\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL
    )
    assert listed is not None and set(listed[1].split()) - set(SCRIPT["TUTORIALS"]) == {"guide", "tutorials/processes"}
