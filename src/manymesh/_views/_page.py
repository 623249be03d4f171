"""A timeline as one page of HTML that loads nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources

from ._spans import Span, chunks


def page(
    title: str,
    summary: str,
    submeshes: Sequence[str],
    steps: Sequence[str],
    spans: Sequence[Span],
    predicted: Sequence[Span],
    table: Sequence[Sequence[str]],
    unit: str = "s",
) -> str:
    """The page.

    Args:
      title: its title.
      summary: the line below.
      submeshes: the submeshes in words.
      steps: names of the recorded calls.
      spans, predicted: what was measured, and what was predicted.
      table: rows of the table below the picture, the head first.
      unit: of times; nothing where they have none.
    """
    shades = chunks((*spans, *predicted))
    data = {
        "summary": summary, "unit": unit, "shades": [[*key, round(value, 3)] for key, value in shades.items() if value], "submeshes": list(submeshes), "steps": list(steps), "fields": Span._fields,
        "spans": [_row(s) for s in spans], "predicted": [_row(s) for s in predicted], "table": [list(r) for r in table],
    }  # fmt: skip
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = resources.files(__package__).joinpath("timeline.html").read_text("utf-8")
    return template.replace("__TITLE__", html.escape(title)).replace("__DATA__", text)


def _row(span: Span) -> list[object]:
    """The fields, times to a tenth of a microsecond, as no clock here is finer."""
    return list(span._replace(start=round(span.start, 7), end=round(span.end, 7)))
