"""Meshes: taking submeshes out of one, and bringing any mesh into the form tasks use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ._errors import MeshError


def auto_mesh(mesh: Mesh) -> Mesh:
    """The same devices and axis names with every axis of type Auto.

    Tasks run under Auto axes whatever the user's mesh says: XLA propagates shardings inside a
    task, and programs are traced on values that carry none.
    """
    if all(t == AxisType.Auto for t in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


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

    Example:
      >>> import jax, manymesh as mm
      >>> mesh = jax.make_mesh((2, 2, 2), ("stage", "data", "model"))
      >>> first, second = mm.submeshes(mesh, "stage")
      >>> dict(first.shape)
      {'data': 2, 'model': 2}
    """
    if axis not in mesh.axis_names:
        raise MeshError(f"submeshes: the mesh has axes {tuple(mesh.axis_names)}, none is called {axis!r}")
    i = mesh.axis_names.index(axis)
    names = tuple(n for n in mesh.axis_names if n != axis)
    parts = [np.take(mesh.devices, k, axis=i) for k in range(mesh.devices.shape[i])]
    if not names:
        parts, names = [np.asarray(p).reshape(1) for p in parts], (axis,)
    return tuple(Mesh(p, names, axis_types=(AxisType.Auto,) * len(names)) for p in parts)


def resolve_devices(devices: Any) -> np.ndarray[Any, Any]:
    """An array of jax devices from devices or their integer ids; the array's shape is kept.

    Raises:
      MeshError: an id that no device has, a device named twice, or no device at all.
    """
    given = np.asarray(devices, dtype=object)
    if given.size == 0:
        raise MeshError("devices is empty; name at least one jax device or its integer id")
    by_id = {d.id: d for d in jax.devices()}
    out = np.empty(given.shape, dtype=object)
    for index, d in np.ndenumerate(given):
        if isinstance(d, (int, np.integer)) and not isinstance(d, bool):
            if int(d) not in by_id:
                ids = sorted(by_id)
                raise MeshError(f"devices: there is no device with id {int(d)}; this process sees ids {_ranges(ids)}")
            d = by_id[int(d)]
        elif not isinstance(d, jax.Device):
            raise MeshError(f"devices: expected jax devices or their integer ids, found {type(d).__name__} {d!r}")
        out[index] = d
    ids = [d.id for d in out.flat]
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise MeshError(f"devices: device ids {twice} are named more than once")
    return out


def _ranges(ids: Sequence[int]) -> str:
    if not ids:
        return "none"
    if list(ids) == list(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]} to {ids[-1]}"
    return ", ".join(map(str, ids))
