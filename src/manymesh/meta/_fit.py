"""Names for values that have lost or gained dimensions.

An optimizer maps over a tree of boxed parameters, so that its state comes in boxes with the names of
the parameters. A factored second moment (Adafactor) has fewer dimensions than its parameter, a history of
gradients (L-BFGS) has more: the names no longer fit. The parameter itself is in the same tree as a rule, at the
same end of the path; its shape says which dimensions the names are for.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
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
    def suspect(self) -> bool:
        """Whether the names may be those of another value."""
        return self.shape is not None and is_suspect(self.names, self.shape)


def is_suspect(names: Names, shape: tuple[int, ...]) -> bool:
    """Whether names may be those of another value: their number differs, or the value is a placeholder.

    Where nothing is factored, optimizers keep an array of shape ``(1,)``, which a vector's one name seems to fit.
    """
    return names != () and (len(names) != len(shape) or shape == (1,))


def fit_names(leaves: Sequence[Named]) -> list[Names | None]:
    """The names that fit each leaf.

    Args:
      leaves: all leaves of a tree that have names.

    Returns:
      For each leaf its names, or, where they are those of a larger value, those of the dimensions it has kept, or,
      where they are those of a smaller one, None for each dimension in between: ``()`` for a value of one element and
      where its parameter leaves that open (two dimensions of one size). None where there are more names than
      dimensions and the tree holds no parameter for it, so that the names are likely a mistake.
    """
    if not any(leaf.suspect for leaf in leaves):
        return [leaf.names for leaf in leaves]
    whole: dict[Names, list[Named]] = defaultdict(list)
    for leaf in leaves:
        if leaf.shape is not None and len(leaf.shape) == len(leaf.names) and not leaf.suspect:
            whole[leaf.names].append(leaf)
    return [_fit(leaf, whole[leaf.names]) if leaf.suspect else leaf.names for leaf in leaves]


def _fit(leaf: Named, whole: Sequence[Named]) -> Names | None:
    assert leaf.shape is not None, "only a leaf with a shape can be suspect"
    if len(leaf.names) < len(leaf.shape):
        return _fit_grown(leaf, whole)
    placeholder = math.prod(leaf.shape) <= 1
    if placeholder and len(leaf.names) > len(leaf.shape):
        return ()
    scores = [_likeness(leaf.path, other.path) for other in whole]
    best = max(scores, default=0)
    if best == 0:
        return leaf.names if placeholder else None
    if placeholder:
        return ()
    found: set[Names] = set()
    for other, score in zip(whole, scores, strict=True):
        if score == best:
            assert other.shape is not None, "only leaves with shapes are compared"
            found |= _kept(leaf.names, other.shape, leaf.shape)
    return found.pop() if len(found) == 1 else ()


def _fit_grown(leaf: Named, whole: Sequence[Named]) -> Names:
    # Names may be fewer than dimensions on purpose. So it takes more to overrule them: the path of the parameter but
    # for its root must end the path of the leaf, which is longer, as that of a state in an optimizer's is.
    assert leaf.shape is not None, "only a leaf with a shape can be suspect"
    found: set[Names] = set()
    for other in whole:
        rest = other.path[1:]
        if len(leaf.path) > len(other.path) and leaf.path[-len(rest) :] == rest:
            assert other.shape is not None, "only leaves with shapes are compared"
            for places in itertools.combinations(range(len(leaf.shape)), len(other.shape)):
                if tuple(leaf.shape[i] for i in places) == other.shape:
                    named = dict(zip(places, leaf.names, strict=True))
                    found.add(tuple(named.get(i) for i in range(places[-1] + 1)))
    if not found:
        return leaf.names
    return found.pop() if len(found) == 1 else ()


def _kept(names: Names, whole: tuple[int, ...], part: tuple[int, ...]) -> set[Names]:
    """Every way in which dropping dimensions of ``whole`` leaves ``part``, as the names that stay."""
    choices = itertools.combinations(range(len(whole)), len(part))
    return {tuple(names[i] for i in kept) for kept in choices if tuple(whole[i] for i in kept) == part}


def _likeness(path: tuple[Any, ...], parameter: tuple[Any, ...]) -> int:
    """How many last keys a leaf shares with a parameter; 0 for two parameters side by side.

    ``opt_state[0].v_row['a']['w']`` belongs to ``params['a']['w']``. But ``params['b']['w']`` and ``params['a']['w']``,
    which differ in one key below a common root, are two of one kind: neither explains the other.
    Neither are two values in one box.
    """
    if path == parameter:
        return 0
    end = _common(reversed(path), reversed(parameter))
    start = _common(path, parameter)
    between = len(path) - start - end, len(parameter) - start - end
    return 0 if start and between == (1, 1) else end


def _common(a: Iterable[Any], b: Iterable[Any]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
