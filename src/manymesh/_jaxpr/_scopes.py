"""Scopes in jaxprs: which names there are, and what has to be opened because a task is inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import _compat
from .._implicit import Iteration, Matcher, called, path_of


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
    if not matcher or not jaxprs_of(eqn) or matcher.match(stack, is_backward(stack)) is not None:
        return []
    found: dict[str, None] = {}
    for names, inner in scopes_in(eqn):
        made = matcher.task(names, is_backward(stack) or is_backward(inner))
        if made is not None:
            found[made[0].name or names[0]] = None
    return list(found)


def scope_names(closed: Any) -> set[str]:
    """Every name by which a scope of a program could be matched."""
    return {name for names, _ in _in_jaxpr(closed, 0, set()) for name in names}


def scopes_in(eqn: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Names of each scope inside an equation, and the name stack of what carries it, from the equation on."""
    yield from _in_eqn(eqn, set())


def _in_eqn(eqn: Any, seen: set[Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    length = _compat.scan_parts(eqn).length if eqn.primitive.name == "scan" else 0
    for jaxpr in jaxprs_of(eqn):
        yield from _in_jaxpr(jaxpr, length, seen)


def _in_jaxpr(jaxpr: Any, length: int, seen: set[Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """``length``: of the scan whose body it is, else 0."""
    if (id(jaxpr), length) in seen:
        return
    seen.add((id(jaxpr), length))
    stacks: set[str] = set()
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        stack = _compat.name_stack(eqn)
        if stack not in stacks:
            stacks.add(stack)
            yield from _on_path(stack, length)
        yield from _in_eqn(eqn, seen)


def _on_path(stack: str, length: int) -> Iterator[tuple[tuple[str, ...], str]]:
    path = path_of(stack)
    for at, name in enumerate(path):
        if at == 0 and length:
            for i in range(length):
                yield called((Iteration(i, length), *path), 1), stack
        else:
            assert isinstance(name, str), "iterations come from unrolling"
            yield (name,), stack
