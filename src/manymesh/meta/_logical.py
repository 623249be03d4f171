"""`LogicallyPartitioned`: a box whose names are logical, and constraints in logical names."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from .._errors import AxisError, MetadataError
from .._scope import names_may_be_known
from .._types import PyTree
from ._axes import AnyMesh, check_mesh, check_names, make_axes
from ._box import is_axis_metadata
from ._check import check_divides
from ._constrain import constrain, constrain_to_axes
from ._explain import explain
from ._named import axes_of, spec_of
from ._partitioned import Partitioned
from ._paths import format_path, nearest
from ._rules import (
    Rules,
    RulesFallback,
    RulesLike,
    as_fallback,
    as_rules,
    get_logical_axis_rules,
    resolve,
    rules_around,
)
from ._specs import shard_tree
from ._walk import walk

A = TypeVar("A")
P = ParamSpec("P")


class LogicallyPartitioned(Partitioned[A]):
    """A value with a logical name for each of its dimensions, which rules map to device axes.

    Like `Partitioned`, but ``names`` say what a dimension is (``'embed'``, ``'heads'``) and rules decide
    later which device axes shard it.

    Args:
      value: an array, or anything else that `Partitioned` can hold.
      names: one logical name for each leading dimension; None for one that is never sharded.
      mesh: the mesh to constrain the value on; by default the surrounding one.
      rules: rules for this box; by default those of the surroundings.

    Raises:
      MetadataError: ``names`` is no sequence of names.
      AxisError: ``rules`` is no sequence of pairs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from manymesh import meta
      >>> box = meta.LogicallyPartitioned(jnp.ones((4, 8)), ("embed", "hidden"))
      >>> box.get_partition_spec()
      P('embed', 'hidden')
      >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
      >>> with meta.logical_axis_rules([("hidden", "model")]):
      ...     box.get_sharding(mesh).spec
      P(None, 'model')
    """

    __slots__ = ()
    _compact = True

    rules = property(operator.attrgetter("_axes.rules"), doc="The rules of the box itself, or None.")

    def __init__(
        self, value: A, names: Iterable[Any], mesh: AnyMesh | None = None, rules: RulesLike | None = None
    ) -> None:
        self._value = value
        self._axes = make_axes(check_names(names, type(self).__name__), mesh, as_rules(rules), True)

    def _fields(self) -> dict[str, Any]:
        return {**super()._fields(), "rules": self._axes.rules}

    def _rules_of(self, updates: dict[str, Any]) -> Any:
        return as_rules(updates.pop("rules", self._axes.rules))

    def _constrained(self) -> Any:
        axes = self._axes
        rules = _surrounding() if axes.rules is None else axes.rules
        if not rules and not names_may_be_known():
            return self._value
        return constrain(self._value, axes.names, axes.mesh, self, rules)

    def get_sharding(self, mesh: AnyMesh) -> NamedSharding:
        """A `NamedSharding` in the device axes that the box's rules, or those of the surroundings, give.

        Raises:
          AxisError: the mesh has no such axis, or a name stands twice.
        """
        spec = spec_of(self._axes, self._axes.names, None, get_logical_axis_rules())
        check_divides(repr(self), (0,) * len(spec), spec, mesh)
        return NamedSharding(mesh, spec)

    def to_nnx_metadata(self) -> dict[str, Any]:
        """The fields of this box under the names that a Flax NNX ``Variable`` gives them."""
        return {**super().to_nnx_metadata(), "sharding_rules": self._axes.rules}

    @classmethod
    def from_nnx_metadata(cls, metadata: Mapping[str, Any]) -> Any:
        """A box from the value and the metadata of a Flax NNX ``Variable``; what a box does not have is left out."""
        names = metadata.get("out_sharding", metadata.get("sharding"))
        rules = metadata.get("sharding_rules")
        return cls(metadata["value"], () if names is None else names, metadata.get("mesh"), rules)


def with_logical_partitioning(
    fn: Callable[P, A], names: Iterable[Any], mesh: AnyMesh | None = None, rules: RulesLike | None = None
) -> Callable[P, LogicallyPartitioned[A]]:
    """Wraps a function, usually an initializer, so that its result comes in a `LogicallyPartitioned` box.

    Args:
      fn: any function.
      names: one logical name for each leading dimension of its result.
      mesh: the mesh of the box; by default the surrounding one is used.
      rules: the rules of the box; by default those of the surroundings are used.

    Raises:
      MetadataError: ``names`` is no sequence of names.
      AxisError: ``rules`` is no sequence of pairs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from manymesh import meta
      >>> init = meta.with_logical_partitioning(jax.nn.initializers.zeros, ("embed", "hidden"))
      >>> init(jax.random.key(0), (2, 4), jnp.float32)
      LogicallyPartitioned(float32[2,4], names=('embed', 'hidden'))
    """
    names, rules = check_names(names, "with_logical_partitioning"), as_rules(rules)

    @functools.wraps(fn)
    def boxed(*args: P.args, **kwargs: P.kwargs) -> LogicallyPartitioned[A]:
        return LogicallyPartitioned(fn(*args, **kwargs), names, mesh, rules)

    return boxed


@_compat.boundary
def with_logical_constraint(
    x: PyTree,
    logical_axis_resources: Any,
    rules: RulesLike | None = None,
    mesh: AnyMesh | None = None,
    fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
) -> PyTree:
    """Constrains the sharding of arrays, in logical names.

    Args:
      x: a pytree of arrays.
      logical_axis_resources: a pytree prefix of ``x`` whose leaves are tuples (or a `PartitionSpec`) with one
        logical name a dimension. None means no constraint.
      rules: rules in order of priority; by default those of the surroundings.
      mesh: the mesh to use instead of the surrounding one.
      fallback: what to do with a name that no rule assigns: leave its dimension unsharded, raise, or
        leave the whole array without a constraint. Flax's ``RulesFallback`` values mean the same.

    Returns:
      ``x`` with the constraint. In a task, the task's own names come before rules. Outside a task and
      without rules or a mesh, ``x`` itself.

    Raises:
      AxisError: no rule assigns a name and ``fallback`` says to raise; a device axis that the mesh does not have;
        a fallback that there is not.
      MetadataError: more names than dimensions.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from manymesh import meta
      >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
      >>> y = meta.with_logical_constraint(jnp.ones((4, 8)), ("batch", "embed"), [("batch", "data")], mesh)
      >>> y.sharding.spec
      P('data', None)
    """
    found = _surrounding() if rules is None else as_rules(rules) or ()
    fallback = as_fallback(fallback)
    if logical_axis_resources is None or (not found and not names_may_be_known()):
        return x
    return jax.tree.map(
        lambda names, part: part if names is None else _constrain_names(part, names, found, mesh, fallback),
        logical_axis_resources,
        x,
        is_leaf=_is_logical_spec,
    )


def _constrain_names(x: Any, names: Any, rules: Rules, mesh: AnyMesh | None, fallback: RulesFallback) -> Any:
    where = "with_logical_constraint"
    if mesh is not None:
        check_mesh(where, mesh)
    names = check_names(names, where)
    if names_may_be_known():
        return constrain(x, names, mesh, where, rules)
    resolution = resolve(names, rules)
    if resolution.open and fallback is not RulesFallback.AXIS_IS_UNSHARDED:
        if fallback is RulesFallback.NO_CONSTRAINT:
            return x
        position = resolution.open[0]
        passed = resolution.passed_over[0]
        if passed:
            why = (
                f"every rule for it maps to device axes that are taken: {', '.join(repr(rules[i]) for i, _ in passed)}"
            )
        else:
            why = f"no rule knows it{nearest(names[position], [rule[0] for rule in rules])}"
        raise AxisError(f"{where}: name {names[position]!r} of {names} got no device axis, {why}")
    return constrain_to_axes(x, resolution.axes, mesh, where)


def _surrounding() -> Rules:
    return rules_around() if names_may_be_known() else get_logical_axis_rules()


def _is_logical_spec(spec: Any) -> bool:
    if spec is None or isinstance(spec, PartitionSpec):
        return True
    return isinstance(spec, tuple) and all(
        name is None or isinstance(name, str) or name is PartitionSpec.UNCONSTRAINED for name in spec
    )


@_compat.boundary
def logical_to_mesh(tree: PyTree, rules: RulesLike | None = None) -> PyTree:
    """Maps a tree of specs in logical names, or of boxes, to specs in device axes.

    Args:
      tree: a pytree of `PartitionSpec`, as `get_partition_spec` gives it for logical boxes, or of boxes.
      rules: rules in order of priority; by default those of the surroundings.

    Raises:
      AxisError: a name stands at two dimensions of a leaf.
      MetadataError: a leaf is neither a spec nor a box nor an array.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from manymesh import meta
      >>> meta.logical_to_mesh({"w": P("embed", "hidden")}, [("hidden", "model")])
      {'w': P(None, 'model')}
    """
    surrounding, given = get_logical_axis_rules(), as_rules(rules)
    memo: dict[PartitionSpec, PartitionSpec] = {}

    def on_leaf(leaf: PyTree) -> PyTree:
        if isinstance(leaf, PartitionSpec):
            found = memo.get(leaf)
            if found is None:
                found = memo[leaf] = resolve(tuple(leaf), surrounding if given is None else given).spec
            return found
        return PartitionSpec() if hasattr(leaf, "shape") else _refuse(tree, leaf, "logical_to_mesh")

    def on_box(node: PyTree) -> PyTree:
        axes = axes_of(node)
        return spec_of(axes, axes.names, given, surrounding)

    return walk(tree, on_box, on_leaf, lambda variable: variable.replace(on_box(variable)))


@_compat.boundary
def logical_to_mesh_sharding(
    tree: PyTree, mesh: AnyMesh, rules: RulesLike | None = None, *, strict: bool = False
) -> PyTree:
    """Maps a tree of specs in logical names, or of boxes, to shardings.

    Args:
      tree: a pytree of `PartitionSpec`, as `get_partition_spec` gives it for logical boxes, or of boxes.
      mesh: the mesh, concrete or abstract.
      rules: rules in order of priority; by default those of the surroundings.
      strict: whether what `explain` finds suspicious is an error, such as a name that no rule knows.

    Raises:
      AxisError: a rule names a device axis that the mesh does not have, a name stands at two dimensions, or, for
        boxes, a dimension does not divide; with ``strict``, also for the other findings.
      MetadataError: a leaf is neither a spec nor a box nor an array.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from manymesh import meta
      >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
      >>> meta.logical_to_mesh_sharding({"w": P("embed", "hidden")}, mesh, [("hidden", "model")])["w"].spec
      P(None, 'model')
    """
    check_mesh("logical_to_mesh_sharding", mesh)
    given = as_rules(rules)
    if strict:
        explain(tree, mesh, given, strict=True)
    return shard_tree(tree, mesh, given, lambda leaf: _refuse(tree, leaf, "logical_to_mesh_sharding"))


def _refuse(tree: PyTree, leaf: PyTree, where: str) -> NoReturn:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_axis_metadata)
    path = next((format_path(path) for path, other in leaves if other is leaf), "tree")
    raise MetadataError(f"{where}: {path} is {leaf!r}; expected a PartitionSpec, a box or an array")
