"""What sums over the batch, and what is linear in such a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ... import _compat
from ..._compat import Atom, Eqn
from ..._mark import box_constraint_p
from ..._program._nodes import shape_and_dtype
from .._sums import exponents
from ._dims import Frame
from ._links import SCATTERS, shape_of, updated_dims

# Linear in these operands together (None: in all); the others are no part of the sum.
TOGETHER: dict[str, tuple[int, ...] | None] = {
    "add": None,
    "add_any": None,
    "sub": None,
    "concatenate": None,
    "stack": None,
    "pad": (0, 1),
    "dynamic_update_slice": (0, 1),
    **dict.fromkeys(SCATTERS, (0, 2)),
}
# Linear in the first operand.
FIRST = frozenset(
    (
        "neg", "copy", "copy_p", "convert_element_type", "transpose", "reshape", "squeeze",
        "broadcast_in_dim", "reduce_sum", "slice", "rev", "cumsum", "real", "imag", "reduce_precision", "div",
        "dynamic_slice", "gather", "split", "unstack", "sharding_constraint", "manymesh_constraint",
    )
)  # fmt: skip
# Bits of the integers that nobody counts to the end of.
_COUNTS = 32
# Linear in one of two operands.
EITHER = frozenset(("mul", "dot_general", "conv_general_dilated"))


def linear_operands(eqn: Eqn) -> tuple[int, ...]:
    """The operands in which an equation is linear together; empty if that holds for one operand at most."""
    if eqn.primitive.name == "select_n":
        return tuple(range(1, len(eqn.invars)))
    linear = TOGETHER.get(eqn.primitive.name, ())
    return tuple(range(len(eqn.invars))) if linear is None else linear


def is_linear_in(eqn: Eqn, at: Sequence[int], is_zero: Callable[[Atom], bool]) -> bool:
    """Whether an equation is linear in some operands together, where others that are part of the sum have to be zero."""
    if eqn.primitive.name == "reduce_precision":
        return False
    if together := linear_operands(eqn):
        return set(at) <= set(together) and all(k in at or is_zero(eqn.invars[k]) for k in together)
    if len(at) != 1:
        return False
    in_first = at[0] == 0 and (is_linear_in_first(eqn) or eqn.primitive is box_constraint_p)
    return eqn.primitive.name in EITHER or in_first


def summed_dims(eqn: Eqn) -> list[list[tuple[int, int]]]:
    """Groups of (operand, dimension) that run together and are summed over; empty if nothing is."""
    name = eqn.primitive.name
    if name == "dot_general":
        (left, right), _ = eqn.params["dimension_numbers"]
        return [[(0, a), (1, b)] for a, b in zip(left, right, strict=True)]
    if name == "reduce_sum":
        return [[(0, d)] for d in eqn.params["axes"]]
    if name in SCATTERS:
        batched = eqn.params["dimension_numbers"].scatter_indices_batching_dims
        return [[(1, i), (2, d)] for i, d in enumerate(updated_dims(eqn)) if i not in batched]
    if name == "conv_general_dilated" and eqn.params["feature_group_count"] == 1:
        numbers = eqn.params["dimension_numbers"]
        return [[(0, numbers.lhs_spec[1]), (1, numbers.rhs_spec[1])]]
    return []


def is_linear_in_first(eqn: Eqn) -> bool:
    """Whether an equation, applied to the terms of a sum in its first operand, gives terms of its result, up to rounding."""
    name = eqn.primitive.name
    dtype, wholes, floats = shape_and_dtype(eqn.invars[0])[1], ("i", "u"), ("f", "V", "c")
    old = _kind(dtype)
    if name == "convert_element_type":
        new = _kind(eqn.params["new_dtype"])
        wider = new in floats or _bits(eqn.params["new_dtype"]) > _bits(dtype)
        if old == "u" and wider:
            return False  # a term below zero is a large number
        if old == "i" and _bits(dtype) < _COUNTS and wider:
            return False  # the sum may be too large for its type, and its terms not
        if old in wholes:
            return new in (*wholes, *floats)
        # Terms may be too large for a type that ends earlier, and their sum not.
        return old in floats and new in floats and exponents(eqn.invars[0]) <= exponents(eqn.outvars[0])
    if name == "div":  # of integers it rounds
        return old in floats
    if name == "gather" and "FILL" in str(eqn.params["mode"]):  # each term would bring the filling
        fill = eqn.params["fill_value"]
        return fill == 0 if fill is not None else old in floats
    return name in FIRST


def _kind(dtype: Any) -> str:
    """NumPy's letter for a dtype, of integers of a few bits as well."""
    for letter, integers in (("u", jnp.unsignedinteger), ("i", jnp.signedinteger)):
        if jnp.issubdtype(dtype, integers):
            return letter
    return getattr(dtype, "kind", "key")


def _bits(dtype: Any) -> int:
    """The bits of a number; 0 of what is no integer."""
    return int(jnp.iinfo(dtype).bits) if jnp.issubdtype(dtype, jnp.integer) else 0  # type: ignore[no-untyped-call]


def mixes_groups(eqn: Eqn, at: int) -> bool:
    """Whether a new dimension of an operand would lie between the groups of a convolution and their features.

    JAX maps it only in part, and XLA gathers what is sharded over that dimension.
    """
    if eqn.primitive.name != "conv_general_dilated":
        return False
    return bool(eqn.params["batch_group_count"] > 1 or (at == 1 and eqn.params["feature_group_count"] > 1))


def is_zero(frame: Frame, v: Atom) -> bool:
    """Whether a value is known to be all zeros, also where a call hands it in or makes it."""
    while _compat.is_var(v):
        i = frame.producer.get(v)
        if i is None:
            if frame.up is None or v not in frame.invars or frame.up[0].eqns[frame.up[1]].primitive.name == "scan":
                return False
            k = frame.invars.index(v)
            frame, at = frame.up
            v = frame.eqns[at].invars[k]
        elif i in frame.inner and frame.eqns[i].primitive.name != "scan":
            v, frame = frame.inner[i].outvars[frame.eqns[i].outvars.index(v)], frame.inner[i]
        elif frame.eqns[i].primitive.name in ("broadcast_in_dim", "convert_element_type", "copy"):
            v = frame.eqns[i].invars[0]
        else:
            return False
    return isinstance(v, _compat.Literal) and not shape_of(v) and bool(v.val == 0)
