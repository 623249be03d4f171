"""Arrays, their pieces on single devices, their dtypes and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import core, sharding_impls
from jax._src.array import ArrayImpl
from jax._src.interpreters import pxla
from jax.sharding import NamedSharding, PartitionSpec

ConcreteArray = ArrayImpl  # the class of every array that is there, but for typed random keys


def abstract(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and weak type of an abstract value, without sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def in_default_order(x: jax.Array) -> jax.Array:
    """The array, its elements in memory in the order that programs are compiled for: it, unless `Format` says another.

    Typed keys have no other.
    """
    layout = getattr(getattr(x, "format", None), "layout", None)
    if pxla.is_default_layout(layout, x.sharding, x.aval):
        return x
    found: jax.Array = jax.jit(_unchanged, out_shardings=x.sharding)(x)
    return found


def _unchanged(x: jax.Array) -> jax.Array:  # by name: JAX compiles it once for each order
    return x


def arg_info(aval: Any, donated: bool) -> Any:
    """What ``jax.jit`` says of an argument: a `jax.stages.ArgInfo`."""
    return jax.stages.ArgInfo(aval, donated)


def as_named(sharding: Any, mesh: Any, ndim: int) -> NamedSharding:
    """The sharding of a compiled value of ``ndim`` dimensions in terms of a mesh.

    XLA answers with a raw tiling where JAX cannot name it; a tiling that the mesh's axes cannot
    express becomes replication, which the caller then asks XLA for.
    """
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return NamedSharding(mesh, sharding.spec)
    try:
        tiling = sharding._to_xla_hlo_sharding(ndim)
        return NamedSharding(mesh, sharding_impls.parse_flatten_op_sharding(tiling, mesh)[0])
    except Exception:  # the parser has no error type of its own
        return NamedSharding(mesh, PartitionSpec())


def pieces(x: Any) -> list[Any]:
    """The arrays of the single devices that an array consists of, in the order of its sharding's devices.

    They share its memory. `jax.Array.addressable_shards` gives them too, at five times the cost.
    """
    return list(x._arrays)


def assemble(aval: jax.ShapeDtypeStruct, arrays: Sequence[Any]) -> jax.Array:
    """The array that consists of arrays of single devices, in the order of its sharding's devices, without a copy."""
    assert aval.sharding is not None, "an array has a sharding"
    space = core.mem_kind_to_space(aval.sharding.memory_kind)
    plain = jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=bool(aval.weak_type), memory_space=space)
    return ArrayImpl(plain, aval.sharding, list(arrays), committed=True, _skip_checks=True)


def retyped(x: jax.Array, weak: bool) -> jax.Array:
    """The array, in the memory that it has, as one that is weakly typed or not."""
    return assemble(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=weak), pieces(x))


def device_order(sharding: Any) -> list[Any]:
    """The devices of a sharding in the order of its shards."""
    return list(sharding._device_assignment)


def on_devices(aval: Any) -> Any:
    """The abstract value in the memory of its devices."""
    return aval.update(memory_space=jax.memory.Space.Device)


def is_in_host_memory(aval: Any) -> bool:
    """Whether an abstract value lies in the memory of the host, as what a policy of `jax.checkpoint` offloads does."""
    return bool(getattr(aval, "memory_space", None) == jax.memory.Space.Host)


def key_words(x: Any) -> Any:
    """The plain array of words that a typed random key consists of, without a computation; other arrays as they are."""
    return getattr(x, "_base_array", x)


def key_kind(dtype: Any) -> Any:
    """How typed random keys of a dtype are made."""
    return dtype._impl.name


def key_shape(dtype: Any) -> tuple[int, ...]:
    """Dimensions of the words of which one typed random key of a dtype consists."""
    shape: tuple[int, ...] = dtype._impl.key_shape
    return shape


def as_device_dtype(x: Any) -> tuple[Any, bool]:
    """The dtype that a host value has as an array, and whether that is weak."""
    aval = jax.typeof(x)
    return aval.dtype, bool(aval.weak_type)
