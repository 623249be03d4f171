"""Draw a timeline in characters."""

from __future__ import annotations

from ._simulate import Simulation, Slot, simulate
from ._types import Order

_WIDTH = 100
_CUT = " ~ "
_FILL = {"F": ">", "B": "<", "W": "w"}
_LEGEND = "> forward  < backward  w weight gradient  . waiting"


def picture(what: Simulation | Order) -> str:
    """The timeline as text, one row per submesh, at most 100 columns wide.

    An action is its microbatch number followed by ``>`` for a forward, ``<`` for a backward
    or ``w`` for a weight gradient, as wide as it is long; ``.`` is waiting. On a submesh
    with several stages a letter before the number says which, if there is room: ``a`` for
    its first, ``b`` for its second. What does not fit is left out of the middle, where
    schedules repeat themselves, and ``~`` marks the cut. An action much shorter than the
    others may show only its arrow.

    Args:
      what: a simulation, or an order, which is then simulated with a forward of 1 and a
        backward of 2.

    Returns:
      Lines of at most 100 characters, the last one a legend.

    Example:
      >>> from manymesh.schedules import OneFOneB
      >>> print(picture(OneFOneB().order((0, 1, 2), 4)))
      0 | 0>1>2>........0<<<3>1<<<..2<<<..3<<<
      1 | ..0>1>....0<<<2>1<<<3>2<<<..3<<<....
      2 | ....0>0<<<1>1<<<2>2<<<3>3<<<........
      > forward  < backward  w weight gradient  . waiting; makespan 18, bubble 33.3%
    """
    simulation = what if isinstance(what, Simulation) else simulate(what)
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


def _scale(simulation: Simulation, width: int, letter: int) -> tuple[float, bool]:
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


def _cell(slot: Slot, letter: str, width: int) -> str:
    number = str(slot.action.microbatch)
    # At least one column tells the kind.
    text = next(text for text in (letter + number, number, "") if len(text) < width)
    return text.ljust(width, _FILL[slot.action.kind])


def _fit(row: str, width: int) -> str:
    if len(row) <= width:
        return row
    half = (width - len(_CUT)) // 2
    return row[:half] + _CUT + row[-half:]


def _letters(timeline: tuple[Slot, ...]) -> dict[int, str]:
    """Stage -> the letter that tells it from the others on its submesh, or nothing if alone."""
    local: dict[int, list[int]] = {}
    for submesh, stage in sorted({(slot.submesh, slot.action.stage) for slot in timeline}):
        local.setdefault(submesh, []).append(stage)
    return {
        stage: "" if len(stages) == 1 else "abcdefghijklmnopqrstuvwxyz"[min(i, 25)]
        for stages in local.values()
        for i, stage in enumerate(stages)
    }
