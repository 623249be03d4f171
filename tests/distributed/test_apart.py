"""Processes that go different ways end by themselves, and say what it was, as those of `test_failures` where one fails."""

import io
import sys
from pathlib import Path

import pytest

from manymesh._distributed._launch import run_processes
from manymesh._distributed._watch import ENDED_WITH_OTHERS

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("failures")]

SCRIPT = Path(__file__).with_name("apart.py")
# case -> exit code, what is said
CASES = {
    "fetches_for_itself": (1, "process 0: for process 0"),
    "fetches_in_another_order": (
        ENDED_WITH_OTHERS,
        "is in manymesh.fetch (tree 2), while this one is in manymesh.fetch (tree 1)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_that_go_different_ways_end_with_words(case):
    """Each waits for what the other one will not send."""
    expected, words = CASES[case]
    output = io.StringIO()
    paths = ":".join(p for p in sys.path if p)
    code = run_processes(
        [sys.executable, str(SCRIPT), case], 2, 1, output=output, timeout=60, more={"PYTHONPATH": paths}
    )
    assert code == expected, output.getvalue()
    assert words in output.getvalue()
    assert "ended well" not in output.getvalue()
