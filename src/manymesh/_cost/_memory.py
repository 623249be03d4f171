"""The bytes that are alive on each device over the order of the plan, by what they are.

An argument that its fragment may not reuse stays with its caller until the call ends. Between devices nothing is
assumed: each goes through its own instructions in its own order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._compat import Var
from .._layout._layout import Layout
from .._plan._instructions import Plan, Receive, Run
from .._plan._number import variables_of
from .._program import Program
from .._task import mesh_devices
from ._crossings import shard_bytes
from ._kinds import KINDS, Kind

MOMENTS = 100  # so many moments of a device's memory are kept, each the worst of its neighbours
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Moment:
    """The memory of a device at one instruction.

    Attributes:
      position: of the instruction in the plan.
      total_bytes: everything, while it runs.
      activation_bytes: activations that are there when it starts.
    """

    position: int
    total_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class Holding:
    """Values that are alike and alive at the peak.

    Attributes:
      name: what users call them: a path, or what makes them.
      kind: what they are.
      values: how many.
      nbytes: bytes on the device, all of them together.
    """

    name: str
    kind: str
    values: int
    nbytes: int


@dataclass(frozen=True)
class Memory:
    """Memory of one device during a call.

    Attributes:
      argument_bytes: what arrives.
      peak_bytes: most bytes alive at once: arguments, values between fragments, and what the fragment that runs
        needs inside.
      at: what runs at the peak: the fragment, with its microbatch.
      made_of: what the peak consists of: kind -> bytes; ``temporary`` is inside the fragment.
      holds: what takes most of it, the largest first.
      timeline: the memory over the order of the plan, thinned out; peaks are kept.
    """

    argument_bytes: int
    peak_bytes: int
    at: str = ""
    made_of: Mapping[str, int] = field(default_factory=dict)
    holds: tuple[Holding, ...] = ()
    timeline: tuple[Moment, ...] = ()


def memory(
    program: Program, plan: Plan, layout: Layout, kinds: Mapping[Var, Kind], rooms: Sequence[int]
) -> dict[Any, Memory]:
    """Follows the plan and counts the bytes that are alive on each device.

    Args:
      program, plan, layout: the step.
      kinds: what its values are; those that are missing are activations.
      rooms: bytes that each fragment needs besides what it reads and makes.

    Returns:
      device -> its memory, in the order of the submeshes.
    """
    places: dict[Any, list[int]] = defaultdict(list)
    for s, mesh in enumerate(program.submeshes):
        for d in mesh_devices(mesh):
            places[d].append(s)
    slots = _Slots(program, plan, layout, kinds, rooms)
    groups = {at: slots.memory(at) for at in dict.fromkeys(map(tuple, places.values()))}
    return {d: groups[tuple(at)] for d, at in places.items()}


class _Slots:
    """Every slot of a plan: how large it is, what it holds, and from where to where."""

    def __init__(
        self, program: Program, plan: Plan, layout: Layout, kinds: Mapping[Var, Kind], rooms: Sequence[int]
    ) -> None:
        self.program, self.plan, self.layout = program, plan, layout
        self.variables = variables_of(program)
        self.numbers = {v: k for k, v in enumerate(self.variables)}
        self.kind_of = [KINDS.index(kinds.get(v, "activations")) for v in self.variables]
        self.known: dict[tuple[int, int], int] = {}  # (number, submesh) -> bytes a device
        self.end = len(plan.instructions)
        self.size, self.number, self.at = ([0] * plan.num_slots for _ in range(3))
        self.fill, self.free = [self.end] * plan.num_slots, [self.end] * plan.num_slots
        self.submesh = [ins.submesh for ins in plan.instructions]
        self.extra = [0] * self.end  # bytes that are alive only while an instruction runs
        self._follow(rooms)
        self.arrays = {
            name: np.asarray(getattr(self, name), np.int64)
            for name in ("size", "number", "at", "fill", "free", "submesh", "extra")
        }
        self.slot_kind = (
            np.asarray(self.kind_of, np.int64)[self.arrays["number"]] if self.variables else np.zeros(0, int)
        )
        self.by_submesh = [np.flatnonzero(self.arrays["at"] == s) for s in range(len(program.submeshes))]
        self.instructions = [np.flatnonzero(self.arrays["submesh"] == s) for s in range(len(program.submeshes))]

    def bytes(self, number: int, s: int) -> int:
        """Bytes a device of a variable on a submesh."""
        if (number, s) not in self.known:
            self.known[number, s] = shard_bytes(self.variables[number], self.layout, s)
        return self.known[number, s]

    def _follow(self, rooms: Sequence[int]) -> None:
        program, plan = self.program, self.plan
        lent = set()
        for i, s, slot in plan.inputs:
            v = program.invars[i]
            self._fills([slot], [self.numbers[v]], [self.bytes(self.numbers[v], s)], s, -1)
            if s == program.home[v]:
                lent.add(slot)
        makes = [
            [self.bytes(k, f.submesh) for k in p.makes] for f, p in zip(program.fragments, plan.ports, strict=True)
        ]
        total = [sum(sizes) for sizes in makes]
        arriving: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
        for k, ins in enumerate(plan.instructions):
            if isinstance(ins, Run):
                f = ins.fragment
                given = [ins.inputs[i] for i, _ in self.layout.donation.get(f, ())]
                self.extra[k] = max(total[f] - sum([self.size[slot] for slot in given]), 0) + rooms[f]
                self._fills(ins.outputs, plan.ports[f].makes, makes[f], ins.submesh, k)
                lent.difference_update(given)
            elif isinstance(ins, Receive):
                key = ins.source, ins.submesh, ins.variables
                if key not in arriving:
                    arriving[key] = [self._arriving(n, ins.source, ins.submesh) for n in ins.variables]
                self._fills(ins.outputs, ins.variables, arriving[key], ins.submesh, k)
            for slot in ins.free:
                if slot not in lent:
                    self.free[slot] = k

    def _fills(self, slots: Sequence[int], numbers: Sequence[int], sizes: Sequence[int], s: int, k: int) -> None:
        for slot, number, size in zip(slots, numbers, sizes, strict=True):
            self.size[slot], self.number[slot], self.at[slot], self.fill[slot] = size, number, s, k

    def _arriving(self, number: int, source: int, target: int) -> int:
        """What a value takes where it arrives: nothing where it was already."""
        v = self.variables[number]
        moves = self.layout.sharding(v, target) != self.layout.sharding(v, source)
        return self.bytes(number, target) if moves else 0

    def memory(self, submeshes: Iterable[int]) -> Memory:
        """The memory of a device that is in these submeshes."""
        here = list(submeshes)
        slots = np.concatenate([self.by_submesh[s] for s in here])
        order = np.sort(np.concatenate([self.instructions[s] for s in here]))
        size, fill, free = (self.arrays[name][slots] for name in ("size", "fill", "free"))
        kind = self.slot_kind[slots]
        live = np.zeros((len(order) + 1, len(KINDS)), np.int64)  # row k: before the k-th instruction here
        filled = fill < self.end
        np.add.at(live, (np.searchsorted(order, fill[filled]) + (fill[filled] >= 0), kind[filled]), size[filled])
        gone = free < self.end
        np.subtract.at(live, (np.searchsorted(order, free[gone]) + 1, kind[gone]), size[gone])
        live = np.cumsum(live, axis=0)
        total = live.sum(axis=1)
        running = np.append(total[:-1] + self.arrays["extra"][order], total[-1])
        peak = int(np.argmax(running))
        most = int(running[peak])
        if int(total.max()) > most:  # what arrives
            peak, most = int(np.argmax(total)), int(total.max())
        return Memory(
            int(total[0]), most, *self._peak(order, live[peak], peak, slots, most), self._timeline(order, live, running)
        )

    def _peak(
        self, order: Numbers, live: Numbers, peak: int, slots: Numbers, most: int
    ) -> tuple[str, dict[str, int], tuple[Holding, ...]]:
        """What runs at the peak, what it consists of, and what takes most of it."""
        made: Counter[str] = Counter({name: int(n) for name, n in zip(KINDS, live, strict=True)})
        at, where = self.end, "the end of the call"
        if peak < len(order):
            at = int(order[peak])
            ins = self.plan.instructions[at]
            where = "arrival" if not isinstance(ins, Run) else self.program.fragments[ins.fragment].name
            if isinstance(ins, Run):
                where += "" if ins.microbatch is None else f" [{ins.microbatch}]"
                for k in self.plan.ports[ins.fragment].makes:
                    made[KINDS[self.kind_of[k]]] += self.bytes(k, ins.submesh)
                for i, _ in self.layout.donation.get(ins.fragment, ()):
                    slot = ins.inputs[i]
                    made[KINDS[self.kind_of[self.number[slot]]]] -= self.size[slot]
        if (rest := most - sum(made.values())) > 0:
            made["temporary"] = rest
        fill, free = self.arrays["fill"][slots], self.arrays["free"][slots]
        alive = slots[(fill < at) & (free >= at)]
        held: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for slot in alive.tolist():
            v = self.variables[self.number[slot]]
            line = held[self.layout.names.get(v, ""), KINDS[self.kind_of[self.number[slot]]]]
            line[0] += 1
            line[1] += self.size[slot]
        largest = sorted(held.items(), key=lambda item: -item[1][1])[:6]
        return (
            where,
            {k: n for k, n in made.items() if n > 0},
            tuple(Holding(name, kind, count, nbytes) for (name, kind), (count, nbytes) in largest if nbytes),
        )

    def _timeline(self, order: Numbers, live: Numbers, running: Numbers) -> tuple[Moment, ...]:
        activations = live[:, KINDS.index("activations")]
        moments = []
        for part in np.array_split(np.arange(len(order)), min(MOMENTS, max(len(order), 1))):
            if len(part):
                worst = int(part[np.argmax(running[part])])
                moments.append(Moment(int(order[worst]), int(running[worst]), int(activations[part].max())))
        return tuple(moments)
