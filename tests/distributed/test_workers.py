"""Processes that a process of a run starts itself: they are no part of it."""

import io
import sys

import pytest

from manymesh._distributed._launch import run_processes

pytestmark = pytest.mark.once

# A worker imports it again, and finds the environment of its parent.
SCRIPT = """
import multiprocessing, os, subprocess, sys
import manymesh as mm
mm.distributed.initialize()
import jax

def load(number):
    return number, jax.process_count(), len(jax.devices())

if __name__ == "__main__":
    if sys.argv[1] == "subprocess":
        words = [sys.executable, __file__, "helper"] if len(sys.argv) == 2 else sys.argv[2:]
        subprocess.run(words, check=True)
    elif sys.argv[1] != "helper":
        with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
            print("loaded", pool.map(load, [7]), "for", jax.process_index(), "of", jax.process_count())
    else:
        print("helper", *load(7))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_multiprocessing(script, method):
    """Import the script again, with its `initialize`, which does nothing there."""
    output = io.StringIO()
    assert run_processes([sys.executable, script, method], 2, 1, output=output, timeout=120) == 0, output.getvalue()
    lines = sorted(output.getvalue().splitlines())
    assert lines == [f"[{p}] loaded [(7, 1, 1)] for {p} of 2" for p in range(2)]


def test_programs_of_their_own(script):
    """Are one process each, whatever the environment says."""
    output = io.StringIO()
    assert run_processes([sys.executable, script, "subprocess"], 2, 1, output=output, timeout=120) == 0, (
        output.getvalue()
    )
    assert sorted(output.getvalue().splitlines()) == [f"[{p}] helper 7 1 1" for p in range(2)]


def test_a_launch_of_their_own(script):
    """Is a run of its own, whose processes join that one."""
    output, launch = io.StringIO(), ["-m", "manymesh", "launch", "-n", "2", "--devices-per-process", "1"]
    command = [sys.executable, script, "subprocess", sys.executable, *launch, script, "helper"]
    assert run_processes(command, 1, 1, output=output, timeout=120) == 0, output.getvalue()
    assert sorted(output.getvalue().splitlines()) == [f"[0] [{p}] helper 7 2 2" for p in range(2)]
