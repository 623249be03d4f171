"""What a schedule is: pure data that says, for each submesh, what runs in which order.

A pipeline program is a chain of *stages*, numbered in forward dataflow order. Each stage
lives on one submesh (`placement[stage]`), and each runs once per microbatch forward and,
when the program is differentiated, once backward. A schedule does not say *when* anything
runs; it fixes the order on each submesh, and the data dependencies do the rest:

- ``F(s, m)`` follows ``F(s-1, m)``;
- ``B(s, m)`` follows ``F(s, m)`` and ``B(s+1, m)``;
- ``W(s, m)``, the weight gradient of a split backward pass, follows ``B(s, m)``.

On every stage each kind of action takes the microbatches in increasing order. Gradients
are therefore accumulated in microbatch order under every schedule, and changing the
schedule does not change a bit of the result. Only a forward-only program that adds nothing up
may take them in another order, which a custom schedule can say.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, SupportsIndex

from .._errors import ScheduleError

ScheduleName = Literal[
    "1f1b",
    "custom",
    "dualpipev",
    "eager-1f1b",
    "gpipe",
    "interleaved",
    "wavefront",
    "zbv",
    "zero-bubble-h1",
    "zero-bubble-h2",
]
"""The names of the schedules that are here, for editors to offer; one that is registered is known by `get`."""

Kind = Literal["F", "B", "W"]
"""``F`` forward, ``B`` backward (only the input gradient when split), ``W`` weight gradient."""


_KINDS = ("F", "B", "W")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One run of one stage on one microbatch.

    Attributes:
      kind: ``"F"``, ``"B"`` or ``"W"``.
      stage: the stage's number in forward dataflow order, from 0.
      microbatch: the microbatch's number, from 0.

    Example:
      >>> print(Action("F", 2, 5))
      F2@5

    Raises:
      ScheduleError: the kind is another one, or a number is none or negative.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ScheduleError(f"Action: kind has to be one of 'F', 'B' and 'W', found {self.kind!r}.")
        if type(self.stage) is not int or self.stage < 0 or type(self.microbatch) is not int or self.microbatch < 0:
            self._check_numbers()  # seldom: a large schedule makes 100,000 of these

    def _check_numbers(self) -> None:
        for name, number in (("stage", self.stage), ("microbatch", self.microbatch)):
            if not isinstance(number, SupportsIndex) or isinstance(number, bool) or operator.index(number) < 0:
                raise ScheduleError(f"Action: {name} has to be a whole number from 0, found {number!r}.")

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}@{self.microbatch}"


_SHOWN = 24


@dataclass(frozen=True)
class Order:
    """What each submesh runs, in which order.

    Attributes:
      placement: ``int[stage]``, the submesh of each stage.
      num_microbatches: how many microbatches run through every stage.
      rows: ``Action[submesh][position]``, one row per submesh. A submesh that no stage
        names has an empty row.
      splits_backward: whether ``W`` actions are separate from ``B`` actions.
      backward: False for a forward-only program, which has only ``F`` actions.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]
    splits_backward: bool = False
    backward: bool = True

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def num_submeshes(self) -> int:
        """The number of submeshes, which is the number of rows."""
        return len(self.rows)

    def __repr__(self) -> str:
        if sum(map(len, self.rows)) <= _SHOWN:
            return f"Order({self.placement}, {self.num_microbatches} microbatches, {str(self)!r})"
        return (
            f"Order({self.num_stages} stages on {self.num_submeshes} submeshes, {self.num_microbatches} microbatches, "
            f"{sum(map(len, self.rows))} actions; print it)"
        )

    def __str__(self) -> str:
        return "\n".join(f"submesh {i}: {' '.join(map(str, row))}" for i, row in enumerate(self.rows))


class AbstractSchedule(abc.ABC):
    """A rule that gives an `Order` for any number of microbatches.

    Subclasses are frozen dataclasses, final, and set `name`. A class joins the registry,
    and with it the contract that all schedules are tested against, by `register`.

    Attributes:
      name: the one spelling by which the registry knows the schedule.
      splits_backward: whether the schedule cuts the backward pass into ``B`` and ``W``.
    """

    name: ClassVar[str]
    splits_backward: ClassVar[bool] = False

    @abc.abstractmethod
    def order(self, placement: Sequence[int], num_microbatches: int, *, backward: bool = True) -> Order:
        """The order of all actions on each submesh.

        Args:
          placement: ``int[stage]``, the submesh of each stage, submeshes numbered from 0.
          num_microbatches: the number of microbatches, at least 1.
          backward: False for a forward-only program.

        Returns:
          An order that `check` accepts.

        Raises:
          ScheduleError: the placement or the number of microbatches does not fit.
        """

    def default_placement(self, num_stages: int) -> tuple[int, ...]:
        """The placement that the schedule was published for.

        Args:
          num_stages: the number of stages, at least 1.

        Returns:
          ``int[stage]``, the submesh of each stage; unless a schedule says otherwise, one
          stage on each submesh.

        Raises:
          ScheduleError: the schedule does not admit that number of stages.
        """
        return tuple(range(num_stages))
