"""Runs a plan on a clock: each device does its instructions in their order, and each link its transfers.

So it is right for any schedule: what a schedule means is in the order of the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._plan._instructions import Instruction, Plan, Receive, Run, Send
from .._plan._number import arguments_elsewhere
from .._program import Program
from .._task import mesh_devices

Crossing = tuple[int, int, tuple[int, ...]]  # source, target, numbers of the variables


@dataclass(frozen=True)
class Durations:
    """What each thing takes, in seconds.

    Attributes:
      runs: one run of each fragment, alone on the machine, once it is issued.
      transfers: each batch of values between two submeshes, once it is issued.
      issues: what the thread that issues all instructions needs for one run of each fragment; nothing where it is empty.
      transfer_issues: the same for batches of values.
      cores: where all devices share the cores of one computer, how many there are; None where each has its own.
      demand: how many of these each fragment uses while it is alone.
      arguments: each argument that goes on from its home to another submesh, by its place among the inputs of the plan.
    """

    runs: Sequence[float]
    transfers: Mapping[Crossing, float] = field(default_factory=dict)
    issues: Sequence[float] = ()
    transfer_issues: Mapping[Crossing, float] = field(default_factory=dict)
    cores: float | None = None
    demand: Sequence[float] = ()
    arguments: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Course:
    """A call on the clock.

    Attributes:
      seconds: from the start of the call to the end of the last instruction.
      busy: for each submesh, seconds in which its fragments run, or are launched while it waits for nothing else.
      bubble_fraction: the part of the time of all submeshes that run something in which they wait.
      loop_bubbles: the same for each loop, from its first fragment's start to its last one's end.
      starts, ends: of each instruction of the plan; a `Send` ends when the values have arrived.
      arguments: when each of those that go on from their home arrives at another submesh: (start, end) by its place among
        the inputs of the plan.
    """

    seconds: float
    busy: tuple[float, ...]
    bubble_fraction: float
    loop_bubbles: tuple[float, ...]
    starts: Sequence[float] = field(repr=False)
    ends: Sequence[float] = field(repr=False)
    arguments: Mapping[int, tuple[float, float]] = field(repr=False, default_factory=dict)


def run_clock(program: Program, plan: Plan, durations: Durations) -> Course:
    """Runs a plan on a clock.

    Args:
      program, plan: the step.
      durations: what everything takes.
    """
    queues = _queues(program)
    issued = _issued(plan, durations)
    arguments = _arguments(program, plan, durations)
    if durations.cores is None:
        starts, ends = _each_alone(plan, durations, queues, issued, arguments)
    else:
        starts, ends = _Sharing(plan, durations, queues, issued, durations.cores, arguments).run()
    if any(issued):
        starts = _with_launches(plan, queues, [0.0, *issued], starts, ends, arguments)
    return _course(program, plan, starts, ends, {a.place: (a.start, a.end) for a in arguments})


class _Argument(NamedTuple):
    """An argument on its way from its home to another submesh."""

    place: int
    link: tuple[int, int]
    slot: int
    start: float
    end: float


def _arguments(program: Program, plan: Plan, durations: Durations) -> list[_Argument]:
    """What a call does first: it sends arguments on, those of one link one after the other."""
    links: dict[tuple[int, int], float] = defaultdict(float)
    found = []
    for place, _, *link in arguments_elsewhere(program, plan) if durations.arguments else ():
        if place in durations.arguments:
            source, target = link
            start = links[source, target]
            links[source, target] = end = start + durations.arguments[place]
            found.append(_Argument(place, (source, target), plan.inputs[place][2], start, end))
    return found


def _issued(plan: Plan, durations: Durations) -> list[float]:
    """When each instruction has been issued: one after the other, by one thread."""
    if not durations.issues and not durations.transfer_issues:
        return [0.0] * len(plan.instructions)
    issued, now = [], 0.0
    for ins in plan.instructions:
        if isinstance(ins, Run):
            now += durations.issues[ins.fragment] if durations.issues else 0.0
        elif isinstance(ins, Send):
            now += durations.transfer_issues.get((ins.submesh, ins.target, ins.variables), 0.0)
        issued.append(now)
    return issued


def _with_launches(
    plan: Plan,
    queues: Sequence[Sequence[int]],
    begun: Sequence[float],
    starts: Sequence[float],
    ends: Sequence[float],
    arguments: Sequence[_Argument],
) -> list[float]:
    """When each instruction starts, its launch counted where nothing else is waited for: as a recording has it.

    Args:
      plan: the step.
      queues: for each submesh the groups of devices that it is on.
      begun: when each instruction begins to be issued.
      starts, ends: when each is at work.
      arguments: those that go on from their home.
    """
    free: dict[int, float] = defaultdict(float)
    links: dict[tuple[int, int], float] = defaultdict(float, {a.link: a.end for a in arguments})
    made: dict[tuple[int, int | None], float] = {}
    arrived: dict[int, float] = {a.slot: a.end for a in arguments}
    found = list(starts)
    for k, ins in enumerate(plan.instructions):
        if isinstance(ins, Receive):
            arrived.update(dict.fromkeys(ins.outputs, ends[k]))
            continue
        if isinstance(ins, Run):
            groups = queues[ins.submesh]
            ready = [*(free[g] for g in groups), *(arrived[slot] for slot in ins.inputs if slot in arrived)]
            free.update(dict.fromkeys(groups, ends[k]))
            made[ins.fragment, ins.microbatch] = ends[k]
        else:
            link = ins.submesh, ins.target
            ready = [links[link], made[ins.tag.maker, ins.tag.microbatch]]
            links[link] = ends[k]
        found[k] = min(starts[k], max(begun[k], *ready))
    return found


def device_groups(program: Program) -> dict[tuple[int, ...], list[Any]]:
    """The devices that are in the same submeshes, by these."""
    places: dict[Any, list[int]] = defaultdict(list)
    for s, mesh in enumerate(program.submeshes):
        for d in mesh_devices(mesh):
            places[d].append(s)
    groups: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for d, at in places.items():
        groups[tuple(at)].append(d)
    return groups


def _queues(program: Program) -> list[list[int]]:
    """For each submesh the groups of devices that it is on."""
    groups = device_groups(program)
    return [[g for g, at in enumerate(groups) if s in at] for s in range(len(program.submeshes))]


def _each_alone(
    plan: Plan,
    durations: Durations,
    queues: Sequence[Sequence[int]],
    issued: Sequence[float],
    arguments: Sequence[_Argument],
) -> tuple[list[float], list[float]]:
    """The clock where every device has cores of its own."""
    free = [0.0] * (1 + max((g for groups in queues for g in groups), default=0))
    links: dict[tuple[int, int], float] = defaultdict(float, {a.link: a.end for a in arguments})
    # What a submesh made itself is there when it goes on; only what arrives has to be waited for.
    made: dict[tuple[int, int | None], float] = {}
    arrivals: dict[object, float] = {}
    arrived: dict[int, float] = {a.slot: a.end for a in arguments}
    keys = arrived.keys()
    starts, ends = [0.0] * len(plan.instructions), [0.0] * len(plan.instructions)
    for k, ins in enumerate(plan.instructions):
        start = issued[k]
        if isinstance(ins, Run):
            groups = queues[ins.submesh]
            start = max(start, *[free[g] for g in groups])
            if not keys.isdisjoint(ins.inputs):
                start = max(start, *[arrived[slot] for slot in ins.inputs if slot in arrived])
            end = start + durations.runs[ins.fragment]
            for g in groups:
                free[g] = end
            made[ins.fragment, ins.microbatch] = end
        elif isinstance(ins, Receive):
            start = end = max(start, arrivals[ins.tag])
            arrived.update(dict.fromkeys(ins.outputs, end))
        else:
            link = ins.submesh, ins.target
            start = max(start, links[link], made[ins.tag.maker, ins.tag.microbatch])
            end = start + durations.transfers.get((*link, ins.variables), 0.0)
            links[link] = arrivals[ins.tag] = end
        starts[k], ends[k] = start, end
    return starts, ends


class _Sharing:
    """The clock where all devices share the cores of one computer: what runs at a time slows each other down."""

    def __init__(
        self,
        plan: Plan,
        durations: Durations,
        queues: Sequence[Sequence[int]],
        issued: Sequence[float],
        cores: float,
        arguments: Sequence[_Argument],
    ) -> None:
        self.plan, self.durations, self.queues = plan, durations, queues
        self.issued, self.cores = issued, cores
        self.now = 0.0
        count = len(plan.instructions)
        self.starts, self.ends = [-1.0] * count, [-1.0] * count
        self.pending = [False] * plan.num_slots  # whether somebody is still to fill it
        for ins in plan.instructions:
            for slot in () if not isinstance(ins, (Run, Receive)) else ins.outputs:
                self.pending[slot] = True
        self.coming = {a.slot: a.end for a in arguments if a.end > 0}  # arguments that are still on their way
        for slot in self.coming:
            self.pending[slot] = True
        self.waiting: dict[tuple[str, object], list[int]] = defaultdict(list)  # queue -> positions, in order
        for k, ins in reversed(list(enumerate(plan.instructions))):
            for queue in self._queues(ins):
                self.waiting[queue].append(k)
        self.running: dict[int, float] = {}  # position of a `Run` -> seconds of work that are left
        self.moving: dict[int, float] = {}  # position of a `Send` -> when it ends

    def _queues(self, ins: Instruction) -> list[tuple[str, object]]:
        if isinstance(ins, Run):
            return [("device", g) for g in self.queues[ins.submesh]]
        if isinstance(ins, Receive):
            return [("arrival", ins.tag)]
        return [("link", (ins.submesh, ins.target))]

    def run(self) -> tuple[list[float], list[float]]:
        left = len(self.plan.instructions)
        arrived: set[object] = set()
        while left:
            started = True
            while started:
                started = False
                for queue in [q for q, positions in self.waiting.items() if positions]:
                    k = self.waiting[queue][-1]
                    ins = self.plan.instructions[k]
                    if self.starts[k] >= 0 or self.issued[k] > self.now:
                        continue
                    if any(self.waiting[q][-1] != k for q in self._queues(ins)):
                        continue
                    if isinstance(ins, Receive):
                        if ins.tag not in arrived:
                            continue
                        self.starts[k] = self.now
                        self._ends(k, ins)
                        left, started = left - 1, True
                    elif not any(self.pending[slot] for slot in ins.inputs):
                        self.starts[k], started = self.now, True
                        if isinstance(ins, Run):
                            self.running[k] = self.durations.runs[ins.fragment]
                        else:
                            took = self.durations.transfers.get((ins.submesh, ins.target, ins.variables), 0.0)
                            self.moving[k] = self.now + took
            left -= self._advance(arrived)
        return self.starts, self.ends

    def _advance(self, arrived: set[object]) -> int:
        """Goes to the next moment at which something ends or is issued; how many ended."""
        demand = {k: self._demand(k) for k in self.running}
        speed = min(1.0, self.cores / max(sum(demand.values()), 1e-9))
        finished = {k: self.now + work / speed for k, work in self.running.items()}
        moments = [*finished.values(), *self.moving.values()]
        heads = [self.issued[positions[-1]] for positions in self.waiting.values() if positions]
        moments += [t for t in heads if t > self.now]
        moments += self.coming.values()
        assert moments, "a plan in which something always can go on"
        following = min(moments)
        done = 0
        for k, end in finished.items():
            self.running[k] -= (following - self.now) * speed
            if end <= following or self.running[k] <= 1e-12:  # late on the clock, what is left may be less than a tick
                del self.running[k]
                done += 1
                self._ends(k, self.plan.instructions[k], following)
        for k, end in list(self.moving.items()):
            if end <= following:
                del self.moving[k]
                done += 1
                ins = self.plan.instructions[k]
                assert not isinstance(ins, Run), "what moves is sent"
                arrived.add(ins.tag)
                self._ends(k, ins, following)
        for slot in [slot for slot, end in self.coming.items() if end <= following]:
            del self.coming[slot]
            self.pending[slot] = False
        self.now = following
        return done

    def _demand(self, k: int) -> float:
        ins = self.plan.instructions[k]
        assert isinstance(ins, Run), "what runs is a fragment"
        return self.durations.demand[ins.fragment] if self.durations.demand else 1.0

    def _ends(self, k: int, ins: Instruction, now: float | None = None) -> None:
        self.ends[k] = self.now if now is None else now
        for queue in self._queues(ins):
            self.waiting[queue].pop()
        for slot in ins.outputs if isinstance(ins, (Run, Receive)) else ():
            self.pending[slot] = False


def _course(
    program: Program,
    plan: Plan,
    starts: Sequence[float],
    ends: Sequence[float],
    arguments: Mapping[int, tuple[float, float]],
) -> Course:
    busy = [0.0] * len(program.submeshes)
    loops: list[dict[int, list[float]]] = [{} for _ in program.loops]  # submesh -> work, first start, last end
    for k, ins in enumerate(plan.instructions):
        if isinstance(ins, Run):
            took = ends[k] - starts[k]
            busy[ins.submesh] += took
            loop = program.fragments[ins.fragment].loop
            if loop is not None:
                line = loops[loop].setdefault(ins.submesh, [0.0, starts[k], ends[k]])
                line[0] += took
                line[1], line[2] = min(line[1], starts[k]), max(line[2], ends[k])
    seconds = max([*ends, *(end for _, end in arguments.values())], default=0.0)
    used = [t for t in busy if t > 0]
    bubbles = []
    for rows in loops:
        span = max((r[2] for r in rows.values()), default=0.0) - min((r[1] for r in rows.values()), default=0.0)
        bubbles.append(_bubble([r[0] for r in rows.values()], span))
    return Course(seconds, tuple(busy), _bubble(used, seconds), tuple(bubbles), starts, ends, arguments)


def _bubble(work: Sequence[float], span: float) -> float:
    return max(0.0, 1 - sum(work) / (len(work) * span)) if work and span > 0 else 0.0
