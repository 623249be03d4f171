"""The manager: which checkpoints there are, what is saved beside the loop, and what a kill leaves.

    python tests/checkpoint/test_manager.py 100

kills so many processes while they save.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh._checkpoint import _write
from manymesh._checkpoint._format import ASIDE
from manymesh._checkpoint._store import Database
from manymesh.errors import CheckpointError

pytestmark = pytest.mark.once

MESH = Mesh(np.array(jax.devices()[:2]), ("x",))
ON_TWO = NamedSharding(MESH, P("x"))


def state_of(step):
    return {"w": jax.device_put(jnp.full((4, 2), step, jnp.float32), ON_TWO), "step": step}


def restored(manager, step=None):
    state = manager.restore(step, like=state_of(0))
    assert state["w"].sharding == ON_TWO and np.unique(state["w"]).tolist() == [state["step"]]
    return state["step"]


def test_steps_that_are_kept(tmp_path) -> None:
    """Every tenth is saved, the last three stay, one more is forced; the position in the data is beside each."""
    with mm.checkpoint.Manager(tmp_path, max_to_keep=3, save_interval_steps=10) as manager:
        assert manager.latest_step() is None and manager.all_steps() == []
        saved = [step for step in range(46) if manager.save(step, state_of(step), metadata={"batch": [step, 8]})]
        assert saved == [0, 10, 20, 30, 40] and manager.should_save(50) and not manager.should_save(51)
        assert manager.save(45, state_of(45), force=True)
    assert manager.all_steps() == [30, 40, 45] and manager.latest_step() == 45
    assert sorted(os.listdir(tmp_path)) == ["30", "40", "45"]
    assert [restored(manager, step) for step in (30, None, 40)] == [30, 45, 40]
    assert manager.metadata(40) == {"batch": [40, 8]} and manager.metadata() is None
    manager.delete(45)
    assert mm.checkpoint.Manager(tmp_path).latest_step() == 40


@pytest.mark.parametrize("count", [1, 2, 5])
def test_so_many_are_kept(count, tmp_path) -> None:
    """All of the first ones, then the newest."""
    with mm.checkpoint.Manager(tmp_path, max_to_keep=count) as manager:
        for step in range(7):
            manager.save(step, {"step": step})
            manager.wait_until_finished()
            assert manager.all_steps() == list(range(step + 1))[-count:]


def test_going_on_from_an_older_step_keeps_what_is_new(tmp_path) -> None:
    """Whatever its number, the checkpoint that was saved last stays."""
    with mm.checkpoint.Manager(tmp_path, max_to_keep=2) as manager:
        for step in (10, 20, 11):
            manager.save(step, state_of(step))
    assert manager.all_steps() == [11, 20]


def test_saving_goes_on_beside_the_next_steps_which_may_donate(tmp_path, monkeypatch) -> None:
    """`save` returns before anything is written; what it was given is then overwritten by steps that it was donated to."""
    may_write = threading.Event()
    commit = Database.commit

    def commit_later(self):
        may_write.wait(60)
        commit(self)

    monkeypatch.setattr(Database, "commit", commit_later)
    step = jax.jit(lambda state: {"w": state["w"] + 1, "step": state["step"] + 1}, donate_argnums=0)
    manager = mm.checkpoint.Manager(tmp_path)
    first = state = state_of(3)
    manager.save(3, state)
    for _ in range(3):
        state = step(state)
    assert (
        mm.checkpoint.Manager(tmp_path).latest_step() is None and int(state["step"]) == 6
    )  # another one knows nothing
    may_write.set()
    manager.wait_until_finished()
    assert restored(manager) == 3
    assert (
        first["w"].is_deleted() and manager.restore(like=first)["w"].sharding == ON_TWO
    )  # it still says what and where


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m.latest_step(),
        lambda m: m.all_steps()[-1],
        lambda m: m.metadata(),
        lambda m: m.metadata(3),
        restored,
        lambda m: restored(m, 3),
    ],
    ids=["latest_step", "all_steps", "metadata", "metadata of it", "restore", "restore it"],
)
@pytest.mark.parametrize("before", [(), (2,)], ids=["the first", "a later one"])
def test_what_asks_for_checkpoints_waits_for_the_one_that_is_written(ask, before, tmp_path, monkeypatch) -> None:
    manager = mm.checkpoint.Manager(tmp_path)
    for step in before:
        manager.save(step, state_of(step), metadata=step)
    manager.wait_until_finished()
    commit = Database.commit
    monkeypatch.setattr(Database, "commit", lambda self: (time.sleep(0.2), commit(self)))
    manager.save(3, state_of(3), metadata=3)
    assert ask(manager) == 3


def test_steps_that_are_arrays(tmp_path) -> None:
    """The counter of a state is one, of NumPy or JAX."""
    steps = [np.int64(0), np.uint8(1), jnp.int32(2), np.asarray(3), jax.device_put(jnp.asarray(4), jax.devices()[1])]
    with mm.checkpoint.Manager(tmp_path, max_to_keep=np.int64(4), save_interval_steps=jnp.int32(1)) as manager:
        for number, step in enumerate(steps):
            assert manager.should_save(step) is True and manager.save(step, state_of(number), metadata=number)
    assert manager.all_steps() == [1, 2, 3, 4]
    for number, step in list(enumerate(steps))[1:]:
        assert restored(manager, step) == manager.metadata(step) == number
        manager.delete(step)
    assert manager.all_steps() == []


def test_several_threads_may_save(tmp_path) -> None:
    """Each waits for the others; none is lost."""
    with mm.checkpoint.Manager(tmp_path) as manager, ThreadPoolExecutor(8) as pool:
        saved = list(pool.map(lambda step: manager.save(step, {"w": np.full(3, step)}), range(16)))
    assert all(saved) and manager.all_steps() == list(range(16))
    assert [manager.restore(step)["w"][0] for step in range(16)] == list(range(16))


@pytest.mark.parametrize("restore", [True, False])
def test_what_was_given_up_goes_first(restore, tmp_path) -> None:
    """A run that goes on from an earlier step keeps that, and where it is, and loses the later ones that it did not go on from."""
    with mm.checkpoint.Manager(tmp_path, max_to_keep=3) as manager:
        for step in (600, 800, 1000):
            manager.save(step, state_of(step))
        if restore:
            manager.restore(600)
        for step, kept in [(700, [600, 700, 800]), (710, [600, 700, 710]), (720, [700, 710, 720])]:
            manager.save(step, state_of(step))
            if restore:
                assert manager.all_steps() == kept
    assert restore or manager.all_steps() == [720, 800, 1000]


def test_looking_at_an_earlier_step_gives_nothing_up(tmp_path) -> None:
    """Nor does starting to count anew from the last one."""
    with mm.checkpoint.Manager(tmp_path, max_to_keep=2) as manager:
        for step in (800, 1000):
            manager.save(step, state_of(step))
        manager.restore(800)
        manager.save(1200, state_of(1200))
        assert manager.all_steps() == [1000, 1200]
        manager.restore()
        manager.save(1, state_of(1))
        assert manager.all_steps() == [1, 1200]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_old_step_that_cannot_be_removed_is_named(asynchronous, monkeypatch, tmp_path) -> None:
    """The new one is saved, and the message says so."""
    manager = mm.checkpoint.Manager(tmp_path, max_to_keep=1, asynchronous=asynchronous)
    manager.save(1, state_of(1))
    manager.wait_until_finished()
    with monkeypatch.context() as patch:

        def refuse(path):
            raise PermissionError(f"cannot remove {path}")

        patch.setattr(shutil, "rmtree", refuse)
        words = r"^.*2 is saved, but .*1, beyond max_to_keep, could not be removed: cannot remove"
        with pytest.raises(CheckpointError, match=words):
            manager.save(2, state_of(2))
            manager.wait_until_finished()
    assert restored(manager, 2)
    manager.close()


def test_steps_may_be_links_to_a_larger_disk(tmp_path) -> None:
    """They are restored as others, and when they are to be removed, the link goes."""
    directory, archive = tmp_path / "run", tmp_path / "archive"
    archive.mkdir()
    with mm.checkpoint.Manager(directory, max_to_keep=2) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
            manager.wait_until_finished()
            (directory / str(step)).rename(archive / str(step))
            (directory / str(step)).symlink_to(archive / str(step))
        assert [restored(manager, step) for step in manager.all_steps()] == [1, 2]
        manager.save(3, state_of(3))
        assert manager.all_steps() == [2, 3]
        manager.delete(2)
    assert os.listdir(directory) == ["3"] and sorted(os.listdir(archive)) == ["1", "2"]


def test_what_is_saved_beside_the_steps_is_left_alone(tmp_path, monkeypatch) -> None:
    """The first save of a manager removes what is left of steps, and not what another thread writes under a name of its own."""
    (tmp_path / f"3{ASIDE}-1").mkdir()
    begun, ended = threading.Event(), threading.Event()
    commit = Database.commit

    def slowly(self):
        commit(self)
        if threading.current_thread().name == "best_0":
            begun.set()
            assert ended.wait(60)

    monkeypatch.setattr(Database, "commit", slowly)
    with ThreadPoolExecutor(1, "best") as pool:
        saving = pool.submit(mm.checkpoint.save, tmp_path / "best", state_of(7))
        assert begun.wait(60)
        with mm.checkpoint.Manager(tmp_path) as manager:
            manager.save(1, state_of(1))
        ended.set()
        saving.result()
    assert sorted(os.listdir(tmp_path)) == ["1", "best"]
    assert mm.checkpoint.restore(tmp_path / "best", state_of(0))["step"] == 7


def test_at_the_end_of_a_program_the_last_save_is_waited_for(tmp_path) -> None:
    code = (
        "import sys, jax.numpy as jnp, manymesh as mm; "
        "mm.checkpoint.Manager(sys.argv[1]).save(1, {'w': jnp.ones((512, 512))})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300)
    assert mm.checkpoint.Manager(tmp_path).restore(like={"w": np.zeros((512, 512), np.float32)})["w"].min() == 1


def no_space(self: Database) -> None:
    raise OSError("no space left on device")


def test_at_the_end_of_a_program_a_last_save_that_failed_is_said(tmp_path) -> None:
    code = (
        "import resource, sys, jax.numpy as jnp, manymesh as mm; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
        "mm.checkpoint.Manager(sys.argv[1]).save(1, {'w': jnp.ones((512, 512))})"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300, stderr=subprocess.PIPE)
    assert b"was not saved" in run.stderr and b"close()" in run.stderr


def test_what_a_save_that_failed_left_is_removed_by_the_next_one(tmp_path, monkeypatch) -> None:
    """On a full disk what each left would stay, and no later one would find room."""
    manager = mm.checkpoint.Manager(tmp_path)
    manager.save(1, state_of(1))
    manager.wait_until_finished()
    for step in (2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(Database, "commit", no_space)
            manager.save(step, state_of(step))
            with pytest.raises(CheckpointError, match="was not saved"):
                manager.wait_until_finished()
        assert sorted(os.listdir(tmp_path)) == ["1", f"{step}{_write.ASIDE}"]
    manager.save(4, state_of(4))
    assert manager.all_steps() == [1, 4] and sorted(os.listdir(tmp_path)) == ["1", "4"]


def test_what_goes_wrong_in_the_thread_is_raised_by_the_next_call(tmp_path, monkeypatch) -> None:
    manager = mm.checkpoint.Manager(tmp_path)
    manager.save(1, state_of(1))
    manager.wait_until_finished()
    with monkeypatch.context() as patch:
        patch.setattr(Database, "commit", no_space)
        manager.save(2, state_of(2))
        with pytest.raises(mm.errors.CheckpointError, match=r"was not saved: no space left on device"):
            manager.wait_until_finished()
    manager.wait_until_finished()  # said once
    with monkeypatch.context() as patch:
        patch.setattr(Database, "commit", no_space)
        seldom = mm.checkpoint.Manager(tmp_path, save_interval_steps=2)
        seldom.save(2, state_of(2))
        while seldom._thread.is_alive():
            time.sleep(0.01)
        with pytest.raises(mm.errors.CheckpointError, match=r"was not saved: no space left on device"):
            seldom.save(3, state_of(3))  # though it is not due
    assert manager.all_steps() == [1]
    with manager:
        manager.save(2, state_of(2))
    assert restored(manager) == 2 and sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_an_error_in_the_loop_stays_the_error(tmp_path) -> None:
    with pytest.raises(ZeroDivisionError), mm.checkpoint.Manager(tmp_path) as manager:
        manager.save(1, state_of(1))
        1 / 0  # noqa: B018  # the error is the test
    assert restored(manager) == 1


# --- kills --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing that `except Exception` could tidy up after."""


