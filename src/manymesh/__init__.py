"""One program on many device meshes: tasks, microbatches and pipeline schedules for JAX.

See the README for an example, and `jit`, `task` and `microbatch` to begin with.
"""

from __future__ import annotations

import contextlib as _contextlib
import importlib as _importlib
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import _mark
from . import distributed as distributed
from . import errors as errors
from . import meta as meta
from . import schedules as schedules
from ._implicit import clear_tasks as clear_tasks
from ._implicit import register_task as register_task
from ._mark import ignore_transforms as ignore_transforms
from ._mark import task as task
from ._mark import with_sharding_constraint as with_sharding_constraint
from ._microbatch import microbatch as microbatch
from ._publish import publish as _publish
from ._reductions import WeightedMean as WeightedMean
from ._task import Task as Task
from ._topology import planned_devices as planned_devices
from ._topology import submeshes as submeshes

__all__ = [
    "Compiled",
    "Jitted",
    "Lowered",
    "Program",
    "Report",
    "Task",
    "Traced",
    "WeightedMean",
    "__version__",
    "clear_tasks",
    "distributed",
    "errors",
    "fetch",
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

# Loaded when first asked for. Modules: each needs packages that not everybody has, or that take their time.
_LAZY = ("checkpoint", "equinox", "flax", "inspect", "nnx")
# Names: of the parts that compile and run steps, which take longer to load than all others together.
_LAZY_NAMES = ("Compiled", "Jitted", "Lowered", "Program", "Report", "Traced", "fetch", "jit", "parallelize")

__version__: str

if _TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import equinox as equinox
    from . import flax as flax
    from . import inspect as inspect
    from . import nnx as nnx
    from ._api import Compiled as Compiled
    from ._api import Jitted as Jitted
    from ._api import Lowered as Lowered
    from ._api import Program as Program
    from ._api import Report as Report
    from ._api import Traced as Traced
    from ._api import fetch as fetch
    from ._api import jit as jit
    from ._api import parallelize as parallelize


if not _TYPE_CHECKING:

    def __getattr__(name: str) -> _Any:
        if name in _LAZY:
            return _importlib.import_module(f"{__name__}.{name}")
        if name in _LAZY_NAMES:
            globals()[name] = getattr(_importlib.import_module(f"{__name__}._api"), name)
            return globals()[name]
        if name == "__version__":  # looking it up takes longer than importing a module
            return _importlib.import_module("importlib.metadata").version(__name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY})


def _nnx_scopes(scopes_mean_tasks: bool) -> _contextlib.AbstractContextManager[None]:
    """Modules of NNX open scopes with their paths, where the program may have such modules."""
    if not scopes_mean_tasks or "flax.nnx" not in _sys.modules:
        return _contextlib.nullcontext()
    naming: _contextlib.AbstractContextManager[None] = _importlib.import_module(f"{__name__}._nnx._names").naming()
    return naming


def _flax_constraints(scopes_mean_tasks: bool) -> _contextlib.AbstractContextManager[None]:
    """Constraints of Linen outside of tasks travel with their values, where the program may have such constraints."""
    if "flax.linen" not in _sys.modules:
        return _contextlib.nullcontext()
    linen = _importlib.import_module(f"{__name__}._flax._constraints")
    travelling: _contextlib.AbstractContextManager[None] = linen.travelling()
    return travelling


_mark.frameworks += [_nnx_scopes, _flax_constraints]

for _face in (f"{__name__}.distributed", f"{__name__}.errors", f"{__name__}.meta", f"{__name__}.schedules", __name__):
    _publish(_face)
