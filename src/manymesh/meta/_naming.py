"""Boxing trees that come without boxes: names from a tree beside them, or from the fields of their dataclasses.

Plain dictionaries, Equinox modules and other libraries' layers make bare arrays. `box` puts each into a box, so that
everything else in this package can be used on them; `unbox` takes the boxes off again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from .._errors import MetadataError
from .._types import PyTree
from ._axes import check_names
from ._box import is_axis_metadata
from ._logical import LogicallyPartitioned
from ._partitioned import Partitioned
from ._paths import format_path, nearest
from ._walk import is_variable

FIELD_KEY = "names"
"""Key in the metadata of a dataclass's field under which `box` finds names."""

Path = tuple[Any, ...]


def box(tree: PyTree, names: Any = None, *, logical: bool = True) -> PyTree:
    """Puts the arrays of a tree into boxes.

    Args:
      tree: a pytree of arrays or of descriptions of them. Boxes and NNX variables in it, and what is no array, stay.
      names: a tree beside it. At the place of an array stands a tuple (or a `PartitionSpec`) with one entry for each
        leading dimension; above, it counts for every array below. What is None, left out of a dictionary, or the same
        object in both trees gets no box. A dictionary stands beside a dictionary or, with the names of attributes as
        keys, beside an object; a list stands beside any sequence; a tuple of strings and None is always the names of
        one array, so write a `PartitionSpec` for names with a tuple among them. Without this tree, the names are
        those that dataclasses give for their fields, ``dataclasses.field(metadata={"names": ("embed", "hidden")})``
        (``equinox.field`` takes the same words); the innermost field counts.
      logical: whether the boxes are `LogicallyPartitioned`; else `Partitioned`, and the names are device axes.

    Returns:
      The same tree with boxes. The shardings of the result have the structure of ``tree``, without boxes.

    Raises:
      MetadataError: the two trees do not fit, or an entry is no name; with the path.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from manymesh import meta
      >>> params = {"up": {"w": jnp.ones((4, 8)), "b": jnp.ones(8)}, "scale": jnp.ones(())}
      >>> boxed = meta.box(params, {"up": {"w": ("embed", "hidden"), "b": ("hidden",)}})
      >>> boxed["up"]["w"]
      LogicallyPartitioned(float32[4,8], names=('embed', 'hidden'))
      >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
      >>> meta.get_sharding(boxed, mesh, [("hidden", "model")])["up"]["w"].spec
      P(None, 'model')
    """
    kind = LogicallyPartitioned if logical else Partitioned
    if names is None:
        return _from_fields(tree, None, kind, ())
    return _from_tree(tree, names, kind, ())


def _children(node: PyTree) -> tuple[list[tuple[Any, Any]], Any]:
    """The children of a node with their keys, and its structure; a leaf has itself under no key."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(path[0] if path else None, child) for path, child in pairs], structure


def _is_leaf(children: list[tuple[Any, Any]]) -> bool:
    return len(children) == 1 and children[0][0] is None


def _boxed(leaf: PyTree, names: Any, kind: Any, path: Path) -> PyTree:
    if names is None or not hasattr(leaf, "shape"):
        return leaf
    return kind(leaf, check_names(names, format_path(path)))


def _from_fields(node: PyTree, names: Any, kind: Any, path: Path) -> PyTree:
    if is_axis_metadata(node) or is_variable(node):
        return node
    children, structure = _children(node)
    if _is_leaf(children):
        return _boxed(node, names, kind, path)
    given: dict[Any, Any] = {}
    if dataclasses.is_dataclass(node):
        given = {f.name: f.metadata[FIELD_KEY] for f in dataclasses.fields(node) if FIELD_KEY in f.metadata}
    return structure.unflatten(
        _from_fields(child, given.get(getattr(key, "name", None), names), kind, (*path, key)) for key, child in children
    )


def _from_tree(node: PyTree, names: Any, kind: Any, path: Path) -> PyTree:
    if names is None or names is node or is_axis_metadata(node) or is_variable(node):
        return node
    children, structure = _children(node)
    if _is_names(names):
        if _is_leaf(children):
            return _boxed(node, names, kind, path)
        return structure.unflatten(_from_tree(child, names, kind, (*path, key)) for key, child in children)
    parts = None if _is_leaf(children) else _parts(children, names, path)
    if parts is None:
        raise MetadataError(
            f"box: the names do not fit the tree at {format_path(path)}: found {names!r} beside "
            f"{_describe(node, children)}; expected a tuple with one name a dimension, None, or names for what is in it"
        )
    return structure.unflatten(
        _from_tree(child, part, kind, (*path, key)) for (key, child), part in zip(children, parts, strict=True)
    )


def _parts(children: list[tuple[Any, Any]], names: Any, path: Path) -> list[Any] | None:
    """The names of each child; None if there is no telling."""
    if isinstance(names, Mapping):
        known = [_word(key) for key, _ in children]
        for name in names:
            if name not in known:
                raise MetadataError(
                    f"box: there are names for {name!r}, which is not in {format_path(path)}{nearest(name, known)}"
                )
        return [names.get(word) for word in known]
    if isinstance(names, (list, tuple)):
        fits = len(names) == len(children) and all(isinstance(key, (SequenceKey, GetAttrKey)) for key, _ in children)
        return list(names) if fits else None
    beside, _ = _children(names)
    fits = not _is_leaf(beside) and [key for key, _ in beside] == [key for key, _ in children]
    return [part for _, part in beside] if fits else None


def _word(key: Any) -> Any:
    """What a dictionary of names calls a child."""
    if isinstance(key, GetAttrKey):
        return key.name
    return key.key if isinstance(key, DictKey) else getattr(key, "idx", key)


def _is_names(names: Any) -> bool:
    if isinstance(names, PartitionSpec):
        return True
    return isinstance(names, tuple) and all(
        name is None or isinstance(name, str) or name is PartitionSpec.UNCONSTRAINED for name in names
    )


def _describe(node: PyTree, children: list[tuple[Any, Any]]) -> str:
    if _is_leaf(children):
        return f"a leaf of type {type(node).__name__}"
    keys = [_word(key) for key, _ in children]
    return f"{type(node).__name__} with {keys}"
