"""The two laws: equal to the plain loop, and the same bits under every schedule of a class."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import manymesh as mm
from programs import batch, graphs


def assert_close(actual, expected, bf16=False):
    tolerance = 5e-2 if bf16 else 2e-5
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        actual64, expected64 = np.asarray(a, np.float64), np.asarray(e, np.float64)
        # Sums run in another order: the error scales with what is added, not with what is left of it.
        scale = max(1.0, float(np.max(np.abs(expected64), initial=0.0)))
        np.testing.assert_allclose(actual64, expected64, rtol=tolerance, atol=tolerance * scale)


def assert_same_bits(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


@given(graph=graphs(), microbatches=st.sampled_from([2, 3, 4]), reduce=st.sampled_from(["sum", "mean"]))
def test_laws_hold_on_generated_task_graphs(graph, microbatches, reduce):
    """Loss and gradients equal the plain loop's; GPipe and 1F1B give the same bits."""

    def step(params, x, schedule):
        return mm.microbatch(
            jax.value_and_grad(graph.loss), argnum=1, num_microbatches=microbatches, schedule=schedule, reduce=reduce
        )(params, x)

    params, x = graph.parameters(), batch(4 * microbatches)
    jitted = mm.jit(step, static_argnums=2)
    results = {name: jitted(params, x, name) for name in ("gpipe", "1f1b")}
    with mm.ignore_transforms():
        expected = step(params, x, "gpipe")
    assert_close(results["gpipe"], expected, graph.bf16)
    assert_same_bits(results["1f1b"], results["gpipe"])


@given(graph=graphs())
def test_without_microbatches_a_step_equals_plain_jax(graph):
    """A program of tasks with no loop: loss, gradients and an update."""

    def step(params, x):
        loss, grads = jax.value_and_grad(graph.loss)(params, x)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - 0.1 * g / jnp.maximum(norm, 1.0), params, grads), loss

    params, x = graph.parameters(), batch(4)
    actual = mm.jit(step)(params, x)
    with mm.ignore_transforms():
        expected = step(params, x)
    assert_close(actual, expected, graph.bf16)


@pytest.mark.parametrize("reduce", ["max", "concat", "stack", "last"])
def test_other_reductions_equal_the_plain_loop(reduce):
    """Reductions that keep, pick or collect."""
    front = mm.task(lambda w, x: jnp.tanh(x @ w), "front", devices=[0])
    back = mm.task(lambda w, h: h @ w, "back", devices=[1])
    run = mm.microbatch(lambda ws, x: back(ws[1], front(ws[0], x)), argnum=1, num_microbatches=4, reduce=reduce)
    ws, x = (jnp.eye(4), 2 * jnp.eye(4)), batch(8)
    with mm.ignore_transforms():
        expected = run(ws, x)
    assert_close(mm.jit(run)(ws, x), expected)
