"""Looking at programs and runs: what ran where and when, where the pieces of arrays are, what a model consists of."""

from __future__ import annotations

from ._progress import Progress as Progress
from ._progress import progress as progress
from ._publish import publish as _publish
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
    "Piece",
    "Placement",
    "Placements",
    "Progress",
    "Recording",
    "Span",
    "Timeline",
    "progress",
    "record",
    "tabulate",
    "visualize",
]

_publish(__name__)
