"""A timeline as a picture, drawn by Matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._errors import ArgumentError
from ._spans import KINDS, Span, chunks, extent

if TYPE_CHECKING:  # imported when a picture is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "forward": "#3f7fd6",
    "backward": "#e5822f",
    "weight": "#3d9a63",
    "other": "#8d95a5",
    "transfer": "#9a63c4",
}
WORDS = {
    "forward": "forward",
    "backward": "backward",
    "weight": "weight gradient",
    "other": "outside loops",
    "transfer": "transfer",
}
_INK, _SOFT, _LANE = "#1d2330", "#667085", "#f1f3f7"


def figure(
    title: str,
    summary: str,
    submeshes: Sequence[str],
    spans: Sequence[Span],
    predicted: Sequence[Span] = (),
    time_unit: str = "s",
) -> Figure:
    """The picture: a row for each submesh, transfers as a thin line below it, predictions paler below that.

    Raises:
      ArgumentError: Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(
            "a picture is drawn by Matplotlib, which is not installed: pip install 'manymesh[inspect]'; pages (.html) and "
            "traces (.json) need nothing"
        ) from error
    rows = max(len(submeshes), 1)
    pitch = 1.9 if predicted else 1.0
    drawn = Figure(figsize=(11, 1.35 + 0.52 * pitch * rows), dpi=150, layout="constrained")
    axes = drawn.subplots()
    begin, end = extent([*spans, *predicted])
    unit, word = (1e3, "milliseconds") if time_unit and end - begin < 1 else (1.0, "seconds" if time_unit else "time")
    whole = max(end - begin, 1e-9) * unit
    for i in range(rows):
        axes.axhspan(i * pitch - 0.34, i * pitch + 0.34, color=_LANE, lw=0)
        _bars(axes, [s for s in spans if s.submesh == i], i * pitch, begin, unit, whole, 1.0)
        _bars(axes, [s for s in predicted if s.submesh == i], i * pitch + 0.9, begin, unit, whole, 0.45)
    axes.set_xlim(0, whole)
    axes.set_ylim(rows * pitch - (0.4 if predicted else 0.45), -0.5)
    labels = [(i * pitch, f"submesh {i}\n{_short(words)}") for i, words in enumerate(submeshes)]
    if predicted:
        labels += [(i * pitch + 0.9, "predicted") for i in range(rows)]
    axes.set_yticks([y for y, _ in labels], [text for _, text in labels], parse_math=False, fontsize=8.5, color=_INK)
    axes.tick_params(length=0, labelcolor=_INK)
    axes.set_xlabel(word, fontsize=9, color=_SOFT)
    axes.grid(axis="x", color="#e3e7ee", lw=0.7)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(f"{title}\n", loc="left", parse_math=False, fontsize=12, fontweight="bold", color=_INK)
    axes.text(0, 1.02, summary, transform=axes.transAxes, fontsize=9, color=_SOFT, va="bottom")
    _legend(axes, {s.kind for s in (*spans, *predicted)})
    return drawn


def _bars(
    axes: Axes, spans: Sequence[Span], y: float, begin: float, unit: float, whole: float, strength: float
) -> None:
    """The bars of one row, with the number of the microbatch where it fits; later stages of a submesh are paler."""
    from matplotlib.colors import to_rgba

    chunk = chunks(spans)
    for kind in KINDS:
        which = [s for s in spans if s.kind == kind]
        shades = [
            to_rgba(COLOURS[kind], strength * (1 - 0.4 * chunk.get((s.submesh, s.stage or 0), 0.0))) for s in which
        ]
        stretches = [((s.start - begin) * unit, s.seconds * unit) for s in which]
        low, high = (y + 0.36, 0.1) if kind == "transfer" else (y - 0.32, 0.64)
        axes.broken_barh(
            stretches, (low, high), facecolors=shades, edgecolor="white",
            linewidth=0.0 if kind == "transfer" else 0.4,
        )  # fmt: skip
        if kind == "transfer":
            continue
        for s, (start, wide) in zip(which, stretches, strict=True):
            text = s.label if s.microbatch is None else str(s.microbatch)
            if wide / whole * _LETTERS > len(text) + 0.6:
                axes.text(
                    start + wide / 2, y, text, ha="center", va="center", parse_math=False, fontsize=7, clip_on=True,
                    color="white" if strength == 1.0 else _INK,
                )  # fmt: skip


_LETTERS = 150  # of that size in the width of the picture


def _legend(axes: Axes, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLOURS[k], label=WORDS[k]) for k in KINDS if k in kinds]
    if patches:
        axes.legend(
            handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(patches), frameon=False, fontsize=8.5,
            handlelength=1, handleheight=1, columnspacing=1.2, handletextpad=0.5, labelcolor=_INK,
        )  # fmt: skip


def _short(words: str) -> str:
    return words if len(words) <= 34 else words.rsplit(", ", 1)[-1]
