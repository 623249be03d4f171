"""What each microbatch tells of its gradients goes to earlier stages, as the gradients do."""

import functools

import jax
import jax.numpy as jnp
import pytest

import manymesh as mm
from flat import looped, run, switch_off
from stages import assert_same, loss, reference, rows

BODY = """
    tasks: one 0
    inputs: w f32[512], x f32[1024]
    loop 0: 2 microbatches, gpipe
    xs p f32[512] = a, b
    carry z f32[512] = w, then t, at last total
    carry m f32[] = start, then n, at last told
    a = x[:512]
    b = x[512:]
    start = x[0]
    {}
    results: total, told
"""


body = functools.partial(looped, BODY)


def backward(flat):
    return [n.backward for n in flat.nodes if n.loop is not None]


def test_numbers_made_of_gradients_are_backward():
    """But not what is larger, nor what only adds them up."""
    flat = body("g = one_bwd: w * p", "s = g * g", "r = jnp.sum(s)", "q = lax.sqrt(r)", "n = m + q", "t = z + g")
    assert backward(flat) == [True, False, False, False, False, False]
    assert backward(run("follow_gradients", flat)) == [True, False, True, True, False, False]


def test_what_becomes_of_gradients_is_not():
    """A scale that they are clipped by: what it scales is no number, and it has to be back in time."""
    flat = body("g = one_bwd: w * p", "r = jnp.sum(g * g)", "q = lax.rsqrt(r)", "t = z + g * q", "n = m + p[0]")
    assert run("follow_gradients", flat) is flat


def test_what_a_task_reads_is_not():
    """A second forward pass, from where the first gradient leads."""
    flat = body("g = one_bwd: w * p", "r = jnp.sum(g)", "h = one: r * p", "t = z + h", "n = m + p[0]")
    assert run("follow_gradients", flat) is flat


METRICS = {
    "norm": lambda grads: jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))),
    "all finite": lambda grads: jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)])) * 1.0,
}


@pytest.mark.parametrize("metric", METRICS)
def test_a_norm_of_each_microbatch_leaves_the_pipeline(monkeypatch, metric):
    def one(p, x):
        value, grads = jax.value_and_grad(lambda p, x: loss(p, x) * p["scale"][0])(p, x)
        return value, grads, METRICS[metric](grads)

    step = mm.microbatch(one, argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean")
    p, x = {"front": jnp.eye(4), "back": jnp.eye(4), "scale": jnp.full(1, 0.5)}, rows()

    def in_order():
        compiled = mm.jit(step).lower(p, x).compile()
        assert_same(compiled(p, x), reference(jax.jit(step), p, x))
        return compiled.program.loops[0].in_order

    assert in_order()
    switch_off(monkeypatch, "follow_gradients")
    with pytest.warns(UserWarning, match="one after the other"):
        assert not in_order()
