"""What stands between tasks holds as little for the backward pass as it does within one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import manymesh as mm
from stages import assert_same

LAYERS, WIDTH, ROWS = 4, 32, 64
STAGES = [Mesh(np.array([d]), ("m",), axis_types=(AxisType.Auto,)) for d in jax.devices()[:2]]


def norm(h):
    h = h - h.mean(-1, keepdims=True)
    return h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)


def task(function):
    return mm.task(function, "layer", mesh=STAGES)


WITHIN = task(lambda w, h: h + jax.nn.gelu(norm(h) @ w["up"]) @ w["down"])
BEHIND_NORM = task(lambda w, x: jax.nn.gelu(x @ w["up"]) @ w["down"])
UP, DOWN = task(lambda w, x: x @ w["up"]), task(lambda w, x: x @ w["down"])

WAYS = {
    "norm": lambda w, h: h + BEHIND_NORM(w, norm(h)),
    "norm and gelu": lambda w, h: h + DOWN(w, jax.nn.gelu(UP(w, norm(h)))),
}


def step_of(layer, schedule):
    def loss(ws, x):
        return jnp.mean((norm(lax.scan(lambda h, w: (layer(w, h), None), x, ws)[0]) - 1) ** 2)

    def step(ws, x):
        grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=8, schedule=schedule, reduce="mean")
        return grad(ws, x)

    rng = np.random.default_rng(0)
    ws = {k: jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)), jnp.float32) / WIDTH for k in ("up", "down")}
    return step, (ws, jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32))


def held(step, args):
    lowered = mm.jit(step).lower(*args)
    crossing = sum(e.nbytes for e in lowered.program.edges if e.loop is not None)
    return max(memory.peak_bytes for memory in lowered.report().memory.values()), crossing


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble-h1"])
@pytest.mark.parametrize("name", WAYS)
def test_as_little_as_within_a_task(name, schedule):
    usual, crosses = held(*step_of(WITHIN, schedule))
    step, args = step_of(WAYS[name], schedule)
    peak, crossing = held(step, args)
    assert peak <= 1.04 * usual
    assert crossing == crosses
    with mm.ignore_transforms():
        wanted = jax.jit(step)(*args)
    assert_same(mm.jit(step)(*args), wanted)
