"""Rows that are added to zeros, and cast to a wider type for an accumulator, are added in that type.

The gradient of a table that is cast to bfloat16 and looked up is a scatter into zeros of bfloat16, as large as the table,
which a float32 accumulator adds in every microbatch. XLA adds the rows right to the accumulator where nothing is between, but
not behind a cast: then each microbatch reads and writes the whole table several times, for its few rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._compat import AbstractJaxpr, Atom, Eqn, Var
from .._mark import constraint_p
from .._program._calls import call_body, is_rewritable
from .._program._flat import FlatProgram
from .._program._nodes import Node, nodes_where
from .._program._placement import Placement
from .._program._rewrite import trace_eqns, with_atoms
from ._sums import is_made_zero
from ._unreduced._links import SCATTERS

_MOVES = frozenset({"copy", "reshape", "squeeze", "transpose", "sharding_constraint", constraint_p.name})


def widen_scatters(flat: FlatProgram) -> FlatProgram:
    """Adds rows, in loops, in the type that their sum is cast to, where nothing reads it in its own."""
    worker = _Worker()
    new: dict[Node, list[Eqn]] = {}
    for body in (flat.index.bodies[i] for i in range(len(flat.loops))):
        eqns = [worker.with_wide_body(n.eqn) for n in body]
        wide = worker.wide(_Scope(eqns, flat.index.uses))
        new.update({n: wide.get(k, [e]) for k, (n, e) in enumerate(zip(body, eqns, strict=True))})
    changed = {n: [replace(n, eqn=e) for e in eqns] for n, eqns in new.items() if eqns != [n.eqn]}
    if not changed:
        return flat
    placement = _placed_alike(flat.placement, changed) if flat.placement is not None else None
    return replace(flat, nodes=nodes_where(flat.nodes, changed), placement=placement)


def _placed_alike(placement: Placement, changed: Mapping[Node, Sequence[Node]]) -> Placement:
    """The placement with everything where the equations are in whose place it is."""
    node, home, reason = dict(placement.node), dict(placement.home), dict(placement.reason)
    for n, others in changed.items():
        for m in others:
            node[m], reason[m] = node[n], reason[n]
            home.update({v: node[n][0] for v in m.outputs if v not in home})
        del node[n], reason[n]
    return Placement(placement.submeshes, node, home, reason)


class _Scope(NamedTuple):
    """Equations, and how often each variable is read by them or leaves."""

    eqns: Sequence[Eqn]
    uses: Mapping[Var, int]

    @classmethod
    def of(cls, jaxpr: AbstractJaxpr) -> _Scope:
        parts = _compat.open_jaxpr(jaxpr)
        read = (v for e in parts.eqns for v in e.invars)
        return cls(parts.eqns, Counter(v for v in (*read, *parts.outvars) if _compat.is_var(v)))

    def makers(self) -> dict[Var, int]:
        """Variable -> position of the equation that makes it."""
        return {v: k for k, e in enumerate(self.eqns) for v in e.outvars if _compat.is_var(v)}


_Changed = dict[int, list[Eqn]]  # position of an equation -> those in its place


class _Worker:
    """Jaxprs with wide sums, and with results of a wider type; each made once, so that what was shared is still."""

    def __init__(self) -> None:
        self._bodies: dict[int, tuple[AbstractJaxpr, AbstractJaxpr]] = {}  # the first is kept alive: its id is the key
        self._results: dict[tuple[int, int, Any], tuple[AbstractJaxpr, AbstractJaxpr | None]] = {}

    def with_wide_body(self, eqn: Eqn) -> Eqn:
        """A call with wide sums in its body; any other equation as it is."""
        body = call_body(eqn) if is_rewritable(eqn) else None
        if body is None:
            return eqn
        if id(body) not in self._bodies:
            self._bodies[id(body)] = body, self._widened(body)
        wide = self._bodies[id(body)][1]
        return eqn if wide is body else _with_body(eqn, body, wide)

    def _widened(self, jaxpr: AbstractJaxpr) -> AbstractJaxpr:
        scope = _Scope.of(jaxpr)
        eqns = [self.with_wide_body(e) for e in scope.eqns]
        changed = self.wide(scope._replace(eqns=eqns))
        if not changed and all(a is b for a, b in zip(eqns, scope.eqns, strict=True)):
            return jaxpr
        return _with(jaxpr, eqns, changed)

    def wide(self, scope: _Scope) -> _Changed:
        """What changes so that sums are made in the types that they are cast to."""
        changed: _Changed = {}
        makers: dict[Var, int] | None = None
        now = list(scope.eqns)
        for k, e in enumerate(scope.eqns):
            if (v := _cast_up(e)) is not None:
                makers = scope.makers() if makers is None else makers
                found = self._made_as(v, e.outvars[0], scope._replace(eqns=now), makers)
                if found is not None:
                    changed |= {**found, k: []}
                    for at, (one, *others) in found.items():  # a call may make another sum of rows
                        now[at] = now[at] if others else one
        return changed

    def _made_as(self, v: Var, wanted: Var, scope: _Scope, makers: Mapping[Var, int]) -> _Changed | None:
        """What changes so that a variable of a wider type is made instead of one; None where it is no sum of rows alone."""
        moves: list[int] = []
        dtype, made_by = _compat.dtype(wanted), lambda x: scope.eqns[makers[x]] if x in makers else None
        while True:
            at = makers.get(v)
            if at is None or scope.uses[v] != 1:
                return None
            e = scope.eqns[at]
            if e.primitive.name not in _MOVES:
                break
            moves.append(at)
            (v,) = (x for x in e.invars if _compat.is_var(x))
        out = wanted if not moves else _like(v, dtype)
        if e.primitive.name in SCATTERS and is_made_zero(e.invars[0], made_by):
            changed = {at: _in_type(e, out)}
        else:
            body = call_body(e) if is_rewritable(e) else None
            position = e.outvars.index(v)
            wide = None if body is None else self._with_result(body, position, dtype)
            if body is None or wide is None:
                return None
            outvars = [out if k == position else x for k, x in enumerate(e.outvars)]
            changed = {at: [_with_body(e, body, wide).replace(outvars=outvars)]}
        for k in reversed(moves):
            e, before = scope.eqns[k], out
            out = wanted if k == moves[0] else _like(e.outvars[0], dtype)
            changed[k] = [with_atoms(e, {v: before}, [out])]
            v = e.outvars[0]
        return changed

    def _with_result(self, jaxpr: AbstractJaxpr, position: int, dtype: Any) -> AbstractJaxpr | None:
        """A jaxpr with one result in a wider type."""
        key = id(jaxpr), position, dtype
        if key not in self._results:
            scope, results = _Scope.of(jaxpr), list(_compat.open_jaxpr(jaxpr).outvars)
            before, changed = results[position], None
            if _compat.is_var(before):
                results[position] = wanted = _like(before, dtype)
                changed = self._made_as(before, wanted, scope, scope.makers())
            self._results[key] = jaxpr, None if changed is None else _with(jaxpr, scope.eqns, changed, results)
        return self._results[key][1]


def _cast_up(eqn: Eqn) -> Var | None:
    """What an equation casts to a floating-point type that has all values of the one before; else None."""
    v = eqn.invars[0] if eqn.primitive.name == "convert_element_type" else None
    if v is None or not _compat.is_var(v):
        return None
    before, after = _compat.dtype(v), _compat.dtype(eqn.outvars[0])
    if before == after or not (jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)):
        return None
    one, other = map(jnp.finfo, (before, after))
    wider = other.nmant >= one.nmant and other.maxexp >= one.maxexp and other.minexp <= one.minexp
    return v if wider else None


def _in_type(eqn: Eqn, out: Var) -> list[Eqn]:
    """A scatter into zeros, in another type."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    how = {name: eqn.params[name] for name in names}

    def add_rows(indices: jax.Array, rows: jax.Array) -> jax.Array:
        dtype = _compat.dtype(out)
        return lax.scatter_add(jnp.zeros(_compat.shape(out), dtype), indices, rows.astype(dtype), **how)

    eqns, _ = trace_eqns(add_rows, eqn.invars[1:])
    eqns[-1] = eqns[-1].replace(outvars=[out])
    return [e.replace(source_info=eqn.source_info) for e in eqns]


def _like(v: Var, dtype: Any) -> Var:
    aval: Any = v.aval
    return _compat.new_var(aval.update(dtype=jnp.dtype(dtype), weak_type=False))


def _with_body(eqn: Eqn, before: AbstractJaxpr, after: AbstractJaxpr) -> Eqn:
    return _compat.with_jaxprs(eqn, lambda jaxpr: after if jaxpr is before else jaxpr)


def _with(
    jaxpr: AbstractJaxpr, eqns: Sequence[Eqn], changed: _Changed, results: Sequence[Atom] | None = None
) -> AbstractJaxpr:
    parts = _compat.open_jaxpr(jaxpr)
    new = [e for k, old in enumerate(eqns) for e in changed.get(k, [old])]
    made: AbstractJaxpr = _compat.with_body(jaxpr, parts.invars, parts.outvars if results is None else results, new)
    return made
