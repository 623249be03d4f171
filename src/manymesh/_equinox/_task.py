"""Equinox modules as tasks: the module keeps its fields, its call becomes one marked equation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import equinox as eqx

from .. import _compat
from .._errors import TaskError
from .._mark import task as plain_task
from .._task import Task
from .._types import PyTree
from .._wrapping import check_framework, describe_task, names_of, plain_name, reduce_wrapped, wrap_class

T = TypeVar("T")


@overload
def task(
    *,
    name: str | None = None,
    task: Task | None = None,
    mesh: Any = None,
    devices: Any = None,
    device_axes: Any = None,
    logical_axes: Any = None,
    methods: str | Sequence[str] = ("__call__",),
) -> Callable[[T], T]: ...
@overload
def task(
    model: T,
    name: str | None = None,
    *,
    task: Task | None = None,
    mesh: Any = None,
    devices: Any = None,
    device_axes: Any = None,
    logical_axes: Any = None,
    methods: str | Sequence[str] = ("__call__",),
) -> T: ...
@_compat.boundary
def task(
    model: Any = None,
    name: str | None = None,
    *,
    task: Task | None = None,
    mesh: Any = None,
    devices: Any = None,
    device_axes: Any = None,
    logical_axes: Any = None,
    methods: str | Sequence[str] = ("__call__",),
) -> Any:
    """Wraps an Equinox module so that calling it inside a step is a task.

    Args:
      model: one of the following; without it, a decorator comes back.

        - a module class (also a ``functools.partial`` of one): a subclass comes back, used in its place;
        - a module: one with equal fields and the same paths comes back;
        - a bound method of a module: its arrays are those of the module;
        - a function, as for `manymesh.task`.
      name: name of the task; defaults to that of the class or function.
      task: a ready `manymesh.Task`; excludes every argument below but ``methods``.
      mesh, devices, device_axes, logical_axes: as for `manymesh.Task`. Boxes of `manymesh.meta` around fields, and
        `manymesh.with_sharding_constraint`, name axes by them.
      methods: the methods of the module that are tasks; a string is one of them.

    Returns:
      The wrapped model, of the kind that was given. Arrays in the module and among the arguments are traced, the
      rest stays as it is.

    Raises:
      TaskError: ``model`` is none of the above, it has no such method, or the placement is contradictory.

    Example:
      >>> import equinox as eqx, jax, jax.numpy as jnp, manymesh as mm
      >>> keys = jax.random.split(jax.random.key(0))
      >>> front = mm.equinox.task(eqx.nn.Linear(2, 4, key=keys[0]), "front", devices=[0])
      >>> back = mm.equinox.task(eqx.nn.Linear(4, 1, key=keys[1]), "back", devices=[1])
      >>> step = mm.equinox.jit(lambda front, back, x: back(jnp.tanh(front(x))))
      >>> [(f.name, f.submesh) for f in step.lower(front, back, jnp.ones(2)).program.fragments]
      [('front', 0), ('back', 1)]
    """
    described = describe_task("equinox.task", name, task, mesh, devices, device_axes, logical_axes)
    if model is None:
        return lambda model: _wrap(model, described, names_of(methods))
    return _wrap(model, described, names_of(methods))


def _wrap(model: Any, described: Task, methods: tuple[str, ...]) -> Any:
    if inspect.isclass(model) and issubclass(model, eqx.Module):
        return _wrap_class(model, described, methods)
    if isinstance(model, functools.partial) and inspect.isclass(model.func):
        return functools.partial(_wrap(model.func, described, methods), *model.args, **model.keywords)
    owner = getattr(model, "__self__", None)
    if isinstance(owner, eqx.Module):
        return eqx.Partial(_lift(model.__func__, described), owner)  # a pytree: a module may keep it
    if isinstance(model, eqx.Module):
        wrapped: eqx.Module = object.__new__(_wrap_class(type(model), described, methods))
        for field, value in vars(model).items():
            object.__setattr__(wrapped, field, value)
        return wrapped
    check_framework("equinox.task", model)
    if callable(model) and not inspect.isclass(model):
        return plain_task(model, task=described.named(getattr(model, "__name__", "task")))
    raise TaskError(
        f"equinox.task: expected an Equinox module (class, instance or method) or a function, found {model!r} of type "
        f"{type(model).__name__}"
    )


def _wrap_class(model: type, described: Task, methods: tuple[str, ...]) -> type:
    return wrap_class("equinox.task", model, described, methods, _lift, extra={"__reduce__": _reduce})


def _reduce(module: eqx.Module) -> tuple[Any, ...]:
    return reduce_wrapped(_wrap_class, module)


def _lift(method: Any, described: Task) -> Callable[..., Any]:
    """An unbound method as a task; Equinox keeps the plain function in a descriptor."""
    fun: Callable[..., Any] = getattr(method, "method", method)

    @functools.wraps(fun)
    def call(module: eqx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        named = described.named(plain_name(type(module).__name__))
        return plain_task(fun, task=named)(module, *args, **kwargs)

    return call
