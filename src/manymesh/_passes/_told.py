"""Numbers that a microbatch tells of its gradients: norms, tests for what is not finite."""

from __future__ import annotations

from dataclasses import replace

from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes, nodes_where
from ._hoist import SMALL
from ._roles import is_number, shrinks


def follow_gradients(flat: FlatProgram) -> FlatProgram:
    """Counts what only tells something of gradients as backward: it goes to earlier stages, as they do.

    The user computes it after the gradient, outside of it, so that JAX does not say so. As a part of a forward pass it would
    go on to the last stage, and each microbatch would wait for the first one's gradient there.
    """
    after: dict[Node, bool] = {}  # what reads gradients, unmarked -> whether there is less of it
    for n in flat.nodes:
        if n.task is None and n.loop is not None and not n.backward and not n.eqn.effects:
            made = [flat.index.producer[v] for v in n.inputs if v in flat.index.producer]
            of = [after.get(p, False) for p in made if p.loop == n.loop and (p.backward or p in after)]
            if of:
                after[n] = all(of) or shrinks(n) or is_number(n)
    carried = {c.out for loop in flat.loops for c in loop.carries}
    told: dict[Node, list[Node]] = {}
    for n in reversed(flat.nodes):
        if after.get(n) and carried.isdisjoint(n.outputs) and sum(nbytes(v.aval) for v in n.outputs) <= SMALL:
            readers = [r for v in n.outputs for r in flat.index.readers.get(v, ())]
            if all(r in told or (r in after and not carried.isdisjoint(r.outputs)) for r in readers):
                told[n] = [replace(n, backward=True)]
    return replace(flat, nodes=nodes_where(flat.nodes, told), placement=None) if told else flat
