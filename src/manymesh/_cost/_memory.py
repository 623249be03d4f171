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

from .. import _compat
from .._compat import Var
from .._layout._layout import Layout
from .._plan._instructions import Plan, Receive, Run
from .._plan._number import variables_of
from .._program import Program
from .._task import mesh_devices
from ._crossings import shard_bytes
from ._kinds import KINDS, Kind
from ._room import Room

MOMENTS = 50  # so many moments of a device's memory are kept, each the worst of its neighbours
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
    program: Program,
    plan: Plan,
    layout: Layout,
    kinds: Mapping[Var, Kind],
    rooms: Sequence[Room],
    late: frozenset[int] = frozenset(),
) -> dict[Any, Memory]:
    """Follows the plan and counts the bytes that are alive on each device.

    Args:
      program, plan, layout: the step.
      kinds: what its values are; those that are missing are activations.
      rooms: what each fragment needs besides what it reads and makes.
      late: inputs that come from the memory of the host when they are first read.

    Returns:
      device -> its memory, in the order of the submeshes.
    """
    places: dict[Any, list[int]] = defaultdict(list)
    for s, mesh in enumerate(program.submeshes):
        for d in mesh_devices(mesh):
            places[d].append(s)
    slots = _Slots(program, plan, layout, kinds, rooms, late)
    groups = {at: slots.memory(at) for at in dict.fromkeys(map(tuple, places.values()))}
    return {d: groups[tuple(at)] for d, at in places.items()}


