"""State that goes from one microbatch to the next: `microbatch(..., state_argnum=)`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm


def front(w: Any, mean: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    return h, 0.9 * mean + 0.1 * h.mean(0)


def back(w: Any, mean: Any, h: Any) -> Any:
    return jnp.mean(((h - mean) @ w) ** 2), 0.9 * mean + 0.1 * h.mean(0)


def loss_of(ws: Any, means: Any, x: Any) -> Any:
    first, second = mm.task(front, "front", devices=[0]), mm.task(back, "back", devices=[1])
    h, new = first(ws[0], means["front"], x)
    loss, newer = second(ws[1], means["back"], h)
    return loss, {"front": new, "back": newer, "kept": means["kept"]}


def step_of(schedule: str) -> Any:
    def grad(ws: Any, means: Any, x: Any) -> Any:
        (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(ws, means, x)
        return (loss, grads), new

    loop = mm.microbatch(grad, argnum=2, num_microbatches=4, schedule=schedule, state_argnum=1)
    return mm.jit(lambda ws, means, x: loop(ws, means, x))


KEYS = jax.random.split(jax.random.key(0), 3)
WS = (jax.random.normal(KEYS[0], (4, 4)), jax.random.normal(KEYS[1], (4, 4)))
MEANS = {"front": jnp.ones(4), "back": jnp.zeros(4), "kept": jnp.ones(2)}
X = jax.random.normal(KEYS[2], (8, 4))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
def test_each_microbatch_gets_what_the_one_before_left(schedule: str) -> None:
    step = step_of(schedule)
    got = step(WS, MEANS, X)
    with mm.ignore_transforms():
        wanted = step(WS, MEANS, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    state = got[1]
    assert [d.id for d in state["front"].devices()] == [0] and [d.id for d in state["back"].devices()] == [1]
    # By hand: four updates in a row, none of the first state alone.
    mean = MEANS["front"]
    for piece in X.reshape(4, 2, 4):
        mean = front(WS[0], mean, piece)[1]
    np.testing.assert_allclose(np.asarray(state["front"]), np.asarray(mean), rtol=1e-5)


def test_what_the_function_returns_is_checked() -> None:
    only = mm.microbatch(lambda s, x: s + jnp.sum(x), argnum=1, num_microbatches=2, state_argnum=0)
    with pytest.raises(mm.errors.MicrobatchError, match=r"has to return \(result, next state\)"):
        only(jnp.zeros(()), X)
    with pytest.raises(mm.errors.MicrobatchError, match=r"has to return \(result, next state\)"):
        mm.jit(only)(jnp.zeros(()), X)
    far = mm.microbatch(lambda x: x, num_microbatches=2, state_argnum=3)
    with pytest.raises(mm.errors.MicrobatchError, match="state_argnum 3 names the state, but the call has 1"):
        far(X)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble-h2"])
def test_a_state_that_waits_for_the_backward_pass_runs_in_order(schedule: str) -> None:
    """Weights that each microbatch changes by its gradient: the next one has to wait, and a finding says so."""

    def descend(ws: Any, x: Any) -> Any:
        first, second = mm.task(front, "front", devices=[0]), mm.task(back, "back", devices=[1])
        loss, grads = jax.value_and_grad(lambda ws: second(ws[1], 0.0, first(ws[0], 0.0, x)[0])[0])(ws)
        return loss, jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)

    step = mm.jit(mm.microbatch(descend, argnum=1, num_microbatches=4, schedule=schedule, state_argnum=0))
    with pytest.warns(
        UserWarning, match=f"in no order that schedule '{schedule}' could run: .* later stage made of the one"
    ):
        lowered = step.lower(WS, X)
    assert not lowered.program.loops[0].in_order
    got = step(WS, X)
    with mm.ignore_transforms():
        wanted = step(WS, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
