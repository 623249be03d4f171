"""The user's metadata: anything that JSON can say, and what of it belongs to each process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._errors import CheckpointError

_MARK = "manymesh.checkpoint.ByProcess"  # what it is called in JSON, between processes only


@dataclass(frozen=True)
class ByProcess:
    """A part of ``metadata=`` that each process has one of its own of, as the state of the generator it draws its rows with.

    A checkpoint holds a list in its place, with what each process gave, in the order of their numbers. How many there were is
    the length of the list: a run of more or fewer processes decides itself what that means for its data.

    Args:
      value: what this process has, anything that JSON can say.

    Example:
      >>> import tempfile, numpy as np, jax, manymesh as mm
      >>> generator, path = np.random.default_rng(jax.process_index()), tempfile.mkdtemp() + "/first"
      >>> state = mm.checkpoint.ByProcess(generator.bit_generator.state)
      >>> mm.checkpoint.save(path, {"w": np.ones(2)}, metadata={"generators": state, "batch": 3})
      >>> generators = mm.checkpoint.metadata(path)["generators"]
      >>> len(generators) == jax.process_count(), generators[jax.process_index()] == generator.bit_generator.state
      (True, True)
    """

    value: Any


def settled(path: Path, metadata: Any) -> Any:
    """The metadata as JSON gives it back, which nobody changes any more; what belongs to each process is marked as before.

    Args:
      path: what is saved.
      metadata: the user's.

    Raises:
      CheckpointError: JSON cannot say a part of it, which is named.
    """
    try:
        return json.loads(json.dumps(metadata, default=_marked), object_pairs_hook=_unmarked)
    except (TypeError, ValueError) as error:
        found = _unsayable("metadata", metadata) if isinstance(error, TypeError) else None  # not in a circle
        where, value = found or ("it", metadata)
        remedy = str(error)
        if isinstance(value, (jax.Array, np.ndarray, np.generic)):
            number = {"b": "bool", "i": "int", "u": "int"}.get(getattr(value.dtype, "kind", ""), "float")
            remedy = f"write {number}(...) around it" if value.ndim == 0 else "write its .tolist()"
        raise CheckpointError(
            f"metadata= of {path}: expected is what JSON can say; {where} is {type(value).__name__}: {remedy}"
        ) from None


def ends_of(metadata: Any, where: str = "metadata") -> Iterator[tuple[str, Any]]:
    """Everything in settled metadata that is no full dictionary or list, and where it is, as ``metadata['loss']``."""
    parts = _parts(where, metadata)
    if not parts:
        yield where, metadata
    for place, part in parts:
        yield from ends_of(part, place)


def own(metadata: Any) -> dict[str, Any]:
    """What belongs to this process, by where it is in settled metadata."""
    return {where: end.value for where, end in ends_of(metadata) if isinstance(end, ByProcess)}


def with_all(metadata: Any, owns: Sequence[Mapping[str, Any]], where: str = "metadata") -> Any:
    """Settled metadata with a list in the place of what belongs to each process.

    Args:
      metadata: that of any process.
      owns: what `own` gave in each process, in order.
      where: where it is, if it is a part.
    """
    if isinstance(metadata, ByProcess):
        return [values[where] for values in owns]
    if isinstance(metadata, dict):
        return {key: with_all(part, owns, f"{where}[{key!r}]") for key, part in metadata.items()}
    if isinstance(metadata, list):
        return [with_all(part, owns, f"{where}[{k}]") for k, part in enumerate(metadata)]
    return metadata


def _marked(value: Any) -> dict[str, Any]:
    if isinstance(value, ByProcess):
        return {_MARK: value.value}
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")  # as JSON says it


def _unmarked(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise ValueError(f"JSON has text for keys, and two keys of a dictionary in it are {twice!r} as text")
    return ByProcess(found[_MARK]) if found.keys() == {_MARK} else found


def _parts(where: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{where}[{key!r}]", part) for key, part in value.items()]
    return [(f"{where}[{k}]", part) for k, part in enumerate(value)] if isinstance(value, (list, tuple)) else []


def _unsayable(where: str, value: Any) -> tuple[str, Any] | None:
    """The first part of a value that JSON cannot say, and where it is."""
    if isinstance(value, ByProcess):
        return _unsayable(where, value.value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return None
    if not isinstance(value, (dict, list, tuple)):
        return where, value
    parts = _parts(where, value)
    return next((found for place, part in parts if (found := _unsayable(place, part)) is not None), None)
