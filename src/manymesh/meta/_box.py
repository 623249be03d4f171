"""Boxes: values that carry metadata about their axes through a program.

A box is a pytree node around a value. Code that knows nothing of metadata sees the value as a leaf;
code that adds or removes an axis (a scan over layers, a vmap over an ensemble) tells every box so with
`add_axis` and `remove_axis`; at the place of use `unbox` gives the value back, constrained to
the sharding that its metadata describe. `AxisMetadata` is the interface, `Partitioned` and
`LogicallyPartitioned` are the boxes of this package, and a program may bring its own.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax

from .._errors import MetadataError
from .._scope import names_may_be_known
from .._types import PyTree
from ._axes import PARTITION_NAME as PARTITION_NAME
from ._axes import Axes, axis_name, check_names, with_axis, without_axis
from ._constrain import constrain, is_active
from ._paths import format_path, rank_of
from ._rules import Rules, as_rules, get_logical_axis_rules
from ._walk import BOX, DICT, KINDS, LEAF, OTHER, TUPLE, open_node, walk, walk_pair

A = TypeVar("A")
Self = TypeVar("Self", bound="AxisMetadata[Any]")


class AxisMetadata(Generic[A], metaclass=abc.ABCMeta):
    """The interface of a box around a value with metadata about its axes.

    Subclass it for metadata of your own and register the subclass as a pytree node whose only child is the value,
    under the key ``value``. For every box ``x``, ``x.add_axis(i, p).remove_axis(i, p) == x``.

    Example:
      >>> import dataclasses, functools, jax
      >>> from manymesh import meta
      >>> @functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["decay"])
      ... @dataclasses.dataclass(frozen=True)
      ... class Decayed(meta.AxisMetadata):
      ...     value: jax.Array
      ...     decay: float
      ...     def unbox(self): return self.value
      ...     def replace_boxed(self, val): return dataclasses.replace(self, value=val)
      ...     def add_axis(self, index, params): return self
      ...     def remove_axis(self, index, params): return self
      >>> meta.unbox({"w": Decayed(1.0, decay=0.1)})
      {'w': 1.0}
    """

    __slots__ = ()

    @abc.abstractmethod
    def unbox(self) -> A:
        """The value in this box, which may itself be a box or a pytree of boxes."""

    @abc.abstractmethod
    def replace_boxed(self, val: PyTree) -> AxisMetadata[Any]:
        """This metadata around another value.

        Args:
          val: the new value; nothing about it is checked.
        """

    @abc.abstractmethod
    def add_axis(self: Self, index: int, params: Mapping[Any, Any]) -> Self:
        """The same value with metadata for one more axis.

        Args:
          index: position of the new axis among the dimensions after the insertion.
          params: what the transformation says of it, for example its name under `PARTITION_NAME`.
        """

    @abc.abstractmethod
    def remove_axis(self: Self, index: int, params: Mapping[Any, Any]) -> Self:
        """The same value with metadata for one axis fewer; the inverse of `add_axis`.

        Args:
          index: position of the axis to remove.
          params: what the transformation said when it added the axis.
        """


# Exactly these types keep all they have in `_value` and `_axes`, so that copies can be made without a call:
# a tree of ten thousand boxes is renamed in the time of a few microseconds a box.
COMPACT: set[type] = set()
_new: Callable[[type], Any] = object.__new__
# What a box of another library has if it means what ours do.
_FOREIGN = ("value", "names", "mesh", "get_partition_spec")


def is_axis_metadata(val: object) -> bool:
    """Whether a value is a box: an `AxisMetadata`, or anything with the methods of one, such as Flax's boxes.

    Example:
      >>> from manymesh import meta
      >>> meta.is_axis_metadata(meta.Partitioned(0.0, ())), meta.is_axis_metadata(0.0)
      (True, False)
    """
    return KINDS[type(val)] == BOX


def content_of(box: PyTree) -> PyTree:
    """What is in a box, without any constraint where the box can be asked so."""
    if type(box) in COMPACT:
        return box._value
    if hasattr(box, "names") and hasattr(box, "value"):
        return box.value
    return box.unbox()


def map_axis_meta(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Replaces every outermost box in a tree by what a function gives for it.

    Args:
      fn: takes a box.
      tree: any pytree; leaves that are in no box stay as they are.

    Example:
      >>> from manymesh import meta
      >>> meta.map_axis_meta(lambda box: box.names, {"w": meta.Partitioned(0.0, ("model",)), "step": 3})
      {'w': ('model',), 'step': 3}
    """
    return walk(tree, fn)


