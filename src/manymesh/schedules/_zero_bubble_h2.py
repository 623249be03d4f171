"""ZB-H2: ZB-H1 with twice the warm-up and twice the weight gradients kept back.

With ``2p - 1`` microbatches or more and ``F = B = W``, no submesh waits between its first
and its last action: the bubble of ``(p - 1) (F + B - 2W)`` is zero as the paper counts it
(`Simulation.longest_span`; a barrier at the end of the step still costs the skew between
submeshes). Each stage keeps at most ``2p - 1`` activations.

The paper gives the order for ``2p - 1`` microbatches or more. With ``m`` fewer, stage ``s``
keeps back ``s`` weight gradients as in ZB-H1 and one more for each microbatch beyond ``p``:
keeping more back would move work behind the end of the last stage.

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
class ZeroBubbleH2(AbstractSchedule):
    """Eager 1F1B with a split backward, two weight gradients kept back per earlier submesh.

    For any placement and any number of microbatches.

    Example:
      >>> print(ZeroBubbleH2().order((0, 1), 4))
      submesh 0: F0@0 F0@1 F0@2 B0@0 W0@0 F0@3 B0@1 W0@1 B0@2 W0@2 B0@3 W0@3
      submesh 1: F1@0 B1@0 F1@1 B1@1 F1@2 B1@2 W1@0 F1@3 B1@3 W1@1 W1@2 W1@3
    """

    name: ClassVar[str] = "zero-bubble-h2"
    splits_backward: ClassVar[bool] = True

    def order(self, placement: Sequence[int], num_microbatches: int, *, backward: bool = True) -> Order:
        """See `AbstractSchedule.order`."""
        placement = validate(self.name, placement, num_microbatches)
        hops = list(zip(hops_before(placement), hops_after(placement), strict=True))
        depth = hops[0][1] + 1
        surplus = max(0, num_microbatches - depth)
        stages = [
            one_forward_one_backward(stage, num_microbatches, warmup=2 * after, hold=before + min(before, surplus))
            if backward
            else forwards(stage, num_microbatches)
            for stage, (before, after) in enumerate(hops)
        ]
        return merge(placement, stages, splits_backward=True, backward=backward)
