"""Looking at programs and runs: what a step will cost, what ran where and when, where the pieces of arrays are.

``mm.jit(step).lower(...).report(Hardware.h100())`` is what a step will cost, also on devices that nobody here has;
``with record() as run: step(...)`` what it did. `docs/planning.md` and `docs/inspect.md` have examples.
"""

from __future__ import annotations

from ._cost._clock import Durations as Durations
from ._hardware import Hardware as Hardware
from ._progress import Progress as Progress
from ._progress import progress as progress
from ._publish import publish as _publish
from ._report import Memory as Memory
from ._report import Report as Report
from ._views._compare import Comparison as Comparison
from ._views._compare import Difference as Difference
from ._views._recording import Recording as Recording
from ._views._recording import record as record
from ._views._spans import Span as Span
from ._views._tabulate import tabulate as tabulate
from ._views._timeline import Timeline as Timeline
from ._views._visualize import Piece as Piece
from ._views._visualize import Placement as Placement
from ._views._visualize import Placements as Placements
from ._views._visualize import visualize as visualize

__all__ = [
    "Comparison",
    "Difference",
    "Durations",
    "Hardware",
    "Memory",
    "Piece",
    "Placement",
    "Placements",
    "Progress",
    "Recording",
    "Report",
    "Span",
    "Timeline",
    "progress",
    "record",
    "tabulate",
    "visualize",
]

_publish(__name__)
