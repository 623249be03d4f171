"""States that lie on another submesh than their next values are made on, or than they are read on."""

from __future__ import annotations

from collections import defaultdict

from .. import _compat
from .._compat import Var
from .._program._flat import FlatProgram
from .._program._placement import Placement


def states_apart(flat: FlatProgram, placement: Placement) -> dict[Var, int]:
    """States whose next value is made on another submesh than they are, or that are read elsewhere -> where both should be.

    It is where the next value was made, if the state is read there, or nowhere. What tasks read has its home from the
    start; this is about the others, such as the step size that an optimizer estimates.
    """
    read: dict[Var, set[int]] = defaultdict(set)
    for n in flat.nodes:
        for v in n.inputs:
            read[v].update(placement.node[n])
    apart: dict[Var, int] = {}
    for v, o in flat.pins.states:
        out, home = flat.outvars[o], placement.home[v]
        if _compat.is_var(out) and v not in flat.pins.inputs:
            made = placement.home.get(out, 0)
            needed = read[v].union(*(read[inner] for inner in flat.index.continues_as.get(v, ())))
            # A copy of what reads it may be all that is somewhere else.
            if home != made or (needed and home not in needed):
                elsewhere = home if home in needed else min(needed, default=home)
                apart[v] = made if made in needed or not needed else elsewhere
    return apart
