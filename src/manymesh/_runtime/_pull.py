"""Arrays between processes, by `jax.experimental.transfer`: the owner offers them under a number, the other asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import transfer

from .._distributed._world import SLOW, World
from .._errors import ProcessError
from ._carrier import Carrier, Carry, Give, Piece, ends
from ._launches import Launches

# Numbers of a transfer: 31 bits say which call, 21 what of it, 12 for whom.
NUMBER_BITS, TARGET_BITS = 21, 12
# Seconds after `stall_timeout`, when the watch says who is missed, if something is known to be waited for.
_LATER = 5.0


class Puller:
    """Carries pieces in whatever order processes come to them; those that have no part in a crossing do nothing.

    See `Carrier`.
    """

    in_order, whole = False, True

    def __init__(self, world: World) -> None:
        self.world = world
        host = f"[{world.host}]" if ":" in world.host else world.host
        client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"] * 2)
        world.write(f"transfer/{world.process}", self._server.address())
        self._connections: dict[int, Any] = {}
        self._call = 0  # in the high bits of a number

    def begin(self, call: int) -> None:
        """See `Carrier`. Numbers count from here for another call."""
        self._call = (call & 0x7FFFFFFF) << NUMBER_BITS + TARGET_BITS

    def beside(self, launches: Launches) -> Carrier:
        """See `Carrier`. Nothing here is a collective."""
        return self

    def bind(self, number: int, pieces: Sequence[Piece]) -> Carry:
        """See `Carrier`."""
        me = self.world.process
        targets, sources = ends(pieces, me)
        sends = [(t, _within(number, t), [p for p in pieces if p.source == me and p.target == t]) for t in targets]
        arriving = [p for p in pieces if p.target == me]
        receives = []
        for s in sources:
            places = [k for k, p in enumerate(arriving) if p.source == s]
            receives.append((s, places, [arriving[k].wanted for k in places]))
        own = _within(number, me)

        # Nothing is done here that could be done before: each call is one of a pipeline's, in the way of the next.
        def carry(give: Give) -> Sequence[jax.Array]:
            for target, within, leaving in sends:
                self.world.counts_sent(target)
                self._server.await_pull(self._call | within, [give(p) for p in leaving])
            if len(receives) == 1:
                ((source, _, wanted),) = receives
                return self._receive(source, own, wanted)
            arrived: list[Any] = [None] * len(arriving)
            for source, places, wanted in receives:
                for k, x in zip(places, self._receive(source, own, wanted), strict=True):
                    arrived[k] = x
            return arrived

        return carry

    def _receive(self, source: int, within: int, wanted: list[jax.ShapeDtypeStruct]) -> Sequence[Any]:
        """Asks a process for arrays."""
        connection = self._connections.get(source)
        if connection is None:
            connection = self._connections[source] = self._server.connect(self._address(source))
        arrays: Sequence[Any] = connection.pull(self._call | within, wanted)
        self.world.counts_received(source)
        return arrays

    def _address(self, source: int) -> str:
        """Where a process offers arrays, which it says once it has compiled; how long that takes is its affair."""
        world = self.world
        limit = world.stall_timeout + _LATER
        try:
            return world.read(f"transfer/{source}", limit, lambda: not world.progress[source].busy)
        except TimeoutError:
            raise ProcessError(
                f"{world.doing.label}: {world.name(source)} did not come to it within {limit:g} s; every process has to call the same "
                f"steps in the same order; {SLOW}"
            ) from None


def _within(number: int, target: int) -> int:
    """The low bits of a number: what tells a transfer from the others of a call."""
    assert number < 1 << NUMBER_BITS and target < 1 << TARGET_BITS, "a call with millions of transfers"
    return number << TARGET_BITS | target
