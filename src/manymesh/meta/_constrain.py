"""Applying a spec to a value, wherever the code is: in a task, under a mesh, or eagerly.

What a constraint may say depends on the types of the mesh's axes. An Auto axis takes a hint
(`jax.lax.with_sharding_constraint`), an Explicit axis is part of the value's type and is changed by
`jax.sharding.reshard`, and along a Manual axis (inside `jax.shard_map`) the value is a shard already, so
that its name says nothing more. A spec is cut by these types and each part goes its way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from .._errors import AxisError, MetadataError
from .._scope import Carrier, Scope, current_carrier, current_scope, names_may_be_known
from ._axes import AnyMesh, Names
from ._paths import describe, nearest
from ._rules import Rules, parts_of, resolve

_UNCONSTRAINED = PartitionSpec.UNCONSTRAINED


def is_active(mesh: AnyMesh | None = None) -> bool:
    """Whether a constraint here would do anything: in a task, under a mesh, or with a mesh of its own."""
    return mesh is not None or names_may_be_known() or not jax.sharding.get_abstract_mesh().empty


def is_constrainable(value: object) -> bool:
    """Whether a value has a sharding to constrain: an array or a tracer, not a description of one."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def constrain(value: jax.Array, names: Names, mesh: AnyMesh | None, where: object, rules: Rules = ()) -> Any:
    """Constrains the arrays of a value.

    Args:
      value: an array or a pytree of arrays that share the names. Descriptions of arrays are left alone.
      names: one entry a dimension: device axes, or, where ``rules`` know them, logical names. In a task, also the
        names that the task knows, which come before rules.
      mesh: the mesh to use instead of the surrounding one. A task's own mesh comes before it.
      where: the box or call, for messages.
      rules: logical rules, in order of priority.

    Raises:
      MetadataError: more names than the value has dimensions.
      AxisError: a device axis that the mesh does not have.
    """
    scope = current_scope()
    if scope is not None:
        return jax.tree.map(lambda leaf: _in_task(leaf, names, scope, where, rules), value)
    carrier = current_carrier()
    if carrier is not None:
        return jax.tree.map(lambda leaf: _carried(leaf, names, carrier, where, rules), value)
    axes = resolve(names, rules).axes if rules else names
    return constrain_to_axes(value, axes, mesh, where)


def constrain_to_axes(value: jax.Array, axes: Names, mesh: AnyMesh | None, where: object) -> Any:
    """Constrains the arrays of a value outside every task; ``axes`` are device axes."""
    ambient = jax.sharding.get_abstract_mesh()
    if mesh is None and ambient.empty:
        return value
    return jax.tree.map(lambda leaf: _on_mesh(leaf, axes, mesh, ambient, where), value)


def check_rank(value: jax.Array, names: Names, where: object) -> None:
    """Raises if there are more names than dimensions."""
    if len(names) > value.ndim:
        raise MetadataError(
            f"{where}: names {names} are {len(names)} for {describe(value)}, which has {value.ndim} dimensions; "
            "remove the surplus names, or use unbox(apply_constraint=False)"
        )


def _carried(value: jax.Array, names: Names, carrier: Carrier, where: object, rules: Rules) -> Any:
    if not is_constrainable(value):
        return value
    check_rank(value, names, where)
    return carrier(value, names, rules, where)


def _in_task(value: jax.Array, names: Names, scope: Scope, where: object, rules: Rules) -> Any:
    if scope.mesh is None or not is_constrainable(value):
        return value
    if len(names) - value.ndim > len(_compat.vmapped()):  # vmap may have taken the axis that the first name is for
        check_rank(value, names, where)
    return jax.lax.with_sharding_constraint(value, scope.resolve(names, tuple(value.shape), rules))


