"""Cheap values that are larger than what they are made of are made where they are read, and are not sent.

An attention mask has a number for each pair of tokens; made of the tokens on each stage that reads it, only the tokens go
there. The same for position encodings made of positions, for one-hot rows, and for whatever a step broadcasts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from .._compat import Atom, Var
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes, nodes_where
from .._program._placement import Placement
from .._program._rewrite import reading, substitute
from ._constants import is_cheap
from ._hoist import SMALL

DEPTH = 32  # equations one after the other that are looked through


def compute_where_read(flat: FlatProgram) -> FlatProgram:
    """Makes values anew on the submeshes that read them, where less is sent then. Needs the placement."""
    assert flat.placement is not None, "what crosses is told by where it is made and read"
    worker = Worker(flat, flat.placement)
    for n in flat.nodes:
        if is_cheap(n):
            worker.consider(n)
    if not worker.reads:
        return flat
    readers = {n: reading(n, worker.reads.get(n, {})) for n in (*worker.reads, *worker.after)}
    changed = {n: [reader, *worker.after.get(n, ())] for n, reader in readers.items()}
    placement = flat.placement.extended(readers, (n for after in worker.after.values() for n in after))
    return replace(flat, nodes=nodes_where(flat.nodes, changed), placement=placement)


class Worker:
    """What is made anew, in a program that is placed.

    Attributes:
      reads: reader -> what it reads instead.
      after: node -> those that make the same on other submeshes, right behind it.
      there: (value, submesh) -> what it is called there, if it is made anew.
      costs: (value, submesh) -> the bytes that have to be sent for the value to be there.
      anew: (value, submesh) -> what makes the value, where these are those of what it is made of.
    """

    def __init__(self, flat: FlatProgram, placement: Placement) -> None:
        self.index, self.placement = flat.index, placement
        self.reads: dict[Node, dict[Var, Atom]] = defaultdict(dict)
        self.after: dict[Node, list[Node]] = defaultdict(list)
        self.there: dict[tuple[Var, int], Var] = {}
        self.costs: dict[tuple[Var, int], int] = {}
        self.anew: dict[tuple[Var, int], Node] = {}

    def consider(self, n: Node) -> None:
        """Makes the result of a node anew on each submesh that reads it and where that saves bytes."""
        (v,) = n.outputs
        if nbytes(v.aval) <= SMALL:
            return
        for reader in self.index.readers.get(v, ()):
            at, *others = self.placement.node[reader]
            if not others and at not in self.placement.node[n] and self._cost_of_making(n, at) < nbytes(v.aval):
                self.reads[reader][v] = self._made(v, n, at)

    def _cost_of_making(self, n: Node, at: int, depth: int = 0) -> int:
        return sum(self.cost(v, at, depth) for v in dict.fromkeys(n.inputs))

    def cost(self, v: Var, at: int, depth: int = 0) -> int:
        """Bytes to be sent for a value to be somewhere. What is there, or has to come for somebody else, costs nothing."""
        if (v, at) not in self.costs:
            self.costs[v, at] = 0 if self.placement.home.get(v) == at else nbytes(v.aval)
            n = self.index.producer.get(v)
            if self.costs[v, at] and n is not None and is_cheap(n) and depth < DEPTH:
                cost = self._cost_of_making(n, at, depth + 1)
                if cost < self.costs[v, at]:
                    self.costs[v, at] = cost
                    self.anew[v, at] = n
            if (v, at) not in self.anew and any(at in self.placement.node[r] for r in self.index.readers[v]):
                self.costs[v, at] = 0
        return self.costs[v, at]

    def _made(self, v: Var, n: Node, at: int) -> Var:
        """A value on a submesh, made of what is there or sent."""
        if (v, at) not in self.there:
            env: dict[Var, Atom] = {}
            for x in dict.fromkeys(n.inputs):
                if (x, at) in self.anew:
                    env[x] = self._made(x, self.anew[x, at], at)
            new = replace(n, eqn=substitute(n.eqn, env), mesh=self.placement.submeshes[at])
            self.after[n].append(new)
            (self.there[v, at],) = new.outputs
        return self.there[v, at]
