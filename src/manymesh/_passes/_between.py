"""What stands between tasks keeps the fewest bytes for the backward pass, as a task does.

An activation or a norm that is written between two tasks leaves several arrays of its size for its gradient. No task holds
them, so each submesh keeps those of its own equations from which the rest follows by cheap arithmetic, and computes the rest
again in the backward pass. So it is with what a task ends in, such as its activation: the next task reads it, whose backward
pass has it of what the first one keeps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

from .. import _compat
from .._compat import AbstractJaxpr, Atom, Eqn, Var
from .._program._calls import inlined_jaxpr
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes, nodes_where
from .._program._placement import Placement
from .._program._rewrite import reading, substitute
from ._cheap import cheap_on, cheap_way, cheapest, compared, compute_again
from ._hoist import SMALL

MOST_READ = 8  # values of which another one is computed again


def keep_less_between(flat: FlatProgram) -> FlatProgram:
    """Computes again in backward passes what is cheap, of loops' unmarked equations, where fewer bytes are held then."""
    assert flat.placement is not None, "what is held is told by where it is made and read"
    readers: dict[Node, Node] = {}
    anew: dict[Node, list[Node]] = {}
    ends: dict[Hashable, End] = {}
    for loop in range(len(flat.loops)):
        here: dict[tuple[int, ...], list[Node]] = defaultdict(list)
        for n in flat.index.bodies[loop]:
            here[flat.placement.node[n]].append(n)
        for at in (places[0] for places in here if len(places) == 1):
            for n, (reader, made) in Between(flat, flat.placement, loop, at, here[at,], ends).changed().items():
                readers[n], anew[n] = reader, made
    if not readers:
        return flat
    placement = flat.placement.extended(readers, (n for made in anew.values() for n in made))
    nodes = nodes_where(flat.nodes, {n: [*anew[n], reader] for n, reader in readers.items()})
    return replace(flat, nodes=nodes, placement=placement)


class Between:
    """The unmarked forward equations of a loop's body on one submesh, the ends of the tasks there, and what backward passes
    there read of both.

    Args:
      flat, placement: the program.
      loop, at: the loop and the submesh.
      here: the nodes of the body that run there and nowhere else.
      ends: what is known of the ends of tasks; added to.
    """

    def __init__(
        self,
        flat: FlatProgram,
        placement: Placement,
        loop: int,
        at: int,
        here: Sequence[Node],
        ends: dict[Hashable, End],
    ) -> None:
        self._index, self._placement, self._loop, self._at = flat.index, placement, loop, at
        self._mesh = placement.submeshes[at]
        self._cheap = cheap_on(self._mesh)
        self._later = [n for n in here if n.phase > 0]
        self._read = dict.fromkeys(v for n in self._later for v in n.inputs)
        self._eqns: list[Eqn] = []
        for n in here:
            if n.phase == 0 and not n.guard and not n.eqn.effects:
                self._eqns += [n.eqn] if n.task is None else _end_of(n, self._read, self._cheap, ends)
        self._producer = {v: e for e in self._eqns for v in e.outvars if _compat.is_var(v)}

    def changed(self) -> dict[Node, tuple[Node, list[Node]]]:
        """Nodes that read something else now -> the same reading it, and what computes it before."""
        mine = [v for v in self._read if v in self._producer and v not in self._index.leaving]
        wanted = [v for v in mine if self._is_held_for_them(v)]
        if sum(nbytes(v.aval) for v in wanted) <= SMALL:
            return {}
        # What is computed again may differ in the last bit.
        exact = compared([n.eqn for n in self._later], self._cheap)
        wanted = [v for v in wanted if v not in exact]
        operands = dict.fromkeys(v for e in self._eqns for v in e.invars if _compat.is_var(v))
        invars = [v for v in operands if v not in self._producer]
        # What is held anyway costs nothing: for the backward pass, or beyond the microbatch.
        free = set(self._read).difference(wanted)
        free |= {v for v in invars if self._index.scope.get(v) != self._loop}
        inside = {v for v in self._producer if v not in self._index.producer}
        saved = cheapest(wanted, free, invars, self._eqns, self._cheap, never=inside, most=MOST_READ)
        return self._computing_again(set(wanted) - saved, saved)

    def _is_held_for_them(self, v: Var) -> bool:
        """Whether nobody else holds a value here.

        Another submesh whose forward pass reads it has its own from then on.
        """
        readers, where = self._index.readers.get(v, ()), self._placement.node
        have = {s for r in readers if r.phase == 0 for s in where[r]} - {self._at}
        return all(where[r] == (self._at,) or have.issuperset(where[r]) for r in readers if r.phase > 0)

    def _computing_again(self, lost: set[Var], saved: set[Var]) -> dict[Node, tuple[Node, list[Node]]]:
        """Each phase computes its own, and so does each task, so that nothing more is held from one to the other."""
        producer = self._producer
        envs: dict[int | Node, dict[Var, Atom]] = defaultdict(dict)
        found: dict[Node, tuple[Node, list[Node]]] = {}
        for n in self._later:
            again: list[Eqn] = []
            env = envs[n.phase if n.task is None else n]
            for v in dict.fromkeys(v for v in n.inputs if v in lost):
                compute_again(v, producer, env, lambda x: x if x in saved or x not in producer else None, again)
            if not lost.isdisjoint(n.inputs):
                made = [Node(e, backward=True, weight=n.weight, loop=self._loop, mesh=self._mesh) for e in again]
                found[n] = reading(n, env), made
        return found


