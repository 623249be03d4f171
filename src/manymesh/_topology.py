"""Meshes: taking submeshes out of one, and bringing any mesh into the form tasks use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from . import _compat
from ._errors import ArgumentError, MeshError


@dataclass(frozen=True, order=True)
class PlannedDevice:
    """Stands for a device that is not at hand; equal to any other of its id and platform.

    Attributes:
      id: its number, from 0.
      platform: ``"cpu"``, or ``"planned"`` for one of an accelerator.
    """

    # What `jax.sharding.Mesh` and `jax.make_mesh` ask of a device.
    device_kind: ClassVar[str] = "planned"
    process_index: ClassVar[int] = 0
    id: int
    platform: str = "planned"

    def __repr__(self) -> str:
        return f"PlannedDevice({self.id}{', cpu' if self.platform == 'cpu' else ''})"

    @property
    def client(self) -> Any:
        """What JAX asks for when it wants to put an array here.

        Raises:
          MeshError: always.
        """
        raise MeshError(
            f"{self!r} only stands for a device: a step can be lowered for it, but no array can be put there, and it has no "
            "kinds of memory (memory_kind=); use devices of jax.devices() for that"
        )


def planned_devices(count: int, platform: Literal["cpu"] | None = None) -> list[Any]:
    """Devices to plan with on a machine that does not have them.

    They go wherever ``jax.devices()`` go when a step is described: into ``jax.make_mesh(..., devices=)``,
    ``jax.sharding.Mesh``, `submeshes` and ``Task(devices=)``. ``mm.jit(step).lower(*args)``, with
    `jax.ShapeDtypeStruct` for arguments, then gives the program and its instructions, and no array is made.
    To run, describe the step with real devices.

    Args:
      count: how many.
      platform: ``"cpu"`` where the plan shall be that of simulated devices on CPU; they stand for accelerators otherwise, on which
        a task computes more again in its backward pass, and keeps less for it.

    Returns:
      Devices with the ids 0 to ``count - 1``; those of two calls are the same.

    Raises:
      MeshError: `count` is not a positive number, or there is no such platform to tell apart; later, ``lower(...).compile()`` or a call of the step.

    Example:
      >>> import jax, jax.numpy as jnp, manymesh as mm
      >>> mesh = jax.make_mesh((2, 64), ("stage", "data"), devices=mm.planned_devices(128))
      >>> front, back = (mm.task(jnp.sin, name, mesh=m) for name, m in zip("ab", mm.submeshes(mesh, "stage")))
      >>> mm.jit(lambda x: back(front(x))).lower(jax.ShapeDtypeStruct((1024, 8), "float32")).program.edges[0].nbytes
      32768
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise MeshError(f"planned_devices: count has to be a positive int, found {count!r}")
    if platform not in (None, "cpu"):
        raise MeshError(
            f"planned_devices: platform has to be 'cpu', or None for accelerators of any kind, found {platform!r}; of which "
            "kind they are says the hardware of a report: report(mm.inspect.Hardware.h100())"
        )
    return [PlannedDevice(i) if platform is None else PlannedDevice(i, platform) for i in range(count)]


def require_devices(name: str, meshes: Iterable[Mesh]) -> None:
    """Refuses to go on where a submesh is only planned.

    Args:
      name: name of the step, for the message.
      meshes: its submeshes.

    Raises:
      MeshError: one of them holds a planned device.
    """
    for i, mesh in enumerate(meshes):
        planned = [d for d in mesh.devices.flat if isinstance(d, PlannedDevice)]
        if planned:
            raise MeshError(
                f"mm.jit({name}): submesh {i} {dict(mesh.shape)} has planned devices "
                f"{_ranges([d.id for d in planned])}, which only stand for real ones: the step can be lowered, but not "
                "compiled or run; describe it with devices of jax.devices() for that"
            )


