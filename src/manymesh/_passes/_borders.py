"""What the borders of a task say of what enters and leaves it."""

from __future__ import annotations

from .. import _compat
from .._compat import Eqn, OpenJaxpr, Var
from .._mark import border_p
from .._program._flat import Result

# (mark, value) -> the operands that a call reads with it: (number, what it is).
Entered = dict[tuple[object, Var], set[tuple[int, Var]]]


def results_of(marked: OpenJaxpr, eqn: Eqn, call: tuple[object, ...], entered: Entered) -> dict[Var, Result]:
    """Which results of its task an equation makes.

    What differentiation added has no number, and an operand that it left out is missing.

    Args:
      marked: what the equation computes, with its borders.
      eqn: the equation in the flat program.
      call: its mark, and the iterations that it is in.
      entered: what rounds of a scan have in common is an equation before them, with the borders of weights; what such
        equations make is added to it, and what the calls after them read is found in it.
    """
    mark = call[0]
    borders = [e for e in marked.eqns if e.primitive is border_p]
    actual = dict(zip(marked.invars, eqn.invars, strict=True))
    entering = ((e.params.get("operand"), e.invars[0]) for e in borders)
    operands = {k: actual[v] for k, v in entering if k is not None and _compat.is_var(v) and v in actual}
    number = {e.outvars[0]: e.params["result"] for e in borders if "result" in e.params}
    behind = {e.outvars[0]: e.invars[0] for e in borders if "operand" in e.params}
    read = {(k, x) for k, x in operands.items() if _compat.is_var(x)}
    made = [(v, r) for v, r in zip(eqn.outvars, marked.outvars, strict=True) if _compat.is_var(v) and _compat.is_var(r)]
    if not any(r in number for _, r in made):
        for v, r in made:
            start = behind.get(r, r)
            through = actual.get(start) if _compat.is_var(start) else None
            if through is None:
                entered[mark, v] = read
            elif _compat.is_var(through):  # a weight as it is, which other calls may read as another operand
                entered.setdefault((mark, through), set()).update(pair for pair in read if pair[1] is through)
    inside = {x for _, x in read}
    for x in eqn.invars:
        which = entered.get((mark, x), set()) if _compat.is_var(x) and x not in inside else set()
        if len(which) == 1 or all(of is not x for _, of in which):
            for k, of in which:
                operands.setdefault(k, of)
    return {v: Result((*call, number[r]), operands) for v, r in made if r in number}
