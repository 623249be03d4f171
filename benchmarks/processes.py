"""Several processes: what starting them and finding each other costs.

    python benchmarks/processes.py [--repetitions 3] [--json FILE]

What happens when one fails is in failures.py and restarts.py.
"""

from __future__ import annotations

import argparse
import io
import sys
import time

from _process import prepare
from _timing import row, write_rows

if __name__ == "__main__":
    prepare(devices=1)

from manymesh._distributed._launch import run_processes


def starting(processes: int) -> float:
    """Seconds until so many processes have found each other, seen all devices and ended again."""
    code = "import manymesh as mm; mm.distributed.initialize(); import jax; assert len(jax.devices()) == " + str(
        processes
    )
    start = time.time()
    assert run_processes([sys.executable, "-c", code], processes, 1, output=io.StringIO(), timeout=120) == 0
    return time.time() - start


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json")
    given = parser.parse_args()
    rows = []
    for processes in (1, 4):
        took = min(starting(processes) for _ in range(given.repetitions))
        rows.append(row(f"start and end {processes} processes", f"{took:.1f} s", "importing included", "", "", None))
        print(rows[-1], flush=True)
    write_rows(given.json, rows)


if __name__ == "__main__":
    main()
