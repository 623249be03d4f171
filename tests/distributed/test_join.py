"""Joining the others: what each process hears where they were told different things, do not come, or are not reached."""

import collections
import json
import queue
from concurrent.futures import ThreadPoolExecutor

import pytest

from manymesh._distributed._join import agree_on_start, connect, wait_for_neighbour
from manymesh._distributed._wires import Wires
from manymesh._distributed._world import World
from manymesh.errors import ProcessError

pytestmark = pytest.mark.once


class Beside(World):
    """One of several processes that share a dictionary."""

    def __init__(self, process, count, asked, shared, wires=None):
        super().__init__(process, count, wires, "127.0.0.1", 1, 1, asked)
        self.shared = shared

    def write(self, key, value):
        self.shared[key].put(value)

    def read(self, key, timeout=None, check=None):
        try:
            value = self.shared[key].get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(key) from None
        self.shared[key].put(value)
        return value


def said(*told, timeout=20.0):
    """What each of several processes says, by the number of processes and the transport that it was told; None where it goes on."""
    shared = collections.defaultdict(queue.Queue)

    def agree(process):
        try:
            agree_on_start(Beside(process, *told[process], shared), timeout)
        except ProcessError as error:
            return str(error)
        return None

    with ThreadPoolExecutor() as pool:
        return list(pool.map(agree, range(len(told))))


def test_all_were_told_the_same():
    """Else each process says so, and what differs."""
    assert said((3, "pull"), (3, "pull"), (3, "pull")) == [None] * 3
    words = (
        "distributed.initialize: process 1 was told num_processes=4, process 0 was told 3; give all of them the same"
    )
    assert said((3, None), (4, None), (3, None)) == [words] * 3
    for words in said((2, None), (2, "pull")):
        assert "process 0 for that of its backend, process 1 for 'pull'; give all of them the same transport=" in words


def test_one_that_does_not_come():
    """Each of the others says which, and what to look at."""
    words = (
        "distributed.initialize: process 2 did not come to it within 0.1 s, but to the coordinator; look at what it prints, and "
        "call manymesh.distributed.initialize() in every process, also below a jax.distributed.initialize() of the script"
    )
    assert said((3, None), (3, None), timeout=0.1) == [words] * 2
    (words,) = said((3, None), timeout=0.1)
    assert words.startswith("distributed.initialize: processes 1, 2 did not come to it within 0.1 s")


def test_one_that_is_not_reached():
    """By an address that nobody listens at, or by none; and one that does not come from its side."""
    wires, gone = Wires(0, "127.0.0.1"), Wires(1, "127.0.0.1")
    gone.close()
    world = Beside(0, 2, None, collections.defaultdict(queue.Queue), wires)
    with pytest.raises(ProcessError, match=r"process 1 did not come to it within 0.1 s"):
        connect(world, 0.1)
    world.write("wire/1", json.dumps([gone.host, gone.port, gone.token]))
    with pytest.raises(
        ProcessError, match=rf"process 0 does not reach process 1 at 127.0.0.1, port {gone.port} \(.*refused"
    ):
        connect(world, 0.1)
    with pytest.raises(
        ProcessError, match=rf"process 1 did not reach process 0 at 127.0.0.1, port {wires.port}, within"
    ):
        wait_for_neighbour(world, 0.1)
    wires.close()
