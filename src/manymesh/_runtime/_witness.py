"""Which result of a run tells that it is finished."""

from __future__ import annotations

import math

from .. import _compat
from .._plan._instructions import Run
from .._program import Program
from ._exchange import is_key


def witness_of(program: Program, run: Run, donated: frozenset[int], kept: frozenset[int | None]) -> int | None:
    """The result by which it is told that a run is finished; None if it has none.

    One that nobody donates in this call, better one that the next call cannot donate either; among those the smallest.
    """
    outvars, slots = program.fragments[run.fragment].outvars, run.outputs
    possible = [k for k in range(len(slots)) if not is_key(_compat.dtype(outvars[k]))]
    return min(
        possible,
        key=lambda k: (slots[k] in donated, slots[k] in kept, math.prod(_compat.shape(outvars[k]))),
        default=None,
    )
