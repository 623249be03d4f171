"""Arrays between processes, by `jax.experimental.transfer`: the owner offers them under a number, the other asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.experimental import transfer

from .._distributed._world import World, several


class Pulls(Protocol):
    """Sends and asks for arrays, matched by number: the order in which processes do it does not matter."""

    def send(self, target: int, number: int, arrays: Sequence[Any]) -> None:
        """Offers arrays to a process. They must not be donated or deleted before it has asked for them."""

    def receive(self, source: int, number: int, wanted: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Any]:
        """Asks a process for arrays; gives them at once, though they may not have arrived."""


# Numbers of a transfer: 31 bits say which call, 21 what of it, 12 for whom.
NUMBER_BITS, TARGET_BITS = 21, 12


class Puller:
    """Moves arrays between the processes of a run.

    A process does not get further ahead of another than a window of batches (`World.counts_sent`), so that what it has
    sent and nobody has asked for is bounded.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        host = f"[{world.host}]" if ":" in world.host else world.host
        client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"] * 2)
        world.write(f"transfer/{world.process}", self._server.address())
        self._connections: dict[int, Any] = {}
        self._call = 0

    def begin(self, call: int) -> None:
        """Numbers count from here for another call."""
        self._call = call

    def send(self, target: int, number: int, arrays: Sequence[Any]) -> None:
        """See `Pulls`."""
        self.world.counts_sent(target)
        self._server.await_pull(self._number(number, target), list(arrays))

    def receive(self, source: int, number: int, wanted: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Any]:
        """See `Pulls`."""
        connection = self._connections.get(source)
        if connection is None:
            address = self.world.read(f"transfer/{source}")
            connection = self._connections[source] = self._server.connect(address)
        arrays: Sequence[Any] = connection.pull(self._number(number, self.world.process), list(wanted))
        self.world.counts_received(source)
        return arrays

    def _number(self, number: int, target: int) -> int:
        assert number < 1 << NUMBER_BITS and target < 1 << TARGET_BITS, "a call with millions of transfers"
        return ((self._call & 0x7FFFFFFF) << NUMBER_BITS | number) << TARGET_BITS | target


_pullers: list[Puller] = []


def puller() -> Puller:
    """The one of this process; made when it is first needed, because it needs devices."""
    if not _pullers:
        _pullers.append(Puller(several()))
    return _pullers[0]
