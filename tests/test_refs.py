"""References (`jax.new_ref`) that are made in a step: JAX's mutable arrays, inside tasks and around them.

Generated programs do not draw them: plain JAX (0.10, 0.12) refuses them under `jax.checkpoint` and in differentiated loops
around `jax.jit`, and gives other gradients for a `lax.scan` over layers with one than for the same without.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import manymesh as mm
from stages import assert_agrees, back, dense, front, loss, microbatched, parameters, rows


def filled_row_by_row(w, x):
    """A dense layer whose result is written row by row."""
    out = jax.new_ref(jnp.zeros_like(x))

    def write(i, _):
        out[i] = dense(w, x[i])

    lax.fori_loop(0, x.shape[0], write, None)
    return out[...]


def counting(w, x, total):
    """A dense layer that adds up what it makes."""
    y = dense(w, x)
    total[...] += y.sum()
    return y


def in_tasks(params, x):
    """Made, written and read in a task, which is differentiated and run over microbatches."""
    one, two = (mm.task(filled_row_by_row, f"rows_{i}", devices=[i]) for i in (0, 1))
    return microbatched(jax.value_and_grad(lambda p, x: jnp.mean(two(p["back"], one(p["front"], x)) ** 2)))(params, x)


def between_tasks(params, x):
    """Written between two tasks of different submeshes."""
    total = jax.new_ref(jnp.zeros(()))
    h = front(params["front"], x)
    total[...] = h.sum()
    y = back(params["back"], h)
    total[...] += y.sum()
    return y, total[...]


def written_by_tasks(params, x):
    """Handed to tasks of two submeshes, which write to it."""
    total = jax.new_ref(jnp.zeros(()))
    one, two = (mm.task(counting, f"counting_{i}", devices=[i]) for i in (0, 1))
    y = two(params["back"], one(params["front"], x, total), total)
    return y, total[...]


def in_control_flow(params, x):
    """Carried by a loop around a task, and written under a condition."""
    state = jax.new_ref(x)

    def body(carry, _):
        state[...] = front(params["front"], state[...])
        return carry, None

    lax.scan(body, 0, None, length=3)

    def double():
        state[...] *= 2.0

    lax.cond(x.sum() > 0, double, lambda: None)
    return back(params["back"], state[...])


def in_a_backward_pass(params, x):
    """Where a `custom_vjp` leaves the norm of a cotangent."""
    norm = jax.new_ref(jnp.zeros(()))

    @jax.custom_vjp
    def watched(h):
        return h

    def backward(_, g):
        norm[...] += jnp.sum(g**2)
        return (g,)

    watched.defvjp(lambda h: (h, None), backward)
    grads = jax.grad(lambda p: jnp.mean(back(p["back"], watched(front(p["front"], x))) ** 2))(params)
    return grads, norm[...]


@pytest.mark.parametrize("step", [in_tasks, between_tasks, written_by_tasks, in_control_flow, in_a_backward_pass])
def test_a_step_may_use_references(step):
    """The values are those of plain JAX."""
    assert_agrees(step, parameters(), rows())


def test_references_from_outside_are_refused():
    """As an argument and closed over; nothing is written to them, and the words say what to do."""
    outside = jax.new_ref(jnp.zeros(()))

    def step(params, x, ref):
        ref[...] += loss(params, x)
        return ref[...]

    with pytest.raises(mm.errors.ArgumentError, match=r"argument args\[2\] is a reference \(jax.new_ref\).* return"):
        mm.jit(step)(parameters(), rows(), outside)
    with pytest.raises(mm.errors.ArgumentError, match="closes over a reference"):
        mm.jit(lambda params, x: step(params, x, outside))(parameters(), rows())
    assert float(outside[...]) == 0
