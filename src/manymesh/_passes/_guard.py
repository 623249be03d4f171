"""The fragments' share of a branch runs only where the branch is taken.

Conditionals that hold tasks are opened early, so that every pass sees plain tasks; each node remembers its branch. Here,
where fragments are cut, what is worth it gets its condition back: one conditional for a task, and one for neighbours that
are in one branch. The other side of it makes zeros, which the selection between the branches drops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._compat import Atom, Eqn, Jaxpr, Var
from .._program._nodes import Node, shape_and_dtype
from .._program._rewrite import substitute, trace_eqns, with_atoms

Guard = tuple[tuple[Atom, int], ...]


def guarded(nodes: Sequence[Node]) -> list[Eqn]:
    """The equations of a fragment, those that run in their branch alone under its condition.

    Args:
      nodes: the nodes of the fragment, in order.
    """
    made: list[Eqn] = []
    for (guard, mark), group in groupby(nodes, lambda n: (n.guard, n.task)):
        run = list(group)
        if mark is not None:
            made += [_task(n.eqn, guard) if guard else n.eqn for n in run]
        elif any(n.is_guarded for n in run):
            made += _conditional([n.eqn for n in run], guard)
        else:
            made += [n.eqn for n in run]
    return made


def _task(eqn: Eqn, guard: Guard) -> Eqn:
    """A task that runs only in its branch: under its own name still, the condition inside."""
    made = _conditional([eqn], guard)
    reads = list(dict.fromkeys(v for e in made for v in e.invars if _compat.is_var(v)))
    own = {v for e in made for v in e.outvars}
    reads = [v for v in reads if v not in own]
    outs = [v for v in eqn.outvars if _compat.is_var(v)]
    env: dict[Var, Atom] = {v: _compat.new_var(v.aval) for v in reads}
    inside = [substitute(e, env) for e in made]
    body = _compat.new_jaxpr([v for v in map(env.get, reads) if _compat.is_var(v)], [env[v] for v in outs], inside)
    return _compat.call_eqn(eqn.params["name"], body, reads, outs)


def _conditional(eqns: Sequence[Eqn], guard: Guard) -> list[Eqn]:
    """Equations in their branch: the condition, and the conditional in their place."""

    def taken(*indices: jax.Array) -> jax.Array:
        found = jnp.asarray(True)
        for index, (_, number) in zip(indices, guard, strict=True):
            found = found & (index == number)
        return found.astype(jnp.int32)

    condition, (which,) = trace_eqns(taken, [index for index, _ in guard])
    made = list(dict.fromkeys(_variables(e.outvars for e in eqns)))
    reads = [v for v in dict.fromkeys(_variables(e.invars for e in eqns)) if v not in made]
    return [*condition, _compat.cond_eqn(which, [_zeros(reads, made), _closed(eqns, reads, made)], reads, made)]


def _variables(many: Iterator[Sequence[Atom]] | Sequence[Sequence[Atom]]) -> Iterator[Var]:
    for atoms in many:
        yield from (v for v in atoms if _compat.is_var(v))


def _closed(eqns: Sequence[Eqn], reads: Sequence[Var], made: Sequence[Var]) -> Jaxpr:
    names: dict[Var, Var] = {v: _compat.new_var(v.aval) for v in (*reads, *made)}
    inside = [with_atoms(e, names, [names[v] if _compat.is_var(v) else v for v in e.outvars]) for e in eqns]
    return _compat.new_jaxpr([names[v] for v in reads], [names[v] for v in made], inside)


def _zeros(reads: Sequence[Var], made: Sequence[Var]) -> Jaxpr:
    eqns, outs = trace_eqns(lambda: [lax.full(shape, 0, dtype) for shape, dtype in map(shape_and_dtype, made)], [])
    return _compat.new_jaxpr([_compat.new_var(v.aval) for v in reads], outs, eqns)
