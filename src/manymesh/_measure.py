"""Task times, measured: what `manymesh.schedules.search` needs to know of a compiled step."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from . import _compat
from ._cost._clock import Crossing, Durations
from ._plan._instructions import Instruction, Run, Send, Tag
from ._program import Program, nbytes
from ._runtime._describe import Describer
from ._runtime._execute import Executor
from ._runtime._lower import Lowered
from ._runtime._observe import Observer
from .schedules import Costs


class _Clock(Observer):
    """Waits for each instruction before the next one starts, and writes down how long it took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.issue: list[float] = []
        self.cores: list[float] = []
        self.arguments: dict[tuple[int, Sharding], float] = {}
        self._started = self._worked = 0.0

    def moves_argument(self, position: int, value: object, sharding: jax.sharding.NamedSharding) -> None:
        self._started = time.perf_counter()

    def moved_argument(self, position: int, moved: jax.Array) -> None:
        jax.block_until_ready(moved)
        self.arguments[position, moved.sharding] = time.perf_counter() - self._started

    def begin(self, position: int, instruction: Instruction, inputs: Sequence[jax.Array]) -> None:
        self._worked, self._started = time.process_time(), time.perf_counter()

    def end(self, position: int, instruction: Instruction, outputs: Sequence[jax.Array]) -> None:
        self.issue.append(time.perf_counter() - self._started)
        jax.block_until_ready(outputs)
        self.seconds.append(time.perf_counter() - self._started)
        self.cores.append((time.process_time() - self._worked) / max(self.seconds[-1], 1e-9))


def measure(executor: Executor, leaves: list[Any]) -> list[float]:
    """Runs a step once, waiting after each instruction.

    Args:
      executor: the step.
      leaves: its arguments, flat; donated ones are gone afterwards.

    Returns:
      ``float[instruction]``, the seconds that each took.
    """
    clock = _Clock()
    jax.block_until_ready(leaves)
    executor(leaves, clock)
    return clock.seconds


def measured_durations(
    lowered: Lowered, executor: Executor, arguments: Callable[[], list[Any]], repeats: int
) -> Durations:
    """Runs a step several times, waiting after each instruction.

    Where the devices are virtual and share the cores of one computer, it is measured how many each fragment uses, so
    that what runs side by side can be told to slow each other down.

    Args:
      lowered: the step.
      executor: runs it.
      arguments: makes its arguments, flat; donated ones are gone after a run.
      repeats: how many runs count, after a first one.
    """
    runs: dict[object, list[float]] = defaultdict(list)
    issues: dict[object, list[float]] = defaultdict(list)
    cores: dict[object, list[float]] = defaultdict(list)
    moves: dict[int, list[float]] = defaultdict(list)
    instructions, describe = lowered.plan.instructions, Describer.of(lowered)
    for repeat in range(repeats + 1):
        clock = _Clock()
        leaves = arguments()
        jax.block_until_ready(leaves)
        executor(leaves, clock)
        figures = zip(instructions, clock.seconds, clock.issue, clock.cores, strict=True)
        for ins, took, issue, used in figures if repeat else ():
            if isinstance(ins, Send):  # the copy is in the Receive
                continue
            key = ins.fragment if isinstance(ins, Run) else (ins.source, ins.submesh, ins.variables)
            runs[key].append(took - issue)
            issues[key].append(issue)
            cores[key].append(used)
        for (position, sharding), took in clock.arguments.items() if repeat else ():
            place = describe.place_of(position, sharding)
            if place is not None and describe.goes_on(place):
                moves[place].append(took)
    count = range(len(lowered.program.fragments))
    crossings: list[Crossing] = [key for key in runs if isinstance(key, tuple)]
    devices = [d for mesh in lowered.program.submeshes for d in mesh.devices.flat]
    shared = all(d.platform == "cpu" for d in devices)
    return Durations(
        [median(runs.get(k, (0.0,))) for k in count],
        {key: median(runs[key]) for key in crossings},
        [median(issues.get(k, (0.0,))) for k in count],
        {key: median(issues[key]) for key in crossings},
        float(os.cpu_count() or 1) if shared else None,
        [min(max(median(cores.get(k, (1.0,))), 0.1), float(len(devices))) for k in count],
        {place: median(took) for place, took in moves.items()},
    )


def loop_costs(lowered: Lowered, seconds: list[float], loop: int) -> Costs:
    """The costs of one microbatch of a loop, each the median over its microbatches.

    Args:
      lowered: the step.
      seconds: ``float[instruction]``, as from `measure`.
      loop: which of its loops.

    Returns:
      Seconds for the stages and for the hops between them, and bytes a device for the activations.
    """
    program = lowered.program
    plan = program.loops[loop]
    stages = len(plan.placement)
    times: dict[tuple[str, int], list[float]] = defaultdict(list)  # (kind, stage) -> each microbatch
    crossings: dict[Tag, float] = defaultdict(float)
    runs: dict[int, list[float]] = defaultdict(list)
    for ins, took in zip(lowered.plan.instructions, seconds, strict=True):
        if not isinstance(ins, Run):
            crossings[ins.tag] += took
        elif program.fragments[ins.fragment].loop == loop:
            runs[ins.fragment].append(took)
    hops: dict[int, list[float]] = defaultdict(list)
    for tag, took in crossings.items():
        maker = program.fragments[tag.maker]
        if maker.loop == loop:
            hops[(maker.stage or 0) - (maker.kind != "F")].append(took)
    for index, each in runs.items():
        f = program.fragments[index]
        times[f.kind, f.stage or 0].append(median(each))
    forward, backward, weight = ([sum(times.get((kind, s), ())) for s in range(stages)] for kind in ("F", "B", "W"))
    return Costs(
        forward=tuple(forward),
        backward=tuple(b + w for b, w in zip(backward, weight, strict=True)) if any(backward) else None,
        weight=tuple(weight) if any(weight) else None,
        transfer=tuple(median(hops[s]) if s in hops else 0.0 for s in range(stages - 1)),
        activation=tuple(_activations(program, loop, plan.placement)),
    )


def _activations(program: Program, loop: int, placement: tuple[int, ...]) -> list[float]:
    """Bytes a device that each stage keeps of a microbatch: what its backward pass reads of its forward pass."""
    forward = {inner for inner, _ in program.loops[loop].xs}
    read: dict[int, set[Any]] = defaultdict(set)
    for f in program.body(loop):
        if f.kind == "F":
            forward.update(f.outvars)
        else:
            read[f.stage or 0].update(f.invars)
    sizes = [program.submeshes[s].size for s in placement]
    return [
        float(np.ceil(sum(nbytes(v.aval) for v in read[s] & forward if not _compat.is_in_host_memory(v.aval)) / size))
        for s, size in enumerate(sizes)
    ]
