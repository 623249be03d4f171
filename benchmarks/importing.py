"""What `import manymesh` costs beside `import jax`.

    python benchmarks/importing.py [--rounds 15] [--json FILE]

Each import is a process of its own, in turns; the figure is the ratio of the CPU times of the two, the median over the
rounds. Bytecode is cached, as it is for an installed package.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys

from _timing import row, write_rows

LIMIT = 1.15


def seconds(module: str) -> float:
    """CPU seconds of a process that imports a module."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    seconds("manymesh")  # writes bytecode
    pairs = [(seconds("manymesh"), seconds("jax")) for _ in range(options.rounds)]
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    figure = f"{ratio:.2f}: {ours:.2f} s beside {theirs:.2f} s"
    print(f"import manymesh beside import jax: {figure}")
    write_rows(options.json, [row("import manymesh", "", "import jax", figure, f"<= {LIMIT}", ratio <= LIMIT)])


if __name__ == "__main__":
    main()
