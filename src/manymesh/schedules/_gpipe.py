"""GPipe: all forwards, then all backwards.

Bubble ``(p - 1) (F + B)`` for ``p`` stages of equal time; every stage keeps all
microbatches' activations.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", NeurIPS 2019, arXiv:1811.06965.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ._merge import merge
from ._stages import forwards, one_forward_one_backward
from ._types import AbstractSchedule, Order
from ._validate import validate


@dataclass(frozen=True)
class GPipe(AbstractSchedule):
    """All forwards of a stage, then all its backwards, microbatches in order in both.

    For any placement and any number of microbatches.

    Example:
      >>> print(GPipe().order((0, 1), 3))
      submesh 0: F0@0 F0@1 F0@2 B0@0 B0@1 B0@2
      submesh 1: F1@0 F1@1 F1@2 B1@0 B1@1 B1@2
    """

    name: ClassVar[str] = "gpipe"

    def order(self, placement: Sequence[int], num_microbatches: int, *, backward: bool = True) -> Order:
        """See `AbstractSchedule.order`."""
        placement = validate(self.name, placement, num_microbatches)
        stages = [
            one_forward_one_backward(stage, num_microbatches, warmup=num_microbatches)
            if backward
            else forwards(stage, num_microbatches)
            for stage in range(len(placement))
        ]
        return merge(placement, stages, splits_backward=False, backward=backward)