def test_a_kill_at_any_call_to_the_file_system_loses_nothing(tmp_path, monkeypatch) -> None:
    """The process stops before its first such call, its second, and so on: the checkpoint before is there each time."""
    calls = [(os, "rename"), (os, "mkdir"), (os, "fsync"), (os, "rmdir"), (os, "unlink"), (json, "dump")]
    calls.append((Database, "commit"))
    count, at = 0, 0
    for owner, name in calls:
        original = getattr(owner, name)

        def call(*args, original=original, **kwargs):
            nonlocal count
            count += 1
            if count == at:
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
    before, found, killed = 0, set(), True
    while killed:
        at, killed, count = at + 1, False, -1000
        mm.checkpoint.Manager(tmp_path, max_to_keep=1, asynchronous=False).save(before, state_of(before))
        count = 0
        try:
            mm.checkpoint.Manager(tmp_path, max_to_keep=1, asynchronous=False).save(before + 1, state_of(before + 1))
        except Killed:
            killed = True
        there = [restored(mm.checkpoint.Manager(tmp_path), k) for k in mm.checkpoint.Manager(tmp_path).all_steps()]
        latest = there[-1]
        assert latest in (before, before + 1)
        found.add((latest - before, killed))
        before += 2
    assert at > 10 and found == {(0, True), (1, True), (1, False)}  # killed before the rename, after it, and no more


