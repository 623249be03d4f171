"""What the borders of a task say of what enters and leaves it."""

from __future__ import annotations

from .. import _compat
from .._compat import Eqn, OpenJaxpr, Var
from .._mark import border_p
from .._program._flat import Result


def results_of(marked: OpenJaxpr, eqn: Eqn, call: tuple[object, ...]) -> dict[Var, Result]:
    """Which results of its task an equation makes.

    What differentiation added has no number, and an operand that it left out is missing.

    Args:
      marked: what the equation computes, with its borders.
      eqn: the equation in the flat program.
      call: its mark, and the iterations that it is in.
    """
    borders = [e for e in marked.eqns if e.primitive is border_p]
    actual = dict(zip(marked.invars, eqn.invars, strict=True))
    entering = ((e.params.get("operand"), e.invars[0]) for e in borders)
    operands = {k: actual[v] for k, v in entering if k is not None and _compat.is_var(v) and v in actual}
    number = {e.outvars[0]: e.params["result"] for e in borders if "result" in e.params}
    made = zip(eqn.outvars, marked.outvars, strict=True)
    return {
        v: Result((*call, number[r]), operands)
        for v, r in made
        if _compat.is_var(v) and _compat.is_var(r) and r in number
    }