def auto_mesh(mesh: Mesh) -> Mesh:
    """The same devices and axis names with every axis of type Auto.

    Tasks run under Auto axes whatever the user's mesh says: XLA propagates shardings inside a
    task, and programs are traced on values that carry none.
    """
    if all(t == AxisType.Auto for t in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


@_compat.boundary
def submeshes(mesh: Mesh, axis: str) -> tuple[Mesh, ...]:
    """Cuts a mesh along one axis.

    Args:
      mesh: a mesh of devices; its axis types do not matter.
      axis: name of the axis to cut along.

    Returns:
      One mesh for each position along ``axis``, in order, with that axis removed and all axes Auto.
      A mesh of that one axis alone gives meshes of one device, whose one axis keeps the name.

    Raises:
      MeshError: the mesh has no such axis.
      ArgumentError: it is no mesh of devices.

    Example:
      >>> import jax, manymesh as mm
      >>> mesh = jax.make_mesh((2, 2, 2), ("stage", "data", "model"))
      >>> first, second = mm.submeshes(mesh, "stage")
      >>> dict(first.shape)
      {'data': 2, 'model': 2}
    """
    if isinstance(axis, Mesh) or not isinstance(mesh, Mesh):
        kind = "an abstract mesh, which has no devices" if isinstance(mesh, AbstractMesh) else type(mesh).__name__
        hint = "the arguments are the other way round" if isinstance(axis, Mesh) else "make one with jax.make_mesh"
        raise ArgumentError(
            f"submeshes: expected a jax.sharding.Mesh of devices and the name of its axis, found {kind} and "
            f"{axis if isinstance(axis, str) else type(axis).__name__!r}; {hint}"
        )
    if axis not in mesh.axis_names:
        raise MeshError(
            f"submeshes: the mesh has axes {tuple(mesh.axis_names)}, none is called {axis!r}; name the one whose positions are "
            "to be the submeshes, or make the mesh with such an axis"
        )
    i = mesh.axis_names.index(axis)
    names = tuple(n for n in mesh.axis_names if n != axis)
    parts = [np.take(mesh.devices, k, axis=i) for k in range(mesh.devices.shape[i])]
    if not names:
        parts, names = [np.asarray(p).reshape(1) for p in parts], (axis,)
    return tuple(Mesh(p, names, axis_types=(AxisType.Auto,) * len(names)) for p in parts)


def resolve_devices(devices: Any) -> np.ndarray[Any, Any]:
    """An array of jax devices from devices or their positions in ``jax.devices()``; the array's shape is kept.

    Positions and ids are the same in one process; over several, ids may have gaps, and differ between platforms.

    Raises:
      MeshError: a position where no device is, a device named twice, or no device at all.
    """
    given = np.asarray(devices, dtype=object)
    if given.size == 0:
        raise MeshError("devices is empty; name at least one jax device or its position")
    known = jax.devices()
    out = np.empty(given.shape, dtype=object)
    for index, d in np.ndenumerate(given):
        if isinstance(d, (int, np.integer)) and not isinstance(d, bool):
            if not 0 <= int(d) < len(known):
                there = _ranges(range(len(known))) if len(known) > 1 else "only device 0"
                raise MeshError(f"devices: there is no device {int(d)}; jax.devices() has {there}; {_more(int(d))}")
            d = known[int(d)]
        elif isinstance(d, (list, tuple)):
            raise MeshError(f"devices: rows of different lengths make no mesh; found {devices!r}")
        elif not isinstance(d, (jax.Device, PlannedDevice)):
            raise MeshError(f"devices: expected jax devices or their positions, found {type(d).__name__} {d!r}")
        out[index] = d
    twice = sorted({d.id for d, times in Counter(out.flat).items() if times > 1})
    if twice:
        raise MeshError(f"devices: device ids {twice} are named more than once")
    return out


def _more(position: int) -> str:
    """What to do where there is no device at a position."""
    if position < 0:
        return "positions count from 0"
    plan = f"mm.planned_devices({position + 1}) plans for devices that are not here"
    if jax.default_backend() != "cpu":
        return plan
    flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={position + 1}"
    return f"start Python with {flag} to simulate more, and {plan}"


def _ranges(ids: Sequence[int]) -> str:
    if not ids:
        return "none"
    if len(ids) == 1:
        return str(ids[0])
    if list(ids) == list(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]} to {ids[-1]}"
    return ", ".join(map(str, ids))
