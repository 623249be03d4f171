"""What makes less of a sum over submeshes is applied to its terms, where they are made."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flat import lines, placed, program, run, switch_off
from manymesh._passes._hoist import SMALL
from stages import assert_agrees

LENGTH, WIDTH, HEADS, STAGES, COUNT = 32, 4, 2, 3, 4
SUM = """
    tasks: one 0, two 1
    inputs: x f32[64,64], y f32[64,64], s f32[]
    a = one: x * 2.0
    b = two: y * 2.0
    c = a + b
    {}
    results: {}
"""


def test_a_sum_of_a_sum_is_taken_where_the_terms_are():
    """With what is linear before it."""
    after = run("shrink_where_made", program(SUM.format("d = c.T * s\n    e = d.sum(0)", "e")))
    where = placed(run("place", after))
    assert [at for name, at in where if name == "reduce_sum"] == [0, 1]
    assert lines(after).splitlines()[-2].endswith("f32[64] = add(h, k)")


@pytest.mark.parametrize(
    ("equations", "results"),
    [
        ("d = c + 1.0\n    e = d.sum(0)", "e"),  # not linear
        ("d = jnp.abs(c)\n    e = d.sum(0)", "e"),
        ("e = c.sum(0)", "e, c"),  # what is wanted whole comes together anyway
        ("d = c.sum(0)\n    e = d + c[0]", "e"),
        ("e = jnp.broadcast_to(c, (2, 64, 64))", "e"),  # no less
        ("d = two: c + 0.0\n    e = d.sum(0)", "e"),
    ],
)
def test_what_stays(equations, results):
    flat = program(SUM.format(equations, results))
    assert lines(run("shrink_where_made", flat)) == lines(flat)


def layer(w, x, bias):
    """Attention without masks: scores of two heads, and a bias for each pair of positions."""
    scores = jnp.einsum("btd,bsd->bts", x @ w, x)[:, None] + bias
    return x + 0.1 * jnp.einsum("bhts,bsd->btd", jax.nn.softmax(scores), x)


tasks = [mm.task(layer, f"layer_{i}", devices=[i]) for i in range(STAGES)]


def loss(p, batch, of_batch):
    """A table of biases, one for each distance, expanded once for all layers."""
    positions = batch["at"] if of_batch else jnp.arange(LENGTH)[None]
    distance = jnp.clip(positions[:, :, None] - positions[:, None], -8, 8) + 8
    bias = p["table"][distance].transpose(0, 3, 1, 2)
    x = batch["x"]
    for task, w in zip(tasks, p["layers"], strict=True):
        x = task(w, x, bias)
    return jnp.mean(x**2)


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("of_batch", [False, True], ids=["the same in all", "of the batch"])
@pytest.mark.parametrize("looped", [False, True], ids=["whole", "microbatches"])
def test_tables_cross_and_not_what_is_made_of_them(monkeypatch, looped, of_batch, off):
    """A relative position bias: a number for each pair of tokens is made, and its gradient added up, on each stage."""
    if off:
        switch_off(monkeypatch, "shrink_where_made")
    rng = np.random.default_rng(0)
    p = {
        "table": jnp.asarray(rng.normal(size=(17, HEADS)), jnp.float32),
        "layers": [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 4, jnp.float32) for _ in tasks],
    }
    batch = {
        "x": jnp.asarray(rng.normal(size=(8, LENGTH, WIDTH)), jnp.float32),
        "at": jnp.asarray(rng.integers(0, LENGTH, (8, LENGTH)), jnp.int32),
    }
    step = jax.value_and_grad(functools.partial(loss, of_batch=of_batch))
    if looped:
        step = mm.microbatch(step, argnum=1, num_microbatches=COUNT, reduce="mean")
    lowered = mm.jit(step).lower(p, batch).program
    pairs = {e.var.aval.str_short() for e in lowered.edges if _is_square(e.var) and e.nbytes > SMALL}
    assert bool(pairs) == off
    assert_agrees(step, p, batch)


def _is_square(v):
    return any(v.aval.shape[k : k + 2] == (LENGTH, LENGTH) for k in range(len(v.aval.shape)))
