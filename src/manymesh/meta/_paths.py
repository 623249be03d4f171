"""Words for places: the path of a leaf, the description of a value, the nearest known name.

Every message of this package says where with these functions, so that `explain`, the errors of
`get_sharding` and a failed constraint point to one place in one way.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey


def format_path(path: tuple[Any, ...]) -> str:
    """A key path as Python source, its first key taken as a variable's name.

    Args:
      path: keys as `jax.tree_util.tree_flatten_with_path` gives them.

    Returns:
      ``params['front']['kernel']`` for a tree whose first key is ``'params'``; ``tree`` for no key at all.

    Example:
      >>> import jax
      >>> from manymesh.meta._paths import format_path
      >>> (path, _), = jax.tree_util.tree_leaves_with_path({"params": {"front": [1]}})
      >>> format_path(path)
      "params['front'][0]"
    """
    if not path:
        return "tree"
    first, rest = path[0], path[1:]
    if isinstance(first, DictKey) and isinstance(first.key, str) and first.key.isidentifier():
        return str(first.key) + jax.tree_util.keystr(rest)
    if isinstance(first, GetAttrKey):
        return str(first.name) + jax.tree_util.keystr(rest)
    return "tree" + jax.tree_util.keystr(path)


def describe(value: object) -> str:
    """A value in a few characters: ``float32[4,8]`` for anything with a shape and a dtype, else its type."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{getattr(dtype, 'name', dtype)}[{','.join(map(str, shape))}]"
    return type(value).__name__


def nearest(name: object, known: Iterable[object]) -> str:
    """``; did you mean 'hidden'?`` if a known name is close to ``name``, else the list of what is known."""
    names = sorted({str(k) for k in known})
    close = difflib.get_close_matches(str(name), names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known names: {', '.join(map(repr, names))}" if names else "; no names are known"


def rank_of(value: object) -> int | None:
    """How many dimensions a value has; None for what has no shape."""
    shape = getattr(value, "shape", None)
    return None if shape is None else len(shape)
