"""Draw a timeline in characters."""

from __future__ import annotations

from .._errors import ScheduleError
from ._draw import draw
from ._simulate import Simulation, simulate
from ._types import Order


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

    Raises:
      ScheduleError: it is neither.

    Example:
      >>> from manymesh.schedules import OneFOneB
      >>> print(picture(OneFOneB().order((0, 1, 2), 4)))
      0 | 0>1>2>........0<<<3>1<<<..2<<<..3<<<
      1 | ..0>1>....0<<<2>1<<<3>2<<<..3<<<....
      2 | ....0>0<<<1>1<<<2>2<<<3>3<<<........
      > forward  < backward  w weight gradient  . waiting; makespan 18, bubble 33.3%
    """
    if not isinstance(what, Simulation | Order):
        raise ScheduleError(
            f"picture: expected a Simulation or an Order, found {type(what).__name__} {what!r:.80}; write "
            "picture(simulate(schedule, stages, num_microbatches))."
        )
    return draw(what if isinstance(what, Simulation) else simulate(what))
