"""Arrays in the memory of the host: what lies there between steps, and is on its devices while a step uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from .. import _compat
from .._layout._layout import HOST as HOST

DEVICE = "device"


def host_kind(sharding: Any) -> str | None:
    """The kind of memory that a sharding names, if that is one of the host."""
    kind = getattr(sharding, "memory_kind", None)
    return kind if kind == HOST else None


def is_in_host_memory(x: Any) -> bool:
    """Whether a leaf is an array in the memory of the host. The host's own values, as of NumPy, are not meant."""
    return isinstance(x, jax.Array) and host_kind(x.sharding) is not None


def place_of(device: Any, sharding: Any) -> Any:
    """Where the piece of a device goes, of an array with a sharding: to the device, or to its part of the host's memory."""
    kind = host_kind(sharding)
    return device if kind is None else SingleDeviceSharding(device, memory_kind=kind)


def into(x: jax.Array, kind: str) -> jax.Array:
    """The array in another memory of its devices: asynchronously; each process moves what is its own."""
    sharding = x.sharding.with_memory_kind(kind)
    if x.is_fully_addressable:
        moved: jax.Array = jax.device_put(x, sharding)
        return moved
    pieces = [
        jax.device_put(p, SingleDeviceSharding(next(iter(p.devices())), memory_kind=kind)) for p in _compat.pieces(x)
    ]
    return _compat.assemble(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type), pieces)


def lying(shardings: Sequence[Any], kinds: Mapping[int, str]) -> list[Any]:
    """Shardings, those in ``kinds`` in that memory; None stays None."""
    return [s.with_memory_kind(kinds[k]) if s is not None and k in kinds else s for k, s in enumerate(shardings)]


def in_memories(leaves: Sequence[Any], kinds: Mapping[int, str]) -> list[Any]:
    """Shapes and dtypes with shardings, those in ``kinds`` in that memory."""
    return [
        x if k not in kinds or x.sharding is None else x.update(sharding=x.sharding.with_memory_kind(kinds[k]))
        for k, x in enumerate(leaves)
    ]
