"""The workload of the pipeline benchmarks: residual blocks, mean squared error, Adam.

Each block is ``x <- LayerNorm(x + gelu(x W1) W2)``, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

RATE, DECAY_1, DECAY_2, EPSILON = 1e-4, 0.9, 0.999, 1e-8

Weights = list[tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Size:
    """The size of the problem; ``batch`` counts rows."""

    blocks: int = 8
    width: int = 512
    hidden: int = 2048
    batch: int = 1536
    microbatches: int = 8
    stages: int = 2

    def weights(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Initial weights of every block."""
        rng = np.random.default_rng(0)
        shapes = (self.width, self.hidden), (self.hidden, self.width)
        return [tuple(rng.normal(0, 0.02, s).astype(np.float32) for s in shapes) for _ in range(self.blocks)]

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets: float32[batch, width] each."""
        rng = np.random.default_rng(1)
        return tuple(rng.normal(size=(self.batch, self.width)).astype(np.float32) for _ in range(2))

    def stage_weights(self) -> list[Any]:
        """Initial weights of each stage."""
        each = self.blocks // self.stages
        weights = self.weights()
        return [weights[s * each : (s + 1) * each] for s in range(self.stages)]


def norm(x: jax.Array) -> jax.Array:
    """Layer normalisation without parameters."""
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)


def blocks(weights: Weights, x: jax.Array) -> jax.Array:
    """Runs the blocks of a stage."""
    for up, down in weights:
        x = norm(x + jax.nn.gelu(x @ up, approximate=True) @ down)
    return x


def mean_squared_error(x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss."""
    return jnp.mean((x - y) ** 2)


def adam(state: Any, grads: Any) -> Any:
    """One step of Adam on ``(weights, first moment, second moment, count)``."""
    weights, first, second, count = state
    count = count + 1
    first = jax.tree.map(lambda m, g: DECAY_1 * m + (1 - DECAY_1) * g, first, grads)
    second = jax.tree.map(lambda v, g: DECAY_2 * v + (1 - DECAY_2) * g * g, second, grads)
    scale_1, scale_2 = 1 / (1 - DECAY_1**count), 1 / (1 - DECAY_2**count)
    weights = jax.tree.map(
        lambda w, m, v: w - RATE * m * scale_1 / (jnp.sqrt(v * scale_2) + EPSILON), weights, first, second
    )
    return weights, first, second, count


def fresh_state(weights: Any) -> Any:
    """What `adam` starts from, on the host."""
    zeros = jax.tree.map(np.zeros_like, weights)
    return weights, zeros, jax.tree.map(np.zeros_like, weights), np.float32(0)
