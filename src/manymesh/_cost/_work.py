"""What a fragment computes, reads, and needs room for on each of its devices: counted over its jaxpr.

Products and convolutions count two operations a term, other arithmetic one for each element, changes of shape none.
XLA fuses arithmetic into what reads it; so only what a product, a sum or the like makes or reads is counted as memory.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .. import _compat
from .._compat import AbstractJaxpr, Eqn, Var
from .._passes._unreduced._links import shape_of
from ._operations import NOTHING, Operation, Operations, Split, flatten, spread


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

    @property
    def flops(self) -> float:
        """All operations."""
        return sum(self.matmul_flops.values()) + self.other_flops


# What XLA does with operands in memory and results in memory, and not on the way to something else.
_HEAVY = frozenset(
    "dot_general conv_general_dilated sort top_k approx_top_k gather argmax argmin fft cholesky triangular_solve lu qr "
    "eig eigh svd custom_call ffi_call pure_callback io_callback dynamic_update_slice rng_bit_generator random_bits "
    "threefry2x32 cumsum cumprod cummax cummin cumlogsumexp reduce_window reduce_window_sum scan while cond shard_map "
    "select_and_scatter_add ragged_dot ragged_dot_general all_to_all".split()
)
# Of these, those that read their operands as they are; XLA fuses arithmetic into the others.
_READS_MEMORY = frozenset(
    "dot_general conv_general_dilated sort top_k approx_top_k fft cholesky triangular_solve lu qr eig eigh svd custom_call "
    "ffi_call pure_callback io_callback scan while cond shard_map ragged_dot ragged_dot_general reduce_window_sum".split()
)
# No arithmetic, only another way to look at the same numbers.
_NO_FLOPS = frozenset(
    "reshape squeeze expand_dims broadcast_in_dim transpose iota copy convert_element_type bitcast_convert_type slice "
    "dynamic_slice concatenate pad rev gather dynamic_update_slice stop_gradient optimization_barrier name split "
    "sharding_constraint manymesh_constraint select_n copy_p device_put pvary random_wrap random_unwrap reduce_precision "
    "empty squeeze real imag create_token".split()
)
# Views: XLA makes no buffer for them.
_VIEWS = frozenset(
    "reshape squeeze expand_dims optimization_barrier name sharding_constraint manymesh_constraint".split()
)
_EXPENSIVE = frozenset("exp log tanh logistic erf sin cos pow rsqrt sqrt div cbrt exp2 log1p expm1 erf_inv".split())


def work(
    jaxpr: AbstractJaxpr,
    axes: Mapping[str, int],
    inputs: Sequence[Split],
    outputs: Sequence[Split] | None = None,
    on_cpu: bool = False,
) -> Work:
    """Counts what a computation does on each device.

    Args:
      jaxpr: the computation, open or closed.
      axes: size of each mesh axis.
      inputs, outputs: the axes that shard each dimension of what comes in and goes out.
      on_cpu: whether XLA's CPU backend runs it. It orders operations so that many can run at a time, and not so that
        little memory is needed, and it copies some operands of products into another order of their dimensions.
    """
    found = flatten(jaxpr)
    spread(found, axes, inputs, outputs)
    return _Counter(found, axes, on_cpu).count()


class _Counter:
    def __init__(self, found: Operations, axes: Mapping[str, int], on_cpu: bool) -> None:
        self.found, self.axes, self.on_cpu = found, axes, on_cpu
        self.ways = [found.ways(split, axes) for split in found.splits]
        self.bytes = [size // n for size, n in zip(found.sizes, self.ways, strict=True)]
        self.matmul: dict[str, float] = defaultdict(float)
        self.other = self.exchanged = self.exchanges = 0.0
        self.inner_read = self.inner_written = self.repeated_flops = self.repeated_bytes = 0.0
        self.open_loops = 0
        self.heavy: set[int] = set()  # what products and the like make
        self.inner_room: dict[int, int] = {}  # position of a loop -> bytes that its body needs

    def count(self) -> Work:
        for at, op in enumerate(self.found.operations):
            self._operations_of(at, op)
            self._exchange(at, op)
        read, written, room = self._memory()
        return Work(
            dict(self.matmul), self.other, read + self.inner_read, written + self.inner_written, room, self.exchanged,
            self.exchanges, self.repeated_flops, self.repeated_bytes, self.open_loops,
        )  # fmt: skip

    # --- arithmetic -----------------------------------------------------------------------------------

    def _operations_of(self, at: int, op: Operation) -> None:
        rule = _FLOPS.get(op.name)
        if rule is not None:
            axes = {a for k in op.makes for entry in self.found.splits[k] for a in entry}
            axes.update(self.found.summed.get(at, ()))
            dtype = str(_compat.dtype(op.eqn.invars[0]))
            self.matmul[dtype] += rule(op.eqn) / math.prod(self.axes[a] for a in axes)
        elif op.name in ("scan", "while", "cond", "shard_map"):
            self._inside(at, op)
        elif op.name.startswith(("reduce_", "arg", "cum", "scatter")) and op.reads and op.reads[0] != NOTHING:
            k = op.reads[2] if op.name.startswith("scatter") and op.reads[2] != NOTHING else op.reads[0]
            self.other += math.prod(self.found.shapes[k]) / self.ways[k]
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
        self.repeated_flops += (times - 1) * most.flops + most.repeated_flops
        self.repeated_bytes += (times - 1) * (most.bytes_read + most.bytes_written) + most.repeated_bytes
        self.open_loops += most.open_loops
        self.inner_room[at] = max(w.temporary_bytes for w in each)

    def _exchange(self, at: int, op: Operation) -> None:
        """Sums and gathers over devices: a ring sends a value's bytes once for each of both halves of a sum."""
        for axes, factor in ((self.found.summed.get(at, ()), 2.0), (self.found.gathered.get(at, ()), 1.0)):
            n = math.prod(self.axes[a] for a in axes)
            if n > 1:
                self.exchanged += factor * (n - 1) / n * sum(self.bytes[k] for k in op.makes)
                self.exchanges += 1

    # --- memory ---------------------------------------------------------------------------------------

    def _memory(self) -> tuple[float, float, int]:
        """Bytes read, bytes written, and most bytes at once besides arguments and results."""
        kept = self._kept()
        roots = self._roots(kept)
        outputs = self._outputs({k: op for op in self.found.operations for k in op.makes})
        read = written = 0.0
        writes: list[_Write] = []
        copies: dict[tuple[int, int], int] = {}
        for at, op in enumerate(self.found.operations):
            makes = [k for k in op.makes if k in kept]
            if makes:
                reads = set().union(*(roots[k] for k in op.reads if k != NOTHING))
                if self.on_cpu and op.name == "dot_general":
                    reads = self._copied(op, reads, roots, copies, writes)
                read += sum(self._amount_read(op, k, reads) for k in reads)
                written += sum(self.bytes[k] for k in makes)
                own = [k for k in makes if k not in outputs]
                over = op.name not in _HEAVY and not op.name.startswith("reduce_")
                writes.append(_Write(reads, makes, own, self.inner_room.get(at, 0), over))
        read += sum(self.bytes[k] for k in outputs & {*self.found.inputs})
        if self.on_cpu:
            writes = _by_breadth(writes, self.found.inputs)
            return read, written, _most_at_once(writes, self.bytes, eager=False)
        return read, written, _most_at_once(writes, self.bytes, eager=True)

    def _copied(
        self,
        op: Operation,
        reads: set[int],
        roots: Sequence[frozenset[int]],
        copies: dict[tuple[int, int], int],
        writes: list[_Write],
    ) -> set[int]:
        """What a product reads, with copies in place of operands whose dimensions are in an order that it cannot read.

        What arithmetic makes just before is written in the right order.
        """
        (left, right), (left_batch, right_batch) = op.eqn.params["dimension_numbers"]
        for side, (k, summed, batch) in enumerate(((op.reads[0], left, left_batch), (op.reads[1], right, right_batch))):
            if k == NOTHING:
                continue
            rank = len(self.found.shapes[k])
            others = [d for d in range(rank) if d not in summed and d not in batch]
            order = [*batch, *(others if side == 0 else summed), *(summed if side == 0 else others)]
            (base,) = roots[k] if len(roots[k]) == 1 else (k,)
            given = base in self.found.inputs or base in self.heavy
            if order == sorted(order) or (side and rank == 2) or not given:
                continue
            if (base, side) not in copies:
                copies[base, side] = len(self.bytes)
                self.bytes.append(self.bytes[base])
                writes.append(_Write({base}, [copies[base, side]], [copies[base, side]], 0, False))
            reads = (reads - {base}) | {copies[base, side]}
        return reads

    def _amount_read(self, op: Operation, k: int, reads: set[int]) -> float:
        """Bytes of a value that an operation reads: of a table, what is looked up."""
        if op.name in ("gather", "dynamic_slice", "slice") and len(reads) <= len(op.reads):
            return min(self.bytes[k], max(self.bytes[m] for m in op.makes))
        return self.bytes[k]

    def _kept(self) -> set[int]:
        """The values that are written to memory."""
        maker = {k: op for op in self.found.operations for k in op.makes}
        self.heavy = {k for op in self.found.operations if op.name in _HEAVY for k in op.makes}
        kept = {*self.found.inputs, *self._outputs(maker)}
        for op in self.found.operations:
            if op.name in _HEAVY or op.name.startswith(("reduce_", "scatter")):
                kept.update(op.makes)
            if op.name in _READS_MEMORY:
                kept.update(self._behind(k, maker) for k in op.reads if k != NOTHING)
        # XLA computes something expensive once, and in memory if several of what it fuses read it.
        readers: dict[int, set[int]] = defaultdict(set)
        for op in reversed(self.found.operations):
            if op.name in _EXPENSIVE and len(readers[op.makes[0]]) > 1:
                kept.add(op.makes[0])
            into = {k for k in op.makes if k in kept}.union(*(readers[k] for k in op.makes if k not in kept))
            for k in op.reads:
                if k != NOTHING:
                    readers[k] |= into
        return kept

    def _outputs(self, maker: Mapping[int, Operation]) -> set[int]:
        """The values that results are, or are views of."""
        results = {k for k in self.found.outputs if k != NOTHING}
        return {base if (base := self._behind(k, maker)) in maker else k for k in results}

    def _behind(self, k: int, maker: Mapping[int, Operation]) -> int:
        """The value of which another one is a view."""
        while k in maker and self._is_view(maker[k]) and maker[k].reads[0] != NOTHING:
            k = maker[k].reads[0]
        return k

    def _is_view(self, op: Operation) -> bool:
        same = op.name == "broadcast_in_dim" and op.reads[0] != NOTHING
        return op.name in _VIEWS or (same and self.found.sizes[op.reads[0]] == self.found.sizes[op.makes[0]])

    def _roots(self, kept: set[int]) -> list[frozenset[int]]:
        """For each value the values in memory from which it is computed when it is read."""
        roots = [frozenset({k}) for k in range(len(self.found.shapes))]
        for op in self.found.operations:
            for k in op.makes:
                if k not in kept:
                    roots[k] = frozenset().union(*(roots[r] for r in op.reads if r != NOTHING))
        return roots


