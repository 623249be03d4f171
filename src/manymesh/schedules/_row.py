"""Write a row action by action, counting microbatches."""

from __future__ import annotations

from collections import Counter

from ._types import Action, Kind


class Row:
    """The row of one submesh while it is written.

    Published orders are often given for a least number of microbatches, or for a multiple
    of something. Written for as many as they need, with the surplus left out, they serve
    any number: leaving out whole microbatches removes actions and the waits between the
    others only become fewer, so what could not deadlock still cannot.
    """

    def __init__(self, num_microbatches: int, padded: int, *, backward: bool):
        """Start an empty row.

        Args:
          num_microbatches: microbatches that exist.
          padded: microbatches that the order is written for.
          backward: False to write forwards only.
        """
        self.padded = padded
        self.count: Counter[tuple[Kind, int]] = Counter()
        self._num_microbatches = num_microbatches
        self._backward = backward
        self._actions: list[Action] = []

    def add(self, kind: Kind, stage: int) -> None:
        """Add the next microbatch of a stage; past the last one this does nothing."""
        microbatch = self.count[kind, stage]
        self.count[kind, stage] += 1
        if microbatch < self._num_microbatches and (self._backward or kind == "F"):
            self._actions.append(Action(kind, stage, microbatch))

    def done(self) -> tuple[Action, ...]:
        """The finished row."""
        return tuple(self._actions)
