"""List scheduling with known times under a memory cap.

Published orders assume equal stages. When the times are known and unequal, running on each
submesh the most useful thing that is ready gives an order that fits them. Useful is, in
this order: a backward, because it frees memory and others wait for it; a forward, while
memory lasts; a weight gradient, which nobody waits for. Later stages go before earlier
ones, so that what has entered the pipeline leaves it.

The memory cap cannot deadlock it. A forward may start only if one more microbatch could
still pass all later stages of the same submesh (`_reserves`); so the oldest microbatch that
has not reached the loss can always go on, and backwards need no memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from .._errors import ScheduleError
from ._types import Action, Kind, Order


@dataclass(frozen=True)
class Load:
    """What each stage of a program takes for one microbatch.

    Attributes:
      durations: kind -> ``float[stage]``; with ``W`` where the backward is to be split.
      transfer: ``float[stage - 1]``, from a stage to the next where they are on different submeshes.
      activation: ``float[stage]``, memory from ``F`` to the end of ``B``, or of ``W`` if split.
    """

    durations: dict[Kind, list[float]]
    transfer: Sequence[float]
    activation: Sequence[float]


def greedy(placement: tuple[int, ...], num_microbatches: int, load: Load, memory: Sequence[float]) -> Order:
    """An order in which each submesh runs the most useful action that is ready.

    Args:
      placement: ``int[stage]``, the submesh of each stage.
      num_microbatches: the number of microbatches.
      load: times and memory of each stage.
      memory: ``float[submesh]``, what activations may take, in the unit of `load.activation`.

    Returns:
      A legal order that never keeps more than `memory`.

    Raises:
      ScheduleError: a submesh has no room for one microbatch of all its stages.
    """
    for submesh in dict.fromkeys(placement):
        least = sum(a for a, home in zip(load.activation, placement, strict=True) if home == submesh)
        if least > memory[submesh] * (1 + 1e-12):
            raise ScheduleError(
                f"submesh {submesh} needs {least:g} for one microbatch's activations, but may use {memory[submesh]:g}; "
                "use more microbatches or more memory."
            )
    rows = _Greedy(placement, num_microbatches, load, memory).run()
    splits = "W" in load.durations
    return Order(placement, num_microbatches, tuple(map(tuple, rows)), splits, True)


def _reserves(placement: tuple[int, ...], activation: Sequence[float]) -> list[float]:
    """What one microbatch takes from each stage on, on that stage's submesh."""
    kept: dict[int, float] = {}
    reserves = [0.0] * len(placement)
    for stage in reversed(range(len(placement))):
        kept[placement[stage]] = kept.get(placement[stage], 0.0) + activation[stage]
        reserves[stage] = kept[placement[stage]]
    return reserves


class _Greedy:
    def __init__(self, placement: tuple[int, ...], num_microbatches: int, load: Load, memory: Sequence[float]):
        self.placement = placement
        self.load = load
        self.splits = "W" in load.durations
        stages = len(placement)
        # Sums of floats differ in the last bits by their order; a cap that fits exactly must not refuse.
        self.memory = [m * (1 + 1e-9) for m in memory]
        self.reserves = _reserves(placement, load.activation)
        submeshes = max(placement) + 1
        self.local: list[list[int]] = [[] for _ in range(submeshes)]  # latest stage first
        for stage in reversed(range(stages)):
            self.local[placement[stage]].append(stage)
        # When the inputs of each microbatch's action arrive, per stage, in microbatch order.
        self.arrivals: dict[Kind, list[list[float]]] = {k: [[] for _ in range(stages)] for k in ("F", "B", "W")}
        self.arrivals["F"][0] = [0.0] * num_microbatches
        self.count: dict[Kind, list[int]] = {kind: [0] * stages for kind in ("F", "B", "W")}
        self.kept = [0.0] * submeshes
        self.running: list[Action | None] = [None] * submeshes
        self.rows: list[list[Action]] = [[] for _ in range(submeshes)]
        self.events: list[tuple[float, int, bool]] = []  # (time, submesh, whether its action ends)

    def run(self) -> list[list[Action]]:
        self.events = [(0.0, submesh, False) for submesh in range(len(self.rows))]
        while self.events:
            now = self.events[0][0]
            woken = set()
            # All that happens at one time is known before anything is chosen at that time.
            while self.events and self.events[0][0] == now:
                _, submesh, ends = heapq.heappop(self.events)
                if ends:
                    self._finish(submesh, now)
                woken.add(submesh)
            for submesh in sorted(woken):
                self._start(submesh, now)
        return self.rows

    def _start(self, submesh: int, now: float) -> None:
        if self.running[submesh] is not None:
            return
        action = self._choose(submesh, now)
        if action is None:
            return
        self.rows[submesh].append(action)
        self.running[submesh] = action
        self.count[action.kind][action.stage] += 1
        if action.kind == "F":
            self.kept[submesh] += self.load.activation[action.stage]
        heapq.heappush(self.events, (now + self.load.durations[action.kind][action.stage], submesh, True))

    def _choose(self, submesh: int, now: float) -> Action | None:
        kinds: tuple[Kind, ...] = ("B", "F", "W")
        for kind in kinds:
            for stage in self.local[submesh]:
                microbatch = self.count[kind][stage]
                arrived = self.arrivals[kind][stage]
                if microbatch >= len(arrived) or arrived[microbatch] > now:
                    continue
                if kind == "F" and self.kept[submesh] + self.reserves[stage] > self.memory[submesh]:
                    continue
                return Action(kind, stage, microbatch)
        return None

    def _finish(self, submesh: int, now: float) -> None:
        action = self.running[submesh]
        assert action is not None, "an action ends that never started"
        self.running[submesh] = None
        kind, stage = action.kind, action.stage
        if kind == ("W" if self.splits else "B"):
            self.kept[submesh] -= self.load.activation[stage]
        if kind == "B" and self.splits:
            self.arrivals["W"][stage].append(now)
        if kind == "F" and stage + 1 == len(self.placement):
            self.arrivals["B"][stage].append(now)
        elif kind == "F":
            self._send("F", stage, stage + 1, now)
        elif kind == "B" and stage:
            self._send("B", stage, stage - 1, now)

    def _send(self, kind: Kind, source: int, target: int, now: float) -> None:
        home = self.placement[target]
        if home != self.placement[source]:
            now += self.load.transfer[min(source, target)]
        self.arrivals[kind][target].append(now)
        heapq.heappush(self.events, (now, home, False))
