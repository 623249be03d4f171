"""What a step changes in place in the modules of Flax NNX that it is given: `jit` gives it others, so that it is lost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax

from .. import _compat
from .._findings import Finding
from .._types import PyTree
from ._arguments import keystr


def lost_changes(given: Sequence[Any], after: PyTree, results: Sequence[Any]) -> Finding | None:
    """A finding if a function has changed variables of modules among its arguments, and does not return them.

    Args:
      given: the leaves of its arguments before the call.
      after: its ``(args, kwargs)`` after the call.
      results: the leaves that it returned.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    variables = jax.tree_util.tree_leaves_with_path(after, is_leaf=lambda x: isinstance(x, nnx.Variable))
    known = set(map(id, (*given, *results)))
    lost = [
        path
        for path, x in variables
        if isinstance(x, nnx.Variable)
        and any(id(v) not in known and id(_compat.before_calls(v)) not in known for v in jax.tree.leaves(x))
    ]
    if not lost:
        return None
    others = f" and {len(lost) - 1} more" if lost[1:] else ""
    return Finding(
        f"the function changes{keystr(lost[0])}{others} in place, which is lost: mm.jit, as jax.jit, gives it modules of its own; "
        "write manymesh.nnx.jit, which updates the modules of the call, or return them"
    )
