"""DualPipeV: a V of two stages a submesh, forward of one arm beside backward of the other.

In the steady state each submesh runs a forward of one arm and a backward of the other side
by side, so that the transfers of one hide behind the computation of the other. Backwards
are whole there, and split only where the weight gradient fills a wait: at the start, and
in the cool-down. Written for ``2p`` microbatches or more on ``p`` submeshes; each keeps at most
``2p + 1`` activations of one stage.

DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.2.1, cut in half to
a V by Qi et al., "DualPipe could be better without the Dual", 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ._placements import require_v, v_placement
from ._row import Row
from ._types import AbstractSchedule, Action, Order
from ._validate import validate


@dataclass(frozen=True)
class DualPipeV(AbstractSchedule):
    """Forward and backward of the two arms in turn, any number of microbatches.

    A whole backward appears as ``B`` with its ``W`` directly behind it, so this schedule
    cuts the backward like the zero-bubble ones and agrees with them to the last bit.

    Example:
      >>> print(DualPipeV().order((0, 1, 1, 0), 2))
      submesh 0: F0@0 F0@1 F3@0 B3@0 W3@0 F3@1 B3@1 W3@1 B0@0 W0@0 B0@1 W0@1
      submesh 1: F1@0 F2@0 F1@1 F2@1 B2@0 W2@0 B1@0 W1@0 B2@1 W2@1 B1@1 W1@1
    """

    name: ClassVar[str] = "dualpipev"
    splits_backward: ClassVar[bool] = True

    def default_placement(self, num_stages: int) -> tuple[int, ...]:
        """See `AbstractSchedule.default_placement`: down all submeshes and back up."""
        return v_placement(self.name, num_stages)

    def order(self, placement: Sequence[int], num_microbatches: int, *, backward: bool = True) -> Order:
        """See `AbstractSchedule.order`."""
        placement = validate(self.name, placement, num_microbatches)
        submeshes = require_v(self.name, placement)
        rows: list[tuple[Action, ...]] = [()] * (max(placement) + 1)
        for rank, submesh in enumerate(submeshes):
            rows[submesh] = _row(rank, len(submeshes), num_microbatches, backward=backward)
        return Order(placement, num_microbatches, tuple(rows), backward, backward)


def _row(rank: int, ranks: int, num_microbatches: int, *, backward: bool) -> tuple[Action, ...]:
    padded = max(num_microbatches, 2 * ranks)
    row = Row(num_microbatches, padded, backward=backward)
    down, up = rank, 2 * ranks - 1 - rank  # the submesh's stage on each arm of the V
    later = ranks - rank - 1  # submeshes nearer the tip of the V
    for _ in range(2 * later):
        row.add("F", down)
    for _ in range(rank + 1):
        row.add("F", down)
        row.add("F", up)
    for _ in range(later):  # the weight gradient fills the wait for the next forward
        row.add("B", up)
        row.add("W", up)
        row.add("F", up)
    for _ in range(padded - 2 * ranks + rank + 1):  # steady state
        row.add("F", down)
        _whole_backward(row, up)
        row.add("F", up)
        _whole_backward(row, down)
    for _ in range(later):
        _whole_backward(row, up)
        row.add("F", up)
        _whole_backward(row, down)
    held: list[int] = []  # stages of the weight gradients kept back
    for step in range(rank + 1):
        for arm, stage in enumerate((up, down)):
            row.add("B", stage)
            if 2 * step + arm < rank + 1:
                row.add("W", stage)
            else:
                held.append(stage)
    for _ in range(later):
        row.add("W", held.pop(0))
        row.add("B", down)
        held.append(down)
    for stage in held:
        row.add("W", stage)
    return row.done()


def _whole_backward(row: Row, stage: int) -> None:
    row.add("B", stage)
    row.add("W", stage)
