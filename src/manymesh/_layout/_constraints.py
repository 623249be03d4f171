"""What a computation constrains the values that it reads and makes to."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from .. import _compat
from .._compat import Atom, Jaxpr, Var

# Between a value and its constraint: what leaves every dimension where it is.
_KEEPS_DIMENSIONS = {"convert_element_type", "copy", "optimization_barrier", "neg", "reduce_precision"}


class Constraints:
    """Reads constraints off jaxprs; each jaxpr once, however many layers share it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Jaxpr, Mapping[int, PartitionSpec]]] = {}  # by id, with the jaxpr to keep it alive

    def of(self, jaxpr: Jaxpr) -> Mapping[int, PartitionSpec]:
        """Position of an input -> the spec that it is constrained to first, directly or after casts.

        Dimensions that a constraint leaves open count as replicated: an input has to lie somehow before the
        computation starts.
        """
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = jaxpr, self._read(jaxpr)
        return self._known[id(jaxpr)][1]

    def of_results(self, jaxpr: Jaxpr) -> Mapping[int, PartitionSpec]:
        """Position of a result -> the spec that it is constrained to last, directly or before casts.

        A constraint that leaves dimensions open is left out: of a result, more may be known than it says.
        """
        parts = _compat.open_jaxpr(jaxpr)
        found: dict[int, PartitionSpec] = {}
        if not any(eqn.primitive.name == "sharding_constraint" for eqn in parts.eqns):
            return found
        makers = {v: eqn for eqn in parts.eqns for v in eqn.outvars}
        for k, v in enumerate(parts.outvars):
            while _compat.is_var(v) and v in makers and makers[v].primitive.name in _KEEPS_DIMENSIONS:
                v = makers[v].invars[makers[v].outvars.index(v)]
            eqn = makers.get(v) if _compat.is_var(v) else None
            if eqn is not None and eqn.primitive.name == "sharding_constraint":
                spec = getattr(eqn.params["sharding"], "spec", None)
                if spec is not None and PartitionSpec.UNCONSTRAINED not in spec:
                    found[k] = _closed(spec)
        return found

    def _read(self, jaxpr: Jaxpr) -> Mapping[int, PartitionSpec]:
        parts = _compat.open_jaxpr(jaxpr)
        follows: dict[Var, int] = {v: k for k, v in enumerate(parts.invars)}
        found: dict[int, PartitionSpec] = {}

        def position(atom: Atom) -> int | None:
            return follows.get(atom) if _compat.is_var(atom) else None

        for eqn in parts.eqns:
            read = [(at, k) for at, v in enumerate(eqn.invars) if (k := position(v)) is not None]
            if not read:
                continue
            if eqn.primitive.name == "sharding_constraint":
                spec = getattr(eqn.params["sharding"], "spec", None)
                if spec is not None:
                    found.setdefault(read[0][1], _closed(spec))
            elif _compat.is_jit(eqn):
                inner = self.of(eqn.params["jaxpr"])
                for at, k in read:
                    if at in inner:
                        found.setdefault(k, inner[at])
            elif eqn.primitive.name == "cond":
                for branch in map(self.of, eqn.params["branches"]):
                    for at, k in read:  # the first operand says which branch
                        if at - 1 in branch:
                            found.setdefault(k, branch[at - 1])
            elif eqn.primitive.name in _KEEPS_DIMENSIONS:
                follows.update({eqn.outvars[at]: k for at, k in read if at < len(eqn.outvars)})
        return found


def _closed(spec: PartitionSpec) -> PartitionSpec:
    entries = [None if e is PartitionSpec.UNCONSTRAINED else e for e in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
