"""What is cheap and larger than what it is made of is made where it is read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flat import lines, looped, placed, run, switch_off

BODY = """
    tasks: one 0, two 1
    inputs: x f32[64], k f32[64,64]
    loop 0: 2 microbatches, gpipe
    carry z f32[] = zero, then t, at last total
    zero = lax.full((), 0.0)
    0: a = one: jnp.cumsum(x)
    {}
    results: total
"""


body = functools.partial(looped, BODY)


def test_what_is_larger_than_its_operands_is_made_on_both_submeshes():
    """With all that leads to it, as far as that is cheap."""
    after = run(
        "compute_where_read",
        body("d = a[:, None] - a[None]", "m = jnp.abs(d)", "s = one: m.sum()", "r = two: m.sum() + s", "t = z + r"),
    )
    where = placed(run("place", after))
    assert where.count(("abs", 0)) == where.count(("abs", 1)) == 1
    assert where.count(("sub", 0)) == where.count(("sub", 1)) == 1
    assert where.count(("one", 0)) == 2  # the sum along x is not made twice


@pytest.mark.parametrize(
    "equations",
    [
        (
            "m = a[::2] * 2.0",
            "s = one: m.sum()",
            "r = two: m.sum() + s",
            "t = z + r",
        ),  # smaller than what it is made of
        ("d = a[:, None] * k", "m = d @ d", "s = one: m.sum()", "r = two: m.sum() + s", "t = z + r"),  # not cheap
        ("m = a[:, None] - a[None]", "s = one: m.sum()", "r = two: s * 2.0", "t = z + r"),  # not read elsewhere
    ],
)
def test_what_is_sent(equations):
    flat = run("place", body(*equations))
    assert lines(run("compute_where_read", flat)) == lines(flat)


WIDTH, LENGTH, STAGES = 16, 24, 3
ACTIVATION = (4, LENGTH, WIDTH)
embed = mm.task(lambda e, x: e[x], "embed", devices=[0])
mixers = [
    mm.task(lambda w, h, m: h + jax.nn.softmax(jnp.where(m, (h @ w) @ h.mT, -1e9)) @ h, f"m{i}", devices=[i])
    for i in range(STAGES)
]
turners = [
    mm.task(lambda w, h, a: h + jnp.tanh((h * a[0] + jnp.roll(h, 1, -1) * a[1]) @ w), f"r{i}", devices=[i])
    for i in range(STAGES)
]


def mixed(tasks, given):
    def loss(params, tokens):
        h, about = embed(params["e"], tokens), given(tokens)
        for task, w in zip(tasks, params["w"], strict=True):
            h = task(w, h, about)
        return jnp.mean(h**2)

    def step(params, tokens):
        grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean")
        value, grads = grad(params, tokens)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    rng = np.random.default_rng(0)
    params = {"e": rng.normal(size=(40, WIDTH)), "w": [rng.normal(size=(WIDTH, WIDTH)) / 4 for _ in range(STAGES)]}
    return step, (jax.tree.map(lambda x: x.astype("f4"), params), rng.integers(0, 40, (16, LENGTH)))


def causal(tokens):
    return (tokens != 0)[:, None] & jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


def segments(tokens):
    numbers = jnp.cumsum(tokens == 1, axis=1)
    return numbers[:, :, None] == numbers[:, None]


def angles(tokens):
    turns = jnp.cumsum(tokens != 0, axis=1)[..., None] / 10 ** (jnp.arange(WIDTH) / WIDTH)
    return jnp.cos(turns), jnp.sin(turns)


def tiled(tokens):
    return jnp.tile(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)) & (tokens[:1, :1, None] != 0), (len(tokens), 1, 1))


def stacked(tokens):
    return jnp.stack(angles(tokens))


def updated(tokens):
    return tuple(jax.lax.dynamic_update_slice_in_dim(a, jnp.ones((1, *a.shape[1:])), 0, 0) for a in angles(tokens))


GIVEN = {
    "a causal mask": (mixers, causal),
    "a mask for each row": (mixers, tiled),
    "segments": (mixers, segments),
    "angles": (turners, angles),
    "angles in one array": (turners, stacked),
    "angles of which some are replaced": (turners, updated),
}


@pytest.mark.parametrize("name", GIVEN)
def test_nothing_but_activations_crosses_in_a_microbatch(name):
    """Of what is made of the tokens, each stage makes its own."""
    step, args = mixed(*GIVEN[name])
    program = mm.jit(step).lower(*args).program
    each = [e.var.aval.shape for e in program.edges if e.loop is not None]
    assert each == [ACTIVATION] * 2 * (STAGES - 1)
    assert program.loops[0].placement == (0, 1, 2)
    value, params = mm.jit(step)(*args)
    with mm.ignore_transforms():
        expected, after = jax.jit(step)(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), params, after)


def test_without_the_pass_masks_are_sent(monkeypatch):
    switch_off(monkeypatch, "compute_where_read")
    step, args = mixed(*GIVEN["a causal mask"])
    each = [e.var.aval.shape for e in mm.jit(step).lower(*args).program.edges if e.loop is not None]
    assert each.count((4, LENGTH, LENGTH)) == STAGES - 1