@dataclass(slots=True)
class _Write:
    """Something that writes to memory: values it reads there, those it makes, those of them that are no results, the
    room that it needs inside, and whether it may write over what it reads."""

    reads: set[int]
    makes: list[int]
    own: list[int]
    room: int
    over: bool


def _by_breadth(writes: Sequence[_Write], inputs: Sequence[int]) -> list[_Write]:
    """The order of a queue: what has all that it reads goes to its end, arguments in their order first."""
    maker = {k: at for at, w in enumerate(writes) for k in w.makes}
    readers: dict[int, list[int]] = defaultdict(list)
    left = []
    for at, w in enumerate(writes):
        read = {k for k in w.reads if maker.get(k) != at}
        left.append(len(read))
        for k in read:
            readers[k].append(at)
    given = {k for w in writes for k in w.reads if k not in maker}
    queue: deque[int] = deque([*(at for at, n in enumerate(left) if not n)])
    ordered: list[_Write] = []

    def made(k: int) -> None:
        for at in readers[k]:
            left[at] -= 1
            if not left[at]:
                queue.append(at)

    for k in [*sorted(given.difference(inputs)), *inputs]:
        made(k)
    while queue:
        w = writes[queue.popleft()]
        ordered.append(w)
        for k in w.makes:
            made(k)
    return ordered


