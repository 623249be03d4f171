"""Wavefront: everything along the diagonals of the loop nest (microbatch, stage).

Give each action the step at which it would run if each took one step and nothing had to
share a submesh: ``F(s, m)`` at ``s + m`` and ``B(s, m)``, on its way back through ``S``
stages, at ``2S - 1 - s + m``. Each submesh runs its actions by that step. A result is
always one step older than what reads it, so the order is legal on any placement; it is
the systolic order that loop skewing gives.

On a chain of one stage a submesh the training order equals Eager 1F1B; it differs where
stages share a submesh, and it is the natural order of a forward-only program.

Lamport, "The parallel execution of DO loops", Communications of the ACM 17(2), 1974.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ._types import AbstractSchedule, Action, Order
from ._validate import validate


@dataclass(frozen=True)
class Wavefront(AbstractSchedule):
    """Actions by the diagonal that they are on, backward before forward on the same one.

    For any placement and any number of microbatches.

    Example:
      >>> print(Wavefront().order((0, 1, 0, 1), 2, backward=False))
      submesh 0: F0@0 F0@1 F2@0 F2@1
      submesh 1: F1@0 F1@1 F3@0 F3@1
    """

    name: ClassVar[str] = "wavefront"

    def order(self, placement: Sequence[int], num_microbatches: int, *, backward: bool = True) -> Order:
        """See `AbstractSchedule.order`."""
        placement = validate(self.name, placement, num_microbatches)
        num_stages = len(placement)
        local: list[list[int]] = [[] for _ in range(max(placement) + 1)]
        for stage, submesh in enumerate(placement):
            local[submesh].append(stage)

        def row(stages: list[int]) -> tuple[Action, ...]:
            steps = [(s + m, Action("F", s, m)) for s in stages for m in range(num_microbatches)]
            if backward:
                steps += [
                    (2 * num_stages - 1 - s + m, Action("B", s, m)) for s in stages for m in range(num_microbatches)
                ]
            # On one diagonal, older microbatches are at later stages forward and earlier ones backward.
            return tuple(a for _, a in sorted(steps, key=lambda step: (step[0], step[1].kind, step[1].microbatch)))

        return Order(placement, num_microbatches, tuple(map(row, local)), splits_backward=False, backward=backward)