def _on_mesh(value: jax.Array, axes: Names, mesh: AnyMesh | None, ambient: AbstractMesh, where: object) -> Any:
    if not is_constrainable(value):
        return value
    check_rank(value, axes, where)
    if not ambient.empty and (mesh is None or dict(mesh.shape) == dict(ambient.shape)):
        check_axes(axes, ambient, where)
        concrete = _concrete(value, mesh, ambient)
        return _apply(value, axes, ambient, concrete)
    assert mesh is not None, "without a mesh of its own a constraint needs a surrounding one"
    check_axes(axes, mesh, where)
    if isinstance(mesh, Mesh) and isinstance(value, jax.core.Tracer) and AxisType.Explicit in mesh.axis_types:
        # jit without a surrounding mesh takes no explicit axes; the same devices under Auto axes say the same.
        mesh = Mesh(mesh.devices, mesh.axis_names)
    return _apply(value, axes, mesh, mesh if isinstance(mesh, Mesh) else None)


def check_axes(axes: Names, mesh: AnyMesh, where: object) -> None:
    """Raises an `AxisError` if a spec names a device axis that the mesh does not have, or one twice."""
    seen = set()
    for part in (part for entry in axes for part in parts_of(entry)):
        if part not in mesh.axis_names:
            raise AxisError(
                f"{where}: device axis {part!r} of {axes} is not in the mesh with axes {tuple(mesh.axis_names)}"
                f"{nearest(part, mesh.axis_names)}"
            )
        if part in seen:
            raise AxisError(f"{where}: device axis {part!r} stands twice in {axes}; an axis can shard one dimension")
        seen.add(part)


def _concrete(value: jax.Array, mesh: AnyMesh | None, ambient: AbstractMesh) -> Mesh | None:
    """Devices for an eager constraint; None while tracing, where the surrounding mesh has them."""
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(mesh, Mesh):
        return mesh
    try:
        found = jax.sharding.get_mesh()
    except ValueError:  # a constant inside a trace: it becomes part of the trace
        return None
    return found if not found.empty and found.abstract_mesh == ambient else None


def _apply(value: jax.Array, axes: Names, mesh: AnyMesh, concrete: Mesh | None) -> Any:
    types: Mapping[str, AxisType] = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries = (*axes, *(None,) * (value.ndim - len(axes)))
    if concrete is not None and {AxisType.Auto, AxisType.Explicit} <= set(types.values()):
        # Two eager steps would each move the value, and the second would undo the first.
        old = getattr(value, "sharding", None)
        current: Any = ()
        if isinstance(old, NamedSharding) and old.mesh.axis_names == mesh.axis_names:
            current = old.spec
        return jax.device_put(value, NamedSharding(concrete, PartitionSpec(*_settle(entries, current))))
    if AxisType.Explicit in types.values():
        value = _reshard(value, entries, types, concrete)
    if AxisType.Auto not in types.values():
        return value
    auto = [_keep(entry, types, AxisType.Auto) for entry in entries]
    return jax.lax.with_sharding_constraint(value, _target(PartitionSpec(*auto), concrete))


def _reshard(value: jax.Array, entries: Names, types: Mapping[str, AxisType], concrete: Mesh | None) -> Any:
    explicit = tuple(_keep(entry, types, AxisType.Explicit) for entry in entries)
    current = getattr(jax.typeof(value).sharding, "spec", ())
    return jax.sharding.reshard(value, _target(PartitionSpec(*_settle(explicit, current)), concrete))


def _settle(entries: Names, current: Iterable[Any]) -> Names:
    """Entries without UNCONSTRAINED: such a dimension stays as it is, but for axes that are wanted elsewhere."""
    named = {part for entry in entries for part in parts_of(entry)}
    present = itertools.chain(current, itertools.repeat(None))
    return tuple(
        (tuple(part for part in parts_of(old) if part not in named) or None) if entry is _UNCONSTRAINED else entry
        for entry, old in zip(entries, present, strict=False)
    )


def _target(spec: PartitionSpec, concrete: Mesh | None) -> PartitionSpec | NamedSharding:
    return spec if concrete is None else NamedSharding(concrete, spec)


def _keep(entry: Any, types: Mapping[str, AxisType], kind: AxisType) -> Any:
    """An entry of a spec without the axes of other types."""
    if entry is None or entry is _UNCONSTRAINED:
        return entry
    parts = tuple(part for part in parts_of(entry) if types[part] == kind)
    if isinstance(entry, str):
        return entry if parts else None
    return parts or None
