"""Where arguments are, and where the caller wants arguments and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .._distributed._world import world
from .._errors import ArgumentError, AxisError, MeshError
from .._findings import Finding
from .._mark import Recording
from .._program import Program
from .._runtime._memories import host_kind
from .._task import Task, mesh_devices
from .._topology import auto_mesh
from .._types import PyTree
from ..meta._check import indivisible, indivisible_text


def mesh_of(x: Any) -> Mesh | None:
    """The mesh that an argument was put on, if it was put anywhere."""
    sharding = getattr(x, "sharding", None)
    if sharding is None or not getattr(x, "committed", True):
        return None
    if isinstance(sharding, NamedSharding):
        return auto_mesh(sharding.mesh) if isinstance(sharding.mesh, Mesh) else None
    devices = sorted(sharding.device_set, key=lambda d: d.id)
    return Mesh(np.array(devices), ("device",))


def default_device() -> Any:
    """The device for what may go anywhere: that of ``jax.default_device``; in several processes the first one of all."""
    config: Any = jax.config  # JAX adds its settings as it is imported
    said = config.jax_default_device if world() is None else None
    if isinstance(said, str):
        return jax.devices(said)[0]
    return jax.devices()[0] if said is None else said


def committed(x: Any) -> NamedSharding | None:
    """The sharding over a mesh that an argument was given."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return on_devices(sharding) if getattr(x, "committed", True) else None


def on_devices(sharding: NamedSharding) -> NamedSharding:
    """The same layout in the memory of the devices: what a program knows of an array in the memory of the host."""
    return sharding if host_kind(sharding) is None else NamedSharding(sharding.mesh, sharding.spec)


def arrival(x: Any, program: Program) -> NamedSharding | None:
    """The sharding an argument already has, if that is a layout on one of the submeshes."""
    sharding = committed(x)
    if sharding is None or not isinstance(sharding.mesh, Mesh):
        return None
    devices = mesh_devices(sharding.mesh)
    return sharding if any(mesh_devices(m) == devices for m in program.submeshes) else None


def check_submeshes(label: str, shardings: dict[int, Any], paths: list[str], tasks: Iterable[Task]) -> None:
    """Refuses a sharding over devices of a task and others, such as one on the whole mesh.

    Args:
      label: ``in_shardings`` or ``out_shardings``.
      shardings: position of a leaf -> its sharding.
      paths: what each leaf is called.
      tasks: the tasks of the step.

    Raises:
      MeshError: it is on devices of a task's submesh, and no one submesh of a task has all of its devices.
    """
    meshes = {mesh: str(task.name) for task in tasks for mesh in (task.meshes or (task.mesh,)) if mesh is not None}
    for i, sharding in shardings.items():
        own = set(mesh_devices(sharding.mesh))
        parts = {name for mesh, name in meshes.items() if not own.isdisjoint(mesh_devices(mesh))}
        if parts and not any(own <= set(mesh_devices(mesh)) for mesh in meshes):
            raise MeshError(
                f"{label} of{paths[i]} is on devices {sorted(d.id for d in own)}, but expected is the submesh of one task: "
                f"{', '.join(map(repr, sorted(parts)))} use{'s' * (len(parts) == 1)} parts of these devices; write NamedSharding(submesh, spec), or "
                "None to have it inferred"
            )


