"""The page on schedules shows what the library prints."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"


def test_every_example_on_the_page_runs() -> None:
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    # A fence would read as a line of expected output.
    text = re.sub(r"^```.*$", "", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    result = doctest.DocTestRunner(optionflags=flags).run(examples)
    assert result.attempted > 10
    assert result.failed == 0
