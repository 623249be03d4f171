"""Constraints in logical names, recorded before the task around them was known, in terms of that task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .. import _compat
from .._compat import Eqn
from .._findings import Finding
from .._mark import Recording, box_constraint_p, constraint_p, task_scope
from .._program._rewrite import trace_eqns
from .._scope import Scope, enter_scope
from .._task import Task
from ..meta._constrain import constrain


def resolve_names(eqns: Sequence[Eqn], task: Task) -> tuple[list[Eqn], tuple[Finding, ...]]:
    """The equations of a task with its constraints, also those in loops and conditionals, as the task means them.

    Returns:
      The equations, and a finding for each unknown name, in the words of explicit tasks.

    Raises:
      AxisError: a constraint does not fit the mesh of the task.
    """
    if task.mesh is None:  # the names travel on, to wherever the task ends
        return list(eqns), ()
    notes = Recording()
    try:
        return _Resolver(task, task_scope(notes, task)).equations(eqns), tuple(notes.findings)
    except Exception as error:
        error.add_note(f"in task {task.name!r}")
        raise


class _Resolver:
    def __init__(self, task: Task, scope: Scope) -> None:
        self.task, self.scope = task, scope

    def equations(self, eqns: Sequence[Eqn]) -> list[Eqn]:
        out: list[Eqn] = []
        for eqn in eqns:
            if eqn.primitive is constraint_p:
                out += self._traced(eqn, self._users)
            elif eqn.primitive is box_constraint_p:
                out += self._traced(eqn, self._boxs)
            elif _holds_names(eqn):
                out.append(_compat.with_jaxprs(eqn, self._jaxpr))
            else:
                out.append(eqn)
        return out

    def _jaxpr(self, jaxpr: Any) -> Any:
        return _compat.with_eqns(jaxpr, self.equations(_compat.open_jaxpr(jaxpr).eqns))

    def _users(self, x: Any, params: dict[str, Any]) -> Any:
        if self.scope.mesh is None:
            return jax.lax.with_sharding_constraint(x, PartitionSpec())
        return jax.lax.with_sharding_constraint(x, self.scope.resolve(params["names"], x.shape, params["rules"]))

    def _boxs(self, x: Any, params: dict[str, Any]) -> Any:
        with enter_scope(self.scope):
            return constrain(x, params["names"], None, params["where"], params["rules"])

    def _traced(self, eqn: Eqn, constraint: Callable[[Any, dict[str, Any]], Any]) -> list[Eqn]:
        (operand,) = eqn.invars
        assert self.task.mesh is not None, "a task without a mesh resolves no names"
        mesh = self.task.mesh.abstract_mesh

        def fun(x: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh):
                return constraint(x, eqn.params)

        if not _compat.is_var(operand):
            return [eqn]
        made, _ = trace_eqns(fun, [operand])
        if not made:  # it says nothing here; the equation is the identity
            return [eqn]
        assert len(made) == 1, "a constraint is one equation"
        return [made[0].replace(outvars=eqn.outvars, source_info=eqn.source_info)]


def _holds_names(eqn: Eqn) -> bool:
    return any(
        e.primitive in (constraint_p, box_constraint_p) or _holds_names(e)
        for j in _compat.jaxprs_in(eqn)
        for e in _compat.open_jaxpr(j).eqns
    )
