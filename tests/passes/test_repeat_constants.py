"""What is computed of nothing is made by whoever reads it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import manymesh as mm
from flat import lines, looped, placed, run, switch_off
from manymesh._passes._hoist import SMALL
from stages import assert_agrees

BODY = """
    tasks: one 0, two 1
    inputs: x f32[64,64]
    loop 0: 2 microbatches, gpipe
    carry z f32[64,64] = zero, then t, at last total
    zero = lax.full((64, 64), 0.0)
    {}
    results: total
"""
body = functools.partial(looped, BODY)
LENGTH, WIDTH, COUNT = 48, 4, 4


def test_each_reader_has_its_own_in_its_phase():
    """A mask that the tasks of both submeshes read, forward and backward."""
    flat = body(
        "i = lax.iota(jnp.float32, 64)", "d = i[:, None] - i[None]", "a = one: x * d", "b = two: a * d",
        "c = two_bwd: b * d", "t = z + c",
    )  # fmt: skip
    after = run("remove_dead", run("repeat_constants", flat))
    assert [at for name, *at in placed(run("place", after)) if name == "sub"] == [[0], [1], [1]]
    made = [line for line in lines(after).splitlines() if "= sub(" in line]
    assert [line.partition("[")[2].partition("[")[2] for line in made] == [
        "with one]",
        "with two]",
        "backward, with two]",
    ]


def test_what_one_reader_has_already_stays():
    """Also what is small, what reads something, and what is outside of the loop."""
    flat = body(
        "i = lax.iota(jnp.float32, 64)", "d = lax.broadcast_in_dim(i, (64, 64), (1,))", "s = x[0] * i", "a = one: x * d",
        "b = one: a * s", "c = two: b * i", "t = z + c",
    )  # fmt: skip
    after = run("repeat_constants", flat)
    assert (
        lines(after).count("= iota(") == 2
    )  # the one of the mask, which is the task's own, and the one that others read
    assert lines(run("remove_dead", after)).count("= broadcast_in_dim(") == 2  # the mask's, and zeros to begin with
    alone = body("d = lax.full((64, 64), 2.0)", "a = one: x * d", "t = z + a")
    assert run("repeat_constants", alone) is alone


def test_the_phase_of_the_one_reader_counts():
    """What the forward pass makes for the backward pass alone would be kept in between."""
    after = run("repeat_constants", body("d = lax.full((64, 64), 2.0)", "a = one_bwd: x * d", "t = z + a"))
    assert lines(run("remove_dead", after)).count("broadcast_dimensions=() [backward, with one]") == 1


def layer(w, x):
    """Causal attention, the mask made of nothing."""
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), jnp.einsum("btd,bsd->bts", x @ w, x), -1e9)
    return x + jax.nn.softmax(scores) @ x


def stacked(meshes, length):
    task = mm.task(layer, "layer", mesh=meshes)

    def loss(ws, x):
        return jnp.mean(lax.scan(lambda x, w: (task(w, x), None), x, ws)[0] ** 2)

    args = jnp.ones((length, WIDTH, WIDTH)) / 8, jnp.sin(jnp.arange(8.0 * LENGTH * WIDTH)).reshape(8, LENGTH, WIDTH)
    step = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=COUNT, reduce="mean")
    return step, args


@pytest.mark.parametrize("off", [False, True])
def test_masks_of_stacked_layers_are_neither_sent_nor_kept(monkeypatch, off):
    """JAX takes them out of the loop over layers; activations and their gradients cross alone, and nothing else is held."""
    if off:
        switch_off(monkeypatch, "repeat_constants")
    meshes = [jax.sharding.Mesh(jax.devices()[i : i + 1], ("x",)) for i in (0, 1)]
    step, args = stacked(meshes, 4)
    program = mm.jit(step).lower(*args).program
    forward = [f for f in program.fragments if f.loop is not None and f.kind == "F"]
    assert any(v.aval.shape[-2:] == (LENGTH, LENGTH) for f in forward for v in f.invars) == off
    activation = 8 // COUNT * LENGTH * WIDTH * 4
    assert {e.nbytes for e in program.edges if e.nbytes > SMALL} == {activation}
    assert_agrees(step, *args)


def test_constants_between_tasks_are_made_on_each_submesh():
    """A mask of the model, made once for all layers: nothing of it crosses."""
    tasks = [mm.task(lambda m, x: jnp.where(m, x, 0.0), f"t{i}", devices=[i]) for i in (0, 1)]

    def step(x):
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), x.shape)
        return tasks[1](mask, tasks[0](mask, x) + 1.0)

    x = jnp.ones((8, LENGTH, LENGTH))
    program = mm.jit(step).lower(x).program
    assert [e.nbytes for e in program.edges] == [x.nbytes]
    assert_agrees(step, x)
