"""`Timeline`: what ran where and when, in every form it can be looked at."""

from __future__ import annotations

import html
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .._errors import ArgumentError
from .._shown import as_written, page_width
from . import _text
from ._chrome import chrome_trace
from ._figure import figure
from ._page import page
from ._spans import Prediction, Span, bubble_fraction, calls_of, extent, spans_of
from ._words import format_seconds, with_elsewhere

if TYPE_CHECKING:  # imported when a timeline is printed or drawn
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderResult

_WIDTH = 100


class _Recorded(Protocol):
    @property
    def spans(self) -> tuple[Span, ...]:
        """What was measured."""

    @property
    def submeshes(self) -> tuple[str, ...]:
        """The submeshes in words."""

    @property
    def steps(self) -> tuple[str, ...]:
        """The recorded calls."""

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """The submeshes that were recorded in other processes."""


@dataclass(frozen=True)
class Timeline:
    """What ran where and when. Prints itself as text, shows itself in notebooks as a page, and saves itself.

    Attributes:
      spans: what was measured.
      predicted: what was predicted; empty where nothing was.
      submeshes: the submeshes in words.
      steps: names of the recorded calls.
      unit: of times: ``s``, or nothing where they have none, as in a schedule.
      elsewhere: the submeshes of which nothing was measured here, because other processes run them.
    """

    spans: tuple[Span, ...]
    predicted: tuple[Span, ...] = ()
    submeshes: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    unit: str = "s"
    elsewhere: tuple[int, ...] = ()

    @classmethod
    def of(cls, recorded: _Recorded, prediction: Prediction | None = None) -> Timeline:
        """The timeline of a recording, beside a prediction that is repeated for every recorded call.

        Where the prediction is a recording of several calls, each stands beside its own, and the last one beside all later.
        """
        predicted = () if prediction is None else spans_of(prediction)
        spans = recorded.spans
        submeshes = recorded.submeshes or tuple(
            "" for _ in range(1 + max((s.submesh for s in (*spans, *predicted)), default=-1))
        )
        if predicted and recorded.steps:
            starts = [min((s.start for s in spans if s.step == i), default=0.0) for i in range(len(recorded.steps))]
            calls = calls_of(predicted)
            predicted = tuple(
                p._replace(start=p.start + t, end=p.end + t, step=i)
                for i, t in enumerate(starts)
                for p in calls[min(i, len(calls) - 1)]
            )
        return cls(spans, predicted, submeshes, recorded.steps, elsewhere=recorded.elsewhere)

    @property
    def title(self) -> str:
        """``step, 2 calls on 4 submeshes``."""
        names = ", ".join(dict.fromkeys(self.steps)) or ("prediction" if self.predicted else "recording")
        calls = f", {len(self.steps)} calls" if len(self.steps) > 1 else ""
        if not self.submeshes:  # nothing ran
            return names
        return f"{names}{calls} on {len(self.submeshes)} submesh{'es' * (len(self.submeshes) != 1)}"

    @property
    def summary(self) -> str:
        """How long it takes and how much of that the submeshes wait, in a line."""
        parts = []
        for word, calls in (("measured", [self.spans]), ("predicted", self._predicted_calls())):
            if any(calls):
                seconds = sum(end - begin for begin, end in map(extent, calls))
                word = f" {word}" if self.predicted else ""
                parts.append(f"{format_seconds(seconds, self.unit)}{word}, bubble {bubble_fraction(calls[0]):.1%}")
        return "; ".join(parts) or "nothing ran"

    def _predicted_calls(self) -> list[list[Span]]:
        """The prediction of each call, all alike: what was measured between the calls is no part of them."""
        return [[s for s in self.predicted if s.step == i] for i in sorted({s.step for s in self.predicted})]

    @property
    def _words(self) -> tuple[str, ...]:
        return with_elsewhere(self.submeshes, self.elsewhere)

    def _table(self) -> list[list[str]]:
        if self.predicted and not self.spans:
            return _text.table(self.predicted, self.submeshes, self.unit)
        return _text.table(self.spans, self.submeshes, self.unit, self.elsewhere)

    def figure(self) -> Figure:
        """The picture as a figure of Matplotlib.

        Raises:
          ArgumentError: Matplotlib is not installed.
        """
        return figure(self.title, self.summary, self._words, self.spans, self.predicted, self.unit)

    def html(self) -> str:
        """One page with rows to zoom into, tooltips and a table; it loads nothing."""
        return page(
            self.title, self.summary, self._words, self.steps, self.spans, self.predicted, self._table(), self.unit,
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the timeline in the form that the name asks for.

        Args:
          path: ``.html`` for a page, ``.svg``, ``.png`` or ``.pdf`` for a picture, ``.json`` for a trace that Perfetto and
            ``chrome://tracing`` open, ``.txt`` for text.

        Returns:
          The path.

        Raises:
          ArgumentError: the name ends otherwise, or Matplotlib is missing for a picture.
        """
        path = Path(path)
        writers: dict[str, Callable[[], object]] = {
            ".html": lambda: path.write_text(self.html(), "utf-8"),
            ".json": lambda: path.write_text(
                json.dumps(chrome_trace(self.spans, self._words, self.predicted)), "utf-8"
            ),
            ".txt": lambda: path.write_text(self._text(_WIDTH), "utf-8"),
            **dict.fromkeys((".svg", ".png", ".pdf"), lambda: self.figure().savefig(path)),
        }
        if path.suffix not in writers:
            raise ArgumentError(
                f"a timeline cannot be saved as {path.name!r}; end the name in one of {', '.join(sorted(writers))}"
            )
        writers[path.suffix]()
        return path

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import box
        from rich.segment import Segment
        from rich.table import Table
        from rich.text import Text

        width = min(options.max_width, 200)
        yield Text(f"{self.title}: {self.summary}", style="bold")
        for row in _text.rows(self.spans, self.predicted, len(self.submeshes), width, self.elsewhere):
            yield from row
            yield Segment.line()
        yield Text(_text.legend(self.spans, self.predicted), style="dim")
        head, *rows = self._table()
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for name in head:
            table.add_column(name, justify="left" if name in ("where", "mostly for") else "right", overflow="fold")
        for cells in _folded(rows):
            table.add_row(*cells)
        yield from as_written(console, options, [table])

    def __str__(self) -> str:
        return self._text(page_width(_WIDTH))

    def _text(self, width: int) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=width, color_system=None).print(self, end="")
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __repr__(self) -> str:
        beside = f", {len(self.predicted)} predicted" if self.predicted else ""
        return f"Timeline({self.title}: {self.summary}; {len(self.spans)} spans{beside})"

    def _repr_html_(self) -> str:
        height = 210 + (96 if self.predicted else 54) * len(self.submeshes) + 30 * len(self.submeshes)
        source = html.escape(self.html(), quote=True)
        return f'<iframe srcdoc="{source}" style="width:100%;height:{height}px;border:0" title="{html.escape(self.title)}"></iframe>'


def _folded(rows: Sequence[Sequence[str]], most: int = 16) -> list[Sequence[str]]:
    """Rows, those in the middle left out where there are many."""
    if len(rows) <= most:
        return list(rows)
    half = most // 2
    return [*rows[:half], ["..."] + [""] * (len(rows[0]) - 1), *rows[-half:]]
