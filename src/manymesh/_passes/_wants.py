"""What a fragment wants of a value it reads: the constraint that it meets first."""

from __future__ import annotations

from jax.sharding import Mesh, PartitionSpec

from .. import _compat
from .._compat import AbstractJaxpr, Var
from .._mark import constraint_p
from .._program._nodes import shape_and_dtype
from .._task import names_as_axes

_KEEPS_DIMENSIONS = {"convert_element_type", "copy", "optimization_barrier", "neg"}


def first_constraint(jaxpr: AbstractJaxpr, var: Var, mesh: Mesh) -> PartitionSpec | None:
    """The spec that a variable of a jaxpr is constrained to, directly or after casts; None if it is not.

    Args:
      jaxpr: a computation on ``mesh``.
      var: one of its inputs.
      mesh: where it runs. Dimensions that the constraint leaves free are replicated.
    """
    following = {var}
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        positions = [k for k, v in enumerate(eqn.invars) if _compat.is_var(v) and v in following]
        if not positions:
            continue
        if eqn.primitive is constraint_p:
            return _closed(names_as_axes(eqn.params["names"], shape_and_dtype(var)[0], mesh))
        if eqn.primitive.name == "sharding_constraint":
            spec = getattr(eqn.params["sharding"], "spec", None)
            return None if spec is None else _closed(spec)
        if _compat.is_jit(eqn):
            inner = eqn.params["jaxpr"]
            for k in positions:
                found = first_constraint(inner, _compat.open_jaxpr(inner).invars[k], mesh)
                if found is not None:
                    return found
        elif eqn.primitive.name in _KEEPS_DIMENSIONS:
            following.update(eqn.outvars)
    return None


def _closed(spec: PartitionSpec) -> PartitionSpec:
    entries = [None if e is PartitionSpec.UNCONSTRAINED else e for e in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
