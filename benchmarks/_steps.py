"""Training steps whose cost is predicted: the README's, a decoder of unequal stages, an encoder and a decoder.

All take ``(state, batch)`` and give ``(loss, state)`` or ``(state, loss)``; the state is donated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformer import Block

import manymesh as mm

Step = tuple[Any, tuple[Any, Any]]  # the jitted step and its arguments
README = Path(__file__).resolve().parents[1] / "README.md"


def readme() -> Step:
    """The example of the README, word for word, up to its first call."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)[:1]
    names: dict[str, Any] = {}
    exec(compile(code.split("print(step.lower")[0], "README.md", "exec"), names)
    return _placed(names["step"], (names["state"], names["batch"]))


class Cross(nn.Module):
    """A block whose attention reads what an encoder made."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, read: jax.Array) -> jax.Array:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, use_bias=False)(y, read)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


def decoder(width: int = 256, length: int = 64, count: int = 8, layers: Sequence[int] = (1, 3, 2)) -> Step:
    """A decoder on three devices that have different numbers of blocks, with a table of 512 words, 1F1B, AdamW."""
    block = Block(heads=4)

    def stage(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = block.apply({"params": w}, x)
        return x

    tasks = [mm.task(stage, f"stage_{i}", devices=[i]) for i in range(len(layers))]
    embed = mm.task(lambda table, tokens: table[tokens], "embed", devices=[0])
    head = mm.task(_cross_entropy, "head", devices=[len(layers) - 1])

    def loss(params: Any, batch: Any) -> jax.Array:
        x = embed(params["table"], batch["tokens"])
        for task, w in zip(tasks, params["stages"], strict=True):
            x = task(w, x)
        return head(params["head"], x, batch["targets"])

    rng = np.random.default_rng(0)
    keys = iter(jax.random.split(jax.random.key(0), 16))
    weights = [
        [mm.meta.unbox(block.init(next(keys), jnp.ones((1, 2, width))))["params"] for _ in range(n)] for n in layers
    ]
    table, out = (rng.normal(0, 0.02, s).astype(np.float32) for s in ((512, width), (width, 512)))
    tokens = rng.integers(0, 512, (4 * count, length + 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return _training(loss, {"table": table, "stages": weights, "head": out}, batch, count)


def encoder_decoder(width: int = 256, length: int = 64, count: int = 8) -> Step:
    """An encoder of two blocks on one device, and a decoder on two more whose blocks all read what the encoder made."""
    block, cross = Block(heads=4), Cross(heads=4)

    def encode(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = block.apply({"params": w}, x)
        return x

    def decode(weights: Any, y: jax.Array, x: jax.Array) -> jax.Array:
        for w in weights:
            y = cross.apply({"params": w}, y, x)
        return y

    encoder = mm.task(encode, "encoder", devices=[0])
    decoders = [mm.task(decode, f"decoder_{i}", devices=[1 + i]) for i in range(2)]
    head = mm.task(lambda w, y, target: jnp.mean((y @ w - target) ** 2), "head", devices=[2])

    def loss(params: Any, batch: Any) -> jax.Array:
        read, y = encoder(params["encoder"], batch["source"]), batch["target"]
        for task, w in zip(decoders, params["decoders"], strict=True):
            y = task(w, y, read)
        return head(params["head"], y, batch["target"])

    keys = iter(jax.random.split(jax.random.key(1), 16))
    one = jnp.ones((1, 2, width))
    params = {
        "encoder": [mm.meta.unbox(block.init(next(keys), one))["params"] for _ in range(2)],
        "decoders": [[cross.init(next(keys), one, one)["params"] for _ in range(2)] for _ in range(2)],
        "head": np.eye(width, dtype=np.float32),
    }
    rng = np.random.default_rng(1)
    batch = {name: rng.normal(size=(4 * count, length, width)).astype(np.float32) for name in ("source", "target")}
    return _training(loss, params, batch, count)


def _cross_entropy(weight: jax.Array, x: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x @ weight, targets))


def _training(loss: Callable[..., Any], params: Any, batch: Any, count: int) -> Step:
    optimizer = optax.adamw(1e-3)

    def step(state: Any, batch: Any) -> Any:
        grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=count, schedule="1f1b", reduce="mean")
        value, grads = grad(state["params"], batch)
        updates, moments = optimizer.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, value

    state = {"params": params, "optimizer": optimizer.init(params)}
    return _placed(mm.jit(step, donate_argnums=0), (state, batch))


def _placed(step: Any, args: Any) -> Step:
    """The arguments where the step wants them, as after a first call."""
    return step, jax.device_put(args, step.lower(*args).compile().input_shardings[0])


STEPS: dict[str, Callable[[], Step]] = {"readme": readme, "decoder": decoder, "encoder-decoder": encoder_decoder}
