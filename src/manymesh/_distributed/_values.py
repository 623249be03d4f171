"""Short texts of host values, by which processes find out that they were given different ones."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from .. import _compat

SHOWN = 6  # numbers of which a value may consist to be its own text
WHOLE = 1 << 16  # bytes that are looked at in one value; of a larger one, as many, from all over it


def fingerprint(x: Any) -> str | None:
    """A short text that is another one for another value, but for differences that fall between what is looked at.

    Of a scalar and of a very small array, whose shape and dtype others compare, it is the numbers themselves.

    Args:
      x: a number, an array of the host, or an array that JAX put where it liked.

    Returns:
      The text; None for an array that was put somewhere, for one that would first have to come from an accelerator and is
      large, and for what has no value.
    """
    if isinstance(x, jax.Array):
        if x.committed or x.is_deleted() or (x.nbytes > WHOLE and any(d.platform != "cpu" for d in x.devices())):
            return None
    elif not isinstance(x, (bool, int, float, complex, np.ndarray, np.generic)):
        return None
    whole = np.asarray(_compat.key_words(x))
    flat = np.ravel(whole)
    dtype = _dtype_in_a_step(x, whole)
    if flat.size <= SHOWN:
        numbers = ", ".join(map(str, flat.astype(dtype, copy=False)))
        return f"[{numbers}]" if whole.ndim else numbers
    if flat.size * dtype.itemsize > WHOLE:
        count = WHOLE // dtype.itemsize
        flat = np.concatenate([flat[: count // 2], flat[count // 2 :: max(2 * flat.size // count, 1)]])
    return hashlib.sha256(flat.astype(dtype, copy=False).tobytes()).hexdigest()[:16]


def _dtype_in_a_step(x: Any, whole: np.ndarray) -> np.dtype:
    """The dtype of the array that a step makes of an array of NumPy; of other values, that which they have there."""
    wide = isinstance(x, (np.ndarray, np.generic)) and whole.dtype in _compat.WIDE
    return np.dtype(jax.dtypes.canonicalize_dtype(whole.dtype)) if wide else whole.dtype
