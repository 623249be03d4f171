"""What equations are to those around them, which has its say in where they run."""

from __future__ import annotations

import math

from .. import _compat
from .._compat import Var
from .._program._calls import calls_back
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes
from ._constants import constants
from ._hoist import SMALL

NUMBER = 16  # bytes of the largest dtype


def shrinks(n: Node) -> bool:
    """Whether a node makes fewer elements than one of the values that it reads has: a sum, a slice, but no cast."""
    read, made = ([math.prod(_compat.shape(v)) for v in each] for each in (n.inputs, n.outputs))
    return n.task is None and max(read, default=0) > sum(made)


def latest_tasks(flat: FlatProgram) -> dict[Node, int]:
    """For each node where in the program the latest task is that it is or reads from; -1 without one.

    What is computed from a skip connection may stand after a task and still come from before it.
    """
    latest: dict[Node, int] = {}
    for i, n in enumerate(flat.nodes):
        producers = (flat.index.producer[v] for v in n.inputs if v in flat.index.producer)
        latest[n] = i if n.task is not None else max((latest.get(p, -1) for p in producers), default=-1)
    return latest


def summed_up(flat: FlatProgram) -> set[Node]:
    """Unmarked equations of forward passes of which nothing but numbers comes there: a penalty on weights.

    What is made for the backward pass alone does not count: that is where the gradient of the weights is.
    """
    found: set[Node] = set()
    kept: set[Node] = set()  # for the backward pass
    leaving, readers = flat.index.leaving, flat.index.readers
    for n in reversed(flat.nodes):
        if n.task is not None or n.backward or not leaving.isdisjoint(n.outputs):
            continue
        all_readers = [r for v in n.outputs for r in readers.get(v, ())]
        forward = [r for r in all_readers if not r.backward and r not in kept]
        if (is_number(n) and shrinks(n)) or (forward and found.issuperset(forward)):
            found.add(n)
        elif all_readers and not forward:
            kept.add(n)
    return found


def after_gradients(flat: FlatProgram) -> set[Node]:
    """What is computed outside of backward passes and loops from what they make: updates, norms of gradients."""
    found: set[Node] = set()
    for n in flat.nodes:
        if n.backward or n.loop is not None:
            continue
        made = [flat.index.producer.get(v) for v in n.inputs]
        if any(v in flat.index.made_by_loop for v in n.inputs) or any(
            p is not None and (p.backward or p in found) for p in made
        ):
            found.add(n)
    return found


def is_number(n: Node) -> bool:
    """Whether a node makes no more than a number."""
    return sum(nbytes(v.aval) for v in n.outputs) <= NUMBER


def small_nodes(flat: FlatProgram) -> set[Node]:
    """Unmarked equations that are cheap enough to compute wherever they are read: of small values, or of nothing."""
    inner = {c.inner for loop in flat.loops for c in loop.carries}
    index = flat.index
    small = set(constants(flat))

    def is_small_input(v: Var) -> bool:
        if v in index.producer:
            return index.producer[v] in small
        return v not in inner and v not in index.made_by_loop and nbytes(v.aval) <= SMALL

    for n in flat.nodes:
        if n.task is not None or not all(map(is_small_input, n.inputs)):
            continue
        if n.eqn.effects or flat.submesh_of(n) is not None or calls_back(n.eqn):
            continue
        if not n.inputs or sum(nbytes(v.aval) for v in n.outputs) <= SMALL:
            small.add(n)
    return small - _summed_where_given(flat, small)


def _summed_where_given(flat: FlatProgram, small: set[Node]) -> set[Node]:
    """Those that make less of arguments that are on a submesh, such as the norm of a gradient: the number goes elsewhere.

    Not in loops, where the argument crosses once a call, and the number would in each microbatch.
    """
    given = {v for v in flat.pins.inputs if nbytes(v.aval) > NUMBER}
    found: set[Node] = set()
    for n in flat.nodes if given else ():
        if n in small and n.loop is None and not given.isdisjoint(n.inputs):
            if shrinks(n):
                found.add(n)
            else:
                given.update(n.outputs)
    for n in reversed(flat.nodes if found else ()):
        readers = [r for v in n.outputs for r in flat.index.readers.get(v, ())]
        kept = not readers or not flat.index.leaving.isdisjoint(n.outputs)
        if n in small and not kept and found.issuperset(readers) and not given.isdisjoint(n.inputs):
            found.add(n)
    return found
