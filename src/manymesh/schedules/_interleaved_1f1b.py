"""Interleaved 1F1B: several stages on each submesh, dealt out in turn.

With ``v`` stages on each of ``p`` submeshes, stage ``s`` on submesh ``s mod p``, a
microbatch passes every submesh ``v`` times and the wait to fill and drain the pipeline is
``v`` times shorter: bubble ``(p - 1) (F + B) / v``, where ``F`` and ``B`` are the times of
all ``v`` stages of a submesh and microbatches are a multiple of ``p``; of other numbers it
is longer, at most that of 1F1B. The price is ``v`` times as many transfers and more
activations: submesh ``d`` keeps up to ``2 (p - d - 1) + (v - 1) p + 1`` of one stage.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .._errors import ScheduleError
from ._placements import distinct, require
from ._row import Row
from ._types import AbstractSchedule, Action, Order
from ._validate import validate, whole_number


@dataclass(frozen=True)
class Interleaved1F1B(AbstractSchedule):
    """1F1B over groups of microbatches that pass every submesh several times.

    Microbatches run in groups of as many as there are submeshes. The paper asks for a
    multiple of that; here a last group may be smaller, or the only one.

    Attributes:
      virtual_stages: stages on each submesh; None takes what the placement has (and two
        where no placement is given).

    Example:
      >>> print(Interleaved1F1B(2).order((0, 1, 0, 1), 2))
      submesh 0: F0@0 F0@1 F2@0 F2@1 B2@0 B2@1 B0@0 B0@1
      submesh 1: F1@0 F1@1 F3@0 B3@0 F3@1 B3@1 B1@0 B1@1
    """

    name: ClassVar[str] = "interleaved"
    virtual_stages: int | None = None

    def __post_init__(self) -> None:
        if self.virtual_stages is not None:
            whole_number(f"schedule '{self.name}': virtual_stages", self.virtual_stages)

    def default_placement(self, num_stages: int) -> tuple[int, ...]:
        """See `AbstractSchedule.default_placement`: submesh 0 to the last, and around again."""
        virtual = self.virtual_stages or 2
        if num_stages % virtual:
            raise ScheduleError(
                f"schedule '{self.name}' with virtual_stages={virtual} needs a multiple of {virtual} stages, "
                f"but found {num_stages}."
            )
        return tuple(range(num_stages // virtual)) * virtual

    def order(self, placement: Sequence[int], num_microbatches: int, *, backward: bool = True) -> Order:
        """See `AbstractSchedule.order`."""
        placement = validate(self.name, placement, num_microbatches)
        submeshes = distinct(placement)
        virtual = self.virtual_stages or max(1, len(placement) // len(submeshes))
        require(
            self.name,
            placement,
            submeshes * virtual,
            f"{virtual} stage{'s' * (virtual > 1)} on each submesh, dealt out in turn",
        )
        rows: list[tuple[Action, ...]] = [()] * (max(placement) + 1)
        for rank, submesh in enumerate(submeshes):
            rows[submesh] = _row(rank, len(submeshes), virtual, num_microbatches, backward=backward)
        return Order(placement, num_microbatches, tuple(rows), splits_backward=False, backward=backward)


def _row(rank: int, ranks: int, virtual: int, num_microbatches: int, *, backward: bool) -> tuple[Action, ...]:
    groups = -(-num_microbatches // ranks)
    row = Row(num_microbatches, groups * ranks, backward=backward)
    chunks = [chunk for _ in range(groups) for chunk in range(virtual) for _ in range(ranks)]
    forwards = [chunk * ranks + rank for chunk in chunks]  # stages, one forward each
    backwards = [(virtual - 1 - chunk) * ranks + rank for chunk in chunks]
    warmup = min(2 * (ranks - rank - 1) + (virtual - 1) * ranks, len(chunks))
    for stage in forwards[:warmup]:
        row.add("F", stage)
    for position, stage in enumerate(backwards):
        if position + warmup < len(forwards):
            row.add("F", forwards[position + warmup])
        row.add("B", stage)
    return row.done()
