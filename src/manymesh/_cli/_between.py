"""What two processes do for ``doctor``: a number and some megabytes go from one to the other and back."""

from __future__ import annotations

import json
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._distributed._initialize import initialize
from .._distributed._world import several
from .._runtime._carriers import carrier
from .._runtime._exchange import Exchange, put

COUNTS = (1, 1 << 20)  # float32 values that go at once: a number, 4 MiB
REPETITIONS = 5
MARK = "manymesh doctor: "


def main() -> None:
    """What runs in each process; process 0 prints seconds of one way for each of `COUNTS`, or what was wrong."""
    initialize()
    world, me = several(), jax.process_index()
    here, there = (
        NamedSharding(Mesh(np.array([next(d for d in jax.devices() if d.process_index == p)]), ("d",)), PartitionSpec())
        for p in (0, 1)
    )
    found: list[float | str] = []
    for count in COUNTS:
        value = np.arange(count, dtype=np.float32)
        ends = [jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=s) for s in (here, there)]
        ways = [Exchange(k, [ends[k]], [ends[1 - k]], carrier()) for k in (0, 1)]
        x, times = put(value, here), []
        for _ in range(REPETITIONS):
            carrier().begin(world.begin("manymesh doctor"))
            start = time.perf_counter()
            for way in ways:
                arrived = way(*([x] if way.gives else []))
                if arrived:
                    x = jax.block_until_ready(arrived[0])
            times.append((time.perf_counter() - start) / 2)
        found.append(min(times) if np.array_equal(x, value) else f"{count} values did not come back as they left")
    if me == 0:
        print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
