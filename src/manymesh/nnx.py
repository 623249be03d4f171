"""Flax NNX: modules as tasks, steps that update modules in place, loops over microbatches, a table of parameters."""

from __future__ import annotations

from ._nnx._jit import Jitted as Jitted
from ._nnx._jit import jit as jit
from ._nnx._microbatch import microbatch as microbatch
from ._nnx._table import tabulate as tabulate
from ._nnx._task import task as task
from ._publish import publish as _publish

__all__ = ["Jitted", "jit", "microbatch", "tabulate", "task"]

_publish(__name__)
