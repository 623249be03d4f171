"""Looking at programs and runs: what ran where and when, where the pieces of arrays are, what a model consists of."""

from __future__ import annotations

from ._publish import publish as _publish
from ._views._compare import Comparison as Comparison
from ._views._compare import Difference as Difference
from ._views._recording import Recording as Recording
from ._views._recording import record as record
from ._views._spans import Span as Span
from ._views._timeline import Timeline as Timeline

__all__ = ["Comparison", "Difference", "Recording", "Span", "Timeline", "record"]

_publish(__name__)
