"""``trace``: look at a recorded run, or write it in another form."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .._errors import ArgumentError
from .._views._recording import Recording
from .._views._spans import Prediction, bubble_fraction, spans_of
from ._parser import add_json, console, print_json

NAME = "trace"
HELP = "look at a recorded run, or write it as a page, a picture or a trace"

_DESCRIPTION = """Shows a run that was recorded:

    with mm.inspect.record() as run:
        step(state, batch)
    run.save("run.json")

The file also opens in https://ui.perfetto.dev as it is."""

_EPILOG = """
examples:
  python -m manymesh trace run.json                                as text
  python -m manymesh trace run.json --out run.html                 a page to zoom into; loads nothing
  python -m manymesh trace run.json --out run.svg --out run.png    pictures (needs matplotlib)
  python -m manymesh trace run.json --prediction predicted.json    what is off, and by how much

A prediction is a JSON list of [submesh, label, kind, stage, microbatch, start, end] in seconds, or another recording.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `COMMANDS`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("recording", metavar="RUN.json", help="what Recording.save wrote")
    parser.add_argument(
        "--out", action="append", default=[], metavar="FILE",
        help="write it: .html, .svg, .png, .pdf, .txt, or .json for Perfetto; may be given several times",
    )  # fmt: skip
    parser.add_argument("--prediction", metavar="FILE.json", help="show this beside it, and what is off")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """See `COMMANDS`."""
    recording = Recording.load(args.recording)
    prediction = None if args.prediction is None else _prediction(args.prediction)
    timeline = recording.timeline(prediction)
    saved = [str(timeline.save(path)) for path in args.out]
    comparison = None if prediction is None else recording.compare(prediction)
    if args.json:
        print_json({
            "steps": recording.steps, "submeshes": recording.submeshes,
            "elsewhere": recording.elsewhere, "seconds": recording.seconds,
            "bubble_fraction": bubble_fraction(recording.spans), "saved": saved, "comparison": comparison,
            "spans": [s._asdict() for s in recording.spans],
        })  # fmt: skip
        return 0
    out = console()
    if not saved:
        out.print(timeline, end="")
    if comparison is not None:
        out.print(comparison)
    for path in saved:
        out.print(f"saved {path}", soft_wrap=True)
    return 0


def _prediction(path: str) -> Prediction:
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ArgumentError(f"{path} is no JSON: {error}") from None
    if isinstance(data, dict) and "manymesh" in data:
        return Recording.load(path).spans
    return spans_of(data)
