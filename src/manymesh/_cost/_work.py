"""What a fragment computes, reads, and needs room for on each of its devices: counted over its jaxpr.

Products and convolutions count two operations a term (eight of complex numbers), factorizations and Fourier transforms what
textbooks say, other arithmetic one for each element, changes of shape none.
`_room` counts what goes through memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import AbstractJaxpr, Eqn, Var
from .._passes._unreduced._links import shape_of
from ._collectives import exchange
from ._factored import factored
from ._operations import NOTHING, Operation, Operations, Split, flatten, is_reduction, spread
from ._room import Inside, Room, traffic


@dataclass(frozen=True)
class Work:
    """What one run of a fragment does on each of its devices.

    Attributes:
      matmul_flops: operations of products and convolutions, by the dtype of their operands.
      other_flops: other arithmetic operations.
      bytes_read: of arguments and of what is computed on the way, as far as it is written to memory.
      bytes_written: results, and what is computed on the way.
      temporary_bytes: most bytes at once besides arguments and results.
      exchanged_bytes: what a device sends to others of its submesh, for sums and gathers.
      exchanges: how many such sums and gathers there are.
      repeated_flops, repeated_bytes: what of all that is in later rounds of loops. XLA's own count has each loop's
        body once.
      open_loops: loops of unknown length, whose body counts once.
      largest: what takes most of the temporary bytes.
    """

    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    other_flops: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    temporary_bytes: int = 0
    exchanged_bytes: float = 0.0
    exchanges: float = 0
    repeated_flops: float = 0.0
    repeated_bytes: float = 0.0
    open_loops: int = 0
    largest: tuple[Inside, ...] = ()

    @property
    def flops(self) -> float:
        """All operations."""
        return sum(self.matmul_flops.values()) + self.other_flops


# No arithmetic, only another way to look at the same numbers.
_NO_FLOPS = frozenset(
    [
        "reshape",
        "squeeze",
        "broadcast_in_dim",
        "transpose",
        "iota",
        "copy",
        "convert_element_type",
        "bitcast_convert_type",
        "slice",
        "dynamic_slice",
        "concatenate",
        "pad",
        "rev",
        "gather",
        "dynamic_update_slice",
        "stop_gradient",
        "optimization_barrier",
        "name",
        "split",
        "stack",
        "unstack",
        "tile",
        "reshard",
        "sharding_constraint",
        "manymesh_constraint",
        "manymesh_border",
        "manymesh_box",
        "select_n",
        "copy_p",
        "device_put",
        "pvary",
        "random_wrap",
        "random_unwrap",
        "reduce_precision",
        "empty",
        "real",
        "imag",
        "create_token",
        "all_gather",
        "all_gather_invariant",
        "all_to_all",
        "ragged_all_to_all",
        "ppermute",
        "pbroadcast",
    ]
)


def work(
    jaxpr: AbstractJaxpr,
    axes: Mapping[str, int],
    inputs: Sequence[Split],
    outputs: Sequence[Split] | None = None,
    on_cpu: bool = False,
    scan: Eqn | None = None,
    manual: Mapping[str, int] | None = None,
) -> Work:
    """Counts what a computation does on each device.

    Args:
      jaxpr: the computation, open or closed.
      axes: size of each mesh axis.
      inputs, outputs: the axes that shard each dimension of what comes in and goes out.
      on_cpu: whether XLA's CPU backend runs it. It orders operations so that many can run at a time, and not so that
        little memory is needed, and it copies some operands of products into another order of their dimensions.
      scan: the loop whose body it is.
      manual: sizes of the axes of a `jax.shard_map` around it.
    """
    found = flatten(jaxpr)
    spread(found, axes, inputs, outputs)
    exchange(found, axes, manual or {})
    if scan is not None:
        _cut_and_stack(found, scan)
    return _Counter(found, axes, on_cpu, manual or {}).count()


def _cut_and_stack(found: Operations, scan: Eqn) -> None:
    """Around the body of a scan: its slice of what is scanned over is cut off, and what it stacks is written into a stack."""
    parts = _compat.scan_parts(scan)
    slices = {k: found.like(k) for k in found.inputs[parts.num_consts + parts.num_carry :]}
    body = [replace(op, reads=tuple(slices.get(k, k) for k in op.reads)) for op in found.operations]
    outputs = [slices.get(k, k) for k in found.outputs]
    stacked = [(k, found.like(k)) if i >= parts.num_carry and k != NOTHING else (k, k) for i, k in enumerate(outputs)]
    cut = [Operation(scan, (k,), (piece,), "dynamic_slice") for k, piece in slices.items()]
    written = [Operation(scan, (k,), (out,), "dynamic_update_slice") for k, out in stacked if k != out]
    found.operations, found.outputs = [*cut, *body, *written], tuple(out for _, out in stacked)


def _reads_all(name: str) -> bool:
    """Whether there is an operation for each number that is read, not for each that is made."""
    return is_reduction(name) or name.startswith(("arg", "cum", "scatter"))


class _Counter:
    def __init__(self, found: Operations, axes: Mapping[str, int], on_cpu: bool, manual: Mapping[str, int]) -> None:
        self.found, self.axes, self.on_cpu, self.manual = found, axes, on_cpu, manual
        self.ways = [found.ways(split, axes) for split in found.splits]
        self.bytes = [size // n for size, n in zip(found.sizes, self.ways, strict=True)]
        self.matmul: dict[str, float] = defaultdict(float)
        self.other = self.exchanged = self.exchanges = 0.0
        self.inner_read = self.inner_written = self.repeated_flops = self.repeated_bytes = 0.0
        self.open_loops = 0
        self.inner_room: dict[int, Room] = {}  # position of a loop -> what its body needs

    def count(self) -> Work:
        for at, op in enumerate(self.found.operations):
            self._operations_of(at, op)
            self.exchanged += op.sent
            self.exchanges += op.exchanges
        read, written, room = traffic(self.found, self.bytes, self.inner_room, self.on_cpu)
        return Work(
            dict(self.matmul), self.other, read + self.inner_read, written + self.inner_written, room.nbytes, self.exchanged,
            self.exchanges, self.repeated_flops, self.repeated_bytes, self.open_loops, room.largest,
        )  # fmt: skip

    # --- arithmetic -----------------------------------------------------------------------------------

    def _operations_of(self, at: int, op: Operation) -> None:
        rule = _FLOPS.get(op.name)
        if rule is not None:
            axes = {a for k in op.makes for entry in self.found.splits[k] for a in entry}
            axes.update(op.summed)
            dtype = str(_compat.dtype(op.eqn.invars[0]))
            self.matmul[dtype] += rule(op.eqn) / math.prod(self.axes[a] for a in axes)
        elif op.name in ("scan", "while", "cond", "shard_map"):
            self._inside(at, op)
        elif _reads_all(op.name) and op.reads and op.reads[0] != NOTHING:
            k = op.reads[2] if op.name.startswith("scatter") and op.reads[2] != NOTHING else op.reads[0]
            self.other += math.prod(self.found.shapes[k]) / self.ways[k]
        elif (flops := factored(op.eqn)) is not None:  # far from as fast as products, on any device
            self.other += flops / max((self.ways[k] for k in op.makes), default=1)
        elif op.name not in _NO_FLOPS:
            self.other += sum(math.prod(self.found.shapes[k]) / self.ways[k] for k in op.makes[:1])

    def _inside(self, at: int, op: Operation) -> None:
        """The body of a loop or conditional, as often as it runs."""
        splits = [self.found.splits[k] if k != NOTHING else () for k in op.reads]
        if op.name == "scan":
            parts = _compat.scan_parts(op.eqn)
            fixed = parts.num_consts + parts.num_carry
            bodies = [(parts.jaxpr, [s[1:] if i >= fixed else s for i, s in enumerate(splits)], self.axes)]
            times = float(parts.length)
        elif op.name == "while":
            count = op.eqn.params["cond_nconsts"]
            bodies, times = [(op.eqn.params["body_jaxpr"], splits[count:], self.axes)], 1.0
            self.open_loops += 1
        elif op.name == "cond":
            bodies, times = [(b, splits[1:], self.axes) for b in op.eqn.params["branches"]], 1.0
        else:  # the body of a shard_map sees what is left to a device by the axes that are its own
            jaxpr = op.eqn.params["jaxpr"]
            manual = _compat.manual_axes_of(op.eqn)
            others = {a: n for a, n in self.axes.items() if a not in manual}
            bodies = [(jaxpr, [tuple(tuple(a for a in e if a in others) for e in s) for s in splits], others)]
            times = 1.0
        each = [
            work(
                b,
                axes,
                [_ranked(s, v) for s, v in zip(given, _compat.open_jaxpr(b).invars, strict=True)],
                on_cpu=self.on_cpu,
                scan=op.eqn if op.name == "scan" else None,
                manual={**self.manual, **{a: n for a, n in self.axes.items() if a not in axes}},
            )
            for b, given, axes in bodies
        ]
        most = max(each, key=lambda w: (w.flops, w.bytes_read))
        for dtype, flops in most.matmul_flops.items():
            self.matmul[dtype] += times * flops
        self.other += times * most.other_flops
        self.exchanged += times * most.exchanged_bytes
        self.exchanges += times * most.exchanges
        self.inner_read += times * most.bytes_read
        self.inner_written += times * most.bytes_written
        if times:  # XLA removes a loop without rounds
            self.repeated_flops += (times - 1) * most.flops + most.repeated_flops
            self.repeated_bytes += (times - 1) * (most.bytes_read + most.bytes_written) + most.repeated_bytes
        self.open_loops += most.open_loops
        self.inner_room[at] = max((Room(w.temporary_bytes, w.largest) for w in each), key=lambda room: room.nbytes)


def _ranked(split: Split, v: Var) -> Split:
    """A split for a value; a literal operand has none, whatever its rank, and rows are added to one part of an accumulator."""
    rank = len(shape_of(v))
    return split[-rank:] if rank and len(split) >= rank else ((),) * rank


def _each(eqn: Eqn) -> int:
    """Operations of one term."""
    return 8 if jnp.issubdtype(_compat.dtype(eqn.outvars[0]), jnp.complexfloating) else 2


def _dot(eqn: Eqn) -> float:
    (left, _), _ = eqn.params["dimension_numbers"]
    shape = shape_of(eqn.invars[0])
    return float(_each(eqn) * math.prod(shape_of(eqn.outvars[0])) * math.prod(shape[d] for d in left))


def _ragged_dot(eqn: Eqn) -> float:
    """Each row, or each term, is in one of the groups."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (left, _), _ = numbers.dot_dimension_numbers
    shape = shape_of(eqn.invars[0])
    results = math.prod(shape_of(eqn.outvars[0]))
    if set(numbers.lhs_ragged_dimensions) & set(left):
        results //= max(shape_of(eqn.invars[2])[-1], 1)
    return float(_each(eqn) * results * math.prod(shape[d] for d in left))


