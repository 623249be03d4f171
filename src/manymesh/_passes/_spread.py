"""Conditionals over values of several submeshes: each branch where its values are.

``optax.MultiSteps``, say, updates every parameter inside one ``lax.cond``. As one equation it would pull them all to one
submesh in every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .._compat import Atom, Var
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes, nodes_where
from .._program._rewrite import rename
from ._flatten import open_conditional
from ._hoist import SMALL


def spread_conditionals(flat: FlatProgram) -> FlatProgram:
    """Opens every conditional whose values are on several submeshes. Needs the placement.

    What is cheap of all branches then runs, the rest where it is in the branch that is taken; a conditional that one submesh holds stays as it is.
    """
    return open_conditionals(
        flat, [n for n in flat.nodes if n.task is None and n.primitive == "cond" and _spans(n, flat)]
    )


def open_conditionals(flat: FlatProgram, conditionals: Iterable[Node]) -> FlatProgram:
    """Replaces conditionals by their branches and selections between the results."""
    opened: dict[Node, tuple[Node, ...]] = {}
    alias: dict[Var, Atom] = {}
    consts = dict(flat.consts)
    for n in conditionals:
        found = open_conditional(flat, n)
        opened[n] = found.nodes
        alias.update(found.alias)
        consts.update(found.consts)
    if not opened:
        return flat
    invars = (*consts, *flat.invars[len(flat.consts) :])
    nodes = nodes_where(flat.nodes, opened)
    return rename(replace(flat, invars=invars, nodes=nodes, consts=consts, placement=None), alias)


def _spans(node: Node, flat: FlatProgram) -> bool:
    """Whether values that are worth a thought come from, or go to, more than one submesh."""
    placement, readers = flat.placement, flat.index.readers
    assert placement is not None, "conditionals are opened by where their values are"
    places = {placement.home[v] for v in node.inputs if nbytes(v.aval) > SMALL and v in placement.home}
    for v in node.outputs:
        if nbytes(v.aval) > SMALL:
            places.update(s for n in readers.get(v, ()) for s in placement.node[n])
    return len(places) > 1
