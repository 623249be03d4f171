"""A stacked value outside the program: one array on the mesh of all its submeshes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Stacked:
    """An argument or result that lies in equal blocks on several submeshes.

    Attributes:
      first: position of its first block among the program's inputs, constants not counted, or among its results.
      submeshes: where the blocks are, in their order.
      dim: the dimension along which the value is cut.
    """

    first: int
    submeshes: tuple[Mesh, ...]
    dim: int

    @property
    def positions(self) -> range:
        """The positions of all blocks."""
        return range(self.first, self.first + len(self.submeshes))


def positions(count: int, stacked: Sequence[Stacked]) -> list[range]:
    """For each of ``count`` arguments or results, the positions of its blocks, or its one position."""
    starts = {s.first: s for s in stacked}
    found: list[range] = []
    at = 0
    for _ in range(count):
        found.append(starts[at].positions if at in starts else range(at, at + 1))
        at = found[-1].stop
    return found


@dataclass(frozen=True)
class Joint:
    """The mesh of all the submeshes of a stacked value.

    Attributes:
      mesh: the mesh.
      axes: the axes of it that count the submeshes.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    def sharding(self, spec: PartitionSpec, dim: int) -> NamedSharding:
        """The sharding of a value whose blocks along ``dim`` have a spec each on its submesh."""
        sizes = self.mesh.shape
        inner = [tuple(a for a in _axes(entry) if a in sizes) for entry in spec]
        inner += [()] * (dim + 1 - len(inner))
        inner[dim] = (*self.axes, *inner[dim])
        entries = [e if len(e) > 1 else e[0] if e else None for e in inner]
        while entries and entries[-1] is None:
            entries.pop()
        return NamedSharding(self.mesh, PartitionSpec(*entries))


@functools.lru_cache(maxsize=256)
def joint(submeshes: tuple[Mesh, ...]) -> Joint:
    """The mesh of several submeshes that are alike, with one more axis for them."""
    axes = submeshes[0].axis_names
    names = ["stage", *(f"stage_{i}" for i in range(len(axes)))]
    name = next(n for n in names if n not in axes)
    devices = np.stack([m.devices for m in submeshes])
    return Joint(Mesh(devices, (name, *axes), axis_types=(AxisType.Auto,) * devices.ndim), (name,))


def spec_of_blocks(
    sharding: NamedSharding, shape: Sequence[int], submeshes: tuple[Mesh, ...], dim: int
) -> tuple[PartitionSpec, Joint] | None:
    """How the blocks of an array lie, if each device has just what it has to have of its block.

    Args:
      sharding: the sharding of the whole array.
      shape: its shape.
      submeshes, dim: where its blocks belong, and along which dimension it is cut.

    Returns:
      The spec that each block has on its submesh, and the array's mesh with its axes that count the submeshes.
      None where the array lies otherwise.
    """
    mesh, spec = sharding.mesh, list(sharding.spec)
    if not isinstance(mesh, Mesh) or len(spec) <= dim:
        return None
    own = _axes(spec[dim])
    count = next((n for n in range(1, len(own) + 1) if math.prod(mesh.shape[a] for a in own[:n]) == len(submeshes)), 0)
    if not count:
        return None
    outer, rest = own[:count], own[count:]
    inner = submeshes[0]
    if any(a not in (*outer, *inner.axis_names) and n > 1 for a, n in mesh.shape.items()):
        return None
    if any(inner.shape[a] > 1 and a not in mesh.axis_names for a in inner.axis_names):
        return None
    spec[dim] = rest
    of_block = PartitionSpec(*(tuple(a for a in _axes(entry) if a in inner.axis_names) or None for entry in spec))
    expected = joint(submeshes).sharding(of_block, dim)
    if expected.device_set != sharding.device_set:
        return None
    if expected.devices_indices_map(tuple(shape)) != sharding.devices_indices_map(tuple(shape)):
        return None
    return of_block, Joint(mesh, outer)


def _axes(entry: object) -> tuple[str, ...]:
    if isinstance(entry, tuple):
        return entry
    return (entry,) if isinstance(entry, str) else ()
