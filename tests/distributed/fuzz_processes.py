"""The laws on many generated programs in two processes; those that break one are printed.

python tests/distributed/fuzz_processes.py --first 0 --examples 1000
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    """Runs them one by one; gives 1 if one broke a law."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--examples", type=int, default=1000)
    given = parser.parse_args()
    sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent), str(HERE)]  # this tree, not an installed one
    from pool import Failed, Pool

    pool, broken, start = Pool(), 0, time.monotonic()
    for number in range(given.first, given.first + given.examples):
        try:
            pool.call("programs.generated", number)
        except Failed as error:
            broken += 1
            print(f"program {number}: {error}", flush=True)
        if number % 100 == 99:  # JAX keeps what it compiles
            pool.close()
    pool.close()
    minutes = (time.monotonic() - start) / 60
    print(f"{given.examples} programs in two processes, {minutes:.1f} minutes, {broken} broke a law")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