def _conv(eqn: Eqn) -> float:
    """Terms with a number of the input: neither padding, nor zeros between the rows of an input that a stride has thinned out."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    given, kernel, made = (shape_of(v) for v in (*eqn.invars[:2], eqn.outvars[0]))
    terms = math.prod(made[d] for d in numbers.out_spec[:2]) * kernel[numbers.rhs_spec[1]]
    steps = params["window_strides"], params["lhs_dilation"], params["rhs_dilation"], params["padding"]
    of_spatial = (spec[2:] for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    for i, k, o, stride, thinned, apart, (before, _) in zip(*of_spatial, *steps, strict=True):
        places, taps = np.arange(made[o]) * stride - before, np.arange(kernel[k]) * apart
        several, each = (places, taps) if len(places) > len(taps) else (taps, places)
        terms *= sum(_in_input(several + one, given[i], thinned) for one in each.tolist())
    return float(_each(eqn) * terms)


def _in_input(places: np.ndarray[Any, Any], size: int, spread: int) -> int:
    """How many places are those of a number of an input that is spread."""
    return int(np.count_nonzero((places >= 0) & (places <= (size - 1) * spread) & (places % spread == 0)))


def _kernel(eqn: Eqn) -> float:
    """What a Pallas kernel says itself (`pl.CostEstimate`), else the products in its body, for each block of its grid."""
    said = eqn.params.get("cost_estimate")
    if said is not None:
        return float(said.flops)
    grid = [n for n in eqn.params["grid_mapping"].grid if isinstance(n, int)]  # what is known before the call
    return math.prod(grid) * _products(eqn.params["jaxpr"])


def _products(jaxpr: AbstractJaxpr) -> float:
    found = 0.0
    for e in _compat.open_jaxpr(jaxpr).eqns:
        rule = _FLOPS.get(e.primitive.name)
        times = _compat.scan_parts(e).length if e.primitive.name == "scan" else 1
        found += rule(e) if rule is not None else times * sum(map(_products, _compat.jaxprs_in(e)))
    return found


_FLOPS: dict[str, Callable[[Eqn], float]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
    "pallas_call": _kernel,
}
