"""``jax.device_put`` and constraints on a mesh outside tasks: what the user says of a value between tasks.

In one program for several submeshes neither can stay what it is in a program for one: XLA would be asked for two sets
of devices at once. The layout becomes a constraint that travels with the value to where the value is used, and a result
of the step that was put somewhere is wanted there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from .._mark import Recording, constraint_p


def read_moves(closed: Any, record: Recording) -> tuple[Any, dict[int, NamedSharding]]:
    """Takes moves and constraints on meshes out of a step, as far as they are outside its tasks.

    Args:
      closed: the closed jaxpr of the step.
      record: says which of its calls are tasks.

    Returns:
      The jaxpr with travelling constraints in their place, and where results were put: position -> sharding.
    """
    if not record.tasks and not record.implicit:
        return closed, {}  # one program on one set of devices, where both are what they are in jax.jit
    parts = _compat.open_jaxpr(closed)
    makers = {
        v: (eqn, i) for eqn in parts.eqns if eqn.primitive.name == "device_put" for i, v in enumerate(eqn.outvars)
    }
    wanted = {}
    for o, v in enumerate(parts.outvars):
        eqn, i = makers.get(v, (None, 0)) if _compat.is_var(v) else (None, 0)
        sharding = _named(eqn.params["devices"][i]) if eqn is not None else None
        if sharding is not None:
            wanted[o] = sharding
    return _rewritten(closed, set(record.tasks)), wanted


def _rewritten(jaxpr: Any, tasks: set[str]) -> Any:
    changed = False
    eqns: list[Any] = []
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        targets = _targets(eqn)
        if any(target is not None for target in targets):
            changed = True
            for x, v, target in zip(eqn.invars, eqn.outvars, targets, strict=True):
                names = tuple(target.spec) if target is not None else (PartitionSpec.UNCONSTRAINED,)
                eqns.append(eqn.replace(primitive=constraint_p, params={"names": names}, invars=[x], outvars=[v]))
            continue
        if not (_compat.is_jit(eqn) and eqn.params["name"] in tasks):
            params = {k: _rewritten_param(v, tasks) for k, v in eqn.params.items() if _holds_jaxprs(v)}
            if any(params[k] is not eqn.params[k] for k in params):
                changed = True
                eqn = eqn.replace(params={**eqn.params, **params})
        eqns.append(eqn)
    return _compat.with_eqns(jaxpr, eqns) if changed else jaxpr


def _holds_jaxprs(value: object) -> bool:
    several: Iterable[Any] = value if isinstance(value, tuple) else (value,)
    return any(_compat.is_jaxpr(v) for v in several)


def _rewritten_param(value: Any, tasks: set[str]) -> Any:
    if not isinstance(value, tuple):
        return _rewritten(value, tasks)
    new = tuple(_rewritten(v, tasks) if _compat.is_jaxpr(v) else v for v in value)
    return new if any(a is not b for a, b in zip(new, value, strict=True)) else value


def _targets(eqn: Any) -> list[NamedSharding | None]:
    """For each result of a move or a constraint the sharding it names; none for other equations."""
    if eqn.primitive.name == "device_put":
        return [_named(target) for target in eqn.params["devices"]]
    if eqn.primitive.name == "sharding_constraint":
        return [_named(eqn.params["sharding"])]
    return []


def _named(target: Any) -> NamedSharding | None:
    """A sharding on devices that are there; None where only a layout, or nothing, is said."""
    if isinstance(target, NamedSharding):
        return target if isinstance(target.mesh, Mesh) else None
    if target is None or (isinstance(target, Sharding) and len(target.device_set) != 1):
        return None
    device = next(iter(target.device_set)) if isinstance(target, Sharding) else target
    return NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec()) if hasattr(device, "id") else None
