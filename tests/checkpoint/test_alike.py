"""Processes that do not save alike are told so, soon and by name; those that are only slow are waited for."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from manymesh._distributed._launch import run_processes

pytestmark = pytest.mark.once

SCRIPT = """
import sys, time
import jax, numpy as np
import manymesh as mm
from manymesh._checkpoint import _write
from manymesh._checkpoint._write import Writing
from manymesh.errors import CheckpointError

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

def manager(number):
    with mm.checkpoint.Manager(f"{folder}/run") as m:
        m.save(number, p)

def slow(owner, name):
    before = getattr(owner, name)
    def slowly(*args, **kwargs):
        time.sleep(4.0 * me)
        return before(*args, **kwargs)
    setattr(owner, name, slowly)
    return lambda: setattr(owner, name, before)

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
    says("in checkpoint.save of", "process 1 (submesh 1) is not", "not come to it for 3 s", save=late)
else:
    says("because of process 0", "not come to it for 3 s", save=late)

if me == 0:  # the mistake that is made most often
    says("checkpoint.save", "process 1", "is not: it has gone on, and is in", "not process 0 alone",
         save=lambda: mm.checkpoint.save(f"{folder}/one", p))
mm.fetch(step(np.ones(4, "f"), np.ones(4, "f")))
print("done")
"""


def test_processes_that_do_not_save_alike(tmp_path) -> None:
    """Other names, other steps, a save that one process cannot make, one that only one makes; and saves that are slow.

    Once a process ends behind its last save, and once it goes on; side by side, as they mostly wait.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = {"PYTHONPATH": ":".join(p for p in sys.path if p)}

    def run(end: str) -> tuple[int, str]:
        output = io.StringIO()
        command = [sys.executable, str(script), str(tmp_path / end), end]
        return run_processes(command, 2, 1, output=output, timeout=200, more=paths), output.getvalue()

    with ThreadPoolExecutor(2) as pool:
        for code, output in pool.map(run, ("ends", "goes")):
            assert code == 0, output
            assert output.count("done") == 2
