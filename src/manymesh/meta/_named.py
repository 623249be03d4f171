"""Reading names off the nodes of a tree: our boxes, Flax's boxes, variables of Flax NNX.

Other libraries are recognised by what their objects can do; none of them is imported.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from ._axes import Axes, Names, check_names, make_axes
from ._box import COMPACT, content_of, is_axis_metadata
from ._fit import Named
from ._rules import Rules, as_rules, get_logical_axis_rules, resolve
from ._walk import is_variable

REPLICATED = make_axes(())


def axes_of_box(box: Any) -> Axes:
    """The metadata of a box; replication for a box that says nothing about sharding.

    A box inside a box has its say only if the outer one has none.
    """
    if type(box) in COMPACT or isinstance(getattr(box, "_axes", None), Axes):
        axes: Axes = box._axes
        return axes
    if hasattr(box, "get_partition_spec"):
        names = getattr(box, "names", None)
        names = tuple(box.get_partition_spec()) if names is None else names
        logical = hasattr(box, "rules")
        rules = as_rules(box.rules) if logical else None
        return make_axes(check_names(names, type(box).__name__), getattr(box, "mesh", None), rules, logical)
    inner = content_of(box)
    return axes_of_box(inner) if is_axis_metadata(inner) else REPLICATED


def axes_of_variable(variable: Any) -> Axes:
    """The metadata of a variable of Flax NNX; its names may be logical, where rules know them, or device axes."""
    metadata = variable.get_metadata()
    names = metadata.get("out_sharding", metadata.get("sharding", metadata.get("sharding_names")))
    if names is None:
        return REPLICATED
    names = check_names(getattr(names, "spec", names), type(variable).__name__)
    rules = as_rules(metadata.get("sharding_rules")) or get_logical_axis_rules()
    if rules:
        resolution = resolve(names, rules)
        names = tuple(names[i] if i in resolution.open else entry for i, entry in enumerate(resolution.axes))
    return make_axes(names)


def value_of(node: Any) -> Any:
    """The value that the names of a node describe; None for a bare spec, which describes none."""
    if is_axis_metadata(node):
        inner = content_of(node)
        while is_axis_metadata(inner):
            inner = content_of(inner)
        return inner
    if isinstance(node, PartitionSpec):
        return None
    return node.get_value() if is_variable(node) else node


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of the value of a node; None if it has none."""
    shape = getattr(value_of(node), "shape", None)
    return None if shape is None else tuple(shape)


def is_named_node(node: Any) -> bool:
    """Whether a node has names: a box, a variable of Flax NNX, or a `PartitionSpec` in logical names."""
    return is_axis_metadata(node) or isinstance(node, PartitionSpec) or is_variable(node)


def axes_of(node: Any) -> Axes:
    """The metadata of any leaf; replication for a plain one."""
    if is_axis_metadata(node):
        return axes_of_box(node)
    if isinstance(node, PartitionSpec):
        return make_axes(tuple(node), logical=True)
    return axes_of_variable(node) if is_variable(node) else REPLICATED


def leaves_of(tree: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """The leaves of a tree with their paths, boxes and variables as leaves, and its structure."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named_node)


def named_leaves(leaves: list[tuple[tuple[Any, ...], Any]]) -> list[Named]:
    """The leaves as `fit_names` takes them."""
    return [Named(path, axes_of(node).names, shape_of(node)) for path, node in leaves]


def choose_rules(axes: Axes, given: Rules | None, surrounding: Rules) -> Rules:
    """The rules for a box with logical names: its own, else the given ones, else the surrounding ones."""
    if axes.rules is not None:
        return axes.rules
    return surrounding if given is None else given


def spec_of(axes: Axes, names: Names, given: Rules | None, surrounding: Rules) -> PartitionSpec:
    """Device axes for the names of a box; ``names`` are its own or those of them that fit its value."""
    if axes.logical:
        return resolve(names, choose_rules(axes, given, surrounding)).spec
    return axes.spec if names is axes.names else PartitionSpec(*names)
