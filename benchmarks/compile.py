"""Time to the first step, beside one plain ``jax.jit`` of the same model; tracing and planning per equation.

    python benchmarks/compile.py [--layers 32] [--stages 2] [--microbatches 8] [--schedule 1f1b] [--rounds 5]
                                 [--profile] [--json FILE]

The first step is everything from the definition of the function to a finished result: tracing, planning, compiling,
running. Plain JAX takes the whole batch at once on one device, which is the least that it can compile. JAX's caches are
cleared before each, and no compilation cache on disk is used. Arrays are small, so that running hardly counts.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from _process import prepare

if __name__ == "__main__":
    prepare(devices=8)

import jax
from _model import Size, adam, blocks, fresh_state, mean_squared_error
from _ours import WithManyMesh
from _timing import alternate, ratio, row, write_rows

from manymesh import _api
from manymesh._partition import _build
from manymesh._runtime import _lower

TARGET = 1.5
PHASES = (
    (_build, "flatten", "open the jaxpr"),
    (_build, "remove_dead", "dead code"),
    (_build, "split_weights", "split weight gradients"),
    (_build, "settle_constants", "constants"),
    (_build, "place", "placement"),
    (_build, "regroup_sums", "sums"),
    (_build, "check", "check"),
    (_api, "build", "split, in all"),
    (_api, "emit", "instructions"),
    (_lower, "jaxpr_key", "keys of fragments"),
    (_lower._Lowerer, "_make", "XLA, fragments"),
    (_api, "lower", "compile, in all"),
)


def plain(size: Size) -> Callable[[], float]:
    """The first step of one ``jax.jit``."""
    state, batch = fresh_state(size.weights()), size.data()

    def run() -> float:
        def loss(weights: Any, x: Any, y: Any) -> Any:
            return mean_squared_error(blocks(weights, x), y)

        def train(state: Any, x: Any, y: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(state[0], x, y)
            return adam(state, grads), value

        jax.clear_caches()
        _, value = jax.block_until_ready(jax.jit(train)(state, *batch))
        return float(value)

    return run


def with_manymesh(size: Size, schedule: str) -> Callable[[], float]:
    """The first step of ``mm.jit``."""

    def run() -> float:
        jax.clear_caches()
        return WithManyMesh(size, schedule)()

    return run


def count_equations(jaxpr: Any) -> int:
    """Equations of a jaxpr, those of calls and loops in it included."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = [p for p in jax.tree.leaves(eqn.params, is_leaf=_is_jaxpr) if _is_jaxpr(p)]
        total += 1 + sum(count_equations(getattr(p, "jaxpr", p)) for p in inner)
    return total


def _is_jaxpr(x: Any) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")


@contextmanager
def timed_phases() -> Iterator[dict[str, float]]:
    """Seconds spent in each phase while the context is open."""
    spent: dict[str, float] = {label: 0.0 for *_, label in PHASES}
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in PHASES]

    def wrap(label: str, fun: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return fun(*args, **kwargs)
            finally:
                spent[label] += time.perf_counter() - start

        return timed

    try:
        for (owner, name, fun), (*_, label) in zip(originals, PHASES, strict=True):
            setattr(owner, name, wrap(label, fun))
        yield spent
    finally:
        for owner, name, fun in originals:
            setattr(owner, name, fun)


def planning(size: Size, schedule: str, rounds: int) -> dict[str, Any]:
    """The row for tracing and planning, without compiling."""
    ours = WithManyMesh(size, schedule)
    tracing, planned, equations = [], [], 0
    for _ in range(rounds):
        jax.clear_caches()
        start = time.perf_counter()
        traced = ours.step.trace(ours.state, ours.batch)
        middle = time.perf_counter()
        traced.lower()
        tracing.append(middle - start)
        planned.append(time.perf_counter() - middle)
        equations = count_equations(traced.jaxpr.jaxpr)
    per = 1e6 / equations  # seconds in all -> milliseconds for 1000 equations
    ours_ms, jax_ms = statistics.median(planned) * per, statistics.median(tracing) * per
    print(
        f"{equations} equations: tracing {jax_ms:.0f} ms, planning {ours_ms:.0f} ms for each 1000 of them "
        f"(best {min(tracing) * per:.0f} and {min(planned) * per:.0f})",
        flush=True,
    )
    return row(
        "tracing and planning, 1000 equations", f"{ours_ms:.0f} ms planning", f"{jax_ms:.0f} ms tracing (JAX)",
        f"{ours_ms + jax_ms:.0f} ms", "", None,
    )  # fmt: skip


def first_step(size: Size, schedule: str, rounds: int) -> dict[str, Any]:
    """The row for the time to the first step."""
    runs = {"mm": with_manymesh(size, schedule), "plain": plain(size)}
    losses = {who: run() for who, run in runs.items()}
    assert abs(losses["mm"] / losses["plain"] - 1) < 1e-4, f"losses differ: {losses}"
    samples = alternate(runs, rounds, warm_up=0, patience=5 * rounds)
    found = ratio(samples["mm"], samples["plain"])
    ours, theirs = (min(s.wall for s in samples[who]) for who in ("mm", "plain"))
    print(
        f"{size.blocks} layers, first step: ratio {found}; best: mm {ours:.2f} s, plain jit {theirs:.2f} s", flush=True
    )
    return row(
        f"first step, {size.blocks} layers", f"{ours:.1f} s", f"{theirs:.1f} s plain jit",
        f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})", f"<= {TARGET:.1f}", found.median <= TARGET,
    )  # fmt: skip


def profile(size: Size, schedule: str) -> None:
    """Where the time of a first step goes: by phase, then by function."""
    with timed_phases() as spent:
        start = time.perf_counter()
        with_manymesh(size, schedule)()
        whole = time.perf_counter() - start
    print(f"\nfirst step {whole:.2f} s")
    for label, seconds in spent.items():
        print(f"  {label:24}{1e3 * seconds:9.1f} ms {100 * seconds / whole:6.1f} %")
    ours = WithManyMesh(size, schedule)
    jax.clear_caches()
    profiler = cProfile.Profile()
    profiler.runcall(lambda: ours.step.trace(ours.state, ours.batch).lower())
    print("\ntracing and planning, by function")
    pstats.Stats(profiler, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(20)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--stages", type=int, default=2, choices=[2, 4, 8])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    size = Size(a.layers, 64, 256, 16 * a.microbatches, a.microbatches, a.stages)
    print(f"{size}, {a.schedule}, JAX {jax.__version__}, Python {sys.version.split()[0]}")
    rows = [first_step(size, a.schedule, a.rounds), planning(size, a.schedule, a.rounds)]
    if a.profile:
        profile(size, a.schedule)
    write_rows(a.json, rows)


if __name__ == "__main__":
    main()
