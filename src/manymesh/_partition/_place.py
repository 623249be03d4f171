"""Which submesh each equation runs on.

Tasks say where they run. Unmarked equations follow the bytes: the submesh that already holds most of
what they read, else the one that reads most of what they make. Small values that depend on nothing
large are computed wherever they are needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from .. import _compat
from .._errors import MeshError
from .._jaxpr._nodes import Flat, Node, nbytes
from .._mark import Recording

# An equation whose results are at most this large, and that reads nothing that is already placed, is
# computed on every submesh that reads it. Bytes; a random key, a step counter or a learning rate fits.
SMALL = 1024


@dataclass
class Placement:
    """Where everything is.

    Attributes:
      submeshes: the submeshes, in order of first use.
      node: node -> the submeshes it runs on; more than one where it is cloned.
      home: variable -> the submesh of its one copy of record (its producer's, or an input's home).
      reason: node -> one word on why an unmarked equation is where it is.
    """

    submeshes: list[Mesh]
    node: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    home: dict[Any, int] = field(default_factory=dict)
    reason: dict[Node, str] = field(default_factory=dict)


def place(
    flat: Flat,
    record: Recording,
    pinned_in: dict[Any, Mesh],
    pinned_out: dict[int, Mesh],
    states: Iterable[tuple[Any, int]] = (),
) -> Placement:
    """Places every node.

    Args:
      flat: the program.
      record: what its marks mean.
      pinned_in: inputs whose submesh is given.
      pinned_out: position among the results -> submesh that the result has to be on.
      states: (input, position of the result that replaces it): the result is wanted where the input is.
    """
    return _Placer(flat, record, pinned_in, pinned_out).run(states)


class _Placer:
    def __init__(self, flat: Flat, record: Recording, pinned_in: dict[Any, Mesh], pinned_out: dict[int, Mesh]) -> None:
        self.flat = flat
        self.submeshes: list[Mesh] = []
        self.where: dict[Node, int] = {}
        self.reason: dict[Node, str] = {}
        self.producer = {v: n for n in flat.nodes for v in n.outputs}
        self.position = {n: i for i, n in enumerate(flat.nodes)}
        self.consumers: dict[Any, list[Node]] = defaultdict(list)
        for n in flat.nodes:
            for v in dict.fromkeys(n.inputs):
                self.consumers[v].append(n)
        for n in flat.nodes:
            mark = n.task or n.beside
            mesh = record.tasks[mark].mesh if mark is not None else n.mesh
            if mesh is not None:
                self.where[n] = self._submesh(mesh)
                self.reason[n] = "task" if mark is not None else "parts of a sum"
        self.pinned = {v: self._submesh(m) for v, m in pinned_in.items()}
        self.wanted: dict[Any, int] = {}
        for i, mesh in pinned_out.items():
            wanted = self._submesh(mesh)
            if _compat.is_var(flat.outvars[i]):
                self.wanted[flat.outvars[i]] = wanted
        _check_submeshes(self.submeshes)
        self.link_forward, self.link_back = _links(flat)
        self.small = _small_nodes(flat, self.producer, self.where)

    def _submesh(self, mesh: Mesh) -> int:
        if mesh not in self.submeshes:
            self.submeshes.append(mesh)
        return self.submeshes.index(mesh)

    def run(self, states: Iterable[tuple[Any, int]]) -> Placement:
        home = self._input_homes()
        for v, o in states:
            out = self.flat.outvars[o]
            while v in home and _compat.is_var(out) and out in self.producer:
                # Also what leads there and is nothing but this value: a mean's division, the stack before it.
                self.wanted.setdefault(out, home[v])
                before = self.producer[out].inputs
                if len(before) != 1 or len(self.consumers[before[0]]) != 1 or self.producer[out].task is not None:
                    break
                (out,) = before
        open_nodes = [n for n in self.flat.nodes if n not in self.where and n not in self.small and not n.deferred]
        # Results that the caller wants somewhere decide first, then what is already placed, then readers.
        while open_nodes:
            rest = self._sweep(open_nodes, lambda n: self._vote_inputs(n, {}), "reads")
            if len(rest) == len(open_nodes):
                # A weight's cast or transpose inside a loop or a backward pass goes with what reads it: the weight
                # itself then crosses once a call, not its copy once a microbatch.
                rest = self._sweep(
                    open_nodes, lambda n: None if self._repeats(n) else self._vote_inputs(n, home), "state"
                )
            if len(rest) == len(open_nodes):
                rest = self._sweep(open_nodes[::-1], self._vote_outputs, "read by")[::-1]
            if len(rest) == len(open_nodes):
                rest = self._sweep(open_nodes, lambda n: self._vote_inputs(n, home), "state")
            if len(rest) == len(open_nodes):
                for n in rest:
                    self.where[n], self.reason[n] = 0, "default"
                rest = []
            open_nodes = rest
        return self._finish(home)

    def _sweep(self, nodes: list[Node], vote: Any, reason: str) -> list[Node]:
        rest = []
        for n in nodes:
            choice = vote(n)
            if choice is None:
                rest.append(n)
            else:
                self.where[n], self.reason[n] = choice, reason
        return rest

    def _place_of(self, v: Any, seen: int = 0) -> int | None:
        """Where a variable is made, looking through the links of loops."""
        node = self.producer.get(v)
        if node is not None:
            return self.where.get(node)
        if seen < 4 and v in self.link_back:
            return self._place_of(self.link_back[v], seen + 1)
        return self.pinned.get(v)

    def _vote_inputs(self, n: Node, home: dict[Any, int]) -> int | None:
        wanted = [self.wanted[v] for v in n.outputs if v in self.wanted]
        if wanted:
            return wanted[0]
        votes: dict[int, int] = defaultdict(int)
        for v in dict.fromkeys(n.inputs):
            at = self._place_of(v)
            if at is None:
                at = home.get(v)
            if at is not None:
                votes[at] += nbytes(v.aval) + 1
        ties = [k for k in votes if votes[k] == max(votes.values())]
        if len(ties) > 1 and not n.backward and not any(v in self.link_back for v in n.inputs):
            # A skip connection meets a task's result: the forward pass goes on from the later of the two.
            made = [(self.position[self.producer[v]], v) for v in n.inputs if v in self.producer]
            late = [at for _, v in sorted(made, key=lambda p: -p[0]) if (at := self._place_of(v)) in ties]
            return late[0] if late else min(ties)
        return _winner(votes)

    @staticmethod
    def _repeats(n: Node) -> bool:
        return n.backward or n.loop is not None

    def _vote_outputs(self, n: Node) -> int | None:
        votes: dict[int, int] = defaultdict(int)
        for v in n.outputs:
            for at in self._readers(v):
                votes[at] += nbytes(v.aval) + 1
        return _winner(votes)

    def _readers(self, v: Any, depth: int = 0) -> list[int]:
        found = [self.where[c] for c in self.consumers.get(v, ()) if c in self.where]
        if v in self.wanted:
            found.append(self.wanted[v])
        if depth < 8:
            for c in self.consumers.get(v, ()):
                if c.deferred or c.apart or c in self.small:
                    for out in c.outputs:
                        found += self._readers(out, depth + 1)
            for linked in self.link_forward.get(v, ()):
                found += self._readers(linked, depth + 1)
        return found

    def _input_homes(self) -> dict[Any, int]:
        """Homes of inputs: given, else where the tasks that read them run (the first of equals)."""
        home = {}
        for v in self.flat.invars:
            if v in self.pinned:
                home[v] = self.pinned[v]
                continue
            votes: dict[int, int] = defaultdict(int)
            for at in self._readers(v):
                votes[at] += 1
            choice = _winner(votes)
            if choice is not None:
                home[v] = choice
        return home

    def _finish(self, home: dict[Any, int]) -> Placement:
        if not self.submeshes:
            raise AssertionError("a program without any submesh is not partitioned")
        result = Placement(self.submeshes, reason=self.reason)
        needed: dict[Any, set[int]] = defaultdict(set)
        for v, at in self.wanted.items():
            needed[v].add(at)
        for n in reversed(self.flat.nodes):
            if n in self.where:
                places: tuple[int, ...] = (self.where[n],)
            else:
                places = tuple(sorted(set().union(*(self._needs(v, needed) for v in n.outputs)))) or (0,)
                result.reason[n] = "cloned"
            result.node[n] = places
            for v in n.inputs:
                needed[v].update(places)
        for v in self.flat.invars:
            if v in home:
                result.home[v] = home[v]
            else:
                result.home[v] = min(self._needs(v, needed), default=0)
        for n in self.flat.nodes:
            for v in n.outputs:
                result.home[v] = result.node[n][0]
        for loop in self.flat.loops:
            for c in loop.carries:
                result.home[c.inner] = result.home[c.final] = result.home.get(c.out, 0)
            for p in loop.collected:
                result.home.update({v: result.home.get(p.inner, 0) for v in p.outer})
        return result

    def _needs(self, v: Any, needed: dict[Any, set[int]]) -> set[int]:
        found = set(needed.get(v, ()))
        for linked in self.link_forward.get(v, ()):
            if linked in needed:
                found |= needed[linked]
            else:
                at = self._place_of(linked)
                found |= {at} if at is not None else set()
        return found


def _winner(votes: dict[int, int]) -> int | None:
    return min(votes, key=lambda k: (-votes[k], k)) if votes else None


def _links(flat: Flat) -> tuple[dict[Any, list[Any]], dict[Any, Any]]:
    """Variables that loops tie together: forward (made here, read there) and back (read here, made there)."""
    forward: dict[Any, list[Any]] = defaultdict(list)
    back: dict[Any, Any] = {}
    for loop in flat.loops:
        for c in loop.carries:
            back[c.inner] = c.out
            back[c.final] = c.out
            forward[c.out].append(c.final)
            if _compat.is_var(c.init):
                forward[c.init].append(c.inner)
        for p in loop.cut:
            for v in p.outer:
                if _compat.is_var(v):
                    forward[v].append(p.inner)
        for p in loop.collected:
            for v in p.outer:
                back[v] = p.inner
            forward[p.inner] += list(p.outer)
    return forward, back


def _small_nodes(flat: Flat, producer: dict[Any, Node], where: dict[Node, int]) -> set[Node]:
    """Unmarked equations that are cheap enough to compute wherever they are read."""
    inner = {c.inner for loop in flat.loops for c in loop.carries}
    final = {c.final for loop in flat.loops for c in loop.carries}
    final |= {v for loop in flat.loops for p in loop.collected for v in p.outer}
    inits = {c.init for loop in flat.loops for c in loop.carries}
    small: set[Node] = set()
    for n in flat.nodes:
        if n in where or n.task is not None or n.eqn.effects:
            continue
        from_nothing = not n.inputs
        is_small = sum(nbytes(v.aval) for v in n.outputs) <= SMALL and all(
            producer[v] in small if v in producer else v not in inner and v not in final and nbytes(v.aval) <= SMALL
            for v in n.inputs
        )
        if from_nothing or is_small:
            small.add(n)
            if any(v in inits for v in n.outputs):
                n.deferred = True
    return small


def _check_submeshes(meshes: Sequence[Mesh]) -> None:
    backends = {m.devices.flat[0].platform: [d.id for d in m.devices.flat] for m in reversed(meshes)}
    if len(backends) > 1:
        (one, ids), (two, others), *_ = sorted(backends.items())
        raise MeshError(
            f"tasks run on devices of several backends, {one} (ids {ids}) and {two} (ids {others}); put every task on "
            "devices of one backend, such as jax.devices()"
        )
