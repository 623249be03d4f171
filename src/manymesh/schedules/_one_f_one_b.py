"""1F1B: after a short warm-up, one forward and one backward in turn.

The bubble of GPipe, ``(p - 1) (F + B)`` for ``p`` stages of equal time, with at most
``p - s`` activations kept on stage ``s`` however many microbatches there are.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush),
ICML 2021, arXiv:2006.09503.
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
class OneFOneB(AbstractSchedule):
    """One forward, one backward, after a warm-up of one forward per later submesh.

    For any placement and any number of microbatches; stages that share a submesh keep
    their own 1F1B orders and take turns.

    Example:
      >>> print(OneFOneB().order((0, 1), 3))
      submesh 0: F0@0 F0@1 B0@0 F0@2 B0@1 B0@2
      submesh 1: F1@0 B1@0 F1@1 B1@1 F1@2 B1@2
    """

    name: ClassVar[str] = "1f1b"

    def order(self, placement: Sequence[int], num_microbatches: int, *, backward: bool = True) -> Order:
        """See `AbstractSchedule.order`."""
        placement = validate(self.name, placement, num_microbatches)
        stages = [
            one_forward_one_backward(stage, num_microbatches, warmup=hops)
            if backward
            else forwards(stage, num_microbatches)
            for stage, hops in enumerate(hops_after(placement))
        ]
        return merge(placement, stages, splits_backward=False, backward=backward)
