"""Paths to the leaves of a tree of which only the structure is known."""

from __future__ import annotations

import dataclasses
import sys
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
    return [path for path, _ in leaves_with_paths(numbered)]


def leaves_with_paths(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """As `jax.tree_util.tree_leaves_with_path`, with the path of a variable in the user's module for one of Flax NNX.

    A step of NNX is called with what stands for modules, where a variable is at the end of
    ``.states[0]['layers'][0]['kernel'].value``; the user calls it ``.layers[0].kernel``.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return jax.tree_util.tree_leaves_with_path(tree)
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.NodeStates))
    return [
        (path + inner, leaf)
        for path, x in found
        for inner, leaf in (_of_module(x) if isinstance(x, nnx.NodeStates) else [((), x)])
    ]


def _of_module(states: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of what stands for a module, and their paths in the module."""
    return [
        (tuple(_users_key(key) for key in path[2:] if key != GetAttrKey("value")), leaf)  # before: that of the state
        for path, leaf in jax.tree_util.tree_leaves_with_path(states)
    ]


def _users_key(key: Any) -> Any:
    """An attribute where a state, which is a dict, has a string."""
    name = getattr(key, "key", None)
    return GetAttrKey(name) if isinstance(name, str) and name.isidentifier() else key


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
