"""Layers are read, and their gradients stacked, through slices, reversals, padding and concatenations of stacks."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import manymesh as mm
from flat import lines, program, run
from stages import assert_agrees

WIDTH, COUNT = 16, 4  # of a layer, and of microbatches

READ = """
    tasks: one 0
    inputs: w f32[4,8], u f32[2,8]
    v = {view}
    r = v[{at}]
    p = one: r * 2.0
    results: p
"""

VIEWS = {
    "a slice": ("w[1:]", 1, "slice(a) start_indices=(2, 0) limit_indices=(3, 8)"),
    "a reversal": ("w[::-1]", 0, "slice(a) start_indices=(3, 0) limit_indices=(4, 8)"),
    "a concatenation": ("lax.concatenate([w[2:], u], 0)", 3, "slice(b) start_indices=(1, 0) limit_indices=(2, 8)"),
    "a repeated stack": ("jnp.tile(u, (2, 1))", 3, "slice(b) start_indices=(1, 0) limit_indices=(2, 8)"),
    "a padded stack": (
        "lax.pad(u, 0.0, [(2, 1, 0), (0, 0, 0)])",
        3,
        "slice(b) start_indices=(1, 0) limit_indices=(2, 8)",
    ),
    "what is scaled and cast": (
        "(w[1:] * 3.0).astype(jnp.bfloat16)",
        1,
        "slice(a) start_indices=(2, 0) limit_indices=(3, 8)",
    ),
}


@pytest.mark.parametrize(("view", "at", "expected"), VIEWS.values(), ids=VIEWS)
def test_a_layer_is_read_of_what_it_is_in(view, at, expected):
    after = lines(run("remove_dead", run("see_through_stacks", program(READ.format(view=view, at=at)))))
    assert expected in after
    assert after.count("slice(") == 1 and not any(f"= {name}(" in after for name in ("rev", "pad", "concatenate"))


@pytest.mark.parametrize("view", ["w[:, 1:]", "lax.cumsum(w, axis=0)", "lax.pad(w, 1.0, [(1, 0, 0), (0, 0, 0)])"])
def test_what_is_no_layer_stays(view):
    flat = run("remove_dead", program(READ.format(view=view, at=1)))
    assert run("see_through_stacks", flat) is flat


def test_a_gradient_of_a_slice_is_a_longer_stack():
    """Zeros are layers of it as well."""
    source = """
        tasks: one 0, two 1
        inputs: x f32[4], y f32[4]
        a = one: x + 1.0
        b = two: y + 1.0
        s = lax.concatenate([a[None], b[None]], 0)
        t = lax.pad(s, 0.0, [(1, 0, 0), (0, 0, 0)])
        results: t
    """
    flat = program(source, stacked={"s": "ab"})
    after = run("see_through_stacks", flat)
    zero, *layers = after.stacked[after.outvars[0]]
    assert tuple(layers) == flat.stacked[flat.nodes[-1].inputs[0]]
    assert zero.aval.shape == (4,) and "= pad(" not in lines(after)


def stages(count, devices=1):
    """Submeshes of some devices each."""
    mesh = jax.make_mesh((count, devices), ("stage", "data"), devices=jax.devices()[: count * devices])
    return list(mm.submeshes(mesh, "stage"))


def trained(loss, layers):
    """A step of SGD, and its arguments."""

    def step(ws, x):
        grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=COUNT, schedule="1f1b", reduce="mean")
        value, grads = grad(ws, x)
        return value, ws - 0.1 * grads

    rng = np.random.default_rng(0)
    ws = jnp.asarray(rng.normal(size=(layers, WIDTH, WIDTH)) / 4, jnp.float32)
    return step, ws, jnp.asarray(rng.normal(size=(4 * COUNT, WIDTH)), jnp.float32)


def weights_that_cross(step, *args):
    """How often a weight or its gradient crosses in one microbatch, and how often in a step besides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        edges = mm.jit(step).lower(*args).program.edges
    weights = [e for e in edges if e.var.aval.shape[-2:] == (WIDTH, WIDTH)]
    return sum(e.loop is not None for e in weights), sum(e.loop is None for e in weights)


def scanned(take, meshes):
    layer = mm.task(lambda w, x: jnp.tanh(x @ w), "layer", mesh=meshes)
    return lambda ws, x: jnp.mean(lax.scan(lambda x, w: (layer(w, x), None), x, take(ws))[0] ** 2)


SLICES = {  # what is taken of how many layers, on how many submeshes, and how many weights cross in a step
    "the first": (lambda ws: ws[:3], 4, 2, 0),
    "those before an early exit": (lambda ws: ws[:4], 8, 2, 4),
    "other stretches than the blocks": (lambda ws: ws[:6], 8, 4, 8),
    "all but the first": (lambda ws: ws[1:], 4, 2, 2),
    "every second": (lambda ws: ws[::2], 8, 2, 0),
    "backwards": (lambda ws: ws[::-1], 4, 2, 0),
    "a slice of a cast": (lambda ws: (ws.astype(jnp.bfloat16) * 2)[:3].astype(jnp.float32) / 2, 4, 2, 0),
    "a slice of a slice": (lambda ws: ws[:5][:3], 8, 2, None),
    "all of them twice": (lambda ws: jnp.tile(ws, (2, 1, 1)), 2, 2, 4),
    "frozen below": (lambda ws: jnp.concatenate([lax.stop_gradient(ws[:2]), ws[2:]]), 4, 2, 0),
}


