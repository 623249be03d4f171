"""What `jit` made of a function before, kept as long as the function: another `jit` of it finds its programs compiled."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax

T = TypeVar("T")

_NAME = "_manymesh_programs"
# Of others nothing is kept: they may be of a class that minds an attribute.
KEEPING: tuple[type, ...] = (types.FunctionType,)


class _Kept:
    """An attribute of a function: what was made of it, by the settings. Nobody else holds it, so that both go together."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        self.fun = fun
        self.made: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing of it is pickled with a function."""
        return dict, ()


def kept(fun: Callable[..., Any], settings: Any, make: Callable[[], T]) -> T:
    """What was made of a function before with equal settings, or what is made now.

    Args:
      fun: a function of Python; of other callables nothing is kept.
      settings: a pytree; where a leaf has no hash, nothing is kept.
      make: makes it.
    """
    leaves, structure = jax.tree.flatten(settings, is_leaf=lambda x: x is None)
    key = structure, tuple((type(x), x) for x in leaves)  # 1 and True are equal
    try:
        hash(key)
    except TypeError:
        return make()
    if not isinstance(fun, KEEPING):
        return make()
    found = vars(fun).get(_NAME)
    if not isinstance(found, _Kept) or found.fun is not fun:  # `functools.wraps` copies the attributes of another one
        found = _Kept(fun)
        setattr(fun, _NAME, found)
    if key not in found.made:
        found.made.setdefault(key, make())
    made: T = found.made[key]
    return made
