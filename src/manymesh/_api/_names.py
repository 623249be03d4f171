"""What users call the values of a program."""

from __future__ import annotations

from typing import Any

import jax

from .. import _compat
from .._compat import Var
from .._program import Program
from ._arguments import keystr


def names_of_values(program: Program, in_tree: Any, out_tree: Any) -> dict[Var, str]:
    """Arguments by their path, results by theirs, everything else by what makes it.

    Args:
      program: the program.
      in_tree: structure of ``(args, kwargs)``.
      out_tree: structure of the result.
    """
    names: dict[Var, str] = {}
    for loop in program.loops:
        carried = (v for inner, _, init, final in loop.carries for v in (inner, init, final))
        names.update(dict.fromkeys((v for v in carried if _compat.is_var(v)), "accumulator"))
        pieces = (v for inner, outer in loop.cut for v in (inner, *outer))
        names.update(dict.fromkeys((v for v in pieces if _compat.is_var(v)), "piece of the batch"))
    for f in program.fragments:
        for v in f.outvars:
            names.setdefault(v, f"from {f.name}")
    for (v, _), path in zip(program.outputs, _paths(out_tree), strict=True):
        if _compat.is_var(v):
            names[v] = f"result{jax.tree_util.keystr(path)}"
    count = len(program.consts)
    names.update(dict.fromkeys(program.invars[:count], "constant"))
    for v, path in zip(program.invars[count:], _paths(in_tree), strict=True):
        names[v] = keystr(path).strip()
    return names


def _paths(tree: Any) -> list[Any]:
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]
