"""Starting processes: what they print, how they end, and what is left of them."""

import io
import operator
import os
import re
import signal
import subprocess
import sys
import time

import jax
import pytest

import manymesh as mm
from manymesh._cli import main
from manymesh._distributed._launch import run_processes
from manymesh._distributed._wires import Wires

pytestmark = pytest.mark.once

SCRIPT = """
import os, sys, time
me = os.environ["MANYMESH_PROCESS"]
print("hello", *sys.argv[1:], os.environ["XLA_FLAGS"].split()[-1])
print("pid", os.getpid(), flush=True)
if "wait" in sys.argv: time.sleep(100)
sys.exit(3 if me == "1" and "fail" in sys.argv else 0)
"""


def gone(output):
    """Whether no process that printed its number is left."""
    numbers = [int(n) for n in re.findall(r"pid (\d+)", output)]
    assert numbers
    return not any(os.path.exists(f"/proc/{n}") for n in numbers)


def test_lines_have_the_number_of_their_process(script, capsys):
    """And options of the script are left to it."""
    assert main(["launch", "-n", "3", "--devices-per-process", "2", script, "--a", "-n"]) == 0
    output = capsys.readouterr().out
    expected = "hello --a -n --xla_force_host_platform_device_count=2"
    assert sorted(line for line in output.splitlines() if "hello" in line) == [f"[{p}] {expected}" for p in range(3)]
    assert gone(output)


def test_the_first_failure_is_the_exit_code(script, capsys):
    """Also where others end well, and where others hang: these are ended."""
    assert main(["launch", "-n", "2", script, "fail"]) == 3
    assert "manymesh: process 1 ended with exit code 3" in capsys.readouterr().out


def test_a_time_limit(script, capsys):
    """All are ended, with the code of `timeout`."""
    assert main(["launch", "-n", "2", "--timeout", "1.5", script, "wait"]) == 124
    output = capsys.readouterr().out
    assert "process 0, 1 still ran" in output
    assert gone(output)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launch_leaves_nothing(script, number):
    """Ctrl-C and SIGTERM."""
    command = [sys.executable, "-m", "manymesh", "launch", "-n", "2", script, "wait"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output = "".join(child.stdout.readline() for _ in range(4))
        child.send_signal(number)
        assert child.wait(20) == 130
        assert gone(output)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_wrong_count(script, capsys):
    """Said before anything starts."""
    assert main(["launch", "-n", "0", script]) == 2
    assert "processes has to be at least 1, found 0" in capsys.readouterr().err


def test_a_function_in_two_processes():
    """What it returns in each; and an error where it fails."""
    assert mm.distributed.launch(operator.add, 2, args=(1, 2), timeout=300) == [3, 3]
    with pytest.raises(mm.errors.ProcessError, match=r"launch\(truediv\) failed with exit code 1"):
        mm.distributed.launch(operator.truediv, 1, args=(1, 0), timeout=300)


def test_a_function_that_others_cannot_import():
    """Says what to do."""
    with pytest.raises(mm.errors.ProcessError, match="put it in a module of its own, or install cloudpickle"):
        mm.distributed.launch(lambda: 1, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("localhost:1234", 2, 2), "process_id has to be one of 0 to 1, found 2"),
        (("localhost:1234", 0, 0), "num_processes has to be a positive int, found 0"),
        (("localhost", 2, 0), "coordinator_address has to be 'host:port', found 'localhost'"),
        (("localhost:1234", 2, 0), "after JAX has looked for devices"),
    ],
)
def test_wrong_arguments_of_initialize(arguments, words):
    """Each says what is expected; too late is one of them, in a process that has its devices."""
    assert jax.devices()
    with pytest.raises(mm.errors.ProcessError, match=re.escape(words)):
        mm.distributed.initialize(*arguments)


def test_twice_is_once_too_often():
    """In a script of one process that was launched as one of one."""
    text = "import manymesh as mm; mm.distributed.initialize(); mm.distributed.initialize()"
    output = io.StringIO()
    code = run_processes([sys.executable, "-c", text], 2, output=output, timeout=300)
    assert code == 1
    assert "distributed.initialize is called twice" in output.getvalue()


def test_in_one_process_fetch_is_numpy():
    """Also of typed keys, and refuses a process that is not there."""
    assert mm.fetch(3) == 3
    with pytest.raises(mm.errors.ProcessError, match="process=1, but there are processes 0 to 0"):
        mm.fetch(3, process=1)


def test_strangers_are_cut_off():
    """Who does not know the token is not listened to, and its going is nobody's death."""
    one, two = Wires(0, "127.0.0.1"), Wires(1, "127.0.0.1")
    heard = []

    def poll():
        for wires in (one, two):
            wires.poll(0.05, lambda peer, message: heard.append((peer, message)))

    two.connect(0, one.address.replace(one.token, "0" * 32))
    for _ in range(4):
        poll()
    assert not one.has(1)
    two.connect(0, one.address)
    two.post(0, {"kind": "alive"})
    deadline = time.monotonic() + 5
    while not one.has(1) and time.monotonic() < deadline:
        poll()
    one.post(1, {"kind": "alive"})
    for _ in range(4):
        poll()
    assert one.has(1)
    assert (1, {"kind": "alive"}) in heard or (0, {"kind": "alive"}) in heard
    assert (1, None) not in heard
    for wires in (one, two):
        wires.close()
