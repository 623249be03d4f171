"""Arrays between processes, by cross-host `jax.device_put`: every process issues every crossing, in one order.

JAX numbers these transfers by counting them in each process, so that a process that leaves one out takes the next one
for it. What a process has no part in it issues on a ghost, which sends nothing and waits for nothing.

The order is that of the plan. Each crossing stands there behind what computes its values, so whoever is at the earliest
crossing of all that somebody is held up at lacks nothing that is to be issued later, and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .. import _compat
from .._distributed._world import World
from ._carrier import Carrier, Carry, Give, Piece, ends
from ._launches import Launches


class CrossHostPuts:
    """Carries pieces by ``jax.device_put``, which every process calls for every piece; see `Carrier`."""

    in_order, whole = True, False

    def __init__(self, world: World) -> None:
        self.world = world
        self._meet()

    def begin(self, call: int) -> None:
        """See `Carrier`. Nothing: calls follow each other."""

    def beside(self, launches: Launches) -> Carrier:
        """See `Carrier`. Nothing here is a collective."""
        return self

    def bind(self, number: int, pieces: Sequence[Piece]) -> Carry:
        """See `Carrier`."""
        me = self.world.process
        targets, sources = ends(pieces, me)
        # One device_put for each pair of devices: JAX sorts what goes other ways by a hash, in each process another one.
        ways: dict[Any, list[int]] = {}
        for k, p in enumerate(pieces):
            ways.setdefault((p.leaving, p.arriving), []).append(k)
        puts = []
        for places in ways.values():
            ghosts = [None if pieces[k].source == me else _compat.assemble(_leaving(pieces[k]), []) for k in places]
            puts.append((list(zip(places, ghosts, strict=True)), [pieces[k].arriving for k in places]))
        here = [k for k, p in enumerate(pieces) if p.target == me]

        def carry(give: Give) -> list[jax.Array]:
            for target in targets:
                self.world.counts_sent(target)
            moved: dict[int, jax.Array] = {}
            for leaving, shardings in puts:
                arrays = [give(pieces[k]) if ghost is None else ghost for k, ghost in leaving]
                for (k, _), x in zip(leaving, jax.device_put(arrays, shardings), strict=True):
                    moved[k] = x
            for source in sources:
                self.world.counts_received(source)
            return [moved[k] for k in here]

        return carry

    def _meet(self) -> None:
        """Sends a number from each process to the next.

        Whoever receives asks for the address of the sender, which that one tells at its first transfer, and blocks until
        it is told: in the midst of a step this would hold up what others wait for.
        """
        first = {d.process_index: SingleDeviceSharding(d) for d in reversed(jax.devices())}
        processes = sorted(first)
        number = np.zeros((), np.float32)
        pieces = [
            Piece(k, None, None, p, q, (), number.dtype, first[p], first[q])
            for k, (p, q) in enumerate(zip(processes, processes[1:] + processes[:1], strict=True))
        ]
        jax.block_until_ready(self.bind(0, pieces)(lambda p: jax.device_put(number, p.leaving)))


def _leaving(piece: Piece) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(piece.shape, piece.dtype, sharding=piece.leaving)
