"""What makes less of a sum is applied to its terms, each where it is made.

The gradient of a position bias that several stages read is the sum of what they send, a number for each pair of tokens; of it a
table of a few numbers gets its own, by adding up those that belong together. That is linear: each stage does it for its part,
and sends a table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from .._compat import Var
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes, nodes_where
from .._program._placement import Placement
from .._program._rewrite import making, substitute, trace_nodes
from ._again import Worker
from ._hoist import SMALL, stays
from ._sums import exponents, is_addition, is_zero, summed, terms_of_sum
from ._unreduced._linear import is_linear_in


def shrink_where_made(flat: FlatProgram) -> FlatProgram:
    """Applies what is linear in sums over submeshes, and makes less of them, to their terms. Needs the placement."""
    assert flat.placement is not None, "what is sent is told by where it is made"
    producer, uses, placement = flat.index.producer, flat.index.uses, flat.placement
    done: set[Node] = set()
    changed: dict[Node, list[Node]] = {}
    for root in reversed(flat.nodes):
        if root in done or not is_addition(root) or nbytes(root.outputs[0].aval) <= SMALL:
            continue
        terms, nodes = terms_of_sum(root.outputs[0], producer, uses, root.loop)
        done.update(nodes)
        groups: dict[int, list[Var]] = defaultdict(list)
        for t in terms:
            groups[placement.home.get(t, -1)].append(t)
        if len(groups) < 2 or -1 in groups or any(n.guard for n in nodes):
            continue
        chain = _cheapest(root, flat, placement, sorted(groups))
        if chain:
            changed.update({n: [] for n in (*nodes, *chain)})
            changed[chain[-1]] = _contracted(root, chain, dict(sorted(groups.items())), placement)
            done.update(chain)
    if not changed:
        return flat
    return replace(flat, nodes=nodes_where(flat.nodes, changed), placement=None)


def _cheapest(root: Node, flat: FlatProgram, placement: Placement, at: Sequence[int]) -> list[Node]:
    """The equations after a sum that are linear in it, up to where the terms are smallest; empty if that saves nothing.

    Args:
      root: the last addition of the sum.
      flat, placement: the program, and where it is.
      at: where the terms are.
    """
    index, worker = flat.index, Worker(flat, placement)
    v = root.outputs[0]
    sent = (len(at) - 1) * nbytes(v.aval)
    chain: list[Node] = []
    best = others = 0  # bytes of what else the equations read, which would have to be brought to all terms
    while index.uses[v] == 1 and v not in index.leaving and (readers := index.readers.get(v, ())):
        n = readers[0]
        if n.loop != root.loop or n.guard or stays(n) or len(n.outputs) != 1 or not _is_linear(n, v, flat):
            break
        chain.append(n)
        others += sum(worker.cost(x, k) for x in n.inputs if x is not v for k in at)
        (v,) = n.outputs
        if (now := (len(at) - 1) * nbytes(v.aval) + others) < sent:
            best, sent = len(chain), now
    return chain[:best]


def _is_linear(n: Node, v: Var, flat: FlatProgram) -> bool:
    """Whether an equation is linear in an operand, of floating-point numbers."""
    at = [k for k, x in enumerate(n.eqn.invars) if x is v]
    if exponents(v) == 0 or exponents(n.outputs[0]) < exponents(v) or len(at) != 1:
        return False
    return is_linear_in(n.eqn, at, lambda x: is_zero(x, flat.index.producer))


def _contracted(root: Node, chain: Sequence[Node], groups: dict[int, list[Var]], placement: Placement) -> list[Node]:
    """The nodes that add up the terms of each submesh, make less of that there, and add up what comes of it."""
    made: list[Node] = []
    parts: list[Var] = []
    for at, terms in groups.items():
        mesh = placement.submeshes[at]
        nodes, (part,) = trace_nodes(lambda *xs: summed(xs), terms, loop=root.loop, backward=root.backward, mesh=mesh)
        made += nodes
        (whole,) = root.outputs
        for n in chain:
            made.append(replace(n, eqn=substitute(n.eqn, {whole: part}), mesh=mesh, colocated_with=None))
            (part,), (whole,) = made[-1].outputs, n.outputs
        parts.append(part)
    nodes, _ = trace_nodes(lambda *xs: summed(xs), parts, loop=root.loop, backward=root.backward)
    nodes[-1] = making(nodes[-1], chain[-1].outputs)
    return [*made, *nodes]
