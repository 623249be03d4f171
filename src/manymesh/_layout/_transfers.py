"""How a value gets from one sharding to another. Pure.

A copy between device sets is asynchronous only if every shard the target wants exists among the
source's shards; otherwise JAX goes through the host and waits. So layouts change only inside a device
set, by a compiled identity, and copies happen only between equal layouts.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat


@dataclass(frozen=True)
class Step:
    """One step of a transfer: ``copy`` between device sets, or ``relayout`` within one by a compiled identity."""

    kind: Literal["copy", "relayout"]
    sharding: NamedSharding


@functools.lru_cache(maxsize=65536)
def plan_transfer(shape: tuple[int, ...], source: Sharding, target: NamedSharding) -> tuple[Step, ...]:
    """Steps that bring a value of ``shape`` from one sharding to another.

    Args:
      shape: shape of the value.
      source: sharding it has.
      target: sharding it shall have.
    """
    if source == target or source.is_equivalent_to(target, len(shape)):
        return ()
    if source.memory_kind != target.memory_kind:  # there is one step into the memory of its devices, or out of it
        there: Any = source.with_memory_kind(target.memory_kind or "device")
        return (Step("copy", there), *plan_transfer(shape, there, target))
    if source.device_set == target.device_set:
        return (Step("relayout", target),) if _same_order(source, target) else (Step("copy", target),)
    if shards_exist(shape, source, target):
        return (Step("copy", target),)
    if not isinstance(source, NamedSharding):
        return (Step("copy", target),)
    # The layout changes before the copy, after it, or goes through a whole copy on each device; whichever sends least.
    before = NamedSharding(source.mesh, adapt_spec(target.spec, shape, source.mesh))
    after = NamedSharding(target.mesh, adapt_spec(source.spec, shape, target.mesh))
    whole, gathered = NamedSharding(target.mesh, PartitionSpec()), NamedSharding(source.mesh, PartitionSpec())
    ways = [(before, target), (source, after), (before, whole), (source, whole), (gathered, whole)]
    possible = [way for way in ways if shards_exist(shape, *way)]
    given, sent = min(possible, key=lambda way: _sent(shape, way[1]))
    steps = [Step("relayout", given)] if not given.is_equivalent_to(source, len(shape)) else []
    steps.append(Step("copy", sent))
    if not sent.is_equivalent_to(target, len(shape)):
        steps.append(Step("relayout", target))
    return tuple(steps)


def _sent(shape: tuple[int, ...], target: NamedSharding) -> int:
    """How many elements arrive, over all devices."""
    return math.prod(target.shard_shape(shape)) * target.mesh.size


def _same_order(a: Sharding, b: Sharding) -> bool:
    return _compat.device_order(a) == _compat.device_order(b)


def shards_exist(shape: tuple[int, ...], source: Sharding, target: Sharding) -> bool:
    """Whether every shard that ``target`` wants is a shard that ``source`` has."""

    def pieces(sharding: Sharding) -> set[tuple[tuple[int, int], ...]]:
        return {
            tuple((s.indices(n)[0], s.indices(n)[1]) for s, n in zip(index, shape, strict=True))
            for index in sharding.devices_indices_map(shape).values()
        }

    return pieces(target) <= pieces(source)


def adapt_spec(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The spec as far as it makes sense on another mesh: axes it has, dimensions that divide."""
    out: list[Any] = []
    for dim, entry in enumerate(spec):
        axes = entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
        axes = tuple(a for a in axes if a in mesh.axis_names)
        count = 1
        for a in axes:
            count *= mesh.shape[a]
        out.append((axes if len(axes) > 1 else axes[0]) if axes and shape[dim] % count == 0 else None)
    while out and out[-1] is None:
        out.pop()
    return PartitionSpec(*out)
