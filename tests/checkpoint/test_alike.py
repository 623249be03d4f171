"""Processes that do not save or restore alike are told so, soon and by name; those that are only slow are waited for."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from manymesh._distributed._launch import run_processes

pytestmark = pytest.mark.once

BOTH = """
import shutil, sys, time
import jax, numpy as np
import manymesh as mm
from manymesh._checkpoint import _manager, _write
from manymesh._checkpoint._read import Reading
from manymesh._checkpoint._write import Writing
from manymesh.errors import ArgumentError, CheckpointError, CheckpointNotFoundError

mm.distributed.initialize(stall_timeout=3.0, death_timeout=0.5)
me, folder = jax.process_index(), sys.argv[1]
front, back = (mm.task(lambda w, x: w * x, name, devices=[d]) for d, name in enumerate(("front", "back")))
step = mm.jit(lambda w, x: {"a": front(w, x), "b": back(w, x)})
p = step(np.ones(4, "f"), np.ones(4, "f"))

def says(*words, save):
    begin = time.monotonic()
    try:
        save()
    except CheckpointError as error:
        assert all(w in str(error) for w in words), str(error)
        assert "all processes" in str(error) or "every process" in str(error), str(error)
        return print("raised after", time.monotonic() - begin)
    raise AssertionError(f"nothing was said of {words}")

def slow(owner, name):
    before = getattr(owner, name)
    def slowly(*args, **kwargs):
        time.sleep(4.0 * me)
        return before(*args, **kwargs)
    setattr(owner, name, slowly)
    return lambda: setattr(owner, name, before)
"""

SAVE = """
def manager(number):
    with mm.checkpoint.Manager(f"{folder}/run") as m:
        m.save(number, p)

other = f"process {me} saves {folder}", f"while process {1 - me} saves {folder}/"
says(*other, "nothing was saved", save=lambda: mm.checkpoint.save(f"{folder}/{me}", p))
says(*other, "a checkpoint in", save=lambda: manager(7 + me))

try:
    mm.checkpoint.save(f"{folder}/wrong", {**p, **({"tag": "x"} if me else {})})
except CheckpointError as error:
    assert ("because of process 1: CheckpointError" in str(error)) == (me == 0) and "tag is str" in str(error), str(error)

undo = slow(Writing, "_write") if sys.argv[2] == "goes" else slow(_write, "snapshot")
mm.checkpoint.save(f"{folder}/slow", p)
undo()
step(np.ones(4, "f"), np.ones(4, "f"))
assert sorted(mm.checkpoint.restore(f"{folder}/slow")) == ["a", "b"]

if sys.argv[2] == "ends":
    if me == 0:
        says("checkpoint.save", "process 1", "its script has ended", save=lambda: mm.checkpoint.save(f"{folder}/one", p))
    print("done")
    sys.exit()
late = lambda: (time.sleep(4.5 * me), mm.checkpoint.save(f"{folder}/late", p))
if me == 0:
    says("in checkpoint.save of", "process 1 (submesh 1) is not", "not come to it for 3 s", "larger stall_timeout=", save=late)
else:
    says("because of process 0", "not come to it for 3 s", save=late)

if me == 0:  # the mistake that is made most often
    says("checkpoint.save", "process 1", "is not: it has gone on, and is in", "not process 0 alone",
         save=lambda: mm.checkpoint.save(f"{folder}/one", p))
mm.fetch(step(np.ones(4, "f"), np.ones(4, "f")))
print("done")
"""

RESTORE = """
def value(state):
    return float(mm.fetch(state["a"])[0]), float(mm.fetch(state["b"])[0])

manager = mm.checkpoint.Manager(f"{folder}/run", max_to_keep=3)
for number in range(1, 5):
    p = step(np.ones(4, "f"), np.full(4, number, "f"))
    manager.save(number, p)
    if number > 2:
        time.sleep(0.1 * (1 - me))  # process 0 comes later, when the save may be over
        assert manager.latest_step() == number
        assert value(manager.restore(like=p)) == (number, number)
assert manager.all_steps() == [2, 3, 4]

says(f"process 0 restores {folder}/run/2, while process 1 restores {folder}/run/3", "nothing was restored",
     save=lambda: manager.restore(2 + me, like=p))
says(f"process 0 restores {folder}/run/2, while process 1 restores {folder}/run/3",
     save=lambda: mm.checkpoint.restore(f"{folder}/run/{2 + me}", p))
