"""A training step as a two-stage pipeline: ManyMesh beside the same pipeline written by hand, in one process.

    python benchmarks/pipeline.py [--blocks 8] [--width 512] [--hidden 2048] [--batch 1536] [--microbatches 8]
                                  [--schedule gpipe 1f1b] [--rounds 40] [--seconds 75]
                                  [--report] [--json FILE]

Residual blocks ``x <- LayerNorm(x + gelu(x W1) W2)``, mean squared error, float32, Adam; half of the blocks on each
of two virtual CPU devices. The two step in turns on the same batch. Their losses have to agree; their times are
compared by the ratio of neighbouring steps, since the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from _process import prepare, spread_threads

if __name__ == "__main__":
    prepare(devices=2)

import jax
import jax.numpy as jnp
import numpy as np
from _timing import alternate, ratio
from jax.sharding import Mesh

import manymesh as mm

TARGET = 1.10
STAGES = 2
RATE, DECAY_1, DECAY_2, EPSILON = 1e-4, 0.9, 0.999, 1e-8

Weights = list[tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Size:
    """The size of the problem; ``batch`` counts rows."""

    blocks: int
    width: int
    hidden: int
    batch: int
    microbatches: int

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
        each = self.blocks // STAGES
        weights = self.weights()
        return [weights[s * each : (s + 1) * each] for s in range(STAGES)]


def blocks(weights: Weights, x: jax.Array) -> jax.Array:
    """Runs the blocks of a stage."""
    for up, down in weights:
        x = x + jax.nn.gelu(x @ up, approximate=True) @ down
        centred = x - jnp.mean(x, -1, keepdims=True)
        x = centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)
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


# ---------------------------------------------------------------------- with ManyMesh


class WithManyMesh:
    """The step in terms of ``mm``: tasks, a microbatch loop, a jitted step."""

    def __init__(self, size: Size, schedule: str) -> None:
        first, second = mm.submeshes(Mesh(np.array(jax.devices()[:STAGES]), ("stage",)), "stage")
        front, back = mm.task(blocks, "front", mesh=first), mm.task(blocks, "back", mesh=second)

        def loss(weights: Any, batch: Any) -> jax.Array:
            x, y = batch
            return mean_squared_error(back(weights[1], front(weights[0], x)), y)

        def train(state: Any, batch: Any) -> Any:
            grad = jax.value_and_grad(loss)
            run = mm.microbatch(grad, argnum=1, num_microbatches=size.microbatches, schedule=schedule, reduce="mean")
            value, grads = run(state[0], batch)
            return adam(state, grads), value

        x, y = size.data()
        self.batch = jax.device_put(x, jax.devices()[0]), jax.device_put(y, jax.devices()[1])
        self.state = fresh_state(size.stage_weights())
        self.step = mm.jit(train, donate_argnums=0)
        self.compiled = self.step.lower(self.state, self.batch).compile()

    def __call__(self) -> float:
        """One step; the loss before it."""
        self.state, loss = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return float(loss)


# ---------------------------------------------------------------------- by hand


@dataclass
class Stage:
    """Compiled functions of one stage, and what it holds on its device."""

    device: Any
    state: Any
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    zeros: Callable[..., Any]
    cut: Callable[..., Any]
    update: Callable[..., Any]


class ByHand:
    """The same pipeline as one would write it for this model alone: a jit for each stage and phase, and a loop."""

    def __init__(self, size: Size, schedule: str) -> None:
        self.count = size.microbatches
        self.order = hand_order(schedule, self.count)
        parts = zip(jax.devices(), size.stage_weights(), strict=False)
        self.stages = [self._stage(device, weights, s) for s, (device, weights) in enumerate(parts)]
        x, y = size.data()
        self.x, self.y = jax.device_put(x, jax.devices()[0]), jax.device_put(y, jax.devices()[1])
        self.mean = jax.jit(lambda losses: sum(losses) / self.count)

    def _stage(self, device: Any, weights: Any, index: int) -> Stage:
        last = index == STAGES - 1
        rebuild: list[Callable[[Any, Any], Any]] = []

        def apply(w: Any, x: Any, *y: Any) -> Any:
            return mean_squared_error(blocks(w, x), *y) if last else blocks(w, x)

        def forward(w: Any, x: Any, *y: Any) -> Any:
            out, pullback = jax.vjp(lambda w, x: apply(w, x, *y), w, x)
            # Weights are at hand in the backward pass: returning them would copy them for each microbatch.
            held = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(w))}
            saved, structure = jax.tree.flatten(pullback)
            sources = [held.get(id(leaf)) for leaf in saved]

            def restore(w: Any, kept: list[Any]) -> Any:
                mine, others = jax.tree.leaves(w), iter(kept)
                return jax.tree.unflatten(structure, [next(others) if i is None else mine[i] for i in sources])

            rebuild.append(restore)
            return out, [leaf for leaf, i in zip(saved, sources, strict=True) if i is None]

        def backward(w: Any, total: Any, kept: Any, cotangent: Any) -> Any:
            grads, to_previous = rebuild[-1](w, kept)(jnp.float32(1) if last else cotangent)
            return jax.tree.map(jnp.add, total, grads), to_previous if index else None

        def update(state: Any, total: Any) -> Any:
            return adam(state, jax.tree.map(lambda g: g / self.count, total))

        return Stage(
            device,
            jax.device_put(fresh_state(weights), device),
            jax.jit(forward),
            jax.jit(backward, donate_argnums=1),
            jax.jit(lambda w: jax.tree.map(jnp.zeros_like, w)),
            jax.jit(lambda batch: jnp.split(batch, self.count)),
            jax.jit(update, donate_argnums=0),
        )

    def __call__(self) -> float:
        """One step; the loss before it."""
        front, back = self.stages
        totals = [s.zeros(s.state[0]) for s in self.stages]
        inputs: dict[tuple[int, int], Any] = {(0, m): piece for m, piece in enumerate(front.cut(self.x))}
        targets = back.cut(self.y)
        saved: dict[tuple[int, int], Any] = {}
        cotangents: dict[int, Any] = {}
        losses = []
        for stage, phase, m in self.order:
            s = self.stages[stage]
            if phase == "F":
                more = (targets[m],) if stage else ()
                out, saved[stage, m] = s.forward(s.state[0], inputs.pop((stage, m)), *more)
                if stage:
                    losses.append(out)
                else:
                    inputs[1, m] = jax.device_put(out, back.device)
            else:
                given = cotangents.pop(m, None)
                totals[stage], out = s.backward(s.state[0], totals[stage], saved.pop((stage, m)), given)
                if stage:
                    cotangents[m] = jax.device_put(out, front.device)
        for s, total in zip(self.stages, totals, strict=True):
            s.state = s.update(s.state, total)
        loss = self.mean(losses)
        jax.block_until_ready([s.state for s in self.stages])
        return float(loss)


def hand_order(schedule: str, count: int) -> list[tuple[int, str, int]]:
    """(stage, phase, microbatch) in the order in which one thread issues them."""
    if schedule == "gpipe":
        forward = [(s, "F", m) for m in range(count) for s in range(STAGES)]
        return forward + [(s, "B", m) for m in range(count) for s in reversed(range(STAGES))]
    if schedule != "1f1b":
        raise SystemExit(f"written by hand are gpipe and 1f1b, not {schedule}")
    order = [(0, "F", 0)]
    for m in range(count):
        order += [(0, "F", m + 1)] if m + 1 < count else []
        order += [(1, "F", m), (1, "B", m), (0, "B", m)]
    return order


# ---------------------------------------------------------------------- comparing


def compare(size: Size, schedule: str, rounds: int, seconds: float, report: bool) -> dict[str, Any]:
    """Steps both in turns, checks that the losses agree, and returns a row of the table."""
    steps = {"mm": WithManyMesh(size, schedule), "hand": ByHand(size, schedule)}
    losses: dict[str, list[float]] = {who: [] for who in steps}
    runs = {who: lambda who=who: losses[who].append(steps[who]()) for who in steps}
    samples = alternate(runs, rounds, patience=seconds / 3, seconds=seconds)
    np.testing.assert_allclose(losses["mm"], losses["hand"], rtol=1e-4, err_msg=f"losses of {schedule} differ")
    found = ratio(samples["mm"], samples["hand"])
    ours, theirs = (1e3 * min(s.wall for s in samples[who]) for who in ("mm", "hand"))
    print(
        f"{schedule:6} ratio {found}; best steps: mm {ours:.0f} ms, by hand {theirs:.0f} ms; target {TARGET:.2f}; "
        f"loss {losses['mm'][0]:.5f} -> {losses['mm'][-1]:.5f}",
        flush=True,
    )
    if report:
        print(steps["mm"].compiled.report())
    return {
        "what": f"pipeline step, {schedule}",
        "ours": f"{ours:.0f} ms",
        "theirs": f"{theirs:.0f} ms by hand",
        "figure": f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})",
        "target": f"{TARGET:.2f}",
        "met": found.median <= TARGET,
    }


def main() -> None:
    """Reads the command line and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1536, help="rows")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", nargs="+", default=["gpipe", "1f1b"], choices=["gpipe", "1f1b"])
    parser.add_argument("--rounds", type=int, default=40, help="most rounds for each schedule")
    parser.add_argument("--seconds", type=float, default=75, help="about the time for each schedule")
    parser.add_argument("--report", action="store_true", help="print what the compiled step consists of")
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    if a.blocks % STAGES or a.batch % a.microbatches:
        parser.error(f"blocks divide into {STAGES} stages, rows into microbatches")
    jax.devices()
    spread_threads()
    size = Size(a.blocks, a.width, a.hidden, a.batch, a.microbatches)
    print(f"{size}, float32, JAX {jax.__version__}, Python {sys.version.split()[0]}")
    rows = [compare(size, schedule, a.rounds, a.seconds, a.report) for schedule in a.schedule]
    if a.json:
        with open(a.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
