"""Which saved arrays a leaf that is wanted comes from: itself, one layer of a stack, or layers that are stacked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._errors import ArgumentError
from ._format import Record
from ._leaves import Leaf, Name, close_matches, find, is_array, text, with_bare_names


@dataclass(frozen=True)
class Source:
    """Where the value of a leaf is found.

    Attributes:
      records: the saved array, or one for each layer, which are stacked along a new first dimension.
      layer: which layer of the saved array, or None for all of it.
      stacked: whether the records are layers.
      beyond: one more layer that was saved, of those that are stacked.
    """

    records: tuple[Record, ...]
    layer: int | None = None
    stacked: bool = False
    beyond: Record | None = None


@dataclass(frozen=True)
class Stacking:
    """What layers are called when they are stacked in one array, and when each has its own.

    Attributes:
      stacked: the words of the one, as ``("layers",)``.
      single: those of the others, as ``("layer_{}",)``.
    """

    stacked: Name
    single: Name

    def layer_of(self, name: Name) -> list[tuple[Name, int]]:
        """The stacks that a name may be a layer of, and which one."""
        patterns = [re.compile(re.escape(word).replace(r"\{\}", r"(\d+)")) for word in self.single]
        found = []
        for i in range(len(name) - len(patterns) + 1):
            matches = [p.fullmatch(word) for p, word in zip(patterns, name[i : i + len(patterns)], strict=True)]
            if all(matches):
                number = next(int(m.group(1)) for m in matches if m is not None and m.groups())
                found.append(((*name[:i], *self.stacked, *name[i + len(patterns) :]), number))
        return found

    def layers_of(self, name: Name, count: int) -> list[list[Name]]:
        """The names that a stack's layers may have, first to last."""
        width = len(self.stacked)
        return [
            [
                (*name[:i], *(word.replace("{}", str(k)) for word in self.single), *name[i + width :])
                for k in range(count)
            ]
            for i in range(len(name) - width + 1)
            if name[i : i + width] == self.stacked
        ]


def read_stackings(stacked: Mapping[str, str] | None) -> list[Stacking]:
    """What the user says about stacked layers.

    Args:
      stacked: name of stacked layers -> that of single ones, with ``{}`` for the number, as ``{"layers": "layer_{}"}``.

    Raises:
      ArgumentError: it is no dictionary of names, or a name of single layers has no place for a number, or more than one.
    """
    found = []
    if not isinstance(stacked or {}, Mapping):
        raise ArgumentError(f"stacked={stacked!r}: expected is a dictionary, as {{'layers': 'layer_{{}}'}}")
    for whole, single in (stacked or {}).items():
        words = isinstance(whole, str) and isinstance(single, str)
        if not words or single.count("{}") != 1 or "{}" in whole:
            raise ArgumentError(
                f"stacked={{{whole!r}: {single!r}}}: expected is the name of stacked layers, and that of a single one with {{}} "
                "for its number, as {'layers': 'layer_{}'} or {'blocks': 'blocks/{}'}"
            )
        found.append(Stacking(tuple(whole.split("/")), tuple(single.split("/"))))
    return found


def match(
    leaves: Sequence[Leaf], records: Mapping[Name, Record], stackings: Sequence[Stacking]
) -> tuple[dict[int, Source], list[str]]:
    """Finds the source of every leaf that is an array.

    Args:
      leaves: those of the tree that is wanted.
      records: the arrays that were saved.
      stackings: what stacked layers are called.

    Returns:
      position of a leaf -> its source, and a sentence for each leaf that has none.
    """
    table = with_bare_names(records)
    sources, missing = {}, []
    for i, leaf in enumerate(leaves):
        if not is_array(leaf.value):
            continue
        source = _source(leaf, table, stackings)
        if source is None:
            missing.append(f"{leaf} is not in the checkpoint{close_matches(leaf.name, records)}")
        elif source.beyond is not None:
            stacks = f"{leaf} stacks {len(source.records)} layers"
            more = f"but the checkpoint has another one, {text(source.beyond.name)}"
            missing.append(f"{stacks}, {more}; like= has to stack all of them, or to name those wanted one by one")
        else:
            sources[i] = source
    return sources, missing


def _source(leaf: Leaf, table: Mapping[Name, Record], stackings: Sequence[Stacking]) -> Source | None:
    record = find(table, leaf.name)
    if record is not None:
        return Source((record,))
    shape: Any = getattr(leaf.value, "shape", ())
    for stacking in stackings:
        for name, number in stacking.layer_of(leaf.name):
            if (record := find(table, name)) is not None:
                return Source((record,), layer=number)
        for names in stacking.layers_of(leaf.name, (shape[0] if shape else 0) + 1):
            *layers, beyond = [find(table, name) for name in names]
            if layers and all(layer is not None for layer in layers):
                return Source(tuple(layer for layer in layers if layer is not None), stacked=True, beyond=beyond)
    return None
