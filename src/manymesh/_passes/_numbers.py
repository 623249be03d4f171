"""Numbers that loops start from are there before the step.

What an accumulator of a loss holds at first is a number that the program says. Made by an equation it is a kernel of its
own, in every step, and often all that keeps the fragment before the loop from being that of another stage.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .._compat import Literal, Var
from .._program._flat import FlatProgram
from .._program._nodes import Node, shape_and_dtype


def hold_numbers(flat: FlatProgram) -> FlatProgram:
    """Makes constants of the program of the numbers that its loops start from."""
    consts = dict(filter(None, map(_number, flat.nodes)))
    if not consts:
        return flat
    count = len(flat.consts)
    return replace(
        flat,
        invars=(*flat.invars[:count], *consts, *flat.invars[count:]),
        consts={**flat.consts, **consts},
        nodes=tuple(n for n in flat.nodes if consts.keys().isdisjoint(n.outputs)),
        placement=None,
    )


def _number(n: Node) -> tuple[Var, np.ndarray] | None:
    """What a node that only holds a number for a loop makes, and the number."""
    if not n.layout_follows_loop or n.primitive != "optimization_barrier" or len(n.eqn.outvars) != 1:
        return None
    (value,), (out,) = n.eqn.invars, n.outputs
    if not isinstance(value, Literal) or np.shape(value.val):
        return None
    return out, np.asarray(value.val, shape_and_dtype(out)[1])
