"""A decoder of unequal stages with a tied embedding, AdamW and clipping: ManyMesh beside the pipeline by hand.

    python benchmarks/decoder.py [--layers 4 2] [--width 256] [--length 64] [--vocabulary 2048] [--sequences 32]
                                 [--microbatches 8] [--rounds 40] [--seconds 60] [--json FILE]

The embedding, most of the layers on one virtual device; the others and the loss, which reads the embedding again, on a
second one; 1F1B, float32. By hand there is one jitted function for each stage and phase, with `jax.vjp`'s residuals, once
as they are and once less the weights, which takes some doing; donated accumulators, one copy of the embedding a step, its
gradients added where it lives, and the norm of all gradients from one scalar of each stage. Losses have to agree; times
are compared by the ratio of neighbouring steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from _process import prepare, spread_threads

if __name__ == "__main__":
    prepare(devices=2)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _hand import Whole, WithoutWeights, issue, rows
from _timing import alternate, ratio, row, write_rows

import manymesh as mm

TARGET = 0.90
HEADS, CLIP, RATE = 4, 1.0, 1e-3


@dataclass(frozen=True)
class Size:
    """The size of the problem; ``layers`` counts those of each stage."""

    layers: tuple[int, int] = (4, 2)
    width: int = 256
    length: int = 64
    vocabulary: int = 2048
    sequences: int = 32
    microbatches: int = 8

    def parameters(self) -> dict[str, Any]:
        """Initial parameters, on the host."""
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> np.ndarray:
            return rng.normal(0, 0.02, shape).astype(np.float32)

        d = self.width
        layer = lambda: {  # noqa: E731
            "norm_1": np.ones(d, np.float32), "qkv": normal(d, 3 * d), "out": normal(d, d),
            "norm_2": np.ones(d, np.float32), "up": normal(d, 4 * d), "down": normal(4 * d, d),
        }  # fmt: skip
        return {
            "embedding": normal(self.vocabulary, d),
            "layers": [[layer() for _ in range(n)] for n in self.layers],
            "norm": np.ones(d, np.float32),
        }

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and the ones after them: int32[sequences, length] each."""
        tokens = np.random.default_rng(1).integers(0, self.vocabulary, (self.sequences, self.length + 1), np.int32)
        return tokens[:, :-1], tokens[:, 1:]


def norm(scale: Any, x: Any) -> Any:
    """Root-mean-square normalisation."""
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def blocks(layers: Sequence[Any], x: Any) -> Any:
    """Attention that looks back, and a perceptron, some times."""
    for p in layers:
        q, k, v = jnp.split((norm(p["norm_1"], x) @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        scores = jnp.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
        x = x + mixed @ p["out"]
        x = x + jax.nn.gelu(norm(p["norm_2"], x) @ p["up"]) @ p["down"]
    return x


def first(embedding: Any, layers: Any, tokens: Any) -> Any:
    """The first stage."""
    return blocks(layers, embedding[tokens])


def last(embedding: Any, layers: Any, scale: Any, x: Any, targets: Any) -> Any:
    """The last stage, with the loss."""
    logits = norm(scale, blocks(layers, x)) @ embedding.T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


class WithManyMesh:
    """The step with ManyMesh."""

    def __init__(self, size: Size) -> None:
        front, back = mm.task(first, "first", devices=[0]), mm.task(last, "last", devices=[1])

        def loss(p: Any, batch: Any) -> Any:
            x = front(p["embedding"], p["layers"][0], batch[0])
            return back(p["embedding"], p["layers"][1], p["norm"], x, batch[1])

        grad = mm.microbatch(
            jax.value_and_grad(loss), argnum=1, num_microbatches=size.microbatches, schedule="1f1b", reduce="mean"
        )
        optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE))

        def train(state: Any, batch: Any) -> Any:
            value, grads = grad(state[0], batch)
            updates, moments = optimizer.update(grads, state[1], state[0])
            return value, (optax.apply_updates(state[0], updates), moments)

        parameters = size.parameters()
        self.state: Any = (parameters, jax.tree.map(np.asarray, optimizer.init(parameters)))
        tokens, targets = size.batch()
        self.batch = jax.device_put(tokens, jax.devices()[0]), jax.device_put(targets, jax.devices()[1])
        self.step = mm.jit(train, donate_argnums=0)

    def __call__(self) -> float:
        """One step; the loss before it."""
        loss, self.state = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return float(loss)


