"""One order of all actions, for a single thread that dispatches to every submesh."""

from __future__ import annotations

from ._check import check_progress
from ._types import Action, Order
from ._validate import require_order


def issue_order(order: Order) -> tuple[Action, ...]:
    """Interleave the rows so that one thread feeds all submeshes early.

    Every row keeps its order and every action follows its producers. Submeshes take turns,
    so a thread that issues in this order and may run only so far ahead of the devices
    never fills the queue of one submesh while another has nothing to do.

    Args:
      order: an order that `check` accepts.

    Returns:
      All actions of the order.

    Raises:
      ScheduleError: the rows deadlock; the message names the circle.

    Example:
      >>> from manymesh.schedules import OneFOneB
      >>> print(*issue_order(OneFOneB().order((0, 1), 2)))
      F0@0 F1@0 F0@1 B1@0 B0@0 F1@1 B1@1 B0@1
    """
    require_order("issue_order", order)
    return check_progress(order)
