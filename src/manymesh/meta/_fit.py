"""Names for values that have lost dimensions.

An optimizer maps over a tree of boxed parameters, so that its state comes in boxes with the names of
the parameters. A factored second moment (Adafactor) has fewer dimensions than its parameter: the names no
longer fit. The parameter itself is in the same tree as a rule, at the same end of the path; its shape says
which dimensions are left.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._axes import Names


@dataclass(frozen=True)
class Named:
    """A leaf with names.

    Attributes:
      path: keys from the root.
      names: one entry a dimension.
      shape: shape of the value; None if unknown.
    """

    path: tuple[Any, ...]
    names: Names
    shape: tuple[int, ...] | None

    @property
    def surplus(self) -> bool:
        """Whether there are more names than dimensions."""
        return self.shape is not None and len(self.names) > len(self.shape)


def fit_names(leaves: Sequence[Named]) -> list[Names | None]:
    """The names that fit each leaf.

    Args:
      leaves: all leaves of a tree that have names.

    Returns:
      For each leaf its names, those of the dimensions it has kept where it has fewer than names, or None where that
      cannot be told. A value of one element needs no names: ``()``.
    """
    if not any(leaf.surplus for leaf in leaves):
        return [leaf.names for leaf in leaves]
    whole: dict[Names, list[Named]] = defaultdict(list)
    for leaf in leaves:
        if leaf.shape is not None and len(leaf.shape) == len(leaf.names):
            whole[leaf.names].append(leaf)
    return [_fit(leaf, whole[leaf.names]) if leaf.surplus else leaf.names for leaf in leaves]


def _fit(leaf: Named, whole: Sequence[Named]) -> Names | None:
    assert leaf.shape is not None, "only a leaf with a shape has surplus names"
    if math.prod(leaf.shape) <= 1:
        return ()
    scores = [_common_end(leaf.path, other.path) for other in whole]
    best = max(scores, default=0)
    if best == 0:
        return None
    shapes = {other.shape for other, score in zip(whole, scores, strict=True) if score == best}
    found: set[Names] = set()
    for shape in shapes:
        assert shape is not None, "only leaves with shapes are compared"
        for kept in itertools.combinations(range(len(shape)), len(leaf.shape)):
            if tuple(shape[i] for i in kept) == leaf.shape:
                found.add(tuple(leaf.names[i] for i in kept))
    return found.pop() if len(found) == 1 else None


def _common_end(a: tuple[Any, ...], b: tuple[Any, ...]) -> int:
    return sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(reversed(a), reversed(b), strict=False))
    )
