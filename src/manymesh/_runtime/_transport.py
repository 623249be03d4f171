"""How values get from one submesh to another."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
from jax.sharding import NamedSharding

from .._plan._instructions import Tag


@dataclass(frozen=True)
class Batch:
    """Values that cross together: what a `Send` and its `Receive` say, with shardings.

    Attributes:
      tag: that of both, unique in a call.
      source: submesh they come from.
      target: submesh they go to.
      sent: shape, dtype and sharding of each value as it leaves.
      arriving: the same as it arrives. Every shard that is wanted there is one of those that leave.
      number: position of the `Send` in the plan.
      lent: for each value, whether the caller has its buffer too, and may donate or delete it while it is on its way.
    """

    tag: Tag
    source: int
    target: int
    sent: tuple[jax.ShapeDtypeStruct, ...]
    arriving: tuple[jax.ShapeDtypeStruct, ...]
    number: int
    lent: tuple[bool, ...]

    @property
    def shardings(self) -> list[NamedSharding]:
        """The shardings with which the values arrive."""
        return [x.sharding for x in self.arriving]


class Transport(Protocol):
    """Moves batches of arrays. A step asks for its calls once, when it is bound, and uses them in every call.

    None of the calls may wait for a value to be computed. Layouts do not change on the way: where they have to, the
    executor has them changed before or after, inside a submesh.
    """

    def move(self, batch: Batch) -> Callable[..., Sequence[jax.Array]]:
        """The call for a batch between two submeshes of this process: takes the arrays, gives them as they arrive."""

    def send(self, batch: Batch) -> Callable[..., None]:
        """The call for a batch to a submesh that this process does not own: takes the arrays."""

    def receive(self, batch: Batch) -> Callable[[], Sequence[jax.Array]]:
        """The call for a batch from a submesh that this process does not own: gives the arrays, maybe not computed yet."""


class LocalTransport:
    """Moves arrays inside one process, each batch by one ``jax.device_put``.

    Programs that are bound for different submeshes of one process, each in a thread of its own, reach each other
    through one `LocalTransport`.
    """

    def __init__(self) -> None:
        self._sent: defaultdict[Tag, queue.SimpleQueue[Sequence[jax.Array]]] = defaultdict(queue.SimpleQueue)

    def move(self, batch: Batch) -> Callable[..., Sequence[jax.Array]]:
        """See `Transport`."""
        shardings = batch.shardings

        def move(*values: jax.Array) -> Sequence[jax.Array]:
            moved: Sequence[jax.Array] = jax.device_put(list(values), shardings)
            return moved

        return move

    def send(self, batch: Batch) -> Callable[..., None]:
        """See `Transport`."""
        move, box = self.move(batch), self._sent[batch.tag]
        return lambda *values: box.put(move(*values))

    def receive(self, batch: Batch) -> Callable[[], Sequence[jax.Array]]:
        """See `Transport`. Waits until the batch was sent."""
        return self._sent[batch.tag].get
