"""Numbers that loops start from are constants of the program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import manymesh as mm
from flat import lines, program, run, switch_off, text

LOOP = """
    tasks: front 0
    inputs: x f32[4]
    loop 0: 2 microbatches, gpipe
    carry a f32[] = start, then s, at last total
    start = {start} [layout follows loop]
    0: h = front: lax.sin(x)
    0: s = a + jnp.sum(h)
    results: total{more}
"""


def test_a_number_becomes_a_constant():
    """It is there before the step, in its dtype; another result of the step may be the same."""
    after = run(
        "hold_numbers",
        program(LOOP.format(start="lax.optimization_barrier(lax.full((), 2.5, jnp.float32))", more=", start")),
    )
    assert lines(after) == text("""
        inputs: a f32[], b f32[4]
        loop 0 step: 2 microbatches
          carry c f32[] = a, then d, at last e
        0: f f32[4] = task front(b)
        0: g f32[] = reduce_sum(f) axes=(0,)
        0: d f32[] = add(c, g)
        results: e, a
    """)
    ((held, value),) = after.consts.items()
    assert held is after.invars[0] and (value.dtype, value.item()) == (np.float32, 2.5)


def test_what_is_no_number_stays():
    """An array, which would take memory between steps, and what is computed."""
    for start in ("lax.full((), 0.0) * x[0]", "lax.optimization_barrier(x[0])"):
        flat = program(LOOP.format(start=start, more=""))
        assert run("hold_numbers", flat) is flat


def pipeline():
    """A step of two equal stages and its arguments; the loss is the second one's."""
    stages = [mm.task(lambda w, x: jnp.tanh(x @ w), f"stage{i}", devices=[i]) for i in range(2)]
    optimizer = optax.sgd(0.1)

    def step(ws, batch):
        def loss(ws, batch):
            x, y = batch
            for stage, w in zip(stages, ws, strict=True):
                x = stage(w, x)
            return jnp.mean((x - y) ** 2)

        grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, reduce="mean")
        value, grads = grad(ws, batch)
        return optax.apply_updates(ws, optimizer.update(grads, optimizer.init(ws), ws)[0]), value

    rng = np.random.default_rng(0)
    ws = [rng.normal(size=(4, 4)).astype("f4") / 2 for _ in stages]
    return step, (ws, tuple(rng.normal(size=(8, 4)).astype("f4") for _ in range(2)))


def test_what_comes_before_the_loop_is_alike_on_equal_stages(monkeypatch):
    """So that it is compiled once, and loaded for the other stage. The number is the same in every call."""
    step, args = pipeline()
    jitted = mm.jit(step)
    compiled = jitted.lower(*args).compile()
    assert (compiled.report().compiled, compiled.report().reused) == (7, 1)  # of both updates one holds the loss
    expected = jax.jit(step)(*args)
    for _ in range(2):
        for a, e in zip(jax.tree.leaves(jitted(*args)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-5)
    switch_off(monkeypatch, "hold_numbers")
    assert mm.jit(step).lower(*args).compile().report().compiled == 8


def test_a_number_is_no_work_before_the_loop(monkeypatch):
    """A stage that begins with nothing else has nothing to run there."""
    front, back = (mm.task(lambda x: x * 2, devices=[i]) for i in range(2))

    def step(x):
        return mm.microbatch(lambda x: back(front(x)).sum(), argnum=0, num_microbatches=2)(x)

    x = jnp.ones((4, 2))
    assert [f.submesh for f in mm.jit(step).lower(x).program.fragments if f.loop is None] == [0]
    assert float(mm.jit(step)(x)) == 32
    switch_off(monkeypatch, "hold_numbers")
    assert [f.submesh for f in mm.jit(step).lower(x).program.fragments if f.loop is None] == [0, 1]
