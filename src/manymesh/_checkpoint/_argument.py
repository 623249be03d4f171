"""What a step wants of an argument, as something to restore it like."""

from __future__ import annotations

import sys
from typing import Any

import jax

from .. import _compat
from .._api._lowered import Lowered
from .._compiled import Compiled
from .._errors import ArgumentError


@_compat.boundary
def argument_of(step: Lowered | Compiled, argument: int | str = 0) -> Any:
    """What a step wants of an argument: a pytree to restore it like, so that the first step finds it where it wants it.

    Args:
      step: what ``lower`` or ``compile`` of a step returned. Lowering is enough.
      argument: its position; its name where ``lower`` was given it by keyword. A module of NNX gives its state, as
        ``nnx.state`` does, also in a dictionary of modules; one of Equinox is a module, with all that is no array as it was given.

    Returns:
      The argument with a ``jax.ShapeDtypeStruct`` for each array, whose sharding is that of its home.

    Raises:
      ArgumentError: the step has no such argument.

    Example:
      >>> import jax, jax.numpy as jnp, manymesh as mm
      >>> step = mm.jit(mm.task(lambda params, x: x @ params["w"], "only", devices=[1]))
      >>> params, x = {"w": jax.ShapeDtypeStruct((4, 2), jnp.float32)}, jnp.ones((3, 4))
      >>> mm.checkpoint.argument_of(step.lower(params, x), 0)["w"].sharding.device_set == {jax.devices()[1]}
      True
    """
    if not isinstance(step, (Lowered, Compiled)):
        raise ArgumentError(
            f"argument_of takes what step.lower(...) or step.lower(...).compile() returned, found {type(step).__name__}"
        )
    args, kwargs = _with_states(step.arguments)
    found = kwargs if isinstance(argument, str) else dict(enumerate(args))
    if not isinstance(argument, (int, str)) or argument not in found:
        known = ", ".join(map(repr, [*range(len(args)), *kwargs]))
        raise ArgumentError(f"argument_of(..., {argument!r}): the step has the arguments {known}")
    wanted = found[argument]
    of_equinox: Any = sys.modules.get("manymesh._equinox._jit")
    return wanted.unpacked() if of_equinox is not None and isinstance(wanted, of_equinox.Packed) else wanted


def _with_states(arguments: Any) -> Any:
    """The arguments with the states of modules, also below dictionaries.

    A module or a variable that an argument before has too is only named where it comes again, so all are put together first.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return arguments

    def is_split(x: object) -> bool:
        return isinstance(x, nnx.NodeStates)

    def is_module(x: object) -> bool:
        return isinstance(x, nnx.Pytree)

    if not any(map(is_split, jax.tree.leaves(arguments, is_leaf=is_split))):
        return arguments
    return jax.tree.map(lambda x: nnx.state(x) if is_module(x) else x, nnx.from_tree(arguments), is_leaf=is_module)
