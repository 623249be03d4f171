"""Comparing two things on a noisy machine: in turns, by the ratio of neighbours."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """How long one thing takes by another's measure.

    Attributes:
      median: median over the rounds of (time of the one) / (time of the other in the same round).
      low, high: its quartiles.
      best: ratio of the shortest times; noise only ever adds, so that this is the steadier figure.
      rounds: how many rounds.
    """

    median: float
    low: float
    high: float
    best: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f} to {self.high:.3f}], of the best times {self.best:.3f}"


def alternate(runs: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each run in each round; runs take turns, and the turn changes direction every round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(-warm_up, rounds):
        for name in names if i % 2 else names[::-1]:
            start = time.perf_counter()
            runs[name]()
            seconds = time.perf_counter() - start
            if i >= 0:
                times[name].append(seconds)
    return times


def ratio(ours: list[float], theirs: list[float]) -> Ratio:
    """The ratio of two lists of times taken in the same rounds."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, median, high = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
    return Ratio(median, low, high, min(ours) / min(theirs), len(each))
