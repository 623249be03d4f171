"""Scopes in jaxprs: which names there are, and what has to be opened because a task is inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import _compat
from .._implicit import Iteration, Matcher, Path, called, path_of


def jaxprs_of(eqn: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation: bodies, branches, conditions."""
    found = []
    for value in eqn.params.values():
        if _compat.is_jaxpr(value):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [v for v in value if _compat.is_jaxpr(v)]
    return found


def is_backward(stack: str) -> bool:
    """Whether an equation with this name stack belongs to a backward pass; rematerialised ones do."""
    return "transpose(" in stack or is_rematerialised(stack)


def is_rematerialised(stack: str) -> bool:
    """Whether an equation with this name stack computes again what the forward pass computed."""
    return "rematted_computation" in stack


def matched_inside(eqn: Any, stack: str, matcher: Matcher) -> list[str]:
    """Names of the tasks that an equation holds by the names of scopes inside it.

    Args:
      eqn: an equation that is no task itself.
      stack: its name stack, complete.
      matcher: the registered tasks.
    """
    if not matcher or matcher.match(stack, is_backward(stack)) is not None:
        return []
    path = path_of(stack)
    around = path[-1:] if path and isinstance(path[-1], Iteration) else ()
    found: dict[str, None] = {}
    for names, inner in _in_eqn(eqn, around, set()):
        made = matcher.task(names, is_backward(stack) or is_backward(inner))
        if made is not None:
            found[made[0].name or names[0]] = None
    return list(found)


def scope_names(closed: Any) -> set[str]:
    """Every name by which a scope of a program could be matched."""
    return {name for names, _ in _in_jaxpr(closed, (), set()) for name in names}


# Names of each scope, and the name stack of what carries it. ``around`` are the iterations of the scan in whose
# body it is, where no scope is between.
_Scopes = Iterator[tuple[tuple[str, ...], str]]


def _in_eqn(eqn: Any, around: Path, seen: set[Any]) -> _Scopes:
    if eqn.primitive.name == "scan":
        length = _compat.scan_parts(eqn).length
        around = tuple(Iteration(i, length) for i in range(length))
    for jaxpr in jaxprs_of(eqn):
        yield from _in_jaxpr(jaxpr, around, seen)


def _in_jaxpr(jaxpr: Any, around: Path, seen: set[Any]) -> _Scopes:
    if (id(jaxpr), around) in seen:
        return
    seen.add((id(jaxpr), around))
    stacks: set[str] = set()
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        stack = _compat.name_stack(eqn)
        if stack not in stacks:
            stacks.add(stack)
            yield from _on_path(stack, around)
        yield from _in_eqn(eqn, () if path_of(stack) else around, seen)


def _on_path(stack: str, around: Path) -> _Scopes:
    path = path_of(stack)
    for at in range(len(path)):
        for iteration in around if at == 0 else ():
            yield called((iteration, *path), 1), stack
        if at or not around:
            yield called(path, at), stack
