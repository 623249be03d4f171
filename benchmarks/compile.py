"""Time to the first step, beside one plain ``jax.jit`` of the same model; tracing and planning per equation.

    python benchmarks/compile.py [--layers 32] [--stages 2] [--microbatches 8] [--schedule 1f1b] [--rounds 5]
                                 [--model transformer] [--profile] [--json FILE]

The first step is everything from the definition of the function to a finished result: tracing, planning, compiling,
running. Plain JAX takes the whole batch at once on one device, which is the least that it can compile. JAX's caches are
cleared before each, and no compilation cache on disk is used. Arrays are small, so that running hardly counts.

Two models: ``transformer`` is that of the example, in Flax Linen with AdamW from Optax, each block a task; ``blocks`` is
the model of the other benchmarks, all blocks of a stage one task, with Adam written out.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _process import prepare

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

if __name__ == "__main__":
    prepare(devices=8)

import jax
import numpy as np
import optax
from _model import Size, adam, blocks, fresh_state, mean_squared_error
from _ours import WithManyMesh
from _timing import alternate, ratio, row, write_rows
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from transformer import RULES, Decoder, next_byte_loss

import manymesh as mm
from manymesh._api import _lowered, _traced
from manymesh._passes import _build, _run
from manymesh._runtime import _lower

TARGET = 1.5
# What is timed besides the passes.
PHASES = (
    (_build, "flatten", "open the jaxpr"),
    (_build, "cut", "cut into fragments"),
    (_build, "check", "check"),
    (_traced, "build", "split, in all"),
    (_traced, "emit", "instructions"),
    (_lower.Keys, "__call__", "keys of fragments"),
    (_lower._Lowerer, "_make", "XLA, fragments"),
    (_lowered, "lower", "compile, in all"),
)


Step = Callable[[], float]


@dataclass(frozen=True)
class Blocks:
    """Residual blocks, the blocks of a stage as one task."""

    size: Size
    schedule: str

    def plain(self) -> Step:
        """The first step of one ``jax.jit``."""
        state, batch = fresh_state(self.size.weights()), self.size.data()

        def run() -> float:
            def loss(weights: Any, x: Any, y: Any) -> Any:
                return mean_squared_error(blocks(weights, x), y)

            def train(state: Any, x: Any, y: Any) -> Any:
                value, grads = jax.value_and_grad(loss)(state[0], x, y)
                return adam(state, grads), value

            _, value = jax.block_until_ready(jax.jit(train)(state, *batch))
            return float(value)

        return run

    def ours(self) -> Step:
        """The first step of ``mm.jit``."""
        weights = self.size.stage_weights()
        return lambda: WithManyMesh(self.size, self.schedule, weights)()

    def fresh(self) -> tuple[Any, tuple[Any, ...]]:
        """A step of ``mm.jit`` that was not traced yet, and its arguments."""
        made = WithManyMesh(self.size, self.schedule)
        return made.step, (made.state, made.batch)


@dataclass(frozen=True)
class Transformer:
    """The decoder of the example, each block a task."""

    size: Size
    schedule: str

    def _parts(self) -> tuple[Callable[..., Any], Any, Any]:
        devices = np.array(jax.devices()[: self.size.stages]).reshape(-1, 1, 1)
        submeshes = mm.submeshes(Mesh(devices, ("stage", "data", "model")), "stage")
        tasks = [mm.Task(mesh=m, logical_axes=RULES) for m in submeshes]
        model = Decoder(tasks, length=32, features=self.size.width, blocks=self.size.blocks)
        tokens = np.zeros((4 * self.size.microbatches, 32), np.int32)

        def init(key: Any) -> Any:
            params = model.init(key, tokens[:1])["params"]
            return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

        with mm.ignore_transforms():
            shapes = jax.eval_shape(init, jax.random.key(0))
        state = jax.tree.map(lambda s: np.full(s.shape, 0.01, s.dtype), shapes)

        def loss(params: Any, tokens: Any) -> Any:
            return next_byte_loss(model.apply({"params": params}, tokens), tokens)

        return loss, state, tokens

    def plain(self) -> Step:
        """The first step of one ``jax.jit``."""
        loss, state, tokens = self._parts()

        def run() -> float:
            def train(state: Any, tokens: Any) -> Any:
                value, grads = jax.value_and_grad(loss)(state.params, tokens)
                return state.apply_gradients(grads=grads), value

            _, value = jax.block_until_ready(jax.jit(train)(state, tokens))
            return float(value)

        return run

    def fresh(self) -> tuple[Any, tuple[Any, ...]]:
        """A step of ``mm.jit`` that was not traced yet, and its arguments."""
        loss, state, tokens = self._parts()

        def train(state: Any, tokens: Any) -> Any:
            grad = mm.microbatch(
                jax.value_and_grad(loss), argnum=1, num_microbatches=self.size.microbatches, schedule=self.schedule,
                reduce="mean",
            )  # fmt: skip
            value, grads = grad(state.params, tokens)
            return state.apply_gradients(grads=grads), value

        return mm.jit(train), (state, tokens)

    def ours(self) -> Step:
        """The first step of ``mm.jit``."""

        def run() -> float:
            step, arguments = self.fresh()
            _, value = jax.block_until_ready(step(*arguments))
            return float(value)

        return run


MODELS = {"transformer": Transformer, "blocks": Blocks}


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
    passes, providers = _run.PASSES, dict(_run.PROVIDERS)
    spent: dict[str, float] = {label: 0.0 for label in [p.name for p in (*providers.values(), *passes)]}
    spent |= {label: 0.0 for *_, label in PHASES}
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in PHASES]

    def wrap(label: str, fun: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return fun(*args, **kwargs)
            finally:
                spent[label] += time.perf_counter() - start

        return timed

    def timed_pass(p: _run.Pass) -> _run.Pass:
        return replace(p, run=wrap(p.name, p.run))

    try:
        _build.PASSES = tuple(map(timed_pass, passes))
        _run.PROVIDERS = {fact: timed_pass(p) for fact, p in providers.items()}
        for (owner, name, fun), (*_, label) in zip(originals, PHASES, strict=True):
            setattr(owner, name, wrap(label, fun))
        yield spent
    finally:
        _build.PASSES, _run.PROVIDERS = passes, providers
        for owner, name, fun in originals:
            setattr(owner, name, fun)


def planning(name: str, model: Any, rounds: int) -> dict[str, Any]:
    """The row for tracing and planning, without compiling."""
    tracing, planned, equations = [], [], 0
    for _ in range(rounds):
        jax.clear_caches()
        step, arguments = model.fresh()
        start = time.perf_counter()
        traced = step.trace(*arguments)
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
        f"{name}: tracing and planning, 1000 equations", f"{ours_ms:.0f} ms planning", f"{jax_ms:.0f} ms tracing (JAX)",
        f"{ours_ms + jax_ms:.0f} ms", "", None,
    )  # fmt: skip


def first_step(name: str, model: Any, rounds: int) -> dict[str, Any]:
    """The row for the time to the first step."""

    def cold(run: Step) -> Step:
        def once() -> float:
            jax.clear_caches()
            return run()

        return once

    runs = {"mm": cold(model.ours()), "plain": cold(model.plain())}
    losses = {who: run() for who, run in runs.items()}
    assert abs(losses["mm"] / losses["plain"] - 1) < 1e-4, f"losses differ: {losses}"
    samples = alternate(runs, rounds, warm_up=0, patience=5 * rounds)
    found = ratio(samples["mm"], samples["plain"])
    ours, theirs = (min(s.wall for s in samples[who]) for who in ("mm", "plain"))
    print(f"first step: ratio {found}; best: mm {ours:.2f} s, plain jit {theirs:.2f} s", flush=True)
    return row(
        f"{name}: first step, {model.size.blocks} layers", f"{ours:.1f} s", f"{theirs:.1f} s plain jit",
        f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})", f"<= {TARGET:.1f}", found.median <= TARGET,
    )  # fmt: skip


def profile(model: Any) -> None:
    """Where the time of a first step goes: by phase, then by function."""
    with timed_phases() as spent:
        start = time.perf_counter()
        jax.clear_caches()
        model.ours()()
        whole = time.perf_counter() - start
    print(f"\nfirst step {whole:.2f} s")
    for label, seconds in spent.items():
        print(f"  {label:24}{1e3 * seconds:9.1f} ms {100 * seconds / whole:6.1f} %")
    jax.clear_caches()
    step, arguments = model.fresh()
    profiler = cProfile.Profile()
    profiler.runcall(lambda: step.trace(*arguments).lower())
    print("\ntracing and planning, by function")
    pstats.Stats(profiler, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(20)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--stages", type=int, default=2, choices=[2, 4, 8])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--rows", type=int, default=16, help="rows of a microbatch; XLA writes sums of few numbers as two kernels"
    )
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, nargs="*", default=list(MODELS))
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    size = Size(a.layers, 64, 256, a.rows * a.microbatches, a.microbatches, a.stages)
    print(f"{size}, {a.schedule}, JAX {jax.__version__}, Python {sys.version.split()[0]}")
    rows = []
    for name in a.model:
        print(f"\n{name}")
        model = MODELS[name](size, a.schedule)
        rows += [first_step(name, model, a.rounds), planning(name, model, a.rounds)]
        if a.profile:
            profile(model)
    write_rows(a.json, rows)


if __name__ == "__main__":
    main()
