"""`Task`: the frozen description of where a part of a program runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Never

import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from ._errors import ArgumentError, AxisError, MeshError, TaskError
from ._shown import Shown, numbers
from ._topology import auto_mesh, resolve_devices
from .meta._rules import resolve, rules_in_task

AxisRule = tuple[str, str | tuple[str, ...] | None]


@dataclass(frozen=True, init=False, eq=True)
class Task(Shown):
    """Where a part of a program runs, and what the names of its axes mean there.

    Args:
      name: name of the task in reports, schedules and errors; None takes the name of the function or
        module that is wrapped.
      mesh: the submesh. Excludes ``devices`` and ``device_axes``. Several meshes of one shape, in a list or tuple,
        are for a task in the body of ``lax.scan``: its iterations are split over them in order, as evenly as it goes,
        the first ones getting one more. Of scans in each other those are split that cut off most of the arrays that the
        task reads, its parameters: a scan over layers, or over rounds of layers, and not one over steps around it.
      devices: jax devices or their positions in `jax.devices()`. The shape of an ndarray is the shape of the mesh.
      device_axes: a name for each dimension of ``devices``; a string is one name, as in `jax.sharding.Mesh`. Without
        it, constraints inside the task mean replication.
      logical_axes: pairs ``(logical name, device axis | tuple of device axes | None)``, in order of priority.
        Without it, constraints name device axes directly.

    Nothing given at all: the placement is inferred from the values that the task consumes.

    Raises:
      ValueError: `mesh` together with `devices`, `logical_axes` without named axes, a wrong number of
        `device_axes`, a rule that names an unknown device axis, devices that do not exist.

    Example:
      >>> import manymesh as mm
      >>> mm.Task("decoder", devices=[0, 1], device_axes=("model",), logical_axes=[("hidden", "model")])
      Task('decoder', mesh={'model': 2}, devices=[0, 1], logical_axes=(('hidden', 'model'),))
    """

    name: str | None
    mesh: Mesh | None
    logical_axes: tuple[AxisRule, ...] | None
    has_named_axes: bool = field(repr=False)
    meshes: tuple[Mesh, ...] = field(default=(), repr=False)

    def __init__(
        self,
        name: str | None = None,
        *misplaced: Never,
        mesh: Mesh | Sequence[Mesh] | None = None,
        devices: Any = None,
        device_axes: str | Iterable[str] | None = None,
        logical_axes: Iterable[Any] | None = None,
    ) -> None:
        check_name("Task", name, *misplaced)
        where = f"task {name!r}" if name else "task"
        meshes: tuple[Mesh, ...] = ()
        if isinstance(mesh, (list, tuple)):
            meshes = _alike(where, tuple(mesh))
            mesh = meshes[0]
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ArgumentError(f"{where}: mesh has to be one jax.sharding.Mesh, found {type(mesh).__name__} {mesh!r}")
        if mesh is not None and (devices is not None or device_axes is not None):
            raise TaskError(
                f"{where}: mesh already says which devices and axes to use; give either mesh, or devices and device_axes"
            )
        named = mesh is not None or (devices is not None and device_axes is not None)
        if devices is not None:
            array = resolve_devices(devices)
            axes = None if device_axes is None else axis_names(device_axes)
            if axes is not None and len(axes) != array.ndim:
                raise MeshError(
                    f"{where}: device_axes {axes} names {len(axes)} axes, but devices has shape {array.shape}, "
                    f"{array.ndim} dimensions; give one name for each"
                )
            twice = sorted({axis for axis in axes or () if (axes or ()).count(axis) > 1})
            if twice:
                raise MeshError(
                    f"{where}: device_axes {axes} names {', '.join(map(repr, twice))} more than once; give each dimension "
                    "of devices a name of its own"
                )
            axes = axes or tuple(f"unnamed_{i}" for i in range(array.ndim))
            mesh = Mesh(array, axes, axis_types=(AxisType.Auto,) * len(axes))
        elif device_axes is not None:
            raise TaskError(f"{where}: device_axes {axis_names(device_axes)} without devices to name the axes of")
        rules = None
        if logical_axes is not None:
            rules = _pairs(where, logical_axes)
            if not named:
                raise TaskError(
                    f"{where}: logical_axes were given, but no mesh or device_axes for them to refer to; "
                    "give mesh=, or devices= with device_axes="
                )
            _check_rules(where, rules, mesh)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "mesh", None if mesh is None else auto_mesh(mesh))
        object.__setattr__(self, "logical_axes", rules)
        object.__setattr__(self, "has_named_axes", named)
        object.__setattr__(self, "meshes", meshes)

    def __repr__(self) -> str:
        parts = [repr(self.name)]
        if self.mesh is not None:
            shape = dict(self.mesh.shape) if self.has_named_axes else tuple(self.mesh.devices.shape)
            ids = [d.id for d in self.mesh.devices.flat]
            parts += [f"mesh={shape}", f"devices={ids if len(ids) <= 16 else f'[{numbers(ids)}]'}"]
        if self.logical_axes is not None:
            parts.append(f"logical_axes={self.logical_axes}")
        return f"Task({', '.join(parts)})"

    def named(self, name: str) -> Task:
        """This task under a name, if it has none yet."""
        if self.name is not None:
            return self
        return self._replaced(name=name)

    def joined(self, others: Iterable[Task]) -> Task:
        """What is to be one task with others on its submesh: named after all of them, with the rules of all of them."""
        tasks = (self, *others)
        name = "_".join(dict.fromkeys(t.name or "task" for t in tasks))
        rules = tuple(dict.fromkeys(r for t in tasks for r in t.logical_axes or ()))
        return self._replaced(name=name, logical_axes=rules or None)

    def within(self, outer: Task) -> Task:
        """This task inside another one of its submesh, whose rules count for the names that it does not know."""
        if self.mesh is None or not self.has_named_axes or not outer.logical_axes:
            return self
        rules = rules_in_task(self.logical_axes or (), outer.logical_axes, tuple(self.mesh.axis_names))
        return self._replaced(logical_axes=rules)

    def at(self, index: int, length: int) -> Task:
        """This task in iteration ``index`` of ``length``: on the mesh of its list that the iteration falls to."""
        count = len(self.meshes)
        share, more = divmod(length, count)
        boundary = more * (share + 1)
        stage = index // (share + 1) if index < boundary else more + (index - boundary) // share
        return self._replaced(mesh=self.meshes[stage], meshes=())

    def _replaced(self, **changes: Any) -> Task:
        new = object.__new__(Task)
        for field_ in fields(self):
            object.__setattr__(new, field_.name, changes.get(field_.name, getattr(self, field_.name)))
        return new

    def resolve(
        self, names: tuple[Any, ...], shape: tuple[int, ...], others: tuple[AxisRule, ...] = ()
    ) -> tuple[PartitionSpec, tuple[str, ...]]:
        """What per-dimension names mean on this task's mesh.

        Args:
          names: a name, a tuple of names, None or ``PartitionSpec.UNCONSTRAINED`` for each leading dimension.
          shape: shape of the value.
          others: rules for the names that the task does not know.

        Returns:
          The `PartitionSpec` in device axes, and the names that nothing knows (they mean replication).

        Raises:
          AxisError: more names than dimensions, a device axis used twice, a dimension that does not divide.
        """
        if self.mesh is None or not self.has_named_axes:
            return PartitionSpec(), ()
        if len(names) > len(shape):
            raise AxisError(
                f"task {self.name!r}: {len(names)} axis names {names} for a value of shape {shape}, "
                f"which has {len(shape)} dimensions"
            )
        rules = rules_in_task(self.logical_axes or (), others, tuple(self.mesh.axis_names))
        return resolve_names(f"task {self.name!r}", names, shape, rules, self.mesh)


def check_name(caller: str, name: Any, *misplaced: Any) -> None:
    """Refuses what stands where the name of a task belongs, and what stands after it."""
    if isinstance(name, str) and not misplaced or name is None and not misplaced:
        return
    if not misplaced and isinstance(name, int | float):
        raise ArgumentError(f"{caller}: the name of the task has to be a str, found {type(name).__name__} {name!r}")
    raise misplaced_error(caller, "the name of the task, a str", misplaced[0] if misplaced else name)


def check_task(caller: str, task: object) -> None:
    """Refuses what is no `Task` where one was said to be ready."""
    if not isinstance(task, Task):
        raise ArgumentError(f"{caller}: task has to be a manymesh.Task, found {type(task).__name__} {_short(task)}")


def misplaced_error(caller: str, expected: str, found: Any) -> ArgumentError:
    """What stands by position where a keyword belongs."""
    what = {Mesh: "mesh=", Task: "task="}.get(type(found), "mesh=, devices= or task=")
    return ArgumentError(
        f"{caller}: expected {expected}, and everything else by keyword; found {type(found).__name__} {_short(found)} by "
        f"position; write {what}"
    )


def axis_names(axes: str | Iterable[str]) -> tuple[str, ...]:
    """As in `jax.sharding.Mesh`, where a string is one name."""
    if not isinstance(axes, Iterable):
        raise ArgumentError(
            f"device_axes has to be one name for each dimension of devices, found {type(axes).__name__} {_short(axes)}"
        )
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _alike(where: str, meshes: tuple[Any, ...]) -> tuple[Mesh, ...]:
    """The meshes of a task that a scan splits, checked."""
    for mesh in meshes:
        if not isinstance(mesh, Mesh):
            raise ArgumentError(f"{where}: mesh holds {type(mesh).__name__} {mesh!r}; expected jax.sharding.Mesh")
    if not meshes:
        raise MeshError(f"{where}: mesh is empty; expected a jax.sharding.Mesh, or one for each part of a scan")
    shapes = [dict(m.shape) for m in meshes]
    if any(s != shapes[0] for s in shapes):
        raise TaskError(
            f"{where}: the meshes that iterations are split over have to be alike, because one body is traced for all; "
            f"found shapes {shapes}"
        )
    return tuple(auto_mesh(m) for m in meshes)


def _pairs(where: str, rules: Any) -> tuple[AxisRule, ...]:
    """Rules as pairs, from any iterable of pairs or from a mapping."""
    pairs = []
    if not isinstance(rules, Iterable):
        raise TaskError(
            f"{where}: logical_axes has to be a list of pairs (logical name, device axis, tuple of device axes or None), found "
            f"{type(rules).__name__} {_short(rules)}"
        )
    for rule in rules.items() if isinstance(rules, Mapping) else rules:
        if isinstance(rule, str) or not isinstance(rule, Iterable) or len(rule := tuple(rule)) != 2:
            raise TaskError(
                f"{where}: logical_axes holds {rule!r}; expected pairs (logical name, device axis, tuple of device axes "
                "or None)"
            )
        logical, target = rule
        target = tuple(target) if isinstance(target, list) else target
        axes = target if isinstance(target, tuple) else () if target is None else (target,)
        if not isinstance(logical, str) or not all(isinstance(a, str) for a in axes):
            raise TaskError(
                f"{where}: logical_axes holds {rule!r}; expected pairs of names (logical name, device axis, tuple of "
                "device axes or None)"
            )
        pairs.append((logical, target))
    return tuple(pairs)


def _check_rules(where: str, rules: tuple[AxisRule, ...], mesh: Mesh | None) -> None:
    assert mesh is not None, "rules are only checked for tasks that have named axes"
    for logical, target in rules:
        for axis in target if isinstance(target, tuple) else (target,):
            if axis is not None and axis not in mesh.axis_names:
                raise AxisError(
                    f"{where}: the rule {(logical, target)!r} maps to device axis {axis!r}, "
                    f"but the mesh has axes {tuple(mesh.axis_names)}; map the name to one of them, or to None for a dimension "
                    "that is whole on this submesh"
                )


_FREE = PartitionSpec.UNCONSTRAINED
CONSTRAINT = "with_sharding_constraint"  # what a constraint is called in errors, if nothing else


def check_divides(
    context: str, names: tuple[Any, ...], spec: list[Any], shape: tuple[int, ...], sizes: dict[str, int]
) -> None:
    """Raises an `AxisError` if a dimension of a value does not divide over the device axes that shard it."""
    for dim, target in enumerate(spec):
        if target is None or target is PartitionSpec.UNCONSTRAINED:
            continue
        axes = target if isinstance(target, tuple) else (target,)
        count = math.prod(sizes[a] for a in axes)
        if shape[dim] % count:
            low = shape[dim] // count * count
            fits = f"{low} or {low + count}" if low else f"{count}"
            label = repr(axes[0]) if len(axes) == 1 else repr(axes)
            error = AxisError(
                f"{context}: dimension {dim} ({names[dim]!r}) of shape {shape} does not divide over axis {label}, "
                f"which has {count} devices; use {fits}, or map {names[dim]!r} to None"
            )
            error.names, error.shape = names, shape  # type: ignore[attr-defined]  # lets mm.jit add the parameter's path
            raise error


def resolve_names(
    context: str, names: tuple[Any, ...], shape: tuple[int, ...], rules: tuple[AxisRule, ...], mesh: Mesh
) -> tuple[PartitionSpec, tuple[str, ...]]:
    """The device axes of ``mesh`` that names give to the dimensions of a value.

    Returns:
      The spec, and the names that neither rules nor the mesh know; these dimensions are replicated.

    Raises:
      AxisError: a name at two dimensions, or a dimension that does not divide.
    """
    try:
        found = resolve(names, rules, tuple(mesh.axis_names))
    except AxisError as error:
        raise AxisError(f"{context}: {error}") from None
    spec = list(found.axes)
    check_divides(context, names, spec, shape, dict(mesh.shape))
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec), found.unknown


def names_as_axes(context: str, names: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The spec of a constraint from outside every task: its names are axes of ``mesh``, others leave a dimension free.

    ``context`` begins errors.

    Raises:
      AxisError: a dimension that does not divide.
    """
    axes = set(mesh.axis_names)
    known = [n if n is None or axes.issuperset(n if isinstance(n, tuple) else (n,)) else _FREE for n in names]
    check_divides(context, names, known, shape, dict(mesh.shape))
    return PartitionSpec(*known)


def mesh_devices(mesh: Mesh) -> tuple[Any, ...]:
    """The devices of a mesh in their order."""
    return tuple(np.asarray(mesh.devices).flat)
