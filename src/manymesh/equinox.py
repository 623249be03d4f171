"""Equinox: steps in the manner of ``eqx.filter_jit``, and modules as tasks."""

from __future__ import annotations

from ._equinox._jit import Jitted as Jitted
from ._equinox._jit import jit as jit
from ._equinox._task import task as task
from ._publish import publish as _publish
from ._table import tabulate as tabulate

__all__ = ["Jitted", "jit", "tabulate", "task"]

_publish(__name__)
