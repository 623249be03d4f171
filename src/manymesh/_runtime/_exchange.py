"""What crosses between processes: which piece of which value goes from which device to which."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .. import _compat
from ._carrier import Carrier, Piece
from ._memories import place_of
from ._transport import Batch, LocalTransport


@functools.lru_cache(maxsize=65536)
def processes_of(sharding: Sharding) -> frozenset[int]:
    """The processes that have devices of a sharding."""
    devices: set[Any] = sharding.device_set
    return frozenset(d.process_index for d in devices)


@functools.lru_cache(maxsize=1)
def everywhere() -> NamedSharding:
    """A copy on one device of each process: what every process can read."""
    first = {d.process_index: d for d in reversed(jax.devices())}
    return NamedSharding(Mesh(np.array([first[p] for p in sorted(first)]), ("process",)), PartitionSpec())


def is_key(dtype: Any) -> bool:
    """Whether it is the dtype of typed random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def words_of(aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What a value consists of on its devices: typed random keys are words."""
    if not is_key(aval.dtype):
        return aval
    # The words of a key lie together: no axis shards them. They are not traced for: each call of a step asks for them.
    shape = (*aval.shape, *_compat.key_shape(aval.dtype))
    return jax.ShapeDtypeStruct(shape, np.uint32, sharding=aval.sharding)


def assembled(aval: jax.ShapeDtypeStruct, pieces: Sequence[Any]) -> jax.Array:
    """The array that consists of the pieces that are here, in the order of its sharding; without any, a ghost.

    A ghost stands for an array of other processes: it has its shape, dtype and sharding, and no value.
    """
    return assembler(aval)(pieces)


def assembler(aval: jax.ShapeDtypeStruct) -> Callable[[Sequence[Any]], jax.Array]:
    """What makes arrays of their pieces in every call, as `assembled` does once."""
    if not is_key(aval.dtype):
        return functools.partial(_compat.assemble, aval)
    words, kind = words_of(aval), _compat.key_kind(aval.dtype)
    return lambda pieces: jax.random.wrap_key_data(_compat.assemble(words, pieces), impl=kind)


def put(x: Any, sharding: Sharding) -> jax.Array:
    """A host value that every process has, as an array; each process puts its own pieces, and nothing is sent."""
    me = jax.process_index()
    if processes_of(sharding) == {me}:
        placed: jax.Array = jax.device_put(x, sharding)
        return placed
    if isinstance(x, jax.Array) and is_key(x.dtype):
        words = np.asarray(jax.random.key_data(x))
        aval = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        inner = words_of(aval).sharding
        assert inner is not None, "words have the sharding of their keys"
        return assembled(aval, _local(words, inner))
    dtype, weak = _compat.as_device_dtype(x)
    value = np.asarray(x, dtype)
    aval = jax.ShapeDtypeStruct(value.shape, dtype, sharding=sharding, weak_type=weak)
    return assembled(aval, _local(value, sharding))


def put_apart(x: Any, sharding: NamedSharding, bring: Callable[[Any, NamedSharding], jax.Array] = put) -> jax.Array:
    """An array or a host value with a sharding, never in memory that somebody else has.

    What a step closes over lasts as long as the step, and is the user's, who may donate it to another step, or write to it
    if it is NumPy's.

    Args:
      x: the value.
      sharding: what it gets.
      bring: gives it that, maybe in the memory that it has.
    """
    if isinstance(x, np.ndarray):
        return bring(x.copy(), sharding)  # at once: the user may write to it while devices are still to copy it
    return copied(bring(x, sharding))


def copied(x: jax.Array) -> jax.Array:
    """A copy of an array, whose buffers nobody else has; of a ghost, another ghost."""
    # To the sharding that it has already: from several devices to some of them JAX does not heed may_alias=False.
    pieces = _compat.pieces(_compat.key_words(x))
    if pieces and x.is_fully_addressable:
        copy: jax.Array = jax.device_put(x, x.sharding, may_alias=False)
        return copy
    aval = _compat.abstract(jax.typeof(x))
    aval = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=x.sharding, weak_type=aval.weak_type)
    return assembled(aval, [jax.device_put(p, p.sharding, may_alias=False) for p in pieces])


def _local(value: np.ndarray[Any, Any], sharding: Sharding) -> list[jax.Array]:
    me = jax.process_index()
    places = sharding.devices_indices_map(value.shape)
    return [
        jax.device_put(value[places[d]], place_of(d, sharding)) for d in _compat.device_order(sharding) if d.process_index == me
    ]  # fmt: skip


def joined(part: Any) -> jax.Array:
    """The array of which each process has a part: the parts along dimension 0, in the order of the processes.

    Args:
      part: what this process has; a host value or an array of its own devices, of one shape in all processes.
    """
    mesh = everywhere().mesh
    value = jax.device_put(part, _compat.device_order(everywhere())[jax.process_index()])
    shape = (mesh.size * value.shape[0], *value.shape[1:])
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    return assembled(jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding), [_compat.key_words(value)])


class _Copy:
    """One value from one sharding to another; every piece that is wanted exists."""

    def __init__(self, sent: jax.ShapeDtypeStruct, arriving: jax.ShapeDtypeStruct) -> None:
        self.aval, self.inner = arriving, words_of(arriving)
        source, target = words_of(sent).sharding, self.inner.sharding
        assert source is not None and target is not None, "what crosses lies somewhere"
        shape = self.inner.shape
        self.source, self.target = source, target
        self.empty = math.prod(shape) == 0
        here, there = _places(source, shape), _places(target, shape)
        one_each = len(processes_of(source)) == len(processes_of(target)) == 1
        self.whole = one_each and list(here.values()) == list(there.values())
        having: dict[Any, list[Any]] = defaultdict(list)
        for d, place in here.items():
            having[place].append(d)
        self.pairs = []
        for k, (d, place) in enumerate(there.items()):
            near = [h for h in having[place] if h.process_index == d.process_index] or having[place]
            self.pairs.append((near[k % len(near)], d))
        self.position = {d: k for k, d in enumerate(d for d in here if d.process_index == jax.process_index())}
        self.piece = jax.ShapeDtypeStruct(target.shard_shape(shape), self.inner.dtype)
        self.order = [d for d in there if d.process_index == jax.process_index()]


def _places(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, tuple[tuple[int, int], ...]]:
    """Device -> which part of the value it has, in the order of the sharding."""
    indices = sharding.devices_indices_map(shape)
    return {
        d: tuple((s.indices(n)[0], s.indices(n)[1]) for s, n in zip(indices[d], shape, strict=True))
        for d in _compat.device_order(sharding)
    }


class Exchange:
    """Values that cross together, as far as this process has to do with them.

    Args:
      number: what tells it from all others of a call.
      sent, arriving: shape, dtype and sharding of each value as it leaves, and as it arrives.
      carrier: carries pieces between processes.
      lent: whether somebody outside the call may donate or delete the values before they were taken.
    """

    def __init__(
        self,
        number: int,
        sent: Sequence[jax.ShapeDtypeStruct],
        arriving: Sequence[jax.ShapeDtypeStruct],
        carrier: Carrier,
        lent: Sequence[bool] | None = None,
    ) -> None:
        self.arriving: Any = arriving[0].sharding
        self.copies = [_Copy(a, b) for a, b in zip(sent, arriving, strict=True)]
        self.lent = list(lent) if lent is not None else [False] * len(self.copies)
        self.me = me = jax.process_index()
        self.gives = any(me in processes_of(c.source) for c in self.copies)
        self.takes = any(me in processes_of(c.target) for c in self.copies)
        self.local: list[tuple[int, Any, Any]] = []
        pieces: list[Piece] = []
        for k, c in enumerate(self.copies):
            if not c.empty:  # a transfer of nothing hangs
                self._plan(k, c, pieces, carrier.whole)
        self.here = [(p.value, p.taker) for p in pieces if p.target == me]
        self.carry = carrier.bind(number, pieces)
        # Whether all of it is arrays that cross as they are.
        self.plain = (
            len(pieces) == len(self.copies)
            and not any(self.lent)
            and all(p.giver is None for p in pieces)
            and all(c.inner is c.aval for c in self.copies)
        )
        # Whether this process has nothing to do.
        self.idle = not (self.gives or self.takes or (carrier.in_order and pieces))

    def _plan(self, k: int, c: _Copy, pieces: list[Piece], whole: bool) -> None:
        if whole and c.whole and processes_of(c.source) != processes_of(c.target):
            ((giver,), (taker,)) = processes_of(c.source), processes_of(c.target)
            pieces.append(Piece(k, None, None, giver, taker, c.inner.shape, c.inner.dtype, c.source, c.target))
            return
        for giving, taking in c.pairs:
            source, target = giving.process_index, taking.process_index
            if source != target:
                leaving, arriving = SingleDeviceSharding(giving), SingleDeviceSharding(taking)
                shape, dtype = c.piece.shape, c.piece.dtype
                pieces.append(Piece(k, giving, taking, source, target, shape, dtype, leaving, arriving))
            elif source == self.me:
                self.local.append((k, giving, taking))

    def __call__(self, *values: jax.Array) -> list[jax.Array]:
        """Gives and takes pieces, and puts together what arrives; nothing waits for a value to be computed.

        Args:
          values: those that leave; none where they leave from other processes only.

        Returns:
          Those that arrive; none where they arrive in other processes only.
        """
        if self.plain:
            return list(self.carry(lambda p: values[p.value]))
        words = [_compat.key_words(x) for x in values]
        split: dict[int, list[Any]] = {}

        def part(k: int, device: Any) -> Any:
            if k not in split:
                split[k] = _compat.pieces(words[k])
            return split[k][self.copies[k].position[device]]

        def give(p: Piece) -> Any:
            x = words[p.value] if p.giver is None else part(p.value, p.giver)
            return jax.device_put(x, p.leaving, may_alias=False) if self.lent[p.value] else x

        arrived = self.carry(give)
        if not self.takes:
            return []
        got: defaultdict[int, dict[Any, Any]] = defaultdict(dict)
        for (k, d), x in zip(self.here, arrived, strict=True):
            got[k][d] = x
        for k, giving, taking in self.local:
            x = part(k, giving)
            got[k][taking] = jax.device_put(x, taking, may_alias=False if self.lent[k] else None)
        return [self._result(k, c, got[k]) for k, c in enumerate(self.copies)]

    def _result(self, k: int, c: _Copy, got: dict[Any, Any]) -> jax.Array:
        if None in got:
            array: jax.Array = got[None]
            if c.inner is not c.aval:
                array = jax.random.wrap_key_data(array, impl=_compat.key_kind(c.aval.dtype))
            return array
        if c.empty:
            nothing = np.zeros(c.piece.shape, c.piece.dtype)
            got = {d: jax.device_put(nothing, d) for d in c.order}
        return assembled(c.aval, [got[d] for d in c.order])


class ProcessesTransport:
    """Moves batches between processes by a carrier, and those inside one as `LocalTransport` does."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier, self._local = carrier, LocalTransport()
        self.in_order = carrier.in_order

    def move(self, batch: Batch) -> Callable[..., Sequence[jax.Array]]:
        """See `Transport`. Each end may be a submesh of several processes."""
        me = jax.process_index()
        if all(processes_of(x.sharding) == {me} for x in (*batch.sent, *batch.arriving)):
            return self._local.move(batch)
        return self._exchange(batch)

    def send(self, batch: Batch) -> Callable[..., None]:
        """See `Transport`."""
        exchange = self._exchange(batch)

        def send(*values: jax.Array) -> None:
            exchange(*values)

        return send

    def receive(self, batch: Batch) -> Callable[[], Sequence[jax.Array]]:
        """See `Transport`."""
        return self._exchange(batch)

    def passes_by(self, batch: Batch) -> Callable[[], Sequence[jax.Array]] | None:
        """The call for a batch between submeshes of other processes; None where there is nothing to do."""
        exchange = self._exchange(batch)
        return None if exchange.idle else exchange

    def _exchange(self, batch: Batch) -> Exchange:
        return Exchange(batch.number, batch.sent, batch.arriving, self._carrier, batch.lent)
