"""Models of Flax NNX that tests share.

`Decoder` has the structure of Flax's Gemma example: grouped heads with rotary positions, layers that attend to a sliding
window and layers that attend to everything in turn, soft caps on attention and on logits, norms before and after each
block, a gated feed-forward layer, and an embedding that is the output head as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import manymesh as mm
from flax import nnx


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder; tiny by default."""

    layers: int = 4
    vocabulary: int = 32
    embed: int = 24
    heads: int = 4
    groups: int = 2
    width: int = 4
    hidden: int = 48
    window: int = 3
    attention_cap: float = 20.0
    logit_cap: float = 10.0


def soft_cap(x: Any, cap: float) -> Any:
    return jnp.tanh(x / cap) * cap


def rotate(x: Any) -> Any:
    """Rotary positions for [batch, sequence, heads, width]."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)], -1
    )


class Norm(nnx.Module):
    def __init__(self, size: int, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.zeros(size), out_sharding=("embed",))

    def __call__(self, x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + self.scale[...])


class Embedder(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        table = jax.random.normal(rngs.params(), (config.vocabulary, config.embed)) * 0.1
        self.table = nnx.Param(table, out_sharding=("vocabulary", "embed"))

    def encode(self, tokens: Any) -> Any:
        return self.table[...][tokens] * self.table.shape[1] ** 0.5

    def decode(self, x: Any) -> Any:
        return x @ self.table[...].T


class Attention(nnx.Module):
    def __init__(self, config: Config, local: bool, rngs: nnx.Rngs) -> None:
        c = config
        self.config, self.local = c, local
        named = nnx.with_partitioning
        init = nnx.initializers.lecun_normal()
        key = rngs.params
        self.query = nnx.Param(named(init, ("embed", "heads"))(key(), (c.embed, c.heads * c.width)))
        self.key_value = nnx.Param(named(init, ("embed", "heads"))(key(), (c.embed, 2 * c.groups * c.width)))
        self.out = nnx.Param(named(init, ("heads", "embed"))(key(), (c.heads * c.width, c.embed)))

    def __call__(self, x: Any) -> Any:
        c = self.config
        batch, length, _ = x.shape
        query = rotate((x @ self.query[...]).reshape(batch, length, c.heads, c.width))
        key, value = jnp.split((x @ self.key_value[...]).reshape(batch, length, 2 * c.groups, c.width), 2, axis=2)
        query = query.reshape(batch, length, c.groups, c.heads // c.groups, c.width) * c.width**-0.5
        scores = soft_cap(jnp.einsum("bqghd,bkgd->bghqk", query, rotate(key)), c.attention_cap)
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        seen = (distance >= 0) & (distance < (c.window if self.local else length))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        mixed = jnp.einsum("bghqk,bkgd->bqghd", weights, value).reshape(batch, length, c.heads * c.width)
        return mixed @ self.out[...]


class FeedForward(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        sizes = {"gate": (config.embed, config.hidden), "up": (config.embed, config.hidden)}
        for name, shape in sizes.items():
            value = nnx.initializers.lecun_normal()(rngs.params(), shape)
            setattr(self, name, nnx.Param(value, out_sharding=("embed", "hidden")))
        down = nnx.initializers.lecun_normal()(rngs.params(), (config.hidden, config.embed))
        self.down = nnx.Param(down, out_sharding=("hidden", "embed"))

    def __call__(self, x: Any) -> Any:
        return (nnx.gelu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


class Block(nnx.Module):
    def __init__(self, config: Config, local: bool, rngs: nnx.Rngs) -> None:
        self.before_attention = Norm(config.embed, rngs)
        self.attention = Attention(config, local, rngs)
        self.after_attention = Norm(config.embed, rngs)
        self.before_feed_forward = Norm(config.embed, rngs)
        self.feed_forward = FeedForward(config, rngs)
        self.after_feed_forward = Norm(config.embed, rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.after_attention(self.attention(self.before_attention(x)))
        return x + self.dropout(self.after_feed_forward(self.feed_forward(self.before_feed_forward(x))))


class Decoder(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedder = Embedder(config, rngs)
        self.blocks = nnx.List([Block(config, i % 2 == 0, rngs) for i in range(config.layers)])
        self.norm = Norm(config.embed, rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embedder.encode(tokens)
        for block in self.blocks:
            x = block(x)
        return soft_cap(self.embedder.decode(self.norm(x)), self.config.logit_cap)


def decoder(seed: int = 0, config: Config = Config()) -> Decoder:  # noqa: B008  # frozen
    with nnx.use_eager_sharding(False):
        return Decoder(config, nnx.Rngs(seed))


def in_stages(model: Decoder, meshes: Any, rules: Any) -> Decoder:
    """The model with its blocks in as many stages as there are meshes; the tied head runs on the last one."""
    count = len(model.blocks)
    place = [{"mesh": mesh, "logical_axes": rules} for mesh in meshes]
    for i in range(count):
        model.blocks[i] = mm.nnx.task(model.blocks[i], f"block_{i}", **place[i * len(meshes) // count])
    embedder = type(model.embedder)
    model.embedder = mm.nnx.task(
        mm.nnx.task(model.embedder, "encode", methods=["encode"], **place[0]), "head", methods=["decode"], **place[-1]
    )
    assert isinstance(model.embedder, embedder)
    model.norm = mm.nnx.task(model.norm, "norm", **place[-1])
    return model


def loss_of(model: Decoder, tokens: Any) -> Any:
    """Mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2))
