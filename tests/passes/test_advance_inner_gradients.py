"""Gradients within the forward pass of another gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flat import lines, looped, program, run, switch_off
from stages import assert_agrees

BODY = """
    tasks: one 0
    inputs: w f32[4], x f32[8]
    loop 0: 2 microbatches, gpipe
    xs p f32[4] = a, b
    carry z f32[4] = w, then t, at last total
    a = x[:4]
    b = x[4:]
    {}
    results: total
"""


body = functools.partial(looped, BODY)


def test_what_an_outer_gradient_differentiates_is_forward():
    """The last one is what it transposes."""
    flat = body(
        "h = one: w * p [in jvp(jvp(one))]",
        "g = one_bwd: h * w [in jvp(transpose(jvp(one)))]",
        "u = g * g [in jvp()]",
        "t = one_bwd: z + u [in transpose(jvp(transpose(jvp(one))))]",
    )
    after = run("advance_inner_gradients", flat)
    assert [n.backward for n in flat.nodes if n.loop is not None] == [False, True, False, True]
    assert [n.backward for n in after.nodes if n.loop is not None] == [False, False, False, True]


@pytest.mark.parametrize(
    "equations",
    [
        ("g = one_bwd: w * p [in transpose(jvp(one))]", "t = g + z"),  # there is no other gradient
        (
            "h = one: w * p [in jvp(jvp())]",
            "t = one_bwd: h + z [in jvp(transpose(jvp()))]",
        ),  # nobody transposes the outer one
        # what a backward pass computes again is of the backward pass
        (
            "h = one_bwd: w * p [in transpose(jvp(jvp(one)))/rematted_computation]",
            "t = one_bwd: h + z [in transpose(jvp(one))]",
        ),
    ],
)
def test_what_stays_backward(equations):
    flat = body(*equations)
    assert lines(run("advance_inner_gradients", flat)) == lines(flat)


def test_only_in_the_loop_of_the_outer_gradient():
    """A step may sample by gradients in one loop, and train in another."""
    flat = program(
        """
        tasks: one 0
        inputs: w f32[4]
        loop 0: 2 microbatches, gpipe
        carry z f32[4] = w, then t, at last total
        loop 1: 2 microbatches, gpipe
        carry y f32[4] = w, then s, at last last
        0: t = one_bwd: z * w [in jvp(transpose(jvp(one)))]
        1: r = one_bwd: y * w [in jvp(transpose(jvp(one)))]
        1: s = one_bwd: r * w [in transpose(jvp(one))]
        results: total, last
        """
    )
    assert [n.backward for n in run("advance_inner_gradients", flat).nodes] == [True, False, True]


WIDTH = 8
layers = [mm.task(lambda w, x: x + jnp.tanh(x @ w), f"layer {i}", devices=[i]) for i in range(2)]


def net(params, x):
    for layer, w in zip(layers, params["layers"], strict=True):
        x = layer(w, x)
    return x @ params["head"]


def penalty(params, batch):
    """That of a Wasserstein critic."""
    slopes = jax.grad(lambda x: net(params, x).sum())(batch[0])
    return jnp.mean(net(params, batch[0])) + jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)


def meta(params, batch):
    """A step of training within the forward pass."""

    def error(p, x):
        return jnp.mean((net(p, x) - batch[1]) ** 2)

    inner = jax.grad(error)(params, batch[0])
    return error(jax.tree.map(lambda p, g: p - 0.1 * g, params, inner), 2 * batch[0])


def equation(params, batch):
    """A differential equation that the network should fulfil."""

    def slope(x):
        return jax.grad(lambda x: net(params, x).sum())(x)[:, 0]

    second = jax.grad(lambda x: slope(x).sum())(batch[0])[:, 0]
    return jnp.mean((second - slope(batch[0])) ** 2)


def sharpness(params, batch):
    """A product with the Hessian."""

    def error(p):
        return jnp.mean((net(p, batch[0]) - batch[1]) ** 2)

    along = jax.tree.map(jnp.ones_like, params)
    bent = jax.jvp(jax.grad(error), (params,), (along,))[1]
    return error(params) + 0.1 * sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (along, bent)), strict=True))


STAGES = {penalty: (0, 1, 0), meta: (0, 1, 0, 1), equation: (0, 1, 0, 1, 0), sharpness: (0, 1, 0)}


def training(loss, schedule):
    rng = np.random.default_rng(0)
    weights = [(rng.normal(size=(WIDTH, WIDTH)) / 4).astype("f4") for _ in layers]
    params = {"layers": weights, "head": rng.normal(size=(WIDTH, 2)).astype("f4")}
    batch = rng.normal(size=(8, WIDTH)).astype("f4"), rng.normal(size=(8, 2)).astype("f4")
    grad = jax.value_and_grad(loss)
    return mm.microbatch(grad, argnum=1, num_microbatches=4, schedule=schedule, reduce="mean"), params, batch


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
@pytest.mark.parametrize("loss", STAGES, ids=lambda loss: loss.__name__)
def test_inner_gradients_are_stages_of_a_pipeline(loss, schedule):
    step, *args = training(loss, schedule)
    (plan,) = mm.jit(step).lower(*args).program.loops
    assert plan.placement == STAGES[loss] and plan.in_order
    assert_agrees(step, *args, tolerance=1e-4)


def scoped(i):
    def layer(w, x):
        with jax.named_scope(f"layer_{i}"):
            return x + jnp.tanh(x @ w)

    return layer


@pytest.mark.parametrize("loss", [penalty, meta, sharpness])
def test_inner_gradients_of_named_scopes_are_stages_too(loss, monkeypatch):
    """What transposes in a scope belongs to the call that it transposes, be that a gradient itself."""
    monkeypatch.setitem(globals(), "layers", [scoped(i) for i in range(2)])
    step, *args = training(loss, "1f1b")
    with mm.register_task("layer_0", devices=[0]), mm.register_task("layer_1", devices=[1]):
        (plan,) = mm.jit(step).lower(*args).program.loops
        assert plan.placement == STAGES[loss] and plan.in_order
        assert_agrees(step, *args, tolerance=1e-4)


def test_without_the_pass_microbatches_run_one_after_the_other(monkeypatch):
    switch_off(monkeypatch, "advance_inner_gradients")
    step, *args = training(meta, "1f1b")
    with pytest.warns(UserWarning, match="one after the other"):
        (plan,) = mm.jit(step).lower(*args).program.loops
    assert not plan.in_order
