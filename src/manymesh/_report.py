"""What a compiled step consists of and what it costs, as data that prints itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Sharding

from ._plan._instructions import Plan, Receive, Run
from ._plan._number import variables_of
from ._program import Fragment, Program, Reduction, nbytes
from ._runtime._lower import Lowered
from ._task import mesh_devices


@dataclass(frozen=True)
class Memory:
    """Memory of one device during a call.

    Attributes:
      argument_bytes: what arrives.
      peak_bytes: most bytes alive at once: arguments, values between fragments, and what XLA uses inside the
        fragment that runs.
    """

    argument_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class FragmentLine:
    """One fragment in a report."""

    name: str
    submesh: int
    kind: str
    stage: int | None
    runs: int
    executable: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class EdgeLine:
    """What crosses between two submeshes in one call: values, and arguments that are read away from their home."""

    source: int
    target: int
    values: int
    transfers: int
    nbytes: int


@dataclass(frozen=True)
class Report:
    """What a compiled step consists of.

    Attributes:
      fragments: its fragments and how often each runs in a call.
      edges: what crosses, summed over a call.
      compiled: executables compiled for this step.
      reused: fragments that share an executable with another.
      memory: device -> `Memory`.
      unmarked: (primitive, submesh, why it is there, count) of the equations outside tasks.
      schedules: for each microbatch loop, its schedule's name, its stages' submeshes and microbatches.
      reductions: for each sum over microbatches whose batch is sharded, whether the devices' parts are added up once
        a call, and if not, why.
    """

    fragments: tuple[FragmentLine, ...]
    edges: tuple[EdgeLine, ...]
    compiled: int
    reused: int
    memory: dict[Any, Memory]
    unmarked: tuple[tuple[str, int, str, int], ...]
    schedules: tuple[tuple[str, tuple[int, ...], int], ...]
    reductions: tuple[Reduction, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.fragments)} fragments, {self.compiled} compiled, {self.reused} reused"]
        for name, placement, count in self.schedules:
            lines.append(f"schedule {name}: {count} microbatches, stages on submeshes {placement}")
        if self.reductions:
            once = sum(bool(r.axes) for r in self.reductions)
            lines.append(f"{once} of {len(self.reductions)} sums over a sharded batch are taken once a call")
            lines += [f"  {r!r}" for r in self.reductions if not r.axes]
        width = max((len(f.name) for f in self.fragments), default=0)
        for f in self.fragments:
            stage = "" if f.stage is None else f" stage {f.stage}"
            lines.append(
                f"  {f.name:{width}}  submesh {f.submesh}  {f.kind}{stage}  x{f.runs}  executable {f.executable}  "
                f"{f.inputs} -> {f.outputs}"
            )
        for e in self.edges:
            lines.append(f"  {e.source} -> {e.target}: {e.values} values in {e.transfers} transfers, {e.nbytes} bytes")
        for (submesh, why), primitives in self._unmarked_groups().items():
            lines.append(f"  unmarked on submesh {submesh}, {why}: {', '.join(primitives)}")
        for device, m in self.memory.items():
            lines.append(f"  {device}: {m.argument_bytes} bytes of arguments, peak {m.peak_bytes}")
        return "\n".join(lines)

    def _unmarked_groups(self) -> dict[tuple[int, str], list[str]]:
        """(submesh, why) -> the equations that are there, the most frequent first."""
        groups: dict[tuple[int, str], list[str]] = {}
        for primitive, submesh, why, count in sorted(self.unmarked, key=lambda u: (u[1], u[2], -u[3], u[0])):
            groups.setdefault((submesh, why), []).append(primitive if count == 1 else f"{count} {primitive}")
        return groups


def make_report(lowered: Lowered, compilations: tuple[int, int]) -> Report:
    """Builds the report of a lowered program; reads plans, runs nothing.

    Args:
      lowered: the program.
      compilations: how many executables were compiled for it, and how many reused.
    """
    program, plan = lowered.program, lowered.plan
    runs = Counter(ins.fragment for ins in plan.instructions if isinstance(ins, Run))
    ids: dict[int, int] = {}
    lines = tuple(
        FragmentLine(
            f.name, f.submesh, f.kind, f.stage, runs[f.index], ids.setdefault(_identity(lowered, f), len(ids)),
            len(f.invars), len(f.outvars),
        )
        for f in program.fragments
    )  # fmt: skip
    schedules = tuple(
        (getattr(x.schedule, "name", str(x.schedule)), x.placement, x.num_microbatches) for x in program.loops
    )
    return Report(
        lines, _edges(program, plan), *compilations, _memory(lowered), program.unmarked, schedules, program.reductions
    )


def _identity(lowered: Lowered, f: Fragment) -> int:
    """What fragments of one executable have in common; another process's are each taken for one of its own."""
    executable = lowered.executables[f.index]
    return -1 - f.index if executable is None else id(executable)


