"""Where arguments are, and where the caller wants arguments and results."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._errors import ArgumentError
from .._program import Program
from .._task import mesh_devices
from .._topology import auto_mesh


def mesh_of(x: Any) -> Mesh | None:
    """The mesh that an argument was put on, if it was put anywhere."""
    sharding = getattr(x, "sharding", None)
    if sharding is None or not getattr(x, "committed", True):
        return None
    if isinstance(sharding, NamedSharding):
        return auto_mesh(sharding.mesh) if isinstance(sharding.mesh, Mesh) else None
    devices = sorted(sharding.device_set, key=lambda d: d.id)
    return Mesh(np.array(devices), ("device",))


def committed(x: Any) -> NamedSharding | None:
    """The sharding over a mesh that an argument was given."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return sharding if getattr(x, "committed", True) else None


def arrival(x: Any, program: Program) -> NamedSharding | None:
    """The sharding an argument already has, if that is a layout on one of the submeshes."""
    sharding = committed(x)
    if sharding is None or not isinstance(sharding.mesh, Mesh):
        return None
    devices = mesh_devices(sharding.mesh)
    return sharding if any(mesh_devices(m) == devices for m in program.submeshes) else None


def expand(label: str, prefix: Any, tree: Any) -> dict[int, Any]:
    """position of a leaf -> its sharding, from a pytree prefix."""
    is_leaf = lambda s: s is None or isinstance(s, jax.sharding.Sharding)  # noqa: E731
    try:
        expanded = jax.tree.map(lambda s, part: [s] * len(jax.tree.leaves(part)), prefix, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise ArgumentError(
            f"{label}: its structure is no prefix of the {'result' if label.startswith('out') else 'arguments'}: {error}"
        ) from None
    flat = jax.tree.leaves(expanded, is_leaf=is_leaf)
    for s in flat:
        if s is not None and not isinstance(s, NamedSharding):
            hint = "; say on which submesh: NamedSharding(submesh, spec)" if isinstance(s, PartitionSpec) else ""
            raise ArgumentError(f"{label}: expected NamedSharding on a submesh or None, found {s!r}{hint}")
    return {i: s for i, s in enumerate(flat) if s is not None}
