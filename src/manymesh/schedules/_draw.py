"""A timeline as rows of characters, plain or in colours."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Protocol

from ._types import Action

_WIDTH = 100
_CUT = " ~ "
_FILL = {"F": ">", "B": "<", "W": "w"}
_LEGEND = "> forward  < backward  w weight gradient  . waiting"
_COLOURS = {">": "#3f7fd6", "<": "#d9731f", "w": "#3d9a63"}
_RUN = re.compile(r"[a-z]?[0-9]*>+|[a-z]?[0-9]*<+|[a-z]?[0-9]+w+|w+")


class Placed(Protocol):
    """An action with its times, as `Slot` is."""

    @property
    def submesh(self) -> int:
        """Where."""

    @property
    def action(self) -> Action:
        """What."""

    @property
    def start(self) -> float:
        """From when."""

    @property
    def end(self) -> float:
        """Until when."""


class Timed(Protocol):
    """What can be drawn, as `Simulation` is."""

    @property
    def makespan(self) -> float:
        """Its whole time."""

    @property
    def bubble_fraction(self) -> float:
        """The part of it that is spent on waiting."""

    @property
    def live_activations(self) -> Sequence[int]:
        """One entry for each submesh."""

    @property
    def timeline(self) -> Sequence[Placed]:
        """Every action."""


def draw(simulation: Timed) -> str:
    """The rows and a legend; see `manymesh.schedules.picture`."""
    submeshes = len(simulation.live_activations)
    margin = len(str(submeshes - 1))
    width = _WIDTH - margin - 3
    letters = _letters(simulation.timeline)
    letter = max(map(len, letters.values()))
    scale, with_letters = _scale(simulation, width, letter)
    if not with_letters:
        letters = dict.fromkeys(letters, "")
    columns = max(1, round(simulation.makespan * scale))
    rows = [["."] * columns for _ in range(submeshes)]
    for slot in simulation.timeline:
        # At least one column, so that a short action beside long ones is still seen.
        first = min(round(slot.start * scale), columns - 1)
        last = max(round(slot.end * scale), first + 1)
        rows[slot.submesh][first:last] = _cell(slot, letters[slot.action.stage], last - first)
    lines = [f"{submesh:{margin}} | {_fit(''.join(row), width)}" for submesh, row in enumerate(rows)]
    cut = "  ~ left out" if columns > width else ""
    cost = f"; makespan {simulation.makespan:.6g}, bubble {simulation.bubble_fraction:.1%}"
    return "\n".join([*lines, _LEGEND + cut + cost])


def draw_html(simulation: Timed) -> str:
    """The same in colours, for notebooks."""
    *rows, legend = draw(simulation).split("\n")

    def coloured(run: re.Match[str]) -> str:
        return f'<span style="color:#fff;background:{_COLOURS[run[0][-1]]}">{html.escape(run[0])}</span>'

    lines = [f"{head} | {_RUN.sub(coloured, row)}" for head, _, row in (line.partition(" | ") for line in rows)]
    return f'<pre style="line-height:1.35;margin:0">{chr(10).join(lines)}\n{html.escape(legend)}</pre>'


def _scale(simulation: Timed, width: int, letter: int) -> tuple[float, bool]:
    """Columns per unit of time, so that an action has room for its number, and whether also for its letter."""
    durations = [slot.end - slot.start for slot in simulation.timeline if slot.end > slot.start]
    if not durations:
        return 0.0, False
    # One very short stage must not stretch the picture until nothing else is left in it.
    shortest = max(min(durations), max(durations) / 4)
    units = simulation.makespan / shortest
    least = max(len(str(slot.action.microbatch)) for slot in simulation.timeline) + 1
    # A hair more than the quotient, because times that are not whole add up with an error.
    columns = min(max(int(width / units + 1e-9), least), least + letter)
    return columns / shortest, columns == least + letter


def _cell(slot: Placed, letter: str, width: int) -> str:
    number = str(slot.action.microbatch)
    # At least one column tells the kind.
    text = next(text for text in (letter + number, number, "") if len(text) < width)
    return text.ljust(width, _FILL[slot.action.kind])


def _fit(row: str, width: int) -> str:
    if len(row) <= width:
        return row
    half = (width - len(_CUT)) // 2
    return row[:half] + _CUT + row[-half:]


def _letters(timeline: Sequence[Placed]) -> dict[int, str]:
    """Stage -> the letter that tells it from the others on its submesh, or nothing if alone."""
    local: dict[int, list[int]] = {}
    for submesh, stage in sorted({(slot.submesh, slot.action.stage) for slot in timeline}):
        local.setdefault(submesh, []).append(stage)
    return {
        stage: "" if len(stages) == 1 else "abcdefghijklmnopqrstuvwxyz"[min(i, 25)]
        for stages in local.values()
        for i, stage in enumerate(stages)
    }
