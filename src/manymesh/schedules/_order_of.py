"""The order that a schedule gives, proved where the schedule is the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._errors import ScheduleError
from ._check import check
from ._placements import described
from ._types import AbstractSchedule, Action, Order
from ._validate import rows_of_actions

_OURS = f"{__package__}."


def order_of(
    schedule: AbstractSchedule,
    placement: Sequence[int],
    num_microbatches: int,
    *,
    backward: bool = True,
    labels: Callable[[Action], str] = str,
    accumulates: bool = True,
) -> Order:
    """What `AbstractSchedule.order` gives, once it is an order of the stages and microbatches that were asked for.

    Args:
      schedule, placement, num_microbatches, backward: as in `AbstractSchedule.order`.
      labels, accumulates: as in `check`.

    Raises:
      ScheduleError: the schedule does not admit the placement, or gives a wrong order.
    """
    try:
        found = schedule.order(placement, num_microbatches, backward=backward)
    except Exception as error:
        if not isinstance(error, ScheduleError):  # one of the user's own
            error.add_note(f"in {_asked(schedule, placement, num_microbatches, backward)}")
        raise
    return proved(
        schedule, found, placement, num_microbatches, backward=backward, labels=labels, accumulates=accumulates
    )


def proved(
    schedule: AbstractSchedule,
    found: object,
    placement: Sequence[int],
    num_microbatches: int,
    *,
    backward: bool = True,
    labels: Callable[[Action], str] = str,
    accumulates: bool = True,
) -> Order:
    """What a schedule gave, checked; the schedules of this package are proved by tests, and `Custom` checks its rows.

    Args:
      found: what `AbstractSchedule.order` returned for the other arguments, which are those of `order_of`.

    Raises:
      ScheduleError: it is no order, or a wrong one. The message names the schedule.
    """
    if isinstance(found, Order) and f"{type(schedule).__module__}.".startswith(_OURS):
        return found
    asked = _asked(schedule, placement, num_microbatches, backward)
    if not isinstance(found, Order):
        raise ScheduleError(
            f"{asked}: expected an Order, found {type(found).__name__}; return Order(placement, num_microbatches, rows, ...)."
        )
    rows = rows_of_actions(found.rows, f"{asked}: ")
    splits = backward and schedule.splits_backward
    order = Order(tuple(placement), num_microbatches, rows, splits, backward)
    try:
        check(order, labels=labels, accumulates=accumulates)
    except ScheduleError as error:
        cuts = backward and not splits and any(action.kind == "W" for row in rows for action in row)
        hint = " A schedule with W actions has the class attribute splits_backward = True." * cuts
        raise ScheduleError(f"{asked}: {error}{hint}") from None
    return order


def _asked(schedule: AbstractSchedule, placement: Sequence[int], num_microbatches: int, backward: bool) -> str:
    """The call of ``order`` in which something is wrong."""
    name = getattr(schedule, "name", type(schedule).__name__)
    return f"schedule '{name}', order({described(placement)}, {num_microbatches}, backward={backward})"
