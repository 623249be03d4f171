"""Flax's logical constraints outside of tasks, for the submesh where their values end up.

``nn.with_logical_constraint`` says nothing where Flax has no rules, or JAX no mesh, and outside of tasks a step has neither:
the names are those of the task that a scope may turn out to be, or of the tasks on the submesh. So while a step is traced,
what Flax would apply travels with its value, as `meta.with_logical_constraint` does. Flax's function is wrapped once, and
does nothing else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import flax.linen.spmd

from .. import meta
from .._scope import current_carrier
from ..meta._rules import AnyOther, rules_of_flax

_APPLIES = "_with_sharding_constraint_one_fallback"  # what Flax calls for each array and its names


@contextlib.contextmanager
def travelling() -> Iterator[None]:
    """Inside, Flax's constraints outside of tasks travel with their values, whatever rules Flax has."""
    apply = getattr(flax.linen.spmd, _APPLIES, None)
    if apply is None:
        yield
        return
    if not hasattr(apply, "_manymesh_travels"):
        setattr(flax.linen.spmd, _APPLIES, _travels(apply))
    # Without any rule Flax would not come to apply something.
    with nn.logical_axis_rules((*rules_of_flax(), (AnyOther(lambda name: None), None))):
        yield


def _travels(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def call(names: Any, x: Any, *, rules: Any = None, mesh: Any = None, **more: Any) -> Any:
        if current_carrier() is None or mesh is not None:
            return apply(names, x, rules=rules, mesh=mesh, **more)
        known = [rule for rule in rules or () if not isinstance(rule[0], AnyOther)]
        return meta.with_logical_constraint(x, names, known or None)

    call._manymesh_travels = True  # type: ignore[attr-defined]  # a mark, so that it is wrapped once
    return call