def add_axis(tree: PyTree, index: int, params: Mapping[Any, Any] | None = None) -> PyTree:
    """Tells every box in a tree that its value has one more axis.

    Args:
      tree: any pytree.
      index: position of the new axis among the dimensions after the insertion; negative counts from their end. Past
        the last name, the dimensions between are unnamed.
      params: the name of the new axis under `PARTITION_NAME`, None for an axis that has none.

    Raises:
      MetadataError: nothing says what the axis is called; a negative index before the first dimension; with the path
        of the box.

    Example:
      >>> from manymesh import meta
      >>> tree = {"w": meta.Partitioned(0.0, ("embed", "hidden"))}
      >>> meta.add_axis(tree, 0, {meta.PARTITION_NAME: "layers"})["w"].names
      ('layers', 'embed', 'hidden')
    """
    return _rename(tree, "add_axis", with_axis, index, params)


def remove_axis(tree: PyTree, index: int, params: Mapping[Any, Any] | None = None) -> PyTree:
    """Tells every box in a tree that its value has one axis fewer; the inverse of `add_axis`.

    Args:
      tree: any pytree.
      index: position of the axis; negative counts from the end.
      params: the name that the axis is expected to have, under `PARTITION_NAME`, None for none.

    Raises:
      MetadataError: nothing says what the axis is called, it has another name, or it does not exist; with the path of
        the box.

    Example:
      >>> from manymesh import meta
      >>> tree = {"w": meta.Partitioned(0.0, ("layers", "embed"))}
      >>> meta.remove_axis(tree, 0, {meta.PARTITION_NAME: "layers"})["w"].names
      ('embed',)
    """
    return _rename(tree, "remove_axis", without_axis, index, params)


def _rename(
    tree: PyTree,
    method: str,
    rename: Callable[[Axes, int, Any, int | None, object], Axes],
    index: int,
    params: Mapping[Any, Any] | None,
) -> PyTree:
    given = {} if params is None else params
    memo: dict[tuple[int, int | None], Axes] = {}

    def on_box(box: PyTree) -> PyTree:
        if type(box) not in COMPACT:
            return getattr(box, method)(index, given)
        axes, rank = box._axes, rank_of(box._value)
        found = memo.get((id(axes), rank))
        if found is None:
            found = memo[id(axes), rank] = rename(axes, index, axis_name(given, box), rank, box)
        new = _new(type(box))
        new._value, new._axes = box._value, found
        return new

    try:
        if index < 0:  # counted from the end, so that it depends on the rank of each value
            return walk(tree, on_box)
        return _rename_compact(
            tree, object(), lambda axes: rename(axes, index, axis_name(given, "a box"), None, "a box"), on_box
        )
    except MetadataError:
        # Seldom, so the place is looked for only now.
        for path, box in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_axis_metadata):
            if is_axis_metadata(box):
                try:
                    getattr(box, method)(index, given)
                except MetadataError as error:
                    raise type(error)(f"{format_path(path)}: {error}") from None
        raise


