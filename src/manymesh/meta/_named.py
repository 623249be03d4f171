"""Reading names off the nodes of a tree: our boxes, Flax's boxes, variables of Flax NNX.

Other libraries are recognised by what their objects can do; none of them is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._types import PyTree
from ._axes import Axes, Names, check_names, make_axes
from ._box import COMPACT, content_of, is_axis_metadata
from ._fit import Named
from ._paths import format_path
from ._rules import Resolution, Rules, as_rules, resolve
from ._walk import is_variable

REPLICATED = make_axes(())


def axes_of_box(box: PyTree) -> Axes:
    """The metadata of a box; replication for a box that says nothing about sharding.

    A box inside a box has its say only if the outer one has none.
    """
    if type(box) in COMPACT or isinstance(getattr(box, "_axes", None), Axes):
        axes: Axes = box._axes
        return axes
    if hasattr(box, "get_partition_spec"):
        names = getattr(box, "names", None)
        if names is None and isinstance(getattr(box, "metadata", None), Mapping):
            return _axes_of_metadata(box.metadata, type(box).__name__)  # a variable of NNX in a tree of Linen
        names = tuple(box.get_partition_spec()) if names is None else names
        logical = hasattr(box, "rules")
        rules = as_rules(box.rules) if logical else None
        return make_axes(check_names(names, type(box).__name__), getattr(box, "mesh", None), rules, logical)
    inner = content_of(box)
    return axes_of_box(inner) if is_axis_metadata(inner) else REPLICATED


def axes_of_variable(variable: PyTree) -> Axes:
    """The metadata of a variable of Flax NNX; its names may be logical, where rules know them, or device axes."""
    return _axes_of_metadata(variable.get_metadata(), type(variable).__name__)


def _axes_of_metadata(metadata: Mapping[str, Any], where: str) -> Axes:
    names = metadata.get("out_sharding", metadata.get("sharding", metadata.get("sharding_names")))
    if names is None:
        return REPLICATED
    names = check_names(getattr(names, "spec", names), where)
    return make_axes(names, None, as_rules(metadata.get("sharding_rules")), logical=True, lenient=True)


def value_of(node: PyTree) -> PyTree:
    """The value that the names of a node describe; None for a bare spec, which describes none."""
    if is_axis_metadata(node):
        inner = content_of(node)
        while is_axis_metadata(inner):
            inner = content_of(inner)
        return inner
    if isinstance(node, PartitionSpec):
        return None
    return node.get_value() if is_variable(node) else node


@dataclass(frozen=True)
class Part:
    """A value and the metadata that describe it. A box around a pytree has several, any other leaf is one.

    Attributes:
      path: keys from the root to the leaf.
      inside: keys from there to the value.
      axes: its metadata.
      value: the value; None for a bare spec.
    """

    path: tuple[Any, ...]
    inside: tuple[Any, ...]
    axes: Axes
    value: Any

    @property
    def place(self) -> str:
        """The whole path, for people."""
        return format_path((*self.path, *self.inside))

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the value; None if it has none."""
        shape = getattr(self.value, "shape", None)
        return None if shape is None else tuple(shape)

    @property
    def named(self) -> Named:
        """The part as `fit_names` takes it."""
        return Named(self.path, self.axes.names, self.shape)


def parts_in(path: tuple[Any, ...], node: PyTree) -> list[Part]:
    """The parts of a leaf."""
    axes, value = axes_of(node), value_of(node)
    if is_axis_metadata(node) and not hasattr(value, "shape"):
        inside = jax.tree_util.tree_leaves_with_path(value)
        if any(hasattr(leaf, "shape") for _, leaf in inside):
            return [Part(path, keys, axes if hasattr(leaf, "shape") else REPLICATED, leaf) for keys, leaf in inside]
    return [Part(path, (), axes, value)]


def put_in(node: PyTree, parts: list[Any]) -> PyTree:
    """A leaf with other values for its parts: one for all of them, where they are equal."""
    if all(part == parts[0] for part in parts):
        return node.replace(parts[0]) if is_variable(node) else parts[0]
    inner = content_of(node)
    if is_axis_metadata(inner):
        return node.replace_boxed(put_in(inner, parts))
    return node.replace_boxed(jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(inner), parts))


def shape_of(node: PyTree) -> tuple[int, ...] | None:
    """The shape of the value of a node; None if it has none."""
    shape = getattr(value_of(node), "shape", None)
    return None if shape is None else tuple(shape)


def is_named_node(node: PyTree) -> bool:
    """Whether a node has names: a box, a variable of Flax NNX, or a `PartitionSpec` in logical names."""
    return is_axis_metadata(node) or isinstance(node, PartitionSpec) or is_variable(node)


def axes_of(node: PyTree) -> Axes:
    """The metadata of any leaf; replication for a plain one."""
    if is_axis_metadata(node):
        return axes_of_box(node)
    if isinstance(node, PartitionSpec):
        return make_axes(tuple(node), logical=True)
    return axes_of_variable(node) if is_variable(node) else REPLICATED


def leaves_of(tree: PyTree) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """The leaves of a tree with their paths, boxes and variables as leaves, and its structure."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named_node)


def choose_rules(axes: Axes, given: Rules | None, surrounding: Rules) -> Rules:
    """The rules for a box with logical names: its own, else the given ones, else the surrounding ones.

    A variable of Flax NNX adds its own rules to the others, as there.
    """
    others = surrounding if given is None else given
    if axes.lenient:
        return (axes.rules or ()) + others
    return others if axes.rules is None else axes.rules


def resolve_axes(axes: Axes, names: Names, rules: Rules) -> Resolution:
    """`resolve` for logical names, which for a variable of Flax NNX may be device axes."""
    found = resolve(names, rules)
    if not axes.lenient:
        return found
    device = {i for i, passed in zip(found.open, found.passed_over, strict=True) if not passed}
    return Resolution(
        tuple(names[i] if i in device else entry for i, entry in enumerate(found.axes)),
        found.rules,
        tuple(i for i in found.open if i not in device),
        tuple(passed for passed in found.passed_over if passed),
    )


def spec_of(axes: Axes, names: Names, given: Rules | None, surrounding: Rules) -> PartitionSpec:
    """Device axes for the names of a box; ``names`` are its own or those of them that fit its value."""
    if axes.logical:
        return resolve_axes(axes, names, choose_rules(axes, given, surrounding)).spec
    return axes.spec if names is axes.names else PartitionSpec(*names)
