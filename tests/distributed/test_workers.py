"""Processes that a process of a run starts itself: they are no part of it."""

import io
import sys

import pytest

from manymesh._distributed._launch import run_processes

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("workers")]  # one run for all

# A worker imports it again, and finds the environment of its parent.
SCRIPT = """
import multiprocessing, os, subprocess, sys
import manymesh as mm
mm.distributed.initialize()
import jax

def load(number):
    return number, jax.process_count(), len(jax.devices())

if __name__ == "__main__":
    if sys.argv[1] == "helper":
        print("helper", *load(7))
    else:
        for method in ("spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                print(method, pool.map(load, [7]), "for", jax.process_index(), "of", jax.process_count(), flush=True)
        subprocess.run([sys.executable, __file__, "helper"], check=True)
        if jax.process_index() == 0:
            subprocess.run([sys.executable, *sys.argv[2:], __file__, "helper"], check=True)
"""
LAUNCH = ["-m", "manymesh", "launch", "-n", "2", "--devices-per-process", "1"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What both processes of a run print that starts workers, programs and, in process 0, another run."""
    script, output = tmp_path_factory.mktemp("workers") / "script.py", io.StringIO()
    script.write_text(SCRIPT)
    code = run_processes([sys.executable, str(script), "starts", *LAUNCH], 2, 1, output=output, timeout=120)
    assert code == 0, output.getvalue()
    return sorted(output.getvalue().splitlines())


def test_nothing_else_is_said(lines):
    """A worker, a program and a run of two print a line each."""
    assert len(lines) == 2 * 2 + 2 + 2, lines


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_multiprocessing(lines, method):
    """Import the script again, with its `initialize`, which does nothing there."""
    assert [line for line in lines if method in line] == [f"[{p}] {method} [(7, 1, 1)] for {p} of 2" for p in range(2)]


def test_programs_of_their_own(lines):
    """Are one process each, whatever the environment says."""
    assert [line for line in lines if "] helper 7 1" in line] == [f"[{p}] helper 7 1 1" for p in range(2)]


def test_a_launch_of_their_own(lines):
    """Is a run of its own, whose processes join that one."""
    assert [line for line in lines if "] helper 7 2" in line] == [f"[0] [{p}] helper 7 2 2" for p in range(2)]


FORKS = """
import os, sys
import manymesh as mm
mm.distributed.initialize()
import jax
for ends in ("goes", "raises"):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        mm.distributed.initialize()
        if ends == "raises": raise ValueError("in a fork")
        sys.exit()
    os.waitpid(child, 0)
print("goes on", mm.fetch(jax.numpy.arange(2)), flush=True)
"""


def test_a_fork_that_ends():
    """Is not the process that has forked it: neither its end nor its exception is told to others."""
    output = io.StringIO()
    assert run_processes([sys.executable, "-c", FORKS], 2, 1, output=output, timeout=120) == 0, output.getvalue()
    lines = output.getvalue().splitlines()
    assert sorted(line for line in lines if "goes on" in line) == [f"[{p}] goes on [0 1]" for p in range(2)]
    assert sorted(line for line in lines if "] ValueError" in line) == [
        f"[{p}] ValueError: in a fork" for p in range(2)
    ]
