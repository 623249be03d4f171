"""What a compiled step consists of and what it costs, as data that prints itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ._program import Reduction, nbytes
from ._runtime._instructions import Run, Transfer
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


def make_report(lowered: Lowered, made: tuple[int, int]) -> Report:
    """Builds the report of a lowered program; reads plans, runs nothing."""
    program, plan = lowered.program, lowered.plan
    runs = [0] * len(program.fragments)
    crossing: dict[tuple[int, int], list[int]] = {}
    for ins in plan.instructions:
        if isinstance(ins, Run):
            runs[ins.fragment] += 1
        else:
            line = crossing.setdefault((ins.source, ins.target), [0, 0, 0])
            line[0] += len(ins.variables)
            line[1] += 1
            line[2] += sum(nbytes(v.aval) for v in ins.variables)
    for i, s, _ in plan.inputs:  # an argument that several submeshes read comes to its home, and goes on from there
        v = program.invars[i]
        if i >= len(program.consts) and s != program.home[v]:
            line = crossing.setdefault((program.home[v], s), [0, 0, 0])
            line[0] += 1
            line[1] += 1
            line[2] += nbytes(v.aval)
    ids: dict[int, int] = {}
    lines = tuple(
        FragmentLine(
            f.name, f.submesh, f.kind, f.stage, runs[f.index], ids.setdefault(id(lowered.executables[f.index]), len(ids)),
            len(f.invars), len(f.outvars),
        )
        for f in program.fragments
    )  # fmt: skip
    edges = tuple(EdgeLine(a, b, *line) for (a, b), line in sorted(crossing.items()))
    schedules = tuple(
        (getattr(x.schedule, "name", str(x.schedule)), x.placement, x.num_microbatches) for x in program.loops
    )
    return Report(lines, edges, *made, _memory(lowered), program.unmarked, schedules, program.reductions)


def _memory(lowered: Lowered) -> dict[Any, Memory]:
    """Follows the plan and counts the bytes that are alive on each submesh's devices."""
    program, plan = lowered.program, lowered.plan
    live = [0] * len(program.submeshes)
    peak = [0] * len(program.submeshes)
    arguments = [0] * len(program.submeshes)
    size: dict[int, tuple[int, int]] = {}
    for i, s, slot in plan.inputs:
        bytes_ = _shard_bytes(program.invars[i].aval, lowered.arrivals[i, s])
        arguments[s] += bytes_
        size[slot] = (s, bytes_)
        live[s] += bytes_
    for ins in plan.instructions:
        if isinstance(ins, Run):
            f = program.fragments[ins.fragment]
            executable = lowered.executables[ins.fragment]
            stats = executable.memory_analysis()
            outs = [_shard_bytes(v.aval, s) for v, s in zip(f.outvars, executable.output_shardings, strict=True)]
            reused = sum(size[ins.inputs[k]][1] for k in plan.donated.get(ins.fragment, ()) if ins.inputs[k] in size)
            s, temporary = ins.submesh, int(getattr(stats, "temp_size_in_bytes", 0) or 0)
            peak[s] = max(peak[s], live[s] + max(sum(outs) - reused, 0) + temporary)
            made = list(zip(ins.outputs, outs, strict=True))
        else:
            s = ins.target
            made = [
                (slot, _shard_bytes(v.aval, steps[-1].sharding) if steps else 0)
                for slot, v, steps in zip(ins.outputs, ins.variables, _steps(lowered, ins), strict=True)
            ]
        for slot, bytes_ in made:
            size[slot] = (s, bytes_)
            live[s] += bytes_
        peak[s] = max(peak[s], live[s])
        for slot in ins.free:
            where, bytes_ = size.pop(slot, (0, 0))
            live[where] -= bytes_
    return {
        d: Memory(arguments[s], max(peak[s], arguments[s]))
        for s, mesh in enumerate(program.submeshes)
        for d in mesh_devices(mesh)
    }


def _steps(lowered: Lowered, ins: Transfer) -> tuple[Any, ...]:
    return next(steps for k, steps in lowered.transfers.items() if lowered.plan.instructions[k] is ins)


def _shard_bytes(aval: Any, sharding: Any) -> int:
    if not aval.shape:
        return nbytes(aval)
    whole = int(np.prod(aval.shape, dtype=np.int64)) or 1
    return nbytes(aval) * int(np.prod(sharding.shard_shape(aval.shape), dtype=np.int64)) // whole
