"""Where a call keeps its arrays: one list, in which what is made takes the place of what is not needed any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Runs = tuple[range, ...]
"""Positions that follow each other, together."""


class Positions:
    """The position of each slot of a plan in the list of a call.

    A plan has a slot for each value of a call. The list is shorter: what an instruction makes comes to lie, side by side,
    where lay what nobody reads after it. So nothing has to be done to let go of that, and all that is made is put
    there at once.

    Example:
      >>> at = Positions()
      >>> at.issue(reads=(10, 11), fills=(12, 13), frees=(10, 11))
      ((0, 1), (0, 1), ())
      >>> at.issue(reads=(12,), fills=(14,), frees=(12, 13))
      ((0,), (0,), (range(1, 2),))
      >>> at[14], len(at)
      (0, 2)
    """

    def __init__(self) -> None:
        self._at: dict[int, int] = {}
        self._length = 0

    def __len__(self) -> int:
        """How long the list has to be."""
        return self._length

    def __getitem__(self, slot: int) -> int:
        """The position of a slot; a new one for a slot that no instruction has filled, so that an argument does."""
        if slot not in self._at:
            self._at[slot] = self._new(1)[0]
        return self._at[slot]

    def issue(
        self, reads: Sequence[int], fills: Sequence[int], frees: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...], Runs]:
        """The positions of what an instruction reads and fills, and those that are to be emptied after it.

        Args:
          reads, fills, frees: its slots. Asked for in the order of issue.
        """
        read = tuple([self[slot] for slot in reads])
        mine = frozenset(fills)
        over = _runs(self[slot] for slot in frees if slot not in mine)
        place = next((run for run in over if len(run) >= len(fills)), None) if fills else None
        if place is not None:
            over = tuple([run for run in over if run is not place])
            taken, left = place[: len(fills)], place[len(fills) :]
            over += (left,) if left else ()
        else:
            taken = self._new(len(fills))
        self._at.update(zip(fills, taken, strict=True))
        unread = _runs(self._at[slot] for slot in frees if slot in mine)
        return read, tuple(taken), over + unread

    def _new(self, count: int) -> range:
        self._length += count
        return range(self._length - count, self._length)


def _runs(positions: Iterable[int]) -> Runs:
    """Positions as runs that follow each other."""
    runs: list[list[int]] = []
    for k in sorted(positions):
        if runs and runs[-1][1] == k:
            runs[-1][1] += 1
        else:
            runs.append([k, k + 1])
    return tuple([range(a, b) for a, b in runs])