class _Slots:
    """Every slot of a plan: how large it is, what it holds, and from where to where."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        layout: Layout,
        kinds: Mapping[Var, Kind],
        rooms: Sequence[Room],
        late: frozenset[int],
    ) -> None:
        self.rooms = rooms
        self.program, self.plan, self.layout, self.late = program, plan, layout, late
        self.variables = variables_of(program)
        self.numbers = {v: k for k, v in enumerate(self.variables)}
        self.kind_of = [KINDS.index(kinds.get(v, "activations")) for v in self.variables]
        self.known: dict[tuple[int, int], int] = {}  # (number, submesh) -> bytes a device
        self.end = len(plan.instructions)
        self.submesh = np.fromiter((ins.submesh for ins in plan.instructions), np.int64, self.end)
        self.extra = np.zeros(self.end, np.int64)  # bytes that are alive only while an instruction runs
        self.size, self.number, self.at, self.fill, self.free = self._follow()
        of_kind = np.asarray(self.kind_of, np.int64)
        self.kind = of_kind[self.number] if len(of_kind) else self.number
        self.by_submesh = [np.flatnonzero(self.at == s) for s in range(len(program.submeshes))]
        self.instructions = [np.flatnonzero(self.submesh == s) for s in range(len(program.submeshes))]

    def bytes(self, number: int, s: int) -> int:
        """Bytes a device of a variable on a submesh; none of what is put into the memory of the host."""
        if (number, s) not in self.known:
            v = self.variables[number]
            self.known[number, s] = 0 if _compat.is_in_host_memory(v.aval) else shard_bytes(v, self.layout, s)
        return self.known[number, s]

    def _follow(self) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
        """Of each slot: its bytes, the number of its variable, its submesh, and where it is filled and freed."""
        program, plan, ports = self.program, self.plan, self.plan.ports
        arguments = {self.numbers[v] for v in program.invars}
        makes = [[self.bytes(k, f.submesh) for k in p.makes] for f, p in zip(program.fragments, ports, strict=True)]
        needs, given = [], []
        for f, made in zip(program.fragments, makes, strict=True):
            handed = [i for i, _ in self.layout.donation.get(f.index, ())]
            reused = sum(self.bytes(ports[f.index].reads[i], f.submesh) for i in handed)
            needs.append(max(sum(made) - reused, 0) + self.rooms[f.index].nbytes)
            given.append([i for i in handed if ports[f.index].reads[i] in arguments])
        slots: list[int] = []
        numbers: list[int] = []
        sizes: list[int] = []
        counts: list[int] = []
        freed: list[int] = []
        freed_counts: list[int] = []
        lent: set[int] = set()
        for i, s, slot in plan.inputs:
            v = program.invars[i]
            slots.append(slot)
            numbers.append(self.numbers[v])
            sizes.append(self.bytes(self.numbers[v], s))
            if s == program.home[v]:
                lent.add(slot)
        places = [s for _, s, _ in plan.inputs]
        arriving: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
        for k, ins in enumerate(plan.instructions):
            # Nothing here is done slot by slot in Python: a large plan has millions.
            count = len(slots)
            if isinstance(ins, Run):
                index = ins.fragment
                self.extra[k] = needs[index]
                slots += ins.outputs
                numbers += ports[index].makes
                sizes += makes[index]
                lent.difference_update([ins.inputs[i] for i in given[index]])
            elif isinstance(ins, Receive):
                key = ins.source, ins.submesh, ins.variables
                if key not in arriving:
                    arriving[key] = [self._arriving(n, ins.source, ins.submesh) for n in ins.variables]
                slots += ins.outputs
                numbers += ins.variables
                sizes += arriving[key]
            counts.append(len(slots) - count)
            freed += ins.free
            freed_counts.append(len(ins.free))
        order = np.arange(self.end)
        filled_at = np.concatenate([self._arrivals(), np.repeat(order, counts)])
        on = np.concatenate([np.asarray(places, np.int64), np.repeat(self.submesh, counts)])
        found = [np.full(plan.num_slots, start, np.int64) for start in (0, 0, 0, self.end, self.end)]
        filled = (np.asarray(sizes, np.int64), np.asarray(numbers, np.int64), on, filled_at)
        where = np.asarray(slots, np.int64)
        for of_slot, values in zip(found[:4], filled, strict=True):
            of_slot[where] = values
        found[4][np.asarray(freed, np.int64)] = np.repeat(order, freed_counts)
        found[4][np.asarray(sorted(lent), np.int64)] = self.end
        size, number, at, fill, free = found
        return size, number, at, fill, free

    def _arrivals(self) -> Numbers:
        """For each place where an input arrives the instruction after which it is there; -1 for the beginning."""
        found = np.full(len(self.plan.inputs), -1)
        wanted = {slot: k for k, (i, _, slot) in enumerate(self.plan.inputs) if i in self.late}
        before: dict[int, int] = {}  # submesh -> its last instruction so far
        for k, ins in enumerate(self.plan.instructions if wanted else ()):
            for slot in wanted.keys() & set(() if isinstance(ins, Receive) else ins.inputs):
                found[wanted.pop(slot)] = before.get(ins.submesh, -1)
            before[ins.submesh] = k
        return found

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
        size, fill, free, kind = (x[slots] for x in (self.size, self.fill, self.free, self.kind))
        live = np.zeros((len(order) + 1, len(KINDS)), np.int64)  # row k: before the k-th instruction here
        filled = fill < self.end
        np.add.at(live, (np.searchsorted(order, fill[filled]) + (fill[filled] >= 0), kind[filled]), size[filled])
        gone = free < self.end
        np.subtract.at(live, (np.searchsorted(order, free[gone]) + 1, kind[gone]), size[gone])
        live = np.cumsum(live, axis=0)
        total = live.sum(axis=1)
        running = np.append(total[:-1] + self.extra[order], total[-1])
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
        inside: list[Holding] = []
        results: list[tuple[int, int]] = []  # the number of a variable that is made, and its bytes
        reused: list[int] = []  # slots whose buffers these take over
        if peak < len(order):
            at = int(order[peak])
            ins = self.plan.instructions[at]
            where = "arrival" if not isinstance(ins, Run) else self.program.fragments[ins.fragment].name
            if isinstance(ins, Run):
                where += "" if ins.microbatch is None else f" [{ins.microbatch}]"
                results = [(k, self.bytes(k, ins.submesh)) for k in self.plan.ports[ins.fragment].makes]
                reused = [ins.inputs[i] for i, _ in self.layout.donation.get(ins.fragment, ())]
                for k, size in results:
                    made[KINDS[self.kind_of[k]]] += size
                for slot in reused:
                    made[KINDS[self.kind[slot]]] -= int(self.size[slot])
                inside = [Holding(name, "temporary", n, size) for name, n, size in self.rooms[ins.fragment].largest]
        if (rest := most - sum(made.values())) > 0:
            made["temporary"] = rest
        while sum(line.nbytes for line in inside) > max(rest, 0):  # XLA needs less than that
            inside.pop()
        alive = np.setdiff1d(slots[(self.fill[slots] < at) & (self.free[slots] >= at)], reused)
        held: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        counts = np.bincount(self.number[alive], minlength=len(self.variables))
        sizes = np.bincount(self.number[alive], weights=self.size[alive], minlength=len(self.variables))
        for number, size in results:
            counts[number] += 1
            sizes[number] += size
        for number, count in ((k, int(counts[k])) for k in np.flatnonzero(counts).tolist()):
            line = held[self.layout.names.get(self.variables[number], ""), KINDS[self.kind_of[number]]]
            line[0] += count
            line[1] += int(sizes[number])
        lines = [Holding(name, kind, count, nbytes) for (name, kind), (count, nbytes) in held.items() if nbytes]
        largest = sorted(lines + inside, key=lambda line: -line.nbytes)[:6]
        return where, {k: n for k, n in made.items() if n > 0}, tuple(largest)

    def _timeline(self, order: Numbers, live: Numbers, running: Numbers) -> tuple[Moment, ...]:
        activations = live[:, KINDS.index("activations")]
        moments = []
        for part in np.array_split(np.arange(len(order)), min(MOMENTS, max(len(order), 1))):
            if len(part):
                worst = int(part[np.argmax(running[part])])
                moments.append(Moment(int(order[worst]), int(running[worst]), int(activations[part].max())))
        return tuple(moments)
