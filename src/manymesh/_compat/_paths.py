"""Paths to the leaves of a tree of which only the structure is known."""

from __future__ import annotations

import dataclasses
from dataclasses import is_dataclass
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def key_paths(structure: Any) -> list[tuple[Any, ...]]:
    """The path to each leaf of a structure, in order.

    Where a class refuses leaves that are no arrays when it is put together, its children have the names of its fields, or
    numbers.
    """
    try:
        numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    except Exception:  # whatever the class raises
        return _by_hand(structure)
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]


def _by_hand(structure: Any) -> list[tuple[Any, ...]]:
    if jax.tree_util.treedef_is_leaf(structure):
        return [()] * structure.num_leaves  # None is one without leaves
    kind, names = structure.node_data()
    children = structure.children()
    if kind is dict:
        keys: list[Any] = [DictKey(name) for name in names]
    elif kind in (tuple, list):
        keys = [SequenceKey(i) for i in range(len(children))]
    else:
        fields = (
            [f.name for f in dataclasses.fields(kind) if not f.metadata.get("static")] if is_dataclass(kind) else []
        )
        named = len(fields) == len(children)
        keys = [GetAttrKey(fields[i]) if named else FlattenedIndexKey(i) for i in range(len(children))]
    found: list[tuple[Any, ...]] = []
    for key, child in zip(keys, children, strict=True):
        found += [(key, *path) for path in key_paths(child)]
    return found
