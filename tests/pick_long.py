"""Picks the tests that `make test` leaves to `make test-all`, and writes them to `tests/long.txt`.

    make test-all ARGS=--junitxml=all.xml
    make test ARGS=--junitxml=some.xml      # what the first test of a file makes for the others is made by another test here
    make test-all ARGS="--cov=src --cov-branch --cov-context=test --cov-report="      # with pytest-cov in the environment
    python tests/pick_long.py .coverage all.xml [some.xml]

Of each test function the cases stay that are quick, or the quickest one, if that is not slow. Then those stay that run a branch of the
package which none of the others runs: the tests that stay run all branches that all tests run. So do those marked `quick`.
"""

from __future__ import annotations

import re
import sqlite3
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

LONG = Path(__file__).with_name("long.txt")
QUICK, SLOW = 0.25, 0.8  # seconds


def durations(report: str) -> dict[str, float]:
    """Seconds of each test in a report of pytest, by its name as `long.txt` has it."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        path = case.get("classname", "").replace(".", "/") + ".py"
        if (LONG.parents[1] / path).exists():
            found[_plain(f"{path}::{case.get('name')}")] = float(case.get("time", 0))
    return found


def branches(database: str) -> dict[str, set[tuple[int, int, int]]]:
    """The branches that each test runs (file, from line, to line), from a database of coverage.py with a context for each test."""
    found: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
    with sqlite3.connect(database) as data:
        for name, *branch in data.execute(
            "SELECT context, file_id, fromno, tono FROM arc JOIN context ON id = context_id"
        ):
            found[_plain(name.partition("|")[0])].add(tuple(branch))
    return found


def picked(seconds: Mapping[str, float], runs: Mapping[str, set[tuple[int, int, int]]]) -> set[str]:
    """The tests that are left out.

    Args:
      seconds: of each test.
      runs: the branches that each test runs.
    """
    cases: dict[str, list[str]] = defaultdict(list)
    for name in sorted(seconds, key=lambda name: seconds[name]):
        cases[function(name)].append(name)
    kept = {name for names in cases.values() for name in names if seconds[name] < QUICK}
    kept |= {names[0] for names in cases.values() if seconds[names[0]] < SLOW}
    seen = set().union(*(runs.get(name, ()) for name in kept))
    more = {name: runs[name] - seen for name in seconds if name in runs}
    while more := {name: new for name, new in more.items() if new}:
        best = max(more, key=lambda name: len(more[name]) / (seconds[name] + 0.1))
        kept.add(best)
        new = more[best]
        more = {name: others - new for name, others in more.items()}
    return set(seconds) - kept


def function(name: str) -> str:
    """The test function of a case."""
    return name.partition("[")[0]


def lines(left: Iterable[str], every: Iterable[str]) -> list[str]:
    """What `long.txt` says: a function where all its cases are left out, else each case."""
    left = set(left)
    partly = {function(name) for name in every if name not in left}
    return sorted({name if function(name) in partly else function(name) for name in left})


def _plain(name: str) -> str:
    """The name of a test without its group."""
    return re.sub(r"@[a-z]+$", "", name)


if __name__ == "__main__":
    measured = {name: took for report in sys.argv[2:] for name, took in durations(report).items()}
    left = picked(measured, branches(sys.argv[1]))
    LONG.write_text("".join(f"{line}\n" for line in lines(left, measured)), encoding="utf-8")
    took, whole = (sum(measured[name] for name in names) for names in (left, measured))
    print(f"{len(left)} of {len(measured)} tests are left out, {took:.0f} of {whole:.0f} seconds")
