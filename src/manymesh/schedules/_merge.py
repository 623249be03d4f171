"""Several stages on one submesh: merge the orders of the stages into one row a submesh.

A published schedule says what *one stage* runs in which order, and assumes a submesh for
each stage. When stages share a submesh, each keeps its own order, and the submesh takes
whichever stage could go first on a simulated clock. The result cannot deadlock when the
stages' orders could not: at every moment some stage is ready, and time passes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ._types import Action, Order

# Ties on one submesh: a backward frees an activation and feeds the stages before it, a
# forward feeds the stages after it, a weight gradient feeds nobody. Later stages first, so
# that what has entered the pipeline leaves it.
_URGENCY = {"B": 0, "F": 1, "W": 2}


def merge(
    placement: tuple[int, ...], stages: Sequence[Sequence[Action]], *, splits_backward: bool, backward: bool
) -> Order:
    """One row a submesh, in which every stage keeps its own order.

    Args:
      placement: ``int[stage]``, the submesh of each stage.
      stages: ``Action[stage][position]``, the order of each stage; together they must be
        free of deadlock on one submesh a stage.
      splits_backward: whether the stages hold ``W`` actions.
      backward: whether they hold ``B`` actions.

    Returns:
      The order; for one stage a submesh its rows are the stages' orders unchanged.
    """
    num_microbatches = sum(action.kind == "F" for action in stages[0])
    if len(set(placement)) == len(placement):
        rows: list[Sequence[Action]] = [()] * (max(placement) + 1)
        for stage, submesh in enumerate(placement):
            rows[submesh] = stages[stage]
    else:
        rows = list(_Clock(placement, stages, splits_backward).run())
    return Order(placement, num_microbatches, tuple(map(tuple, rows)), splits_backward and backward, backward)


class _Clock:
    """List scheduling on an integer clock: a forward takes 1, a backward 2 or, when split, 1 and 1."""

    def __init__(self, placement: tuple[int, ...], stages: Sequence[Sequence[Action]], splits_backward: bool):
        self.placement = placement
        self.stages = stages
        self.duration = {"F": 1, "B": 1 if splits_backward else 2, "W": 1}
        self.position = [0] * len(stages)  # of each stage in its own order
        self.finished = {"F": [0] * len(stages), "B": [0] * len(stages), "W": [0] * len(stages)}
        self.queued = [False] * len(stages)
        submeshes = max(placement) + 1
        # One heap of (urgency, -stage, stage) a submesh.
        self.ready: list[list[tuple[int, int, int]]] = [[] for _ in range(submeshes)]
        self.busy = [False] * submeshes
        self.running: list[tuple[int, int]] = []  # heap of (end, stage)
        self.rows: list[list[Action]] = [[] for _ in range(submeshes)]

    def run(self) -> list[list[Action]]:
        now = 0
        for stage in range(len(self.stages)):
            self._queue(stage)
        touched = set(self.placement)
        while touched:
            for submesh in touched:
                self._start(submesh, now)
            touched = set()
            if self.running:
                now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                touched |= self._finish(heapq.heappop(self.running)[1])
        assert all(p == len(s) for p, s in zip(self.position, self.stages, strict=True)), "the stages' orders deadlock"
        return self.rows

    def _queue(self, stage: int) -> None:
        """Put a stage among those that its submesh may run, if its next action can run."""
        if stage in (-1, len(self.stages)) or self.queued[stage] or self.position[stage] == len(self.stages[stage]):
            return
        action = self.stages[stage][self.position[stage]]
        if action.kind == "F" and stage > 0 and self.finished["F"][stage - 1] <= action.microbatch:
            return
        if action.kind == "B" and stage + 1 < len(self.stages) and self.finished["B"][stage + 1] <= action.microbatch:
            return
        self.queued[stage] = True
        heapq.heappush(self.ready[self.placement[stage]], (_URGENCY[action.kind], -stage, stage))

    def _start(self, submesh: int, now: int) -> None:
        if self.busy[submesh] or not self.ready[submesh]:
            return
        _, _, stage = heapq.heappop(self.ready[submesh])
        action = self.stages[stage][self.position[stage]]
        self.rows[submesh].append(action)
        self.busy[submesh] = True
        heapq.heappush(self.running, (now + self.duration[action.kind], stage))

    def _finish(self, stage: int) -> set[int]:
        """Record the end of a stage's action; the submeshes that may now start something."""
        action = self.stages[stage][self.position[stage]]
        self.finished[action.kind][stage] += 1
        self.position[stage] += 1
        self.queued[stage] = False
        submesh = self.placement[stage]
        self.busy[submesh] = False
        neighbour = stage + 1 if action.kind == "F" else stage - 1
        self._queue(stage)
        self._queue(neighbour)
        return {submesh, self.placement[neighbour]} if 0 <= neighbour < len(self.stages) else {submesh}
