"""Boxes among the arguments: their names inside the trace, and in errors."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .. import meta
from .._errors import AxisError
from .._mark import carry_box_names
from ._arguments import Arguments, keystr


def is_foreign_box(x: Any) -> bool:
    """Whether it is a box of Flax, which does not tell us what its names are when it is opened."""
    return not isinstance(x, meta.AxisMetadata) and all(
        hasattr(x, name) for name in ("names", "value", "unbox", "replace_boxed")
    )


def carried(x: Any) -> Any:
    """A box of Flax whose value says what its names are wherever it goes; anything else as it is."""
    if not is_foreign_box(x) or not hasattr(x.value, "aval"):
        return x
    rules = tuple(tuple(r) for r in getattr(x, "rules", None) or ())
    return x.replace_boxed(carry_box_names(x.value, tuple(x.names), rules, type(x).__name__))


def with_parameter(error: AxisError, given: Arguments) -> AxisError:
    """The error with the paths of the parameters it is about: those with the same names and shape; else what has this shape."""
    names, shape = getattr(error, "names", None), getattr(error, "shape", None)
    if names is None or "parameter" in str(error):
        return error
    boxed = jax.tree_util.tree_leaves_with_path(
        (given.dyn_args, given.dyn_kwargs), is_leaf=lambda x: hasattr(x, "names") and hasattr(x, "unbox")
    )
    found = [
        p for p, x in boxed if hasattr(x, "names") and tuple(x.names) == tuple(names) and np.shape(x.value) == shape
    ]
    alike = [] if found else [p for p, x in boxed if np.shape(x) == shape]
    if not found and not alike:
        return error
    paths = " or".join(keystr(p) for p in (found or alike)[:3])
    # An array between two tasks may well have the shape of an argument.
    new = AxisError(f"parameter{paths}: {error}" if found else f"{error} ({paths.strip()} has this shape)")
    new.__notes__ = list(error.__notes__)
    return new