WORKER = """
import sys, jax, jax.numpy as jnp, manymesh as mm
manager = mm.checkpoint.Manager(sys.argv[1], max_to_keep=2)
step = manager.latest_step() or 0
print("ready", flush=True)
while True:
    step += 1
    state = {str(i): jnp.full((256, 256), step + i, jnp.float32) for i in range(8)}
    manager.save(step, state, metadata=step)
    manager.wait_until_finished()
    print(step, flush=True)
"""


def check_after_kills(directory: Path, kills: int, seed: int) -> None:
    """Kills a process that saves without end, again and again; each time the last checkpoint is whole and none was lost."""
    draw = random.Random(seed)
    for _ in range(kills):
        worker = subprocess.Popen([sys.executable, "-c", WORKER, directory], stdout=subprocess.PIPE, text=True)
        try:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
            time.sleep(draw.uniform(0, 0.5))
        finally:
            worker.send_signal(signal.SIGKILL)
            said = re.findall(r"\d+\n", worker.communicate(timeout=300)[0])
        manager = mm.checkpoint.Manager(directory)
        latest = manager.latest_step()
        assert latest is not None or not said
        if latest is not None:
            assert latest >= max(map(int, said), default=0) and manager.metadata() == latest
            for step in manager.all_steps():
                for name, x in manager.restore(step).items():
                    assert x.shape == (256, 256) and np.unique(x).tolist() == [step + int(name)]


