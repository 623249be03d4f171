"""What a computation reads from memory and writes there, and the room that it needs: which values XLA does not fuse away.

XLA fuses arithmetic into what reads it. So only what a product, a sum or the like makes or reads is in memory, and what
is expensive and read by several of the computations that are left.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from .. import _compat
from ._operations import NOTHING, Operation, Operations, is_reduction


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What XLA does with operands in memory and results in memory, and not on the way to something else.
_HEAVY = _words(
    "dot_general conv_general_dilated sort top_k approx_top_k gather argmax argmin fft cholesky triangular_solve lu qr "
    "eig eigh svd custom_call ffi_call pure_callback io_callback dynamic_update_slice rng_bit_generator random_bits "
    "threefry2x32 cumsum cumprod cummax cummin cumlogsumexp reduce_window reduce_window_sum scan while cond shard_map "
    "select_and_scatter_add ragged_dot ragged_dot_general all_to_all all_gather"
)
# Of these, those that read their operands as they are; XLA fuses arithmetic into the others.
_READS_MEMORY = _words(
    "dot_general conv_general_dilated sort top_k approx_top_k fft cholesky triangular_solve lu qr eig eigh svd custom_call "
    "ffi_call pure_callback io_callback scan while cond shard_map ragged_dot ragged_dot_general reduce_window_sum"
)
# Their bodies read their operands, and write their results.
_ENTERED = _words("scan while cond shard_map")
# Views: XLA makes no buffer for them.
_VIEWS = _words(
    "reshape squeeze optimization_barrier name sharding_constraint manymesh_constraint manymesh_border manymesh_box"
)
_EXPENSIVE = _words("exp log tanh logistic erf sin cos pow rsqrt sqrt div cbrt exp2 log1p expm1 erf_inv")


class Inside(NamedTuple):
    """Values alike that a computation has inside where it needs most room.

    Attributes:
      name: their type, and the user's line that makes them.
      values: how many.
      nbytes: bytes on a device, all of them together.
    """

    name: str
    values: int
    nbytes: int


class Room(NamedTuple):
    """Bytes at once besides arguments and results, and the largest of what takes them."""

    nbytes: int
    largest: tuple[Inside, ...] = ()


class Traffic(NamedTuple):
    """What one device does with its memory in one run.

    Attributes:
      read, written: bytes.
      room: most bytes at once besides arguments and results.
    """

    read: float
    written: float
    room: Room


def traffic(found: Operations, size: Sequence[int], inner: Mapping[int, Room], on_cpu: bool) -> Traffic:
    """Follows a computation's values through a device's memory.

    Args:
      found: the operations.
      size: bytes of each value on one device.
      inner: position of a loop -> the room that its body needs.
      on_cpu: whether XLA's CPU backend runs it, see `work`.
    """
    return _Counter(found, size, inner, on_cpu).count()


class _Counter:
    def __init__(self, found: Operations, size: Sequence[int], inner: Mapping[int, Room], on_cpu: bool) -> None:
        self.found, self.inner, self.on_cpu = found, inner, on_cpu
        self.bytes = list(size)
        self.heavy: set[int] = set()  # what products and the like make

    def count(self) -> Traffic:
        """Bytes read, bytes written, and most bytes at once besides arguments and results."""
        kept = self._kept()
        roots = _Roots(self.found, kept)
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
                if op.name == "scan":  # what it stacks is zeros before
                    written += sum(self.bytes[k] for k in op.makes[_compat.scan_parts(op.eqn).num_carry :] if k in kept)
                elif op.name not in _ENTERED:
                    read += sum(self._amount_read(op, k, reads) for k in reads)
                    written += sum(self.bytes[k] for k in makes)
                own = [k for k in makes if k not in outputs]
                over = op.name not in _HEAVY and not is_reduction(op.name)
                writes.append(_Write(reads, makes, own, self.inner.get(at, Room(0)), over))
        read += sum(self.bytes[k] for k in outputs & {*self.found.inputs})
        if self.on_cpu:
            writes = _by_breadth(writes, self.found.inputs)
        room, alive, within = _most_at_once(writes, self.bytes, eager=not self.on_cpu)
        return Traffic(read, written, Room(room, self._largest(alive, within)))

    def _largest(self, alive: Iterable[int], within: Sequence[Inside]) -> tuple[Inside, ...]:
        """The largest of what is alive inside, values alike in a line."""
        found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        maker = {k: op for op in self.found.operations for k in op.makes}
        for name, values, size in [(self._name(k, maker), 1, self.bytes[k]) for k in alive if k in maker] + [*within]:
            found[name][0] += values
            found[name][1] += size
        lines = [Inside(name, values, size) for name, (values, size) in found.items()]
        return tuple(sorted(lines, key=lambda line: -line.nbytes)[:3])

    def _name(self, k: int, maker: Mapping[int, Operation]) -> str:
        op = maker[k]
        dtype = _compat.dtype(op.eqn.outvars[op.makes.index(k)]) if op.name == op.eqn.primitive.name else ""
        shape = ",".join(map(str, self.found.shapes[k]))
        line = _compat.source_line(op.eqn)  # none, where JAX itself made it
        return f"{dtype}[{shape}] of {op.name}" + (f" at {line}" if line else "")

    def _copied(
        self,
        op: Operation,
        reads: set[int],
        roots: _Roots,
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
            (base,) = of if len(of := roots[k]) == 1 else (k,)
            given = base in self.found.inputs or base in self.heavy
            plain = len(others) == len(summed) == 1 and sorted(batch) == list(range(len(batch)))  # read either way
            if order == sorted(order) or plain or not given:
                continue
            if (base, side) not in copies:
                copies[base, side] = len(self.bytes)
                self.bytes.append(self.bytes[base])
                writes.append(_Write({base}, [copies[base, side]], [copies[base, side]], Room(0), False))
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
            if op.name in _HEAVY or is_reduction(op.name) or op.name.startswith("scatter"):
                kept.update(op.makes)
            if op.name in _READS_MEMORY:
                kept.update(self._behind(k, maker) for k in op.reads if k != NOTHING)
        # XLA computes something expensive once, and in memory if several of what it fuses read it.
        readers: dict[int, set[int]] = defaultdict(set)
        for op in reversed(self.found.operations):
            # XLA multiplies instead of dividing by a constant, and takes no division for expensive on a GPU.
            cheap = op.name == "div" and (op.reads[1] == NOTHING or not self.on_cpu)
            if op.name in _EXPENSIVE and not cheap and len(readers[op.makes[0]]) > 1:
                kept.add(op.makes[0])
            into = {k for k in op.makes if k in kept}.union(*(readers[k] for k in op.makes if k not in kept))
            for k in op.reads:
                if k != NOTHING and len(readers[k]) < 2:  # whether there are several is all that counts
                    readers[k].update(islice(into, 2))
        return kept

    def _outputs(self, maker: Mapping[int, Operation]) -> set[int]:
        """The values that results are, or are views of."""
        results = {k for k in self.found.outputs if k != NOTHING}
        uses = Counter(r for op in self.found.operations for r in op.reads)
        bases = ((k, self._behind(k, maker)) for k in results)
        return {self._turned(base, maker, uses) if base in maker else k for k, base in bases}

    def _turned(self, k: int, maker: Mapping[int, Operation], uses: Mapping[int, int]) -> int:
        """What a product makes, for a result that is its transpose and nothing else: XLA multiplies the other way around."""
        turn = maker[k]
        if turn.name != "transpose":
            return k
        made = turn.reads[0]
        if made not in maker or maker[made].name != "dot_general" or uses[made] > 1:
            return k
        (left, _), (batch, _) = maker[made].eqn.params["dimension_numbers"]
        first = len(batch)
        middle = len(self.found.shapes[maker[made].reads[0]]) - len(left)  # after what is free on the left
        order = *range(first), *range(middle, len(self.found.shapes[k])), *range(first, middle)
        one_each = (middle - first, len(order) - middle) == (1, 1)
        return made if tuple(turn.eqn.params["permutation"]) == order and (one_each or not self.on_cpu) else k

    def _behind(self, k: int, maker: Mapping[int, Operation]) -> int:
        """The value of which another one is a view."""
        while k in maker and self._is_view(maker[k]) and maker[k].reads[0] != NOTHING:
            k = maker[k].reads[0]
        return k

    def _is_view(self, op: Operation) -> bool:
        same = op.name == "broadcast_in_dim" and op.reads[0] != NOTHING
        return op.name in _VIEWS or (same and self.found.sizes[op.reads[0]] == self.found.sizes[op.makes[0]])


class _Roots:
    """For each value the values in memory from which it is computed when it is read.

    Found when they are asked for, and kept where several read a value: a sum of many has as many roots as terms, and so
    would have each sum on the way to it, which only the next one reads.
    """

    def __init__(self, found: Operations, kept: set[int]) -> None:
        self._kept = kept
        self._reads = {k: op.reads for op in found.operations for k in op.makes}
        self._uses = Counter(k for op in found.operations for k in {*op.reads})
        self._known: dict[int, frozenset[int]] = {}

    def __getitem__(self, k: int) -> frozenset[int]:
        if k in self._kept or k not in self._reads:
            return frozenset({k})
        todo = [k]
        while todo:  # no recursion: a chain may be as long as the program
            if todo[-1] in self._known:
                todo.pop()
                continue
            found, missing = self._open(todo[-1])
            if not missing:
                self._known[todo[-1]] = frozenset(found)
            todo += missing
        result = self._known[k]
        if self._uses[k] < 2:
            del self._known[k]
        return result

    def _open(self, k: int) -> tuple[set[int], list[int]]:
        """The roots of a value, and values that several read on the way whose own are not known yet."""
        found: set[int] = set()
        missing: list[int] = []
        seen, stack = {k}, [k]
        while stack:
            for r in self._reads[stack.pop()]:
                if r == NOTHING or r in seen:
                    continue
                seen.add(r)
                if r in self._kept or r not in self._reads:
                    found.add(r)
                elif r in self._known:
                    found |= self._known[r]
                elif self._uses[r] > 1:
                    missing.append(r)
                else:
                    stack.append(r)
        return found, missing


@dataclass(slots=True)
class _Write:
    """Something that writes to memory: values it reads there, those it makes, those of them that are no results, the
    room that it needs inside, and whether it may write over what it reads."""

    reads: set[int]
    makes: list[int]
    own: list[int]
    room: Room
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


def _most_at_once(
    writes: Sequence[_Write], size: Sequence[int], eager: bool
) -> tuple[int, set[int], tuple[Inside, ...]]:
    """Most bytes at once, the values that are alive then, and what takes the room inside a loop that runs then.

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
    live = peak = top = 0
    steps: list[int] = []

    def frees(w: _Write) -> bool:
        return not w.own and any(k in alive and left[k] == 1 for k in w.reads)

    def run(at: int) -> list[int]:
        """Does a write, and gives those that became ready."""
        nonlocal live, peak, top
        w = writes[at]
        done[at] = True
        steps.append(at)
        for k in w.reads:
            left[k] -= 1
        dying = sum(size[k] for k in w.reads if k in alive and not left[k])
        made = sum(size[k] for k in w.own)
        now = live + (max(made - dying, 0) if w.over else made) + w.room.nbytes
        if now > peak:
            peak, top = now, len(steps)
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
    if not top:
        return 0, set(), ()
    last = writes[steps[top - 1]]
    return peak, _alive(writes, steps[:top]), last.room.largest


def _alive(writes: Sequence[_Write], steps: Sequence[int]) -> set[int]:
    """The values that are alive while the last of some steps runs."""
    left = Counter(k for w in writes for k in w.reads)
    alive: set[int] = set()
    for at in steps[:-1]:
        left.subtract(writes[at].reads)
        alive.update(k for k in writes[at].own if left[k])
        alive.difference_update([k for k in writes[at].reads if not left[k]])
    last = writes[steps[-1]]
    if last.over:
        alive.difference_update([k for k in last.reads if left[k] == 1])
    return alive.union(last.own)
