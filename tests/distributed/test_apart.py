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
        "while this one is in manymesh.fetch (tree ",
    ),
    "puts_arguments_elsewhere": (ENDED_WITH_OTHERS, "with arguments that were put elsewhere than here"),
    "fails_again_and_again": (
        ENDED_WITH_OTHERS,
        "did not finish call 4 of <lambda> (program 1), which ended there with FloatingPointError",
    ),
    "is_interrupted": (
        ENDED_WITH_OTHERS,
        "did not finish call 2 of <lambda> (program 1), which ended there with KeyboardInterrupt",
    ),
    "is_interrupted_in_a_fetch": (
        ENDED_WITH_OTHERS,
        "did not finish manymesh.fetch (tree 1), which ended there with KeyboardInterrupt",
    ),
    "is_interrupted_as_it_compiles": (
        ENDED_WITH_OTHERS,
        "process 1 (submesh 0) has not come to call 1 of <lambda> (program 4) for 5 s",
    ),
}


def run(case):
    """The exit code, and what is said."""
    output, paths = io.StringIO(), ":".join(p for p in sys.path if p)
    command, more = [sys.executable, str(SCRIPT), case], {"PYTHONPATH": paths}
    return run_processes(command, 2, 1, output=output, timeout=60, more=more), output.getvalue()


@pytest.mark.parametrize("case", CASES)
def test_processes_that_go_different_ways_end_with_words(case):
    """Each waits for what the other one will not send."""
    expected, words = CASES[case]
    code, output = run(case)
    assert code == expected, output
    assert words in output
    assert "ended well 0" not in output


@pytest.mark.parametrize("case", ["compiles_for_long", "compiles_for_long_what_needs_no_agreement"])
def test_who_compiles_for_long_is_waited_for(case):
    """Longer than `stall_timeout`, also by who has to agree with it about the first arguments."""
    code, output = run(case)
    assert code == 0, output


def test_processes_that_caught_the_error_of_a_callback_end_well():
    """Though JAX, as it cleans up, comes to that error once more in the process that had it."""
    code, output = run("catches_what_a_callback_raised")
    assert code == 0, output
    assert "ended well 0" in output and "ended well 1" in output
