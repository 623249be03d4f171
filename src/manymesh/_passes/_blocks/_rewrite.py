"""A program in which values that lie in blocks are so many values, each on its submesh."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from ... import _compat
from ..._compat import Atom, Var
from ..._program._flat import FlatProgram
from ..._program._nodes import Carry, Loop, Node, Pieces, nbytes
from ..._program._rewrite import making, trace_nodes
from ._find import Split, tie_at
from ._ties import COMBINE, Tie, block_aval, block_eqn, joins_blocks, taken_apart

# From bits to numbers: those of a normal distribution, times a number.
_STEPS_OF_A_DRAW = 30


@dataclass(frozen=True)
class Whole:
    """A value in blocks that something reads whole.

    Attributes:
      var: the value.
      reader: the primitive that reads it; of random numbers the user's line that draws them, or that they are drawn for.
      nbytes: bytes that come together in one step.
    """

    var: Var
    reader: str
    nbytes: int


class Rewriter:
    """Rewrites a program.

    Args:
      flat: the program.
      split: what lies in blocks.
      results: how each result is cut.

    Attributes:
      blocks: value -> its blocks, as far as they are made.
      whole: what is put together, because something reads it whole.
      drawn: random numbers for all layers, which are drawn on one submesh.
    """

    def __init__(self, flat: FlatProgram, split: Mapping[Var, Split], results: Sequence[Split | None]) -> None:
        self.flat, self.split, self.results = flat, split, results
        self.blocks: dict[Var, list[Var]] = {}
        self.whole: dict[Var, Whole] = {}
        self.drawn: dict[Var, Whole] = {}
        self._joined: dict[Var, Var] = {}
        self._cut: dict[tuple[Var, Split], list[Var]] = {}
        self._nodes: list[Node] = []

    def run(self) -> FlatProgram:
        """The program with other inputs, nodes, loops and results."""
        flat = self.flat
        for v in flat.invars:
            self._in_blocks(v)
        for loop in flat.loops:
            for c in loop.carries:
                self._in_blocks(c.inner)
                self._in_blocks(c.final)
            for p in loop.xs:
                self._in_blocks(p.inner)
            for p in loop.ys:
                for piece in p.outer:
                    self._in_blocks(piece)
        entered: dict[int, tuple[list[Carry], list[Pieces]]] = {}
        for n in flat.nodes:
            if n.loop is not None and n.loop not in entered:
                entered[n.loop] = self._enter(flat.loops[n.loop])
            self._node(n)
        loops = []
        for i, loop in enumerate(flat.loops):
            carries, xs = entered[i] if i in entered else self._enter(loop)
            carries = [replace(c, out=out) for c, out in self._left(loop, carries)]
            ys = [p for pieces in loop.ys for p in self._collected(pieces)]
            loops.append(replace(loop, carries=tuple(carries), xs=tuple(xs), ys=tuple(ys)))
        outvars = [
            b
            for v, split in zip(flat.outvars, self.results, strict=True)
            for b in ([v] if split is None else self._blocks_of(v, split, None))
        ]
        return replace(
            flat,
            invars=tuple(b for v in flat.invars for b in self.blocks.get(v, [v])),
            outvars=tuple(outvars),
            nodes=tuple(self._nodes),
            loops=tuple(loops),
            stacked={v: column for v, column in flat.stacked.items() if v not in self.blocks},
            placement=None,
        )

    def _in_blocks(self, v: Atom) -> None:
        """Gives a value that no equation makes its blocks."""
        if _compat.is_var(v) and v in self.split and v not in self.blocks:
            split = self.split[v]
            aval = block_aval(v.aval, split.dim, len(split.submeshes))
            self.blocks[v] = [_compat.new_var(aval) for _ in split.submeshes]

    # --- loops ----------------------------------------------------------------------------------------

    def _enter(self, loop: Loop) -> tuple[list[Carry], list[Pieces]]:
        """Carries and pieces, in blocks where their inner variables are; what they start from is made before."""
        carries: list[Carry] = []
        for c in loop.carries:
            if c.inner in self.split:
                starts = self._blocks_of(c.init, self.split[c.inner], None, follows=True)
                of = zip(self.blocks[c.inner], starts, self.blocks[c.final], strict=True)
                carries += [Carry(inner, c.out, init, final) for inner, init, final in of]
            else:
                carries.append(Carry(c.inner, c.out, self._atom(c.init, None, "the loop"), c.final))
        cut: list[Pieces] = []
        for p in loop.xs:
            if p.inner in self.split:
                columns = [self._blocks_of(v, self.split[p.inner], None, follows=True) for v in p.outer]
                cut += [
                    Pieces(inner, outer)
                    for inner, outer in zip(self.blocks[p.inner], zip(*columns, strict=True), strict=True)
                ]
            else:
                cut.append(Pieces(p.inner, tuple(self._atom(v, None, "the loop") for v in p.outer)))
        return carries, cut

    def _left(self, loop: Loop, carries: list[Carry]) -> Iterator[tuple[Carry, Any]]:
        """Each carry with what the body leaves for it."""
        left: dict[Any, Iterator[Var]] = {}
        of = {b: c for c in loop.carries if c.inner in self.split for b in self.blocks[c.inner]}
        for c in carries:
            if c.inner in of:
                original = of[c.inner]
                yield c, next(left.setdefault(original, iter(self.blocks[original.out])))
            else:
                yield c, c.out

    def _collected(self, p: Pieces) -> list[Pieces]:
        if p.inner not in self.split:
            return [p]
        columns = [self.blocks[v] for v in p.outer if _compat.is_var(v)]
        return [
            Pieces(inner, outer) for inner, outer in zip(self.blocks[p.inner], zip(*columns, strict=True), strict=True)
        ]

    # --- equations ------------------------------------------------------------------------------------

    def _node(self, n: Node) -> None:
        made = [v for v in n.outputs if v in self.split]
        if made and n.primitive == "optimization_barrier":
            return self._barrier(n)
        for o, v in enumerate(n.eqn.outvars):
            if _compat.is_var(v) and v in self.split:
                split = self.split[v]
                of = joins_blocks(n.eqn, split.dim, len(split.submeshes))
                if of is not None:
                    return self._stack(n, split, of)
                tie = tie_at(n, ~o, split)
                assert tie is not None, "what is made in blocks can be"
                self._each(n, tie, split)
                return None
        for k, x in enumerate(n.eqn.invars):
            if _compat.is_var(x) and x in self.split:
                split = self.split[x]
                if n.task is None and self._take_apart(n, split):
                    return None
                tie = tie_at(n, k, split)
                if tie is not None and tie.combined_by:
                    return self._combine(n, tie, split)
                if n.primitive == "concatenate" and len(_compat.shape(x)) == 1 and n.loop is None and not n.guard:
                    return self._vector(n)
        self._emit(n, n.eqn.replace(invars=[self._atom(v, n, n.primitive) for v in n.eqn.invars]))
        return None

    def _emit(self, like: Node, eqn: Any, **tags: Any) -> None:
        self._nodes.append(replace(like, eqn=eqn, **tags))

    def _each(self, n: Node, tie: Tie, split: Split) -> list[list[Any]]:
        """The equation for each block; the results of each."""
        count = len(split.submeshes)
        columns = [
            self._blocks_of(v, Split(split.submeshes, tie.operands[k]), n)
            if k in tie.operands
            else [self._atom(v, n, n.primitive)] * count
            for k, v in enumerate(n.eqn.invars)
        ]
        made = []
        for k, mesh in enumerate(split.submeshes):
            eqn = block_eqn(n.eqn, tie, count, [column[k] for column in columns])
            self._emit(n, eqn, mesh=mesh)
            made.append(eqn.outvars)
        if tie.results:
            for o, v in enumerate(n.eqn.outvars):
                if not _compat.is_var(v):
                    continue
                column = [outs[o] for outs in made]
                if self.split.get(v) == Split(split.submeshes, tie.results[o]):
                    self.blocks[v] = column
                else:  # another result of the same equation, which is wanted whole or cut otherwise
                    self._join(v, column, tie.results[o])
        return made

    def _join(self, v: Var, column: list[Any], dim: int) -> None:
        """A value that is made in blocks, but is used otherwise, under its own name."""
        nodes, _ = trace_nodes(lambda *xs: lax.concatenate(xs, dim), column, loop=self.flat.index.scope.get(v))
        nodes[-1] = making(nodes[-1], [v])
        self._nodes += nodes
        if v in self.split:
            self._joined[v] = v
            self.blocks[v] = self._cut_of(v, self.split[v], False)

    def _combine(self, n: Node, tie: Tie, split: Split) -> None:
        """One result of those of the blocks."""
        partial = [outs[0] for outs in self._each(n, tie, split)]
        total = lambda *xs: functools.reduce(COMBINE[tie.combined_by], xs)  # noqa: E731
        nodes, _ = trace_nodes(total, partial, loop=n.loop, backward=n.backward)
        nodes[-1] = making(nodes[-1], n.eqn.outvars)
        self._nodes += nodes

    def _vector(self, n: Node) -> None:
        """A vector of blocks as they are: `leave_apart` puts it together only where it is read as a whole, and tells of it."""
        blocks = [b for v in n.eqn.invars for b in (self.blocks[v] if _compat.is_var(v) and v in self.split else [v])]
        self._emit(n, n.eqn.replace(invars=blocks))

    def _stack(self, n: Node, split: Split, of: tuple[int, ...]) -> None:
        """A stack of pieces as one stack on each submesh, each of the pieces that belong to its block."""
        (v,) = n.eqn.outvars
        aval = block_aval(v.aval, split.dim, len(split.submeshes))
        self.blocks[v] = [_compat.new_var(aval) for _ in split.submeshes]
        for k, (mesh, block) in enumerate(zip(split.submeshes, self.blocks[v], strict=True)):
            own = [self._atom(x, n, n.primitive) for x, at in zip(n.eqn.invars, of, strict=True) if at == k]
            self._emit(n, n.eqn.replace(invars=own, outvars=[block]), mesh=mesh)

    def _take_apart(self, n: Node, split: Split) -> bool:
        """Slices of blocks, where each is of one; False where it is not."""
        parts = taken_apart(n.eqn)
        if parts is None or parts.dim != split.dim:
            return False
        (v,) = n.inputs
        length, count = _compat.shape(v)[split.dim], len(split.submeshes)
        of = parts.blocks(length, count)
        if of is None:
            return False
        for out, (a, b), k in zip(n.outputs, parts.ranges, of, strict=True):
            start = k * (length // count)
            keeps = len(_compat.shape(out)) == len(_compat.shape(v))

            def part(x: Any, a: int = a - start, b: int = b - start, keeps: bool = keeps) -> Any:
                taken = lax.slice_in_dim(x, a, b, axis=split.dim)
                return taken if keeps else lax.squeeze(taken, (split.dim,))

            nodes, _ = trace_nodes(part, [self.blocks[v][k]])
            nodes[-1] = making(nodes[-1], [out])
            for node in nodes:
                self._emit(n, node.eqn, mesh=split.submeshes[k])
        return True

    def _barrier(self, n: Node) -> None:
        """A barrier for each submesh, of what it has of the operands, and one for what is whole."""
        rest: list[int] = []
        grids: dict[Any, list[int]] = defaultdict(list)
        for o, v in enumerate(n.eqn.outvars):
            if _compat.is_var(v) and v in self.split:
                grids[self.split[v].submeshes].append(o)
            else:
                rest.append(o)
        for submeshes, positions in grids.items():
            columns = [self._blocks_of(n.eqn.invars[o], self.split[n.eqn.outvars[o]], n) for o in positions]
            for o, column in zip(positions, columns, strict=True):
                self.blocks[n.eqn.outvars[o]] = [_compat.new_var(x.aval) for x in column]
            for k, mesh in enumerate(submeshes):
                outs = [self.blocks[n.eqn.outvars[o]][k] for o in positions]
                self._emit(n, n.eqn.replace(invars=[column[k] for column in columns], outvars=outs), mesh=mesh)
        if rest:
            invars = [self._atom(n.eqn.invars[o], n, "optimization_barrier") for o in rest]
            self._emit(n, n.eqn.replace(invars=invars, outvars=[n.eqn.outvars[o] for o in rest]))

    # --- values ---------------------------------------------------------------------------------------

    def _blocks_of(self, v: Atom, split: Split, n: Node | None, follows: bool = False) -> list[Any]:
        """The blocks of a value that is in blocks, or that is cut for the occasion."""
        if _compat.is_var(v) and self.split.get(v) == split:
            return self.blocks[v]
        assert _compat.is_var(v), "a literal is a number, and a number is in no blocks"
        if (v, split) not in self._cut:
            self._atom(v, n, "another cut")
            self._cut[v, split] = self._cut_of(v, split, follows)
        return self._cut[v, split]

    def _line(self, n: Node) -> str:
        """The user's line of a draw; where a function of JAX's hides it, that of the first which computes with the numbers."""
        if line := _compat.source_line(n.eqn):
            return f"at {line}"
        for _ in range(_STEPS_OF_A_DRAW):
            readers = self.flat.index.readers.get(n.outputs[0])
            if not readers:
                break
            n = readers[0]
            if line := _compat.source_line(n.eqn):
                return f"for {line}"
        return ""

    def _cut_of(self, v: Var, split: Split, follows: bool) -> list[Any]:
        made, count = self.flat.index.producer.get(v), len(split.submeshes)
        if made is not None and made.primitive == "random_bits" and made.task is None:
            self.drawn[v] = Whole(v, self._line(made), nbytes(v.aval) * (count - 1) // count)
        size = _compat.shape(v)[split.dim] // len(split.submeshes)
        cut = []
        for k in range(len(split.submeshes)):

            def part(x: Any, k: int = k) -> Any:
                return lax.slice_in_dim(x, k * size, (k + 1) * size, axis=split.dim)

            nodes, (out,) = trace_nodes(
                part, [self._joined.get(v, v)], loop=self.flat.index.scope.get(v), layout_follows_loop=follows
            )
            self._nodes += nodes
            cut.append(out)
        return cut

    def _atom(self, v: Atom, n: Node | None, reader: str) -> Any:
        """A value whole: itself, or put together of its blocks."""
        if not _compat.is_var(v) or v not in self.split:
            return v
        if v not in self._joined:
            split, loop = self.split[v], self.flat.index.scope.get(v)
            nodes, (self._joined[v],) = trace_nodes(
                lambda *xs: lax.concatenate(xs, split.dim), self.blocks[v], loop=loop
            )
            self._nodes += nodes
            count = len(split.submeshes)
            times = self.flat.loops[loop].spec.num_microbatches if loop is not None else 1
            name = n.task.split("__mm")[0] if n is not None and n.task is not None else reader
            self.whole[v] = Whole(v, name, nbytes(v.aval) * (count - 1) // count * times)
        return self._joined[v]