def _edges(program: Program, plan: Plan) -> tuple[EdgeLine, ...]:
    """What crosses, summed over a call."""
    sizes = [nbytes(v.aval) for v in variables_of(program)]
    crossing: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for ins in plan.instructions:
        if isinstance(ins, Receive):
            line = crossing[ins.source, ins.submesh]
            line[0] += len(ins.variables)
            line[1] += 1
            line[2] += sum(sizes[k] for k in ins.variables)
    for i, s, _ in plan.inputs:  # an argument that several submeshes read comes to its home, and goes on from there
        v = program.invars[i]
        if i >= len(program.consts) and s != program.home[v]:
            line = crossing[program.home[v], s]
            line[0] += 1
            line[1] += 1
            line[2] += nbytes(v.aval)
    return tuple(EdgeLine(a, b, *line) for (a, b), line in sorted(crossing.items()))


class _Live:
    """Bytes that are alive on the devices. Devices that are in the same submeshes are counted as one group."""

    def __init__(self, program: Program) -> None:
        places: dict[Any, list[int]] = defaultdict(list)
        for s, mesh in enumerate(program.submeshes):
            for d in mesh_devices(mesh):
                places[d].append(s)
        groups = list(dict.fromkeys(map(tuple, places.values())))
        self.group = {d: groups.index(tuple(at)) for d, at in places.items()}
        self.of = [[g for g, at in enumerate(groups) if s in at] for s in range(len(program.submeshes))]
        self.now, self.peak, self.arguments = ([0] * len(groups) for _ in range(3))
        self.held: dict[int, tuple[int, int]] = {}  # slot -> (submesh, bytes a device)

    def fill(self, slot: int, s: int, size: int) -> None:
        """A slot takes up bytes on each device of a submesh."""
        self.held[slot] = s, size
        for g in self.of[s]:
            self.now[g] += size
            self.peak[g] = max(self.peak[g], self.now[g])

    def free(self, slots: tuple[int, ...]) -> None:
        """Slots that are filled take up nothing any more."""
        for slot in slots:
            if slot in self.held:
                s, size = self.held.pop(slot)
                for g in self.of[s]:
                    self.now[g] -= size

    def passing(self, s: int, size: int) -> None:
        """Bytes are alive for a moment, beside all the others."""
        for g in self.of[s]:
            self.peak[g] = max(self.peak[g], self.now[g] + size)


def _memory(lowered: Lowered) -> dict[Any, Memory]:
    """Follows the plan and counts the bytes that are alive on each device."""
    program, plan = lowered.program, lowered.plan
    live = _Live(program)
    for i, s, slot in plan.inputs:
        live.fill(slot, s, _shard_bytes(program.invars[i].aval, lowered.sharding(program.invars[i], s)))
    live.arguments = list(live.now)
    makes, temporary = [], []
    for f, executable in zip(program.fragments, lowered.executables, strict=True):
        stats = None if executable is None else executable.memory_analysis()  # another process compiled it
        shardings = [lowered.sharding(v, f.submesh) for v in f.outvars]
        made = shardings if executable is None else executable.output_shardings
        makes.append([_shard_bytes(v.aval, x) for v, x in zip(f.outvars, made, strict=True)])
        temporary.append(int(getattr(stats, "temp_size_in_bytes", 0) or 0))
    variables = variables_of(program)
    arriving: dict[tuple[int, int, int], int] = {}  # (variable, source, target) -> bytes a device
    for ins in plan.instructions:
        if isinstance(ins, Run):
            reused = sum(live.held[ins.inputs[k]][1] for k, _ in lowered.layout.donation.get(ins.fragment, ()))
            live.passing(ins.submesh, max(sum(makes[ins.fragment]) - reused, 0) + temporary[ins.fragment])
            live.free(ins.free)
            for slot, size in zip(ins.outputs, makes[ins.fragment], strict=True):
                live.fill(slot, ins.submesh, size)
            live.free(ins.free)
        elif isinstance(ins, Receive):
            for slot, number in zip(ins.outputs, ins.variables, strict=True):
                key = number, ins.source, ins.submesh
                if key not in arriving:
                    v, sharding = variables[number], lowered.sharding(variables[number], ins.submesh)
                    moves = sharding != lowered.sharding(v, ins.source)
                    arriving[key] = _shard_bytes(v.aval, sharding) if moves else 0
                live.fill(slot, ins.submesh, arriving[key])
            live.free(ins.free)
        else:
            live.free(ins.free)
    return {d: Memory(live.arguments[g], max(live.peak[g], live.arguments[g])) for d, g in live.group.items()}


def _shard_bytes(aval: Any, sharding: Sharding) -> int:
    if not aval.shape:
        return nbytes(aval)
    whole = int(np.prod(aval.shape, dtype=np.int64)) or 1
    return nbytes(aval) * int(np.prod(sharding.shard_shape(aval.shape), dtype=np.int64)) // whole
