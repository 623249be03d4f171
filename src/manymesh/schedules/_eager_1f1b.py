"""Eager 1F1B: 1F1B with a warm-up twice as deep, to hide transfers.

With one more forward in flight per hop, a value that is on its way to the next submesh
does not keep that submesh waiting. The bubble is that of 1F1B when transfers are free;
stage ``s`` of ``p`` keeps at most ``2 (p - s) - 1`` activations.

Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023,
arXiv:2211.05322.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ._merge import merge
from ._stages import forwards, hops_after, one_forward_one_backward
from ._types import AbstractSchedule, Order
from ._validate import validate


@dataclass(frozen=True)
class Eager1F1B(AbstractSchedule):
    """One forward, one backward, after a warm-up of two forwards per later submesh.

    For any placement and any number of microbatches.

    Example:
      >>> print(Eager1F1B().order((0, 1), 4))
      submesh 0: F0@0 F0@1 F0@2 B0@0 F0@3 B0@1 B0@2 B0@3
      submesh 1: F1@0 B1@0 F1@1 B1@1 F1@2 B1@2 F1@3 B1@3
    """

    name: ClassVar[str] = "eager-1f1b"

    def order(self, placement: Sequence[int], num_microbatches: int, *, backward: bool = True) -> Order:
        """See `AbstractSchedule.order`."""
        placement = validate(self.name, placement, num_microbatches)
        stages = [
            one_forward_one_backward(stage, num_microbatches, warmup=2 * hops)
            if backward
            else forwards(stage, num_microbatches)
            for stage, hops in enumerate(hops_after(placement))
        ]
        return merge(placement, stages, splits_backward=False, backward=backward)
