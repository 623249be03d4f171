"""ZB-H1: 1F1B with the weight gradients kept back to fill the wait at the end.

Only the input gradient is needed by the stage before; the weight gradient can run at any
later time. Stage ``s`` keeps ``s`` of them back, which is as much as it would otherwise
wait at the end. The bubble shrinks to ``(p - 1) (F + B - W)``, from ``(p - 1) (F + B + W)``
(``B`` being the input gradient alone), and no stage keeps more than the ``p`` activations
of 1F1B's first stage.

With ``m < p`` microbatches that bubble is out of reach: the last stage waits for ``p - 1`` forwards,
runs ``m`` of each, and the last gradient goes back over ``p - 1`` stages and becomes a weight gradient
there. That makes ``(m + p - 1) (F + B) + W`` for any schedule, and this one takes no longer.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ._merge import merge
from ._stages import forwards, hops_after, hops_before, one_forward_one_backward
from ._types import AbstractSchedule, Order
from ._validate import validate


@dataclass(frozen=True)
class ZeroBubbleH1(AbstractSchedule):
    """1F1B with a split backward, one weight gradient kept back per earlier submesh.

    For any placement and any number of microbatches.

    Example:
      >>> print(ZeroBubbleH1().order((0, 1), 3))
      submesh 0: F0@0 F0@1 B0@0 W0@0 F0@2 B0@1 W0@1 B0@2 W0@2
      submesh 1: F1@0 B1@0 F1@1 B1@1 W1@0 F1@2 B1@2 W1@1 W1@2
    """

    name: ClassVar[str] = "zero-bubble-h1"
    splits_backward: ClassVar[bool] = True

    def order(self, placement: Sequence[int], num_microbatches: int, *, backward: bool = True) -> Order:
        """See `AbstractSchedule.order`."""
        placement = validate(self.name, placement, num_microbatches)
        hops = zip(hops_before(placement), hops_after(placement), strict=True)
        stages = [
            one_forward_one_backward(stage, num_microbatches, warmup=after, hold=before)
            if backward
            else forwards(stage, num_microbatches)
            for stage, (before, after) in enumerate(hops)
        ]
        return merge(placement, stages, splits_backward=True, backward=backward)
