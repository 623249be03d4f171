"""Which values of a program lie in blocks on several submeshes.

It begins with what a scan over layers takes apart, where tasks of several submeshes read the layers in equal contiguous
blocks, and with what it puts together of their results. From there it spreads in both directions over every equation
that can be computed block by block: to casts of the weights, to the optimizer's arithmetic, and from that back to its
moments and to whatever else is an argument of the step.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from ... import _compat
from ..._compat import Var
from ..._program._flat import FlatProgram
from ..._program._nodes import Loop, Node, nbytes, shape_and_dtype
from ..._task import mesh_devices
from .._hoist import SMALL
from .._spread import is_short
from ._ties import ELEMENTWISE, Tie, joins_blocks, put_together, taken_apart, tie_of

# From a part to its next value, which may be a layer without its dimension of one.
_FOLLOWED = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze"}


@dataclass(frozen=True)
class Split:
    """How a value is cut: into equal blocks along a dimension, one on each submesh."""

    submeshes: tuple[Mesh, ...]
    dim: int


@dataclass(frozen=True)
class Uneven:
    """An input whose layers are read on several submeshes, but in no equal blocks.

    Attributes:
      var: the input.
      layers: how many layers it has.
      submeshes: the submeshes that read them, in order of the layers.
      away: bytes of the layers that are not on the submesh with most of them.
      rounds: how often they are dealt out to the submeshes in equal parts, in this order; 0 where it is otherwise.
    """

    var: Var
    layers: int
    submeshes: tuple[Mesh, ...]
    away: int
    rounds: int


@dataclass(frozen=True)
class Scattered:
    """A stack that the step puts together of layers of several submeshes, but in no equal blocks, and takes apart again.

    Attributes:
      type: its dtype and shape.
      line: where the user puts it together.
      count: how many submeshes.
      away: bytes of the layers that are not on the submesh with most of them.
    """

    type: str
    line: str
    count: int
    away: int


@dataclass(frozen=True)
class Found:
    """What lies in blocks, what does not though its layers do, and the conditionals and short scans that are in the way."""

    split: Mapping[Var, Split]
    uneven: tuple[Uneven, ...]
    scattered: tuple[Scattered, ...]
    conditionals: tuple[Node, ...]


def find_split(flat: FlatProgram, free: Callable[[Var, Split], bool]) -> Found:
    """Finds what lies in blocks.

    Args:
      flat: the program.
      free: whether a value may lie like this. What the caller wants elsewhere may not.
    """
    return _Finder(flat, free).run()


def tie_at(node: Node, position: int, split: Split) -> Tie | None:
    """How a node can be computed in the blocks of one of its operands or results (``~position``)."""
    if node.task is not None or node.colocated_with is not None or node.mesh is not None:
        return None
    return tie_of(node.eqn, position, split.dim, len(split.submeshes))


class _Finder:
    def __init__(self, flat: FlatProgram, free: Callable[[Var, Split], bool]) -> None:
        self.flat, self.free = flat, free
        self.producer, self.readers = flat.index.producer, flat.index.readers
        self.inputs = set(flat.invars)
        self.forward, self.back = _through_loops(flat.loops)
        self.groups = _groups(flat.loops)
        self.split: dict[Var, Split] = {}
        self.queue: deque[Var] = deque()
        self.conditionals: dict[Node, None] = {}
        self.uneven: dict[Var, Uneven] = {}
        self.scattered: dict[Var, Scattered] = {}

    def run(self) -> Found:
        for v, split in self._seeds():
            self._cut(v, split)
        for v, o in self.flat.pins.states:
            out = self.flat.outvars[o]
            if v in self.split:  # its next value is put together of blocks, some of them as they were, say
                self._cut(out, self.split[v])
            elif _compat.is_var(out) and out in self.split:  # a state lies as its next value does
                self._cut(v, self.split[out])
        return Found(self.split, tuple(self.uneven.values()), tuple(self.scattered.values()), tuple(self.conditionals))

    def _cut(self, v: Any, split: Split) -> None:
        self._mark(v, split)
        while self.queue:
            self._spread(self.queue.popleft())

    # --- where it begins ------------------------------------------------------------------------------

    def _seeds(self) -> list[tuple[Var, Split]]:
        parts: dict[tuple[Var, int], list[tuple[int, int, Mesh | None]]] = defaultdict(list)
        of_batch = self._of_batch()
        for n in self.flat.nodes:
            taken = taken_apart(n.eqn) if n.task is None and n.inputs else None
            if taken is not None and n.inputs[0] not in of_batch:
                for v, (a, b) in zip(n.eqn.outvars, taken.ranges, strict=True):
                    if _compat.is_var(v):
                        parts[n.inputs[0], taken.dim].append((a, b, self._mesh_of(v, self._next)))
        for v, column in self.flat.stacked.items():
            if v in self.producer or v in self.back:
                made = [self._mesh_of(x, self._before) if _compat.is_var(x) else None for x in column]
                parts[v, 0] += [(i, i + 1, mesh) for i, mesh in enumerate(made)]
        for n in self.flat.nodes:
            made_of = put_together(n.eqn) if n.task is None and n.loop is None else None
            if (
                made_of is not None
                and nbytes(n.outputs[0].aval) > SMALL
                and self._comes_apart(n.outputs[0], made_of.dim)
            ):
                operands = zip(n.eqn.invars, made_of.ranges, strict=True)
                meshes = [(a, b, self._mesh_of(x, self._before)) for x, (a, b) in operands if _compat.is_var(x)]
                parts[n.outputs[0], made_of.dim] += meshes
        seeds = []
        for (v, d), cuts in parts.items():
            known = sorted(((a, b, m) for a, b, m in cuts if m is not None and a < b), key=lambda cut: cut[:2])
            submeshes = tuple(dict.fromkeys(m for *_, m in known))
            if len(submeshes) < 2:
                continue
            split = Split(submeshes, d)
            length = _compat.shape(v)[d]
            if _in_equal_blocks(known, length, submeshes):
                seeds.append((v, split))
            elif v in self.producer and put_together(self.producer[v].eqn) is not None:
                self._note_scattered(v, d, known, len(submeshes))
            elif _covered([(a, b) for a, b, _ in cuts], length):  # a row of a grid is no layer
                self._note_uneven(v, d, known, submeshes)
        return seeds

    def _note_scattered(self, v: Var, d: int, known: Sequence[tuple[int, int, Mesh]], count: int) -> None:
        """A stack of the user's: a vector of all parameters, say, is put together by libraries.

        What is made on one submesh, such as two views of a batch, crosses where others read it, as anything does.
        """
        made = {self._mesh_of(x, self._before) for x in self.producer[v].inputs} - {None}
        if len(_compat.shape(v)) < 2 or len(made) == 1:
            return
        held: dict[Mesh, int] = defaultdict(int)
        for a, b, m in known:
            held[m] += (b - a) * nbytes(v.aval) // _compat.shape(v)[d]
        line = _compat.source_line(self.producer[v].eqn)
        self.scattered[v] = Scattered(v.aval.str_short(), line, count, sum(held.values()) - max(held.values()))

    def _comes_apart(self, v: Var, dim: int) -> bool:
        """Whether what is computed of a stack is taken apart again: an optimizer works on all layers of a shape at once."""
        length, seen, todo = _compat.shape(v)[dim], {v}, [v]
        while todo:
            for n in self.readers.get(todo.pop(), ()):
                if n.task is not None or n.loop is not None:
                    continue
                taken = taken_apart(n.eqn)
                if taken is not None and taken.dim == dim:
                    return True
                alike = [x for x in n.outputs if x not in seen and length in _compat.shape(x)[dim : dim + 1]]
                seen.update(alike)
                todo += alike
        return False

    def _of_batch(self) -> set[Var]:
        """What forward passes make of a microbatch: what is taken apart of it, such as the gates of experts, are no layers."""
        found = {p.inner for loop in self.flat.loops for p in loop.xs}
        for n in self.flat.nodes:
            if n.loop is not None and not n.backward and not found.isdisjoint(n.inputs):
                found.update(n.outputs)
        return found.intersection(self.producer)

    def _note_uneven(self, v: Var, d: int, known: Sequence[tuple[int, int, Mesh]], submeshes: tuple[Mesh, ...]) -> None:
        """An input, also one that is cast before it is taken apart."""
        root = v
        while root in self.producer and self.producer[root].task is None and len(self.producer[root].inputs) == 1:
            (root,) = self.producer[root].inputs
        if root not in self.inputs or root in self.uneven or _compat.shape(root) != _compat.shape(v):
            return  # the keys that a key is split into, say, are no layers of it
        if not jnp.issubdtype(shape_and_dtype(root)[1], jnp.inexact):
            return  # nor are the tokens of a sequence
        readers: dict[tuple[int, int], set[Mesh]] = defaultdict(set)
        for a, b, m in known:
            readers[a, b].add(m)
        known = [cut for cut in known if len(readers[cut[:2]]) == 1]  # what several share goes out in any case
        if len({m for *_, m in known}) < 2:
            return
        size = nbytes(root.aval) // max(_compat.shape(v)[d], 1)
        held: dict[Mesh, int] = defaultdict(int)
        for a, b, m in dict.fromkeys(known):
            held[m] += (b - a) * size
        away = sum(held.values()) - max(held.values())
        self.uneven[root] = Uneven(root, _compat.shape(v)[d], submeshes, away, _rounds(known, submeshes))

    def _mesh_of(self, v: Var, step: Callable[[Var], tuple[list[Node], list[Var]]]) -> Mesh | None:
        """The submesh of the nearest tasks that read, or make, a value; None if these are none or several."""
        seen = {v}
        here = [v]
        while here:
            found: set[Mesh] = set()
            further: list[Var] = []
            for x in here:
                nodes, others = step(x)
                for n in nodes:
                    mesh = self.flat.tasks[n.task].mesh if n.task is not None else None
                    if mesh is not None:
                        found.add(mesh)
                further += others
            if found:
                return found.pop() if len(found) == 1 else None
            here = [x for x in dict.fromkeys(further) if x not in seen]
            seen.update(here)
        return None

    def _next(self, v: Var) -> tuple[list[Node], list[Var]]:
        nodes = list(self.readers.get(v, ()))
        return nodes, [x for n in nodes if n.task is None for x in n.outputs] + self.forward.get(v, [])

    def _before(self, v: Var) -> tuple[list[Node], list[Var]]:
        n = self.producer.get(v)
        if n is None:
            return [], self.back.get(v, [])
        return [n], [] if n.task is not None else list(n.inputs)

    # --- how it spreads -------------------------------------------------------------------------------

    def _mark(self, v: Any, split: Split) -> None:
        if not _compat.is_var(v) or v in self.split:
            return
        members = self.groups.get(v, (v,))  # those of a loop are cut alike, or not at all
        if all(self._possible(m, split) for m in members):
            for m in members:
                self.split[m] = split
                self.queue.append(m)

    def _possible(self, v: Var, split: Split) -> bool:
        """Whether a value can be there in blocks, and not only be cut when it is there."""
        shape = _compat.shape(v)
        if v in self.split or split.dim >= len(shape) or shape[split.dim] % len(split.submeshes):
            return False
        if not self.free(v, split):
            return False
        if v in self.inputs:
            return True
        n = self.producer.get(v)
        if n is None:
            return True  # of a loop; what its body makes decides
        self._note(n, None)
        if n.task is None and n.mesh is None and joins_blocks(n.eqn, split.dim, len(split.submeshes)) is not None:
            return True
        return tie_at(n, ~n.eqn.outvars.index(v), split) is not None

    def _note(self, n: Node, v: Var | None) -> None:
        """Notes what is in the way, where it can be opened: a conditional, or a short scan that changes a value, or goes over it.

        Args:
          n: the equation.
          v: the value that it reads; None for one that it makes.
        """
        if n.task is not None or n in self.conditionals:
            return
        opens = n.primitive == "cond"
        if n.primitive == "scan":
            constants = n.eqn.invars[: _compat.scan_parts(n.eqn).num_consts]
            opens = not any(x is v for x in constants) and is_short(n)
        if opens:
            self.conditionals[n] = None

    def _spread(self, v: Var) -> None:
        split = self.split[v]
        for n in self.readers.get(v, ()):
            self._note(n, v)
            for k, x in enumerate(n.eqn.invars):
                if x is v:
                    self._along(n, tie_at(n, k, split), split)
            for x in self._put_back(n, split.dim):
                self._mark(x, split)
        maker = self.producer.get(v)
        if maker is not None:
            self._along(maker, tie_at(maker, ~maker.eqn.outvars.index(v), split), split)
        for x in (*self.forward.get(v, ()), *self.back.get(v, ())):
            self._mark(x, split)

    def _along(self, n: Node, tie: Tie | None, split: Split) -> None:
        if tie is not None:
            for k, d in tie.operands.items():
                self._mark(n.eqn.invars[k], Split(split.submeshes, d))
            for o, d in tie.results.items():
                self._mark(n.eqn.outvars[o], Split(split.submeshes, d))

    def _put_back(self, n: Node, dim: int) -> Iterator[Var]:
        """Values like the one that an equation takes apart, in which a part, or its next value, is where it was in that one."""
        taken = taken_apart(n.eqn) if n.task is None and n.inputs else None
        if taken is None or taken.dim != dim:
            return
        shape = _compat.shape(n.inputs[0])
        for part, place in zip(n.eqn.outvars, taken.ranges, strict=True):
            todo, seen, size = [part], {part}, math.prod(_compat.shape(part))
            for x in todo:
                for r in self.readers.get(x, ()):
                    together = put_together(r.eqn) if r.task is None else None
                    if together is not None and together.dim == dim and _compat.shape(r.outputs[0]) == shape:
                        if any(v is x and at == place for v, at in zip(r.eqn.invars, together.ranges, strict=True)):
                            yield r.outputs[0]
                    elif r.task is None and r.primitive in _FOLLOWED and math.prod(_compat.shape(r.outputs[0])) == size:
                        todo += {*r.outputs} - seen
                        seen.update(r.outputs)


def _through_loops(loops: Iterable[Loop]) -> tuple[dict[Var, list[Var]], dict[Var, list[Var]]]:
    """The names under which a value goes on at a loop's border, and those under which it came there."""
    forward: dict[Var, list[Var]] = defaultdict(list)
    back: dict[Var, list[Var]] = defaultdict(list)
    for loop in loops:
        pairs: list[tuple[Any, Any]] = [(c.init, c.inner) for c in loop.carries] + [
            (c.out, c.final) for c in loop.carries
        ]
        pairs += [(v, p.inner) for p in loop.xs for v in p.outer] + [(p.inner, v) for p in loop.ys for v in p.outer]
        for a, b in pairs:
            if _compat.is_var(a):
                forward[a].append(b)
                back[b].append(a)
    return dict(forward), dict(back)


