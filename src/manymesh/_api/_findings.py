"""Findings about a step as a whole: what is meant to be a pipeline and is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import _compat
from .._compat import Var
from .._errors import ArgumentError, PlacementError, ScheduleError
from .._findings import Finding, listed
from .._mark import MARK, Recording
from .._program import Program, nbytes
from ..schedules._placements import described

LITTLE = 1 << 10  # bytes that may be kept without a word


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


def note_outside(record: Recording, program: Program) -> None:
    """Adds a finding for each loop whose gradient is taken around it, so that its backward passes are a loop after it.

    Told by what the first one, of forward passes alone, leaves of each microbatch for the other one, of backward passes alone.
    So it is neither where a microbatch is computed again, nor in a second derivative, nor where rows are what is differentiated.
    """
    phases = [{f.kind == "F" for f in program.body(k)} for k in range(len(program.loops))]
    for plan, phase in zip(program.loops, phases, strict=True):
        name = getattr(plan.schedule, "name", plan.schedule)
        if phase != {True} or not plan.of_losses or name == "gpipe":
            continue
        later = [
            x for x, p in zip(program.loops, phases, strict=True) if p == {False} and x.name == plan.name and not x.ys
        ]
        read = {v for other in later for _, outer in other.xs for v in outer if _compat.is_var(v)}
        kept = sum(nbytes(inner.aval) * len(outer) for inner, outer in plan.ys if not read.isdisjoint(outer))
        if kept > LITTLE:
            text = (
                f"microbatch({plan.name}) is differentiated from outside, so that all {plan.num_microbatches} forward passes come "
                f"before the backward passes, against the schedule {name!r}, and what each of them keeps, {kept} bytes together, is "
                f"there at once; write mm.microbatch(jax.value_and_grad({plan.name}), ...), whose loop has both, or "
                'schedule="gpipe", which keeps as much, if that is what you want'
            )
            record.findings[Finding(text)] = ScheduleError


def note_accumulation(record: Recording, program: Program) -> None:
    """Adds a finding: gradients of pieces of a batch that are added up by hand, which no schedule orders.

    Told by tasks of several submeshes that are called at least three times, no call after another one or its backward pass,
    each for a loss of its own: a backward pass depends on one of the forward passes only. Somewhere arrays that come of two
    of its backward passes are added.
    """
    if program.loops or len({f.submesh for f in program.fragments if f.tasks}) < 2:
        return
    if max(_often(program).values(), default=0) < 3:
        return  # as most steps are; what depends on what would be a large table
    calls, added = _calls(program)
    passes: dict[str, list[int]] = {}  # task -> its calls in forward passes, and in backward passes
    for i, call in enumerate(calls):
        passes.setdefault(call.task, [0, 0])[not call.is_forward] |= 1 << i
    passes = {task: both for task, both in passes.items() if both[1]}
    counts = {forward.bit_count() for forward, _ in passes.values()}
    if len(counts) != 1 or (count := max(counts)) < 3:
        return
    for task, (forward, backward) in passes.items():
        of_one = any(
            (call.before & forward).bit_count() == 1 for call in calls if call.task == task and not call.is_forward
        )
        if not (of_one and any(one & backward and other & backward for one, other in added)):
            return
    text = (
        f"called {count} times in a step, each time for a loss of its own, and the gradients are added up: outside of "
        "mm.microbatch no schedule orders that, and submeshes wait for each other. For a pipeline write "
        f'mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches={count}, reduce="mean")(params, batch) in place '
        "of the loop"
    )
    for task in passes:
        record.findings[Finding(text, task)] = PlacementError


class _Call(NamedTuple):
    """A call of a task: its name, whether it belongs to a forward pass, and the calls that it depends on, a bit for each."""

    task: str
    is_forward: bool
    before: int


def _often(program: Program) -> Counter[str]:
    """How often each task is called in forward passes."""
    eqns = (e for f in program.fragments if f.kind == "F" and f.tasks for e in _compat.open_jaxpr(f.jaxpr).eqns)
    return Counter(_task_of(program, e) for e in eqns if _is_call(e))


def _is_call(eqn: Any) -> bool:
    return _compat.is_jit(eqn) and MARK in eqn.params["name"]


def _task_of(program: Program, eqn: Any) -> str:
    task = program.tasks.get(eqn.params["name"])
    name: str = (task and task.name) or eqn.params["name"].split(MARK)[0]
    return name


def _calls(program: Program) -> tuple[list[_Call], list[tuple[int, int]]]:
    """The calls of tasks outside of loops, and those that both terms of each sum of two arrays depend on, but for common ones.

    Nothing where a forward pass of a task depends on another call of it.
    """
    calls: list[_Call] = []
    of_task: dict[str, int] = {}
    added = []
    behind: dict[Var, int] = {}
    for f in program.fragments:
        for eqn in _compat.open_jaxpr(f.jaxpr).eqns:
            each = [behind.get(v, 0) for v in eqn.invars if _compat.is_var(v)]
            before = 0
            for calls_before in each:
                before |= calls_before
            if eqn.primitive.name in ("add", "add_any") and len(each) == 2 and _compat.shape(eqn.outvars[0]):
                added.append((each[0] & ~each[1], each[1] & ~each[0]))
            if _is_call(eqn):
                name, bit = _task_of(program, eqn), 1 << len(calls)
                if f.kind == "F" and before & of_task.get(name, 0):
                    return [], []  # one after the other, as updates are: of these there may be many
                calls.append(_Call(name, f.kind == "F", before))
                of_task[name] = of_task.get(name, 0) | bit
                before |= bit
            if before:
                behind.update(dict.fromkeys(eqn.outvars, before))
    return calls, added


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


def note_donated(record: Recording, jaxpr: Any, donated: Iterable[int], names: Sequence[str]) -> None:
    """Adds a finding where what is donated is lost: no result is left that could be its next value.

    Args:
      record: of the trace.
      jaxpr: the closed jaxpr of the step.
      donated: positions of the leaves that the user donates.
      names: what each leaf of the arguments is called.
    """
    left = Counter((x.shape, x.dtype) for x in jaxpr.out_avals)
    lost: list[int] = []
    given = jaxpr.in_avals  # JAX lists them anew each time it is asked
    for i in sorted(donated):
        kind = given[i].shape, given[i].dtype
        left[kind] -= 1
        if left[kind] < 0:
            lost.append(i)
    if lost:
        text = (
            f"{listed(names[i] for i in lost)}: donated, so that the call deletes the array, and no result is left of that shape "
            "and dtype to replace it; return its next value, or do not donate it"
        )
        record.findings[Finding(text)] = ArgumentError


def note_opened(record: Recording, opened: Mapping[str, str]) -> None:
    """Adds findings: loops over microbatches that the host runs.

    Args:
      record: of the trace.
      opened: their marks, each with the line of the loop of unknown length in it.
    """
    for mark, line in opened.items():
        loop, at = record.loops[mark], f" ({line})" if line else ""
        text = (
            f"microbatch({loop.name}) has a lax.while_loop over several submeshes in it{at}, whose length the data says, so "
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
