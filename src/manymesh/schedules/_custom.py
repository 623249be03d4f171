"""A schedule that the user writes down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .._errors import ScheduleError
from ._check import check
from ._types import AbstractSchedule, Action, Order
from ._validate import rows_of_actions, validate


@dataclass(frozen=True)
class Custom(AbstractSchedule):
    """Rows of actions, one per submesh, checked before use.

    Attributes:
      rows: ``Action[submesh][position]``; sequences of any kind are kept as tuples. Rows
        that hold a ``W`` split the backward pass.

    Example:
      >>> from manymesh.schedules import OneFOneB
      >>> rows = OneFOneB().order((0, 1), 4).rows
      >>> Custom(rows).order((0, 1), 4) == OneFOneB().order((0, 1), 4)
      True
    """

    name: ClassVar[str] = "custom"
    rows: tuple[tuple[Action, ...], ...]

    def __repr__(self) -> str:
        return f"Custom({len(self.rows)} rows of {sum(map(len, self.rows))} actions)"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", rows_of_actions(self.rows, "schedule 'custom': "))

    @property
    def splits_backward(self) -> bool:  # type: ignore[override]  # the rows say it, not the class
        """Whether a row holds a ``W``."""
        return any(action.kind == "W" for row in self.rows for action in row)

    def default_placement(self, num_stages: int) -> tuple[int, ...]:
        """See `AbstractSchedule.default_placement`: each stage where the rows have it first."""
        home = {action.stage: submesh for submesh, row in reversed(list(enumerate(self.rows))) for action in row}
        missing = [stage for stage in range(num_stages) if stage not in home]
        if missing:
            raise ScheduleError(f"schedule 'custom': no row lists stage {missing[0]} of {num_stages}.")
        return tuple(home[stage] for stage in range(num_stages))

    def order(self, placement: Sequence[int], num_microbatches: int, *, backward: bool = True) -> Order:
        """See `AbstractSchedule.order`; raises what `check` raises."""
        placement = validate(self.name, placement, num_microbatches)
        order = Order(placement, num_microbatches, self.rows, backward and self.splits_backward, backward)
        check(order, accumulates=False)  # whoever has the program knows whether it does
        return order
