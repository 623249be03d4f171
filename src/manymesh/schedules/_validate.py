"""What every schedule asks of its arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from .._errors import ScheduleError
from ._types import Action, Order


def whole_number(what: str, number: object) -> int:
    """A number of stages or microbatches, once it is one.

    Raises:
      ScheduleError: it is no positive int. An object that counts as one (``__index__``) is one.
    """
    if not isinstance(number, SupportsIndex) or isinstance(number, bool) or operator.index(number) < 1:
        raise ScheduleError(f"{what} has to be a positive int, found {type(number).__name__} {number!r}.")
    return operator.index(number)


def validate(name: str, placement: Sequence[int], num_microbatches: int) -> tuple[int, ...]:
    """The placement as a tuple, once it and the number of microbatches make sense.

    Args:
      name: the schedule's name, for messages.
      placement: ``int[stage]``, the submesh of each stage.
      num_microbatches: the number of microbatches.

    Returns:
      The placement as a tuple.

    Raises:
      ScheduleError: there is no stage, a submesh is negative or no number, or there is no microbatch.
    """
    if not isinstance(placement, Iterable):
        raise ScheduleError(
            f"schedule '{name}': placement has to be the submesh of each stage, such as (0, 1), found {type(placement).__name__} "
            f"{placement!r:.80}."
        )
    placement = tuple(placement)
    if not placement:
        raise ScheduleError(f"schedule '{name}': placement is empty; name the submesh of at least one stage.")
    for stage, submesh in enumerate(placement):
        if not isinstance(submesh, SupportsIndex):
            raise ScheduleError(
                f"schedule '{name}': stage {stage} is placed on {type(submesh).__name__} {submesh!r} in {placement}; "
                "name each stage's submesh by its number."
            )
        if submesh < 0:
            raise ScheduleError(
                f"schedule '{name}': stage {stage} is placed on submesh {submesh} in {placement}; "
                "number submeshes from 0."
            )
    whole_number(f"schedule '{name}': num_microbatches", num_microbatches)
    return placement


def require_order(where: str, order: object) -> None:
    """Refuses what is no `Order`, such as the name of a schedule."""
    if not isinstance(order, Order):
        raise ScheduleError(
            f"{where}: expected an Order, found {type(order).__name__} {order!r:.80}; one is what a schedule's order(placement, "
            "num_microbatches) gives."
        )


def rows_of_actions(rows: object, where: str = "") -> tuple[tuple[Action, ...], ...]:
    """``Action[submesh][position]``, of sequences of any kind.

    Args:
      rows: one row per submesh.
      where: what messages start with.

    Raises:
      ScheduleError: they are no rows, or hold something else.
    """
    if not isinstance(rows, Iterable):
        raise ScheduleError(f"{where}expected one row of actions per submesh, found {type(rows).__name__} {rows!r}.")
    found = []
    for submesh, row in enumerate(rows):
        if not isinstance(row, Iterable):
            raise ScheduleError(f"{where}row {submesh} is {row!r}, expected a list of actions.")
        found.append(tuple(row))
        for action in found[-1]:
            if not isinstance(action, Action):
                raise ScheduleError(
                    f"{where}row {submesh} holds {action!r}, expected actions such as Action('F', stage, microbatch)."
                )
    return tuple(found)
