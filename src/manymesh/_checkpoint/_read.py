"""Restoring: everything is checked, then what this process needs is read, and arrays are put together where they belong."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import CheckpointError
from .._types import PyTree
from ._format import Record, Saved, find_saved
from ._leaves import NUMBERS, Leaf, is_array, is_key_dtype, leaves_of, with_bare_names
from ._left_out import check_untied, is_lost, said
from ._match import Source, match, read_stackings
from ._store import Store, cause, dtype_of, open_arrays, stack
from ._target import Target
from ._together import together

# Bytes of arrays that are being read at once, beside those that are already where they belong.
IN_FLIGHT_BYTES = 1 << 30
_SHOWN = 5


@dataclass(frozen=True)
class Reading:
    """A leaf, where its value is, and what is made of it."""

    leaf: Leaf
    target: Target
    store: Store
    record: Record

    def problem(self, cast: bool) -> str | None:
        """What is wrong with it, in a sentence."""
        shape, saved_dtype = self._saved_shape(), self._saved_dtype()
        if shape != self.target.shape:
            return f"{self.leaf} was saved with shape {shape}, but like= has shape {self.target.shape}"
        if not self.target.has_devices():
            return (
                f"{self.leaf} has a sharding on an abstract mesh in like=, as jax.eval_shape gives it where axes are explicit: there "
                "are no devices in it; write NamedSharding(mesh, spec) with a mesh of devices"
            )
        if not self.target.is_divided():
            return (
                f"{self.leaf} of shape {shape} is not divided by the sharding in like=, {self.target.spec()}; give it one that "
                "divides it, or none"
            )
        castable = self.record.random is None and not is_key_dtype(self.target.dtype)
        if saved_dtype == self.target.dtype.name or (castable and (cast or self._is_number())):
            return None
        remedy = "; cast=True converts it" if castable else "; random keys and numbers are not converted"
        return f"{self.leaf} was saved as {saved_dtype}, but like= has {self.target.dtype}{remedy}"

    def _saved_shape(self) -> tuple[int, ...]:
        rank = self.store.rank - len(self._inner())
        return tuple(self.store.shape[:rank])

    def _inner(self) -> tuple[int, ...]:
        """Dimensions of the stored array that belong to one random key."""
        return tuple(self.store.shape[-1:]) if self.record.random is not None else ()

    def _saved_dtype(self) -> str:
        if self.record.random is not None:
            return str(jax.eval_shape(lambda: jax.random.key(0, impl=self.record.random)).dtype)
        return self.record.dtype or dtype_of(self.store).name

    def _is_number(self) -> bool:
        """Whether it is a number of Python on one side, and of the same kind on the other: ``step`` is both in its life."""
        if self.record.kind != "scalar" and self.target.host not in NUMBERS:
            return False
        saved, wanted = dtype_of(self.store), self.target.dtype
        if np.issubdtype(saved, np.integer) and np.issubdtype(wanted, np.integer):
            return True
        return np.can_cast(saved, wanted, "same_kind") and np.can_cast(wanted, saved, "same_kind")

    def _is_too_large(self, number: np.ndarray[Any, Any]) -> bool:
        """Whether a whole number is none of the dtype that is wanted."""
        if not np.issubdtype(self.target.dtype, np.integer) or self.target.host is int:
            return False
        wanted = np.iinfo(self.target.dtype)
        return not bool(np.all((wanted.min <= number) & (number <= wanted.max)))

    def start(self) -> dict[Any, Any]:
        """Begins to read what this process needs."""
        return {key: self.store[box].read() if box else self.store.read() for key, box in self._boxes().items()}

    def finish(self, started: Mapping[Any, Any]) -> Any:
        """Waits, and makes the leaf."""
        try:
            parts = {key: np.asarray(future.result()) for key, future in started.items()}
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{self.leaf} cannot be read: {cause(error)}; restore another checkpoint") from None
        if self.record.random is None:
            if self.record.dtype is not None:
                parts = {key: part.view(np.dtype(self.record.dtype)) for key, part in parts.items()}
            if self._is_number() and (found := [part for part in parts.values() if self._is_too_large(part)]):
                raise CheckpointError(
                    f"{self.leaf} was saved as {self._saved_dtype()} {found[0]}, which is no {self.target.dtype} as in like=; restore it "
                    "like a number of Python"
                )
            whole = np.issubdtype(dtype_of(self.store), np.integer)
            if not (whole and self.target.host is int):  # of which none is too large
                parts = {key: _converted(part, self.target.dtype) for key, part in parts.items()}
        return self.target.make(parts, self.record.random)

    def _boxes(self) -> dict[Any, Any]:
        return self.target.boxes(self._inner())

    def num_bytes(self) -> int:
        """How much is read."""
        count: int = sum(math.prod(s.stop - s.start for s in box) for box in self._boxes().values())
        return count * dtype_of(self.store).itemsize


def _converted(part: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """Numbers of another dtype, as `astype` of JAX makes them: a float beyond the whole numbers of a dtype is the last of them."""
    if jnp.issubdtype(part.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        part = part.astype(bool) if jnp.issubdtype(dtype, jnp.bool_) else part.real
    with np.errstate(over="ignore", invalid="ignore"):
        if not (jnp.issubdtype(part.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.integer)):
            between = np.int64 if jnp.issubdtype(part.dtype, jnp.integer) else np.float64
            part = part if np.can_cast(part.dtype, dtype, "unsafe") else part.astype(between)
            return part.astype(dtype, copy=False)
        limits: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]  # JAX types it as nothing
        wide = part.astype(np.float64)
        found = np.asarray(wide.astype(dtype))
    for beyond, number in ((wide <= limits.min, limits.min), (wide >= limits.max, limits.max), (np.isnan(wide), 0)):
        found[beyond] = number  # NumPy leaves open what it is
    return found


def read(find: Callable[[], Path], like: PyTree, stacked: Mapping[str, str] | None, cast: bool) -> Any:
    """Restores a tree. See `manymesh.checkpoint.restore`.

    Args:
      find: gives the path of the checkpoint; what it raises, the processes that restore together hear of.
      like, stacked, cast: as there.
    """
    if like is None:
        return read_as_saved(find_saved(find()))
    check_untied(like)
    leaves, structure = leaves_of(like)
    with together(Target.of(leaf) for leaf in leaves if is_array(leaf.value)) as agree:
        path = find()
        saved = find_saved(path)
        agree(path, saved.identity())
        values = _read_leaves(path, saved, leaves, stacked, cast)
    return jax.tree.unflatten(structure, [values.get(i, leaf.value) for i, leaf in enumerate(leaves)])


def _read_leaves(
    path: Path, saved: Saved, leaves: Sequence[Leaf], stacked: Mapping[str, str] | None, cast: bool
) -> dict[int, Any]:
    """The arrays and numbers among some leaves, by their positions. Nothing is read before all of them are checked."""
    sources, problems = match(leaves, saved.records, read_stackings(stacked))
    problems += [said(leaf) for leaf in leaves if is_lost(leaf) and not leaf.in_class]
    problems += _no_arrays(leaves, saved)
    stores = _open(path, saved, sources)
    readings = {}
    for i, source in sources.items():
        store, wrong = _view(leaves[i], source, stores)
        if store is None:
            problems.append(wrong)
            continue
        reading = readings[i] = Reading(leaves[i], Target.of(leaves[i]), store, source.records[0])
        problem = reading.problem(cast)
        if problem is not None:
            problems.append(problem)
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        shown = "".join(f"\n  {problem}" for problem in problems[:_SHOWN])
        raise CheckpointError(f"{path} does not fit like=; nothing was read:{shown}{more}")
    return dict(zip(readings, _read_all(list(readings.values())), strict=True))


def _no_arrays(leaves: Sequence[Leaf], saved: Saved) -> list[str]:
    """A sentence for each leaf that would come back as it is, though arrays were saved under its name."""
    names = with_bare_names(saved.records)
    return [
        f"{leaf} was saved as arrays, but like= has {type(leaf.value).__name__} {leaf.value!r:.60}; write an array for each, or "
        "jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
        for leaf in leaves
        if not is_array(leaf.value) and not is_lost(leaf) and not (leaf.in_class and callable(leaf.value))
        and any(name[: len(leaf.name)] == leaf.name for name in names)
    ]  # fmt: skip


def read_as_saved(saved: Saved) -> Any:
    """Everything as arrays of NumPy, in dictionaries and lists."""
    records = list(saved.records.values())
    stores = _open(saved.directory, saved, {i: Source((record,)) for i, record in enumerate(records)})
    readings = []
    for record in records:
        store = stores[record]
        key = None if record.random is None else jax.eval_shape(lambda r=record: jax.random.key(0, impl=r.random)).dtype
        shape = tuple(store.shape[:-1] if record.random is not None else store.shape)
        dtype = key or np.dtype(record.dtype or dtype_of(store))
        host = None if key is not None else np.ndarray if record.kind != "scalar" else type(np.zeros((), dtype).item())
        readings.append(
            Reading(Leaf(record.name, record.in_sequence, None), Target(shape, dtype, None, False, host), store, record)
        )
    root: dict[str, Any] = {}
    whole = [*records, *saved.empty]
    for record, value in zip(whole, [*_read_all(readings), *(_nothing(r.kind) for r in saved.empty)], strict=True):
        node = root
        for word in ("", *record.name)[:-1]:
            node = node.setdefault(word, {})
        node[("", *record.name)[-1]] = value
    in_sequences = {record.name[:k] for record in whole for k, is_in in enumerate(record.in_sequence) if is_in}
    return _with_lists(root.get("", {}), (), in_sequences)


def _with_lists(node: PyTree, name: tuple[str, ...], in_sequences: set[tuple[str, ...]]) -> Any:
    if not isinstance(node, dict):
        return node
    children = {word: _with_lists(child, (*name, word), in_sequences) for word, child in node.items()}
    if name not in in_sequences:
        return children
    return [children.get(str(k)) for k in range(1 + max(map(int, children)))]  # what was left out keeps its place


def _nothing(kind: str) -> Any:
    """What an empty container comes back as; a named tuple as the dictionary that one with elements is."""
    return {} if kind in ("Dict", "NamedTuple") else [] if kind in ("List", "Tuple") else None


def _open(path: Path, saved: Saved, sources: Mapping[int, Source]) -> dict[Record, Store]:
    needed = list(dict.fromkeys(record for source in sources.values() for record in source.records))
    try:
        return dict(zip(needed, open_arrays(saved, needed), strict=True))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {cause(error)}; restore another checkpoint") from None


def _view(leaf: Leaf, source: Source, stores: Mapping[Record, Store]) -> tuple[Store | None, str]:
    """What a leaf is read from, or a sentence that says why it cannot."""
    found = [stores[record] for record in source.records]
    if source.stacked:
        if len({store.shape for store in found}) > 1 or len({store.dtype for store in found}) > 1:
            return None, f"{leaf} stacks layers, but they were saved with different shapes or dtypes"
        return stack(found), ""
    if source.layer is None:
        return found[0], ""
    rank = found[0].rank - (source.records[0].random is not None)  # a key is no stack of its words
    shape = tuple(found[0].shape)[:rank]
    if not shape or source.layer >= shape[0]:
        return None, f"{leaf} is layer {source.layer}, but the stack was saved with shape {shape}"
    return found[0][source.layer], ""


def _read_all(readings: Sequence[Reading]) -> Iterator[Any]:
    """The leaves in order. So much is read ahead as is allowed to be in flight."""
    waiting: deque[tuple[Reading, dict[Any, Any], int]] = deque()
    in_flight = 0
    for reading in readings:
        size = reading.num_bytes()
        while waiting and in_flight + size > IN_FLIGHT_BYTES:
            first, started, freed = waiting.popleft()
            in_flight -= freed
            yield first.finish(started)
        waiting.append((reading, reading.start(), size))
        in_flight += size
    for reading, started, _ in waiting:
        yield reading.finish(started)