@dataclass(frozen=True, eq=False)
class End:
    """The cheap equations that some results of a task end in, from its operands and from other results on.

    Attributes:
      jaxpr: the jaxpr of the task, kept so that its id stays its own.
      invars, outvars: its operands and its results, by the names that they have in the equations.
      eqns: the equations.
    """

    jaxpr: AbstractJaxpr
    invars: Sequence[Var]
    outvars: Sequence[Atom]
    eqns: Sequence[Eqn]


def _end_of(n: Node, read: Collection[Var], cheap: frozenset[str], known: dict[Hashable, End]) -> list[Eqn]:
    """The equations that make, of what is outside of a task, those of its results that backward passes read."""
    which = tuple(v in read for v in n.eqn.outvars)
    if not any(which):
        return []
    jaxpr = n.eqn.params["jaxpr"]
    there = tuple(map(_compat.is_var, n.eqn.outvars))
    key = id(jaxpr), which, there, cheap
    if key not in known:
        known[key] = _find_end(jaxpr, which, there, cheap)
    end = known[key]
    outside = {
        v: out for v, out in zip(end.outvars, n.eqn.outvars, strict=True) if _compat.is_var(v) and _compat.is_var(out)
    }
    env: dict[Var, Atom] = {**outside, **dict(zip(end.invars, n.eqn.invars, strict=True))}
    eqns = []
    for e in end.eqns:
        made = substitute(e, env)
        outvars = [outside.get(v, fresh) for v, fresh in zip(e.outvars, made.outvars, strict=True)]
        env.update((v, out) for v, out in zip(e.outvars, outvars, strict=True) if _compat.is_var(v))
        eqns.append(made.replace(outvars=outvars))
    return eqns


def _find_end(jaxpr: AbstractJaxpr, which: Sequence[bool], there: Sequence[bool], cheap: frozenset[str]) -> End:
    parts = _compat.open_jaxpr(jaxpr)
    eqns, outs = inlined_jaxpr(parts)
    known = {*parts.invars, *(v for v, is_there in zip(outs, there, strict=True) if is_there and _compat.is_var(v))}
    producer = {v: e for e in eqns for v in e.outvars if _compat.is_var(v)}
    times = Counter(filter(_compat.is_var, outs))
    needed: dict[Eqn, None] = {}
    for v, is_read in zip(outs, which, strict=True):
        if is_read and _compat.is_var(v) and times[v] == 1 and v in producer and not parts.consts:
            needed.update(dict.fromkeys(cheap_way(v, known, producer, cheap)))
    return End(jaxpr, parts.invars, outs, [e for e in eqns if e in needed])
