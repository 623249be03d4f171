"""Checks that a spec fits a shape and a mesh, with messages that say what would fit."""

from __future__ import annotations

import math
from typing import Any

from jax.sharding import PartitionSpec

from .._errors import AxisError, MetadataError
from ._axes import AnyMesh
from ._constrain import check_axes
from ._rules import parts_of


def shard_count(entry: Any, mesh: AnyMesh) -> int:
    """Into how many pieces an entry of a spec cuts its dimension."""
    return math.prod(mesh.shape[part] for part in parts_of(entry))


def indivisible(shape: tuple[int, ...], axes: tuple[Any, ...], mesh: AnyMesh) -> tuple[int, ...]:
    """The dimensions that do not divide over their device axes."""
    return tuple(
        i
        for i, (size, entry) in enumerate(zip(shape, axes, strict=False))
        if isinstance(entry, (str, tuple)) and size % shard_count(entry, mesh)
    )


def indivisible_text(path: str, shape: tuple[int, ...], dimension: int, entry: Any, mesh: AnyMesh) -> str:
    """What is wrong with a dimension that does not divide, and what to do."""
    size, count, parts = shape[dimension], shard_count(entry, mesh), parts_of(entry)
    over = f"axis {parts[0]!r}" if len(parts) == 1 else f"axes {parts}"
    below, above = size // count * count, -(-size // count) * count
    sizes = f"{below} or {above}" if below else f"{above}"
    return (
        f"{path}: dimension {dimension} of shape {shape} does not divide over {over} ({count} devices); "
        f"use {sizes}, or map this dimension to None"
    )


def check_divides(path: str, shape: tuple[int, ...], spec: PartitionSpec | tuple[Any, ...], mesh: AnyMesh) -> None:
    """Checks that a value of a shape can be sharded by a spec on a mesh.

    Args:
      path: where the value is, which begins every message: ``params['front']['kernel']``.
      shape: shape of the whole value.
      spec: device axes for each leading dimension.
      mesh: the mesh, concrete or abstract.

    Raises:
      AxisError: an axis that the mesh does not have, an axis that stands twice, or a dimension whose size is no
        multiple of the number of devices along its axes.
      MetadataError: more entries than dimensions.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from manymesh import meta
      >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
      >>> meta.check_divides("params['w']", (512, 128), P("data", "model"), mesh)
      >>> meta.check_divides("params['w']", (512, 130), P(None, "model"), mesh)
      Traceback (most recent call last):
      manymesh.errors.AxisError: params['w']: dimension 1 of shape (512, 130) does not divide over axis 'model' \
(4 devices); use 128 or 132, or map this dimension to None
      see docs: errors#AxisError
    """
    axes = tuple(spec)
    check_axes(axes, mesh, path)
    if len(axes) > len(shape):
        raise MetadataError(too_many_text(path, axes, shape))
    for dimension in indivisible(shape, axes, mesh):
        raise AxisError(indivisible_text(path, shape, dimension, axes[dimension], mesh))


def too_many_text(path: str, names: tuple[Any, ...], shape: tuple[int, ...]) -> str:
    """What is wrong with more names than dimensions, and what to do."""
    return (
        f"{path}: {len(names)} names {names} for shape {shape}, which has {len(shape)} dimensions; "
        "give one name a dimension, or pass the whole state, parameters included, so that the names of a "
        "factored optimizer state can be found by its parameter"
    )
