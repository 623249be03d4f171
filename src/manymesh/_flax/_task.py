"""Linen modules as tasks: the module keeps its parameters, its call becomes one marked equation.

A wrapped class is a subclass of the class it wraps. Outside ``mm.jit`` its methods are the inherited ones.
In a trace they are *lifted*, as Flax's own transformations are: variables and random keys become arguments
and results of a pure function, which the task machinery marks. Lifting adds no level to the tree of
variables, and the names that Flax gives to unnamed modules are those of the plain class, so a checkpoint
fits a model with and without tasks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import flax.linen as nn
import jax
from flax.core import Scope, lift
from flax.core import meta as flax_meta
from flax.core.scope import in_filter
from flax.linen import transforms

from .. import _compat, meta
from .._errors import TaskError
from .._mark import call_marked, current_recording, ignore_transforms
from .._scope import enter_scope
from .._stands_for import stands_for
from .._task import Task
from .._types import PyTree
from .._wrapping import check_framework, describe_task, names_of, plain_name, reduce_wrapped, wrap_class
from ..meta._rules import rules_of_flax

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
    """Wraps a Linen module so that calling it inside ``mm.jit`` is a task.

    Args:
      model: one of the following; without it, a decorator comes back.

        - a module class (also a ``functools.partial`` of one): a subclass comes back, used in its place;
        - a module instance, bound or not: an equal instance comes back;
        - a bound method of a module, such as ``self.embed.attend``: calling the result is a task that
          receives just the variables of that module. This is how a tied output head runs on the submesh of
          the last stage while the table belongs to the first;
        - a function whose first argument is a module (as for Flax's transformations), or a function
          that returns a module.
      name: name of the task; defaults to the name of the module, else of its class. It is no module name
        and does not show in the parameters.
      task: a ready `manymesh.Task`; excludes every argument below but ``methods``.
      mesh, devices, device_axes, logical_axes: as for `manymesh.Task`. Boxed parameters
        (`shard_axes`, ``nn.with_partitioning``, ``nn.with_logical_partitioning``) are constrained by them.
      methods: the methods of the module that are tasks; a string is one of them.

    Returns:
      The wrapped model, of the kind that was given. Parameters, variables, random keys and results are those
      of the plain model. Arrays among the arguments are traced; strings, bools, None, enums and other
      Python objects stay as they are.

    Raises:
      TaskError: ``model`` is none of the above, it has no such method, or the placement is
        contradictory (see `manymesh.Task`).

    Example:
      >>> import jax, jax.numpy as jnp, flax.linen as nn, manymesh as mm
      >>> from manymesh.flax import shard_axes, task
      >>> mesh = jax.make_mesh((2, 2), ("x", "y"))
      >>> DenseTask = task(nn.Dense, mesh=mesh)
      >>> model = DenseTask(features=16, kernel_init=shard_axes("x", None))
      >>> params = model.init(jax.random.key(0), jnp.ones((16, 9)))["params"]
      >>> jax.tree.map(jnp.shape, nn.unbox(params))
      {'bias': (16,), 'kernel': (9, 16)}
    """
    described = describe_task("flax.task", name, task, mesh, devices, device_axes, logical_axes)
    if model is None:
        return lambda model: _wrap(model, described, names_of(methods))
    return _wrap(model, described, names_of(methods))


def _wrap(model: Any, described: Task, methods: tuple[str, ...]) -> Any:
    if inspect.isclass(model) and issubclass(model, nn.Module):
        return _wrap_class(model, described, methods)
    if isinstance(model, functools.partial):
        return functools.partial(_wrap(model.func, described, methods), *model.args, **model.keywords)
    if isinstance(model, nn.Module):
        # A copy with another class, not a new instance: a module that its parent has named already
        # would claim the name twice.
        wrapped = copy.copy(model)
        object.__setattr__(wrapped, "__class__", _wrap_class(type(model), described, methods))
        return wrapped
    owner = getattr(model, "__self__", None)
    if isinstance(owner, nn.Module):
        return functools.partial(_lift(model.__func__, described), owner)
    check_framework("flax.task", model)
    if callable(model) and not inspect.isclass(model):
        return _wrap_function(model, described, methods)
    raise TaskError(
        f"flax.task: expected a Linen module (class, instance or method), found {model!r} of type "
        f"{type(model).__name__}; wrap functions of arrays with manymesh.task"
    )


def _wrap_function(fun: Callable[..., Any], described: Task, methods: tuple[str, ...]) -> Callable[..., Any]:
    lifted = _lift(fun, described)

    @functools.wraps(fun)
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if args and isinstance(args[0], nn.Module):
            return lifted(*args, **kwargs)
        made = fun(*args, **kwargs)
        if isinstance(made, nn.Module) or (inspect.isclass(made) and issubclass(made, nn.Module)):
            return _wrap(made, described, methods)
        raise TaskError(
            f"flax.task: {getattr(fun, '__name__', fun)!r} neither takes a Linen module as its first argument nor "
            "returns one; wrap functions of arrays with manymesh.task"
        )

    return call


def _lift(method: Callable[..., Any], described: Task) -> Callable[..., Any]:
    """An unbound method that is a task inside a recording and itself outside."""

    @functools.wraps(method)  # also copies the attributes by which Flax knows compact and wrapped methods
    def call(module: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if current_recording() is None or module.scope is None:
            return method(module, *args, **kwargs)
        named = described.named(module.name or plain_name(type(module).__name__))
        transform = functools.partial(_mark_scopes, named, method, module.is_initializing())
        return transforms.lift_transform(transform, method)(module, *args, **kwargs)

    return call


def _mark_scopes(
    described: Task, method: Callable[..., Any], initializing: bool, fun: Callable[..., Any]
) -> Callable[..., Any]:
    """Marks a function of scopes, which runs a method, by making their variables and random keys its arguments."""

    def mark(
        make_scopes: Any, repack: Any, variables: PyTree, rngs: Any, *args: PyTree, **kwargs: PyTree
    ) -> tuple[Any, Any]:
        def body(variables: PyTree, rngs: Any, args: PyTree, kwargs: PyTree) -> tuple[Any, Any]:
            with _task_rules(described):
                with _unconstrained() if initializing else contextlib.nullcontext():
                    scopes = make_scopes(_readable(variables, mutable), rngs)
                    for scope, counters in zip(jax.tree.leaves(scopes), counted, strict=True):
                        scope.__class__ = _TaskScope
                        _reset(scope.rng_counters, counters)
                    out = fun(scopes, *args, **kwargs)
                made = repack(scopes)
                return out, jax.tree.map(_constrained, made, is_leaf=_is_box) if initializing else made

        stands_for(body, method)
        record = current_recording()
        assert record is not None, "modules are lifted in recordings only"
        result: tuple[Any, Any] = call_marked(record, described, body, (variables, rngs, args, kwargs), {})
        return result

    packed: Callable[..., Any] = lift.pack(mark, (True,), (True,), (True,), enable_kwargs=True)
    mutable: list[Any] = []
    counted: list[Any] = []

    def call(scopes: list[Scope], *args: PyTree, **kwargs: PyTree) -> PyTree:
        mutable[:] = [scope.mutable for scope in scopes]
        counted[:] = [_copied(scope.rng_counters) for scope in scopes]
        return packed(scopes, *args, **kwargs)

    return call


def _copied(counters: Any) -> Any:
    """Counters of random keys, those of the scopes inside included; what names these stays the same object."""
    return {name: _copied(count) if isinstance(count, dict) else count for name, count in counters.items()}


def _reset(counters: Any, before: Any) -> None:
    """Counts random keys from where a method began, however often JAX traces it; scopes inside share the dictionaries."""
    for name in list(counters):
        if name not in before:
            del counters[name]
        elif isinstance(counters[name], dict):
            _reset(counters[name], before[name])
        else:
            counters[name] = before[name]


def _readable(variables: PyTree, mutable: list[Any]) -> Any:
    """The variables with Flax's boxes replaced by ours where they can only be read.

    Our boxes know the task: its rules, its axes, and what to do where it has none. Collections that can be
    written keep Flax's boxes, for they come out again.
    """

    def convert(name: str, collection: Any) -> PyTree:
        if any(in_filter(m, name) for m in mutable):
            return collection
        return jax.tree.map(_our_box, collection, is_leaf=_is_box)

    return tuple(
        tuple({name: convert(name, collection) for name, collection in group.items()} for group in groups)
        for groups in variables
    )


def _is_box(x: Any) -> bool:
    return isinstance(x, flax_meta.Partitioned)


def _constrained(x: Any) -> Any:
    return x.replace_boxed(_our_box(x).unbox()) if _is_box(x) else x


def _our_box(x: Any) -> Any:
    if type(x) is flax_meta.Partitioned:
        return meta.Partitioned(_our_box(x.value), x.names)
    if type(x) is nn.LogicallyPartitioned:
        rules = x.rules or rules_of_flax() or None
        return meta.LogicallyPartitioned(_our_box(x.value), x.names, rules=rules)
    return x


class _TaskScope(Scope):
    """A scope whose initializers do not see the task.

    Flax calls the initializer of a parameter that exists, for its shape, and layers that shape their kernels afterwards
    read the box before it has that shape. Scopes that Flax's own lifted transformations make inside a task are plain.
    """

    def param(self, name: str, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def hidden(*args: Any, **kwargs: Any) -> Any:
            with _unconstrained():
                return init_fn(*args, **kwargs)

        return super().param(name, hidden, *args, **kwargs)

    def push(self, *args: Any, **kwargs: Any) -> Scope:
        scope = super().push(*args, **kwargs)
        scope.__class__ = _TaskScope
        return scope


@contextlib.contextmanager
def _unconstrained() -> Iterator[None]:
    """Hides the task while parameters are created.

    Flax reads a new box before it has its final shape (``nn.DenseGeneral``), and its own boxes know nothing of
    the names that only the task knows. The parameters are constrained when they are complete.
    """
    with ignore_transforms(), enter_scope(None), _compat.without_mesh():
        yield


def _task_rules(described: Task) -> Any:
    """Leaves names without a meaning in a task without named axes; in others they have that of the task (`_mark`)."""
    unnamed = described.mesh is not None and not described.has_named_axes
    return nn.logical_axis_rules(()) if unnamed else contextlib.nullcontext()


class _PlainNames(nn.Module):
    """Names an unnamed module as its plain class would be named.

    Stands last before `nn.Module` among the bases of a wrapped class, so that whatever the user's
    ``__post_init__`` does has happened. Serves Flax 0.12, where ``Module.__post_init__`` derives the name
    from the name of the class, which is ``Task[Dense]`` here.
    """

    def __post_init__(self) -> None:
        parent = self.parent
        if not isinstance(parent, nn.Module | Scope | type(None)):  # not said: the module being called
            parent = nn.module._context.module_stack[-1]
        if isinstance(parent, nn.Module) and self.name is None and not parent._state.in_setup:
            prefix = plain_name(type(self).__name__)
            count = parent._state.autoname_cursor.get(prefix, 0)
            object.__setattr__(self, "name", f"{prefix}_{count}")
            parent._state.autoname_cursor[prefix] = count + 1
        super().__post_init__()


def _wrap_class(model: type[nn.Module], described: Task, methods: tuple[str, ...]) -> type[nn.Module]:
    # Instances that are equal hash alike: a module that is a static argument of a jitted function does not make it
    # compile again.
    return wrap_class("flax.task", model, described, methods, _lift, (_PlainNames,), {"__reduce__": nn.nowrap(_reduce)})


def _reduce(module: nn.Module) -> tuple[Any, ...]:
    return reduce_wrapped(_wrap_class, module)
