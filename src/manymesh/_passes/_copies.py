"""One value that is several results: each lies as it is asked to.

The gradient that a step returns may be a state of its optimizer too, the same variable. On one submesh a value has one
layout; so that ``out_shardings`` of the one result say nothing of the other, the other becomes a copy.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from jax import lax
from jax.sharding import NamedSharding

from .. import _compat
from .._compat import Var
from .._program._flat import FlatProgram
from .._program._nodes import Node
from .._program._rewrite import trace_nodes


def copy_results(flat: FlatProgram) -> FlatProgram:
    """Copies results that are one value and wanted in several layouts where it is made. Needs the placement.

    A value that replaces a state stays what it is: it lies as the state. What is wanted on another submesh is sent there,
    and needs no copy.
    """
    assert flat.placement is not None, "layouts belong to submeshes"
    pins, home, submeshes = flat.pins, flat.placement.home, flat.placement.submeshes
    states = {o for _, o in pins.states}
    made = flat.index.producer.keys() | flat.index.made_by_loop.keys()
    lies_as: dict[Var, dict[NamedSharding | None, Var]] = defaultdict(dict)  # None: as the state that it replaces
    outvars, nodes = list(flat.outvars), list[Node]()
    for o in (*sorted(states), *pins.output_shardings):
        v, asked = flat.outvars[o], pins.output_shardings.get(o)
        if not _compat.is_var(v) or v not in made or (asked is not None and asked.mesh != submeshes[home[v]]):
            continue
        names = lies_as[v]
        if asked not in names:
            names[asked] = v
            if len(names) > 1:
                copies, (names[asked],) = trace_nodes(lax.optimization_barrier, [v])
                nodes += copies
        outvars[o] = names[asked]
    if not nodes:
        return flat
    return replace(flat, nodes=(*flat.nodes, *nodes), outvars=tuple(outvars), placement=None)
