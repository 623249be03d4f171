"""Walking trees of boxes quickly.

`jax.tree.map` with an ``is_leaf`` that looks for boxes calls Python for every node and once more
for every leaf. The trees of models are nearly all dictionaries, lists and tuples of boxes and
arrays, so these are walked here by comprehensions; any other node is opened by
`jax.tree_util.tree_flatten`, one level at a time, and walking goes on below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._errors import MetadataError
from .._types import PyTree

LEAF, BOX, NONE, OTHER, TUPLE, DICT, LIST = range(7)  # what can be copied and filled last

_BOX_METHODS = ("unbox", "replace_boxed", "add_axis", "remove_axis")
_VARIABLE_METHODS = ("get_metadata", "get_value", "replace")
# Types that are certainly no pytree nodes. What is not listed may be registered as a node at any
# time, so it is asked anew at every visit.
_LEAF_TYPES = (
    jax.core.Tracer,
    jax.ShapeDtypeStruct,
    jax.sharding.PartitionSpec,
    jax.sharding.Sharding,
    np.ndarray,
    np.generic,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
)


def _is_box_type(cls: type) -> bool:
    # By its methods and not by a base class: boxes of Flax count, and Flax is not imported here.
    return all(callable(getattr(cls, method, None)) for method in _BOX_METHODS)


def is_variable(node: PyTree) -> bool:
    """Whether a node is a Flax NNX variable, which keeps names in its metadata and its value as its only child."""
    return all(callable(getattr(type(node), method, None)) for method in _VARIABLE_METHODS)


class _Kinds(dict[type, int]):
    def __missing__(self, cls: type) -> int:
        if _is_box_type(cls):
            kind = BOX
        elif issubclass(cls, (jax.Array, *_LEAF_TYPES)) and not issubclass(cls, tuple):
            kind = LEAF
        else:
            return OTHER
        self[cls] = kind
        return kind


KINDS = _Kinds({dict: DICT, list: LIST, tuple: TUPLE, type(None): NONE})
"""What to do with a node of a type: one of the constants above. Read it as ``KINDS[type(node)]``."""


def identity(leaf: PyTree) -> PyTree:
    """Leaves a leaf as it is."""
    return leaf


def open_node(node: PyTree) -> tuple[list[Any], Any]:
    """The children of a pytree node and its structure; a leaf is its own only child."""
    return jax.tree_util.tree_flatten(node, is_leaf=lambda x: x is not node)


def walk(
    tree: PyTree,
    on_box: Callable[[Any], Any],
    on_leaf: Callable[[Any], Any] = identity,
    on_variable: Callable[[Any], Any] | None = None,
) -> PyTree:
    """Maps the boxes and the other leaves of a tree.

    Args:
      tree: any pytree.
      on_box: called with every outermost box.
      on_leaf: called with every leaf outside a box. None is a node without leaves and stays None.
      on_variable: called with every variable of Flax NNX; without it, what is in a variable is walked.

    Returns:
      The tree of what the functions gave. Nothing that they return is walked again.
    """
    kind = KINDS[type(tree)]
    if kind < DICT:
        return _walk_other(kind, tree, on_box, on_leaf, on_variable)
    # A copy that is filled in place: copying a small dictionary is much cheaper than growing one, and a list of
    # what is pending is cheaper than a call for each node.
    root = tree.copy()
    pending = [root]
    while pending:
        result = pending.pop()
        for key, node in result.items() if type(result) is dict else enumerate(result):
            kind = KINDS[type(node)]
            if kind == BOX:
                result[key] = on_box(node)
            elif kind == LEAF:
                result[key] = on_leaf(node)
            elif kind >= DICT:
                result[key] = below = node.copy()
                pending.append(below)
            else:
                result[key] = _walk_other(kind, node, on_box, on_leaf, on_variable)
    return root


def _walk_other(
    kind: int,
    tree: PyTree,
    on_box: Callable[[Any], Any],
    on_leaf: Callable[[Any], Any],
    on_variable: Callable[[Any], Any] | None,
) -> PyTree:
    if kind == LEAF:
        return on_leaf(tree)
    if kind == BOX:
        return on_box(tree)
    if kind == NONE:
        return None
    if kind == TUPLE:
        return tuple(walk(list(tree), on_box, on_leaf, on_variable))
    if on_variable is not None and is_variable(tree):
        return on_variable(tree)
    children, structure = open_node(tree)
    if len(children) == 1 and children[0] is tree:
        return on_leaf(tree)
    return structure.unflatten(walk(children, on_box, on_leaf, on_variable))


class _Mismatch(Exception):
    """Two trees differ."""

    def __init__(self, path: Any, expected: str, found: str) -> None:
        super().__init__(path, expected, found)
        self.path, self.expected, self.found = path, expected, found


def walk_pair(tree: PyTree, other: PyTree, on_box: Callable[[Any, Any], Any], what: str) -> PyTree:
    """Maps the boxes of a tree together with what stands at their places in another tree.

    Args:
      tree: any pytree.
      other: a pytree of which ``tree``, with every box as a leaf, is a prefix.
      on_box: called with a box and its counterpart.
      what: name of the operation, for messages.

    Returns:
      ``other`` with the counterparts of boxes replaced by what ``on_box`` gave.

    Raises:
      MetadataError: the structures differ; the message has the path of a difference.
    """
    try:
        return _walk_pair(tree, other, on_box, None)
    except _Mismatch as error:
        keys, path = [], error.path
        while path is not None:
            path, key = path
            keys.append(f"[{key!r}]")
        place = "tree" + "".join(reversed(keys))
        raise MetadataError(
            f"{what}: the trees differ at {place}: expected {error.expected}, found {error.found}; "
            "give updates with the structure of the boxed tree"
        ) from None


# A path is None at the root, else a pair of the path of the parent and the key in it.
def _walk_pair(tree: PyTree, other: PyTree, on_box: Callable[[Any, Any], Any], path: Any) -> PyTree:
    kind = KINDS[type(tree)]
    if kind == BOX:
        return on_box(tree, other)
    if kind == LEAF:
        return other
    if kind == NONE:
        if other is not None:
            raise _Mismatch(path, "None", type(other).__name__)
        return None
    if kind >= DICT and type(other) is type(tree):
        return _walk_containers(tree, other, on_box, path)
    children, structure = open_node(tree)
    if len(children) == 1 and children[0] is tree:
        return other
    others, other_structure = open_node(other)
    if structure != other_structure:
        raise _Mismatch(path, _node(tree, children), _node(other, others))
    return structure.unflatten(_walk_containers(children, others, on_box, path))


def _walk_containers(tree: PyTree, other: PyTree, on_box: Callable[[Any, Any], Any], path: Any) -> PyTree:
    """Two dictionaries or two lists; as in `walk`."""
    root = tree.copy()
    pending = [(root, other, path)]
    while pending:
        result, other, path = pending.pop()
        if len(result) != len(other):
            raise _Mismatch(path, _children(result), _children(other))
        for key, node in result.items() if type(result) is dict else enumerate(result):
            try:
                part = other[key]
            except KeyError:
                raise _Mismatch(path, _children(result), _children(other)) from None
            cls = type(node)
            kind = KINDS[cls]
            if kind == BOX:
                result[key] = on_box(node, part)
            elif kind >= DICT and type(part) is cls:
                result[key] = below = node.copy()
                pending.append((below, part, (path, key)))
            else:
                result[key] = _walk_pair(node, part, on_box, (path, key))
    return root


def _children(node: PyTree) -> str:
    return f"the keys {list(node)}" if type(node) is dict else f"{type(node).__name__} with {len(node)} children"


def _node(node: PyTree, children: list[Any]) -> str:
    if len(children) == 1 and children[0] is node:
        return f"a leaf of type {type(node).__name__}"
    return f"{type(node).__name__} with {len(children)} children"