shutil.copytree(f"{folder}/run/3", f"{folder}/copy {me}")
assert value(mm.checkpoint.restore(f"{folder}/copy {me}", p)) == (3, 3)

try:
    manager.restore([3, 9][me], like=p)
    raise AssertionError("there is none")
except CheckpointNotFoundError as error:
    assert me == 1 and f"{folder}/run/9: there is no checkpoint" in str(error), str(error)
except CheckpointError as error:
    assert me == 0 and "nothing was restored, because of process 1: CheckpointNotFoundError" in str(error), str(error)

def damaged(reading, started):
    if me == 1 and reading.leaf.name == ("b",):
        raise CheckpointError("b cannot be read")
    return finish(reading, started)

finish, Reading.finish = Reading.finish, damaged
try:
    manager.restore(4, like=p)
    raise AssertionError("a part is damaged")
except CheckpointError as error:
    assert ("/run/4: nothing was restored, because of process 1: CheckpointError: b cannot" in str(error)) == (me == 0), str(error)
Reading.finish = finish
assert value(manager.restore(3, like=p)) == (3, 3)  # as both go on from an earlier one

undo = slow(Reading, "finish")  # longer than stall_timeout
begin = time.monotonic()
manager.restore(like=p)
assert time.monotonic() - begin > 4
undo()

try:
    assert manager.should_save(p["a"][0].astype(int)) and me == 0
except ArgumentError as error:
    assert me == 1 and "step is an array on devices of other processes" in str(error) and "manymesh.fetch" in str(error)

begin = time.monotonic()
if me == 0:  # what is its own, or on the host
    assert sorted(manager.restore()) == ["a", "b"] and manager.latest_step() == 4 and manager.metadata() is None
    assert float(manager.restore(2, like={"a": p["a"]})["a"][0]) == 2
    assert manager.restore(like={"b": np.zeros(4, "f")})["b"][0] == 4
    assert time.monotonic() - begin < 2
    says("process 0 is in checkpoint.restore of", "process 1 (submesh 1) is not: it has gone on, and is in", "alone",
         save=lambda: manager.restore(like=p))
mm.fetch(step(np.ones(4, "f"), np.ones(4, "f")))
if me == 1:  # hears of it, and is at one with process 0 again
    says("because of process 0", save=lambda: manager.restore(like=p))

time.sleep(0.2 * (1 - me))
for number in manager.all_steps():  # back to an earlier step
    if number > 2:
        manager.delete(number)
assert value(manager.restore(2, like=p)) == (2, 2) and manager.all_steps() == [2]
manager.save(3, p)
assert manager.all_steps() == [2, 3]

remove = _manager._remove
def slowly(path):
    time.sleep(0.5)
    remove(path)
_manager._remove = slowly
manager.delete(3)  # which process 0 does, and process 1 sees
assert manager.latest_step() == 2
manager.save(3, p)
assert manager.latest_step() == 3
if me == 1:
    says("process 0 has not removed it for 3 s", save=lambda: manager.delete(3))
print("done")
"""


def test_processes_that_do_not_save_alike(tmp_path) -> None:
    """Other names, other steps, a save that one process cannot make, one that only one makes; and saves that are slow.

    Once a process ends behind its last save, and once it goes on; side by side, as they mostly wait.
    """
    with ThreadPoolExecutor(2) as pool:
        for code, output in pool.map(lambda end: run(BOTH + SAVE, tmp_path, end), ("ends", "goes")):
            assert code == 0, output
            assert output.count("done") == 2


def test_processes_that_do_not_restore_alike(tmp_path) -> None:
    """Another step, one that is not there or cannot be read in one process, a restore of one alone, and slow ones.

    What is asked right after a save is that save, in every process; what is of one process, it restores alone.
    """
    code, output = run(BOTH + RESTORE, tmp_path, "both")
    assert code == 0, output
    assert output.count("done") == 2


def run(text: str, folder: Path, end: str) -> tuple[int, str]:
    """Runs a script in two processes; gives the exit code and what they print."""
    script, output = folder / f"{end}.py", io.StringIO()
    script.write_text(text)
    command = [sys.executable, str(script), str(folder / end), end]
    paths = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    return run_processes(command, 2, 1, output=output, timeout=200, more=paths), output.getvalue()
