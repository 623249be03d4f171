"""Scopes in jaxprs: which names there are, and what has to be opened because a task is inside."""

from __future__ import annotations

from collections.abc import Iterator

from .. import _compat
from .._compat import AbstractJaxpr, Eqn
from .._implicit import Iteration, Matcher, path_of
from .._task import Task


def jaxprs_of(eqn: Eqn) -> list[AbstractJaxpr]:
    """The jaxprs among the parameters of an equation: bodies, branches, conditions."""
    found: list[AbstractJaxpr] = []
    for value in eqn.params.values():
        if isinstance(value, (tuple, list)):
            found += [v for v in value if _compat.is_jaxpr(v)]
        elif _compat.is_jaxpr(value):
            found.append(value)
    return found


def is_backward(stack: str) -> bool:
    """Whether an equation with this name stack belongs to a backward pass; rematerialised ones do."""
    return "transpose(" in stack or is_rematerialised(stack)


def is_rematerialised(stack: str) -> bool:
    """Whether an equation with this name stack computes again what the forward pass computed."""
    return "rematted_computation" in stack


def matched_inside(eqn: Eqn, stack: str, matcher: Matcher) -> list[str]:
    """Names of the tasks that an equation holds by the names of scopes inside it: those of `tasks_inside`."""
    return list(dict.fromkeys(task.name or "task" for task in tasks_inside(eqn, stack, matcher)))


def tasks_inside(eqn: Eqn, stack: str, matcher: Matcher) -> list[Task]:
    """The tasks that an equation holds by the names of scopes inside it.

    Args:
      eqn: an equation that is no task itself.
      stack: its name stack, complete.
      matcher: the registered tasks.
    """
    if not matcher or matcher.match(stack, is_backward(stack)) is not None:
        return []
    path = path_of(stack)
    around = path[-1] if path else None
    iterations = range(around.index, around.index + 1) if isinstance(around, Iteration) else _NONE
    scopes = dict.fromkeys(
        (name, among, is_backward(stack) or is_backward(inner))
        for name, among, inner in _in_eqn(eqn, iterations, set())
    )
    found: dict[Task, None] = {}
    for name, among, backward in scopes:
        found.update((task.named(name), None) for task in matcher.tasks(name, among, backward))
    return list(found)


def scope_names(closed: AbstractJaxpr) -> dict[str, int]:
    """Every name of a scope of a program -> the most iterations of a scan that such a scope is directly in, or 0."""
    found: dict[str, int] = {}
    for name, iterations, _ in _in_jaxpr(closed, _NONE, set()):
        found[name] = max(found.get(name, 0), len(iterations))
    return found


# Name of each scope, the iterations of the scan in whose body it is where no scope is between, and the name stack of
# what carries it.
_Scopes = Iterator[tuple[str, range, str]]
_NONE = range(0)


def _in_eqn(eqn: Eqn, iterations: range, seen: set[tuple[int, range]]) -> _Scopes:
    if eqn.primitive.name == "scan":
        iterations = range(_compat.scan_parts(eqn).length)
    for jaxpr in jaxprs_of(eqn):
        yield from _in_jaxpr(jaxpr, iterations, seen)


def _in_jaxpr(jaxpr: AbstractJaxpr, iterations: range, seen: set[tuple[int, range]]) -> _Scopes:
    if (id(jaxpr), iterations) in seen:
        return
    seen.add((id(jaxpr), iterations))
    stacks: set[str] = set()
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        stack = _compat.name_stack(eqn)
        if stack not in stacks:
            stacks.add(stack)
            for at, name in enumerate(path_of(stack)):
                assert isinstance(name, str), "a jaxpr knows nothing of iterations"
                yield name, _NONE if at else iterations, stack
        yield from _in_eqn(eqn, _NONE if path_of(stack) else iterations, seen)