def _rename_compact(
    tree: PyTree, token: object, renamed: Callable[[Axes], Axes], on_box: Callable[[Any], Any]
) -> PyTree:
    """Renames every box of a tree. As `walk`, with the work on a box written out: a call would double the time.

    Equal metadata are one object, renamed once: it remembers the result beside the token of this walk.
    """
    kind = KINDS[type(tree)]
    if kind < DICT:
        if kind != OTHER and kind != TUPLE:
            return on_box(tree) if kind == BOX else tree
        children, structure = open_node(tree)
        if len(children) == 1 and children[0] is tree:
            return tree
        return structure.unflatten(_rename_compact(children, token, renamed, on_box))
    root = tree.copy()
    pending = [root]
    while pending:
        result = pending.pop()
        for key, node in result.items() if type(result) is dict else enumerate(result):
            cls = type(node)
            if cls in COMPACT:
                result[key] = box = _new(cls)
                box._value = node._value
                axes = node._axes
                last = axes.last
                if last[0] is token:
                    box._axes = last[1]
                else:
                    box._axes = new = renamed(axes)
                    axes.last = (token, new)
            elif (kind := KINDS[cls]) >= DICT:
                result[key] = below = node.copy()
                pending.append(below)
            elif kind != LEAF:
                result[key] = _rename_compact(node, token, renamed, on_box)
    return root


def unbox(tree: PyTree, apply_constraint: bool = True) -> PyTree:
    """Replaces every box in a tree, also a box in a box, by its value.

    Args:
      tree: any pytree.
      apply_constraint: whether a box may constrain its value. In a task, under `jax.set_mesh` and for a box
        with a mesh of its own, a `Partitioned` value comes out constrained to its sharding.

    Returns:
      The same tree without boxes.

    Raises:
      MetadataError: a box has more names than its value has dimensions.
      AxisError: a box names a device axis that the mesh does not have.

    Example:
      >>> from manymesh import meta
      >>> meta.unbox({"w": meta.Partitioned(2.0, ("model",)), "step": 3})
      {'w': 2.0, 'step': 3}
    """
    if not apply_constraint:
        return walk(tree, lambda box: unbox(content_of(box), False))
    if is_active():
        return walk(tree, lambda box: unbox(_open(box)))
    return walk(tree, _unbox_idle)


def _unbox_idle(box: PyTree) -> PyTree:
    """Unboxes where nothing around asks for a constraint."""
    if type(box) in COMPACT and box._axes.mesh is None:
        value = box._value
        return value if KINDS[type(value)] == LEAF else walk(value, _unbox_idle)
    return walk(_open(box), _unbox_idle)


def _open(box: PyTree) -> PyTree:
    """What is in a box, constrained. Flax's boxes as ours, because their own method is for Auto axes under jit only."""
    if isinstance(box, AxisMetadata) or not all(hasattr(box, name) for name in _FOREIGN):
        return box.unbox()
    rules: Rules = ()
    if hasattr(box, "rules"):
        rules = as_rules(box.rules) or get_logical_axis_rules()
        if not rules and not names_may_be_known():
            return box.unbox()  # Flax may know rules that we do not
    name = type(box).__name__
    return constrain(box.value, check_names(box.names, name), box.mesh, name, rules)


def replace_boxed(tree: PyTree, updates: PyTree) -> PyTree:
    """Puts new values into the boxes of a tree.

    Args:
      tree: a pytree with boxes.
      updates: the same tree without boxes, as `unbox` gives it.

    Returns:
      ``updates`` with each value in a box where ``tree`` has one.

    Raises:
      MetadataError: the structures differ; with the path of a difference.

    Example:
      >>> from manymesh import meta
      >>> tree = {"w": meta.Partitioned(2.0, ("model",)), "step": 3}
      >>> meta.replace_boxed(tree, {"w": 5.0, "step": 4})["w"].value
      5.0
    """
    return walk_pair(tree, updates, _replace_one, "replace_boxed")


def _replace_one(box: PyTree, value: PyTree) -> PyTree:
    cls = type(box)
    if cls in COMPACT:
        inner = box._value
        new = _new(cls)
        new._value = value if KINDS[type(inner)] == LEAF else walk_pair(inner, value, _replace_one, "replace_boxed")
        new._axes = box._axes
        return new
    return box.replace_boxed(walk_pair(content_of(box), value, _replace_one, "replace_boxed"))
