"""What every schedule asks of its arguments."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex

from .._errors import ScheduleError


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
      ScheduleError: there is no stage, a submesh is negative, or no microbatch.
    """
    if not placement:
        raise ScheduleError(f"schedule '{name}': placement is empty; name the submesh of at least one stage.")
    for stage, submesh in enumerate(placement):
        if submesh < 0:
            raise ScheduleError(
                f"schedule '{name}': stage {stage} is placed on submesh {submesh} in {tuple(placement)}; "
                "number submeshes from 0."
            )
    if num_microbatches < 1:
        raise ScheduleError(f"schedule '{name}': num_microbatches is {num_microbatches}; use at least 1.")
    return tuple(placement)
