"""ZB-V: zero bubble with the memory of 1F1B, two stages a submesh in a V.

The dataflow goes down all submeshes and back up, so the first submesh computes the loss
and its backward can begin at once. With ``F = B = W`` and ``2p - 1`` microbatches or more,
no submesh waits between its first and its last action, and each keeps at most ``2p``
activations of one stage, as much as ``p`` activations of a whole submesh.

The published order needs more microbatches than submeshes to pay. With as many or fewer,
memory is no limit, and list scheduling with ``F = B = W`` gives a shorter step.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, arXiv:2405.15362;
the order is that of Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ._greedy import Load, greedy
from ._placements import require_v, v_placement
from ._row import Row
from ._types import AbstractSchedule, Action, Order
from ._validate import validate


@dataclass(frozen=True)
class ZBV(AbstractSchedule):
    """Split backward on a V of two stages a submesh, any number of microbatches.

    Example:
      >>> print(ZBV().order((0, 1, 1, 0), 2))
      submesh 0: F0@0 F0@1 F3@0 B3@0 F3@1 B3@1 B0@0 W3@0 B0@1 W3@1 W0@0 W0@1
      submesh 1: F1@0 F2@0 F1@1 F2@1 B2@0 B1@0 B2@1 B1@1 W2@0 W2@1 W1@0 W1@1
    """

    name: ClassVar[str] = "zbv"
    splits_backward: ClassVar[bool] = True

    def default_placement(self, num_stages: int) -> tuple[int, ...]:
        """See `AbstractSchedule.default_placement`: down all submeshes and back up."""
        return v_placement(self.name, num_stages)

    def order(self, placement: Sequence[int], num_microbatches: int, *, backward: bool = True) -> Order:
        """See `AbstractSchedule.order`."""
        placement = validate(self.name, placement, num_microbatches)
        submeshes = require_v(self.name, placement)
        if backward and num_microbatches <= len(submeshes):
            return _few(placement, num_microbatches)
        rows: list[tuple[Action, ...]] = [()] * (max(placement) + 1)
        for rank, submesh in enumerate(submeshes):
            rows[submesh] = _row(rank, len(submeshes), num_microbatches, backward=backward)
        return Order(placement, num_microbatches, tuple(rows), backward, backward)


def _few(placement: tuple[int, ...], num_microbatches: int) -> Order:
    units: list[float] = [1.0] * len(placement)
    load = Load({"F": units, "B": units, "W": units}, transfer=[0.0] * len(placement), activation=units)
    return greedy(placement, num_microbatches, load, memory=[2.0 * num_microbatches] * (max(placement) + 1))


def _row(rank: int, ranks: int, num_microbatches: int, *, backward: bool) -> tuple[Action, ...]:
    padded = max(num_microbatches, 2 * ranks - 1)
    row = Row(num_microbatches, padded, backward=backward)
    down, up = rank, 2 * ranks - 1 - rank  # the submesh's stage on each arm of the V
    # Warm-up: fill the down arm, then alternate arms until the first gradient is due.
    for _ in range(2 * (ranks - rank) - 1):
        row.add("F", down)
    for _ in range(rank):
        row.add("F", up)
        row.add("F", down)
    for _ in range(ranks - rank):
        _pass(row, up)
    # Steady state: one microbatch in and one out on each arm.
    for _ in range(padded - ranks):
        if row.count["F", down] < padded:
            row.add("F", down)
        row.add("B", down)
        row.add("W", down)
        _pass(row, up)
    # Cool-down: input gradients first, for they feed others; weight gradients fill the waits.
    for _ in range(rank):
        row.add("B", down)
        row.add("B", up)
    for _ in range(ranks - rank):
        row.add("B", down)
        row.add("W", down)
    for stage in (up, down):
        while row.count["W", stage] < padded:
            row.add("W", stage)
    return row.done()


def _pass(row: Row, stage: int) -> None:
    row.add("F", stage)
    row.add("B", stage)
    row.add("W", stage)
