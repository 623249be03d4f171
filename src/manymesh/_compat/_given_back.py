"""Values that a call gives back as it got them: in a trace they are other objects than those that went in."""

from __future__ import annotations

from typing import Any

from jax._src import core

from ._jaxprs import called_jaxpr, is_var, open_jaxpr


def before_calls(value: Any) -> Any:
    """The value that a call of a jitted function got, where this is one that it gave back as it came; else this."""
    while (eqn := getattr(value, "parent", None)) is not None:
        operand = _operand_given_back(eqn, value.val)
        if operand is None:
            break
        value = core.full_lower(eqn.in_tracers[operand])  # what a function closes over is one from outside
    return value


def _operand_given_back(eqn: Any, result: Any) -> int | None:
    """Which of an equation's operands a result is, as it came."""
    if getattr(eqn.primitive, "is_identity", False):
        return 0
    body = called_jaxpr(eqn)
    if body is None:
        return None
    inner = open_jaxpr(body)
    v = inner.outvars[next(k for k, out in enumerate(eqn.outvars) if out is result)]
    while is_var(v) and v not in inner.invars:
        maker = next((e for e in inner.eqns if v in e.outvars), None)
        operand = _operand_given_back(maker, v) if maker is not None else None
        if maker is None or operand is None:
            return None
        v = maker.invars[operand]
    return inner.invars.index(v) if is_var(v) else None
