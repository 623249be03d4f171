"""What a step is said to cost before it runs, beside what it does cost.

    python benchmarks/predict.py [--steps readme decoder encoder-decoder] [--rounds 15] [--json FILE]

For each step: the bytes that cross, counted on the arrays that arrive; the peak of the bytes on each device, counted on
the arrays that are alive when each fragment starts, to which comes what XLA says that the fragment needs inside; and the
time of the step, predicted from each fragment's time alone on the machine. Virtual devices share all cores, so it is
measured how many cores each fragment uses, and fragments that run side by side slow each other down.

At last a pipeline of unequal stages that sleep instead of computing, as if each had its own core: its time and bubble,
predicted from the fragments' times and beside that measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from statistics import median
from typing import Any

from _process import prepare, spread_threads

if __name__ == "__main__":
    prepare(devices=8, quiet=True)

import jax
import jax.numpy as jnp
import numpy as np
from _sleep import sleeper
from _steps import STEPS
from _timing import row, write_rows

import manymesh as mm
from manymesh._plan._instructions import Receive, Run
from manymesh._runtime._observe import Observer

TARGET = 0.05


class Watch(Observer):
    """Counts bytes while a step runs.

    Attributes:
      crossed: bytes of the arrays that arrived on other submeshes, each whole.
      peak: device -> most bytes at once.
    """

    def __init__(self, compiled: Any, arguments: Any) -> None:
        self.crossed = 0
        self.peak: dict[Any, int] = defaultdict(int)
        self._program = compiled.program
        self._stats = [e.memory_analysis() for e in compiled._lowered.executables]
        own = {id(x) for x in jax.tree.leaves(arguments)}
        self._others = [x for x in jax.live_arrays() if id(x) not in own]  # kept alive, so that ids stay theirs
        self._ids = {id(x) for x in self._others}

    def begin(self, position: int, instruction: Any, inputs: Any) -> None:
        """Counts what is there when a fragment starts, and what it will need."""
        if isinstance(instruction, Run):
            stats = self._stats[instruction.fragment]
            # XLA's output size is that of all results, and of their table; what is handed over is not new.
            made = stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
            here = set(self._program.submeshes[instruction.submesh].devices.flat)
            for device, held in self._alive().items():
                if device in here:
                    self.peak[device] = max(self.peak[device], held + made)

    def end(self, position: int, instruction: Any, outputs: Any) -> None:
        """Adds up what arrived."""
        if isinstance(instruction, Receive):
            self.crossed += sum(x.nbytes for x in outputs)

    def _alive(self) -> dict[Any, int]:
        held: dict[Any, int] = defaultdict(int)
        seen = set()
        for x in jax.live_arrays():
            if id(x) in self._ids or x.is_deleted():
                continue
            for shard in x.addressable_shards:
                buffer = shard.device, shard.data.unsafe_buffer_pointer()
                if buffer not in seen:  # copies to a device that has the value already share its buffer
                    seen.add(buffer)
                    held[shard.device] += shard.data.nbytes
        return held


def off(predicted: float, measured: float) -> str:
    """``+3.1 %``."""
    return f"{100 * (predicted / measured - 1):+.1f} %"


def compare(what: str, predicted: float, measured: float, unit: str) -> dict[str, Any]:
    """A row of the table."""
    return row(
        what, f"{predicted:.6g} {unit}", f"{measured:.6g} {unit}", off(predicted, measured), "within 5 %",
        abs(predicted / measured - 1) <= TARGET,
    )  # fmt: skip


def bytes_and_peaks(name: str, lowered: Any, compiled: Any, args: Any) -> list[dict[str, Any]]:
    """The rows of what crosses and of memory, before compiling and after."""
    given = jax.tree.map(jnp.copy, args[0]), args[1]
    watch = Watch(compiled, given)
    jax.block_until_ready(compiled.call_flat(jax.tree.leaves((given, {})), watch))
    before, after = lowered.report(), compiled.report()
    arrived = sum(v.total_bytes for v in before.values if not v.name.startswith("args"))
    rows = [compare(f"{name}: bytes that cross", arrived, watch.crossed, "B")]
    for when, report in (("before compiling", before), ("after", after)):
        worst = max(watch.peak, key=lambda d: abs(report.memory[d].peak_bytes / watch.peak[d] - 1))
        rows.append(
            compare(f"{name}: peak of {worst}, {when}", report.memory[worst].peak_bytes, watch.peak[worst], "B")
        )
    wrong = [o for o in after.off if o.what == "temporary bytes"][:3]
    for o in wrong:
        print(f"  {name}: room inside {o.where}: ours {o.counted:.0f}, XLA's {o.found:.0f} ({100 * o.by:+.0f} %)")
    return rows


def seconds_of(step: Any, args: Any, rounds: int) -> float:
    """The median time of a step."""
    taken = []
    for _ in range(rounds + 2):
        given = jax.block_until_ready((jax.tree.map(jnp.copy, args[0]), args[1]))
        start = time.perf_counter()
        jax.block_until_ready(step(*given))
        taken.append(time.perf_counter() - start)
    return median(taken[2:])


def times(name: str, compiled: Any, args: Any, rounds: int) -> list[dict[str, Any]]:
    """The row of the step's time: predicted from fragments measured before and after it, beside measured."""
    spread_threads()
    found = []
    for _ in range(3):
        predicted = compiled.report(times=compiled.durations(*args, repeats=max(3, rounds // 3))).prediction.seconds
        found.append((predicted, seconds_of(compiled, args, rounds)))
    predicted, measured = min(found, key=lambda pair: pair[1])  # the quietest of three
    print(f"  {name}: predicted and measured, ms: " + ", ".join(f"{1e3 * p:.1f} {1e3 * m:.1f}" for p, m in found))
    return [compare(f"{name}: time of a step", 1e3 * predicted, 1e3 * measured, "ms")]


def asleep(rounds: int) -> list[dict[str, Any]]:
    """The rows of a pipeline whose unequal stages sleep."""
    naps = (0.004, 0.012, 0.008)
    width, count = 32, 8

    def stage(seconds: float) -> Any:
        slowly, slower = sleeper((width, width), seconds), sleeper((width, width), 2 * seconds)

        @jax.custom_vjp
        def run(w: Any, x: Any) -> Any:
            return slowly(x @ w)

        run.defvjp(lambda w, x: (slowly(x @ w), (w, x)), lambda kept, g: (kept[1].T @ slower(g), slower(g) @ kept[0].T))
        return lambda w, x: run(w, x)

    tasks = [mm.task(stage(nap), f"stage_{i}", devices=[i]) for i, nap in enumerate(naps)]

    def loss(ws: Any, x: Any) -> Any:
        for task, w in zip(tasks, ws, strict=True):
            x = task(w, x)
        return jnp.sum(x)

    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=count, schedule="1f1b")
    ws = [jax.device_put(np.eye(width, dtype=np.float32), d) for d in jax.devices()[: len(naps)]]
    compiled = mm.jit(grad).lower(ws, np.ones((width * count, width), np.float32)).compile()
    args = ws, np.ones((width * count, width), np.float32)
    taken = compiled.durations(*args)
    report = compiled.report(times=taken)
    wall = median(_wall(compiled, args) for _ in range(rounds))
    fragments = compiled.program.fragments
    runs = {f.name: f.runs for f in report.fragments}
    work = sum(runs[f.name] * (taken.runs[f.index] + taken.issues[f.index]) for f in fragments if f.loop is not None)
    bubble = 1 - work / (len(naps) * wall)
    return [
        compare("sleeping stages: time of a step", 1e3 * report.prediction.seconds, 1e3 * wall, "ms"),
        compare("sleeping stages: bubble", report.prediction.bubble_fraction, bubble, ""),
    ]


def _wall(compiled: Any, args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    return time.perf_counter() - start


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of one step."""
    step, args = STEPS[name]()
    lowered = step.lower(*args)
    start = time.perf_counter()
    lowered.report()
    print(f"  {name}: a report takes {time.perf_counter() - start:.2f} s, its layout included")
    compiled = lowered.compile()
    return bytes_and_peaks(name, lowered, compiled, args) + times(name, compiled, args, rounds)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    print(f"JAX {jax.__version__}, Python {sys.version.split()[0]}")
    rows = [r for name in a.steps for r in measure(name, a.rounds)] + asleep(a.rounds)
    for r in rows:
        print(f"{r['what']:50} predicted {r['ours']:>14}  measured {r['theirs']:>14}  {r['figure']:>9}  {r['met']}")
    write_rows(a.json, rows)


if __name__ == "__main__":
    main()
