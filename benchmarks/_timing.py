"""Comparing things on a machine that others use too: in turns, away from the noise, by the ratio of neighbours."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STAT = Path("/proc/stat")
_DISTURBED = 0.08  # cores that others may use during a round that counts


@dataclass(frozen=True)
class Ratio:
    """How long one thing takes by another's measure.

    Attributes:
      median: median over the rounds of (time of the one) / (time of the other in the same round).
      low, high: its quartiles.
      cpu: the median for CPU time instead of wall time: work, however it overlaps.
      rounds: how many rounds count.
      disturbed: how many do not, because somebody else was using the machine.
    """

    median: float
    low: float
    high: float
    cpu: float
    rounds: int
    disturbed: int

    def __str__(self) -> str:
        left_out = f", {self.disturbed} disturbed ones left out" if self.disturbed else ""
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}), of CPU time {self.cpu:.3f}, {self.rounds} rounds{left_out}"


@dataclass(frozen=True)
class Sample:
    """One timed run: wall seconds, CPU seconds of this process, CPU seconds of everybody else meanwhile."""

    wall: float
    cpu: float
    foreign: float


def alternate(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    warm_up: int = 2,
    patience: float = 0.0,
    seconds: float = math.inf,
) -> dict[str, list[Sample]]:
    """Times each run in each round. Runs take turns, and the turn changes direction every round.

    Args:
      runs: what to time, by name.
      rounds: how often.
      warm_up: rounds that are not kept.
      patience: seconds, over all rounds, to spend on waiting for a quiet machine.
      seconds: starts no further round after that long, once there are three.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    names = list(runs)
    begin = time.perf_counter()
    for i in range(-warm_up, rounds):
        if i >= 3 and time.perf_counter() - begin > seconds:
            break
        if i >= 0:
            patience -= _wait_for_quiet(patience)
        for name in names if i % 2 else names[::-1]:
            before, cpu, start = _busy(), time.process_time(), time.perf_counter()
            runs[name]()
            wall, used = time.perf_counter() - start, time.process_time() - cpu
            if i >= 0:
                samples[name].append(Sample(wall, used, max(_busy() - before - used, 0.0)))
    return samples


def ratio(ours: list[Sample], theirs: list[Sample]) -> Ratio:
    """Compares two lists of samples of the same rounds.

    Rounds in which others used the machine are left out, whatever they say; if that leaves less than half, the
    quieter half counts.
    """
    pairs = sorted(zip(ours, theirs, strict=True), key=lambda p: p[0].foreign / p[0].wall + p[1].foreign / p[1].wall)
    quiet = sum(a.foreign < _DISTURBED * a.wall and b.foreign < _DISTURBED * b.wall for a, b in pairs)
    kept = pairs[: max(quiet, (len(pairs) + 1) // 2)]
    each = [a.wall / b.wall for a, b in kept]
    low, median, high = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
    cpu = statistics.median(a.cpu / b.cpu for a, b in kept)
    return Ratio(median, low, high, cpu, len(kept), len(pairs) - len(kept))


def _busy() -> float:
    """CPU seconds that the whole machine has used so far; 0 where the kernel does not say."""
    if not _STAT.is_file():
        return 0.0
    fields = [int(f) for f in _STAT.read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / 100


def _wait_for_quiet(limit: float) -> float:
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < limit:
        before = _busy()
        time.sleep(0.15)
        if _busy() - before <= 0.03:
            break
    return spent


def row(what: str, ours: str, beside: str, figure: str, target: str, met: bool | None) -> dict[str, Any]:
    """A row of the table: what is measured, of whom, the figure that counts and what is aimed at.

    ``met`` is None for a row that is there to be read and has no target.
    """
    return {"what": what, "ours": ours, "theirs": beside, "figure": figure, "target": target, "met": met}


def write_rows(path: str | None, rows: list[dict[str, Any]]) -> None:
    """Hands the rows to whoever prints the table."""
    if path:
        Path(path).write_text(json.dumps(rows))
