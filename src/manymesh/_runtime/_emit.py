"""`emit`: from a program and its schedules to instructions over slots. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from .. import _compat
from .._program import Edge, Fragment, LoopPlan, Program
from .._task import mesh_devices
from ..schedules import issue_order
from ._instructions import Instruction, Plan, Run, Transfer


def emit(program: Program, donated_inputs: frozenset[int]) -> Plan:
    """Lays out one call of a program.

    Args:
      program: the program.
      donated_inputs: positions of inputs whose buffers the call may reuse.

    Returns:
      Instructions in the order in which one thread issues them. A value is sent as soon as it is made;
      stages are interleaved as the schedule says, so that every submesh is fed early.
    """
    return _Emitter(program, donated_inputs).run()


def loop_sequence(program: Program, index: int) -> list[tuple[Fragment, int]]:
    """Fragments of a loop and their microbatches, in the order of issue."""
    loop = program.loops[index]
    body = list(program.body(index))
    if not loop.in_order:
        return [(f, m) for m in range(loop.num_microbatches) for f in body]
    groups: dict[tuple[str, int], list[Fragment]] = defaultdict(list)
    for f in body:
        groups[f.kind if _has_forward(body) else "F", f.stage or 0].append(f)
    order = loop_order(loop, body)
    return [(f, a.microbatch) for a in issue_order(order) for f in groups[a.kind, a.stage]]


def loop_order(loop: LoopPlan, body: list[Fragment]) -> Any:
    """The schedule's order for a loop."""
    backward = _has_forward(body) and any(f.kind == "B" for f in body)
    return loop.schedule.order(loop.placement, loop.num_microbatches, backward=backward)


def _has_forward(body: list[Fragment]) -> bool:
    return any(f.kind == "F" for f in body)


