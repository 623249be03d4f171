"""Arrays from one process to another and back, by each transport, beside `jax.experimental.transfer` by hand.

    python benchmarks/transports.py [--rounds 15] [--bytes 1024 1048576 67108864] [--json FILE]

Two processes of this machine, one CPU device each. Each transport and the transfer by hand take turns in both; process 0 takes
the time.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable

from _process import prepare
from _timing import alternate, ratio, row

if __name__ == "__main__":
    prepare(devices=1)

import jax
import numpy as np
from _apart import Link, in_two, say
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import manymesh as mm
from manymesh._distributed._transports import NAMES, VARIABLE
from manymesh._distributed._world import several
from manymesh._runtime._carriers import carrier
from manymesh._runtime._exchange import Exchange, put

IN_A_ROUND = {1 << 10: 20, 1 << 20: 10}  # arrays there and back, of a size; bigger ones go twice
MORE_ROUNDS = 10  # for arrays of at most 1 MB: neighbouring rounds of them differ by a tenth


class ByHand:
    """Arrays over a link."""

    def __init__(self) -> None:
        self.link, self.number = Link(), 0

    def there_and_back(self, x: jax.Array, times: int) -> jax.Array:
        """Sends an array to the other process, which sends it back."""
        wanted = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for turn in range(2 * times):
            self.number += 1
            if turn % 2 == self.link.me:
                self.link.give(self.number, x)
            else:
                x = jax.block_until_ready(self.link.take(self.number, wanted))
        return x


def ours(name: str, x: jax.Array, ends: list[NamedSharding], times: int) -> Callable[[], jax.Array]:
    """The same by a transport."""
    world = several()
    world.asked = name
    carries = carrier()
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for s in ends]
    ways = [Exchange(k, [avals[k]], [avals[1 - k]], carries) for k in (0, 1)]

    def there_and_back() -> jax.Array:
        at = x
        for _ in range(times):
            carries.begin(world.begin("a benchmark"))
            for way in ways:
                arrived = way(*([at] if way.gives else []))
                if arrived:
                    at = jax.block_until_ready(arrived[0])
        return at

    return there_and_back


def worker(folder: str, rounds: int, sizes: list[int]) -> None:
    """What runs in each of the two processes."""
    mm.distributed.initialize(stall_timeout=300)
    ends = [NamedSharding(Mesh(np.array([d]), ("d",)), PartitionSpec()) for d in jax.devices()]
    me, by_hand, rows = jax.process_index(), ByHand(), []
    for size in sizes:
        value, times = np.arange(size // 4, dtype=np.float32), IN_A_ROUND.get(size, 2)
        x = put(value, ends[me])
        hand = functools.partial(by_hand.there_and_back, x, times)
        for name in NAMES:
            runs = {"by hand": hand, name: ours(name, x, ends, times)}
            for who, run in runs.items():
                assert np.array_equal(run(), value), f"{who}: {size} bytes did not come back as they left"
            samples = alternate(runs, rounds * (MORE_ROUNDS if size <= 1 << 20 else 1))
            seconds = {who: statistics.median(s.wall for s in found) / (2 * times) for who, found in samples.items()}
            speed = ratio(samples["by hand"], samples[name])
            target = ">= 0.95" if name == "pull" and size >= 1 << 20 else ""
            rows.append(row(
                f"{_size(size)} to another process, {name}", _time(seconds[name]), f"by hand {_time(seconds['by hand'])}",
                f"{speed.median:.2f} of its speed ({speed.low:.2f} to {speed.high:.2f})", target,
                speed.median >= 0.95 if target else None,
            ))  # fmt: skip
    say(folder, rows)


def _size(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bytes", type=int, nargs="+", default=[1 << 10, 1 << 20, 1 << 26], help="sizes of arrays")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.rounds, given.bytes)
        return 0
    # `device_put` has to be prepared before the backend starts; the others need nothing.
    options = ["--rounds", given.rounds, "--bytes", *given.bytes]
    return in_two(__file__, options, given.json, {VARIABLE: "device_put"})


if __name__ == "__main__":
    sys.exit(main())
