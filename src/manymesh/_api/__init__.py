"""`mm.jit`, `mm.parallelize`, and the forms a step takes: what the package's face loads on first use."""

from __future__ import annotations

from .._compiled import Compiled as Compiled
from .._program._fragments import Program as Program
from .._publish import publish
from .._report import Report as Report
from .._runtime._fetch import fetch as fetch
from ._jit import Jitted as Jitted
from ._jit import jit as jit
from ._lowered import Lowered as Lowered
from ._parallelize import parallelize as parallelize
from ._traced import Traced as Traced

__all__ = ["Compiled", "Jitted", "Lowered", "Program", "Report", "Traced", "fetch", "jit", "parallelize"]

publish("manymesh", module=__name__)
