"""What code inside a task may ask about the task it is in.

The lowest layer that knows tasks exist. Boxes and sharding constraints call
:func:`current_scope` to learn whether a task surrounds them and how it maps the names
of axes to its mesh; the task machinery calls :func:`enter_scope` around the body of a
task while it is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, PartitionSpec


@dataclass(frozen=True)
class Scope:
    """The surroundings of the code that is being traced.

    Attributes:
      task_name: name of the task, for messages.
      mesh: the abstract mesh of the task's submesh; None where the task has no named axes,
        so that a constraint means replication.
      resolve: maps per-dimension names (``tuple[str | tuple[str, ...] | None, ...]``), the shape of the value and the
        rules for names that the task does not know to the `PartitionSpec` that the task gives it.
      task: the `Task` itself, for the machinery that made this scope.
    """

    task_name: str
    mesh: AbstractMesh | None
    resolve: Callable[[tuple[object, ...], tuple[int, ...], tuple[tuple[str, Any], ...]], PartitionSpec]
    task: Any = None


_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("manymesh_scope", default=None)


def current_scope() -> Scope | None:
    """The innermost task being traced, or None outside every task."""
    return _scope.get()


Carrier = Callable[[Any, tuple[Any, ...], Any, object], Any]

_carrier: contextvars.ContextVar[Carrier | None] = contextvars.ContextVar("manymesh_carrier", default=None)


def current_carrier() -> Carrier | None:
    """What takes along a constraint made outside every task, for a task that code may turn out to be in.

    Called with the value, the names of its axes, the rules for them, and what constrains it; returns the value.
    None where there is a task already, or where no such task can come.
    """
    return _carrier.get() if _scope.get() is None else None


def names_may_be_known() -> bool:
    """Whether there is a task that may know names of axes, or one may come."""
    return _scope.get() is not None or _carrier.get() is not None


@contextlib.contextmanager
def carrying(carrier: Carrier | None) -> Iterator[None]:
    """Makes ``carrier`` take constraints along inside the block; None lets them be."""
    token = _carrier.set(carrier)
    try:
        yield
    finally:
        _carrier.reset(token)


@contextlib.contextmanager
def enter_scope(scope: Scope | None) -> Iterator[None]:
    """Makes ``scope`` the current one inside the block; None hides an outer task."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)
