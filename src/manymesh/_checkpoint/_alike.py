"""What has to be the same in every process that saves, and what differs where it is not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._errors import CheckpointError
from ._leaves import text
from ._metadata import ByProcess, ends_of
from ._processes import Processes
from ._snapshot import Part

_SHOWN = 5  # things that differ
_WIDTH = 60  # characters of a value
_NUMBERS = 6  # of an array


class Same(NamedTuple):
    """Something that every process has to save alike.

    Attributes:
      name: that of a leaf, or the place in the metadata.
      kind: dtype and shape of a leaf, and whether it is on devices; empty for metadata.
      digest: of its value; empty where no process has all of it.
      shown: its value, as far as it is short.
    """

    name: str
    kind: str
    digest: str
    shown: str


def sames_of(parts: Iterable[Part], metadata: Any) -> list[Same]:
    """What a process has to have in common with the others.

    Args:
      parts: what it writes of each array.
      metadata: the user's, settled.
    """
    found = []
    for part in parts:
        name, kind, whole = text(part.record.name), f"{part.dtype}{list(part.shape)}", part.whole
        if whole is None:
            found.append(Same(name, f"{kind} on devices", "", ""))
        else:
            bits = np.ascontiguousarray(whole).reshape(-1).view(np.uint8).data
            plain = whole.size <= _NUMBERS and part.record.extra is None
            found.append(
                Same(name, kind, _digest(bits), _short(str(whole.tolist())) if plain else "of its own numbers")
            )
    for where, end in sorted(ends_of(metadata), key=lambda found: found[0]):  # a dictionary may be in another order
        said = type(end).__name__ if isinstance(end, ByProcess) else json.dumps(end)
        found.append(Same(where, "", _digest(said.encode()), _short(said)))
    return found


def check_alike(path: Path, place: str, processes: Processes, parts: Sequence[Part], metadata: Any) -> None:
    """Goes on where every process saves the same tree, the same values of the host and the same metadata.

    Args:
      path: what is saved.
      place: a name that is used once, the same in every process.
      processes: who saves.
      parts: what this process writes of each array.
      metadata: the user's, settled.

    Raises:
      CheckpointError: in every process, which names what differs, and where.
    """
    sames: list[Same] = []

    def digest() -> str:
        sames.extend(sames_of(parts, metadata))
        return _digest(json.dumps([same[:3] for same in sames]).encode())

    digests = processes.exchange(place, digest)
    different = [p for p, said in enumerate(digests) if said != digests[0]]
    if different:
        two = (0, different[0])
        texts = processes.exchange(f"{place}/details", lambda: json.dumps(sames) if processes.index in two else "")
        first, second = ([Same(*same) for same in json.loads(texts[p])] for p in two)
        raise CheckpointError(f"{path}: nothing was saved; {_difference(different, first, second)}")


def _difference(different: Sequence[int], first: Sequence[Same], second: Sequence[Same]) -> str:
    """What differs, and what to do about it."""
    other = different[0]
    who = f"process {other} saves" if len(different) == 1 else f"processes {', '.join(map(str, different))} save"
    here, there = ({(bool(same.kind), same.name): same for same in sames} for sames in (first, second))
    pairs = [(name, here.get((leaf, name)), there.get((leaf, name))) for leaf, name in dict.fromkeys([*here, *there])]
    values = [(name, a, b) for name, a, b in pairs if (a and a[:3]) != (b and b[:3])]
    trees = [(name, a, b) for name, a, b in values if _kind(a or b) and _kind(a) != _kind(b)]

    if trees or not values:
        found = [f"of {name}, {_said(0, a, 1)}, {_said(other, b, 1)}" for name, a, b in trees[:1]]
        return (
            f"{who} another tree than process 0; every process saves the same one, with the same shapes and dtypes: "
            f"{(found or ['the order of the leaves is another'])[0]}"
        )
    lines = [f"\n  {name}: {_said(0, a, 2)}, {_said(other, b, 2)}" for name, a, b in values]
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return (
        f"{who} other values than process 0, of which a checkpoint would hold one:{''.join(lines[:_SHOWN])}{more}\n"
        "Save the same in every process. What each process has one of, as the state of its generator, belongs into "
        "metadata= as manymesh.checkpoint.ByProcess(value); parts of an array that belong together become one array first"
    )


def _kind(same: Same | None) -> str | None:
    return None if same is None else same.kind


def _said(process: int, same: Same | None, words: int) -> str:
    """``process 1 has int64[] 11``, or the first word of what it has."""
    if same is None:
        return f"process {process} lacks it"
    return f"process {process} has {' '.join(list(filter(None, (same.kind, same.shown)))[:words])}"


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _short(said: str) -> str:
    return said if len(said) <= _WIDTH else f"{said[:_WIDTH]}…"
