"""Which equations may run although nobody wants what they make: they are cheap, end, and nobody sees that they ran."""

from __future__ import annotations

from .. import _compat
from .._compat import Eqn

_HARMLESS = frozenset(
    (
        # Elementwise.
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
        "clamp", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "erf", "erf_inv",
        "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "log", "log1p",
        "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or",
        "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub",
        "tan", "tanh", "xor",
        # Shapes and pieces.
        "bitcast_convert_type", "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice", "empty",
        "gather", "iota", "pad", "reshape", "rev", "slice", "split", "squeeze", "stack", "tile",
        "transpose", "unstack",
        # Along an axis.
        "argmax", "argmin", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "reduce_and", "reduce_max",
        "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor",
        # Keys, which are small, and are made where they are read.
        "random_clone", "random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap", "threefry2x32",
        # What only says something about a value.
        "manymesh_border", "manymesh_box", "manymesh_constraint", "name", "optimization_barrier", "reshard",
        "sharding_constraint",
    )
)  # fmt: skip


def is_harmless(eqn: Eqn) -> bool:
    """Whether an equation may run in vain. Control flow may not: a loop need not end where nobody checked that it does."""
    if eqn.effects:
        return False
    body = _compat.called_jaxpr(eqn)
    if body is not None:
        return all(is_harmless(e) for e in _compat.open_jaxpr(body).eqns)
    return eqn.primitive.name in _HARMLESS
