"""From trees of boxes to trees of specs and shardings, with boxed names that are checked on the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from .._errors import AxisError
from .._types import PyTree
from ._axes import AnyMesh, Axes, Names
from ._box import COMPACT
from ._check import check_divides, too_many_text
from ._explain import explain
from ._fit import fit_names, is_suspect
from ._named import (
    axes_of,
    axes_of_box,
    axes_of_variable,
    choose_rules,
    is_named_node,
    leaves_of,
    parts_in,
    put_in,
    shape_of,
    spec_of,
)
from ._rules import Rules, RulesLike, as_rules, get_logical_axis_rules, resolve, rules_around
from ._tasks import Tasks, TasksLike
from ._walk import KINDS, LEAF, walk


class _Suspect(Exception):
    """A value has names that may be those of another one: the whole tree must be looked at."""


@_compat.boundary
def get_partition_spec(tree: PyTree) -> PyTree:
    """The specs of a tree of boxes.

    Args:
      tree: a pytree, usually of descriptions of arrays from `jax.eval_shape`, with boxes (also Flax's boxes or NNX
        variables) in it.

    Returns:
      The tree with one `PartitionSpec` for each box (in its names, whatever is in the box), ``PartitionSpec()`` for
      each array outside boxes and None for what is no array. The names of an optimizer state that has fewer or more
      dimensions than its parameter are fitted to it, if the parameter is in the same tree. Where the values in one
      box come to several specs, a box of specs takes its place.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from manymesh import meta
      >>> params = {"w": meta.Partitioned(jnp.ones((2, 4)), (None, "model")), "b": jnp.ones(4)}
      >>> meta.get_partition_spec(params)
      {'w': P(None, 'model'), 'b': P()}
    """
    replicated = PartitionSpec()

    def on_box(box: PyTree) -> PyTree:
        if type(box) in COMPACT:
            axes = box._axes
            try:
                shape = box._value.shape
            except AttributeError:
                _check_suspect(box, axes)  # a pytree of values, or no array at all
                return axes.spec
            rank, names = len(shape), axes.names
            if (rank != len(names) and names) or (rank == 1 and shape[0] == 1 and names):  # is_suspect, written out
                raise _Suspect
            return axes.spec
        axes = axes_of_box(box)
        _check_suspect(box, axes)
        return _in_own_names(axes, axes.names)

    def on_leaf(leaf: PyTree) -> PyTree:
        return replicated if hasattr(leaf, "shape") else None

    def on_variable(variable: PyTree) -> PyTree:
        axes = axes_of_variable(variable)
        _check_suspect(variable, axes)
        return variable.replace(_in_own_names(axes, axes.names))

    try:
        return walk(tree, on_box, on_leaf, on_variable)
    except _Suspect:
        return _slowly(
            tree, lambda path, axes, names, shape: _in_own_names(axes, axes.names if names is None else names)
        )


def _in_own_names(axes: Axes, names: Names) -> PartitionSpec:
    """Names as a spec. Those of Flax NNX are in device axes as far as rules are known."""
    if axes.lenient:
        return spec_of(axes, names, None, get_logical_axis_rules())
    return axes.spec if names is axes.names else PartitionSpec(*names)


@_compat.boundary
def get_sharding(
    tree: PyTree,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    *,
    tasks: TasksLike | None = None,
    strict: bool = False,
) -> PyTree:
    """The shardings of a tree of boxes on a mesh.

    Args:
      tree: a pytree with boxes, as in `get_partition_spec`.
      mesh: the mesh, concrete or abstract.
      rules: rules for the logical names of boxes that carry none themselves; by default those of the surroundings.
      tasks: as for `explain`: what is in a task gets its submesh, and its names are read by the rules of the task.
      strict: whether what `explain` finds suspicious is an error: a logical name that no rule knows, or a large
        value that stays replicated.

    Returns:
      The tree with one `NamedSharding` for each box and each array outside boxes, None for what is no array:
      ready to be ``out_shardings`` of a jitted initialization. The names of an optimizer state that has fewer or more
      dimensions than its parameter are fitted to it, if the parameter is in the same tree; what has more names than
      dimensions for no known reason is replicated, with a warning. Where the values in one box come to several
      shardings, a box of shardings takes its place.

    Raises:
      AxisError: a device axis that the mesh does not have, or a dimension that does not divide over its device
        axes; with ``strict``, also for the other findings.
      MetadataError: with ``strict``, more names than dimensions.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from manymesh import meta
      >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
      >>> params = {"w": meta.LogicallyPartitioned(jnp.ones((2, 4)), ("embed", "hidden"))}
      >>> meta.get_sharding(params, mesh, [("hidden", "model")])["w"].spec
      P(None, 'model')
    """
    given = as_rules(rules)
    if strict:
        explain(tree, mesh, given, tasks=tasks, strict=True)
    placing = Tasks(tasks, mesh, "get_sharding")
    if mesh is None or placing:
        return _shard_in_tasks(tree, placing, given)
    return shard_tree(tree, mesh, given)


def _shard_in_tasks(tree: PyTree, placing: Tasks, rules: Rules | None) -> PyTree:
    """`get_sharding` where leaves are on the submeshes of their tasks."""
    surrounding, in_tasks = get_logical_axis_rules(), rules_around()
    leaves, structure = leaves_of(tree)
    parts = [parts_in(path, node) for path, node in leaves]
    fitted = iter(fit_names([part.named for each in parts for part in each]))
    result = []
    for (_, node), each in zip(leaves, parts, strict=True):
        converted: list[Any] = []
        for part, names in zip(each, fitted, strict=False):  # the names of this leaf's parts, and no more
            if part.shape is None and not is_named_node(node):
                converted.append(None)
                continue
            place = placing.place((*part.path, *part.inside), part.axes, choose_rules(part.axes, rules, in_tasks))
            known = place.axes.names if names is None else names
            spec = (
                resolve(known, place.rules).spec
                if place.rules is not None
                else spec_of(place.axes, known, rules, surrounding)
            )
            check_divides(part.place, part.shape if part.shape is not None else (0,) * len(spec), spec, place.mesh)
            converted.append(NamedSharding(place.mesh, spec))
        result.append(put_in(node, converted))
    return structure.unflatten(result)


def shard_tree(
    tree: PyTree, mesh: AnyMesh, rules: Rules | None, on_other: Callable[[Any], Any] = lambda leaf: None
) -> PyTree:
    """`get_sharding` without its strictness; ``on_other`` takes leaves that are no array, spec or box."""
    surrounding = get_logical_axis_rules()
    by_identity: dict[tuple[int, Any], NamedSharding] = {}
    by_spec: dict[PartitionSpec, NamedSharding] = {}
    alive: list[Axes] = []  # what a memo by identity has seen must stay alive
    replicated = NamedSharding(mesh, PartitionSpec())

    def sharding_of(axes: Axes, names: Names, shape: tuple[int, ...] | None, path: str) -> NamedSharding:
        spec = spec_of(axes, names, rules, surrounding)
        check_divides(path, shape if shape is not None else (0,) * len(spec), spec, mesh)
        return NamedSharding(mesh, spec)

    def of_fitted(path: str, axes: Axes, names: Names | None, shape: tuple[int, ...] | None) -> NamedSharding:
        if names is None:
            assert shape is not None, "names are surplus only beside a shape"
            # From here over _slowly, shard_tree and get_sharding to the caller.
            warnings.warn(
                f"{too_many_text(path, axes.names, shape)}; it is left replicated", stacklevel=_compat.users_level()
            )
            return replicated
        return sharding_of(axes, names, shape, path)

    def on_box(box: PyTree) -> NamedSharding:
        if type(box) in COMPACT:
            value = box._value
            if KINDS[type(value)] == LEAF:  # the common case, without a call
                found = by_identity.get((id(box._axes), getattr(value, "shape", None)))
                if found is not None:
                    return found
        return of_node(axes_of_box(box), box)

    def of_node(axes: Axes, node: PyTree) -> NamedSharding:
        shape = shape_of(node)
        found = by_identity.get((id(axes), shape))
        if found is None:
            if shape is not None and is_suspect(axes.names, shape):
                raise _Suspect
            alive.append(axes)
            found = by_identity[id(axes), shape] = sharding_of(axes, axes.names, shape, "")
        if shape is None:
            _check_suspect(node, axes)
            for part in parts_in((), node):
                check_divides("", part.shape or (), found.spec if part.shape is not None else (), mesh)
        return found

    def on_leaf(leaf: PyTree) -> PyTree:
        if isinstance(leaf, PartitionSpec):
            found = by_spec.get(leaf)
            if found is None:
                found = by_spec[leaf] = of_node(axes_of(leaf), leaf)
            return found
        return replicated if hasattr(leaf, "shape") else on_other(leaf)

    try:
        return walk(
            tree,
            on_box,
            on_leaf,
            lambda variable: variable.replace(of_node(axes_of_variable(variable), variable)),
        )
    except (AxisError, _Suspect):
        pass
    # Seldom; now with paths, which the errors name and by which parameters are found.
    return _slowly(tree, of_fitted)


def _check_suspect(node: PyTree, axes: Axes) -> None:
    if any(part.shape is not None and is_suspect(axes.names, part.shape) for part in parts_in((), node)):
        raise _Suspect


def _slowly(tree: PyTree, convert: Callable[[str, Axes, Names | None, tuple[int, ...] | None], Any]) -> PyTree:
    """Converts leaf by leaf with paths and with names fitted to shapes; None for names that cannot be fitted."""
    leaves, structure = leaves_of(tree)
    parts = [parts_in(path, node) for path, node in leaves]
    fitted = iter(fit_names([part.named for each in parts for part in each]))
    result = []
    for (_, node), each in zip(leaves, parts, strict=True):
        converted = []
        for part, names in zip(each, fitted, strict=False):  # the names of this leaf's parts, and no more
            plain = part.shape is None and not is_named_node(node)
            converted.append(None if plain else convert(part.place, part.axes, names, part.shape))
        result.append(put_in(node, converted))
    return structure.unflatten(result)