class _Emitter:
    def __init__(self, program: Program, donated_inputs: frozenset[int]) -> None:
        self.program = program
        self.donated_inputs = donated_inputs
        self.slots: dict[Any, int] = {}
        self.code: list[Instruction] = []
        self.edges: dict[Any, list[Edge]] = defaultdict(list)
        for e in program.edges:
            self.edges[e.var].append(e)
        self.alias: dict[Any, tuple[Any, int]] = {}  # result of a loop -> (variable of the body, microbatch)
        self.cut: dict[Any, tuple[Any, ...]] = {}
        self.carry: dict[Any, tuple[Any, Any]] = {}
        self.finals: dict[Any, list[Any]] = defaultdict(list)
        self.copies: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
        for loop in program.loops:
            for inner, out, init, final in loop.carries:
                self.alias[final] = (out, loop.num_microbatches - 1)
                self.carry[inner] = (init, out)
                self.finals[out].append(final)
            self.cut.update(dict(loop.cut))
            for inner, outer in loop.collected:
                self.copies[inner].append(outer)
                self.alias.update({v: (inner, m) for m, v in enumerate(outer)})
        self.last = [loop.num_microbatches - 1 for loop in program.loops]

    def run(self) -> Plan:
        inputs = [
            (i, s, self._slot(v, s, None)) for i, v in enumerate(self.program.invars) for s in self.program.arrivals[v]
        ]
        for item in self.program.order:
            if item >= 0:
                self._run(self.program.fragments[item], None)
            else:
                for fragment, m in loop_sequence(self.program, -1 - item):
                    self._run(fragment, m)
        outputs = tuple(self._slot(v, s, None) if _compat.is_var(v) else None for v, s in self.program.outputs)
        self._free({s for s in outputs if s is not None})
        return Plan(tuple(self.code), len(self.slots), tuple(inputs), outputs, self._donated(inputs))

    def _slot(self, v: Any, s: int, m: int | None) -> int:
        return self.slots.setdefault(self._key(v, s, m), len(self.slots))

    def _key(self, v: Any, s: int, m: int | None) -> Any:
        if v in self.alias and s == self.program.home[v]:
            v, m = self.alias[v]
        while m is not None:
            if v in self.cut:
                v, m = self.cut[v][m], None
                if v in self.alias and s == self.program.home[v]:
                    v, m = self.alias[v]
            elif v in self.carry:
                init, out = self.carry[v]
                v, m = (out, m - 1) if m else (init, None)
            else:
                break
        return (v, s, m if v not in self._outer else None)

    @property
    def _outer(self) -> set[Any]:
        if not hasattr(self, "_outer_cache"):
            self._outer_cache = set(self.program.invars) | {
                v for f in self.program.fragments if f.loop is None for v in f.outvars
            }
            self._outer_cache |= {final for loop in self.program.loops for *_, final in loop.carries}
            self._outer_cache |= {v for loop in self.program.loops for _, outer in loop.collected for v in outer}
        return self._outer_cache

    def _run(self, f: Fragment, m: int | None) -> None:
        ins = tuple(self._slot(v, f.submesh, m) for v in f.invars)
        outs = tuple(self._slot(v, f.submesh, m) for v in f.outvars)
        self.code.append(Run(f.index, f.submesh, m, ins, outs))
        sends: dict[int, list[tuple[Any, int | None]]] = defaultdict(list)
        for v in f.outvars:
            self._sends_of(v, f.submesh, m, sends)
            if m is not None and m == self.last[f.loop or 0]:
                for final in self.finals.get(v, ()):
                    self._sends_of(final, f.submesh, None, sends)
            for outer in self.copies.get(v, ()):
                self._sends_of(outer[m or 0], f.submesh, None, sends)
        for target, values in sends.items():
            self.code.append(
                Transfer(
                    f.submesh,
                    target,
                    tuple(v for v, _ in values),
                    m,
                    tuple(self._slot(v, f.submesh, k) for v, k in values),
                    tuple(self._slot(v, target, k) for v, k in values),
                )
            )

    def _sends_of(self, v: Any, source: int, m: int | None, sends: dict[int, list[tuple[Any, int | None]]]) -> None:
        for e in self.edges.get(v, ()):
            if e.source == source:
                sends[e.target].append((v, m))

    def _free(self, kept: set[int]) -> None:
        last: dict[int, int] = {}
        for i, ins in enumerate(self.code):
            for slot in (*ins.inputs, *ins.outputs):
                last[slot] = i
        free: dict[int, list[int]] = defaultdict(list)
        for slot, i in last.items():
            if slot not in kept:
                free[i].append(slot)
        self.code = [replace(ins, free=tuple(free.get(i, ()))) for i, ins in enumerate(self.code)]

    def _donated(self, inputs: list[tuple[int, int, int]]) -> dict[int, tuple[int, ...]]:
        """Inputs of fragments that die there in every run, that we own, and that a result can take over."""
        given = {slot for i, _, slot in inputs if i not in self.donated_inputs}
        shared = self._aliasing_slots()
        possible: dict[int, set[int]] = {}
        for ins in self.code:
            if isinstance(ins, Run):
                ok = {
                    k
                    for k, slot in enumerate(ins.inputs)
                    if slot in ins.free and slot not in given and slot not in shared and ins.inputs.count(slot) == 1
                }
                possible[ins.fragment] = possible.get(ins.fragment, ok) & ok
        chosen = {}
        for index, positions in possible.items():
            f = self.program.fragments[index]
            room: dict[Any, int] = defaultdict(int)
            for v in f.outvars:
                room[v.aval.shape, v.aval.dtype] += 1
            keep = []
            for k in sorted(positions):
                aval = f.invars[k].aval
                if room[aval.shape, aval.dtype] > 0:
                    room[aval.shape, aval.dtype] -= 1
                    keep.append(k)
            chosen[index] = tuple(keep)
        return chosen

    def _aliasing_slots(self) -> set[int]:
        """Slots of transfers between meshes over the same devices: both ends may be one buffer."""
        devices = [set(mesh_devices(m)) for m in self.program.submeshes]
        return {
            slot
            for ins in self.code
            if isinstance(ins, Transfer) and devices[ins.source] & devices[ins.target]
            for slot in (*ins.inputs, *ins.outputs)
        }
