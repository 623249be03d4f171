"""The dimensions of a loop's values, and the mesh axes that shard them.

Dimensions that equations tie together are one `Dim`. Where a sharding constraint shards an activation
it shards its dims, so that every other value with such a dimension is known to be sharded too, in the
forward and the backward pass and on every submesh the value reaches. The answer is only used to choose
where to sum; a wrong one costs time, never a value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from ... import _compat
from ..._compat import AbstractJaxpr, Atom, Eqn, Var
from ..._program._calls import call_body
from ..._program._flat import FlatProgram
from ..._program._nodes import Loop
from ..._task import CONSTRAINT, names_as_axes
from ...meta._rules import parts_of
from ._links import links, shape_of

Entry = Any  # what a spec says of one dimension: an axis, a tuple of axes, None or UNCONSTRAINED

_CONSTRAINTS = ("sharding_constraint", "manymesh_constraint")


class Dim:
    """A dimension that many values have; a node of a union-find forest."""

    __slots__ = ("axes", "batch", "parent")

    def __init__(self) -> None:
        self.parent: Dim | None = None
        self.batch = False  # whether the microbatch was cut along it
        self.axes: dict[int, Counter[tuple[str, ...]]] = {}  # submesh -> what constraints said of it

    def root(self) -> Dim:
        """The representative of all dims joined with this one."""
        top = self
        while top.parent is not None:
            top = top.parent
        while self.parent is not None and self.parent is not top:
            self.parent, self = top, self.parent  # shorten the path
        return top

    def join(self, other: Dim) -> None:
        """Makes the two one."""
        a, b = self.root(), other.root()
        if a is not b:
            b.parent = a
            a.batch |= b.batch


@dataclass(eq=False, slots=True)
class Frame:
    """A list of equations with its own variables: the loop's body, or the body of a call or scan in it.

    Attributes:
      eqns: its equations.
      invars, outvars: what it takes and gives; those of the loop's body are not listed.
      up: the frame that holds the call, and the position of the call there; None for the loop's body.
      dims: variable -> its dimensions.
      reduced: values without a batch dimension that are computed from one that has it.
      producer: variable -> position of the equation that makes it.
      inner: position of a call or scan -> the frame of its body.
      submesh: submesh of each equation.
    """

    eqns: Sequence[Eqn]
    invars: Sequence[Var] = ()
    outvars: Sequence[Atom] = ()
    up: tuple[Frame, int] | None = None
    dims: dict[Var, tuple[Dim, ...]] = field(default_factory=dict)
    reduced: set[Var] = field(default_factory=set)
    producer: dict[Atom, int] = field(default_factory=dict)
    inner: dict[int, Frame] = field(default_factory=dict)
    submesh: Sequence[int] = ()

    def of(self, atom: Atom) -> tuple[Dim, ...]:
        """The dimensions of a variable or literal."""
        if not _compat.is_var(atom):
            return tuple(Dim() for _ in shape_of(atom))
        found = self.dims.get(atom)
        if found is None:
            found = self.dims[atom] = tuple(Dim() for _ in shape_of(atom))
        return found

    def __repr__(self) -> str:
        return f"Frame({len(self.eqns)} equations, {len(self.inner)} calls)"


Value = tuple[Frame, Atom]  # a value of a frame


class Analysis:
    """The dims of everything in a loop's body."""

    def __init__(self, flat: FlatProgram, index: int) -> None:
        placement, loop = flat.placement, flat.loops[index]
        assert placement is not None, "which axes shard a value depends on its submesh"
        self.meshes: Sequence[Mesh] = placement.submeshes
        self.nodes = flat.index.bodies[index]
        self._axes: dict[tuple[Dim, int, int], tuple[str, ...]] = {}
        self._constraints: list[tuple[tuple[Dim, ...], tuple[Entry, ...], int]] = []
        self.top = Frame([n.eqn for n in self.nodes], submesh=[placement.node[n][0] for n in self.nodes])
        for pieces in loop.xs:
            rank = len(shape_of(pieces.inner))
            if rank:
                self.top.of(pieces.inner)[loop.spec.dim % rank].batch = True
        for carry in loop.carries:
            self._join_all(self.top.of(carry.inner), self.top.of(carry.out))
        self._visit(self.top)
        # What a weight's constraint says is not true of activations.
        said = [
            (d, entry, s)
            for dims, entries, s in self._constraints
            if any(d.root().batch for d in dims)
            for d, entry in zip(dims, entries, strict=False)
        ]
        self._note(said)
        given = [word for word in self._given(flat, loop) if not word[0].root().axes]
        self._note(given)
        self.is_sharded = any(axes for d, *_ in (*said, *given) for c in d.root().axes.values() for axes in c)
        if self.is_sharded:
            self._mark_reduced(self.top)

    def axes(self, dim: Dim, size: int, s: int) -> tuple[str, ...]:
        """The axes of submesh ``s`` that shard a dimension of ``size``, as far as constraints say."""
        key = (dim.root(), size, s)
        if key not in self._axes:
            self._axes[key] = self._find_axes(*key)
        return self._axes[key]

    def _find_axes(self, root: Dim, size: int, s: int) -> tuple[str, ...]:
        own = root.axes.get(s) or sum(root.axes.values(), Counter())
        shape = self.meshes[s].shape
        for axes, _ in own.most_common():
            known = tuple(a for a in axes if shape.get(a, 1) > 1)
            if known and size % math.prod(shape[a] for a in known) == 0:
                return known
        return ()

    def batched(self, frame: Frame, atom: Atom, s: int) -> bool:
        """Whether a value has a batch dimension that is sharded."""
        return any(
            d.root().batch and bool(self.axes(d, n, s)) for d, n in zip(frame.of(atom), shape_of(atom), strict=True)
        )

    @staticmethod
    def _note(words: Iterable[tuple[Dim, Entry, int]]) -> None:
        """Counts what is said of dims on a submesh."""
        for d, entry, s in words:
            if entry is not PartitionSpec.UNCONSTRAINED:
                d.root().axes.setdefault(s, Counter())[parts_of(entry)] += 1

    def _given(self, flat: FlatProgram, loop: Loop) -> Iterator[tuple[Dim, Entry, int]]:
        """What the sharding of a batch says of its pieces, where tasks say nothing."""
        for pieces in loop.xs:
            v: Any = pieces.outer[0]
            while (maker := flat.index.producer.get(v)) is not None and maker.task is None and maker.inputs:
                v = maker.inputs[0]
            given, dims = flat.pins.given.get(v), self.top.of(pieces.inner)
            if given is not None and len(shape_of(v)) == len(dims):
                alike = (s for s, mesh in enumerate(self.meshes) if mesh.axis_names == given.mesh.axis_names)
                s = next(alike, 0)
                yield from ((d, entry, s) for d, entry in zip(dims, given.spec, strict=False))

    # --- dims ---------------------------------------------------------------------------------------

    def _visit(self, frame: Frame) -> None:
        for i, eqn in enumerate(frame.eqns):
            for v in eqn.outvars:
                if _compat.is_var(v):
                    frame.producer[v] = i
            name = eqn.primitive.name
            if name in _CONSTRAINTS:
                self._constrain(frame, eqn, frame.submesh[i])
            if name == "scan":
                self._scan(frame, i, eqn)
            elif name == "cond":
                for branch in eqn.params["branches"]:
                    self._call(frame, i, eqn, branch, eqn.invars[1:], keep=False)
            elif name == "while":
                self._while(frame, i, eqn)
            else:
                body = call_body(eqn)
                if body is not None:
                    self._call(frame, i, eqn, body, eqn.invars, keep=True)
                else:
                    self._link(frame, eqn)

    def _link(self, frame: Frame, eqn: Eqn) -> None:
        values = [*eqn.invars, *eqn.outvars]
        count = len(eqn.invars)
        dims = [frame.of(v) if _compat.is_var(v) else () for v in values]
        if not any(dims):
            return
        sizes = [shape_of(v) for v in values]
        any_length = eqn.primitive.name == "reshape"
        for a, i, b, j in links(eqn):
            a, b = (a if a >= 0 else count + ~a), (b if b >= 0 else count + ~b)
            if dims[a] and dims[b] and sizes[a][i] > 1 and (any_length or sizes[a][i] == sizes[b][j]):
                dims[a][i].join(dims[b][j])

    def _constrain(self, frame: Frame, eqn: Eqn, s: int) -> None:
        entries = constraint_entries(eqn, self.meshes[s])
        self._constraints.append((frame.of(eqn.invars[0]), entries, s))

    def _enter(self, frame: Frame, i: int, body: AbstractJaxpr) -> Frame:
        parts = _compat.open_jaxpr(body)
        s = frame.submesh[i]
        return Frame(parts.eqns, parts.invars, parts.outvars, (frame, i), submesh=[s] * len(parts.eqns))

    def _call(self, frame: Frame, i: int, eqn: Eqn, body: AbstractJaxpr, operands: Sequence[Atom], keep: bool) -> None:
        child = self._enter(frame, i, body)
        if len(child.invars) != len(operands) or len(child.outvars) != len(eqn.outvars):
            return
        child.dims.update({v: frame.of(o) for v, o in zip(child.invars, operands, strict=True)})
        self._visit(child)
        for v, o in zip(eqn.outvars, child.outvars, strict=True):
            if _compat.is_var(v):
                self._join_all(frame.of(v), child.of(o))
        if keep:
            frame.inner[i] = child

    def _scan(self, frame: Frame, i: int, eqn: Eqn) -> None:
        scan = _compat.scan_parts(eqn)
        child = self._enter(frame, i, scan.jaxpr)
        n = scan.num_consts + scan.num_carry
        for k, (v, o) in enumerate(zip(child.invars, eqn.invars, strict=True)):
            child.dims[v] = frame.of(o)[k >= n :]
        self._visit(child)
        for k, (v, o) in enumerate(zip(eqn.outvars, child.outvars, strict=True)):
            if k < scan.num_carry:
                self._join_all(child.of(o), child.of(child.invars[scan.num_consts + k]))
            if _compat.is_var(v):
                self._join_all(frame.of(v)[k >= scan.num_carry :], child.of(o))
        frame.inner[i] = child

    def _while(self, frame: Frame, i: int, eqn: Eqn) -> None:
        child = self._enter(frame, i, eqn.params["body_jaxpr"])
        operands = eqn.invars[eqn.params["cond_nconsts"] :]
        child.dims.update({v: frame.of(o) for v, o in zip(child.invars, operands, strict=True)})
        self._visit(child)
        carried = child.invars[eqn.params["body_nconsts"] :]
        for v, o, inner in zip(eqn.outvars, child.outvars, carried, strict=True):
            self._join_all(child.of(o), child.of(inner))
            if _compat.is_var(v):
                self._join_all(frame.of(v), child.of(o))

    @staticmethod
    def _join_all(a: Sequence[Dim], b: Sequence[Dim]) -> None:
        for x, y in zip(a, b, strict=False):
            x.join(y)

    # --- what was summed over the batch ---------------------------------------------------------------

    def _mark_reduced(self, frame: Frame) -> None:
        for i, eqn in enumerate(frame.eqns):
            s = frame.submesh[i]
            sources = [v for v in eqn.invars if _compat.is_var(v)]
            child = frame.inner.get(i)
            if child is not None:
                child.reduced.update(
                    v for v, o in zip(child.invars, eqn.invars, strict=True) if _compat.is_var(o) and o in frame.reduced
                )
                self._mark_reduced(child)
                while eqn.primitive.name == "scan" and (more := self._carried_on(child, eqn)):
                    child.reduced.update(more)  # what a step leaves is what the next one starts with
                    self._mark_reduced(child)
                found = {
                    v
                    for v, o in zip(eqn.outvars, child.outvars, strict=True)
                    if _compat.is_var(o) and o in child.reduced
                }
                frame.reduced.update(v for v in found if _compat.is_var(v))
            elif any(v in frame.reduced or self.batched(frame, v, s) for v in sources):
                frame.reduced.update(v for v in eqn.outvars if _compat.is_var(v) and not self.batched(frame, v, s))

    @staticmethod
    def _carried_on(child: Frame, eqn: Eqn) -> set[Var]:
        """What a scan's body starts with and is not known to be reduced, though it leaves it so."""
        scan = _compat.scan_parts(eqn)
        starts = child.invars[scan.num_consts :][: scan.num_carry]
        pairs = zip(starts, child.outvars[: scan.num_carry], strict=True)
        return {v for v, o in pairs if _compat.is_var(o) and o in child.reduced} - child.reduced


def constraint_entries(eqn: Eqn, mesh: Mesh) -> tuple[Entry, ...]:
    """What a constraint says of each dimension: an axis, a tuple of axes, None or ``UNCONSTRAINED``."""
    rank = len(shape_of(eqn.invars[0]))
    free = PartitionSpec.UNCONSTRAINED
    if eqn.primitive.name == "manymesh_constraint":
        context = eqn.params.get("where", CONSTRAINT)
        spec = tuple(names_as_axes(context, eqn.params["names"], shape_of(eqn.invars[0]), mesh))
        left_open: Any = ()
    else:
        sharding = eqn.params["sharding"]
        spec = tuple(getattr(sharding, "spec", (free,) * rank))
        left_open = eqn.params.get("unconstrained_dims", ())
    padded = (*spec, *(None,) * (rank - len(spec)))
    return tuple(free if d in left_open else entry for d, entry in enumerate(padded))
