"""A fragment's jaxpr as one flat list of operations over numbered values, with the axes that shard each value."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from .. import _compat
from .._compat import AbstractJaxpr, Atom, Eqn, Var
from .._passes._unreduced._links import SCATTERS, Link, links, shape_of
from .._program._calls import call_body
from .._program._nodes import nbytes

Axes = tuple[str, ...]
Split = tuple[Axes, ...]  # the mesh axes that shard each dimension of a value

NOTHING = -1  # the number of a literal, and of a result that nobody wants
CONSTRAINTS = ("sharding_constraint", "manymesh_constraint")


def is_reduction(name: str) -> bool:
    """Whether an operation of this name makes one number of several; rounding to fewer bits (``reduce_precision``) does not."""
    return name.startswith("reduce_") and name != "reduce_precision"


@dataclass(slots=True)
class Operation:
    """An equation that is no call.

    Attributes:
      eqn: the equation.
      reads, makes: numbers of its values.
      name: what it does; the name of its primitive, unless it is something around it that has no equation.
      summed: axes over which its terms are added up across devices.
      sent: bytes that a device sends to others of its submesh.
      exchanges: how often devices wait for each other.
    """

    eqn: Eqn
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    name: str = ""
    summed: Axes = ()
    sent: float = 0.0
    exchanges: int = 0

    def __post_init__(self) -> None:
        self.name = self.name or str(self.eqn.primitive.name)


@dataclass
class Operations:
    """What a jaxpr does, its calls opened.

    Attributes:
      operations: in order.
      shapes, sizes: shape and bytes of each value, all its shards together.
      inputs, outputs: numbers of what comes in and what goes out.
      splits: the axes that shard each dimension of each value, once `spread` was called.
    """

    operations: list[Operation] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    splits: list[Split] = field(default_factory=list)

    def new(self, atom: Atom) -> int:
        """A number for a new value."""
        self.shapes.append(shape_of(atom))
        self.sizes.append(nbytes(atom.aval))
        return len(self.shapes) - 1

    def like(self, k: int) -> int:
        """A number for another value of the same form."""
        self.shapes.append(self.shapes[k])
        self.sizes.append(self.sizes[k])
        self.splits.append(self.splits[k])
        return len(self.shapes) - 1

    def ways(self, split: Split, axes: Mapping[str, int]) -> int:
        """Into how many pieces a split cuts a value."""
        return math.prod(axes[a] for entry in split for a in entry)


def flatten(jaxpr: AbstractJaxpr) -> Operations:
    """The operations of a jaxpr, open or closed."""
    found = Operations()
    parts = _compat.open_jaxpr(jaxpr)
    found.inputs = tuple(found.new(v) for v in parts.invars)
    found.outputs = tuple(_open(found, jaxpr, found.inputs))
    _add_rows_in_place(found)
    return found


def _add_rows_in_place(found: Operations) -> None:
    """A scatter into zeros that are added to something else is one into that: XLA makes no zeros, and no sum."""
    scatters = {k: at for at, op in enumerate(found.operations) if _adds_rows(op.eqn) for k in op.makes}
    if not scatters:
        return
    maker = {k: at for at, op in enumerate(found.operations) for k in op.makes}
    uses = Counter(k for op in found.operations for k in op.reads)
    uses.update(found.outputs)
    left: list[Operation | None] = list(found.operations)
    for at, op in enumerate(found.operations):
        for k, other in (op.reads, op.reads[::-1]) if op.name in ("add", "add_any") else ():
            between = []
            while k in maker and found.operations[maker[k]].name in CONSTRAINTS and uses[k] == 1:
                between.append(maker[k])
                (k,) = found.operations[maker[k]].reads
            if other == NOTHING or k not in scatters or uses[k] != 1:
                continue
            scatter = found.operations[scatters[k]]
            zeros = maker.get(scatter.reads[0])
            if zeros is not None and _makes_zeros(found.operations[zeros].eqn):
                left[at] = Operation(scatter.eqn, (other, *scatter.reads[1:]), op.makes)
                for gone in (*between, scatters[k], *([zeros] if uses[scatter.reads[0]] == 1 else [])):
                    left[gone] = None
                break
    found.operations = [op for op in left if op is not None]


def _makes_zeros(eqn: Eqn) -> bool:
    value = eqn.invars[0] if eqn.primitive.name == "broadcast_in_dim" else None
    return isinstance(value, _compat.Literal) and bool(value.val == 0)


def _adds_rows(eqn: Eqn) -> bool:
    """Whether an equation adds rows to its first operand, on each device by itself or not."""
    if eqn.primitive.name != "shard_map":
        return eqn.primitive.name in SCATTERS
    parts = _compat.open_jaxpr(eqn.params["jaxpr"])
    return bool(parts.eqns) and parts.eqns[-1].primitive.name in SCATTERS and parts.outvars[0] in parts.eqns[-1].outvars


def _open(found: Operations, jaxpr: AbstractJaxpr, arguments: Sequence[int]) -> list[int]:
    parts = _compat.open_jaxpr(jaxpr)
    numbers: dict[Var, int] = dict(zip(parts.invars, arguments, strict=True))
    numbers.update((v, found.new(v)) for v in parts.constvars)

    def number(atom: Atom) -> int:
        return numbers[atom] if _compat.is_var(atom) else NOTHING

    for eqn in parts.eqns:
        reads = tuple([number(v) for v in eqn.invars])
        body, solver = call_body(eqn), _compat.solver(eqn)
        if body is not None:
            made = _open(found, body, reads)
        elif solver is not None:
            made = _open(found, solver[0], [number(v) for v in solver[1]])
        else:
            made = [found.new(v) for v in eqn.outvars]
            found.operations.append(Operation(eqn, reads, tuple(made)))
        numbers.update(zip(eqn.outvars, made, strict=True))
    return [number(v) for v in parts.outvars]


def split_of(spec: PartitionSpec, rank: int, axes: Mapping[str, int]) -> Split:
    """The mesh axes of each dimension that a spec names."""
    entries = [e if isinstance(e, tuple) else (e,) if isinstance(e, str) else () for e in spec]
    entries += [()] * (rank - len(entries))
    return tuple(tuple(a for a in entry if axes.get(a, 1) > 1) for entry in entries[:rank])


def spread(
    found: Operations, axes: Mapping[str, int], inputs: Sequence[Split], outputs: Sequence[Split] | None = None
) -> None:
    """Finds how every value inside a fragment is sharded: forward from what comes in, back from what goes out, forward.

    XLA's partitioner decides when it compiles; this follows the same links between dimensions, each axis once a value.

    Args:
      found: the operations; their splits are filled in.
      axes: size of each mesh axis.
      inputs, outputs: the splits of what comes in and what goes out; None for results that lie as they come.
    """
    spreading = _Spreading(found, axes)
    for k, split in zip(found.inputs, inputs, strict=True):
        spreading.splits[k] = split
    spreading.forward()
    for k, split in zip(found.outputs, outputs or [()] * len(found.outputs), strict=True):
        if k != NOTHING and split:
            spreading.wants(k, split)
    spreading.backward()
    spreading.forward()
    found.splits = spreading.splits


class _Spreading:
    def __init__(self, found: Operations, axes: Mapping[str, int]) -> None:
        self.found, self.axes = found, axes
        self.splits: list[Split] = [((),) * len(shape) for shape in found.shapes]
        self.fixed = set(found.inputs)
        self.links = [self._ordered(op) for op in found.operations]

    def _ordered(self, op: Operation) -> list[Link]:
        """Links, of a product those of the larger operand first: where both want an axis, the smaller one is gathered."""
        if op.name in CONSTRAINTS or op.name == "shard_map":
            return []
        if op.name != "dot_general":
            return list(links(op.eqn))
        sizes = [self.found.sizes[k] if k != NOTHING else 0 for k in op.reads]
        return sorted(links(op.eqn), key=lambda link: -sizes[link[0]])

    def wants(self, k: int, split: Split) -> None:
        """A value takes axes that it does not have yet, in dimensions that have none and that they divide."""
        if k in self.fixed:
            return
        used = {a for entry in self.splits[k] for a in entry}
        merged = list(self.splits[k])
        for d, (entry, size) in enumerate(zip(split, self.found.shapes[k], strict=True)):
            free = tuple(a for a in entry if a not in used)
            if free and not merged[d] and size % math.prod(self.axes[a] for a in free) == 0:
                merged[d] = free
                used.update(free)
        self.splits[k] = tuple(merged)

    def forward(self) -> None:
        """What operands have, results have."""
        for at, op in enumerate(self.found.operations):
            if op.name in CONSTRAINTS:
                self._constrain(op)
                continue
            if op.name == "shard_map":
                for k, spec in zip(op.makes, _compat.out_specs_of(op.eqn), strict=True):
                    self.wants(k, split_of(spec, len(self.found.shapes[k]), self.axes))
            for a, i, b, j in self.links[at]:
                source, target = self._value(op, a), self._value(op, b)
                if source != NOTHING and target != NOTHING and b < 0:
                    self._tie(source, i, target, j, op.name == "reshape")

    def backward(self) -> None:
        """What results have, operands have."""
        for at in range(len(self.found.operations) - 1, -1, -1):
            op = self.found.operations[at]
            if op.name in CONSTRAINTS:
                if op.reads[0] != NOTHING:
                    self.wants(op.reads[0], self.splits[op.makes[0]])
                continue
            for a, i, b, j in self.links[at]:
                source, target = self._value(op, b), self._value(op, a)
                if source != NOTHING and target != NOTHING and b < 0:
                    self._tie(source, j, target, i, op.name == "reshape")

    def _value(self, op: Operation, position: int) -> int:
        return op.reads[position] if position >= 0 else op.makes[~position]

    def _tie(self, source: int, i: int, target: int, j: int, any_length: bool) -> None:
        entry = self.splits[source][i]
        if entry and (any_length or self.found.shapes[source][i] == self.found.shapes[target][j]):
            rank = len(self.found.shapes[target])
            self.wants(target, tuple(entry if d == j else () for d in range(rank)))

    def _constrain(self, op: Operation) -> None:
        spec = getattr(op.eqn.params.get("sharding"), "spec", None)
        before = self.splits[op.reads[0]] if op.reads[0] != NOTHING else ()
        if spec is None:
            self.wants(op.makes[0], before)
            return
        rank = len(self.found.shapes[op.makes[0]])
        asked = split_of(spec, rank, self.axes)
        still_open = [d < len(spec) and spec[d] is PartitionSpec.UNCONSTRAINED for d in range(rank)]
        split = (
            tuple(b if free else a for a, b, free in zip(asked, before, still_open, strict=True)) if before else asked
        )
        self.splits[op.makes[0]] = split
        self.fixed.add(op.makes[0])
