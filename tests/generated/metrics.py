"""What steps return beside their loss: of the rows of each microbatch, and of gradients and updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .operations import WIDTH

# Of float32[rows, WIDTH] and of int32[rows] between 0 and 7.
METRICS: dict[str, Callable[[Any, Any], Any]] = {
    "correct": lambda y, ids: jnp.sum(jnp.argmax(y, -1) == ids % WIDTH),
    "accuracy": lambda y, ids: jnp.mean(jnp.argmax(y, -1) == ids % WIDTH),
    "wrong, unsigned": lambda y, ids: (99 - jnp.sum(ids > 3, dtype=jnp.uint32)).astype(jnp.float32),
    "unsigned": lambda y, ids: jnp.sum(ids.astype(jnp.uint32)),
    "small": lambda y, ids: jnp.sum(ids.astype(jnp.int8)),
    "that wraps": lambda y, ids: jnp.sum(ids.astype(jnp.uint8) * 99, dtype=jnp.uint8),
    "finite": lambda y, ids: jnp.all(jnp.isfinite(y)),
    "any": lambda y, ids: jnp.any(ids[:, None] > y + 5),
    "of each class": lambda y, ids: jnp.zeros(8).at[ids].add(1.0),
    "loss of each class": lambda y, ids: jax.ops.segment_sum(jnp.mean(jnp.tanh(y), -1), ids, num_segments=8),
    "histogram": lambda y, ids: jnp.bincount(ids, length=8),
    "load": lambda y, ids: jax.nn.one_hot(ids, 8).mean(0),
    "largest": lambda y, ids: y.max(),
    "smallest of each": lambda y, ids: y.min(0),
    "norm": lambda y, ids: jnp.sqrt(jnp.sum(jnp.tanh(y) ** 2) + 0.1),
    "moments": lambda y, ids: (jnp.tanh(y).mean(0), jnp.tanh(y).var(0)),
    "perplexity": lambda y, ids: jnp.exp(jnp.mean(jnp.tanh(y))),
    "tokens, a number": lambda y, ids: ids.size,
    "tokens in bfloat16": lambda y, ids: (ids != 0).sum().astype(jnp.bfloat16),
    "most": lambda y, ids: jnp.argmax(ids),
    "last row": lambda y, ids: y[-1],
    "no rows": lambda y, ids: y[:0],
    "complex": lambda y, ids: jnp.tanh(y[0, 0]) + 1j * ids[0],
}

# Of gradients, updates and parameters.
WATCHED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "norm": lambda grads, updates, params: optax.tree.norm(grads),
    "norms": lambda grads, updates, params: jax.tree.map(lambda g: jnp.sqrt(jnp.sum(g * g)), grads),
    "size of updates": lambda grads, updates, params: optax.tree.norm(updates) / (0.1 + optax.tree.norm(params)),
    "finite": lambda grads, updates, params: jnp.all(
        jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])
    ),
    "largest": lambda grads, updates, params: jax.tree.reduce(jnp.maximum, jax.tree.map(jnp.max, params)),
    "along": lambda grads, updates, params: optax.tree.vdot(grads, updates),
    "numbers": lambda grads, updates, params: sum(p.size for p in jax.tree.leaves(params)),
}

# What of the parameters is added to the loss, outside of tasks.
PENALTIES: dict[str, Callable[[Any], Any]] = {
    "squares": lambda params: 0.01 * sum(jnp.sum(p * p) for p in jax.tree.leaves(params)),
    "magnitudes": lambda params: 0.01 * sum(jnp.abs(p).mean() for p in jax.tree.leaves(params)),
    "norm": lambda params: 0.01 * optax.tree.norm(params),
    "halves": lambda params: 0.5 * 1e-2 * jax.tree.reduce(lambda a, p: a + (p**2).mean(), params, 0.0),
}
