"""How many activations each submesh keeps at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from .._errors import ScheduleError
from ._types import Order
from ._validate import require_order


def live_activations(order: Order) -> tuple[int, ...]:
    """The largest number of activations that each submesh keeps at any moment.

    An activation is what one stage keeps of one microbatch for its backward pass: from the
    start of ``F`` to the end of ``B``, or to the end of ``W`` where the backward is split.
    A forward-only program keeps none. Because each submesh runs one action at a time, the
    count depends on the order alone and not on how long anything takes.

    Args:
      order: any order.

    Returns:
      ``int[submesh]``, in activations of one stage and one microbatch.
    """
    require_order("live_activations", order)
    return tuple(int(peak) for peak in peak_memory(order, [1.0] * order.num_stages))


def peak_memory(order: Order, activation: Sequence[float]) -> tuple[float, ...]:
    """The largest memory that each submesh keeps in activations at any moment.

    Args:
      order: any order.
      activation: ``float[stage]``, what one activation of a stage takes, in any unit.

    Returns:
      ``float[submesh]``, in the same unit.

    Raises:
      ScheduleError: there is not one activation for each stage.
    """
    require_order("peak_memory", order)
    if not hasattr(activation, "__len__") or len(activation) != order.num_stages:
        raise ScheduleError(
            f"peak_memory: activation has to be {order.num_stages} numbers, one for each stage of the order, found {activation!r:.80}."
        )
    if not order.backward:
        return (0.0,) * order.num_submeshes
    frees = "W" if order.splits_backward else "B"
    peaks = []
    for row in order.rows:
        kept = peak = 0.0
        for action in row:
            if action.kind == "F":
                kept += activation[action.stage]
                peak = max(peak, kept)
            elif action.kind == frees:
                kept -= activation[action.stage]
        peaks.append(peak)
    return tuple(peaks)
