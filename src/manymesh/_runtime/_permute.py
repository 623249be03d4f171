"""Arrays between processes, by collective permutes: a small program on the device that gives and the one that takes.

It needs nothing but collectives, which every backend has. In return both ends meet: the device that gives goes on when the
other has come to the same permute. They are launched in the order of the plan, in which two processes see what they do
together alike, because permutes that are launched in another order at the other end mix up values without a word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _compat
from .._distributed._world import World
from ._carrier import Carrier, Carry, Give, Piece
from ._launches import Launches

_AXIS = "end"
_PATIENCE = 7 * 24 * 3600.0  # seconds; see `Permutes._meet`
_SPEC = PartitionSpec(_AXIS)
Form = tuple[tuple[int, ...], Any]  # shape and dtype


class Permutes:
    """Carries pieces by a program of ``jax.lax.ppermute`` for each pair of devices; see `Carrier`."""

    in_order, whole = False, False

    def __init__(self, world: World) -> None:
        self.world = world
        self._launches: Launches | None = None
        self._programs: dict[Any, Any] = {}
        self._met: set[str] = set()

    def begin(self, call: int) -> None:
        """See `Carrier`. Nothing: calls follow each other."""

    def beside(self, launches: Launches) -> Carrier:
        """See `Carrier`."""
        other = copy.copy(self)  # with the same programs and acquaintances
        other._launches = launches
        return other

    def bind(self, number: int, pieces: Sequence[Piece]) -> Carry:
        """See `Carrier`. Each pair of devices is made acquainted here, while nobody is in the midst of a step."""
        me = self.world.process
        ways: dict[Any, list[int]] = {}
        for k, p in enumerate(pieces):
            if me in (p.source, p.target):
                ways.setdefault((p.leaving, p.arriving), []).append(k)
        launches = [(places, self._launch([pieces[k] for k in places])) for places in ways.values()]
        here = [k for k, p in enumerate(pieces) if p.target == me]

        def carry(give: Give) -> list[jax.Array]:
            moved: dict[int, jax.Array] = {}
            for places, launch in launches:
                moved.update(zip(places, launch(give), strict=False))  # nothing arrives where it leaves
            return [moved[k] for k in here]

        return carry

    def _launch(self, pieces: Sequence[Piece]) -> Callable[[Give], Sequence[jax.Array]]:
        """What carries all pieces from one device to another: this process has one of the two."""
        mesh = Mesh(np.array([*pieces[0].leaving.device_set, *pieces[0].arriving.device_set]), (_AXIS,))
        forms: list[Form] = [(p.shape, _carried_as(p.dtype)) for p in pieces]
        call, nothing = self._program(mesh, tuple(forms))
        avals = _avals(mesh, forms)
        gives = pieces[0].source == self.world.process
        if self._launches is not None:
            call = self._launches.counted(call, None, lambda results: results[0], mesh)

        def launch(give: Give) -> Sequence[jax.Array]:
            own = [_packed(give(p), form) for p, form in zip(pieces, forms, strict=True)] if gives else nothing
            results = call(*(_compat.assemble(aval, [x]) for aval, x in zip(avals, own, strict=True)))
            if self._launches is None:  # nobody else sees to it that this ends before another collective begins
                jax.block_until_ready(results)
            if gives:
                return ()
            return [_unpacked(_compat.pieces(x)[0], p) for x, p in zip(results, pieces, strict=True)]

        return launch

    def _program(self, mesh: Mesh, forms: tuple[Form, ...]) -> tuple[Callable[..., Any], list[jax.Array]]:
        """The program for values of such forms, and what the device that takes puts in."""
        key = mesh, forms
        if key not in self._programs:
            avals = _avals(mesh, forms)
            permuted = jax.shard_map(_permuted, mesh=mesh, in_specs=_SPEC, out_specs=_SPEC)
            with _compat.without_mesh():
                call = jax.jit(permuted).lower(*avals).compile()
            (own,) = (d for d in mesh.devices.flat if d.process_index == self.world.process)
            nothing = [jax.device_put(np.zeros(shape or (1,), dtype), own) for shape, dtype in forms]
            self._meet(mesh)
            jax.block_until_ready(call(*(_compat.assemble(a, [x]) for a, x in zip(avals, nothing, strict=True))))
            self._programs[key] = call, nothing
        return self._programs[key]  # type: ignore[no-any-return]  # what was put in

    def _meet(self, mesh: Mesh) -> None:
        """Waits for the process of the other device: JAX gives the first collective of two devices on CPU half a minute.

        Whoever dies meanwhile, or falls silent, is noticed by the watch.
        """
        name = "-".join(str(d.id) for d in mesh.devices.flat)
        if name not in self._met:
            for d in mesh.devices.flat:
                if d.process_index == self.world.process:
                    self.world.write(f"ppermute/{name}/{d.process_index}", "")
            for d in mesh.devices.flat:
                self.world.read(f"ppermute/{name}/{d.process_index}", _PATIENCE)
            self._met.add(name)


def _permuted(*values: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jax.lax.ppermute(x, _AXIS, [(0, 1)]) for x in values)


def _avals(mesh: Mesh, forms: Sequence[Form]) -> list[jax.ShapeDtypeStruct]:
    """Arrays of which each end has one half, along the first dimension: the value there, and what comes out here."""
    sharding = NamedSharding(mesh, _SPEC)
    shapes = [shape or (1,) for shape, _ in forms]
    return [
        jax.ShapeDtypeStruct((2 * n, *rest), dtype, sharding=sharding)
        for (n, *rest), (_, dtype) in zip(shapes, forms, strict=True)
    ]


def _carried_as(dtype: Any) -> Any:
    """The dtype that a value crosses as: XLA packs those of less than a byte in arguments of programs, and arrays do not."""
    if dtype == np.bool_ or jax.dtypes.itemsize_bits(dtype) >= 8:
        return dtype
    return np.dtype(np.float32 if jnp.issubdtype(dtype, jnp.floating) else np.int8)


def _packed(x: jax.Array, form: Form) -> jax.Array:
    if x.dtype != form[1]:
        x = x.astype(form[1])
    return x if x.ndim else jnp.reshape(x, (1,))


def _unpacked(x: jax.Array, piece: Piece) -> jax.Array:
    if piece.shape == ():
        x = jnp.reshape(x, ())
    return x if x.dtype == piece.dtype else x.astype(piece.dtype)