def _most_at_once(writes: Sequence[_Write], size: Sequence[int], eager: bool) -> int:
    """Most bytes at once.

    Args:
      writes: in the order in which they run.
      size: bytes of each value.
      eager: whether what needs no room of its own and frees some runs as soon as it can, as where XLA's scheduler
        saves memory: the sum of a gradient and its accumulator, which a jaxpr has at its end, frees the gradient at once.
    """
    maker = {k: at for at, w in enumerate(writes) for k in w.makes}
    waits = [{maker[k] for k in w.reads if k in maker and maker[k] != at} for at, w in enumerate(writes)]
    readers: dict[int, list[int]] = defaultdict(list)  # of what a write makes
    left: dict[int, int] = defaultdict(int)  # value -> reads to come
    for at, w in enumerate(writes):
        for k in w.reads:
            left[k] += 1
        for earlier in waits[at]:
            readers[earlier].append(at)
    done = [False] * len(writes)
    alive: set[int] = set()
    live = peak = 0

    def frees(w: _Write) -> bool:
        return not w.own and any(k in alive and left[k] == 1 for k in w.reads)

    def run(at: int) -> list[int]:
        """Does a write, and gives those that became ready."""
        nonlocal live, peak
        w = writes[at]
        done[at] = True
        for k in w.reads:
            left[k] -= 1
        dying = sum(size[k] for k in w.reads if k in alive and not left[k])
        made = sum(size[k] for k in w.own)
        peak = max(peak, live + (max(made - dying, 0) if w.over else made) + w.room)
        alive.difference_update([k for k in w.reads if not left[k]])
        alive.update(k for k in w.own if left[k])
        live += sum(size[k] for k in w.own if left[k]) - dying
        for later in readers[at]:
            waits[later].discard(at)
        ready = [later for later in readers[at] if not waits[later] and not done[later]]
        return [later for later in ready if eager and frees(writes[later])]

    for at in range(len(writes)):
        ready = [at] if not done[at] else []
        while ready:
            now = ready.pop()
            if not done[now]:
                ready += run(now)
    return peak


def _ranked(split: Split, v: Var) -> Split:
    """A split for a value; a literal operand has none, whatever its rank."""
    rank = len(shape_of(v))
    return split if len(split) == rank else ((),) * rank


def _dot(eqn: Eqn) -> float:
    (left, _), _ = eqn.params["dimension_numbers"]
    shape = shape_of(eqn.invars[0])
    return 2.0 * math.prod(shape_of(eqn.outvars[0])) * math.prod(shape[d] for d in left)


def _conv(eqn: Eqn) -> float:
    numbers, kernel = eqn.params["dimension_numbers"], shape_of(eqn.invars[1])
    terms = math.prod(kernel) // max(kernel[numbers.rhs_spec[0]], 1)
    return 2.0 * math.prod(shape_of(eqn.outvars[0])) * terms / eqn.params.get("batch_group_count", 1)


_FLOPS: dict[str, Callable[[Eqn], float]] = {"dot_general": _dot, "conv_general_dilated": _conv}
