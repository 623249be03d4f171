"""The README's example is run, word for word."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def test_there_is_an_example():
    """A README without a Python block would make the next test pass by running nothing."""
    assert BLOCKS


@pytest.mark.quick
@pytest.mark.parametrize("block", BLOCKS)
def test_the_example_runs(block, capsys):
    """It trains, and prints a program that names both tasks."""
    exec(compile(block, str(README), "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "front" in printed and "back_bwd" in printed
