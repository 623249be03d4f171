"""What a leaf of ``like`` asks for: which parts of an array, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .. import _compat
from .._runtime._exchange import assembled
from .._runtime._memories import place_of
from ._leaves import NUMBERS, Leaf, is_key
from ._store import Box


@dataclass(frozen=True)
class Target:
    """One leaf that is to be restored.

    Attributes:
      shape: of the whole array.
      dtype: as the user knows it, of random keys too.
      sharding: where it goes; None for the host, or for where JAX puts it.
      weak_type: whether the dtype is that of a Python number.
      host: `numpy.ndarray`, the class of a number, or None for an array of JAX.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None
    weak_type: bool
    host: type | None

    @classmethod
    def of(cls, leaf: Leaf) -> Target:
        """What a leaf of ``like`` asks for."""
        value = leaf.value
        if isinstance(value, NUMBERS):
            return cls((), np.asarray(value).dtype, None, False, type(value))
        if isinstance(value, np.generic):
            return cls((), value.dtype, None, False, np.generic)
        weak = bool(getattr(value, "weak_type", False))
        if isinstance(value, jax.Array):
            placed = value.committed or len(value.sharding.device_set) > 1
            return cls(value.shape, value.dtype, value.sharding if placed else None, weak, None)
        sharding = value.sharding if isinstance(value, jax.ShapeDtypeStruct) else None
        host = None if sharding is not None or is_key(value) else np.ndarray
        return cls(value.shape, value.dtype, sharding, weak, host)

    def has_devices(self) -> bool:
        """Whether it says where it goes, if it has a sharding: one of an abstract mesh names axes alone."""
        return not isinstance(getattr(self.sharding, "mesh", None), AbstractMesh)

    def is_divided(self) -> bool:
        """Whether its sharding cuts it into equal parts, as JAX wants them."""
        try:
            if self.sharding is not None:
                self.sharding.shard_shape(self.shape)
        except ValueError:
            return False
        return True

    def spec(self) -> str:
        """How it is sharded: ``PartitionSpec('model',) over a mesh of model=4``."""
        if not isinstance(self.sharding, NamedSharding):
            return str(self.sharding)
        sizes = ", ".join(f"{name}={size}" for name, size in self.sharding.mesh.shape.items())
        return f"{self.sharding.spec} over a mesh of {sizes}"

    def boxes(self, inner: Sequence[int]) -> dict[Any, Box]:
        """The parts that this process needs: each once, by what identifies it.

        Args:
          inner: dimensions that the stored array has behind those of the shape, as those of random keys.
        """
        whole = tuple(slice(0, n) for n in inner)
        if self.sharding is None:
            return {None: (*(slice(0, n) for n in self.shape), *whole)}
        indices = self._indices(self.sharding)
        return {_numbers(index, self.shape): (*_slices(index, self.shape), *whole) for index in indices.values()}

    def make(self, parts: Mapping[Any, np.ndarray[Any, Any]], random: str | None) -> Any:
        """The leaf.

        Args:
          parts: for each of the boxes, what is there.
          random: implementation of the random keys that it consists of.
        """
        with _compat.wide_dtypes([self.dtype]):
            return self._make(parts, random)

    def _make(self, parts: Mapping[Any, np.ndarray[Any, Any]], random: str | None) -> Any:
        if self.sharding is None:
            return self._on_host(parts[None], random)
        indices = self._indices(self.sharding)
        devices = [d for d in _compat.device_order(self.sharding) if d in indices]
        pieces = jax.device_put(
            [parts[_numbers(indices[d], self.shape)] for d in devices], [place_of(d, self.sharding) for d in devices]
        )
        aval = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding, weak_type=self.weak_type)
        return assembled(aval, pieces)

    def _indices(self, sharding: Sharding) -> dict[Any, tuple[slice, ...]]:
        """What each device of this process gets."""
        found = sharding.addressable_devices_indices_map(self.shape)
        return {device: index or () for device, index in found.items()}

    def _on_host(self, array: np.ndarray[Any, Any], random: str | None) -> Any:
        if random is not None:
            return jax.random.wrap_key_data(jnp.asarray(array), impl=random)
        if self.host is None:
            placed = jnp.asarray(array)
            return _compat.with_weak_type(placed, True) if self.weak_type else placed
        if self.host is np.ndarray:
            return array
        return array[()] if self.host is np.generic else self.host(array[()])


def _slices(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def _numbers(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """An index that can be compared: a slice has no hash."""
    return tuple((s.start, s.stop) for s in _slices(index, shape))