@pytest.mark.parametrize(("take", "layers", "count", "moves"), SLICES.values(), ids=SLICES)
def test_gradients_of_a_slice_stay_where_they_are_made(take, layers, count, moves):
    """None crosses in a microbatch; those of layers that lie elsewhere do once a step, as their weights."""
    step, *args = trained(scanned(take, stages(count)), layers)
    inside, outside = weights_that_cross(step, *args)
    assert inside == 0
    assert outside == (outside if moves is None else moves)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_agrees(step, *args)


def test_layers_that_several_submeshes_share_are_no_finding():
    """They go out in any case."""
    step, *args = trained(scanned(lambda ws: jnp.tile(ws, (2, 1, 1)), stages(2)), 2)
    mm.jit(step, strict=True).lower(*args)


def run_layers(ws, x, meshes, begin=0):
    """A Python loop over layers, two on each submesh."""
    for i in range(len(ws)):
        x = mm.task(lambda w, x: jnp.tanh(x @ w), "layer", mesh=meshes[(begin + i) // 2])(ws[i], x)
    return x


def several(*takes):
    """The sum of the losses of several slices, each scanned."""
    losses = [scanned(take, stages(2)) for take in takes]
    return lambda ws, x: sum(loss(ws, x) for loss in losses)


def all_but_the_last(ws, x):
    x = lax.scan(lambda x, w: (mm.task(lambda w, x: jnp.tanh(x @ w), "layer", mesh=stages(2))(w, x), None), x, ws[:3])[
        0
    ]
    return jnp.mean(run_layers(ws[3:], x, stages(2), 3) ** 2)


LOSSES = {
    "two halves": several(lambda ws: ws[:2], lambda ws: ws[2:]),
    "two that overlap": several(lambda ws: ws[:3], lambda ws: ws[1:]),
    "all and some": several(lambda ws: ws, lambda ws: ws[:2]),
    "a sum of slices": several(lambda ws: ws[:3] + ws[1:]),
    "a Python loop": lambda ws, x: jnp.mean(run_layers(ws[:3], x, stages(2)) ** 2),
    "the last by itself": all_but_the_last,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradients_of_several_slices_stay_where_they_are_made(loss):
    step, *args = trained(loss, 4)
    assert weights_that_cross(step, *args)[0] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_agrees(step, *args)


@pytest.mark.parametrize("flip", [lambda s: s[::-1], lambda s: jnp.flip(s, 0)], ids=["a slice", "flip"])
def test_skips_of_a_scan_are_read_backwards(flip):
    """An encoder and a decoder in a V: each skip, and its gradient, stays on its submesh."""
    encode = mm.task(lambda w, x: jnp.tanh(x @ w), "encode", mesh=stages(2))
    decode = mm.task(lambda w, x, s: jnp.tanh((x + s) @ w), "decode", mesh=stages(2)[::-1])

    def loss(params, x):
        x, skips = lax.scan(lambda x, w: (encode(w, x),) * 2, x, params["down"])
        x, _ = lax.scan(lambda x, ws: (decode(ws[0], x, ws[1]), None), x, (params["up"], flip(skips)))
        return jnp.mean(x**2)

    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=COUNT, schedule="zbv", reduce="mean")
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=(4, WIDTH, WIDTH)) / 4, jnp.float32) for k in ("down", "up")}
    args = params, jnp.asarray(rng.normal(size=(4 * COUNT, WIDTH)), jnp.float32)
    edges = mm.jit(grad).lower(*args).program.edges
    assert sorted((e.source, e.target, e.var.aval.shape) for e in edges) == 2 * [(0, 1, (4, WIDTH))] + 2 * [
        (1, 0, (4, WIDTH))
    ]
    assert_agrees(grad, *args)


def test_random_keys_of_a_scan_are_read_backwards():
    """Keys are stacked like any other value."""
    draw = mm.task(lambda k, x: (jax.random.fold_in(k, 1), x + jax.random.normal(k, (WIDTH,))), "draw", mesh=stages(2))
    add = mm.task(lambda k, x: x * jax.random.uniform(k, (WIDTH,)), "add", mesh=stages(2)[::-1])

    def step(keys, x):
        x, new = lax.scan(lambda x, k: draw(k, x)[::-1], x, keys)
        x, _ = lax.scan(lambda x, k: (add(k, x), None), x, new[1:][::-1])
        return x, new[:2]

    assert_agrees(step, jax.random.split(jax.random.key(0), 4), jnp.ones(WIDTH))


def test_stacks_without_microbatches():
    """The gradient of a slice lies in blocks like the weights."""
    loss = scanned(lambda ws: ws[:3], stages(2))

    def step(ws, m, x):
        grads = jax.grad(loss)(ws, x)
        return ws - 0.1 * (0.9 * m + grads), 0.9 * m + grads

    _, ws, x = trained(loss, 4)
    program = mm.jit(step, strict=True).lower(ws, ws * 0, x).program  # a finding is an error
    assert len(program.stacked_inputs) == len(program.stacked_outputs) == 2
    assert {e.var.aval.shape for e in program.edges} == {(4 * COUNT, WIDTH)}
    assert_agrees(step, ws, ws * 0, x)
