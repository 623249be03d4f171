"""A decoder-only transformer in Flax Linen whose layers are tasks on submeshes.

The layers are plain Linen modules. Two things make them a pipeline: parameters and activations name their
axes (``"heads"``, ``"mlp"``, ``"batch"``), and `Decoder.setup` wraps each layer in `manymesh.flax.task` with the
submesh it belongs to. Shapes in comments: B sequences, S positions, E features, H heads, D features a head, V bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import manymesh as mm
from manymesh.flax import shard_axes, task

# What the names of axes mean on a submesh with the device axes "data" and "model".
# A name without a rule would be reported; None says that an axis is not sharded.
RULES = (
    ("batch", "data"),
    ("heads", "model"),
    ("mlp", "model"),
    ("vocab", None),
    ("sequence", None),
    ("embed", None),
    ("kv", None),
)


class Embedding(nn.Module):
    """Bytes and positions to features, and features back to bytes with the same table."""

    vocab: int
    length: int
    features: int

    def setup(self) -> None:
        normal = nn.initializers.normal(0.02)
        self.table = self.param("table", shard_axes("vocab", "embed", init=normal), (self.vocab, self.features))
        self.positions = self.param(
            "positions", shard_axes("sequence", "embed", init=normal), (self.length, self.features)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:  # int32[B, S] -> float32[B, S, E]
        x = self.table[tokens] + self.positions[: tokens.shape[1]]
        return mm.with_sharding_constraint(x, ("batch", "sequence", "embed"))

    def attend(self, x: jax.Array) -> jax.Array:  # float32[B, S, E] -> float32[B, S, V]
        return mm.with_sharding_constraint(x @ self.table.T, ("batch", "sequence", "vocab"))


class Attention(nn.Module):
    """Causal self-attention."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # float32[B, S, E]
        features = x.shape[-1]
        shape = (self.heads, features // self.heads)
        into_heads = shard_axes("embed", "heads", "kv")
        query, key, value = (
            nn.DenseGeneral(shape, use_bias=False, kernel_init=into_heads, name=name)(x)  # [B, S, H, D]
            for name in ("query", "key", "value")
        )
        query, key, value = mm.with_sharding_constraint((query, key, value), ("batch", "sequence", "heads", "kv"))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        from_heads = shard_axes("heads", "kv", "embed")
        return nn.DenseGeneral(features, axis=(-2, -1), use_bias=False, kernel_init=from_heads, name="out")(mixed)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a skip."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # float32[B, S, E]
        x = x + Attention(self.heads, name="attention")(_norm("attention_norm")(x))
        hidden = nn.Dense(4 * x.shape[-1], use_bias=False, kernel_init=shard_axes("embed", "mlp"), name="up")(
            _norm("mlp_norm")(x)
        )
        hidden = mm.with_sharding_constraint(nn.gelu(hidden), ("batch", "sequence", "mlp"))
        x = x + nn.Dense(x.shape[-1], use_bias=False, kernel_init=shard_axes("mlp", "embed"), name="down")(hidden)
        return mm.with_sharding_constraint(x, ("batch", "sequence", "embed"))


def _norm(name: str) -> nn.Module:
    return nn.LayerNorm(use_bias=False, scale_init=shard_axes("embed", init=nn.initializers.ones), name=name)


class Decoder(nn.Module):
    """The language model.

    Attributes:
      stages: where each stage runs; the blocks are dealt out to them in equal runs.
    """

    stages: Sequence[mm.Task]
    vocab: int = 256
    length: int = 128
    features: int = 128
    heads: int = 4
    blocks: int = 4

    def setup(self) -> None:
        first, count = self.stages[0], len(self.stages)
        self.embed = task(Embedding, task=first)(self.vocab, self.length, self.features)
        self.layers = [task(Block, task=self.stages[i * count // self.blocks])(self.heads) for i in range(self.blocks)]
        self.norm = _norm("norm")

    def __call__(self, tokens: jax.Array) -> jax.Array:  # int32[B, S] -> logits float32[B, S, V]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)  # no task: it runs where the values are
        # The head shares the table of the embedding but runs on the last stage: a method is a task as well.
        return task(self.embed.attend, "head", task=self.stages[-1])(x)


def next_byte_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each byte given those before it, in nats."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]))
