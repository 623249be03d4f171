"""A training step as a two-stage pipeline: ManyMesh beside the same pipeline written by hand, in one process.

    python benchmarks/pipeline.py [--blocks 8] [--width 512] [--hidden 2048] [--batch 1536] [--microbatches 8]
                                  [--schedule gpipe 1f1b zero-bubble-h1] [--rounds 40] [--seconds 60]
                                  [--report] [--json FILE]

Residual blocks ``x <- LayerNorm(x + gelu(x W1) W2)``, mean squared error, float32, Adam; half of the blocks on each
of two virtual CPU devices. The two step in turns on the same batch. Their losses have to agree; their times are
compared by the ratio of neighbouring steps, since the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from _process import prepare, spread_threads

if __name__ == "__main__":
    prepare(devices=2)

import jax
import numpy as np
from _hand import SCHEDULES, ByHand
from _model import Size
from _ours import WithManyMesh
from _timing import alternate, ratio, row, write_rows

TARGET = 1.01


def compare(size: Size, schedule: str, rounds: int, seconds: float, report: bool = False) -> dict[str, Any]:
    """Steps both in turns, checks that the losses agree, and returns a row of the table."""
    steps = {"mm": WithManyMesh(size, schedule), "hand": ByHand(size, schedule)}
    losses: dict[str, list[float]] = {who: [] for who in steps}
    runs = {who: lambda who=who: losses[who].append(steps[who]()) for who in steps}
    samples = alternate(runs, rounds, patience=seconds / 4, seconds=seconds)
    np.testing.assert_allclose(losses["mm"], losses["hand"], rtol=1e-4, err_msg=f"losses of {schedule} differ")
    found = ratio(samples["mm"], samples["hand"])
    ours, theirs = (1e3 * min(s.wall for s in samples[who]) for who in ("mm", "hand"))
    print(
        f"{schedule:14} ratio {found}; best steps: mm {ours:.0f} ms, by hand {theirs:.0f} ms; target {TARGET:.2f}; "
        f"loss {losses['mm'][0]:.5f} -> {losses['mm'][-1]:.5f}",
        flush=True,
    )
    if report:
        print(steps["mm"].compiled().report())
    return row(
        f"step by hand, {schedule}",
        f"{ours:.0f} ms",
        f"{theirs:.0f} ms by hand",
        f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})",
        f"<= {TARGET:.2f}",
        found.median <= TARGET,
    )


def main() -> None:
    """Reads the command line and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1536, help="rows")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--rounds", type=int, default=40, help="most rounds for each schedule")
    parser.add_argument("--seconds", type=float, default=60, help="about the time for each schedule")
    parser.add_argument("--report", action="store_true", help="print what the compiled step consists of")
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    if a.blocks % 2 or a.batch % a.microbatches:
        parser.error("blocks divide into two stages, rows into microbatches")
    jax.devices()
    spread_threads()
    size = Size(a.blocks, a.width, a.hidden, a.batch, a.microbatches)
    print(f"{size}, float32, JAX {jax.__version__}, Python {sys.version.split()[0]}")
    write_rows(a.json, [compare(size, schedule, a.rounds, a.seconds, a.report) for schedule in a.schedule])


if __name__ == "__main__":
    main()
