"""What the program says without any data: the places at which it reads of its stacked weights, mostly.

``ws[jnp.int32(3)]``, ``lax.dynamic_index_in_dim(ws, 3)`` and ``ws[i]`` in a loop over layers compute their index, though of
numbers alone. Which layer it is has to be known to see where the layer is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import Atom, Eqn, Var

Array = np.ndarray[Any, Any]

LARGEST = 4096  # entries of an array of indices; of one that has the same number everywhere, any number


class Known:
    """The integers and truth values of a program that depend on no argument, and arrays of one number throughout."""

    def __init__(self) -> None:
        self._values: dict[Var, Array] = {}

    def __call__(self, atom: Atom) -> Array | None:
        """What a value is; None if that is not known."""
        if isinstance(atom, _compat.Literal):
            return np.asarray(atom.val, _compat.dtype(atom))
        return self._values.get(atom)

    def is_zero(self, atom: Atom) -> bool:
        """Whether a value is known to be zero throughout, and not a negative one."""
        value = self(atom)
        return value is not None and value.size > 0 and not any(value.strides) and not any(value.flat[0].tobytes())

    def hold(self, v: Var, const: object) -> None:
        """Keeps what a constant is. An array on devices is read only where every process could."""
        if isinstance(const, jax.Array) and (isinstance(const, jax.core.Tracer) or not const.is_fully_addressable):
            return
        if _counts(v) and np.prod(_compat.shape(v)) <= LARGEST:
            self._values[v] = np.asarray(const)

    def learn(self, eqn: Eqn) -> None:
        """Keeps what the result of an equation is, where that follows from what is known."""
        rule = _RULES.get(eqn.primitive.name)
        if rule is None or not _compat.is_var(eqn.outvars[0]):
            return
        (out,) = eqn.outvars
        spread = eqn.primitive.name == "broadcast_in_dim" and not _compat.shape(eqn.invars[0])
        if not spread and (not _counts(out) or np.prod(_compat.shape(out)) > LARGEST):
            return
        operands = [self(v) for v in eqn.invars]
        if any(x is None for x in operands):
            return
        with np.errstate(all="ignore"):  # overflow wraps around
            value = rule(eqn.params, *operands)
        if value is not None:
            self._values[out] = value.astype(_compat.dtype(out), copy=False)


def _counts(v: Var) -> bool:
    """Whether a value is of integers or of truth values."""
    dtype = getattr(v.aval, "dtype", None)
    return dtype is not None and (jnp.issubdtype(dtype, np.integer) or jnp.issubdtype(dtype, np.bool_))


def _iota(params: Mapping[str, Any]) -> Array:
    shape, dim = params["shape"], params["dimension"]
    numbers = np.arange(shape[dim], dtype=params["dtype"])
    return np.broadcast_to(numbers.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)


def _broadcast(params: Mapping[str, Any], x: Array) -> Array:
    shape, dims = params["shape"], params["broadcast_dimensions"]
    return np.broadcast_to(x.reshape([x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]), shape)


def _slice(params: Mapping[str, Any], x: Array) -> Array:
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _dynamic_slice(params: Mapping[str, Any], x: Array, *at: Array) -> Array:
    sizes = params["slice_sizes"]
    starts = [min(max(int(a), 0), n - size) for a, size, n in zip(at, sizes, x.shape, strict=True)]
    return x[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]


def _div(_params: Mapping[str, Any], a: Array, b: Array) -> Array | None:
    """Towards zero."""
    if not np.all(b):
        return None
    floor: Array = a // b
    towards_zero: Array = floor + ((floor * b != a) & ((a < 0) != (b < 0)))
    return towards_zero


def _convert(params: Mapping[str, Any], x: Array) -> Array | None:
    """Fractions are cut off. What is too large for whole numbers, XLA makes the largest of them; NumPy does otherwise."""
    new: Array = x.astype(params["new_dtype"])
    cuts = jnp.issubdtype(x.dtype, np.floating) and new.dtype != np.bool_
    return None if cuts and not np.array_equal(new.astype(x.dtype), np.trunc(x)) else new


def _select(_params: Mapping[str, Any], which: Array, *cases: Array) -> Array:
    stacked = np.stack(cases)
    number = np.broadcast_to(np.clip(which.astype(np.intp), 0, len(cases) - 1), stacked.shape[1:])
    chosen: Array = np.take_along_axis(stacked, number[None], 0)[0]
    return chosen


_ARITHMETIC = {
    "abs": np.abs, "add": np.add, "and": np.bitwise_and, "eq": np.equal, "ge": np.greater_equal, "gt": np.greater,
    "le": np.less_equal, "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply, "ne": np.not_equal,
    "neg": np.negative, "not": np.invert, "or": np.bitwise_or, "sign": np.sign, "sub": np.subtract, "xor": np.bitwise_xor,
}  # fmt: skip


def _arithmetic(of: Callable[..., Array]) -> Callable[..., Array]:
    return lambda _params, *xs: of(*xs)


# What an equation of these says: its parameters and operands -> its result, None where that is not defined.
_RULES: dict[str, Callable[..., Array | None]] = {
    **{name: _arithmetic(of) for name, of in _ARITHMETIC.items()},
    "broadcast_in_dim": _broadcast,
    "clamp": lambda _params, low, x, high: np.minimum(np.maximum(x, low), high),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "convert_element_type": _convert,
    "copy": lambda _params, x: x,
    "div": _div,
    "dynamic_slice": _dynamic_slice,
    "iota": _iota,
    "rem": lambda _params, a, b: np.fmod(a, b) if np.all(b) else None,
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "select_n": _select,
    "slice": _slice,
    "squeeze": lambda params, x: x.squeeze(params["dimensions"]),
    "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
}
