"""Which launch waits for which, told with arrays that only say when they are waited for."""

import os
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manymesh._distributed import _initialize
from manymesh._runtime._launches import LAUNCHES, Handle, Launches

pytestmark = pytest.mark.once


class Result:
    """A result that becomes ready when somebody waits for it."""

    def __init__(self, name, waited):
        self.name, self.waited, self.ready, self.deleted = name, waited, False, False

    def is_deleted(self):
        return self.deleted

    def is_ready(self):
        assert not self.deleted
        return self.ready

    def block_until_ready(self):
        assert not self.deleted
        if not self.ready:
            self.waited.append(self.name)
        self.ready = True


class Machine:
    """Launches by name."""

    def __init__(self, ordered=True):
        self.launches, self.waited, self.handles = Launches(ordered), [], {}

    def run(self, name, *devices, takes=()):
        """Launches something on devices, that takes what others have made."""
        mesh = Mesh(np.array([jax.devices()[k] for k in devices]), ("x",))
        handle = self.handles[name] = Handle()
        taken = [self.handles[t] for t in takes]
        results = [h.launch.witness for h in taken]

        def call():
            for r in results:
                r.deleted = True
            return Result(name, self.waited)

        return self.launches.counted(call, name, lambda r: r, mesh, handle, taken)()


def test_collectives_on_the_same_devices_follow_each_other():
    """Those on other devices, and what holds none, do not wait."""
    machine = Machine()
    machine.run("a", 0, 1)
    machine.run("b", 2, 3)
    machine.run("narrow", 0)
    assert machine.waited == []
    machine.run("c", 1, 2)
    assert machine.waited == ["a", "b"]
    machine.launches.settle()
    assert machine.waited == ["a", "b", "c"]
    assert machine.launches.unfinished() == ["narrow"]


def test_where_collectives_have_an_order_nothing_waits():
    """On GPU and TPU."""
    machine = Machine(ordered=False)
    for name in "abc":
        machine.run(name, 0, 1)
    machine.launches.settle()
    assert machine.waited == []


def test_no_more_than_a_window_is_unfinished():
    """The oldest is waited for."""
    machine = Machine()
    for k in range(LAUNCHES + 3):
        machine.run(k, 0)
    assert machine.waited == [0, 1, 2]
    assert machine.launches.unfinished() == list(range(3, LAUNCHES + 3))


def test_several_threads_wait_for_the_same_launch():
    """All of them go on when it is finished, and none takes another one out of the window for it."""
    errors = []
    meeting = threading.Barrier(3, timeout=30)
    machine = Machine(ordered=False)
    machine.launches = launches = Launches(ordered=False, most=2, apart=[frozenset({0})])
    machine.run("a", 0)
    machine.run("b", 0)
    first = launches._all()[0].witness
    ready = first.block_until_ready
    first.block_until_ready = lambda: (meeting.wait(), ready())

    def launch(k):
        try:
            machine.run(k, 0)
        except Exception as error:
            errors.append(error)

    started = [threading.Thread(target=launch, args=(k,)) for k in range(3)]
    for t in started:
        t.start()
    for t in started:
        t.join()
    assert errors == []


def test_a_launch_whose_results_are_used_up_is_finished_with_its_taker():
    """A chain of accumulations counts as many as it has launches, and the last of them is waited for."""
    machine = Machine()
    machine.run(0, 0)
    for k in range(1, LAUNCHES):
        machine.run(k, 0, takes=[k - 1])
    assert machine.launches.unfinished() == list(range(LAUNCHES))
    machine.run("other", 0)
    assert machine.waited == [LAUNCHES - 1]
    assert machine.launches.unfinished() == ["other"]


def test_an_array_of_which_a_later_call_took_all_but_the_first_shard():
    """JAX says of it that it is there, and fails when it is waited for; an array that holds an error is another matter."""
    devices, launches = jax.devices()[:2], Launches(True)
    mesh = Mesh(np.array(devices), ("x",))
    pieces = [jax.device_put(np.zeros(()), d) for d in devices]
    shared = jax.make_array_from_single_device_arrays((), NamedSharding(mesh, PartitionSpec()), pieces)
    shared.addressable_shards[1].data.delete()
    assert not shared.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        shared.block_until_ready()
    waited = []
    launches.counted(lambda: shared, "shared", lambda r: r, mesh)()
    launches.counted(lambda: Result("later", waited), "later", lambda r: r, mesh)()
    launches.settle()
    assert waited == ["later"]
    assert launches.missing() == []


def test_results_that_a_later_call_took():
    """Nobody can tell when that is finished; what was launched last can."""
    machine = Machine()
    first = machine.run("first", 0)
    first.deleted = True
    machine.run("second", 0)
    for k in range(LAUNCHES - 2):
        machine.run(k, 0)
    machine.run("late", 0)
    assert machine.waited == [LAUNCHES - 3]


def test_a_process_that_launches_nothing_keeps_no_more_than_two_windows():
    """Scalars of others come with every call."""
    machine = Machine()
    for k in range(3 * LAUNCHES):
        machine.launches.watch(Result(k, machine.waited))
    assert len(machine.launches.unfinished()) == 2 * LAUNCHES
    assert machine.waited == []


def test_failed_results_are_missing():
    """They are ready, and have no value."""
    machine = Machine()
    result = machine.run("a", 0)
    machine.run("b", 0).ready = True
    result.ready = True

    def fail():
        raise RuntimeError

    result.block_until_ready = fail
    assert machine.launches.missing() == ["a"]


@pytest.mark.parametrize(("said", "expected"), [("", "6"), ("1", "6"), ("64", "64")])
def test_more_threads_than_devices(monkeypatch, said, expected):
    """XLA reads NPROC when its backend starts; a larger number stays as it is."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    monkeypatch.setenv("NPROC", said)
    monkeypatch.setattr(_initialize.os, "cpu_count", lambda: 2)
    _initialize._widen_pool()
    assert os.environ["NPROC"] == expected
