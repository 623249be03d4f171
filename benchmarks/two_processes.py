"""A step in two processes, a stage and a core each, beside the same pipeline written by hand in two processes.

    python benchmarks/two_processes.py [--schedule gpipe 1f1b zero-bubble-h1] [--rounds 15] [--json FILE]

By hand: the functions of `_hand.py`, each process its own stage in the order of the schedule, arrays pulled from the
other process with `jax.experimental.transfer`. Both are run in turns by the same two processes. The efficiency is half of
the time that one process takes for the whole model on its core, both at a time, divided by that of the step.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

from _process import prepare
from _timing import alternate, ratio, row

if __name__ == "__main__":
    if "MANYMESH_PROCESS" in os.environ and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["MANYMESH_PROCESS"]) % len(cores)]})
    prepare(devices=1)

import jax
import numpy as np
from _apart import Link, in_two, say
from _hand import SCHEDULES, ByHand, rows
from _model import Size
from _ours import WithManyMesh

import manymesh as mm

TARGET = 0.98


class ByHandApart(ByHand):
    """One process's part of the pipeline by hand."""

    def __init__(self, size: Size, schedule: str, link: Link) -> None:
        self.link = link
        super().__init__(size, schedule)

    def _begin(self) -> None:
        self.me, device = self.link.me, jax.local_devices()[0]
        self.stage = self._stage(self.me, device)
        self.data = jax.device_put(
            self.size.data()[self.me], device
        )  # the inputs for the first, the targets for the last
        shape = self.size.batch // self.count, self.size.width
        here = jax.sharding.SingleDeviceSharding(device)
        self.crossing = jax.ShapeDtypeStruct(shape, np.float32, sharding=here)
        self.loss = jax.ShapeDtypeStruct((), np.float32, sharding=here)

    def __call__(self) -> float:
        """One step; the loss before it."""
        s, me, link, count = self.stage, self.me, self.link, self.count
        total = s.zeros(s.state[0])
        pieces = s.cut(self.data)
        kept: dict[int, Any] = {}
        losses = []
        for phase, _, m in rows(self.schedule, 2, count)[me]:
            if phase == "F":
                given = (link.take(m, self.crossing), pieces[m]) if me else (pieces[m],)
                out, kept[m] = s.forward(s.state[0], *given)
                if me:
                    losses.append(out)
                else:
                    link.give(m, out)
            elif phase == "B":
                cotangent = None if me else link.take(count + m, self.crossing)
                made, back = s.backward(s.state[0], kept.pop(m), cotangent, total)
                if s.weight is None:
                    total = made
                else:
                    kept[m] = made
                if me:
                    link.give(count + m, back)
            else:
                assert s.weight is not None, "only a schedule that splits the backward pass has weight gradients"
                total = s.weight(total, kept.pop(m))
        s.state = s.update(s.state, total)
        if me:
            loss = self.mean(losses)
            link.give(2 * count, loss)
        else:
            loss = link.take(2 * count, self.loss)
        jax.block_until_ready(s.state)
        link.begin += 2 * count + 1
        return float(loss)


class Alone(ByHand):
    """The whole model in this process."""

    def _begin(self) -> None:
        (device,) = jax.local_devices()
        self.stages = [self._stage(0, device)]
        self.x, self.y = jax.device_put(self.size.data(), device)


def compared(schedule: str, rounds: int, size: Size, link: Link) -> dict[str, Any]:
    """The row of a schedule."""
    steps = {
        "mm": WithManyMesh(size, schedule), "by hand": ByHandApart(size, schedule, link),
        "alone": Alone(dataclasses.replace(size, stages=1), "gpipe"),
    }  # fmt: skip
    losses: dict[str, list[float]] = {who: [] for who in steps}
    runs = {who: lambda who=who: losses[who].append(steps[who]()) for who in steps}
    samples = alternate(runs, rounds)
    for who in ("by hand", "alone"):
        np.testing.assert_allclose(losses["mm"], losses[who], rtol=1e-4, err_msg=f"losses differ: {who}")
    speed, share = ratio(samples["by hand"], samples["mm"]), ratio(samples["alone"], samples["mm"])
    ours, theirs = (1e3 * min(s.wall for s in samples[who]) for who in ("mm", "by hand"))
    return row(
        f"step in 2 processes, {schedule}", f"{ours:.0f} ms, efficiency {share.median / 2:.2f}", f"by hand {theirs:.0f} ms",
        f"{speed.median:.3f} of its speed ({speed.low:.3f} to {speed.high:.3f})", f">= {TARGET}", speed.median >= TARGET,
    )  # fmt: skip


def worker(folder: str, schedules: list[str], rounds: int, size: Size) -> None:
    """What runs in each of the two processes."""
    mm.distributed.initialize(stall_timeout=300)
    link = Link()
    found = [compared(schedule, rounds, size, link) for schedule in schedules]
    say(folder, found)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=Size.batch, help="rows")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.schedule, given.rounds, Size(batch=given.batch))
        return 0
    options = ["--schedule", *given.schedule, "--rounds", given.rounds, "--batch", given.batch]
    return in_two(__file__, options, given.json)


if __name__ == "__main__":
    sys.exit(main())
