"""Flax Linen: modules as tasks, parameters with named axes, a table of them, and a whole training step."""

from __future__ import annotations

from ._flax._axes import shard_axes as shard_axes
from ._flax._step import TrainStep as TrainStep
from ._flax._step import parallelize_step as parallelize_step
from ._flax._task import task as task
from ._publish import publish as _publish
from ._table import ParameterRow as ParameterRow
from ._table import ParameterTable as ParameterTable
from ._table import tabulate as tabulate

__all__ = ["ParameterRow", "ParameterTable", "TrainStep", "parallelize_step", "shard_axes", "tabulate", "task"]

_publish(__name__)
