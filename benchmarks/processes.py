"""Several processes: how long survivors take to end when one fails, and what starting and agreeing costs.

    python benchmarks/processes.py [--repetitions 10] [--only kill] [--json FILE]

The failures are those of tests/distributed/failing.py, in three processes with a limit of three seconds for silence and of
half a second for one that left. Each time counts from the failure to the end of the last survivor.
"""

from __future__ import annotations

import argparse
import io
import re
import statistics
import sys
import time
from pathlib import Path

from _process import prepare
from _timing import row, write_rows

if __name__ == "__main__":
    prepare(devices=1)

from manymesh._distributed._launch import run_processes

FAILING = Path(__file__).resolve().parents[1] / "tests" / "distributed" / "failing.py"
LIMITS = {"kill": 0.0, "raise": 0.0, "other shape": 0.0, "leaves early": 0.5, "stop": 3.0, "sleeps": 3.0}


class Stamped(io.StringIO):
    """Text in which each line knows when it came."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.lines.append((time.time(), text))
        return super().write(text)


def survivors(case: str) -> tuple[float, str]:
    """Seconds from a failure until the last survivor said why it ends, and what one said."""
    output = Stamped()
    run_processes([sys.executable, str(FAILING), case, "3"], 3, 1, output=output, timeout=120)
    failed = float(re.search(r"fails at ([\d.]+)", output.getvalue())[1])
    said = [(at, line) for at, line in output.lines if re.match(r"\[[02]\] manymesh: (?!process [02] )", line)]
    assert len({line[1] for _, line in said}) == 2, f"{case}: not every survivor said why it ends\n{output.getvalue()}"
    return max(at for at, _ in said) - failed, said[-1][1][4:].strip()


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
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--only", choices=tuple(LIMITS), action="append")
    parser.add_argument("--json")
    given = parser.parse_args()
    rows = []
    for case in given.only or LIMITS:
        times, words = zip(*(survivors(case) for _ in range(given.repetitions)), strict=True)
        worst, limit = max(times), LIMITS[case]
        rows.append(
            row(
                f"process 1 of 3: {case}", f"{statistics.median(times):.2f} s, {len(times)} times", f"limit {limit:g} s",
                f"at most {worst:.2f} s: {words[0]}", f"<= {limit + 5:g} s", worst <= limit + 5,
            )
        )  # fmt: skip
        print(rows[-1], flush=True)
    if not given.only:
        for processes in (1, 4):
            took = min(starting(processes) for _ in range(3))
            rows.append(
                row(f"start and end {processes} processes", f"{took:.1f} s", "importing included", "", "", None)
            )
            print(rows[-1], flush=True)
    write_rows(given.json, rows)


if __name__ == "__main__":
    main()
