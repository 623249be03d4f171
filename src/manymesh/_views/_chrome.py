"""A timeline as trace events, which Perfetto and ``chrome://tracing`` open.

The format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._spans import Span

_COLOURS = {  # names that the viewers know
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "weight": "good",
    "other": "grey",
    "transfer": "thread_state_runnable",
}


def chrome_trace(spans: Sequence[Span], submeshes: Sequence[str], predicted: Sequence[Span] = ()) -> dict[str, Any]:
    """The trace: a process for each submesh, with a track for computing and one for what arrives.

    Args:
      spans: what was measured.
      submeshes: the submeshes in words.
      predicted: what was predicted; on tracks of its own.
    """
    events: list[dict[str, Any]] = []
    for i, words in enumerate(submeshes):
        events.append(_named("process_name", i, 0, f"submesh {i} ({words})"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": i, "tid": 0, "args": {"sort_index": i}})
    tracks = {(s.submesh, _track(s, False)) for s in spans} | {(s.submesh, _track(s, True)) for s in predicted}
    for submesh, track in sorted(tracks):
        events.append(_named("thread_name", submesh, track, _TRACKS[track]))
    events += [_event(s, _track(s, False)) for s in spans]
    events += [_event(s, _track(s, True)) for s in predicted]
    return {"displayTimeUnit": "ms", "traceEvents": events}


_TRACKS = ("computes", "receives", "computes, predicted", "receives, predicted")


def _track(span: Span, predicted: bool) -> int:
    return (span.kind == "transfer") + 2 * predicted


def _named(name: str, pid: int, tid: int, words: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": words}}


def _event(span: Span, track: int) -> dict[str, Any]:
    args = {
        "kind": span.kind, "stage": span.stage, "microbatch": span.microbatch, "step": span.step,
        "from submesh": span.source, "bytes": span.nbytes or None, "carries": span.carries or None,
        "waited for": span.waited_for or None,
    }  # fmt: skip
    name = span.label if span.microbatch is None else f"{span.label} [{span.microbatch}]"
    return {
        "ph": "X", "name": name, "cat": span.kind, "pid": span.submesh, "tid": track, "ts": span.start * 1e6,
        "dur": span.seconds * 1e6, "cname": _COLOURS[span.kind], "args": {k: v for k, v in args.items() if v is not None},
    }  # fmt: skip
