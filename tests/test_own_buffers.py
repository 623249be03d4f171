"""Arrays that outlive a call share no memory: results, arguments that stay, and what a step closes over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from generated.laws import shared_buffers
from stages import assert_same, reference

DEVICES = np.array(jax.devices())
ALL, ONE = (Mesh(DEVICES[:n].reshape(n // 2 or 1, -1), ("data", "model")) for n in (4, 1))
ON_ALL, ON_ONE = (NamedSharding(mesh, P()) for mesh in (ALL, ONE))


def tasks():
    return mm.task(lambda x: 2 * x, "wide", mesh=ALL), mm.task(lambda x: x + 1, "narrow", mesh=ONE)


def value():
    return jnp.arange(6, dtype=jnp.float32)


@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
def test_one_value_on_submeshes_that_share_devices_is_several_arrays(donate):
    """Made by a task, and an argument handed through; each of them may then be donated."""
    wide, narrow = tasks()

    def step(x):
        y = wide(x)
        return (y, y, y), (x, x), narrow(y)

    wanted = (ON_ALL, ON_ONE, ON_ONE), (ON_ALL, ON_ONE), None
    step = mm.jit(step, donate_argnums=donate, out_shardings=wanted)
    expected = reference(jax.jit(step.fun), value())
    for _ in range(2):
        given = jax.device_put(value(), ON_ALL)
        results = step(given)
        assert not shared_buffers(results, () if donate == 0 else given)
        assert given.is_deleted() == (donate == 0)
        assert_same(results, expected)
    on_all, on_one, _ = results[0]
    both = mm.jit(lambda a, b: (wide(a), narrow(b)), donate_argnums=(0, 1))
    assert_same(both(on_all, on_one), (4 * value(), 2 * value() + 1))


def test_one_value_that_a_loop_carries_on_submeshes_that_share_devices():
    """The loop donates both of what is one value to its next time."""
    wide, narrow = tasks()

    def fun(x):
        def body(c):
            a, b, count = c
            made = wide(a) + narrow(b).sum()
            return made, made, count + 1

        return lax.while_loop(lambda c: c[2] < 3, body, (x, x, 0))

    step = mm.jit(fun)
    expected = reference(jax.jit(fun), value())
    for _ in range(2):
        results = step(value())
        assert not shared_buffers(results)
        assert_same(results, expected)


def looped(fun):
    """The function, in a loop that the host runs."""
    other = tasks()[1]

    def run(x):
        return lax.while_loop(lambda c: c[1] < 1, lambda c: (fun(other(c[0]) - 1), c[1] + 1), (x, 0))[0]

    return run


@pytest.mark.parametrize("how", ["a step", "a loop of the host"])
def test_what_a_step_closes_over_can_be_donated(how):
    """To another step, and to the step itself; as of `jax.jit`, what it computes stays the same."""
    closed_over = jax.device_put(value(), ON_ALL)
    wide, _ = tasks()

    def fun(x):
        return wide(x + closed_over)

    step = mm.jit(fun if how == "a step" else looped(fun), donate_argnums=0)
    for x in (value(), closed_over, value()):
        assert_same(step(x), 4 * value())
    assert closed_over.is_deleted()


@pytest.mark.parametrize("how", ["a step", "a loop of the host"])
def test_what_a_step_closes_over_can_be_written_to(how):
    """JAX may use the memory of a NumPy array that begins at a multiple of 64 bytes as it is."""
    raw = np.empty(6 * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    closed_over = raw[start : start + 24].view(np.float32)
    closed_over[:] = 1
    wide, _ = tasks()

    def fun(x):
        return wide(x) * closed_over

    step = mm.jit(fun if how == "a step" else looped(fun))
    before = step(value())
    closed_over[:] = 5
    assert_same(step(value()), before)


@pytest.mark.parametrize("donate", [0, (0, 1)])
def test_an_array_in_two_places_is_refused_whenever_one_is_donated(donate):
    """Also by a program that is compiled: the array is still there afterwards."""
    wide, narrow = tasks()
    step = mm.jit(lambda a, b: (wide(a), narrow(b)), donate_argnums=donate)
    results = step(value(), value())
    x = value()
    with pytest.raises(ValueError, match=r"args\[0\] and args\[1\] are one array of shape \(6,\)"):
        step(x, x)
    assert_same(step(x, value()), results)


@pytest.mark.parametrize("inside", [False, True])
def test_an_array_that_was_deleted_is_closed_over(inside):
    """By a task, and by the step around it."""
    gone = jnp.ones(4)
    gone.delete()
    task = mm.task(lambda x: x + gone if inside else 2 * x, "task", devices=[0])
    with pytest.raises(RuntimeError, match=r"closes over an array float32\[4\] that has been deleted, .* pass it"):
        mm.jit(lambda x: task(x) if inside else task(x) + gone).lower(jnp.ones(4))
