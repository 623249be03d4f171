"""Conditionals over values of several submeshes: each branch where its values are.

``optax.MultiSteps``, say, updates every parameter inside one ``lax.cond``. As one equation it would pull them all to one
submesh in every step.
"""

from __future__ import annotations

from .._jaxpr._flatten import open_conditional
from .._jaxpr._nodes import Flat, Node, nbytes
from .._mark import Recording
from ._place import SMALL, Placement


def spread_conditionals(flat: Flat, where: Placement, record: Recording) -> bool:
    """Opens, in place, every conditional whose values are on several submeshes.

    Both branches then run, and the results are selected; a conditional that one submesh holds stays as it is.

    Returns:
      Whether anything changed; placement is then taken anew.
    """
    found = [n for n in flat.nodes if n.task is None and n.eqn.primitive.name == "cond" and _spans(n, flat, where)]
    for node in found:
        open_conditional(flat, node, record)
    return bool(found)


def _spans(node: Node, flat: Flat, where: Placement) -> bool:
    """Whether values that are worth a thought come from, or go to, more than one submesh."""
    large = {v for v in node.inputs if nbytes(v.aval) > SMALL and v in where.home}
    made = {v for v in node.outputs if nbytes(v.aval) > SMALL}
    readers = {s for n in flat.nodes if not made.isdisjoint(n.inputs) for s in where.node[n]}
    return len({where.home[v] for v in large} | (readers if made else set())) > 1
