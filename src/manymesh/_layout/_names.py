"""Constraints from outside every task, in the terms of the submesh where their values ended up.

A step often constrains its parameters in logical names before it calls its tasks. Such a constraint travels with its
value; once it is known where that is, its names are read by the rules of the tasks there: those of the fragment that
it is in come before those of other tasks on the same submesh, and after all rules a name may be a device axis.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _compat
from .._compat import AbstractJaxpr, Eqn
from .._findings import Finding
from .._mark import box_constraint_p, constraint_p
from .._program import Fragment, Program
from .._program._rewrite import trace_eqns
from .._task import CONSTRAINT, AxisRule, check_divides
from ..meta._rules import parts_of, resolve, rules_in_task

_FREE = PartitionSpec.UNCONSTRAINED
_NAMING = frozenset({constraint_p, box_constraint_p})


def resolve_constraints(program: Program) -> tuple[Program, tuple[Finding, ...]]:
    """The program with every constraint in device axes of its submesh.

    Args:
      program: the program.

    Returns:
      The program, and a finding for each name that nobody knows; its dimension is left to XLA.

    Raises:
      AxisError: a name at two dimensions, or a dimension that does not divide over its device axes.
    """
    worker = _Resolver(program)
    fragments = tuple(worker.fragment(f) for f in program.fragments)
    if all(new is old for new, old in zip(fragments, program.fragments, strict=True)):
        return program, ()
    return replace(program, fragments=fragments), tuple(worker.findings)


class _Resolver:
    def __init__(self, program: Program) -> None:
        self.program, self.tasks = program, program.tasks
        self.findings: dict[Finding, None] = {}
        self._holds: dict[int, tuple[AbstractJaxpr, bool]] = {}

    def fragment(self, f: Fragment) -> Fragment:
        """The fragment with its constraints resolved; itself where it has none."""
        if not self._has_names(f.jaxpr):
            return f
        mesh = self.program.submeshes[f.submesh]
        return replace(f, jaxpr=self._jaxpr(f.jaxpr, mesh, self._rules(f, mesh)))

    def _rules(self, f: Fragment, mesh: Mesh) -> tuple[AxisRule, ...]:
        own = [e.params["name"] for e in _compat.open_jaxpr(f.jaxpr).eqns if _compat.is_jit(e)]
        here = [task for mark, task in self.tasks.items() if task.mesh == mesh and mark not in own]
        tasks = [self.tasks[mark] for mark in own if mark in self.tasks] + here
        return tuple(dict.fromkeys(rule for task in tasks for rule in task.logical_axes or ()))

    def _has_names(self, jaxpr: AbstractJaxpr) -> bool:
        if id(jaxpr) not in self._holds:
            found = any(
                e.primitive in _NAMING or any(map(self._has_names, _compat.jaxprs_in(e)))
                for e in _compat.open_jaxpr(jaxpr).eqns
            )
            self._holds[id(jaxpr)] = jaxpr, found
        return self._holds[id(jaxpr)][1]

    def _jaxpr(self, jaxpr: AbstractJaxpr, mesh: Mesh, rules: tuple[AxisRule, ...]) -> Any:
        eqns = [self._equation(e, mesh, rules) for e in _compat.open_jaxpr(jaxpr).eqns]
        return _compat.with_eqns(jaxpr, eqns)

    def _equation(self, eqn: Eqn, mesh: Mesh, rules: tuple[AxisRule, ...]) -> Eqn:
        if eqn.primitive in _NAMING:
            names, context = eqn.params["names"], eqn.params.get("where", CONSTRAINT)
            rules = rules_in_task(rules, eqn.params["rules"], tuple(mesh.axis_names))
            spec = self.spec(f"{context} outside every task", names, _compat.shape(eqn.invars[0]), mesh, rules)
            return constraint_eqn(eqn, mesh, spec)
        if not any(map(self._has_names, _compat.jaxprs_in(eqn))):
            return eqn
        return _compat.with_jaxprs(eqn, lambda jaxpr: self._jaxpr(jaxpr, mesh, rules))

    def spec(
        self, context: str, names: tuple[Any, ...], shape: Sequence[int], mesh: Mesh, rules: tuple[AxisRule, ...]
    ) -> PartitionSpec:
        """What names mean on a submesh; a dimension whose name nobody knows stays free."""
        here = [task for task in self.tasks.values() if task.mesh == mesh]
        if mesh.size == 1 or (here and not any(task.has_named_axes for task in here)):
            return PartitionSpec(*[_FREE] * len(shape))  # there is nothing that a name could mean
        axes = tuple(mesh.axis_names)
        found = resolve(names, rules, axes)
        unknown = set(found.unknown)
        entries = [
            _FREE if axis is None and not unknown.isdisjoint(parts_of(name)) else axis
            for name, axis in zip(names, found.axes, strict=True)
        ]
        for name in found.unknown:
            known = list(dict.fromkeys(logical for logical, _ in rules))
            near = difflib.get_close_matches(name, [*known, *axes], 1)
            first = f"did you mean {near[0]!r}? Otherwise add" if near else "correct the name, or add"
            text = (
                f"{context}: axis name {name!r} of {names} is in no rule of the tasks on this submesh (they know {known}) and "
                f"is no device axis {axes}, so XLA chooses how that dimension is sharded; {first} a rule to the task"
            )
            self.findings[Finding(text)] = None
        check_divides(context, names, entries, tuple(shape), dict(mesh.shape))
        return PartitionSpec(*entries)


def constraint_eqn(eqn: Eqn, mesh: Mesh, spec: PartitionSpec) -> Eqn:
    """JAX's own constraint in place of ours, between the same variables."""
    (operand,) = eqn.invars
    given = [operand if _compat.is_var(operand) else _compat.new_var(operand.aval)]
    sharding = NamedSharding(mesh.abstract_mesh, spec)
    eqns, _ = trace_eqns(lambda x: jax.lax.with_sharding_constraint(x, sharding), given)
    assert len(eqns) == 1, "a constraint is one equation"
    new: Eqn = eqns[0].replace(invars=[operand], outvars=eqn.outvars, source_info=eqn.source_info)
    return new
