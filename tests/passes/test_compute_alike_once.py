"""Numbers that are computed alike several times outside of loops are computed once, and cross once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flat import lines, program, run, switch_off, text
from stages import assert_same, reference


def test_what_is_alike_is_computed_once():
    """Also what is made of it, and in other words; not what is larger than a number."""
    flat = program("""
        inputs: x f32[4], y f32[4], n f32[]
        a = lax.max(n, 1.0)
        b = lax.div(2.0, a)
        c = lax.max(n, 1.0)
        d = lax.div(2.0, c)
        e = lax.mul(x, b)
        f = lax.mul(y, d)
        g = lax.mul(x, x)
        h = lax.mul(x, x)
        results: e, f, g, h
    """)
    assert lines(run("compute_alike_once", flat)) == text("""
        inputs: a f32[4], b f32[4], c f32[]
        d f32[] = max(c, 1.0)
        e f32[] = div(2.0, d)
        f f32[4] = mul(a, e)
        g f32[4] = mul(b, e)
        h f32[4] = mul(a, a)
        i f32[4] = mul(a, a)
        results: f, g, h, i
    """)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("lax.max(n, 1.0)", "lax.max(n, 2.0)"),
        ("lax.integer_pow(n, 2)", "lax.integer_pow(n, 3)"),
        ("lax.convert_element_type(n, jnp.int32)", "lax.convert_element_type(n, jnp.int16)"),
        ("lax.sub(n, m)", "lax.sub(m, n)"),
        ("front: lax.sin(n)", "front: lax.sin(n)"),
    ],
)
def test_what_is_not_alike_or_not_free(one, other):
    """Other constants, parameters or operands; tasks."""
    flat = program(f"""
        tasks: front 0
        inputs: x f32[4], n f32[], m f32[]
        a = {one}
        b = {other}
        c = x * a
        d = x * b
        results: c, d
    """)
    assert run("compute_alike_once", flat) is flat


def test_in_loops_all_stays_as_it_is():
    """The stages of a loop run apart."""
    flat = program("""
        tasks: front 0
        inputs: x f32[4], n f32[], start f32[]
        loop 0: 2 microbatches, gpipe
        carry a f32[] = start, then s, at last total
        0: b = lax.max(n, 1.0)
        0: c = lax.max(n, 1.0)
        0: s = a + b * c
        results: total
    """)
    assert run("compute_alike_once", flat) is flat


def test_results_stay_results():
    """Two results that are alike are two arrays: both may be donated to the next step."""
    flat = program("""
        inputs: n f32[]
        a = lax.max(n, 1.0)
        b = lax.max(n, 1.0)
        results: a, b
    """)
    assert run("compute_alike_once", flat) is flat


def clipped(p, x):
    """Gradients of two stages of five weights, clipped by hand, leaf by leaf."""
    stages = [
        mm.task(lambda ws, x: jnp.tanh(x @ sum(ws)), name, devices=[k]) for k, name in enumerate(("front", "back"))
    ]

    def loss(p, x):
        return jnp.mean(stages[1](p[1], stages[0](p[0], x)) ** 2)

    grads = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=2, reduce="mean")(p, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - 0.1 * g * jnp.minimum(1.0, 1e-3 / (norm + 1e-6)), p, grads)


def test_one_number_crosses(monkeypatch):
    """The factor of all gradients, not one for each; the norm's own terms cross besides."""
    rng = np.random.default_rng(0)
    p = [[jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for _ in range(5)] for _ in range(2)]
    x = jnp.ones((4, 4))

    def numbers():
        compiled = mm.jit(clipped).lower(p, x).compile()
        assert_same(compiled(p, x), reference(jax.jit(clipped), p, x))
        return sum(e.loop is None and not e.var.aval.shape for e in compiled.program.edges)

    assert numbers() == 2
    switch_off(monkeypatch, "compute_alike_once")
    assert numbers() == 6
