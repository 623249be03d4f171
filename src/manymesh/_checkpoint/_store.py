"""The arrays of a checkpoint in TensorStore: one Zarr array for each, in one database for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ._format import Record, Saved
from ._leaves import is_key_dtype

# Bytes. What is read is a whole number of chunks: small enough that a process with a part of a shard reads little more
# than its part, large enough for a disk.
CHUNK_BYTES = 8 << 20
CACHE_BYTES = 1 << 28

try:
    import tensorstore as ts
except ImportError as error:
    raise ImportError("manymesh.checkpoint needs TensorStore: pip install 'manymesh[checkpoint]'") from error

Store: TypeAlias = ts.TensorStore
Box: TypeAlias = tuple[slice, ...]  # a part of an array
Piece: TypeAlias = tuple[Box, np.ndarray[Any, Any]]  # where a part belongs, and what is there

# The dtypes that Zarr 3 has in TensorStore. Others, such as uint4, are stored as the bytes that NumPy gives them.
_ZARR_DTYPES = frozenset(
    [
        "bool",
        "int2",
        "int4",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float4_e2m1fn",
        "float8_e3m4",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e4m3b11fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ]
)


def is_stored(dtype: np.dtype[Any]) -> bool:
    """Whether numbers of a dtype of NumPy can be stored: not those of several fields, nor of more than 64 bits."""
    return dtype.type is not np.void and (dtype.name in _ZARR_DTYPES or dtype.itemsize == 1)


def dtype_on_disk(dtype: Any) -> np.dtype[Any]:
    """As what numbers of a dtype are stored: that of their data for typed random keys, bytes for what Zarr does not have."""
    if is_key_dtype(dtype):
        return np.dtype(np.uint32)
    stored: np.dtype[Any] = np.dtype(dtype)
    if stored.name in _ZARR_DTYPES:
        return stored
    assert stored.itemsize == 1, f"{stored.name} is no array of bytes"
    return np.dtype(np.uint8)


def chunk_shape(shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The shape of chunks, which tile the shards: no process ever writes a part of a chunk.

    Dimensions before the last two, as that of stacked layers, are cut first, so that one layer can be read alone; then the
    longest, so that parts along each dimension can.

    Args:
      shard: shape of what one device has.
      itemsize: bytes a number.

    Example:
      >>> from manymesh._checkpoint._store import chunk_shape
      >>> chunk_shape((8, 1024, 2048), 4), chunk_shape((64, 64), 4)
      ((1, 1024, 2048), (64, 64))
    """
    chunk = [max(n, 1) for n in shard]
    while math.prod(chunk) * itemsize > CHUNK_BYTES:
        leading = [d for d in range(len(chunk) - 2) if chunk[d] > 1]
        d = leading[0] if leading else max(range(len(chunk)), key=chunk.__getitem__)
        chunk[d] //= next(k for k in range(2, chunk[d] + 1) if chunk[d] % k == 0)
    return tuple(chunk)


class Database:
    """A database that one process writes, all or nothing.

    Args:
      directory: where it is made.
    """

    def __init__(self, directory: Path) -> None:
        self._base = {
            "driver": "ocdbt",
            "base": _place(directory),
            "config": {"max_decoded_node_bytes": 1_000_000, "max_inline_value_bytes": 1024},
        }
        self._context = ts.Context()
        self._transaction = ts.Transaction(atomic=True)
        self._opening: list[tuple[Any, list[Piece]]] = []

    def put(
        self,
        record: Record,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        chunk: Sequence[int],
        pieces: list[Piece],
    ) -> None:
        """Adds an array.

        Args:
          record: its name.
          shape, dtype: of the whole array.
          chunk: shape of a chunk.
          pieces: where the parts that this process has belong, and what they are. They are not copied.
          describe: whether this process writes what the array is, which one process does.
        """
        # Floats hardly become smaller by compression, which takes longer than a disk; and a checksum of every number would
        # double the time to read them. The database has its own for everything but the numbers.
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
        spec = {
            "driver": "zarr3",
            "kvstore": {**self._base, "path": f"{record.key}/"},
            "metadata": {
                "shape": list(shape),
                "data_type": dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
                "codecs": codecs,
            },
            "store_data_equal_to_fill_value": True,  # a zero that was saved differs from a chunk that got lost
        }
        opening = ts.open(spec, create=True, context=self._context, transaction=self._transaction)
        self._opening.append((opening, pieces))

    def commit(self) -> None:
        """Writes everything to disk."""
        writing = []
        for opening, pieces in self._opening:
            store = opening.result()
            writing += [
                store[box].write(piece, can_reference_source_data_indefinitely=True) if box else store.write(piece)
                for box, piece in pieces
            ]
        for written in writing:
            written.copy.result()
        self._transaction.commit_async().result()


def merge(directory: Path, parts: Sequence[Path]) -> None:
    """Makes one database of those of several processes; it refers to their files.

    Args:
      directory: where it is made, above those of the parts.
      parts: theirs.
    """
    context = ts.Context()
    whole = ts.KvStore.open({"driver": "ocdbt", "base": _place(directory)}, context=context).result()
    transaction = ts.Transaction(atomic=True)
    copying = []
    for part in parts:
        opened = ts.KvStore.open({"driver": "ocdbt", "base": _place(part)}, context=context).result()
        copying.append(opened.experimental_copy_range_to(whole.with_transaction(transaction)))
    for copied in copying:
        copied.result()
    transaction.commit_async().result()


def open_arrays(saved: Saved, records: Sequence[Record]) -> list[Store]:
    """Opens arrays of a checkpoint for reading. Nothing but what they are is read.

    Raises:
      ValueError: TensorStore cannot open one.
    """
    # Both pools save reading twice: nodes of the database's tree, and chunks of which several devices get a part.
    context = ts.Context(
        {"cache_pool": {"total_bytes_limit": CACHE_BYTES}, "cache_pool#tree": {"total_bytes_limit": 1 << 26}}
    )
    opening = []
    for record in records:
        if saved.one_database:
            base = {"driver": "ocdbt", "base": _place(saved.directory), "cache_pool": "cache_pool#tree"}
            kvstore: Any = {**base, "path": f"{record.key}/"}
        else:
            kvstore = _place(saved.directory / record.key)
        spec = {
            "driver": saved.zarr,
            "kvstore": kvstore,
            "fill_missing_data_reads": False,
            "recheck_cached_data": "open",
            "recheck_cached_metadata": "open",
        }
        opening.append(ts.open(spec, open=True, read=True, context=context))
    return [opened.result() for opened in opening]


def stack(stores: Sequence[Store]) -> Store:
    """Several arrays of one shape as one with a dimension more; nothing is read."""
    return ts.stack(list(stores))


def cause(error: Exception) -> str:
    """What TensorStore says, without its description of the database."""
    return str(error).partition(" [tensorstore_spec=")[0]


def dtype_of(store: Store) -> np.dtype[Any]:
    """The dtype of the numbers in a store."""
    return np.dtype(store.dtype.numpy_dtype)


def _place(directory: Path) -> dict[str, str]:
    return {"driver": "file", "path": f"{directory.absolute()}/"}
