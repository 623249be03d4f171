"""A task that scans over layers keeps of each layer what a task of one layer would keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flat import switch_off
from stages import assert_agrees

LAYERS, WIDTH, ROWS = 4, 8, 4
ACTIVATIONS = LAYERS * ROWS * WIDTH * 4  # bytes: an activation of every layer of a task


def gelu(p, x):
    return jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w[0] + w[1]) @ w[0].T, None), x, p)[0]


def with_results(p, x):
    """Of every layer a number leaves the task, which the backward pass does not read."""
    x, means = jax.lax.scan(lambda x, w: (jax.nn.silu(x @ w[0]), jnp.mean(x)), x, p)
    return x * means.mean()


def with_constants(p, x):
    """All layers share one weight."""
    return jax.lax.scan(lambda x, b: (x + jax.nn.gelu(x @ p[0][0] + b), None), x, p[1])[0]


def reversed_after_another(p, x):
    x = gelu(p, x)
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) * jax.nn.sigmoid(w[1] + x), None), x, p, reverse=True)[0]


def with_keys(p, x):
    def layer(carry, w):
        x, key = carry
        key, own = jax.random.split(key)
        h = jax.nn.gelu(x @ w[0]) * jax.random.bernoulli(own, 0.8, x.shape) / 0.8
        return (x + h, key), None

    return jax.lax.scan(layer, (x, jax.random.key(0)), p, unroll=2)[0][0]


def nothing_to_gain(p, x):
    """The product is read as it is."""
    return jax.lax.scan(lambda x, w: (x @ w[0], None), x, p)[0]


def looks_for_extremum(p, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) - (x * 0.3 + w[1]).min(-1, keepdims=True), None), x, p)[0]


def recomputed(p, x):
    layer = jax.checkpoint(lambda x, w: (x + jax.nn.gelu(x @ w[0] + w[1]), None))
    return jax.lax.scan(layer, x, p)[0]


def parameters():
    rng = np.random.default_rng(0)
    layers = lambda *shape: rng.normal(size=(LAYERS, *shape)).astype("f4") / 3  # noqa: E731
    return [(layers(WIDTH, WIDTH), layers(WIDTH)) for _ in range(2)], rng.normal(size=(2 * ROWS, WIDTH)).astype("f4")


def gradient(fun, schedule="1f1b", devices=(0, 1)):
    tasks = [mm.task(fun, f"t{k}", devices=[d]) for k, d in enumerate(devices)]

    def loss(params, x):
        for task, p in zip(tasks, params, strict=True):
            x = task(p, x)
        return jnp.mean(x**2)

    return mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, schedule=schedule, reduce="mean")


def kept(fun, **options):
    """Bytes that the first task keeps for a microbatch."""
    body = list(mm.jit(gradient(fun, **options)).lower(*jax.eval_shape(parameters)).program.body(0))
    read = {v for f in body if f.kind != "F" for v in f.invars}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in body[0].outvars if v in read)


# What a task keeps, in activations of all its layers; small things, keys and masks aside.
CASES = {
    gelu: 3,  # the operand of each layer, that of the activation function, and its tanh
    with_results: 3,  # the operand, the product and its sigmoid
    with_constants: 3,
    reversed_after_another: 6,
    with_keys: 3,
    nothing_to_gain: 1,
    looks_for_extremum: 2,
    recomputed: 1,
}


@pytest.mark.parametrize("fun", CASES)
def test_what_is_kept_of_every_layer(fun, monkeypatch):
    """Not more than of a layer for itself, and less than plain JAX keeps, where there is anything to gain."""
    found = kept(fun)
    assert CASES[fun] * ACTIVATIONS <= found <= (CASES[fun] + 0.75) * ACTIVATIONS
    switch_off(monkeypatch, "minimise_scans")
    assert found < kept(fun) if fun not in (nothing_to_gain, recomputed, looks_for_extremum) else found <= kept(fun)


def test_what_is_kept_on_an_accelerator():
    """The operands alone."""
    assert kept(gelu, devices=mm.planned_devices(2)) == 2 * ACTIVATIONS


# Without optimizations, as tests compile, XLA makes 0/0 of the derivative of that minimum in plain JAX, too.
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
@pytest.mark.parametrize("fun", [fun for fun in CASES if fun is not looks_for_extremum])
def test_values_and_gradients(fun, schedule):
    """Those of the reference mode; of halves of a backward pass, too."""
    assert_agrees(gradient(fun, schedule), *parameters(), tolerance=1e-4)


def test_what_the_task_returns_as_well_stays():
    """A value of every layer that is a result, and read by the backward pass, is handed out as before."""

    def returned(p, x):
        x, hidden = jax.lax.scan(lambda x, w: (x + jax.nn.gelu(h := x @ w[0]) * 1.0, h), x, p)
        return x + jnp.mean(hidden, 0)

    assert_agrees(gradient(returned), *parameters(), tolerance=1e-4)
