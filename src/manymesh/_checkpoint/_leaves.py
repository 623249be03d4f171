"""The leaves of a pytree by the names they have in a checkpoint.

A name is a tuple of words, one for each key on the way to the leaf, so that a tuple, a list and the dictionary that NNX
makes of them (``0``, ``1``, ...), a named tuple, a dataclass and a plain dictionary with the same words are the same tree
to a checkpoint. A box (`manymesh.meta.Partitioned`, those of Flax, variables of NNX) adds the word ``value`` behind the
name of what it holds, which `bare` takes away.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from .._types import PyTree

Name: TypeAlias = tuple[str, ...]
T = TypeVar("T")

NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True)
class Leaf:
    """A leaf, or an empty container, of a tree.

    Attributes:
      name: the words of its path.
      in_sequence: for each word, whether it is the position in a tuple or list.
      value: the leaf itself.
      in_class: whether a field of a class is on the way to it; told of what is no array.
    """

    name: Name
    in_sequence: tuple[bool, ...]
    value: Any
    in_class: bool = False

    def __str__(self) -> str:
        return text(self.name)


def text(name: Name) -> str:
    """A name as it is printed: ``params/front/kernel``."""
    return "/".join(name) or "the tree itself"


def bare(name: Name) -> Name:
    """A name without the word that a box adds."""
    return name[:-1] if len(name) > 1 and name[-1] == "value" else name


def leaves_of(tree: PyTree, *, with_empty: bool = False) -> tuple[list[Leaf], Any]:
    """The leaves of a tree with their names, and its structure.

    Args:
      tree: any pytree.
      with_empty: whether empty containers and None are leaves too.
    """
    is_leaf = is_empty if with_empty else None
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [
        Leaf(
            tuple(map(_word, path)),
            tuple(isinstance(key, SequenceKey) for key in path),
            value,
            not is_array(value) and _in_class(tree, path),
        )
        for path, value in flat
    ], structure


def is_empty(value: object) -> bool:
    """Whether a node of a tree holds nothing: None, or a container without elements."""
    return value is None or (isinstance(value, (dict, list, tuple)) and not value)


def is_array(value: object) -> bool:
    """Whether a checkpoint holds a leaf: arrays and numbers, of JAX, NumPy or Python."""
    kinds = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, *NUMBERS)
    return isinstance(value, kinds) and not isinstance(value, np.ma.MaskedArray)


def is_key(value: Any) -> bool:
    """Whether an array consists of typed random keys."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and is_key_dtype(dtype)


def is_key_dtype(dtype: Any) -> bool:
    """Whether a dtype is that of typed random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def find(table: Mapping[Name, T], name: Name) -> T | None:
    """What is under a name, boxed or not."""
    return table[name] if name in table else table.get(bare(name))


def with_bare_names(table: Mapping[Name, T]) -> dict[Name, T]:
    """A table in which each entry is found under its bare name too, where that is nobody else's."""
    found = dict(table)
    for name, value in table.items():
        found.setdefault(bare(name), value)
    return found


def close_matches(name: Name, known: Iterable[Name]) -> str:
    """``; did you mean params/w?`` where a known name is close, else the beginning of the list of what is known."""
    names = sorted({text(bare(k)) for k in known})
    close = difflib.get_close_matches(text(bare(name)), names, n=3)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"; it holds {', '.join(names[:6])}{more}" if names else "; it holds no arrays"


def _word(key: Any) -> str:
    if isinstance(key, SequenceKey):
        return str(key.idx)
    if isinstance(key, GetAttrKey):
        return str(key.name)
    if isinstance(key, (DictKey, FlattenedIndexKey)):
        return str(key.key)
    return str(key)


def _in_class(tree: PyTree, path: Iterable[Any]) -> bool:
    """Whether there is more on the way to a leaf than dictionaries, lists and tuples, named ones too."""
    node: Any = tree
    for key in path:
        if isinstance(node, Mapping) and isinstance(key, DictKey):
            node = node[key.key]
        elif isinstance(node, (list, tuple)) and isinstance(key, SequenceKey):
            node = node[key.idx]
        elif isinstance(node, tuple) and isinstance(key, GetAttrKey):
            node = getattr(node, key.name)
        else:
            return True
    return False
