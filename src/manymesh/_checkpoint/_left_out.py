"""Leaves that are no arrays: what belongs to the program and is left out, and what would get lost.

Functions, dtypes and shardings say how a program computes, wherever they are. Text does so as a field of a class, as in
modules of Equinox, where `padding_mode` and the name of an activation are leaves; in a dictionary, a list or a tuple it was
put beside the arrays to be saved. Everything else, such as a generator of NumPy, a path or a date, is a part of the state
that a checkpoint cannot hold: refused beside the arrays, and named in a warning as a field of a class, where it may be the
program's.
"""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding

from .. import _compat
from .._errors import CheckpointError
from .._types import PyTree
from ._leaves import Leaf, is_array, is_empty

_SHOWN = 5
_REMEDY = "keep {} in metadata=, as anything that JSON can say, and save the tree without it"
# What belongs to the program wherever it is, and what does so as a field of a class.
_PROGRAM = (np.dtype, Sharding, Mesh, PartitionSpec)
_FIELDS = (str, bytes, enum.Enum)


def check_left_out(path: Path, leaves: Sequence[Leaf]) -> None:
    """Refuses a tree of which a part would get lost, and warns where that is not certain.

    Args:
      path: what the checkpoint is going to be called.
      leaves: those of the tree; empty containers may be among them.

    Raises:
      CheckpointError: there are leaves beside the arrays that are neither arrays nor the program's; all are listed.
    """
    lost = [leaf for leaf in leaves if is_lost(leaf)]
    beside = [leaf for leaf in lost if not leaf.in_class]
    if beside:
        raise CheckpointError(
            f"{path}: a checkpoint holds arrays, numbers and random keys, and would lose {_names(beside)}:{_listed(beside)}"
        )
    if lost:
        warnings.warn(
            f"{path}: {_names(lost)} is left out of the checkpoint; restore takes it from like=:{_listed(lost)}",
            stacklevel=_compat.users_level(),
        )


def check_untied(like: PyTree) -> None:
    """Refuses modules of NNX that share variables, of which a pytree would be made in which each has its own.

    Args:
      like: what is to be restored.

    Raises:
      CheckpointError: there are two paths to one variable.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    first: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(like, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        here = jax.tree_util.keystr(path)
        if isinstance(leaf, nnx.Variable) and first.setdefault(id(leaf), here) != here:
            raise CheckpointError(
                f"like{first[id(leaf)]} and like{here} are one variable, and would come back as two; write "
                "nnx.update(model, restore(path, like=nnx.state(model))), which keeps what modules share"
            )


def is_lost(leaf: Leaf) -> bool:
    """Whether a leaf is neither saved nor known to belong to the program."""
    value = leaf.value
    if is_array(value) or is_empty(value) or callable(value) or isinstance(value, _PROGRAM):
        return False
    return not (leaf.in_class and isinstance(value, _FIELDS))


def _names(leaves: Sequence[Leaf]) -> str:
    """``rng``, ``rng and 2 more``: what fits in a line."""
    return str(leaves[0]) + (f" and {len(leaves) - 1} more" if len(leaves) > 1 else "")


def _listed(leaves: Sequence[Leaf]) -> str:
    shown = "".join(f"\n  {said(leaf)}" for leaf in leaves[:_SHOWN])
    return shown + (f"\n  and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else "")


def said(leaf: Leaf) -> str:
    """``tag is str 'run-7', which is no array: keep it in metadata=, ...``."""
    value = leaf.value
    if isinstance(value, np.ma.MaskedArray):
        return f"{leaf} is a masked array: save its data and its mask, as two arrays"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    shown = "" if " at 0x" in repr(value) else f" {value!r:.60}"
    kept = "its bit_generator.state" if isinstance(value, np.random.Generator) else "it"
    return f"{leaf} is {name}{shown}, which is no array: {_REMEDY.format(kept)}"
