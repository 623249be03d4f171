"""What a function changes in place in objects among its arguments: where it is given others, that is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from . import _compat
from ._types import PyTree


def changed(given: Sequence[Any], after: PyTree, results: Sequence[Any] = ()) -> str | None:
    """What a function has changed, and does not return, as ``args[0].norm.mean and 2 more``; None where it is nothing.

    In dicts and lists a function may change what it likes, as in any function of JAX.

    Args:
      given: the leaves of its arguments before the call.
      after: its ``(args, kwargs)`` after the call.
      results: the leaves that it returned.
    """
    known = set(map(id, (*given, *results)))
    lost = [
        path
        for path, x in jax.tree_util.tree_leaves_with_path(after)
        if id(x) not in known and id(_compat.before_calls(x)) not in known and any(hasattr(key, "name") for key in path)
    ]
    if not lost:
        return None
    (which, argument, *rest), *more = lost
    called = f"args[{argument.idx}]" if which.idx == 0 else str(argument.key)
    return f"{called}{jax.tree_util.keystr(tuple(rest))}{f' and {len(more)} more' if more else ''}"
