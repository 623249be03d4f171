"""What recording a step costs, and what it costs when nobody records.

    python benchmarks/recording.py [--blocks 8] [--width 512] [--hidden 2048] [--batch 1536] [--microbatches 8]
                                   [--schedule 1f1b] [--rounds 30] [--seconds 60] [--json FILE]

One step of the pipeline benchmark's model, with and without `mm.inspect.record()` around it, in turns. The recorded time
holds everything: entering the block, waiting for the devices, and putting the spans together at its end. When nobody records,
a call asks once whether somebody does, or whether a profile is taken; that is timed alone, in a loop.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from typing import Any

from _process import prepare, spread_threads

if __name__ == "__main__":
    prepare(devices=2)

import jax
from _model import Size
from _ours import WithManyMesh
from _timing import alternate, ratio, row, write_rows

import manymesh as mm
from manymesh._runtime._watch import observer_of

TARGET = 1.02
TARGET_OFF = 2.0  # microseconds a call


def recorded(size: Size, schedule: str, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of a recorded step beside an unrecorded one."""
    step = WithManyMesh(size, schedule)
    count = 0

    def record() -> None:
        nonlocal count
        with mm.inspect.record() as run:
            step()
        count = len(run.spans)

    samples = alternate({"recorded": record, "plain": step}, rounds, patience=seconds / 4, seconds=seconds)
    found = ratio(samples["recorded"], samples["plain"])
    best = {name: 1e3 * min(s.wall for s in each) for name, each in samples.items()}
    print(
        f"{schedule}: ratio {found}; best steps: recorded {best['recorded']:.1f} ms, plain {best['plain']:.1f} ms; "
        f"{count} spans; target {TARGET:.2f}"
    )
    return row(
        f"recording, {schedule}, {count} spans", f"{best['recorded']:.1f} ms", f"{best['plain']:.1f} ms unrecorded",
        f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})", f"<= {TARGET:.2f}", found.median <= TARGET,
    )  # fmt: skip


def off(size: Size, schedule: str, calls: int = 20_000) -> dict[str, Any]:
    """The row of a call that nobody records."""
    lowered = WithManyMesh(size, schedule).compiled()._lowered
    assert observer_of("step", lowered) is None, "somebody is looking"
    each = min(timeit.repeat(lambda: observer_of("step", lowered), number=calls, repeat=5)) / calls * 1e6
    print(f"off: {each:.2f} us a call; target {TARGET_OFF:.0f}")
    return row(
        "recording, off", f"{each:.2f} us a call", "", f"{each:.2f} us", f"<= {TARGET_OFF:.0f} us", each <= TARGET_OFF
    )


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("blocks", "width", "hidden", "batch", "microbatches"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Size(), name))
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60.0, help="no further round after that long")
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    size = Size(a.blocks, a.width, a.hidden, a.batch, a.microbatches)
    spread_threads()
    print(f"two virtual devices, JAX {jax.__version__}, Python {sys.version.split()[0]}")
    write_rows(a.json, [recorded(size, a.schedule, a.rounds, a.seconds), off(Size(2, 8, 8, 16, 2), a.schedule)])


if __name__ == "__main__":
    main()
