"""The pictures in the pages are those that ``python docs/pictures.py`` draws."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "pictures.py"))


@pytest.mark.parametrize("name", SCRIPT["PICTURES"])
def test_a_picture_is_up_to_date(name: str) -> None:
    assert (DOCS / "_static" / name).read_text("utf-8") == SCRIPT["PICTURES"][name]()


def test_a_picture_has_a_box_for_each_task() -> None:
    """Of 4 submeshes and 8 microbatches, forwards and backwards, beside a row's own box and two in the legend."""
    assert SCRIPT["timeline"]("1f1b", 4, 8).count("<rect") == 4 * 8 * 2 + 4 + 2
