"""Whether a scalar is a mean: to say what a sum of means over microbatches is."""

from __future__ import annotations

import math
from typing import Any

from . import _compat

_LINEAR = frozenset({"neg", "convert_element_type", "copy", "reshape", "squeeze", "name"})


def is_mean(jaxpr: Any, output: int) -> bool:
    """Whether a scalar result of a jaxpr is a mean over all elements of an array, up to a constant factor.

    Follows what made the result through calls and changes of dtype to a sum that is divided by the number of what it
    sums. Anything else is no mean, as far as this can see.

    Args:
      jaxpr: open or closed.
      output: position of the result.
    """
    parts = _compat.open_jaxpr(jaxpr)
    makers = {v: eqn for eqn in parts.eqns for v in eqn.outvars}
    atom: Any = parts.outvars[output]
    divided_by = 1.0
    while _compat.is_var(atom) and atom in makers:
        eqn: Any = makers[atom]
        name = eqn.primitive.name
        if _compat.is_jit(eqn):
            position = list(eqn.outvars).index(atom)
            inner = _compat.open_jaxpr(eqn.params["jaxpr"])
            if divided_by == 1.0 and inner.outvars[position] not in inner.invars:
                return is_mean(eqn.params["jaxpr"], position)
            return False
        if name == "reduce_sum":
            summed = math.prod(eqn.invars[0].aval.shape)
            return not eqn.outvars[0].aval.shape and summed > 1 and math.isclose(divided_by, summed, rel_tol=1e-5)
        if name in ("div", "mul") and not _compat.is_var(eqn.invars[1]):
            number = float(eqn.invars[1].val)
            divided_by *= number if name == "div" else 1 / number if number else math.inf
        elif name not in _LINEAR:
            return False
        atom = eqn.invars[0]
    return False