def test_killed_while_saving(tmp_path) -> None:
    check_after_kills(tmp_path, 2, seed=0)


def test_a_save_removes_what_a_killed_one_left(tmp_path) -> None:
    """What another process may be writing is left alone until this one saves."""
    left = tmp_path / ("7" + _write.ASIDE)
    left.mkdir()
    manager = mm.checkpoint.Manager(tmp_path)
    assert manager.all_steps() == [] and left.exists()
    with manager:
        manager.save(8, state_of(8))
    assert os.listdir(tmp_path) == ["8"]


def test_managers_of_one_directory_leave_each_other_alone(tmp_path, monkeypatch) -> None:
    """As when a cell of a notebook makes the manager anew while the last checkpoint is still being written."""
    begun, go_on, commit = threading.Event(), threading.Event(), Database.commit

    def slowly(self: Database) -> None:
        begun.set()
        assert go_on.wait(30)
        commit(self)

    monkeypatch.setattr(Database, "commit", slowly)
    with mm.checkpoint.Manager(tmp_path) as one, mm.checkpoint.Manager(tmp_path) as other:
        one.save(1, state_of(1))
        assert begun.wait(30)
        with pytest.raises(CheckpointError, match="1 is being saved already"):
            mm.checkpoint.Manager(tmp_path, asynchronous=False).save(1, state_of(1))
        other.save(2, state_of(2))
        time.sleep(0.1)
        go_on.set()
        one.wait_until_finished()
        assert [restored(other, step) for step in (1, 2)] == [1, 2]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import conftest  # noqa: F401  # devices, before JAX starts its backend

    with tempfile.TemporaryDirectory() as directory:
        check_after_kills(Path(directory), int(sys.argv[1]), seed=1)
        print(
            f"{sys.argv[1]} kills, none lost a checkpoint; {mm.checkpoint.Manager(directory).latest_step()} were saved"
        )
