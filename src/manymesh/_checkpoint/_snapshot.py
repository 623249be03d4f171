"""What a process has to write of a tree, copied to the host, so that the step may go on with the arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .. import _compat
from .._errors import CheckpointError
from ._format import Record, check_names
from ._leaves import NUMBERS, Leaf, is_array, is_key
from ._processes import Processes
from ._store import Piece, chunk_shape, dtype_on_disk, is_stored


@dataclass(frozen=True)
class Part:
    """What a process writes of an array.

    Attributes:
      record: its name.
      shape, dtype: of the whole array on disk.
      chunk: shape of a chunk there.
      pieces: what this process has, nothing of it twice in all processes.
      whole: the value, where every process has all of it, and several have to have the same.
    """

    record: Record
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    pieces: list[Piece]
    whole: np.ndarray[Any, Any] | None = None


def snapshot(leaves: Sequence[Leaf], processes: Processes, *, keep: bool) -> list[Part]:
    """Brings the shards that this process owns to the host. Waits until they are computed.

    Of equal shards the process with the first writes it; what is on the host, and arrays that JAX could put anywhere, are
    the same in every process and written by the first; the whole of them is with each part, to be compared.

    Args:
      leaves: those of a tree.
      processes: who owns what.
      keep: whether what comes back outlives the arrays, which a step may overwrite.

    Raises:
      CheckpointError: a leaf has no numbers, or was donated, or two leaves have one name.
    """
    arrays = [leaf for leaf in leaves if is_array(leaf.value)]
    for leaf in arrays:
        _check(leaf)
    plans = [_plan(leaf) for leaf in arrays]
    check_names([part.record for part, _ in plans])
    for _, shards in plans:
        for _, data in shards:
            if isinstance(data, jax.Array) and not _on_cpu(data):
                data.copy_to_host_async()
    for part, shards in plans:
        part.pieces.extend((box, _on_host(data, part, keep)) for box, data in shards)
    return [
        _once(part, processes) if shared else part
        for (part, _), shared in zip(plans, map(_is_everywhere, arrays), strict=True)
    ]


def _is_everywhere(leaf: Leaf) -> bool:
    """Whether every process has all of a leaf: it is on the host, or where JAX liked."""
    value = leaf.value
    return not isinstance(value, jax.Array) or (not value.committed and len(value.sharding.device_set) == 1)


def _once(part: Part, processes: Processes) -> Part:
    """A part that every process has all of, which the first writes, and of which all are compared."""
    if processes.count == 1:
        return part
    ((_, whole),) = part.pieces
    return dataclasses.replace(part, pieces=part.pieces if processes.first else [], whole=whole)


def _check(leaf: Leaf) -> None:
    value = leaf.value
    if isinstance(value, jax.core.Tracer):
        raise CheckpointError(f"{leaf} is a tracer: save outside of functions that JAX transforms")
    if isinstance(value, jax.ShapeDtypeStruct):
        raise CheckpointError(f"{leaf} is a description of an array (jax.ShapeDtypeStruct): there is nothing to save")
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise CheckpointError(
                f"{leaf} of shape {value.shape} has been deleted: it was donated to a step; save what the step returned"
            )
        return
    dtype = np.asarray(value).dtype
    if dtype.kind in "OSUMm":
        raise CheckpointError(
            f"{leaf} is {type(value).__name__} {value!r:.60} of dtype {dtype}, which is no array of numbers; keep it in "
            "metadata=, as anything that JSON can say"
        )
    if not is_stored(dtype):
        raise CheckpointError(
            f"{leaf} is {type(value).__name__} of dtype {dtype}, which a checkpoint does not hold; save an array of at most 64 bits a "
            "number, and of several fields one for each"
        )


def _plan(leaf: Leaf) -> tuple[Part, list[tuple[tuple[slice, ...], Any]]]:
    """A part without pieces yet, and the shards that they are to be made of."""
    value = leaf.value
    if not isinstance(value, jax.Array):
        array = np.array(value)
        kind = "scalar" if isinstance(value, NUMBERS) else "np.ndarray"
        held = dtype_on_disk(array.dtype)
        record = Record(leaf.name, leaf.in_sequence, kind, dtype=None if held == array.dtype else array.dtype.name)
        part = Part(record, array.shape, held, chunk_shape(array.shape, held.itemsize), [])
        return part, [(_whole(array.shape), array)]
    shape, shard = value.shape, value.sharding.shard_shape(value.shape)
    held = dtype_on_disk(value.dtype)
    random = None
    if is_key(value):
        random = str(jax.random.key_impl(value))
        inner = _compat.key_shape(value.dtype)
        shape, shard = (*shape, *inner), (*shard, *inner)
    dtype = None if random is not None or held == value.dtype else value.dtype.name
    record = Record(leaf.name, leaf.in_sequence, "jax.Array", random, dtype)
    part = Part(record, shape, held, chunk_shape(shard, held.itemsize), [])
    owned = [s for s in value.addressable_shards if s.replica_id == 0]
    return part, [(_box(s.index, shape), s.data) for s in owned]


def _whole(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def _box(index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
    """An index with numbers everywhere, and whole dimensions behind it."""
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def _on_host(data: Any, part: Part, keep: bool) -> np.ndarray[Any, Any]:
    if not isinstance(data, jax.Array):
        return data.view(part.dtype) if part.record.dtype is not None else np.asarray(data)
    if part.record.random is not None:
        data = jax.random.key_data(data)
    array = np.array(data, copy=True) if _on_cpu(data) and keep else np.asarray(data)
    return array.view(part.dtype) if part.record.dtype is not None else array


def _on_cpu(data: jax.Array) -> bool:
    """Whether NumPy shows the memory of the array itself, which then can't be donated (in JAX 0.11 once it was asked for)."""
    device: Any = next(iter(data.sharding.device_set))
    return bool(device.platform == "cpu")
