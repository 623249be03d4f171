"""What stands between tasks keeps the fewest bytes for the backward pass, as a task does.

An activation or a norm that is written between two tasks leaves several arrays of its size for its gradient. No task holds
them, so each submesh keeps those of its own equations from which the rest follows by cheap arithmetic, and computes the rest
again in the backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from .._compat import Atom, Eqn, Var
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes, nodes_where
from .._program._placement import Placement
from .._program._rewrite import reading
from .._task import mesh_devices
from ._hoist import SMALL
from ._residuals import cheap_on, cheapest, compute_again


def keep_less_between(flat: FlatProgram) -> FlatProgram:
    """Computes again in backward passes what is cheap, of loops' unmarked equations, where fewer bytes are held then."""
    assert flat.placement is not None, "what is held is told by where it is made and read"
    readers: dict[Node, Node] = {}
    anew: dict[Node, list[Node]] = {}
    for loop in range(len(flat.loops)):
        for at in range(len(flat.placement.submeshes)):
            for n, (reader, made) in Between(flat, flat.placement, loop, at).changed().items():
                readers[n], anew[n] = reader, made
    if not readers:
        return flat
    placement = flat.placement.extended(readers, (n for made in anew.values() for n in made))
    nodes = nodes_where(flat.nodes, {n: [*anew[n], reader] for n, reader in readers.items()})
    return replace(flat, nodes=nodes, placement=placement)


class Between:
    """The unmarked forward equations of a loop's body on one submesh, and what backward passes there read of them."""

    def __init__(self, flat: FlatProgram, placement: Placement, loop: int, at: int) -> None:
        self._index, self._loop = flat.index, loop
        self._mesh = placement.submeshes[at]
        here = [n for n in flat.index.bodies[loop] if placement.node[n] == (at,)]
        self._later = [n for n in here if n.phase > 0]
        self._nodes = [n for n in here if n.task is None and n.phase == 0 and not n.guard and not n.eqn.effects]
        self._own = {v: n for n in self._nodes for v in n.outputs}

    def changed(self) -> dict[Node, tuple[Node, list[Node]]]:
        """Nodes that read something else now -> the same reading it, and what computes it before."""
        later = set(self._later)
        read = dict.fromkeys(v for n in self._later for v in n.inputs)
        mine = [v for v in read if v in self._own and v not in self._index.leaving]
        wanted = [v for v in mine if later.issuperset(self._readers_behind(v))]
        if sum(nbytes(v.aval) for v in wanted) <= SMALL:
            return {}
        eqns = [n.eqn for n in self._nodes]
        invars = list(dict.fromkeys(v for n in self._nodes for v in n.inputs if v not in self._own))
        # What is held anyway costs nothing: for the backward pass, or beyond the microbatch.
        free = set(read).difference(wanted)
        free |= {v for v in invars if self._index.scope.get(v) != self._loop}
        cheap = cheap_on(all(d.platform == "cpu" for d in mesh_devices(self._mesh)))
        saved = cheapest(wanted, free, invars, eqns, cheap)
        return self._computing_again(set(wanted) - saved, saved)

    def _readers_behind(self, v: Var) -> list[Node]:
        """Its readers of later phases, wherever they are."""
        return [r for r in self._index.readers.get(v, ()) if r.phase > 0 or r.loop != self._loop]

    def _computing_again(self, lost: set[Var], saved: set[Var]) -> dict[Node, tuple[Node, list[Node]]]:
        """Each phase computes its own, so that nothing more is held from one to the other."""
        producer = {v: n.eqn for v, n in self._own.items()}
        envs: dict[int, dict[Var, Atom]] = defaultdict(dict)
        found: dict[Node, tuple[Node, list[Node]]] = {}
        for n in self._later:
            again: list[Eqn] = []
            env = envs[n.phase]
            for v in dict.fromkeys(v for v in n.inputs if v in lost):
                compute_again(v, producer, env, lambda x: x if x in saved or x not in producer else None, again)
            if not lost.isdisjoint(n.inputs):
                made = [Node(e, backward=True, weight=n.weight, loop=self._loop, mesh=self._mesh) for e in again]
                found[n] = reading(n, env), made
        return found
