"""``jax.device_put`` and constraints on a mesh outside tasks: what the user says of a value between tasks.

In one program for several submeshes neither can stay what it is in a program for one: XLA would be asked for two sets
of devices at once. The layout becomes a constraint that travels with the value to where the value is used, and a result
of the step that was put somewhere is wanted there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from .._mark import Recording, constraint_p
from .._program._rewrite import with_atoms
from .._runtime._memories import DEVICE, HOST, host_kind
from ._shardings import on_devices


def read_moves(closed: Any, record: Recording) -> tuple[Any, dict[int, NamedSharding], dict[int, str]]:
    """Takes moves and constraints on meshes out of a step, as far as they are outside its tasks.

    Args:
      closed: the closed jaxpr of the step.
      record: says which of its calls are tasks.

    Returns:
      The jaxpr with travelling constraints in their place; where results were put: position -> sharding; and into which
      memory, where that was said: position -> kind of memory.
    """
    closed, memories = _without_memories(closed)
    if not record.tasks and not record.implicit:
        return closed, {}, memories  # one program on one set of devices, where both are what they are in jax.jit
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
    return _rewritten(closed, set(record.tasks)), wanted, memories


def _without_memories(closed: Any) -> tuple[Any, dict[int, str]]:
    """The jaxpr whose values are all in the memory of devices, and where its results were put into another one.

    What lies in the memory of the host comes to its devices when it is read, and results go there when they are made:
    between the two a step has nothing there.
    """
    parts = _compat.open_jaxpr(closed)
    env: dict[Any, Any] = {}
    kinds: dict[Any, str] = {}
    eqns: list[Any] = []
    for eqn in parts.eqns:
        if any(_compat.is_var(v) and v in env for v in eqn.invars):
            eqn = with_atoms(eqn, env)
        targets = eqn.params["devices"] if eqn.primitive.name == "device_put" else ()
        put = {v: kind for v, t in zip(eqn.outvars, targets, strict=False) if (kind := _kind(t)) is not None}
        kinds.update(put)
        if targets and all(isinstance(t, jax.memory.Space) for t in targets):
            env.update(zip(eqn.outvars, eqn.invars, strict=True))
            continue
        if HOST in put.values():
            there = tuple(t if _kind(t) != HOST else on_devices(t) for t in targets)
            outvars = [_compat.new_var(_compat.on_devices(v.aval)) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            eqn = eqn.replace(params={**eqn.params, "devices": there}, outvars=outvars)
        eqns.append(eqn)
    if not kinds:
        return closed, {}
    results = [env.get(v, v) if _compat.is_var(v) else v for v in parts.outvars]
    memories = {o: kinds[v] for o, v in enumerate(parts.outvars) if _compat.is_var(v) and v in kinds}
    return _compat.with_body(closed, parts.invars, results, eqns), memories


def _kind(target: Any) -> str | None:
    """The kind of memory that a target of ``device_put`` names; of a sharding only that of the host."""
    if isinstance(target, jax.memory.Space):
        return HOST if target == jax.memory.Space.Host else DEVICE
    return host_kind(target)


def _rewritten(jaxpr: Any, tasks: set[str]) -> Any:
    changed = False
    eqns: list[Any] = []
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        targets = _targets(eqn)
        if any(target is not None for target in targets):
            changed = True
            for x, v, target in zip(eqn.invars, eqn.outvars, targets, strict=True):
                names = tuple(target.spec) if target is not None else (PartitionSpec.UNCONSTRAINED,)
                eqns.append(
                    eqn.replace(primitive=constraint_p, params={"names": names, "rules": ()}, invars=[x], outvars=[v])
                )
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