def _groups(loops: Iterable[Loop]) -> dict[Var, tuple[Var, ...]]:
    """Variables of loops that are in blocks together: a carry through its body, what is collected and its copies."""
    groups: dict[Var, tuple[Var, ...]] = {}
    for loop in loops:
        together: list[list[Any]] = [[c.inner, c.out, c.final] for c in loop.carries] + [
            [p.inner, *p.outer] for p in loop.ys
        ]
        for members in together:
            merged = tuple(dict.fromkeys(m for v in members for m in groups.get(v, (v,))))
            groups.update(dict.fromkeys(merged, merged))
    return groups


def _covered(parts: Iterable[tuple[int, int]], length: int) -> bool:
    """Whether parts make up a stretch of at least half of a dimension, such as the layers before an early exit."""
    stretches = sorted(parts)
    start = end = stretches[0][0]
    for a, b in stretches:
        if a > end:
            return False
        end = max(end, b)
    return 2 * (end - start) >= length


def _rounds(known: Sequence[tuple[int, int, Mesh]], submeshes: tuple[Mesh, ...]) -> int:
    """How often submeshes get equal parts of a dimension in turn; 0 if they do not."""
    ends: list[tuple[int, Mesh]] = []  # of each stretch on one submesh
    for _, b, m in dict.fromkeys(known):
        if ends and ends[-1][1] == m:
            ends.pop()
        ends.append((b, m))
    rounds, rest = divmod(len(ends), len(submeshes))
    sizes = {b - a for (a, _), (b, _) in itertools.pairwise([(0, None), *ends])}
    in_turn = [m for _, m in ends] == [*submeshes] * rounds
    return rounds if not rest and in_turn and len(sizes) == 1 else 0


def _in_equal_blocks(known: Sequence[tuple[int, int, Mesh]], length: int, submeshes: tuple[Mesh, ...]) -> bool:
    """Whether each part is in the block of its submesh, and the submeshes are alike and have no device in common."""
    count = len(submeshes)
    shapes = {(m.axis_names, m.devices.shape) for m in submeshes}
    devices = [d for m in submeshes for d in mesh_devices(m)]
    if length % count or len(shapes) > 1 or len(set(devices)) < len(devices):
        return False
    size = length // count
    return all(submeshes[a // size] == submeshes[(b - 1) // size] == m for a, b, m in known)
