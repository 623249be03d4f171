"""Looking at a step before it runs: what it will cost, also on devices that nobody here has.

``mm.jit(step).lower(...).report(Hardware.h100())`` is the whole of it; `docs/planning.md` has an example.
"""

from ._cost._clock import Durations as Durations
from ._hardware import Hardware as Hardware
from ._report import Memory as Memory
from ._report import Report as Report

__all__ = ["Durations", "Hardware", "Memory", "Report"]
