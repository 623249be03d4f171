"""Schedules by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import TypeVar

from .._errors import ScheduleError
from ._types import AbstractSchedule, Order

_factories: dict[str, Callable[..., AbstractSchedule]] = {}

Factory = TypeVar("Factory", bound=Callable[..., AbstractSchedule])


def register(schedule: Factory, name: str | None = None) -> Factory:
    """Make a schedule known by name.

    Args:
      schedule: a schedule class, or a function that gives a schedule; called without
        arguments when the name is looked up.
      name: the name; a class's own `name` by default.

    Returns:
      `schedule`, so that this serves as a decorator of a class.

    Raises:
      ScheduleError: there is no name, another schedule has it, or it is no class or function.

    Example:
      >>> import functools
      >>> from manymesh.schedules import Interleaved1F1B
      >>> _ = register(functools.partial(Interleaved1F1B, 4), "interleaved-4")
      >>> get("interleaved-4")
      Interleaved1F1B(virtual_stages=4)
    """
    found: object = name if name is not None else getattr(schedule, "name", None)
    if not isinstance(found, str):
        raise ScheduleError(f"register: {schedule!r} has no name; give one as register(schedule, name).")
    if not callable(schedule):
        raise ScheduleError(
            f"register: {schedule!r} cannot be called; give its class {type(schedule).__name__}, or a function that makes one, as "
            f"register(lambda: {type(schedule).__name__}(...), {found!r})."
        )
    if _factories.get(found, schedule) is not schedule:
        raise ScheduleError(f"register: the name '{found}' is taken by {_factories[found]!r}; choose another.")
    _factories[found] = schedule
    return schedule


def names() -> tuple[str, ...]:
    """The names of all registered schedules, sorted."""
    return tuple(sorted(_factories))


def get(schedule: str | AbstractSchedule) -> AbstractSchedule:
    """The schedule of a name, or the schedule itself.

    Args:
      schedule: a registered name, or a schedule.

    Returns:
      The schedule.

    Raises:
      ScheduleError: the name is unknown, or needs arguments; or the object is no schedule.

    Example:
      >>> get("1f1b")
      OneFOneB()
    """
    if isinstance(schedule, AbstractSchedule):
        return schedule
    if isinstance(schedule, type) and issubclass(schedule, AbstractSchedule):
        raise ScheduleError(
            f"expected a schedule, found the class {schedule.__name__}; write {schedule.__name__}(...)."
        )
    if isinstance(getattr(schedule, "schedule", None), AbstractSchedule):
        raise ScheduleError(
            f"expected a schedule, found {type(schedule).__name__}, which has one; write choice.schedule, and "
            "num_microbatches=choice.num_microbatches."
        )
    if isinstance(schedule, Order):
        raise ScheduleError(
            f"expected a schedule, found an {schedule!r}; write Custom(order.rows), which has this order."
        )
    if callable(getattr(schedule, "order", None)):
        raise ScheduleError(
            f"expected a schedule, found {type(schedule).__name__}, which has an order and is none; write "
            f"class {type(schedule).__name__}(AbstractSchedule), of manymesh.schedules."
        )
    if not isinstance(schedule, str):
        raise ScheduleError(
            f"expected the name of a schedule or a schedule, found {schedule!r}; names: {', '.join(names())}."
        )
    if schedule not in _factories:
        near = _nearest(schedule)
        hint = f"; did you mean '{near}'?" if near else "."
        raise ScheduleError(f"unknown schedule '{schedule}'{hint} Known: {', '.join(names())}.")
    factory = _factories[schedule]
    parameters = inspect.signature(factory).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise ScheduleError(
            f"schedule '{schedule}' needs {', '.join(needed)}; give a schedule, such as "
            f"{getattr(factory, '__name__', schedule)}({', '.join(needed)}), in place of its name"
            f"{', or custom_schedule= beside it' * (schedule == 'custom')}."
        )
    made = factory()
    if not isinstance(made, AbstractSchedule):
        raise ScheduleError(
            f"schedule '{schedule}': {getattr(factory, '__name__', factory)}() gives {made!r}, expected a schedule; return one, such as "
            "OneFOneB()."
        )
    return made


def _nearest(word: str) -> str | None:
    """The name that was probably meant; that of another system for the same may say more, as "Schedule1F1B"."""
    said, plain = _letters(word), {name: _letters(name) for name in _factories}
    within = [name for name, letters in plain.items() if letters in said]
    begun = [name for name, letters in plain.items() if len(said) > 3 and letters.startswith(said)]
    close = difflib.get_close_matches(word.lower(), plain, n=1, cutoff=0.5)
    return max(within, key=len) if within else next(iter([*begun, *close]), None)


def _letters(word: str) -> str:
    return "".join(filter(str.isalnum, word.lower()))
