"""Findings about a step as a whole: what is meant to be a pipeline and is none."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from .. import _compat
from .._errors import PlacementError
from .._findings import Finding
from .._mark import MARK, Recording
from .._program import Program
from ..schedules._placements import described


def note_pipeline(record: Recording, program: Program | None) -> None:
    """Adds findings: loops without a task, loops that their schedule cannot run.

    Args:
      record: of the trace.
      program: made from it; None where nothing says what runs where.
    """
    for loop in record.loops.values() if program is None and not record.tasks else ():
        text = (
            f"microbatch({loop.name}) is in a step without a task, so that there is no pipeline: its "
            f"{loop.num_microbatches} microbatches run one after the other in one place; wrap the parts of the model with "
            "mm.task, or place them with mm.register_task"
        )
        record.findings[Finding(text)] = PlacementError
    for plan in program.loops if program is not None else ():
        if not plan.in_order:
            name = getattr(plan.schedule, "name", plan.schedule)
            text = (
                f"microbatch({plan.name}): its stages are on submeshes {described(plan.placement)} and in no order that schedule "
                f"{name!r} could run: {plan.against}, against the order of the stages; its microbatches run one after the "
                "other. Let values go from each stage to later ones only, and state be read where it is written. What goes back "
                "and forth by nature, as with a gradient in the loss, is right as it is, but no pipeline"
            )
            record.findings[Finding(text)] = PlacementError


def note_dropped(record: Recording, used: Container[str], jaxpr: Any) -> None:
    """Adds findings: tasks of which nothing is used.

    Args:
      record: of the trace.
      used: the names of the tasks that run.
      jaxpr: the closed jaxpr of the step.
    """
    missing = {mark: task.name for mark, task in record.tasks.items() if task.name not in used}
    if not missing:
        return
    traced = marks_in(jaxpr)
    left = marks_in(_compat.dce(_compat.without_consts(jaxpr), [True] * len(jaxpr.out_avals))[0])
    for name in dict.fromkeys(name for mark, name in missing.items() if mark in traced and mark not in left):
        text = "dropped, for no result of the step depends on what is computed there; return it, or take the task away"
        record.findings[Finding(text, name)] = PlacementError


def note_opened(record: Recording, opened: Mapping[str, str]) -> None:
    """Adds findings: loops over microbatches that the host runs.

    Args:
      record: of the trace.
      opened: their marks, each with the line of the loop of unknown length in it.
    """
    for mark, line in opened.items():
        loop = record.loops[mark]
        text = (
            f"microbatch({loop.name}) has a lax.while_loop over several submeshes in it ({line}), whose length the data says, so "
            f"that the host runs both, and its {loop.num_microbatches} microbatches one after the other; for a pipeline give "
            "that loop a fixed length (lax.scan, a Python loop), put all its tasks on one submesh, or take it out of there"
        )
        record.findings[Finding(text)] = PlacementError


def marks_in(jaxpr: Any) -> set[str]:
    """The marks of the calls in a jaxpr and in those that it holds."""
    found: set[str] = set()
    pending = [jaxpr]
    while pending:
        for eqn in _compat.open_jaxpr(pending.pop()).eqns:
            if _compat.is_jit(eqn) and MARK in eqn.params["name"]:
                found.add(eqn.params["name"])
            pending += _compat.jaxprs_in(eqn)
    return found
