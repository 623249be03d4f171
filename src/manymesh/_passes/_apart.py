"""What ``jax.checkpoint`` computes again, each submesh computes again from what came to it in the forward pass.

Around tasks of several submeshes it would go through all of them once more, from one to the next, before the backward pass
could begin: no pipeline. What crosses from one submesh to the next is there, from the forward pass, and is kept. So is what
goes from a stage to a later one of its own submesh, as the skip connections of a U-Net do: to compute it again would be a
part of the earlier stage's backward pass, which is not there yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from jax.sharding import Mesh

from .. import _compat
from .._compat import Atom, Literal, Var
from .._key import Keys
from .._program._edit import Editor
from .._program._flat import FlatProgram, Result
from .._program._nodes import Node
from .._program._rewrite import reading
from ._dead import remove_dead
from ._place import place
from ._scopes import is_rematerialised


def recompute_apart(flat: FlatProgram) -> FlatProgram:
    """Reads what another submesh would compute again as it came in the forward pass.

    Where that is not in the loop, as in the gradient of a loop, what is computed again is the loop's forward pass.
    """
    if not _goes_through_several(flat):
        return flat
    slim = place(remove_dead(flat))  # few programs need it here, and it takes long
    worker = _Worker(slim)
    edit = Editor(slim)
    forward = _forward_again(slim)
    for n in slim.nodes:
        env = {v: worker.again[v] for v in worker.crossing(n)}
        if env:
            edit.replace_node(n, [reading(n, env)])
        elif n in forward:
            edit.replace_node(n, [replace(n, backward=False)])
    after = edit.result()
    return flat if after is slim else after


def _forward_again(flat: FlatProgram) -> set[Node]:
    """What loops compute again whose tasks all belong to a backward pass, before that begins."""
    loops = {n.loop for n in flat.nodes if n.task is not None and is_rematerialised(n.stack)}
    loops -= {n.loop for n in flat.nodes if n.task is not None and not n.backward}
    found: set[Node] = set()
    follows: set[Var] = set()  # what the backward pass proper has made
    for n in flat.nodes:
        if n.loop is None or n.loop not in loops:
            continue
        if is_rematerialised(n.stack) and follows.isdisjoint(n.inputs):
            found.add(n)
        elif n.backward:
            follows.update(n.outputs)
    return found


def _goes_through_several(flat: FlatProgram) -> bool:
    """Whether a task reads what comes of one on another submesh that is computed again."""
    comes_from: dict[Var, frozenset[Mesh | None]] = {}
    for n in flat.nodes:
        before = frozenset[Mesh | None]().union(*(comes_from.get(v, ()) for v in n.inputs))
        if n.task is not None and before - {flat.submesh_of(n)}:
            return True
        if is_rematerialised(n.stack):
            own = [flat.submesh_of(n)] if n.task is not None else []
            comes_from.update(dict.fromkeys(n.outputs, before.union(own)))
    return False


class _Worker:
    """What a program computes again.

    Attributes:
      again: value that is computed again -> the same value in the forward pass.
    """

    def __init__(self, flat: FlatProgram) -> None:
        assert flat.placement is not None, "what crosses is told by where it is made and read"
        self._flat, self._placement, self._keys = flat, flat.placement, Keys()
        self.again: dict[Var, Var] = {}
        self._first: dict[Var, Var] = {}  # value -> the first of those that are computed alike
        self._find()
        self._level = self._levels() if self.again else {}

    def _find(self) -> None:
        """Fills in the values that are computed again, in order: one of them may be made of others."""
        forward: dict[object, list[tuple[Var, Node]]] = defaultdict(list)  # what a value is -> such values
        for n in self._flat.nodes:
            again = is_rematerialised(n.stack)
            if (n.eqn.effects and n.task is None) or (n.backward and not again):
                continue
            for v, what in self._described(n):
                if not again:
                    forward[what].append((v, n))
                    if n.task is None:
                        self._first[v] = forward[what][0][0]
                elif same := [(w, m) for w, m in forward.get(what, ()) if self._is_call(n, v, m, w)]:
                    # One where it is computed again, too, if there is one: a constant is made in many places.
                    self.again[v] = next(
                        (w for w, m in same if self._placement.node[m] == self._placement.node[n]), same[0][0]
                    )
                    self._first[v] = self._known(self.again[v])

    def _known(self, v: Var) -> Var:
        """The value, or the first one that is computed alike."""
        return self._first.get(v, v)

    def _is_call(self, n: Node, v: Var, before: Node, w: Var) -> bool:
        """Whether a value that is computed again is what one of the forward pass is: of the same call, if of a task.

        A function that JAX traced once has one mark in all of its calls: they are told apart by what they read. What is
        computed again reads no other operands, and of what the call made that which is kept of it.
        """
        one, other = self._flat.results.get(v), self._flat.results.get(w)
        if n.task is None or not isinstance(one, Result) or not isinstance(other, Result):
            return True  # of equal operands, by what it is
        for k, x in one.operands.items():
            if k not in other.operands or not self._is_same(x, other.operands[k]):
                return False
        named = {x for x in one.operands.values() if _compat.is_var(x)}
        rest = {self._known(x) for x in n.inputs if x not in named}
        return rest <= {self._known(x) for x in (*before.inputs, *before.outputs)}

    def _is_same(self, x: Atom, y: Atom) -> bool:
        if isinstance(x, Literal):
            return isinstance(y, Literal) and _said(x) == _said(y)
        return _compat.is_var(y) and self._known(x) is self._known(y)

    def _described(self, n: Node) -> Iterable[tuple[Var, object]]:
        """What each value is that a node makes: the result of a call, or of an equation of the same values."""
        around = n.loop, tuple((self._known(v), k) if _compat.is_var(v) else (v, k) for v, k in n.guard)
        if n.task is not None:
            return [(v, (self._flat.results[v], around)) for v in n.outputs if v in self._flat.results]
        one = self._keys(_compat.new_jaxpr(tuple(dict.fromkeys(n.inputs)), n.outputs, [n.eqn]))
        operands = tuple([self._known(v) for v in dict.fromkeys(n.inputs)])
        return [(v, (one, operands, i, around)) for i, v in enumerate(n.outputs)]

    def _levels(self) -> dict[Var, int]:
        """How often the way to a value of the forward pass goes from one submesh to another: its stage, so to say."""
        level: dict[Var, int] = {}
        for n in self._flat.nodes:
            if not n.backward and not is_rematerialised(n.stack):
                found = (level[v] + self._is_elsewhere(v, n) for v in n.inputs if v in level)
                level.update(dict.fromkeys(n.outputs, max(found, default=0)))
        return level

    def _is_elsewhere(self, v: Var, n: Node) -> bool:
        return set(self._placement.node[n]).isdisjoint(self._placement.node[self._flat.index.producer[v]])

    def crossing(self, reader: Node) -> list[Var]:
        """What is computed again and read elsewhere, or in a later stage: of both, where the forward pass had them."""
        again = [v for v in reader.inputs if v in self.again]
        before = next((self.again[v] for v in reader.outputs if v in self.again), None)
        of = [self.again[v] for v in again] if before is None else [before]
        stage = max((self._level[v] for v in of), default=0)
        return [v for v in again if self._crosses(v, reader) or self._level[self.again[v]] < stage]

    def _crosses(self, v: Var, reader: Node) -> bool:
        return set(self._at(reader)).isdisjoint(self._at(self._flat.index.producer[v]))

    def _at(self, n: Node) -> tuple[int, ...]:
        """The submeshes of a node, or of the one that it computes again."""
        before = next((self.again[v] for v in n.outputs if v in self.again), None)
        return self._placement.node[n if before is None else self._flat.index.producer[before]]


def _said(number: Literal) -> bytes:
    """A number that the program says, by its bytes: NaN is itself, and the two zeros are two numbers."""
    return np.asarray(number.val, _compat.dtype(number)).tobytes()
