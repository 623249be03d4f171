"""Changes of layout inside a submesh: compiled identities, made before a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from .. import _compat
from .._layout._transfers import Step, plan_transfer
from ._compile import workers


class Relayouts:
    """Compiled identities, each from one sharding to another over the same devices.

    `prepare` compiles them ahead, side by side. What nobody could know before, as an argument that arrives in a layout
    of its own, is compiled when it is first met.
    """

    def __init__(self) -> None:
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def prepare(self, wanted: Iterable[tuple[jax.ShapeDtypeStruct, NamedSharding]]) -> None:
        """Compiles what brings values into other layouts.

        Args:
          wanted: for each, the value with the sharding it has, and the sharding it shall have.
        """
        lowered = {}
        with _compat.without_mesh():
            for aval, sharding in wanted:
                key = _key(aval, aval.sharding, sharding)
                if key not in self._compiled and key not in lowered:
                    lowered[key] = jax.jit(lambda a: a, out_shardings=sharding).lower(aval)
        if len(lowered) > 1:
            with ThreadPoolExecutor(workers(), "manymesh-relayout") as pool:
                compiled = list(pool.map(lambda x: x.compile(), lowered.values()))
        else:
            compiled = [x.compile() for x in lowered.values()]
        for key, executable in zip(lowered, compiled, strict=True):
            self._compiled[key] = _compat.call_of(executable, [executable.in_avals[0][0]])

    def prepare_steps(self, aval: jax.ShapeDtypeStruct, steps: Iterable[Step]) -> None:
        """Compiles what the steps of a transfer need, from a value with the sharding it has."""
        for step in steps:
            if step.kind == "relayout":
                self.prepare([(aval, step.sharding)])
            elif (
                aval.sharding.device_set == step.sharding.device_set
                and aval.sharding.memory_kind == step.sharding.memory_kind
            ):
                _warm_up(aval, step.sharding)
            aval = with_sharding(aval, step.sharding)

    def get(self, aval: Any, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
        """The identity that brings a value from the sharding it has to another; compiled now if it was not before.

        Args:
          aval: array, or shape and dtype with a sharding.
          sharding: the other one, over the same devices in the same order.
        """
        key = _key(aval, aval.sharding, sharding)
        if key not in self._compiled:
            self.prepare([(jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding), sharding)])
        return self._compiled[key]

    def follow(self, x: jax.Array, steps: Iterable[Step]) -> jax.Array:
        """Takes the steps of a transfer plan."""
        for step in steps:
            x = jax.device_put(x, step.sharding) if step.kind == "copy" else self.get(x, step.sharding)(x)
        return x

    def bring(self, x: Any, sharding: NamedSharding) -> jax.Array:
        """An array or host value with another sharding, asynchronously and without a host copy of device values."""
        if not isinstance(x, jax.Array) or x.sharding.is_equivalent_to(sharding, x.ndim):
            placed: jax.Array = jax.device_put(x, sharding)
            return placed
        return self.follow(x, plan_transfer(x.shape, x.sharding, sharding))


def lies_as(x: Any, wanted: NamedSharding) -> bool:
    """Whether an argument is an array with this sharding, in these words or with a None more at the end of its spec."""
    if not isinstance(x, jax.Array):
        return False
    given = x.sharding
    return given == wanted or (
        isinstance(given, NamedSharding) and given.mesh == wanted.mesh and given.is_equivalent_to(wanted, x.ndim)
    )


def with_sharding(aval: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """The same shape and dtype with another sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def _key(aval: Any, source: Sharding, target: Sharding) -> tuple[Any, ...]:
    return (aval.shape, aval.dtype, source, target)


def _warm_up(aval: jax.ShapeDtypeStruct, sharding: NamedSharding) -> None:
    """Copies once between two orders of the same devices, for which JAX compiles something that only it can reach."""
    if not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        jax.block_until_ready(jax.device_put(jax.device_put(np.zeros(aval.shape, aval.dtype), aval.sharding), sharding))
