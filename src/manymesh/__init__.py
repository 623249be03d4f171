"""One program on many device meshes: tasks, microbatches and pipeline schedules for JAX.

See the README for an example, and `jit`, `task` and `microbatch` to begin with.
"""

from __future__ import annotations

from . import errors as errors
from . import meta as meta
from . import schedules as schedules
from ._api._jit import jit as jit
from ._api._parallelize import parallelize as parallelize
from ._compiled import Compiled as Compiled
from ._implicit import clear_tasks as clear_tasks
from ._implicit import register_task as register_task
from ._mark import ignore_transforms as ignore_transforms
from ._mark import task as task
from ._mark import with_sharding_constraint as with_sharding_constraint
from ._microbatch import WeightedMean as WeightedMean
from ._microbatch import microbatch as microbatch
from ._task import Task as Task
from ._topology import planned_devices as planned_devices
from ._topology import submeshes as submeshes

__all__ = [
    "Compiled",
    "Task",
    "WeightedMean",
    "clear_tasks",
    "errors",
    "ignore_transforms",
    "jit",
    "meta",
    "microbatch",
    "parallelize",
    "planned_devices",
    "register_task",
    "schedules",
    "submeshes",
    "task",
    "with_sharding_constraint",
]
