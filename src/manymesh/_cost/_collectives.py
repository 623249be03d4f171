"""What devices of a submesh send each other inside a fragment: the sums, gathers and exchanges that XLA's partitioner makes.

A ring of n devices sends (n - 1) / n of a value to gather it, as much to add it up in shards, and twice that to add it
up for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from .._compat import Eqn
from .._passes._unreduced._links import SCATTERS, links, shape_of, updated_dims
from ._operations import CONSTRAINTS, NOTHING, Axes, Operation, Operations

GATHER = "all_gather"


def exchange(found: Operations, axes: Mapping[str, int], manual: Mapping[str, int]) -> None:
    """Notes what each operation sends, and gathers operands that products want whole, once for all that want them so.

    Args:
      found: the operations, `spread`.
      axes: size of each mesh axis.
      manual: sizes of axes over which the computation exchanges values itself, in a `jax.shard_map`.
    """
    _Exchanges(found, axes, manual).run()


class _Exchanges:
    def __init__(self, found: Operations, axes: Mapping[str, int], manual: Mapping[str, int]) -> None:
        self.found, self.axes, self.manual = found, axes, manual
        self.gathered: dict[tuple[int, Axes], int] = {}
        self.operations: list[Operation] = []

    def run(self) -> None:
        for op in self.found.operations:
            self.operations.append(self._of(op))
        self.found.operations = self.operations

    def _of(self, op: Operation) -> Operation:
        if op.name in CONSTRAINTS:
            return self._constrained(op)
        if op.name in ("dot_general", "conv_general_dilated"):
            return self._product(op)
        if op.name.startswith("reduce_") and "axes" in op.eqn.params:
            return self._add_up(op, (a for d in op.eqn.params["axes"] for a in self._entry(op.reads[0], d)))
        if op.name == "gather":
            return self._looked_up(op)
        if op.name in SCATTERS:
            batch = op.eqn.params["dimension_numbers"].scatter_indices_batching_dims
            rows = [d for i, d in enumerate(updated_dims(op.eqn)) if i not in batch]
            return self._add_up(op, (a for d in rows for a in self._entry(op.reads[2], d)))
        if op.name in _BY_HAND:
            return self._by_hand(op)
        return op

    # --- sizes ----------------------------------------------------------------------------------------

    def _entry(self, k: int, d: int) -> Axes:
        return self.found.splits[k][d] if k != NOTHING else ()

    def _ways(self, axes: Iterable[str]) -> int:
        return math.prod(self.axes[a] for a in axes)

    def _held(self, k: int) -> float:
        """Bytes of a value on one device."""
        return self.found.sizes[k] / self.found.ways(self.found.splits[k], self.axes)

    def _axes_of(self, op: Operation) -> set[str]:
        return {a for k in op.makes for entry in self.found.splits[k] for a in entry}

    # --- operations -----------------------------------------------------------------------------------

    def _add_up(self, op: Operation, over: Iterable[str]) -> Operation:
        """Terms that lie on several devices: the sum lies on all of them, or in shards."""
        summed = tuple(dict.fromkeys(over))
        kept = self._axes_of(op)
        whole, shards = self._ways(a for a in summed if a not in kept), self._ways(a for a in summed if a in kept)
        held = sum(self._held(k) for k in op.makes)
        sent = 2 * (whole - 1) / whole * held + (shards - 1) * held
        return replace(op, summed=summed, sent=sent, exchanges=(whole > 1) + (shards > 1))

    def _product(self, op: Operation) -> Operation:
        together, places = _followed(op.eqn)
        kept = self._axes_of(op)
        reads = list(op.reads)
        summed: list[str] = []
        for side in (0, 1):
            lost: list[str] = []
            other = op.reads[1 - side]
            busy = {a for d in range(_rank(op, 1 - side)) for a in self._entry(other, d)} | kept
            for d in range(_rank(op, side)):
                for a in self._entry(op.reads[side], d):
                    if d in together[side]:
                        shared = a in self._entry(other, together[side][d])
                        (summed if shared or a not in busy else lost).append(a)
                    elif (side, d) not in places or a not in self._entry(op.makes[0], places[side, d]):
                        lost.append(a)
            if lost:
                reads[side] = self._gather(op, op.reads[side], tuple(lost))
        return self._add_up(replace(op, reads=tuple(reads)), summed)

    def _gather(self, op: Operation, k: int, lost: Axes) -> int:
        """A value without some of the axes that shard it."""
        if (k, lost) not in self.gathered:
            whole = self.gathered[k, lost] = self.found.like(k)
            self.found.splits[whole] = tuple(tuple(a for a in entry if a not in lost) for entry in self.found.splits[k])
            sent = (self._ways(lost) - 1) * self._held(k)
            self.operations.append(Operation(op.eqn, (k,), (whole,), GATHER, sent=sent, exchanges=1))
        return self.gathered[k, lost]

    def _looked_up(self, op: Operation) -> Operation:
        """Rows of a table that is cut between rows: each device gives those that it has; or the table is gathered."""
        table, result = op.reads[0], op.makes[0]
        if table == NOTHING:
            return op
        followed = {d for k, d, out, j in links(op.eqn) if k == 0}
        cut = [a for d, entry in enumerate(self.found.splits[table]) if d not in followed for a in entry]
        kept = self._axes_of(op)
        shared = tuple(a for a in cut if a in kept)
        if shared:
            n = self._ways(shared)
            rows = 3 * (n - 1) * self._held(result)  # of all devices, added up
            if (n - 1) * self._held(table) <= rows:
                op = replace(op, reads=(self._gather(op, table, shared), *op.reads[1:]))
            else:
                op = replace(op, sent=rows, exchanges=2)
        added = self._add_up(op, (a for a in cut if a not in kept))
        return replace(added, sent=added.sent + op.sent, exchanges=added.exchanges + op.exchanges)

    def _constrained(self, op: Operation) -> Operation:
        """An axis that goes is gathered; one that goes to another dimension is exchanged."""
        if op.reads[0] == NOTHING:
            return op
        before, after = self.found.splits[op.reads[0]], self.found.splits[op.makes[0]]
        lost = [a for entry in before for a in entry if not any(a in e for e in after)]
        moved = [a for b, e in zip(before, after, strict=True) for a in b if a not in e and a not in lost]
        gone, turned = self._ways(lost), self._ways(moved)
        held = self._held(op.makes[0])
        sent = (gone - 1) / gone * held + (turned - 1) / turned * held
        return replace(op, sent=sent, exchanges=(gone > 1) + (turned > 1))

    def _by_hand(self, op: Operation) -> Operation:
        params = op.eqn.params
        names = params.get("axes", params.get("axis_name", ()))
        names = names if isinstance(names, tuple) else (names,)
        n = math.prod(self.manual.get(a, 1) for a in names)
        moved = op.makes if op.name in _GATHERS else op.reads[:1] if op.name == "ragged_all_to_all" else op.reads
        held = sum(self._held(k) for k in moved if k != NOTHING)
        part = float(n > 1) if op.name == "ppermute" else (n - 1) / n  # what a device passes on goes as it is
        return replace(op, sent=_BY_HAND[op.name] * part * held, exchanges=int(n > 1))


_GATHERS = (GATHER, "all_gather_invariant", "all_gather_reduced")
# What a device sends in the exchanges of a shard_map, as a multiple of (n - 1) / n of the whole value.
_BY_HAND = {
    "psum": 2.0, "psum2": 2.0, "psum_invariant": 2.0, "pmax": 2.0, "pmin": 2.0, "reduce_scatter": 1.0, "psum_scatter": 1.0,
    "all_to_all": 1.0, "ragged_all_to_all": 1.0, "ppermute": 1.0, "pbroadcast": 1.0, **dict.fromkeys(_GATHERS, 1.0),
}  # fmt: skip


def _followed(eqn: Eqn) -> tuple[tuple[dict[int, int], dict[int, int]], dict[tuple[int, int], int]]:
    """Of a product or convolution: for each operand the dimensions that are summed over, with those of the other one that
    they meet; and for the others, as (operand, dimension), their dimension of the result."""
    numbers = eqn.params["dimension_numbers"]
    places = {(k, d): j for k, d, out, j in links(eqn) if out < 0}
    if eqn.primitive.name == "dot_general":
        (left, right), (_, right_batch) = numbers
        places.update({(1, d): j for j, d in enumerate(right_batch)})
        return (dict(zip(left, right, strict=True)), dict(zip(right, left, strict=True))), places
    batch, feature, *_ = numbers.lhs_spec
    if eqn.params["batch_group_count"] > 1:  # groups of the batch are features of the result
        places[0, batch] = numbers.out_spec[1]
    if eqn.params["feature_group_count"] > 1:
        return ({}, {}), {**places, (0, feature): numbers.out_spec[1]}
    return ({feature: numbers.rhs_spec[1]}, {numbers.rhs_spec[1]: feature}), places


def _rank(op: Operation, k: int) -> int:
    return len(shape_of(op.eqn.invars[k]))
