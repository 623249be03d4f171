"""Numbers, meshes and devices in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jax.sharding import Mesh

from .._table import format_ids
from .._task import mesh_devices


def format_seconds(seconds: float, unit: str = "s") -> str:
    """``850 us``, ``12.3 ms``, ``1.50 s``; plain numbers where the unit is none."""
    if not unit:
        return f"{seconds:.4g}"
    if abs(seconds) < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{_three(seconds * 1e3)} ms" if abs(seconds) < 0.9995 else f"{_three(seconds)} s"


def _three(value: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def describe_mesh(mesh: Mesh) -> str:
    """``data 2 x model 2, devices 0-3``."""
    large = {name: size for name, size in mesh.shape.items() if size > 1 and not name.startswith("unnamed")}
    axes = " x ".join(f"{name} {size}" for name, size in large.items())
    ids = tuple(d.id for d in mesh_devices(mesh))
    devices = f"device{'s' * (len(ids) != 1)} {format_ids(ids)}"
    return f"{axes}, {devices}" if axes else devices


def with_elsewhere(submeshes: Sequence[str], elsewhere: Collection[int]) -> tuple[str, ...]:
    """Submeshes in words, where those of other processes are said to be so."""
    return tuple(f"in another process, {words}" if i in elsewhere else words for i, words in enumerate(submeshes))
