"""What every microbatch would compute alike: to its one reader, or out of the loop."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from .._compat import Var
from .._program._calls import calls_back
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes
from ._pieces import VIEWS

# Bytes of what may be computed on every submesh that reads it: a random key, a step counter or a learning rate fits.
SMALL = 1024


def hoist_loop_invariants(flat: FlatProgram) -> FlatProgram:
    """Moves what every microbatch would compute alike.

    An unmarked equation of a loop's body that depends on nothing, or a small one that depends only on values from
    outside, takes the phase of its only reader, so that the two fuse. With several readers it leaves the loop and is
    computed once.
    """
    changed: dict[Node, Node] = {}
    for i in range(len(flat.loops)):
        changed.update(_hoist(flat, i))
    if not changed:
        return flat
    return replace(flat, nodes=tuple(changed.get(n, n) for n in flat.nodes), placement=None)


def _hoist(flat: FlatProgram, loop: int) -> dict[Node, Node]:
    """The nodes of one body that change, and what becomes of them."""
    index = flat.index
    invariant: set[Var] = set()
    candidates: list[Node] = []
    for n in index.bodies[loop]:
        if stays(n) or any(v in index.leaving for v in n.outputs):
            continue
        outside = all(index.scope.get(v) != loop or v in invariant for v in n.inputs)
        small = sum(nbytes(v.aval) for v in n.outputs) <= SMALL
        if outside and (small or not n.inputs):
            invariant.update(n.outputs)
            candidates.append(n)
    readers = {n: list(dict.fromkeys(r for v in n.outputs for r in index.readers.get(v, ()))) for n in candidates}
    backward = {n: n.backward for n in candidates}
    for n in reversed(candidates):
        if len(readers[n]) == 1 and readers[n][0].loop == loop:
            (reader,) = readers[n]
            backward[n] = backward.get(reader, reader.backward)
    hoisted: set[Var] = set()
    changed: dict[Node, Node] = {}
    for n in candidates:
        if len(readers[n]) != 1 and all(v not in invariant or v in hoisted for v in n.inputs):
            changed[n] = replace(n, loop=None, backward=False)
            hoisted.update(n.outputs)
        elif backward[n] != n.backward:
            changed[n] = replace(n, backward=backward[n])
    return changed


def stays(n: Node) -> bool:
    """Whether it counts how often a node runs."""
    return n.task is not None or bool(n.eqn.effects) or calls_back(n.eqn)


def cross_once(flat: FlatProgram) -> FlatProgram:
    """Moves out of a loop what every microbatch would compute alike, and send or have sent to it. Needs the placement.

    A part of a weight that lies elsewhere, say, is cut there then, crosses once a call, and is there for all microbatches.
    """
    moved: dict[Node, Node] = {}
    for i in range(len(flat.loops)):
        moved |= {n: _moved(n) for n in _crossing(flat, i)}
    if not moved:
        return flat
    return replace(flat, nodes=tuple(moved.get(n, n) for n in flat.nodes), placement=None)


def _moved(n: Node) -> Node:
    """A node outside of its loop; what takes a weight apart there is no reader of all of it."""
    return replace(n, loop=None, backward=False, unstacks=n.primitive in VIEWS)


def _crossing(flat: FlatProgram, loop: int) -> set[Node]:
    """The nodes of a body that depend on nothing in it, as far as what they make, or more that they read, crosses.

    What takes the same value apart goes along: where the value should be is seen from all of its parts.
    """
    index, placement = flat.index, flat.placement
    assert placement is not None, "what crosses is told by where it is made and read"
    sources: dict[Var, frozenset[Var]] = {}  # what such a node makes -> the values from outside that it comes from
    found: set[Node] = set()
    views: dict[frozenset[Var], list[Node]] = defaultdict(list)
    for n in index.bodies[loop]:
        if stays(n) or n.guard or any(v in index.leaving for v in n.outputs):
            continue
        if not all(index.scope.get(v) != loop or v in sources for v in n.inputs):
            continue
        of: frozenset[Var] = frozenset().union(*(sources.get(v, {v}) for v in n.inputs))
        sources.update(dict.fromkeys(n.outputs, of))
        if n.primitive in VIEWS:
            views[of].append(n)
        places = set(placement.node[n])
        readers = [r for v in n.outputs for r in index.readers.get(v, ())]
        away = sum(nbytes(v.aval) for v in of if placement.home.get(v) not in places)
        if any(set(placement.node[r]) - places for r in readers) or sum(nbytes(v.aval) for v in n.outputs) < away:
            found.add(n)
    for alike in views.values():
        if not found.isdisjoint(alike):
            found.update(alike)
    todo = list(found)
    while todo:
        made = (index.producer[v] for v in todo.pop().inputs if v in sources)
        new = [n for n in made if n not in found]
        found.update(new)
        todo += new
    return found
