"""What every microbatch would compute alike: to its one reader, or out of the loop."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from .._compat import Atom, Var
from .._program._calls import calls_back
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes
from .._program._rewrite import reading, substitute
from ._pieces import VIEWS

# Bytes of what may be computed on every submesh that reads it: a random key, a step counter or a learning rate fits.
SMALL = 1024
_TAKES_APART = ("slice", "squeeze")
_FREE = ("transpose",)  # a product reads either way


def hoist_loop_invariants(flat: FlatProgram) -> FlatProgram:
    """Moves what every microbatch would compute alike.

    An unmarked equation of a loop's body that depends only on values from outside takes the phase of what reads it, so that
    they fuse: in the loop, if what it makes is large, or has one reader. It leaves the loop and is computed once where it has
    several readers, or is small and made of what is large; and so does what is large and read in forward and backward passes,
    of which each microbatch would hold its own from the one to the other. Each pass has its own of a transpose, which costs
    nothing where it is read.
    """
    bodies = [_Body(flat, i) for i in range(len(flat.loops))]
    if not any(body.changed for body in bodies):
        return flat
    nodes: list[Node] = []
    for n in flat.nodes:
        nodes += [n] if n.loop is None else bodies[n.loop].instead(n)
    return replace(flat, nodes=tuple(nodes), placement=None)


def invariants(flat: FlatProgram, loop: int) -> dict[Var, Node]:
    """What unmarked equations of a body make of nothing in it -> what makes it."""
    index, made = flat.index, dict[Var, Node]()
    for n in index.bodies[loop]:
        if stays(n) or any(v in index.leaving for v in n.outputs):
            continue
        if all(index.scope.get(v) != loop or v in made for v in n.inputs):
            made.update(dict.fromkeys(n.outputs, n))
    return made


class _Body:
    """The body of a loop, and what becomes of its nodes.

    Attributes:
      changed: nodes that change -> what becomes of them.
    """

    def __init__(self, flat: FlatProgram, loop: int) -> None:
        self._index, self._loop, self._submesh_of = flat.index, loop, flat.submesh_of
        self._made = invariants(flat, loop)
        self._hoisted: set[Node] = set()
        self._backward: dict[Node, bool] = {}
        self._own: dict[Node, Node] = {}  # node -> the same, of the backward pass
        self._reads: dict[Node, dict[Var, Atom]] = defaultdict(dict)  # reader -> what it reads instead
        self.changed: dict[Node, Node] = {}
        for n in reversed(list(dict.fromkeys(self._made.values()))):
            self._visit(n)

    def instead(self, n: Node) -> list[Node]:
        """What stands where a node stood."""
        own = self._own.get(n)
        found = [reading(self.changed.get(n, n), self._reads.get(n, {}))]
        return found if own is None else [*found, reading(own, self._reads.get(own, {}))]

    def _visit(self, n: Node) -> None:
        """Decides on a node whose readers are decided on."""
        readers = list(dict.fromkeys(r for v in n.outputs for r in self._index.readers.get(v, ())))
        inside = [r for r in readers if r.loop == self._loop and r not in self._hoisted]
        inside += [self._own[r] for r in inside if r in self._own]
        passes = {self._backward.get(r, r.backward) for r in inside}
        together = len({self._submesh_of(r) for r in inside}) == 1  # else it would cross for each pass
        is_free = together and _is_large(n) and n.primitive in _FREE and not n.guard
        if n not in self._hoisted and len(passes) > 1 and is_free:
            self.changed[n] = replace(n, backward=False)
            env: dict[Var, Atom] = {}
            self._own[n] = replace(n, eqn=substitute(n.eqn, env), backward=True)
            for r in inside:
                if self._backward.get(r, r.backward):
                    self._reads[r].update((v, env[v]) for v in n.outputs)
        elif n in self._hoisted or not inside or _leaves(n, len(readers), len(passes)):
            self._hoisted.add(n)
            self._hoisted.update(self._made[v] for v in n.inputs if v in self._made)
            unstacks = _is_large(n) and n.primitive in _TAKES_APART
            self.changed[n] = replace(n, loop=None, backward=False, unstacks=unstacks)
        elif len(passes) == 1 and n.backward not in passes and (n.inputs or not n.backward):
            (self._backward[n],) = passes  # the sum that a constant of the backward pass is added to is after that
            self.changed[n] = replace(n, backward=self._backward[n])


def _leaves(n: Node, readers: int, passes: int) -> bool:
    """Whether a node that every microbatch would run alike leaves the loop for its own sake.

    What takes a stack apart does: it would join no fragment of a layer, and be one of its own in every microbatch.
    """
    if n.unstacks:
        return not n.guard
    if _is_large(n) and n.inputs:
        return passes > 1 and not n.guard
    return readers > 1 or any(nbytes(v.aval) > SMALL for v in n.inputs)


def _is_large(n: Node) -> bool:
    return sum(nbytes(v.aval) for v in n.outputs) > SMALL


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
