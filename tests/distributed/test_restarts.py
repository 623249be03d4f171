"""Starting again: what follows on which end, what is left behind, and a training run that goes on as if nothing had been."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import manymesh as mm
from manymesh._cli import main
from manymesh._distributed import _launch
from manymesh._distributed._restarts import SOON, Ending, Restarts

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]

# Process 1 ends as the word of its attempt says; without a word all is well.
SCRIPT = """
import os, signal, sys, time
me, attempt = os.environ["MANYMESH_PROCESS"], int(os.environ["MANYMESH_RESTARTS"])
print("attempt", attempt, "of", os.environ["MANYMESH_PROCESSES"], "pid", os.getpid(), flush=True)
how = sys.argv[1 + attempt] if attempt < len(sys.argv) - 1 else ""
if how == "hang": time.sleep(100)
if me == os.environ.get("FAILS", "1"):
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    elif how: sys.exit(int(how))
"""


def attempts(output):
    """How many processes there were in each attempt; none of them is left."""
    found = re.findall(r"\[\d\] attempt (\d+) of (\d+) pid (\d+)", output)
    assert found and not any(os.path.exists(f"/proc/{pid}") for _, _, pid in found)
    counts = [[int(n) for attempt, n, _ in found if int(attempt) == a] for a in range(int(found[-1][0]) + 1)]
    assert all(len(numbers) == numbers[0] for numbers in counts), "every process said how many there are"
    return [numbers[0] for numbers in counts]


def test_all_are_started_again(script, capsys):
    """Each restart is one line on standard error, with the exit code and how many are left."""
    assert main(["launch", "-n", "2", "--max-restarts", "3", script, "kill", "7"]) == 0
    out, err = capsys.readouterr()
    assert attempts(out) == [2, 2, 2]
    assert [re.sub(r"after \d+ s", "after T", line) for line in err.splitlines()] == [
        "manymesh: exit code 137 after T (process 1 was killed by SIGKILL); all 2 processes are started again; "
        "restarts left: 2 of 3",
        "manymesh: exit code 7 after T (process 1 ended with exit code 7); all 2 processes are started again; "
        "restarts left: 1 of 3",
    ]


def test_no_more_often_than_asked_for(script, capsys):
    """And the exit code is that of the last attempt."""
    assert main(["launch", "-n", "2", "--max-restarts", "1", script, "7", "kill"]) == 137
    out, err = capsys.readouterr()
    assert attempts(out) == [2, 2]
    assert err.endswith("(process 1 was killed by SIGKILL); no restart is left of 1\n")


def test_a_mistake_in_the_script_is_not_tried_again_and_again(tmp_path, capsys):
    """A script that cannot even be read fails twice, and that is enough."""
    (tmp_path / "wrong.py").write_text("print('unfinished'")
    assert main(["launch", "-n", "2", "--max-restarts", "1000", str(tmp_path / "wrong.py")]) == 1
    out, err = capsys.readouterr()
    assert 2 <= out.count("SyntaxError") <= 4
    assert "failed twice in a row within 60 s; restarts left: 999 of 1000" in err
    assert err.count("\n") == 2


def test_without_restarts_nothing_is_said_of_them(script, capsys):
    """As ever."""
    assert main(["launch", "-n", "2", script, "7"]) == 7
    assert capsys.readouterr().err == ""


def test_on_fewer_processes(script, capsys, monkeypatch):
    """One fewer each time that one died, and none fewer than that."""
    monkeypatch.setenv("FAILS", "0")
    words = ["launch", "-n", "3", "--max-restarts", "5", "--min-processes", "2", script, "kill", "7", "kill"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert attempts(out) == [3, 2, 2, 2]
    assert err.count("all 2 processes are started again") == 3


def test_the_time_limit_is_for_all_attempts(script, capsys, monkeypatch):
    """And nothing follows it: an attempt that begins when the time is over is ended, however little it takes."""
    passed, after = 0.0, Restarts.after

    def later(*arguments):
        nonlocal passed
        passed = 1000.0
        return after(*arguments)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed, sleep=time.sleep)
    monkeypatch.setattr(_launch, "time", clock)
    monkeypatch.setattr(Restarts, "after", later)
    assert main(["launch", "-n", "2", "--timeout", "900", "--max-restarts", "9", script, "kill", "hang"]) == 124
    assert capsys.readouterr().err.count("\n") == 1
    assert passed, "the first attempt was not the last"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launch_starts_nothing_again(script, number):
    """Ctrl-C and SIGTERM, in the second attempt."""
    command = [sys.executable, "-m", "manymesh", "launch", "-n", "2", "--max-restarts", "9", script, "kill", "hang"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = ""
    try:
        while output.count("attempt 1") < 2:
            output += (line := child.stdout.readline())
            assert line, output
        child.send_signal(number)
        output += child.communicate(timeout=120)[0]
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130
    assert attempts(output) == [2, 2]


def test_pressing_ctrl_c_twice_leaves_nothing(tmp_path):
    """Processes that listen to neither SIGINT nor SIGTERM are killed at the second time, and not left alone."""
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import os, signal, time\nfor n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\n"
        "print('pid', os.getpid())\ntime.sleep(100)"
    )
    command = [sys.executable, "-m", "manymesh", "launch", "-n", "1", str(stubborn)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        pid = int(child.stdout.readline().split()[-1])
        child.send_signal(signal.SIGINT)
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=120)
    finally:
        child.kill()
        child.wait()
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-restarts", "-1"], "max_restarts has to be 0 or more, found -1"),
        (["--max-restarts", "2", "--min-processes", "3"], "min_processes has to be one of 1 to 2, found 3"),
        (["--max-restarts", "2", "--min-processes", "0"], "min_processes has to be one of 1 to 2, found 0"),
        (["--min-processes", "1"], "min_processes counts when processes are started again; give max_restarts too"),
    ],
)
def test_numbers_that_cannot_be_meant(script, capsys, options, says):
    """Are refused before anything starts."""
    assert main(["launch", "-n", "2", *options, script]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


KILLED = Ending(137, "process 1 was killed by SIGKILL", 1.0)
SILENT = Ending(75, "process 0 ended with exit code 75", 1.0)
FAILED = Ending(1, "process 0 ended with exit code 1", SOON - 1)
CRASHED = Ending(139, "process 0 was killed by SIGSEGV", 1.0)
LATE = Ending(1, "process 0 ended with exit code 1", SOON + 1)
OVER = Ending(124, "after 5 s process 0 still ran", 5.0, final=True)


@pytest.mark.parametrize(
    ("endings", "least", "expected"),
    [
        ([KILLED], None, 4),
        ([KILLED] * 3, None, 4),  # somebody kills: the script can do nothing for it
        ([SILENT] * 3, None, 4),
        ([KILLED] * 4, None, None),  # three were asked for
        ([FAILED], None, 4),
        ([FAILED, FAILED], None, None),
        ([CRASHED, FAILED], None, None),
        ([FAILED, KILLED, FAILED], None, 4),  # not in a row
        ([FAILED, LATE, FAILED], None, 4),  # it came further in between
        ([KILLED], 1, 3),
        ([SILENT], 4, 4),
        ([FAILED], 1, 4),  # an exception says nothing of a host
        ([OVER], None, None),
    ],
)
def test_what_follows(endings, least, expected):
    """How many processes are started again after which endings; three restarts and four processes."""
    assert Restarts(3, least).after(tuple(endings), 4)[0] == expected


def test_a_function_that_goes_on():
    """What it returns in the attempt that ends well, whose service is another one."""
    at_first = importlib.import_module("failing").fails_at_first
    assert mm.distributed.launch(at_first, 2, max_restarts=1, timeout=300) == [1, 1]


def test_training_goes_on_after_a_kill_as_if_nothing_had_been(monkeypatch, tmp_path):
    """Two processes, a random one of which is killed: the same bits as in one process that nobody disturbs, and each batch once."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    restarts, example = importlib.import_module("restarts"), importlib.import_module("resume_training")
    steps, every = 48, 4
    found = restarts.run(steps, 2, every, kills=[10], seed=0, timeout=400)
    assert (found.code, found.kills, found.restarts) == (0, 1, 1), found.output
    went_on = re.search(r"attempt 1: goes on after step (\d+) of 48", found.output)
    assert went_on and int(went_on[1]) and int(went_on[1]) % every == 0, found.output
    assert restarts.wrong_batches(found, steps) == (0, 0)
    assert found.batches == tuple(range(steps))
    with mm.checkpoint.Manager(tmp_path) as manager:
        assert manager.latest_step() is None
    params = example.train(tmp_path, steps, every, jax.devices()[:2])
    expected = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    assert restarts.same_bits(found.params, expected)
    assert all(np.isfinite(x).all() for x in expected.values())