def note_renamed(
    record: Recording, label: str, shardings: Mapping[int, NamedSharding], paths: Sequence[str], tasks: Iterable[Task]
) -> None:
    """Adds a finding: a sharding on the devices of a task, on a mesh that is not the task's and so is another submesh.

    Args:
      record: of the trace.
      label: ``in_shardings`` or ``out_shardings``.
      shardings: position of a leaf -> its sharding.
      paths: what each leaf is called.
      tasks: the tasks of the step.
    """
    meshes = {mesh: str(task.name) for task in tasks for mesh in (task.meshes or (task.mesh,)) if mesh is not None}
    of_devices = {mesh_devices(mesh): mesh for mesh in meshes}
    asked = {i: auto_mesh(s.mesh) for i, s in shardings.items() if isinstance(s.mesh, Mesh)}
    renamed = {
        i: mesh
        for i, mesh in asked.items()
        if mesh.size > 1 and mesh not in meshes and mesh_devices(mesh) in of_devices
    }
    if not renamed:
        return
    i, mesh = next(iter(renamed.items()))
    task = of_devices[mesh_devices(mesh)]
    more = f" and {len(renamed) - 1} more" if len(renamed) > 1 else ""
    text = (
        f"{label} of{paths[i]}{more}: on the devices {[d.id for d in mesh_devices(mesh)]} of task {meshes[task]!r}, but on another "
        f"mesh, {dict(mesh.shape)}, than that of the task, {dict(task.shape)}; these are two submeshes, between which it is "
        "copied in every step: give the task this mesh (mesh=), or write NamedSharding with the mesh of the task"
    )
    record.findings[Finding(text)] = MeshError


def check_fit(
    label: str, shardings: dict[int, NamedSharding], shapes: Sequence[tuple[int, ...]], names: Sequence[str]
) -> None:
    """Refuses a sharding that a value cannot have, as ``jax.jit`` does.

    Args:
      label: ``in_shardings`` or ``out_shardings``.
      shardings: position of a leaf -> its sharding.
      shapes: those of all leaves.
      names: what each leaf is called.

    Raises:
      AxisError: more dimensions than the value has, or one that does not divide.
    """
    for i, sharding in shardings.items():
        spec, shape = sharding.spec, shapes[i]
        if len(spec) > len(shape):
            raise AxisError(
                f"{label} of {names[i]}: {spec} is of {len(spec)} dimensions, but the value of shape {shape} has {len(shape)}"
            )
        for d in indivisible(shape, tuple(spec), sharding.mesh):
            raise AxisError(indivisible_text(f"{label} of {names[i]}", shape, d, spec[d], sharding.mesh))


_NOTHING = object()


def expand(label: str, prefix: Any, tree: PyTree) -> dict[int, Any]:
    """position of a leaf -> its sharding, from a pytree prefix."""
    # To JAX None is no leaf where it says what does not fit.
    said = jax.tree.map(lambda s: _NOTHING if s is None else s, prefix, is_leaf=lambda s: s is None)
    try:
        expanded = jax.tree.map(lambda s, part: [s] * len(jax.tree.leaves(part)), said, tree)
    except ValueError as error:
        whole = "result" if label.startswith("out") else "arguments"
        text = str(error).replace("tree_map tree", label)  # what JAX calls the first of the trees
        text = text if len(text) <= 1000 else f"{text[:1000]} ..."  # it may name hundreds of keys
        raise ArgumentError(f"{label}: its structure is no prefix of the {whole}: {text}") from None
    flat = [None if s is _NOTHING else _on_a_mesh(s) for s in jax.tree.leaves(expanded)]
    for s in flat:
        if s is not None and not isinstance(s, NamedSharding):
            hint = "; say on which submesh: NamedSharding(submesh, spec)" if isinstance(s, PartitionSpec) else ""
            if isinstance(s, Format):
                hint = "; give its sharding alone: arguments may come with any layout, results have the default one"
            raise ArgumentError(
                f"{label}: expected NamedSharding on a submesh, SingleDeviceSharding or None, found {s!r}{hint}"
            )
    return {i: s for i, s in enumerate(flat) if s is not None}


def _on_a_mesh(sharding: Any) -> Any:
    """A sharding of one device as one over the mesh of this device; others as they are."""
    if not isinstance(sharding, SingleDeviceSharding):
        return sharding
    mesh = Mesh(np.array(list(sharding.device_set)), ("unnamed_0",))  # as that of a task on this device
    return NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
