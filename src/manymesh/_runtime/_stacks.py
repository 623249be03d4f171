"""Stacked arguments are taken apart into blocks, and results put together, without a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import Sharding

from .. import _compat
from .._layout._stacked import StackedValue
from ._exchange import assembler
from ._execute import Executor, Kept
from ._observe import Observer

T = TypeVar("T")


class Stacks:
    """The stacked arguments and results of a program.

    Args:
      inputs, outputs: what is stacked.
      executor: gives arrays and host values other shardings.
    """

    def __init__(self, inputs: Sequence[StackedValue], outputs: Sequence[StackedValue], executor: Executor) -> None:
        self._executor = executor
        self._inputs = {x.positions.start: _Input(x) for x in inputs}
        self._outputs = {x.positions.start: _Output(x) for x in outputs}

    def prepare(self, position: int, sharding: Sharding) -> None:
        """Compiles what the argument whose first block is at a position needs, if it comes with a sharding."""
        value = self._inputs[position].value
        if not _alike(sharding, value):
            self._executor.prepare(value.aval, sharding, value.sharding)

    def cut(self, leaves: list[Any], observer: Observer | None = None) -> list[Any]:
        """The arguments of a call as the program takes them."""
        if not self._inputs:
            return leaves
        flat: list[Any] = []
        for x in leaves:
            place = self._inputs.get(len(flat))
            if place is None:
                flat.append(x)
            else:
                flat += place.cut(x, self._executor, observer)
        return flat

    def join(self, results: list[Any]) -> list[Any]:
        """The results of a call as the caller wants them."""
        if not self._outputs:
            return results
        leaves: list[Any] = []
        at = 0
        while at < len(results):
            place = self._outputs.get(at)
            if place is None:
                leaves.append(results[at])
                at += 1
            else:
                after = place.value.positions.stop
                leaves.append(place.join(results[at:after]))
                at = after
        return leaves

    def of_arguments(self, flat: Sequence[T], whole: Callable[[StackedValue], T]) -> list[T]:
        """One item for each argument, of a list with one for each input."""
        return collapsed(flat, [x.value for x in self._inputs.values()], whole)

    def of_results(self, flat: Sequence[T], whole: Callable[[StackedValue], T]) -> list[T]:
        """One item for each result, of a list with one for each of the program's results."""
        return collapsed(flat, [x.value for x in self._outputs.values()], whole)


def collapsed(flat: Sequence[T], stacked: Sequence[StackedValue], whole: Callable[[StackedValue], T]) -> list[T]:
    """One item for each array outside the program, of a list with one for each block inside."""
    first = {x.positions.start: x for x in stacked}
    within = {k for x in stacked for k in x.positions}
    return [whole(first[k]) if k in first else item for k, item in enumerate(flat) if k in first or k not in within]


@dataclass(eq=False)
class _Input:
    """A stacked argument, with the sharding it had last and where the pieces of each block are among its shards."""

    value: StackedValue

    def __post_init__(self) -> None:
        self.blocks = [assembler(block) for block in self.value.blocks]
        # One object: between two, another thread may call the step with another sharding.
        self.accepted: tuple[Sharding, list[list[int]]] = self._found(self.value.sharding)

    def _found(self, sharding: Sharding) -> tuple[Sharding, list[list[int]]]:
        return sharding, _places(self.value, sharding)

    def cut(self, x: Any, executor: Executor, observer: Observer | None) -> list[Any]:
        if isinstance(x, Kept):
            x = x.at(self.value.sharding, executor.bring)
        sharding = getattr(x, "sharding", None)
        accepted, where = self.accepted
        if sharding is not accepted:
            if not (isinstance(x, jax.Array) and _alike(sharding, self.value)):
                if observer is not None:
                    observer.moves_argument(self.value.positions.start, x, self.value.sharding)
                x = executor.bring(x, self.value.sharding)
            _, where = self.accepted = self._found(x.sharding)
        pieces = _compat.pieces(_compat.key_words(x))
        return [assemble([pieces[k] for k in places]) for assemble, places in zip(self.blocks, where, strict=True)]


@dataclass(eq=False)
class _Output:
    """A stacked result."""

    value: StackedValue

    def __post_init__(self) -> None:
        places = _places(self.value, self.value.sharding)
        order = [k for of_block in places for k in of_block]
        self.order = [order.index(k) for k in range(len(order))]
        self.whole = assembler(self.value.aval)

    def join(self, blocks: Sequence[Any]) -> jax.Array:
        words = [_compat.key_words(block) for block in blocks if block is not None]
        pieces = [piece for block in words for piece in _compat.pieces(block)]
        return self.whole([pieces[k] for k in self.order])


def _places(value: StackedValue, sharding: Sharding) -> list[list[int]]:
    """For each block, the positions of its pieces among the shards of the whole that are in this process."""
    position = {d: k for k, d in enumerate(_local_devices(sharding))}
    return [[position[d] for d in _local_devices(block.sharding)] for block in value.blocks]


def _local_devices(sharding: Any) -> list[Any]:
    me = jax.process_index()
    return [d for d in _compat.device_order(sharding) if d.process_index == me]


def _alike(sharding: Any, value: StackedValue) -> bool:
    """Whether every device has what it has to have in its own memory, whatever the axes are called."""
    if sharding == value.sharding:
        return True
    if sharding.device_set != value.sharding.device_set or sharding.memory_kind != value.sharding.memory_kind:
        return False
    shape = value.aval.shape
    return bool(sharding.devices_indices_map(shape) == value.sharding.devices_indices_map(shape))
