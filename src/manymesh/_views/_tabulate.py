"""One table for the parameters of any framework."""

from __future__ import annotations

import sys

import jax

from .._errors import ArgumentError
from .._table import ParameterTable
from .._table import tabulate as tabulate_tree
from ..meta._tasks import TasksLike


def tabulate(
    tree: object,
    boxed: object = None,
    *,
    shardings: object = None,
    tasks: TasksLike | None = None,
    title: str | None = None,
) -> ParameterTable:
    """Lists what a model or a state consists of: names of axes, shardings, devices and sizes.

    Args:
      tree: variables or a whole train state of Flax Linen; a module, optimizer or state of Flax NNX; a module of Equinox;
        any pytree of arrays or `jax.ShapeDtypeStruct`. Boxes in it give the names.
      boxed: a tree of the same parameters in boxes, for names that ``tree`` has lost, as from
        ``jax.eval_shape(model.init, ...)``.
      shardings: a tree of shardings for leaves that have none themselves, such as a part of
        ``compiled.input_shardings``.
      tasks: instead of ``shardings``, the tasks that the leaves are in, as for `manymesh.meta.explain`.
      title: printed above the table.

    Returns:
      A `manymesh.flax.ParameterTable`; ``print`` it, or leave it as the last line of a notebook's cell. Scalars outside
      boxes are left out.

    Raises:
      ArgumentError: ``boxed`` or ``shardings``, whose leaves count in order, has more or fewer than ``tree``, or ``tree`` is a
        Linen module, which has no parameters of its own.

    Example:
      >>> import jax, jax.numpy as jnp, manymesh as mm
      >>> table = mm.inspect.tabulate({"dense": {"kernel": jax.device_put(jnp.ones((4, 8)), jax.devices()[1])}})
      >>> table.rows[0].path, table.rows[0].devices, table.rows[0].bytes_per_device
      ('dense/kernel', (1,), 128)
    """
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(tree, linen.Module):
        raise ArgumentError(
            f"tabulate: {type(tree).__name__} is a module of Linen, which holds no parameters; give what its init returns: "
            "tabulate(jax.eval_shape(model.init, jax.random.key(0), x))"
        )
    return tabulate_tree(_as_pytree(tree), boxed, shardings=shardings, tasks=tasks, title=title)


def _as_pytree(tree: object) -> object:
    """Modules of NNX as their states; nobody has one who has not imported NNX."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree

    def is_module(x: object) -> bool:
        return isinstance(x, nnx.Pytree)

    return jax.tree.map(lambda x: nnx.state(x) if is_module(x) else x, tree, is_leaf=is_module)
