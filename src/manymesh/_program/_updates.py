"""What the gradients of a step are made into: updates, new parameters, new moments."""

from __future__ import annotations

from .. import _compat
from .._compat import Var
from ._fragments import Program


def of_gradients(program: Program) -> set[Var]:
    """What a backward pass makes, and what is computed of that: in a step that trains twice, the parameters of the second time."""
    back = {f.loop for f in program.fragments if f.kind != "F"}
    found = {v for f in program.fragments if f.kind != "F" and f.loop is None for v in f.outvars}
    for k, loop in enumerate(program.loops):
        if k in back:
            found.update(final for *_, final in loop.carries)
            found.update(v for _, outer in loop.ys for v in outer if _compat.is_var(v))
    for f in program.fragments:
        for eqn in _compat.open_jaxpr(f.jaxpr).eqns if f.loop is None else ():
            if not found.isdisjoint(v for v in eqn.invars if _compat.is_var(v)):
                found.update(v for v in eqn.outvars if _compat.is_var(v))
    return found
