"""What the adapters share: reading a task's description, and wrapped classes that pickle.

An adapter makes of a module class a subclass whose methods are tasks. The same task of the same class is the same
subclass, so that instances compare equal and nothing is compiled twice.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ._errors import TaskError
from ._task import Task, check_task

_WRAPPER = re.compile(r"Task\[(.*)\]")


def describe_task(
    where: str, name: str | None, task: Task | None, mesh: Any, devices: Any, axes: Any, logical_axes: Any
) -> Task:
    """The `Task` that the arguments of an adapter's ``task`` describe.

    Args:
      where: the adapter's function, for messages.
      name, task, mesh, devices, axes, logical_axes: its arguments.

    Raises:
      TaskError: ``task`` together with arguments of another one; as for `Task`.
    """
    if task is None:
        return Task(name, mesh=mesh, devices=devices, device_axes=axes, logical_axes=logical_axes)
    check_task(where, task)
    if any(a is not None for a in (mesh, devices, axes, logical_axes)):
        raise TaskError(f"{where}: task= is a complete description; give it alone, or mesh=, devices=, ... without it")
    return task if name is None else Task(name, **_placement(task))


def _placement(described: Task) -> dict[str, Any]:
    """The arguments that make a `Task` with the placement of this one."""
    if described.mesh is None or described.has_named_axes:
        return {"mesh": described.meshes or described.mesh, "logical_axes": described.logical_axes}
    return {"devices": described.mesh.devices}


def names_of(methods: str | Sequence[str]) -> tuple[str, ...]:
    """The names of methods that were given, as one or several."""
    return (methods,) if isinstance(methods, str) else tuple(methods)


_FRAMEWORKS = {"flax.linen": ("a Linen", "flax"), "flax.nnx": ("an NNX", "nnx"), "equinox": ("an Equinox", "equinox")}


def check_framework(where: str, model: object) -> None:
    """Refuses a module of another framework, which is a function, too, but one whose arrays nobody would see.

    Raises:
      TaskError: it is one; the message says what takes it.
    """
    own = where.partition(".")[0]
    for package, (kind, adapter) in _FRAMEWORKS.items():
        if adapter != own and any(f"{c.__module__}.".startswith(f"{package}.") for c in type(model).__mro__):
            raise TaskError(
                f"{where}: found {kind} module, a {type(model).__name__}; write manymesh.{adapter}.task for it"
            )


def plain_name(name: str) -> str:
    """``CheckpointTask[Block]`` -> ``CheckpointBlock``."""
    while (plain := _WRAPPER.sub(r"\1", name)) != name:
        name = plain
    return name


def wrap_class(
    where: str,
    model: type,
    described: Task,
    methods: Sequence[str],
    lift: Callable[[Callable[..., Any], Task], Callable[..., Any]],
    more_bases: tuple[type, ...] = (),
    extra: Mapping[str, Any] | None = None,
) -> type:
    """The subclass of a module class whose methods are tasks; one made before, if there is one.

    Args:
      where: the adapter's function, for messages.
      model: the class.
      described: the task.
      methods: names of the methods that become tasks.
      lift: makes a task of an unbound method.
      more_bases: bases after the class.
      extra: further attributes.

    Raises:
      TaskError: the class has no such method.
    """
    key = (described, tuple(methods))
    known: type
    for known in type.__subclasses__(model):
        if known.__dict__.get("_manymesh_task") == key:
            return known
    missing = [m for m in methods if not callable(getattr(model, m, None))]
    if missing:
        raise TaskError(
            f"{where}: {plain_name(model.__name__)} has no method {missing[0]!r}; methods= names methods of the model"
        )
    body: dict[str, Any] = {m: lift(inspect.getattr_static(model, m), described) for m in methods}
    body |= {
        "_manymesh_task": key,
        "__module__": model.__module__,
        "__qualname__": f"Task[{model.__qualname__}]",
        "__doc__": model.__doc__,
        **(extra or {}),
    }
    return type(model)(f"Task[{model.__name__}]", (model, *more_bases), body)


def object_of(value: Any, kind: type) -> Any:
    """The object of a kind that a wrapped function is, is a method of, or closes over; None where it is no such function."""
    while not isinstance(value, kind) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
        cells = inspect.isfunction(value) and value.__closure__ or ()
        for of in (value, getattr(value, "__self__", None), *map(_contents, cells)):
            if isinstance(of, kind):
                return of
    return None


def _contents(cell: Any) -> Any:
    """What a variable of a closure is; None where it is not yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def reduce_wrapped(wrap: Callable[..., type], module: Any) -> tuple[Any, ...]:
    """Pickles by the plain class and the ids of the devices: neither a class made here nor a device pickles.

    Args:
      wrap: ``wrap(plain class, task, methods)`` makes the class again; a function of a module.
      module: the instance.
    """
    wrapped = type(module)
    plain = wrapped.__mro__[1]
    name = f"{plain.__module__}:{plain.__qualname__}"
    if _of_name(name) is wrapped:  # task() was a decorator
        return _made, (name,), dict(vars(module))
    described, methods = wrapped.__dict__["_manymesh_task"]
    placement = _placement(described)
    if described.mesh is not None:
        ids = np.array([d.id for d in described.mesh.devices.flat]).reshape(described.mesh.devices.shape)
        axes = described.mesh.axis_names if described.has_named_axes else None
        placement = {"devices": ids, "device_axes": axes, "logical_axes": described.logical_axes}
    return functools.partial(_restore, wrap), (plain, described.name, placement, methods), dict(vars(module))


def _of_name(name: str) -> Any:
    """What a name leads to; None for what a function has defined."""
    try:
        return pkgutil.resolve_name(name)
    except (AttributeError, ImportError, ValueError):
        return None


def _made(name: str) -> Any:
    return object.__new__(pkgutil.resolve_name(name))


def _restore(wrap: Callable[..., type], plain: type, name: str | None, placement: dict[str, Any], methods: Any) -> Any:
    wrapped = wrap(plain, Task(name, **placement), methods)
    return object.__new__(wrapped)
