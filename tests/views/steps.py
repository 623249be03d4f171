"""Steps and recordings that tests of views share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import manymesh as mm
from manymesh.inspect import Recording, Span

MICROBATCHES = 3


def two_stages():
    """A training step of two stages, its parameters and its batch; three microbatches."""
    front = mm.task(lambda w, x: jnp.sin(x @ w), "front", devices=[0, 1], device_axes=("d",))
    back = mm.task(lambda w, h: jnp.tanh(h @ w), "back", devices=[2])

    def loss(params, x):
        return jnp.mean(back(params["back"], front(params["front"], x)) ** 2)

    def train(params, x):
        grad = mm.microbatch(
            jax.value_and_grad(loss), argnum=1, num_microbatches=MICROBATCHES, schedule="1f1b", reduce="mean"
        )
        value, grads = grad(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {"front": jnp.ones((4, 8)) / 4, "back": jnp.ones((8, 2)) / 8}
    return mm.jit(train, donate_argnums=0), params, jnp.ones((MICROBATCHES * 2, 4))


def made_up() -> Recording:
    """A recording with times that are written down: two stages, two microbatches, an optimizer."""
    run, ms = [], 1e-3

    def add(submesh, label, kind, stage, microbatch, start, end, **more):
        run.append(Span(submesh, label, kind, stage, microbatch, start * ms, end * ms, **more))

    def cross(submesh, maker, stage, microbatch, start, end, source):
        add(submesh, f"{maker} -> submesh {submesh}", "transfer", stage, microbatch, start, end, source=source,
            nbytes=4096, carries=f"float32[8,128] from {maker}")  # fmt: skip

    add(0, "front", "forward", 0, 0, 0, 2)
    cross(1, "front", 0, 0, 2, 2.5, 0)
    add(0, "front", "forward", 0, 1, 2, 4)
    add(1, "back", "forward", 1, 0, 2.5, 4.5)
    cross(1, "front", 0, 1, 4, 4.5, 0)
    add(1, "back_bwd", "backward", 1, 0, 4.5, 8.5)
    cross(0, "back_bwd", 1, 0, 8.5, 9, 1)
    add(1, "back", "forward", 1, 1, 8.5, 10.5)
    add(0, "front_bwd", "backward", 0, 0, 9, 13, waited_for="back_bwd -> submesh 0")
    add(1, "back_bwd", "backward", 1, 1, 10.5, 14.5)
    cross(0, "back_bwd", 1, 1, 14.5, 15, 1)
    add(0, "front_bwd", "backward", 0, 1, 15, 19, waited_for="back_bwd -> submesh 0")
    add(1, "after_1", "other", None, None, 14.5, 16)
    add(0, "after_0", "other", None, None, 19, 20)
    return Recording(tuple(run), ("data 2, devices 0,1", "device 2"), ("train",))


def predicted() -> list[tuple[object, ...]]:
    """A prediction of it as plain tuples: everything a little faster, one transfer much faster."""
    return [
        (*s[:5], s.start * 0.9, s.start * 0.9 + (0.2e-3 if s.kind == "transfer" else (s.end - s.start) * 0.9))
        for s in made_up().spans
    ]
