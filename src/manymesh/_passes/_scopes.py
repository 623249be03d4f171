"""Scopes in jaxprs: which names there are, and what has to be opened because a task is inside."""

from __future__ import annotations

from collections.abc import Iterator

from .. import _compat
from .._compat import AbstractJaxpr, Eqn
from .._implicit import Iteration, Matcher, names_of, path_of
from .._task import Task

# What `_Scopes` finds: names, iterations, name stack.
Found = Iterator[tuple[tuple[str, ...], range, str]]


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
    last = path[-1] if path else None
    iterations = range(last.index, last.index + 1) if isinstance(last, Iteration) else _NONE
    around = tuple(name for name in path if isinstance(name, str))
    scopes = dict.fromkeys(
        (names, among, is_backward(stack) or is_backward(inner))
        for names, among, inner in _Scopes(matcher.depth).in_eqn(eqn, around, iterations)
    )
    found: dict[Task, None] = {}
    for names, among, backward in scopes:
        found.update((task.named(names[-1]), None) for task in matcher.tasks(names, among, backward))
    return list(found)


def scope_names(closed: AbstractJaxpr, depth: int) -> dict[str, int]:
    """What the scopes of a program are called -> the most iterations of a scan that such a scope is directly in, or 0.

    Args:
      closed: the program.
      depth: of how many scopes, nested in each other, paths are wanted as names.
    """
    found: dict[str, int] = {}
    for names, iterations, _ in _Scopes(depth).in_jaxpr(closed, (), _NONE):
        for name in names_of(names, None):
            found[name] = max(found.get(name, 0), len(iterations))
    return found


_NONE = range(0)


class _Scopes:
    """The scopes of a program: the names of each and of those around it, and where it is.

    Yields the names, as many as are wanted, the outermost first; the iterations of the scan in whose body the scope
    is where no scope is between; the name stack of what carries it.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._seen: set[tuple[int, tuple[str, ...], range]] = set()

    def in_eqn(self, eqn: Eqn, around: tuple[str, ...], iterations: range) -> Found:
        if eqn.primitive.name == "scan":
            iterations = range(_compat.scan_parts(eqn).length)
        for jaxpr in _compat.jaxprs_in(eqn):
            yield from self.in_jaxpr(jaxpr, around, iterations)

    def in_jaxpr(self, jaxpr: AbstractJaxpr, around: tuple[str, ...], iterations: range) -> Found:
        around = around[len(around) - self.depth + 1 :] if self.depth <= len(around) else around
        if (id(jaxpr), around, iterations) in self._seen:
            return
        self._seen.add((id(jaxpr), around, iterations))
        stacks: set[str] = set()
        for eqn in _compat.open_jaxpr(jaxpr).eqns:
            stack = _compat.name_stack(eqn)
            path = path_of(stack)
            if stack not in stacks:
                stacks.add(stack)
                for at, name in enumerate(path):
                    assert isinstance(name, str), "a jaxpr knows nothing of iterations"
                    names = (*around, *(n for n in path[: at + 1] if isinstance(n, str)))
                    yield names[-self.depth :], _NONE if at else iterations, stack
            inner = (*around, *(n for n in path if isinstance(n, str)))
            yield from self.in_eqn(eqn, inner, _NONE if path else iterations)
