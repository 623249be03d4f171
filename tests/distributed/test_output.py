"""What is printed where nobody takes it any more: no process waits for a reader that does not come."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manymesh._distributed._launch import run_processes

pytestmark = pytest.mark.once

# More than a pipe holds, so that a process that nobody reads would wait for ever.
SCRIPT = """
import os, sys
print("pid", os.getpid(), "\\u2713", flush=True)
for number in range(4000): print("line", number, "x" * 100)
"""
LAUNCH = [sys.executable, "-m", "manymesh", "launch", "-n", "2", "--timeout", "60"]


def test_a_reader_that_has_seen_enough(script):
    """All end, without words, with the exit code that SIGPIPE would give."""
    child = subprocess.Popen([*LAUNCH, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        pid = int(child.stdout.readline().split()[2])
        child.stdout.close()
        assert child.wait(60) == 141
        assert child.stderr.read() == ""
        assert not os.path.exists(f"/proc/{pid}")
    finally:
        child.kill()
        child.wait()
        child.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_full_disk(script):
    """All end, and launch says why."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([*LAUNCH, script], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 74
    assert done.stderr == (
        "manymesh: what the processes print cannot be written: [Errno 28] No space left on device; all are ended\n"
    )


def test_characters_that_the_stream_has_no_code_for(script):
    """Are question marks, and the lines go on."""
    held = io.BytesIO()
    output = io.TextIOWrapper(held, encoding="latin-1")
    more = {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}
    assert run_processes([sys.executable, script], 1, output=output, more=more, timeout=60) == 0
    lines = held.getvalue().decode("latin-1").splitlines()
    assert lines[0].startswith("[0] pid") and lines[0].endswith("?")
    assert len(lines) == 4001
