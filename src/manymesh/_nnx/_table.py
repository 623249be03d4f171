"""A table of the variables of modules."""

from __future__ import annotations

from typing import Any

import flax.nnx as nnx
import jax

from .._table import ParameterTable
from .._table import tabulate as plain_tabulate
from .._types import PyTree
from ..meta._tasks import TasksLike


def tabulate(
    model: PyTree, *, shardings: Any = None, tasks: TasksLike | None = None, title: str | None = None
) -> ParameterTable:
    """Lists the variables of a module with their names, shardings and sizes.

    Args:
      model: a module, an ``nnx.State``, or a pytree of them: also an optimizer, or what ``nnx.eval_shape`` gives.
      shardings: a state of shardings for variables that have none, as `manymesh.meta.get_sharding` gives it.
      tasks: instead of ``shardings``, the tasks that the variables are in, as for `manymesh.meta.explain`.
      title: printed above the table.

    Returns:
      A `manymesh.flax.ParameterTable`; ``print`` it. A variable that stands at several places is listed once; scalars
      are left out.

    Example:
      >>> import jax.numpy as jnp, manymesh as mm
      >>> from flax import nnx
      >>> with nnx.use_eager_sharding(False):
      ...     param = nnx.Param(jnp.ones((4, 8)), out_sharding=("embed", None))
      >>> table = mm.nnx.tabulate(nnx.Dict(dense=nnx.Dict(kernel=param)))
      >>> table.rows[0].path, table.rows[0].names, table.rows[0].bytes_per_device
      ('dense/kernel', ('embed', None), 128)
    """
    state = jax.tree.map(_state, model, is_leaf=_is_module)
    return plain_tabulate(state, shardings=shardings, tasks=tasks, title=title)


def _is_module(x: object) -> bool:
    return isinstance(x, nnx.Pytree)


def _state(x: Any) -> Any:
    return nnx.state(x) if _is_module(x) else x
