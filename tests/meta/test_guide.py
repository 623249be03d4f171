"""The guide runs, with axes of either type, and prints what stands in it.

    python tests/meta/test_guide.py

writes what it prints into the notebook.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.once

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide.ipynb"


def read() -> dict[str, Any]:
    guide: dict[str, Any] = json.loads(GUIDE.read_text("utf-8"))
    return guide


def tags_of(cell: dict[str, Any]) -> list[str]:
    tags: list[str] = cell["metadata"].get("tags", [])
    return tags


def run(guide: dict[str, Any], axis_type: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Executes the code cells in order; the variables at the end, and what each cell printed."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    printed = {}
    for cell in guide["cells"]:
        if cell["cell_type"] != "code":
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            if "checkpoint" in tags_of(cell):
                warnings.simplefilter("ignore")  # of Orbax, at import and in use
            exec(compile("".join(cell["source"]), f"guide.ipynb {cell['id']}", "exec"), variables)
        if "parameters" in tags_of(cell):
            variables["AXIS_TYPE"] = variables["AxisType"][axis_type]
        printed[cell["id"]] = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    return variables, printed


def output_of(cell: dict[str, Any]) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"]).rstrip("\n")


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_the_guide_runs(axis_type: str) -> None:
    guide = read()
    variables, printed = run(guide, axis_type)
    assert variables["mesh"].axis_types == (variables["AxisType"][axis_type],) * 2
    for cell in guide["cells"]:
        if cell["cell_type"] == "code" and "varies" not in tags_of(cell):
            assert printed[cell["id"]] == output_of(cell), cell["id"]


def write() -> None:
    guide = read()
    _, printed = run(guide, "Auto")
    for cell in guide["cells"]:
        if cell["cell_type"] == "code":
            text = printed[cell["id"]]
            lines = f"{text}\n".splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if text else []
    GUIDE.write_text(json.dumps(guide, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    write()
