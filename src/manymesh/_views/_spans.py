"""`Span`: a stretch of time on a submesh, measured or predicted. The one form that recordings and predictions share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import NamedTuple

from .._errors import ArgumentError
from ..schedules import Simulation

KINDS = ("forward", "backward", "weight", "other", "transfer")
_LONG = {"F": "forward", "B": "backward", "W": "weight"}


class Span(NamedTuple):
    """A stretch of time that a submesh spends on one thing.

    A prediction is a list of spans, or of plain tuples of the first seven fields.

    Attributes:
      submesh: which; of a transfer the one where it arrives.
      label: name of the fragment (``front``, ``front_bwd``, ``after_0``); of a transfer ``front -> submesh 1``.
      kind: ``forward``, ``backward``, ``weight`` (the half of a split backward pass that makes weight gradients),
        ``other`` (what runs outside microbatch loops) or ``transfer``.
      stage: the pipeline stage, of a transfer that of its maker; None outside loops.
      microbatch: which; None outside loops.
      start, end: seconds since the beginning.
      step: which of the recorded calls, from 0.
      source: of a transfer, the submesh it comes from.
      nbytes: of a transfer, the bytes of the whole values, all shards together; what is replicated over n devices arrives n
        times and counts once.
      carries: of a transfer, what it carries.
      waited_for: what it was that the submesh had to wait for before the start, if it waited.
    """

    submesh: int
    label: str
    kind: str
    stage: int | None
    microbatch: int | None
    start: float
    end: float
    step: int = 0
    source: int | None = None
    nbytes: int = 0
    carries: str = ""
    waited_for: str = ""

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


Prediction = Simulation | Iterable[Sequence[object]]
"""Spans, plain tuples of their first seven fields, a `manymesh.schedules.Simulation`, or what has them as ``spans``."""


def spans_of(prediction: object) -> tuple[Span, ...]:
    """A prediction as spans.

    Args:
      prediction: spans, tuples of their first seven fields, a simulation in seconds, or an object with ``spans``.

    Raises:
      ArgumentError: it is something else.
    """
    if isinstance(prediction, Simulation):
        return tuple(
            Span(slot.submesh, f"stage {slot.action.stage}", _LONG[slot.action.kind], slot.action.stage,
                 slot.action.microbatch, slot.start, slot.end)
            for slot in prediction.timeline
        )  # fmt: skip
    rows = getattr(prediction, "spans", prediction)
    if not isinstance(rows, Iterable):
        raise ArgumentError(
            f"a prediction has to be a list of spans (submesh, label, kind, stage, microbatch, start, end), a simulation "
            f"of manymesh.schedules, or to have spans; found {type(prediction).__name__}"
        )
    return tuple(_span(i, row) for i, row in enumerate(rows))


def calls_of(predicted: Sequence[Span]) -> list[list[Span]]:
    """The calls of a prediction, each from its own beginning: one, but where another recording is the prediction."""
    found: dict[int, list[Span]] = {}
    for s in predicted:
        found.setdefault(s.step, []).append(s)
    if len(found) < 2:
        return [*found.values()]
    calls = [found[i] for i in sorted(found)]
    begins = [extent(call)[0] for call in calls]
    return [[s._replace(start=s.start - t, end=s.end - t) for s in call] for call, t in zip(calls, begins, strict=True)]


def _span(i: int, row: object) -> Span:
    if isinstance(row, Span):
        return row
    fields = tuple(row) if isinstance(row, Iterable) else (row,)
    if not 7 <= len(fields) <= len(Span._fields):
        raise ArgumentError(
            f"row {i} of the prediction has to be (submesh, label, kind, stage, microbatch, start, end), found {row!r}"
        )
    span = Span(*fields)
    return checked(span._replace(kind=_LONG.get(str(span.kind), span.kind)), f"row {i} of the prediction")


def checked(span: Span, what: str) -> Span:
    """A span that can be drawn and compared.

    Args:
      span: from the user, or from a file.
      what: it is, for the message.

    Raises:
      ArgumentError: it is of no kind, on no submesh, or its times are no stretch of time.
    """
    if span.kind not in KINDS:
        raise ArgumentError(f"{what} is of kind {span.kind!r}; kinds are {', '.join(KINDS)}")
    if not isinstance(span.submesh, Integral) or span.submesh < 0:
        raise ArgumentError(f"{what} is on submesh {span.submesh!r}; expected is its number, from 0")
    times = span.start, span.end
    if not all(isinstance(t, Real) and math.isfinite(t) for t in times) or span.end < span.start:
        raise ArgumentError(
            f"{what} starts at {span.start!r} and ends at {span.end!r}; expected are two numbers of seconds, the end not before "
            "the start"
        )
    return span


def chunks(spans: Iterable[Span]) -> dict[tuple[int, int], float]:
    """(submesh, stage) -> from 0 for its first stage up to 1 for its last, where a submesh has several."""
    stages: dict[int, set[int]] = {}
    for s in spans:
        if s.stage is not None and s.kind != "transfer":
            stages.setdefault(s.submesh, set()).add(s.stage)
    return {
        (submesh, stage): i / (len(found) - 1) if len(found) > 1 else 0.0
        for submesh, found in stages.items()
        for i, stage in enumerate(sorted(found))
    }


def extent(spans: Sequence[Span]) -> tuple[float, float]:
    """When the first one starts and the last one ends; zeros where there is none."""
    return (min((s.start for s in spans), default=0.0), max((s.end for s in spans), default=0.0))


def busy(spans: Iterable[Span], submesh: int) -> float:
    """Seconds that a submesh computes: transfers do not count, and what overlaps counts once."""
    total = end = 0.0
    first = True
    for s in sorted((s for s in spans if s.submesh == submesh and s.kind != "transfer"), key=lambda s: s.start):
        begin = s.start if first else max(s.start, end)
        first, end, total = False, max(end, s.end) if not first else s.end, total + max(0.0, s.end - begin)
    return total


def bubble_fraction(spans: Sequence[Span]) -> float:
    """The part of their time that the submeshes with work to do wait, in [0, 1)."""
    begin, end = extent(spans)
    submeshes = {s.submesh for s in spans if s.kind != "transfer"}
    whole = len(submeshes) * (end - begin)
    return max(0.0, 1 - sum(busy(spans, s) for s in submeshes) / whole) if whole > 0 else 0.0
