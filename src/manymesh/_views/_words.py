"""Numbers, meshes and devices in words."""

from __future__ import annotations

from jax.sharding import Mesh

from .._table import format_ids
from .._task import mesh_devices


def format_seconds(seconds: float) -> str:
    """``850 us``, ``12.3 ms``, ``1.50 s``."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 1 else f"{seconds:.3g} s"


def describe_mesh(mesh: Mesh) -> str:
    """``data 2 x model 2, devices 0-3``."""
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if not name.startswith("unnamed"))
    ids = tuple(d.id for d in mesh_devices(mesh))
    devices = f"device{'s' * (len(ids) != 1)} {format_ids(ids)}"
    return f"{axes}, {devices}" if axes else devices
