"""NNX modules as tasks: parameters keep their paths, a call becomes one marked equation.

What a task changes in its modules (statistics, counts of random keys, caches) leaves it as results. What it only reads
does not, so that a parameter that two tasks read is no chain from one to the other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import flax.nnx as nnx
import jax

from .. import _compat
from .._errors import TaskError
from .._mark import call_marked, current_recording
from .._stands_for import stands_for
from .._task import Task
from .._types import PyTree
from .._wrapping import check_framework, describe_task, names_of, plain_name, reduce_wrapped, wrap_class
from ..meta._axes import Axes
from ..meta._constrain import constrain
from ..meta._rules import Rules
from ._lift import PureResult, call_lifted, constrained, is_split, pure

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
    """Wraps an NNX module so that calling it inside a step is a task.

    Args:
      model: one of the following; without it, a decorator comes back.

        - a module class (also a ``functools.partial`` of one): a subclass comes back, used in its place;
        - a module: a copy comes back that shares its variables and has the same paths;
        - a bound method of a module, such as ``model.embed.attend``: how a tied output head runs on the submesh of
          the last stage while the table belongs to the first. A model may keep it, which shares the module with it;
        - a function with modules among its arguments.
      name: name of the task; defaults to that of the class or function.
      task: a ready `manymesh.Task`; excludes every argument below but ``methods``.
      mesh, devices, device_axes, logical_axes: as for `manymesh.Task`. Variables that name their axes
        (``nnx.with_partitioning``, ``nnx.Param(..., out_sharding=...)``) are constrained by them.
      methods: the methods of the module that are tasks; a string is one of them.

    Returns:
      The wrapped model, of the kind that was given. Outside a step it computes as the plain one. It works under
      ``nnx.grad``, ``nnx.value_and_grad``, ``nnx.remat``, ``nnx.vmap`` and in ``nnx.scan``; what it changes in its
      modules is changed in the caller's.

    Raises:
      TaskError: ``model`` is none of the above, it has no such method, or the placement is contradictory.

    Example:
      >>> import jax, jax.numpy as jnp, manymesh as mm
      >>> from flax import nnx
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.front = mm.nnx.task(nnx.Linear, devices=[0])(4, 8, rngs=rngs)
      ...         self.back = mm.nnx.task(nnx.Linear, devices=[1])(8, 2, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.back(nnx.relu(self.front(x)))
      >>> model = Model(nnx.Rngs(0))
      >>> y = mm.nnx.jit(lambda model, x: model(x))(model, jnp.ones((3, 4)))
      >>> [sorted(d.id for d in v.devices()) for v in (model.front.kernel.get_value(), model.back.kernel.get_value(), y)]
      [[0], [1], [1]]
    """
    described = describe_task("nnx.task", name, task, mesh, devices, device_axes, logical_axes)
    if model is None:
        return lambda model: _wrap(model, described, names_of(methods))
    return _wrap(model, described, names_of(methods))


def _wrap(model: Any, described: Task, methods: tuple[str, ...]) -> Any:
    if inspect.isclass(model) and issubclass(model, nnx.Module):
        return _wrap_class(model, described, methods)
    if isinstance(model, functools.partial) and inspect.isclass(model.func):
        return functools.partial(_wrap(model.func, described, methods), *model.args, **model.keywords)
    if isinstance(model, nnx.Module):
        wrapped: nnx.Module = object.__new__(_wrap_class(type(model), described, methods))
        vars(wrapped).update(vars(model))  # the same variables: what one learns, the other knows
        return wrapped
    owner = getattr(model, "__self__", None)
    if isinstance(owner, nnx.Module):
        return _Method(owner, _lift(model.__func__, described))
    check_framework("nnx.task", model)
    if callable(model) and not inspect.isclass(model):
        return _lift(model, described)
    inside = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Module))
    several = any(isinstance(x, nnx.Module) for x in inside)
    hint = "make a task of each module in it" if several else "a Linen module takes manymesh.flax.task"
    found = "" if several else f"{model!r:.80} of type "
    raise TaskError(
        "nnx.task: expected an NNX module (class, instance or method) or a function of modules, found "
        f"{found}{type(model).__name__}; {hint}"
    )


class _Method(nnx.Module):
    """A bound method: a node of the graph, so that one that a model keeps is of the module that a transformation gives to it."""

    def __init__(self, module: nnx.Module, call: Callable[..., Any]) -> None:
        self.module, self.call = module, call

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        return self.call(self.module, *args, **kwargs)


def _wrap_class(model: type, described: Task, methods: tuple[str, ...]) -> type:
    return wrap_class("nnx.task", model, described, methods, _lift, extra={"__reduce__": _reduce})


def _reduce(module: nnx.Module) -> tuple[Any, ...]:
    return reduce_wrapped(_wrap_class, module)


def _lift(fun: Callable[..., Any], described: Task) -> Callable[..., Any]:
    """A function of modules that is a task inside a recording and itself outside."""

    @functools.wraps(fun)
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if current_recording() is None:
            return fun(*args, **kwargs)
        default = getattr(fun, "__name__", "task")
        if args and isinstance(args[0], nnx.Module):
            default = plain_name(type(args[0]).__name__)
        return call_lifted(_marked(fun, described.named(default)), args, kwargs)

    return call


def _marked(fun: Callable[..., Any], described: Task) -> Callable[..., PureResult]:
    untouched: list[bool] = []
    pure_fun = pure(fun, untouched.append)

    def run(*args: PyTree, **kwargs: PyTree) -> PureResult:
        leaves, structure = jax.tree.flatten((args, kwargs))
        seen: list[tuple[Any, list[int | None]]] = []

        def body(leaves: list[Any]) -> tuple[list[Any], Any]:
            args, kwargs = constrained(jax.tree.unflatten(structure, leaves), _constrain)
            given = jax.tree.leaves((args, kwargs))
            position = {id(x): i for i, x in enumerate(given)}
            nodes, out = pure_fun(*args, **kwargs)
            left, nodes_structure = jax.tree.flatten(nodes)
            unchanged = [position.get(id(x)) for x in left]
            seen.append((nodes_structure, unchanged))
            return [x for x, i in zip(left, unchanged, strict=True) if i is None], out

        stands_for(body, fun)
        record = current_recording()
        assert record is not None, "modules are lifted in recordings only"
        changed, out = call_marked(record, described, body, (leaves,), {})
        if untouched[-1] and not any(map(is_split, jax.tree.leaves(out, is_leaf=is_split))):
            # Nothing to write back: a step that closes over a module may call it, though it could not change it.
            return None, out
        nodes_structure, unchanged = seen[-1]
        new = iter(changed)
        return jax.tree.unflatten(nodes_structure, [next(new) if i is None else leaves[i] for i in unchanged]), out

    return run


def _constrain(value: Any, axes: Axes, rules: Rules) -> Any:
    return constrain(value, axes.names, None, "nnx.task", rules)
