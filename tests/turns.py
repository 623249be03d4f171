"""Steps that take turns on one state, drawn: each reads some of it, replaces some, and hands on the rest from wherever it lies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import manymesh as mm
from manymesh._runtime._exchange import put

SHAPES = [(4, 4), (2, 4, 4), (4,)]
State = dict[str, Any]
Step = Callable[[State, Any], tuple[State, Any]]


def meshes() -> list[Mesh]:
    """Apart, overlapping, of other sizes and names; in two processes of four devices, of one or of both."""
    devices = np.array(jax.devices())[2:]
    cuts = [(devices[:2], "d"), (devices[2:4], "d"), (devices[4:5], "d"), (devices[:4].reshape(2, 2), "de")]
    return [Mesh(each, tuple(axes)) for each, axes in cuts]


def placed(draw: random.Random, shape: tuple[int, ...]) -> Any:
    """A value of the host, of the first device, or on some mesh."""
    value = np.full(shape, draw.uniform(-0.3, 0.3), np.float32)
    if draw.random() < 0.4:
        return draw.choice([np.asarray, jnp.asarray])(value)
    mesh = draw.choice(meshes())
    divides = shape[0] % mesh.shape["d"] == 0 and draw.random() < 0.4
    return put(value, jax.NamedSharding(mesh, jax.P("d") if divides else jax.P()))


def drawn_step(draw: random.Random, names: Sequence[str]) -> tuple[Step, tuple[int, ...]]:
    """A step, and what it donates."""
    reads = draw.sample(names, draw.randint(1, len(names)))
    writes = draw.sample(names, draw.randint(0, 2))
    tasks = [
        mm.task(lambda w, x: jnp.tanh(x + w.reshape(-1, 4).sum(0)), mesh=m) for m in meshes()[: draw.randint(0, 4)]
    ]
    calls = [draw.choice(tasks) if tasks and draw.random() < 0.7 else None for _ in reads]
    differentiated, twice, shift = draw.random() < 0.5, draw.random() < 0.3, draw.choice([0.0, jnp.arange(4.0) / 64])

    def loss(params: State, x: Any) -> Any:
        x = x + shift
        for name, call in zip(reads, calls, strict=True):
            x = call(params[name], x) if call is not None else x + params[name].reshape(-1, 4).mean(0)
        return jnp.mean(x**2)

    def step(state: State, x: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)({name: state[name] for name in reads}, x)
        grads = grads if differentiated else {}
        moved = {name: state[name] - 0.1 * grads.get(name, 0.1 * state[name] + 0.01 * value) for name in writes}
        return {**state, **moved, **({"again": state[names[0]]} if twice else {})}, value

    return step, (0,) if draw.random() < 0.4 else ()


def run(number: int) -> Any:
    draw = random.Random(number)
    names = [f"part_{k}" for k in range(draw.randint(3, 6))]
    steps = [drawn_step(draw, names) for _ in range(3)]
    jitted = [mm.jit(step, donate_argnums=donated) for step, donated in steps]
    state: State = {name: placed(draw, draw.choice(SHAPES)) for name in names}
    values = []
    for turn in range(6):
        state, value = draw.choice(jitted)(state, jnp.full((8, 4), 0.1 * turn))
        values.append(value)
    return mm.fetch((state, values))
