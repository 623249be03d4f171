"""Executables that several threads ask for at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from jax.sharding import Mesh

from manymesh._runtime._compile import Executables

pytestmark = pytest.mark.once


def finished(request, future):
    """What a request returns."""
    with pytest.raises(StopIteration) as end:
        request.send(future.result())
    return end.value.value


def test_what_another_thread_compiles_stays():
    """A thread that is ready first drops nothing of one that still compiles: the next call finds it."""
    executables, mesh, go_on = Executables(), Mesh(jax.devices()[:1], ("x",)), threading.Event()
    with ThreadPoolExecutor() as mine, ThreadPoolExecutor() as others:
        slow = executables.request(others, "slow", mesh, lambda: lambda: go_on.wait() and "slow")
        fast = executables.request(mine, "fast", mesh, lambda: lambda: "fast")
        compiling = next(slow)
        assert finished(fast, next(fast)) == "fast"
        executables.settle(mine)
        go_on.set()
        assert finished(slow, compiling) == "slow"
        executables.settle(others)
        again = executables.request(mine, "slow", mesh, lambda: lambda: "twice")
        assert finished(again, next(again)) == "slow"
    assert (executables.compiled, executables.reused) == (2, 1)


def test_what_did_not_compile_is_tried_again():
    """Neither an error nor what was interrupted stays."""
    executables, mesh, go_on = Executables(), Mesh(jax.devices()[:1], ("x",)), threading.Event()
    with ThreadPoolExecutor() as pool:
        failing = next(executables.request(pool, "failing", mesh, lambda: lambda: 1 / 0))
        assert isinstance(failing.exception(), ZeroDivisionError)
        next(executables.request(pool, "interrupted", mesh, lambda: go_on.wait))
        executables.settle(pool)
        go_on.set()
        for key in ("failing", "interrupted"):
            again = executables.request(pool, key, mesh, lambda: lambda: "made")
            assert finished(again, next(again)) == "made"
