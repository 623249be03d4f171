"""How well a schedule keeps two stages busy that do not share cores: efficiency beside the same order by hand.

    python benchmarks/one_core.py [--milliseconds 6] [--microbatches 8] [--schedule 1f1b zero-bubble-h1]
                                  [--rounds 12] [--json FILE]

Virtual CPU devices share all cores, so that one of two stages works faster while the other one waits, and the bubble
does not show. Here each stage sleeps instead of computing: one unit of time for a forward, one for the gradient of
the input, one for the gradient of the weight. A stage that sleeps uses no core, as if it had its own, and the noise
of a busy machine hardly matters. Efficiency is the time a stage works divided by the time of the step.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

from _process import prepare

if __name__ == "__main__":
    prepare(devices=2, quiet=True)

import jax
import jax.numpy as jnp
import numpy as np
from _hand import issue, rows
from _sleep import sleeper
from _timing import alternate, row, write_rows
from jax.sharding import Mesh

import manymesh as mm
from manymesh.schedules import simulate

TARGET = 0.02
WIDTH = 32  # wide enough that XLA does not run a stage on the thread that issues it
SCHEDULES = ("1f1b", "zero-bubble-h1")

Stage = Callable[[Any, Any], Any]


def slow_stage(seconds: float) -> tuple[Stage, Stage, Stage]:
    """A matrix product that takes its time, and the two halves of its backward pass."""

    slowly = sleeper((WIDTH, WIDTH), seconds)

    def weight(x: Any, cotangent: Any) -> Any:
        return slowly(x.T @ cotangent)

    def given(w: Any, cotangent: Any) -> Any:
        return slowly(cotangent @ w.T)

    @jax.custom_vjp
    def stage(w: Any, x: Any) -> Any:
        return slowly(x @ w)

    stage.defvjp(lambda w, x: (slowly(x @ w), (w, x)), lambda kept, out: (weight(kept[1], out), given(kept[0], out)))
    return stage, given, weight


def with_manymesh(schedule: str, count: int, seconds: float) -> Callable[[], Any]:
    """The step in terms of ``mm``."""
    stage, _, _ = slow_stage(seconds)
    first, second = mm.submeshes(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
    front, back = (
        mm.task(lambda w, x: stage(w, x), "front", mesh=first),
        mm.task(lambda w, x: stage(w, x), "back", mesh=second),
    )

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(back(w[1], front(w[0], x)))

    # The input takes part, so that the first stage makes its gradient like any other.
    def gradients(w: Any, x: Any) -> Any:
        value, (dw, dx) = jax.value_and_grad(loss, argnums=(0, 1))(w, x)
        return value, dw, jnp.sum(dx)

    step = mm.jit(mm.microbatch(gradients, argnum=1, num_microbatches=count, schedule=schedule))
    weights, x = problem(count)
    devices = jax.devices()
    args = [jax.device_put(w, d) for w, d in zip(weights, devices, strict=False)], jax.device_put(x, devices[0])
    return lambda: jax.block_until_ready(step(*args))


def problem(count: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Weights of both stages and a batch."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH for _ in range(2)]
    return weights, rng.normal(size=(count * WIDTH, WIDTH)).astype(np.float32)


def by_hand(schedule: str, count: int, seconds: float) -> Callable[[], Any]:
    """The same with a jit for each part and a loop."""
    stage, given, weight = slow_stage(seconds)
    order, devices = issue(rows(schedule, 2, count)), jax.devices()
    weights, x = problem(count)
    held = [jax.device_put(w, d) for w, d in zip(weights, devices, strict=False)]
    batch = jax.device_put(x, devices[0])

    cut = jax.jit(lambda x: jnp.split(x, count))
    forward = jax.jit(stage)
    last = jax.jit(lambda w, x: jnp.sum(stage(w, x)))
    split = schedule.startswith("zero-bubble")
    accumulate = jax.jit(lambda total, x, out: total + weight(x, out), donate_argnums=0)

    @functools.partial(jax.jit, donate_argnums=2)
    def backward(w: Any, x: Any, total: Any, out: Any) -> Any:
        return given(w, out), total if split else total + weight(x, out)

    ones = [jax.device_put(np.ones((WIDTH, WIDTH), np.float32), d) for d in devices]
    add = jax.jit(lambda total, x: total + jnp.sum(x))

    def step() -> Any:
        inputs: dict[Any, Any] = {(0, m): piece for m, piece in enumerate(cut(batch))}
        outs = {(1, m): ones[1] for m in range(count)}
        totals = [jnp.zeros_like(w) for w in held]
        loss, others = jnp.float32(0), jnp.float32(0)
        for phase, s, m in order:
            x = inputs[s, m]
            if phase == "F" and s:
                loss = loss + last(held[s], x)
            elif phase == "F":
                inputs[1, m] = jax.device_put(forward(held[s], x), devices[1])
            elif phase == "B":
                back, totals[s] = backward(held[s], x, totals[s], outs[s, m])
                if s:
                    outs[0, m] = jax.device_put(back, devices[0])
                else:
                    others = add(others, back)
            else:
                totals[s] = accumulate(totals[s], x, outs[s, m])
        return jax.block_until_ready((loss, totals, others))

    return step


def measure(schedule: str, count: int, seconds: float, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    runs = {"mm": with_manymesh(schedule, count, seconds), "hand": by_hand(schedule, count, seconds)}
    found, expected = runs["mm"](), runs["hand"]()
    np.testing.assert_allclose(found[1][0], expected[1][0], rtol=1e-4, err_msg=f"gradients of {schedule} differ")
    samples = alternate(runs, rounds)
    work = 3 * count * seconds
    best = simulate(schedule, 2, count, forward=1, backward=2, weight=1)
    efficiency = {who: sorted(work / s.wall for s in samples[who]) for who in runs}
    ours, theirs = (efficiency[who][rounds // 2] for who in ("mm", "hand"))
    differences = sorted(work / a.wall - work / b.wall for a, b in zip(samples["mm"], samples["hand"], strict=True))
    low, middle, high = (differences[int(q * (rounds - 1))] for q in (0.25, 0.5, 0.75))
    print(
        f"{schedule:14} efficiency: mm {ours:.3f}, by hand {theirs:.3f}, no overhead at all "
        f"{1 - best.bubble_fraction:.3f}; difference {middle:+.3f} ({low:+.3f} to {high:+.3f}); target {-TARGET:+.2f}",
        flush=True,
    )
    return row(
        f"one core per stage, {schedule}",
        f"{ours:.3f} efficiency",
        f"{theirs:.3f} by hand ({1 - best.bubble_fraction:.3f} ideal)",
        f"{middle:+.3f} ({low:+.3f} to {high:+.3f})",
        f">= {-TARGET:+.2f}",
        middle >= -TARGET,
    )


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--milliseconds", type=float, default=20, help="one unit of time")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", nargs="+", default=SCHEDULES, choices=("gpipe", *SCHEDULES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    print(f"sleeping stages of {a.milliseconds} ms, JAX {jax.__version__}, Python {sys.version.split()[0]}")
    write_rows(a.json, [measure(s, a.microbatches, a.milliseconds / 1e3, a.rounds) for s in a.schedule])


if __name__ == "__main__":
    main()
