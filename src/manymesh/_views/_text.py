"""A timeline in characters, and the table of where the time goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from rich.segment import Segment
from rich.style import Style

from ._spans import KINDS, Span, busy, extent
from ._words import format_seconds

FILL = {"forward": ">", "backward": "<", "weight": "w", "other": "o"}
_WAITING = "."
ELSEWHERE = "recorded in another process"
_LEGEND = {"forward": "forward", "backward": "backward", "weight": "weight gradient", "other": "outside loops"}
_STYLES = {
    "forward": Style(color="white", bgcolor="#3f7fd6"),
    "backward": Style(color="white", bgcolor="#d9731f"),
    "weight": Style(color="white", bgcolor="#3d9a63"),
    "other": Style(color="white", bgcolor="#8d95a5"),
    None: Style(dim=True),
}


def rows(
    spans: Sequence[Span], predicted: Sequence[Span], submeshes: int, width: int, elsewhere: Collection[int] = ()
) -> list[list[Segment]]:
    """The rows of the picture, each a list of segments; at most ``width`` characters wide.

    A span is its microbatch's number followed by ``>`` forward, ``<`` backward, ``w`` weight gradient or ``o`` for what
    runs outside loops; ``.`` is waiting. A character shows what takes most of its stretch of time.
    """
    margin = len(str(max(submeshes - 1, 0)))
    columns = max(width - margin - 3, 10)
    begin, end = extent([*spans, *predicted])
    drawn = []
    for s in range(submeshes):
        if s in elsewhere and (spans or not predicted):
            drawn.append([Segment(f"{s:{margin}} | {ELSEWHERE}")])
        measured = () if s in elsewhere else spans
        for which, head in ((measured, f"{s:{margin}} | "), (predicted, f"{'':{margin}} ' ")):
            if which:
                drawn.append([Segment(head), *_cells([x for x in which if x.submesh == s], begin, end, columns)])
    return drawn


def legend(spans: Sequence[Span], predicted: Sequence[Span]) -> str:
    """What the characters mean."""
    kinds = {s.kind for s in (*spans, *predicted)}
    words = [f"{FILL[k]} {_LEGEND[k]}" for k in KINDS if k in kinds and k in FILL]
    words += ["' predicted"] if predicted else []
    return "  ".join([*words, f"{_WAITING} waiting"])


def _cells(spans: Sequence[Span], begin: float, end: float, columns: int) -> list[Segment]:
    """A row: for each column the span that has most of it."""
    scale = columns / max(end - begin, 1e-12)
    share: list[dict[int, float]] = [defaultdict(float) for _ in range(columns)]  # column -> span -> its part of it
    computing = [s for s in spans if s.kind != "transfer"]
    for i, s in enumerate(computing):
        low, high = (s.start - begin) * scale, (s.end - begin) * scale
        for column in range(int(low), min(int(high) + 1, columns)):
            share[column][i] += min(high, column + 1) - max(low, column)
    owner: list[int | None] = []
    for parts in share:
        most = max(parts, key=lambda i: parts[i], default=None)
        owner.append(
            most
            if most is not None and parts[most] >= min(0.5, sum(parts.values()) / 2) and sum(parts.values()) >= 0.5
            else None
        )
    segments = []
    at = 0
    while at < columns:
        last = at
        while last + 1 < columns and owner[last + 1] == owner[at]:
            last += 1
        which = owner[at]
        segments.append(_segment(None if which is None else computing[which], last - at + 1))
        at = last + 1
    return segments


def _segment(span: Span | None, width: int) -> Segment:
    if span is None:
        return Segment(_WAITING * width, _STYLES[None])
    number = "" if span.microbatch is None else str(span.microbatch)
    text = number if len(number) < width else ""
    return Segment(text.ljust(width, FILL[span.kind]), _STYLES[span.kind])


def table(
    spans: Sequence[Span], submeshes: Sequence[str], unit: str = "s", elsewhere: Collection[int] = ()
) -> list[list[str]]:
    """Where the time of each submesh goes, the head first; nothing is known of those that are recorded elsewhere."""
    kinds = [k for k in KINDS if k != "transfer" and any(s.kind == k for s in spans)]
    begin, end = extent(spans)
    found = [["submesh", "where", "busy", *(_LEGEND[k] for k in kinds), "waits", "mostly for"]]
    for i, words in enumerate(submeshes):
        if i in elsewhere:
            found.append([str(i), words, *[""] * (len(kinds) + 2), ELSEWHERE])
            continue
        own = [s for s in spans if s.submesh == i and s.kind != "transfer"]
        works = busy(spans, i)
        part = works / (end - begin) if end > begin else 0.0
        times = [format_seconds(sum(s.seconds for s in own if s.kind == k), unit) for k in kinds]
        found.append(
            [
                str(i),
                words,
                f"{part:.0%}",
                *times,
                format_seconds(end - begin - works, unit),
                _mostly(own, begin, end, unit),
            ]
        )
    return found


def _mostly(own: Sequence[Span], begin: float, end: float, unit: str) -> str:
    """What a submesh waits for longest: a task, a transfer, its first work, or the end of the others."""
    waits: dict[str, float] = defaultdict(float)
    at = begin
    for k, s in enumerate(own):
        if s.start > at:
            waits["its first work" if k == 0 else s.waited_for or "its turn"] += s.start - at
        at = max(at, s.end)
    waits["the others to end"] += end - at
    what, seconds = max(waits.items(), key=lambda item: item[1])
    return f"{what} ({format_seconds(seconds, unit)})" if seconds > 0 else ""
