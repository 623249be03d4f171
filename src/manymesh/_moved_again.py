"""Arguments that are moved in each call of a step, because their caller leaves them elsewhere.

Parameters that were made or loaded on the first device are right there for a training step, which gives back new ones where
they belong. A step that only reads them, for evaluation or generation, would move all of them again in each call.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Sharding

from . import _compat
from ._runtime._memories import is_in_host_memory
from ._shown import format_bytes, joined

CALLS = 3  # the same arrays in so many calls are no accident
LEAST = 1 << 20  # bytes that are worth a word


class MovedAgain:
    """Looks at the first calls of a step, and warns in the last of them.

    Args:
      name: that of the step.
      homes: the sharding that each leaf of the arguments has at its home; None where nothing reads it.
      path: ``args[0]['w']`` of a leaf.
      place: how to place an argument, one of `Calling.place`.
    """

    def __init__(self, name: str, homes: Sequence[Sharding | None], path: Callable[[int], str], place: str) -> None:
        self._name, self._homes, self._path, self._place = name, homes, path, place
        self._seen: dict[int, weakref.ref[Any]] = {}
        self.calls = CALLS  # that are still to come

    def look(self, leaves: Sequence[Any]) -> None:
        """Is told the leaves of a call that begins."""
        first = self.calls == CALLS
        self.calls -= 1
        moved = {i: x for i, x in enumerate(leaves) if _is_elsewhere(x, self._homes[i])}
        again = [i for i, x in moved.items() if first or ((seen := self._seen.get(i)) is not None and seen() is x)]
        self._seen = {i: weakref.ref(moved[i]) for i in again}
        if not self.calls and sum(moved[i].nbytes for i in again) >= LEAST:
            self._warn({i: moved[i].nbytes for i in again})

    def _warn(self, sizes: dict[int, int]) -> None:
        whole: dict[str, list[int]] = {}
        for i, size in sizes.items():
            path = self._path(i)
            whole.setdefault(path[: path.index("]") + 1], []).append(size)
        told = [
            f"{x} ({len(each)} array{'s' * (len(each) > 1)}, {format_bytes(sum(each))})" for x, each in whole.items()
        ]
        most = max(whole, key=lambda x: sum(whole[x]))
        kind, which = most[:-1].split("[")
        place = self._place.format(
            argument=most, home=f"[{int(kind == 'kwargs')}][{which}]", which=which, name=self._name
        )
        warnings.warn(
            f"{self._name}: each of {CALLS} calls moved {joined(told)} to where the step reads it; place it once, before the "
            f"calls, and pass that: {place}",
            stacklevel=_compat.users_level(),
        )


def _is_elsewhere(x: Any, home: Sharding | None) -> bool:
    """Whether an array has to be moved; one in the memory of the host lies there on purpose."""
    if home is None or type(x) is not _compat.ConcreteArray or x.is_deleted() or is_in_host_memory(x):
        return False
    return not x.sharding.is_equivalent_to(home, x.ndim)
