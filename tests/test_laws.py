"""The two laws: equal to the plain loop, and the same bits under every schedule of a class."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import manymesh as mm
from programs import Graph, batch, graphs


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


def _step(params, x, graph, microbatches, reduce, schedule):
    """A training step of a graph with a clipped update; microbatched if there is a schedule."""
    grad = jax.value_and_grad(graph.loss)
    if schedule is not None:
        grad = mm.microbatch(grad, argnum=1, num_microbatches=microbatches, schedule=schedule, reduce=reduce)
    loss, grads = grad(params, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - 0.1 * g / jnp.maximum(norm, 1.0), params, grads), loss, grads


# One step for all graphs, which are static: a fragment that an earlier graph had too is not compiled again, and two
# fragments that are taken for equal and are not break a law.
STEP = mm.jit(_step, static_argnums=(2, 3, 4, 5))


def check_laws(graph, microbatches=2, reduce="mean"):
    """Law 1 and law 2 for one graph: a whole step and a microbatched one, with a clipped update."""
    params, x, static = graph.parameters(), batch(4 * microbatches), (graph, microbatches, reduce)
    results = {name: STEP(params, x, *static, name) for name in (("gpipe", "1f1b") if microbatches > 1 else (None,))}
    with mm.ignore_transforms():
        expected = STEP(params, x, *static, next(iter(results)))
    for result in results.values():
        assert_close(result, expected, graph.bf16)
    if microbatches > 1:
        assert_same_bits(results["1f1b"], results["gpipe"])


COUNTS, REDUCTIONS = st.sampled_from([1, 2, 3]), st.sampled_from(["sum", "mean"])


# In parts, so that workers share them.
@pytest.mark.parametrize("part", range(10))
def test_laws_hold_on_generated_programs(part):
    """Loss, gradients and update equal the plain loop's; GPipe and 1F1B give the same bits. Ten programs a part."""

    @seed(part)
    @settings(max_examples=settings.default.max_examples, derandomize=False, database=None)
    @given(graph=graphs(), microbatches=COUNTS, reduce=REDUCTIONS)
    def check(graph, microbatches, reduce):
        check_laws(graph, microbatches, reduce)

    check()


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "regressions").glob("*.json")), ids=lambda p: p.stem)
def test_what_once_broke_a_law(path):
    """Programs that `make fuzz` found and kept."""
    case = json.loads(path.read_text("utf-8"))
    check_laws(Graph.from_json(json.dumps(case["graph"])), case["microbatches"], case["reduce"])


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
