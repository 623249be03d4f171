"""What was measured beside what was predicted."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Protocol

from .._shown import as_written, page_width, rich_html
from ._spans import Prediction, Span, bubble_fraction, calls_of, extent, spans_of
from ._words import format_seconds

if TYPE_CHECKING:  # imported when it is printed
    from rich.console import Console, ConsoleOptions, RenderResult

_Key = tuple[int, str, str]  # submesh, kind, label


@dataclass(frozen=True)
class Difference:
    """One task in one phase, or one edge, measured and predicted.

    Attributes:
      submesh: where it runs; of a transfer where it arrives.
      kind: as in `Span`.
      label: the fragment, or ``maker -> submesh``.
      runs: how often it ran in a step.
      measured: seconds of one run, the median; None if it was predicted but never ran.
      predicted: seconds of one run, the median; None if it ran but was not predicted.
    """

    submesh: int
    kind: str
    label: str
    runs: int
    measured: float | None
    predicted: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where one of them is missing or nothing was predicted."""
        return self.measured / self.predicted if self.predicted and self.measured is not None else None

    @property
    def seconds(self) -> float:
        """How many seconds of a step it is off by: all runs together, positive where it takes longer than predicted."""
        return self.runs * ((self.measured or 0.0) - (self.predicted or 0.0))


@dataclass(frozen=True)
class Comparison:
    """A recording beside a prediction.

    Attributes:
      measured_seconds, predicted_seconds: of one step.
      measured_bubble, predicted_bubble: part of the submeshes' time in which they wait.
      differences: what is off, by the seconds of a step that it is off by, the most first.
    """

    measured_seconds: float
    predicted_seconds: float
    measured_bubble: float
    predicted_bubble: float
    differences: tuple[Difference, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        yield Text(self.summary())
        table = Table()
        for name in ("what", "submesh", "kind", "runs", "measured", "predicted", "ratio", "off in a step"):
            table.add_column(name, justify="left" if name in ("what", "kind") else "right")
        for d in self.differences[:_SHOWN]:
            table.add_row(
                d.label, str(d.submesh), d.kind, str(d.runs), _seconds(d.measured), _seconds(d.predicted),
                "" if d.ratio is None else f"{d.ratio:.2f}x", f"{'+' * (d.seconds > 0)}{format_seconds(d.seconds)}",
            )  # fmt: skip
        yield from as_written(console, options, [table])
        if len(self.differences) > _SHOWN:
            yield Text(f"and {len(self.differences) - _SHOWN} more that are off by less")

    def summary(self) -> str:
        """The step time, the bubble, and what is off most, in two lines."""
        off = self.measured_seconds / self.predicted_seconds - 1 if self.predicted_seconds else 0.0
        lines = [
            f"step {format_seconds(self.measured_seconds)} measured, {format_seconds(self.predicted_seconds)} predicted "
            f"({off:+.1%}); bubble {self.measured_bubble:.1%} measured, {self.predicted_bubble:.1%} predicted"
        ]
        if self.differences:
            d = self.differences[0]
            if d.measured is None or d.predicted is None:
                how = "was predicted but never ran" if d.measured is None else "was not predicted"
            else:
                how = f"takes {format_seconds(d.measured)} and not {format_seconds(d.predicted)}"
            lines.append(
                f"most is off in {d.kind} {d.label!r} on submesh {d.submesh}, which {how}: {d.runs} runs, "
                f"{'+' * (d.seconds > 0)}{format_seconds(d.seconds)} in a step"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=page_width(120)).print(self)
        return out.getvalue()

    def _repr_html_(self) -> str:
        return rich_html(self)

    def __repr__(self) -> str:
        return f"Comparison({len(self.differences)} tasks and edges: {self.summary()})"


_SHOWN = 20


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


class _Measured(Protocol):
    @property
    def spans(self) -> Sequence[Span]:
        """What was measured."""

    @property
    def steps(self) -> Sequence[str]:
        """The recorded calls."""

    @property
    def elsewhere(self) -> Sequence[int]:
        """The submeshes that were recorded in other processes."""


def compare(recording: _Measured, prediction: Prediction) -> Comparison:
    """Puts a recording beside a prediction of one step, or beside another recording.

    A task is matched by its label. Where the prediction speaks of whole stages (``stage 0``), as a simulation does, all
    the tasks of a stage in a phase are matched together. Where other processes ran some of the submeshes, only the others are
    compared.
    """
    predicted = tuple(s for s in spans_of(prediction) if s.submesh not in recording.elsewhere)
    calls = calls_of(predicted) or [[]]
    steps = max(len(recording.steps), 1)
    by_stage = {(s.submesh, s.kind, s.stage) for s in predicted if s.label == f"stage {s.stage}"}

    def key(s: Span) -> _Key:
        if (s.submesh, s.kind, s.stage) in by_stage:
            return s.submesh, s.kind, f"stage {s.stage}"
        return s.submesh, s.kind, s.label

    ours, theirs = _runs(recording.spans, key), _runs(predicted, key)
    told = {k[1] for k in theirs}  # a simulation of the loop says nothing of transfers, nor of what is outside of it
    differences = [
        Difference(
            *k,
            runs=round(len(theirs[k]) / len(calls)) if k in theirs else round(len(ours[k]) / steps),
            measured=median(ours[k]) if k in ours else None,
            predicted=median(theirs[k]) if k in theirs else None,
        )
        for k in dict.fromkeys([*theirs, *(k for k in ours if k[1] in told)])
    ]
    told_spans = [s for s in recording.spans if s.kind in told]
    times = [extent([s for s in told_spans if s.step == i]) for i in range(steps)]
    bubbles = [bubble_fraction([s for s in told_spans if s.step == i]) for i in range(steps)]
    return Comparison(
        median(b - a for a, b in times), median(b - a for a, b in map(extent, calls)),
        median(bubbles), median(map(bubble_fraction, calls)),
        tuple(sorted(differences, key=lambda d: -abs(d.seconds))),
    )  # fmt: skip


def _runs(spans: Iterable[Span], key: Callable[[Span], _Key]) -> dict[_Key, list[float]]:
    """Seconds of each run of each thing. What shares a key in one microbatch of one step is one run."""
    runs: dict[tuple[_Key, int, int | None], float] = defaultdict(float)
    alone: dict[_Key, list[float]] = defaultdict(list)
    for s in spans:
        if s.microbatch is None:
            alone[key(s)].append(s.seconds)
        else:
            runs[key(s), s.step, s.microbatch] += s.seconds
    for (k, _, _), seconds in runs.items():
        alone[k].append(seconds)
    return alone
