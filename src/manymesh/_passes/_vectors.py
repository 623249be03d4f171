"""A vector of all gradients is put together nowhere, where only its parts and sums over it are read.

``ravel_pytree`` makes one vector of gradients that lie on several submeshes, for a norm, a test for infinities or a clip, and
takes it apart again. Put together it would bring all of them to one submesh in every step, and back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from .. import _compat
from .._compat import Atom, Eqn, Var
from .._findings import Finding
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes, nodes_where
from .._program._rewrite import making, rename, trace_nodes, with_atoms
from ._blocks._ties import COMBINE, ELEMENTWISE, REDUCTIONS
from ._dead import remove_dead
from ._hoist import SMALL

Range = tuple[int, int]

_SUMS = {**REDUCTIONS, "dot_general": "add"}


def leave_apart(flat: FlatProgram) -> FlatProgram:
    """Computes sums and parts of vectors of the parts that these are put together of on several submeshes. Needs the placement."""
    worker = _Worker(flat)
    replaced = {n: found for n in flat.nodes if (found := worker.look_at(n)) is not None}
    if replaced:
        flat = rename(replace(flat, nodes=nodes_where(flat.nodes, replaced), placement=None), worker.alias)
    if not worker.of_blocks:
        return flat
    left = remove_dead(flat).index.producer
    told = [_read_whole(left[v].eqn, nbytes(v.aval)) for v in worker.of_blocks if v in left and nbytes(v.aval) > SMALL]
    return replace(flat, findings=(*flat.findings, *told))


def _read_whole(eqn: Eqn, count: int) -> Finding:
    line = _compat.source_line(eqn)
    return Finding(
        f"a vector {eqn.outvars[0].aval.str_short()}{f', at {line},' if line else ''} of what lies in blocks on several submeshes, "
        f"one for each part of the layers, is read as a whole: up to {count} bytes come together on one submesh in every step; "
        "numbers about all of it (a sum, a norm, a variance, a maximum) and its parts need not"
    )


class _Worker:
    """Goes through the nodes outside of loops, in order.

    Attributes:
      stacks: whether there are stacks in blocks.
      ranges: a vector that could be left in parts -> where each part begins and ends.
      uniform: vectors of one number -> the node that spreads it out.
      pieces: vectors that are several parts of another one -> that one, and the number of the first.
      parts: (vector, which part, its length) -> that part.
      alias: what is a part of a vector -> that part.
      of_blocks: vectors put together of what lies in blocks.
      made: nodes that make parts, to be put before the one that is looked at.
    """

    def __init__(self, flat: FlatProgram) -> None:
        assert flat.placement is not None, "parts on one submesh are put together there"
        self.home, self.producer = flat.placement.home, flat.index.producer
        self.stacks = bool(flat.stacked_inputs or flat.stacked_outputs)
        self.ranges: dict[Var, tuple[Range, ...]] = {}
        self.uniform: dict[Var, Node] = {}
        self.pieces: dict[Var, tuple[Var, int]] = {}
        self.parts: dict[tuple[Var, int, int], Atom] = {}
        self.alias: dict[Var, Atom] = {}
        self.of_blocks: list[Var] = []
        self.made: list[Node] = []

    def look_at(self, n: Node) -> list[Node] | None:
        """What a node becomes; None where it stays."""
        if n.task is not None or n.loop is not None or n.guard or n.eqn.effects or not n.outputs or not n.eqn.invars:
            return None
        name, v = n.primitive, n.eqn.invars[0]
        if name == "concatenate":
            self._put_together(n)
        elif name == "broadcast_in_dim" and _is_number(v) and len(_shape(n.outputs[0])) == 1:
            self.uniform[n.outputs[0]] = n
        elif name in ELEMENTWISE and not name.startswith("manymesh"):
            self._elementwise(n)
        elif _compat.is_var(v) and v in self.ranges:
            if name == "slice":
                return self._taken(n, v)
            if name in _SUMS:
                return self._sum(n, self.ranges[v])
        return None

    # --- what could be left in parts ------------------------------------------------------------------

    def _put_together(self, n: Node) -> None:
        operands = n.eqn.invars
        large = {self.home.get(v) for v in operands if _compat.is_var(v) and nbytes(v.aval) > SMALL}
        if len(_shape(n.outputs[0])) != 1 or len(large - {None}) < 2 or not all(map(_compat.is_var, operands)):
            return
        at, ranges = 0, list[Range]()
        for k, v in enumerate(operands):
            length = _shape(v)[0]
            self.parts[n.outputs[0], k, length] = v
            ranges.append((at, at := at + length))
        self.ranges[n.outputs[0]] = tuple(ranges)
        if self.stacks and any(v in self.producer and self.producer[v].mesh is not None for v in n.inputs):
            self.of_blocks.append(n.outputs[0])

    def _elementwise(self, n: Node) -> None:
        vectors = [v for v in n.eqn.invars if not _is_number(v)]
        given = [v for v in vectors if _compat.is_var(v) and v in self.ranges]
        if any(_shape(v) != _shape(n.outputs[0]) for v in given):  # the bytes of each element, say
            return
        if given and all(self._fits(v, self.ranges[given[0]]) for v in vectors):
            self.ranges[n.outputs[0]] = self.ranges[given[0]]

    def _fits(self, v: Atom, ranges: Sequence[Range]) -> bool:
        """Whether a vector could be left in these parts."""
        return _compat.is_var(v) and (v in self.uniform or self.ranges.get(v) == ranges)

    def _part(self, v: Atom, k: int, length: int) -> Atom:
        """The k-th part of a vector, made if it is not there; a number as it is."""
        if _is_number(v) or not _compat.is_var(v):
            return v
        if v in self.pieces:
            whole, first = self.pieces[v]
            return self._part(whole, first + k, length)
        if (v, k, length) not in self.parts:
            n = self.producer[v]
            if v in self.uniform:
                spread = n.eqn.params["broadcast_dimensions"]
                made, (part,) = trace_nodes(lambda x: lax.broadcast_in_dim(x, (length,), spread), [n.eqn.invars[0]])
                self.made += made
            else:
                operands = [self._part(x, k, length) for x in n.eqn.invars]
                aval: Any = v.aval
                part = _compat.new_var(aval.update(shape=(length,)))
                self.made.append(replace(n, eqn=n.eqn.replace(invars=operands, outvars=[part])))
            self.parts[v, k, length] = part
        return self.parts[v, k, length]

    # --- what reads them ------------------------------------------------------------------------------

    def _taken(self, n: Node, v: Var) -> list[Node] | None:
        """What takes a piece of one part, from that part. What takes several pieces was taken apart before."""
        (a,), (b,) = n.eqn.params["start_indices"], n.eqn.params["limit_indices"]
        if n.eqn.params["strides"] not in (None, (1,)):
            return None
        if (k := _around(self.ranges[v], (a, b))) is None:
            self._several(n, v, (a, b))
            return None
        self.made = []
        (out,), (start, end) = n.outputs, self.ranges[v][k]
        part = self._part(v, k, end - start)
        if (start, end) == (a, b):
            self.alias[out] = part
        else:
            cut = functools.partial(lax.slice, start_indices=(a - start,), limit_indices=(b - start,))
            nodes, _ = trace_nodes(cut, [part], backward=n.backward)
            self.made += [making(nodes[-1], [out])]
        return self.made

    def _several(self, n: Node, v: Var, piece: Range) -> None:
        """A piece that is several parts, each whole, could be left in these."""
        inside = [k for k, (a, b) in enumerate(self.ranges[v]) if piece[0] <= a and b <= piece[1]]
        ranges = [self.ranges[v][k] for k in inside]
        if inside and (ranges[0][0], ranges[-1][1]) == piece:
            self.pieces[n.outputs[0]] = v, inside[0]
            self.ranges[n.outputs[0]] = tuple([(a - piece[0], b - piece[0]) for a, b in ranges])

    def _sum(self, n: Node, ranges: Sequence[Range]) -> list[Node] | None:
        """A sum over all of a vector, or a product of two, of those over its parts."""
        if any(_shape(v) for v in n.outputs) or not all(self._fits(v, ranges) for v in n.eqn.invars if _shape(v)):
            return None
        self.made = []
        sums: list[Var] = []
        for k, (a, b) in enumerate(ranges):
            eqn = with_atoms(n.eqn, {v: self._part(v, k, b - a) for v in n.inputs})
            sums.append(_compat.new_var(n.outputs[0].aval))
            self.made.append(replace(n, eqn=eqn.replace(outvars=[sums[-1]])))
        nodes, _ = trace_nodes(lambda *xs: functools.reduce(COMBINE[_SUMS[n.primitive]], xs), sums, backward=n.backward)
        self.made += [*nodes[:-1], making(nodes[-1], n.outputs)]
        return self.made


def _around(ranges: Sequence[Range], piece: Range) -> int | None:
    """The part that a piece is of; None if there is none."""
    return next((k for k, (a, b) in enumerate(ranges) if a <= piece[0] and piece[1] <= b), None)


def _is_number(v: Atom) -> bool:
    """Whether it is one number for all elements, as a mean that keeps its dimension."""
    return _shape(v) in ((), (1,))


def _shape(v: Atom) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))