class ByHand:
    """The step by hand.

    Args:
      size: of the problem.
      kept: what the forward pass keeps, `Whole` or `WithoutWeights`.
    """

    def __init__(self, size: Size, kept: type[Whole] | type[WithoutWeights]) -> None:
        self.kept = kept
        self.count = size.microbatches
        self.order = issue(rows("1f1b", 2, self.count))
        self.devices = jax.devices()[:2]
        p = size.parameters()
        weights = [
            {"embedding": p["embedding"], "layers": p["layers"][0]},
            {"layers": p["layers"][1], "norm": p["norm"]},
        ]
        self.optimizer = optax.adamw(RATE)
        self.state: list[Any] = [
            jax.device_put((w, jax.tree.map(np.asarray, self.optimizer.init(w))), d)
            for w, d in zip(weights, self.devices, strict=True)
        ]
        self.forward, self.backward = zip(*(self._stage(s) for s in range(2)), strict=True)
        self.zeros = jax.jit(lambda w: jax.tree.map(jnp.zeros_like, w))
        self.pieces = jax.jit(lambda x: jnp.split(x, self.count))
        self.squares = jax.jit(lambda t: sum(jnp.sum((g / self.count) ** 2) for g in jax.tree.leaves(t)))
        self.add = jax.jit(jnp.add, donate_argnums=0)
        self.update = jax.jit(self._update, donate_argnums=0)
        self.mean = jax.jit(lambda losses: sum(losses) / self.count)
        self.batch = [jax.device_put(x, d) for x, d in zip(size.batch(), self.devices, strict=True)]

    def _stage(self, s: int) -> tuple[Any, Any]:
        keep = self.kept()

        def apply(w: Any, x: Any, targets: Any) -> Any:
            if s:
                return last(w["embedding"], w["layers"], w["norm"], x, targets)
            return first(w["embedding"], w["layers"], x)

        def forward(w: Any, x: Any, targets: Any) -> Any:
            if s:
                out, pullback = jax.vjp(lambda w, x: apply(w, x, targets), w, x)
            else:
                out, pullback = jax.vjp(lambda w: apply(w, x, targets), w)
            return out, keep.strip(w, pullback)

        def backward(w: Any, kept: Any, cotangent: Any, total: Any) -> Any:
            grads, *back = keep.restore(w, kept)(jnp.float32(1) if s else cotangent)
            return jax.tree.map(jnp.add, total, grads), back

        return jax.jit(forward), jax.jit(backward, donate_argnums=3)

    def _update(self, state: Any, total: Any, squares: Any) -> Any:
        scale = jnp.minimum(1.0, CLIP / jnp.sqrt(squares)) / self.count
        weights, moments = state
        updates, moments = self.optimizer.update(jax.tree.map(lambda g: g * scale, total), moments, weights)
        return optax.apply_updates(weights, updates), moments

    def __call__(self) -> float:
        """One step; the loss before it."""
        one, two = self.devices
        weights = [self.state[0][0], dict(self.state[1][0])]
        weights[1]["embedding"] = jax.device_put(weights[0]["embedding"], two)
        totals = [self.zeros(w) for w in weights]
        inputs: dict[tuple[int, int], Any] = {(0, m): x for m, x in enumerate(self.pieces(self.batch[0]))}
        targets = self.pieces(self.batch[1])
        kept: dict[tuple[int, int], Any] = {}
        cotangents: dict[tuple[int, int], Any] = {}
        losses = []
        for phase, s, m in self.order:
            if phase == "F":
                out, kept[s, m] = self.forward[s](weights[s], inputs.pop((s, m)), targets[m] if s else None)
                if s:
                    losses.append(out)
                else:
                    inputs[1, m] = jax.device_put(out, two)
            else:
                totals[s], back = self.backward[s](
                    weights[s], kept.pop((s, m)), cotangents.pop((s, m), None), totals[s]
                )
                if s:
                    cotangents[0, m] = jax.device_put(back[0], one)
        totals[0]["embedding"] = self.add(totals[0]["embedding"], jax.device_put(totals[1].pop("embedding"), one))
        parts = [self.squares(t) for t in totals]
        squares = self.add(parts[0], jax.device_put(parts[1], one))
        everywhere = [squares, jax.device_put(squares, two)]
        self.state = [self.update(s, t, q) for s, t, q in zip(self.state, totals, everywhere, strict=True)]
        loss = self.mean(losses)
        jax.block_until_ready(self.state)
        return float(loss)


HANDS = {"as jax.vjp gives them": Whole, "less the weights": WithoutWeights}


def compare(size: Size, residuals: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Steps both in turns, checks that the losses agree, and returns a row of the table."""
    steps: dict[str, Any] = {"mm": WithManyMesh(size), "hand": ByHand(size, HANDS[residuals])}
    losses: dict[str, list[float]] = {who: [] for who in steps}
    runs = {who: lambda who=who: losses[who].append(steps[who]()) for who in steps}
    samples = alternate(runs, rounds, patience=seconds / 4, seconds=seconds)
    np.testing.assert_allclose(losses["mm"], losses["hand"], rtol=1e-4, err_msg="losses differ")
    found = ratio(samples["mm"], samples["hand"])
    ours, theirs = (1e3 * min(s.wall for s in samples[who]) for who in ("mm", "hand"))
    print(
        f"decoder, 1f1b, residuals {residuals}: ratio {found}; best steps: mm {ours:.0f} ms, by hand {theirs:.0f} ms; "
        f"target {TARGET:.2f}; loss {losses['mm'][0]:.5f} -> {losses['mm'][-1]:.5f}",
        flush=True,
    )
    return row(
        f"decoder of unequal stages by hand, residuals {residuals}",
        f"{ours:.0f} ms",
        f"{theirs:.0f} ms by hand",
        f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})",
        f"<= {TARGET:.2f}",
        found.median <= TARGET,
    )


def main() -> None:
    """Reads the command line and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs=2, default=(4, 2), help="layers of each stage")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40, help="most rounds")
    parser.add_argument("--seconds", type=float, default=60, help="about the time for them")
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    if a.sequences % a.microbatches or a.width % HEADS:
        parser.error(f"sequences divide into microbatches, the width into {HEADS} heads")
    jax.devices()
    spread_threads()
    size = Size(tuple(a.layers), a.width, a.length, a.vocabulary, a.sequences, a.microbatches)
    print(f"{size}, float32, JAX {jax.__version__}, Python {sys.version.split()[0]}")
    write_rows(a.json, [compare(size, residuals, a.rounds, a.seconds) for residuals in HANDS])


if __name__ == "__main__":
    main()
