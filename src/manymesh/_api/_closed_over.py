"""What a step closes over, where that is in other processes: an array has a value only in those that own its devices."""

from __future__ import annotations

from typing import Any

import jax

from .. import _compat
from .._distributed._world import world
from .._errors import ProcessError
from .._runtime._exchange import processes_of
from .._shown import numbers


def check_closed_over(name: str, closed: Any) -> None:
    """Refuses arrays among the constants of a step whose value this process cannot read.

    Args:
      name: name of the step.
      closed: its closed jaxpr.

    Raises:
      ProcessError: there is one, in the step or in a function that it calls.
    """
    if world() is None:
        return
    todo, seen = [closed], {id(closed)}
    while todo:
        parts = _compat.open_jaxpr(todo.pop())
        for x in parts.consts:
            if isinstance(x, jax.Array) and not _is_here(x):
                owners = processes_of(x.sharding)
                raise ProcessError(
                    f"mm.jit({name}): the step, or a function in it, closes over an array {jax.typeof(x).str_short()} of "
                    f"process{'es' * (len(owners) > 1)} {numbers(owners)}, whose value is not here; pass it as an argument"
                )
        inner = {id(j): j for eqn in parts.eqns for j in _compat.jaxprs_in(eqn) if id(j) not in seen}
        seen.update(inner)
        todo += inner.values()


def _is_here(x: jax.Array) -> bool:
    return x.is_fully_addressable or (x.is_fully_replicated and bool(x.sharding.addressable_devices))
