"""What every microbatch would compute alike and send leaves the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flat import lines, program, run, switch_off

LOOP = """
    tasks: one 0, two 1
    inputs: w f32[2048], x f32[4,1024]
    loop 0: 2 microbatches, gpipe
    xs b f32[2,1024] = p, q
    carry z f32[2,1024] = zero, then t, at last total
    zero = lax.full((2, 1024), 0.0)
    p = x[0:2]
    q = x[2:4]
    0: a = one: b + w[0:1024]
    0: v = {part}
    0: c = two: a + v
    0: t = z + c
    results: total
"""


def test_a_part_of_a_weight_is_cut_and_sent_before_the_loop():
    """What makes it goes along; what is on its reader's submesh stays."""
    flat = program(LOOP.format(part="jnp.flip(w[1024:2048] * 2.0)"))
    after = run("cross_once", flat)
    outside = [n.primitive for n in after.nodes if n.loop is None]
    assert "slice" in outside, lines(after)
    assert run("cross_once", after).nodes == after.nodes


@pytest.mark.parametrize("part", ["b[0] * w[1024:2048]", "w[1024:2048] * b[1]"])
def test_what_depends_on_the_microbatch_stays(part):
    before = program(LOOP.format(part=part))
    kept = [n.primitive for n in run("cross_once", before).nodes if n.loop is not None and n.primitive == "mul"]
    assert kept == ["mul"]


def vector(shape):
    """A step whose parameters are in one array, in parts that are no equal blocks, and its arguments."""
    shapes = ((16, 32), (32, 64), (64, 16))
    ends = np.cumsum([0, *(a * b for a, b in shapes)])
    stages = [mm.task(lambda w, x: jnp.tanh(x @ w), f"stage{i}", devices=[i]) for i in range(3)]

    def loss(params, x):
        flat = params["all"].reshape(-1)
        for stage, shape, a, b in zip(stages, shapes, ends, ends[1:], strict=False):
            x = stage(flat[a:b].reshape(shape), x)
        return jnp.mean(x**2)

    def step(params, x):
        grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean")
        value, grads = grad(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    rng = np.random.default_rng(0)
    return step, ({"all": rng.normal(size=shape).astype("f4") / 4}, rng.normal(size=(32, 16)).astype("f4"))


def moved(step, args):
    """The shapes of what crosses in each microbatch, and the submeshes that have all parameters."""
    (whole,) = jax.tree.leaves(args[0])
    program = mm.jit(step).lower(*args).program
    holders = {f.submesh for f in program.fragments for v in f.invars if v.aval.size == whole.size}
    return {e.var.aval.shape for e in program.edges if e.loop is not None}, len(holders)


@pytest.mark.parametrize("shape", [3584, (7, 512)])
def test_parameters_in_one_array(monkeypatch, shape):
    """Its parts cross once a call, and so do their gradients; in each microbatch activations do."""
    step, args = vector(shape)
    value, params = mm.jit(step)(*args)
    expected, after = jax.jit(step)(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(params["all"], after["all"], rtol=1e-4, atol=1e-6)
    activations = {(8, 32), (8, 64)}
    assert moved(step, args) == (activations, 1)
    with monkeypatch.context() as patch:
        switch_off(patch, "accumulate_each_layer")
        switch_off(patch, "make_once")  # which would put them together after the loop
        crossing, _ = moved(step, args)
        assert crossing > activations
    switch_off(monkeypatch, "cross_once")
    crossing, holders = moved(step, args)
    assert crossing > activations or holders > 1


@pytest.mark.parametrize("size", [1, 2048])
def test_the_host_is_asked_in_every_microbatch(size):
    """What it says may change, whether it is small enough for the loop to be without it or crosses."""
    asked = []

    def say(w):
        asked.append(w.shape)
        return np.full(size, len(asked), np.float32)

    first = mm.task(lambda x, s: x * s.mean(), "first", devices=[0])
    second = mm.task(lambda x, s: (x * s[0]).sum(), "second", devices=[1])

    def total(x, w):
        s = jax.pure_callback(say, jax.ShapeDtypeStruct((size,), jnp.float32), w)
        return second(first(x, s), s)

    summed = mm.microbatch(total, argnum=0, num_microbatches=3, reduce="sum")
    assert float(mm.jit(summed)(np.ones((6, 2), np.float32), np.ones(size, np.float32))) == 4 * (1 + 4 + 9)
