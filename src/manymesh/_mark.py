"""Marks in a traced program: tasks, and constraints in logical names.

A task in a jaxpr is a named inner ``jax.jit``. Its name leads to the `Task` through the
`Recording` of the trace it belongs to. The mark survives every JAX transformation; forward and
backward come out as separate equations with residuals flowing between them. Outside a recording
nothing is marked: the wrapped function is the plain function, which is what plain ``jax.jit``,
eager calls and the reference mode see.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from . import _compat
from ._changed import changed
from ._errors import ArgumentError, AxisError, ManyMeshError, TaskError
from ._findings import Finding
from ._implicit import Matcher, told
from ._key import Keys
from ._notes import note_task
from ._repeats import Differentiable
from ._scope import Scope, carrying, current_scope, enter_scope
from ._shown import name_of
from ._stands_for import stands_for
from ._task import CONSTRAINT, AxisRule, Task, check_name, check_task
from ._types import PyTree
from ._vmapped import resolve_vmapped
from .meta._rules import AnyOther, as_rules, get_logical_axis_rules, rules_around, rules_in_task, rules_of_flax

P = ParamSpec("P")
R = TypeVar("R")

MARK = "__mm"


@dataclass(eq=False)
class Recording:
    """What the marks of one trace mean. Lives as long as the program made from it.

    Attributes:
      tasks: unique mark -> the task it stands for.
      loops: unique mark -> what `microbatch` said about the loop.
      findings: what is suspicious, in order, each once, and what it is under ``strict``.
      implicit: the tasks registered by name when the trace began.
      keys: of what tasks compute, while tracing.
      bodies: key and abstract mesh -> what such tasks compute, one jaxpr for all that are equal; while tracing.
      differentiable: the same as JAX differentiates it fastest; while tracing.
      token: a number that no other recording of this process has or had; an ``id`` could come back.
    """

    tasks: dict[str, Task] = field(default_factory=dict)
    loops: dict[str, Any] = field(default_factory=dict)
    findings: dict[Finding, type[ManyMeshError]] = field(default_factory=dict)
    implicit: Matcher = field(default_factory=Matcher)
    keys: Keys = field(default_factory=lambda: Keys(exact=True))
    bodies: dict[Any, Any] = field(default_factory=dict)
    differentiable: Differentiable = field(init=False)
    _ids: Iterator[int] = field(default_factory=itertools.count)
    token: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        self.differentiable = Differentiable(self.keys)

    def new_mark(self, name: str) -> str:
        """A name that no other mark of this trace has."""
        clean = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
        return f"{clean}{MARK}{next(self._ids)}"


_recording: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("manymesh_recording", default=None)
_ignored: contextvars.ContextVar[bool] = contextvars.ContextVar("manymesh_ignored", default=False)


def current_recording() -> Recording | None:
    """The recording of the trace under way, or None where marks have no meaning."""
    return None if _ignored.get() else _recording.get()


def _too_late(pattern: str) -> None:
    """Tells of a registration that the trace under way does not know."""
    record = current_recording()
    if record is not None:
        text = f"register_task({pattern!r}) is called in the step itself, and a step knows the registrations from before its call: it places nothing there"
        record.findings[Finding(f"{text}; call it around the call of the step")] = TaskError


told.append(_too_late)

# Each gives the context of a trace in which a framework says more than elsewhere, told whether scopes may be tasks.
frameworks: list[Callable[[bool], contextlib.AbstractContextManager[None]]] = []


@contextlib.contextmanager
def recording(record: Recording) -> Iterator[None]:
    """Traces the block as a program: tasks and loops leave marks in ``record``."""
    token = _recording.set(record)
    try:
        with contextlib.ExitStack() as stack:
            for telling in frameworks:
                stack.enter_context(telling(bool(record.implicit)))
            with _compat.separate_jit_caches(record.token), enter_scope(None), carrying(carry_box_names):
                yield
    finally:
        _recording.reset(token)
        record.keys.clear()
        record.bodies.clear()
        record.differentiable.clear()


def transforms_ignored() -> bool:
    """Whether the reference mode is on."""
    return _ignored.get()


@contextlib.contextmanager
def ignore_transforms() -> Iterator[None]:
    """The reference mode: inside, every ManyMesh transformation is the plain JAX computation.

    ``mm.jit`` is ``jax.jit`` on one device, a task is the function it wraps, `microbatch` is a loop.
    Looked up at each call, so functions wrapped before obey it too. Results of ManyMesh are defined as
    those of this mode, up to the order of floating-point sums. What plain JAX cannot run, it cannot either: two tasks, say,
    each with a `jax.shard_map` over devices of its own.

    Example:
      >>> import jax.numpy as jnp, manymesh as mm
      >>> double = mm.jit(mm.task(lambda x: 2 * x, "double", devices=[1]))
      >>> with mm.ignore_transforms():
      ...     print(double(jnp.arange(3)))
      [0 2 4]
    """
    token = _ignored.set(True)
    try:
        yield
    finally:
        _ignored.reset(token)


@overload
def task(
    *,
    name: str | None = None,
    task: Task | None = None,
    mesh: Any = None,
    devices: Any = None,
    device_axes: Any = None,
    logical_axes: Any = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def task(
    fun: Callable[P, R],
    name: str | None = None,
    *,
    task: Task | None = None,
    mesh: Any = None,
    devices: Any = None,
    device_axes: Any = None,
    logical_axes: Any = None,
) -> Callable[P, R]: ...
@_compat.boundary
def task(
    fun: Callable[..., Any] | None = None,
    name: str | None = None,
    *,
    task: Task | None = None,
    mesh: Any = None,
    devices: Any = None,
    device_axes: Any = None,
    logical_axes: Any = None,
) -> Any:
    """Wraps a pure function so that it runs as a task on a submesh.

    Args:
      fun: a pure function of pytrees. Arrays among its arguments are traced; everything else (strings,
        bools, None, enums, plain Python numbers) stays static, and so it does among the results. Without it, a
        decorator comes back.
      name: name of the task; defaults to that of the function.
      task: a ready `Task`; excludes every argument below.
      mesh, devices, device_axes, logical_axes: as for `Task`.

    Returns:
      A function with the same signature. Inside ``mm.jit`` it becomes a task, also under ``jax.grad``,
      ``jax.vjp``, ``jax.vmap`` and ``jax.checkpoint``. Anywhere else it is ``fun``.

    Raises:
      ValueError: as for `Task`; and, while tracing, a task on one submesh inside a task on another, or a function that changes
        a module of Flax NNX that it is given, and does not return it.

    Example:
      >>> import jax, jax.numpy as jnp, manymesh as mm
      >>> front = mm.task(lambda w, x: x @ w, "front", devices=[0])
      >>> @mm.task(devices=[1])
      ... def back(w, h):
      ...     return jnp.sum(h @ w)
      >>> loss = lambda ws, x: back(ws[1], front(ws[0], x))
      >>> grads = mm.jit(jax.grad(loss))((jnp.eye(2), jnp.eye(2)), jnp.ones((3, 2)))
      >>> [sorted(d.id for d in g.devices()) for g in grads]
      [[0], [1]]
    """
    check_name("task", name)
    if task is not None:
        check_task("task", task)
        if any(a is not None for a in (mesh, devices, device_axes, logical_axes)):
            raise TaskError("task: task= is a complete description; give it alone, or mesh=, devices=, ... without it")
        described = task
    else:
        described = Task(name, mesh=mesh, devices=devices, device_axes=device_axes, logical_axes=logical_axes)
    if fun is None:
        return lambda fun: _as_task(fun, name, described)
    return _as_task(fun, name, described)


def _as_task(fun: Callable[P, R], name: str | None, described: Task) -> Callable[P, R]:
    """A function that is a task inside a recording and itself outside."""
    _check_function(fun)
    described = described.named(name or name_of(fun))

    @_compat.boundary
    @functools.wraps(fun)
    def run_task(*args: P.args, **kwargs: P.kwargs) -> R:
        record = current_recording()
        if record is None:
            try:
                return fun(*args, **kwargs)
            except Exception as error:
                note_task(error, described, in_step=False)
                raise
        result: R = call_marked(record, described, fun, args, kwargs)
        return result

    return run_task


def _check_function(fun: Any) -> None:
    """Refuses what `task` cannot wrap."""
    if inspect.isclass(fun):
        of_flax = any(c.__module__.startswith("flax.") for c in fun.__mro__)
        use = "write manymesh.flax.task for a Flax module" if of_flax else "wrap a function that calls what it makes"
        raise TaskError(f"task: {fun.__name__} is a class, and calling it computes nothing yet; {use}")
    if not callable(fun):
        name = f"name={fun!r}, ..." if isinstance(fun, str) else "..."
        use = f"task(fun, {fun!r}, ...)" if isinstance(fun, str) else "task(fun, ...)"
        raise ArgumentError(
            f"task: the first argument has to be a function, found {type(fun).__name__} {fun!r}; write {use}, or "
            f"@task({name}) before the function"
        )
    if any(c.__module__.startswith("flax.linen.") for c in type(fun).__mro__) and getattr(fun, "scope", None) is None:
        kind = type(fun).__name__
        raise TaskError(
            f"task: found the Linen module {kind}(...), which computes nothing without init and apply; write "
            f"manymesh.flax.task({kind}, ...)(...), or wrap a function that calls apply"
        )


@dataclass(frozen=True)
class _Result:
    """Stands for a traced result of a task among those that are none."""

    number: int


def call_marked(record: Recording, described: Task, fun: Callable[..., Any], args: PyTree, kwargs: PyTree) -> PyTree:
    """Traces ``fun(*args, **kwargs)`` as one equation that stands for the task."""
    if manual := _compat.manual_axes():
        raise TaskError(
            f"task {described.name!r} is called inside jax.shard_map, where the axes {manual} are cut by hand already; a "
            "task runs on a whole submesh: call it outside, or call shard_map inside the task"
        )
    outer = current_scope()
    if outer is not None:
        return _call_nested(record, described, outer, fun, args, kwargs)
    scope = task_scope(record, described)
    paths, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
    leaves = [leaf for _, leaf in paths]
    traced = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]
    out_tree: list[Any] = []

    def body(*values: jax.Array) -> list[Any]:
        full = list(leaves)
        for i, v in zip(traced, values, strict=True):
            full[i] = v if described.mesh is None else _at_border(v, i)
        a, k = jax.tree.unflatten(treedef, full)
        with _surroundings(record, described, scope):
            out = fun(*a, **k)
        out_leaves, tree = jax.tree.flatten(out)
        _check_unchanged(described, full, (a, k), out_leaves)
        dynamic = {id(leaf): leaf for leaf in out_leaves if is_dynamic(leaf)}  # what is returned twice is one result
        number = {key: i for i, key in enumerate(dynamic)}
        out_tree.append((tree, [_Result(number[id(leaf)]) if is_dynamic(leaf) else leaf for leaf in out_leaves]))
        results = list(dynamic.values())
        return results if described.mesh is None else [border_p.bind(x, result=i) for i, x in enumerate(results)]

    mark = record.new_mark(described.name or "task")
    record.tasks[mark] = described
    body.__name__ = body.__qualname__ = mark
    stands_for(body, fun, [paths[i][0] for i in traced])
    try:
        operands = [_on_no_mesh(leaves[i]) for i in traced]
        outs = _call_equal(record, described, mark, jax.jit(body), operands)
    except Exception as error:
        note_task(error, described, in_step=True)
        _refuse_other_mesh(error, described)
        raise
    tree, leaves = out_tree[-1]
    return jax.tree.unflatten(tree, [outs[x.number] if isinstance(x, _Result) else x for x in leaves])


def _check_unchanged(described: Task, given: list[Any], after: PyTree, results: list[Any]) -> None:
    """Refuses a function that changes modules among its arguments in place: a task is given modules of its own.

    A `State` of Equinox says itself that it was used twice.
    """
    modules = jax.tree.map(
        lambda x: x if _is_of_nnx(x) else None, after, is_leaf=lambda x: not isinstance(x, dict | list | tuple)
    )
    if (lost := changed(given, modules, results)) is not None:
        raise TaskError(
            f"task {described.name!r}: the function changes {lost} in place, which would be lost, for a task is given modules of "
            "its own; use manymesh.nnx.task, which brings the change back, or return what is new"
        )


def _is_of_nnx(x: Any) -> bool:
    return any(c.__module__.startswith("flax.nnx.") for c in type(x).__mro__)


def _at_border(value: Any, operand: int) -> Any:
    """What enters a task comes on no mesh; so does its cotangent, which leaves the task, on its way back."""
    return value if jax.numpy.issubdtype(value.dtype, jax.dtypes.extended) else border_p.bind(value, operand=operand)


def _on_no_mesh(value: Any) -> Any:
    """What the user put on a mesh outside of tasks (`jax.device_put`, a constraint) comes without it."""
    return value if jax.typeof(value).sharding.mesh.empty else border_p.bind(value)


def _call_equal(record: Recording, described: Task, mark: str, jitted: Any, operands: list[Any]) -> list[Any]:
    """Calls a marked function with the jaxpr of an equal task before it, if there was one.

    JAX differentiates and transposes one jaxpr once, however often it is called, so that a model of equal layers
    costs the differentiation of one. A scope registered by name may hold in one layer and not in the next, so names
    inside have to stay what they are.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return list(jitted(*operands))
    # What comes from another task brings along the mesh of that task, which JAX under vmap would enter inside this one.
    traced = jitted.trace(*[_compat.on_no_mesh(jax.typeof(x)) for x in operands])
    _check_constraints(described, traced.jaxpr)
    # JAX cannot differentiate a loop around a jitted function that makes references.
    # What it closes over are operands: traced values, and constants such as a mask of NumPy's. So layers that have their own
    # are equal, and no pass meets any.
    closed = traced.jaxpr if described.mesh is None else _compat.on_abstract_mesh(traced.jaxpr, described.mesh)
    body, constants = _compat.closing_over_nothing(_compat.without_refs(closed))
    operands = [*_compat.closed_over(traced), *operands, *constants]
    if not record.implicit:
        key = record.keys(body), described.mesh.abstract_mesh if described.mesh is not None else None
        body = record.bodies.setdefault(key, body)
    if _compat.is_differentiated(operands):
        body = record.differentiable(body)
    return _compat.call(mark, body, operands)


_NO_MESH = "write mm.with_sharding_constraint(x, spec) without a mesh, or move the value outside the task"
_NO_MESH_BY_HAND = "write jax.shard_map without mesh=, which then takes the submesh of the task it is in"


def _check_constraints(described: Task, body: Any) -> None:
    """Refuses what names devices that are not those of the task it is in: a constraint, a move, a `jax.shard_map`, a `jax.jit`."""
    own = {d.id for d in described.mesh.devices.flat} if described.mesh is not None else None
    pending = [body]
    while pending and own is not None:
        for eqn in _compat.open_jaxpr(pending.pop()).eqns:
            pending += _compat.jaxprs_in(eqn)
            for devices in _compat.constrained_devices(eqn):
                if {d.id for d in devices} != own:
                    where = _compat.line_within(eqn)
                    what, remedy = "constraint", _NO_MESH
                    if eqn.primitive.name == "shard_map":
                        what, remedy = "jax.shard_map", _NO_MESH_BY_HAND
                    elif eqn.primitive.name == "device_put":
                        what = "jax.device_put"
                    elif _compat.is_jit(eqn):
                        what = "sharding of jax.jit"
                    raise TaskError(
                        f"task {described.name!r} on devices {sorted(own)}: {f'{what} at {where}' if where else what} "
                        f"is on devices {sorted(d.id for d in devices)}, but inside a task all is on its own submesh; {remedy}"
                    )


def _call_nested(
    record: Recording,
    described: Task,
    outer: Scope,
    fun: Callable[..., Any],
    args: PyTree,
    kwargs: PyTree,
) -> PyTree:
    if outer.task is not None:
        check_nested(described, outer.task)
        described = described.within(outer.task)
    with (
        enter_scope(task_scope(record, described) if described.mesh is not None else outer),
        _flax_rules(record, described),
    ):
        return fun(*args, **kwargs)


def check_nested(inner: Task, outer: Task, pattern: str | None = None) -> None:
    """Raises a `TaskError` if a task cannot be inside another one; ``pattern`` is what made the outer one of a scope."""
    if inner.mesh is None or outer.mesh is None or inner.mesh == outer.mesh:
        return
    made = f", which register_task({pattern!r}) makes of a scope" if pattern is not None else ""
    raise TaskError(
        f"task {inner.name!r} on devices {[d.id for d in inner.mesh.devices.flat]} is called inside task "
        f"{outer.name!r} on devices {[d.id for d in outer.mesh.devices.flat]}{made}; a task cannot leave the "
        "submesh of the task around it: call one after the other, or place both on the same mesh"
    )


def is_dynamic(leaf: object) -> bool:
    """Whether a leaf is traced when it enters a task: arrays are, Python objects are not."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _refuse_other_mesh(error: Exception, described: Task) -> None:
    """Raises our error in place of JAX's for a `jax.shard_map` in a task that names a mesh with other axes."""
    if described.mesh is not None and "should match the mesh passed to shard_map" in str(error):
        what = "jax.pmap makes" if _compat.PMAP_AXIS in str(error) else "jax.shard_map is given"
        raise TaskError(
            f"task {described.name!r} on devices {sorted(d.id for d in described.mesh.devices.flat)}: {what} "
            f"another mesh than the submesh of the task; {_NO_MESH_BY_HAND}"
        ) from error


def task_scope(record: Recording, described: Task) -> Scope:
    """The scope that code inside the task sees."""

    def resolve(names: tuple[Any, ...], shape: tuple[int, ...], rules: tuple[AxisRule, ...]) -> PartitionSpec:
        names, shape = tuple(names), tuple(shape)
        spec, unknown, left_out = resolve_vmapped(described, names, shape, _compat.vmapped(), rules)
        for name, target in left_out:
            text = (
                f"the constraint of axis {name!r} is dropped under jax.vmap, which has taken that axis from a value of "
                f"shape {shape}; vmap(..., spmd_axis_name={target!r}) puts the new axis there"
            )
            record.findings[Finding(text, described.name)] = AxisError
        for name in unknown:
            _note_unknown(record, described, name, rules, f" of {names}")
        return spec

    named = described.mesh is not None and described.has_named_axes
    abstract = described.mesh.abstract_mesh if described.mesh is not None and named else None
    return Scope(described.name or "task", abstract, resolve, described)


@contextlib.contextmanager
def _surroundings(record: Recording, described: Task, scope: Scope) -> Iterator[None]:
    if described.mesh is None:
        with enter_scope(scope):
            yield
        return
    with (
        enter_scope(scope),
        jax.sharding.use_abstract_mesh(described.mesh.abstract_mesh),
        _flax_rules(record, described),
    ):
        yield


# The identity at the end of a task. Its result is traced on no mesh: a value that kept the mesh of the task that made
# it would be brought to the mesh of the task that reads it, and differentiating that fails where the sizes differ.
# It says which operand or result of the task the value is, where the task is computed again, too.
border_p = _compat.linear_identity(
    "manymesh_border", lambda x, **_: x, lambda params, *_: params, keeps_mesh=False, of_values=True
)


def _flax_rules(record: Recording, described: Task) -> contextlib.AbstractContextManager[Any]:
    """Makes Flax's own logical constraints and boxes, if Flax is loaded, read names as the task does.

    The rules of the task come first, then those that Flax has around the task and those of `meta` for other names, then the
    names of its axes themselves. Of any other name there is a finding.
    """
    linen: Any = sys.modules.get("flax.linen")
    if linen is None or described.mesh is None:
        return contextlib.nullcontext()
    axes = tuple(described.mesh.axis_names) if described.has_named_axes else ()
    flaxs = as_rules(rules_of_flax()) or ()
    others = (*flaxs, *(rule for rule in get_logical_axis_rules() if rule[0] not in dict(flaxs)))
    rules = (*rules_in_task(described.logical_axes or (), others, axes), *((axis, axis) for axis in axes))
    if described.has_named_axes:
        known = {name for name, _ in rules}

        def hear(name: str) -> None:
            if name not in known:
                _note_unknown(record, described, name, others)

        rules = (*rules, (AnyOther(hear), None))
    inside: contextlib.AbstractContextManager[Any] = linen.logical_axis_rules(rules)
    return inside


def _note_unknown(record: Recording, described: Task, name: Any, others: Iterable[AxisRule], of: str = "") -> None:
    """Finds that a task and ``others``, the rules for what it does not know, say nothing of a name (``of`` which names)."""
    axes = tuple(described.mesh.axis_names) if described.mesh is not None else ()
    known = list(dict.fromkeys(a for a, _ in (*(described.logical_axes or ()), *others) if a not in axes))
    near = difflib.get_close_matches(str(name), [*known, *axes], 1)
    first = f"did you mean {near[0]!r}? Otherwise add" if near else "correct the name, add"
    text = (
        f"axis name {name!r}{of} is in no rule (the rules know {known}) and is no device axis {axes}, so it "
        f"means replication; {first} a rule, or map it to None"
    )
    record.findings[Finding(text, described.name)] = AxisError


def _batch_names(params: dict[str, Any], dim: int, axes: tuple[str, ...]) -> dict[str, Any]:
    names = params["names"]
    padded = names + (None,) * (dim - len(names))
    new = (axes[0] if len(axes) == 1 else axes) if axes else PartitionSpec.UNCONSTRAINED
    return {**params, "names": (*padded[:dim], new, *padded[dim:])}


# The identity, carrying per-dimension names, and the rules around them, to wherever the value is placed.
constraint_p = _compat.linear_identity("manymesh_constraint", lambda x, **_: x, _batch_names)

# The identity, carrying what a box says about a value to the implicit task that it may turn out to be in.
box_constraint_p = _compat.linear_identity("manymesh_box", lambda x, **_: x, _batch_names)


def carry_box_names(value: Any, names: tuple[Any, ...], rules: tuple[Any, ...], where: object) -> Any:
    """Notes the names that a box gives to a value in a recording; elsewhere the value as it is.

    So is one with fewer dimensions than names: in the box of its parameter it is a factored moment, or a norm.

    Args:
      value: an array.
      names: one entry a dimension.
      rules: logical rules of the box, after which those of the task come.
      where: the box, for messages.
    """
    if current_recording() is None or len(names) > value.ndim:
        return value
    label = where if isinstance(where, str) else type(where).__name__
    return box_constraint_p.bind(value, names=tuple(names), rules=tuple(rules), where=label)


def with_sharding_constraint(x: Any, spec: Any) -> PyTree:
    """Constrains the sharding of values, in logical names.

    Args:
      x: a pytree of arrays.
      spec: a pytree prefix of ``x`` whose leaves are a `PartitionSpec`, a tuple with one entry a dimension, a
        `NamedSharding` (its spec is used), or None (no constraint).

    Returns:
      ``x`` with the constraint, which the surrounding task resolves on its mesh: by its own ``logical_axes`` first, then
      by the rules around the call (`meta.logical_axis_rules`, and Flax's), then as device axes. Outside any task the
      constraint travels with the value to wherever the value is placed, where the tasks on that submesh say what its names mean.
      Outside ``mm.jit`` it does nothing. Under `jax.vmap` the names of axes that vmap took away count for nothing: the new
      axis lies as its ``spmd_axis_name``, a device axis, says.

    Raises:
      AxisError: a dimension does not divide over its device axes, or there are more names than dimensions.

    Example:
      >>> import jax.numpy as jnp, manymesh as mm
      >>> def f(x):
      ...     return mm.with_sharding_constraint(2 * x, ("batch", None))
      >>> g = mm.task(f, devices=[[0, 1], [2, 3]], device_axes=("d", "m"), logical_axes=[("batch", "d")])
      >>> mm.jit(g)(jnp.ones((4, 2))).sharding.spec[0]
      'd'
    """
    return constrain(CONSTRAINT, x, spec)


def constrain(caller: str, x: PyTree, spec: Any) -> PyTree:
    """`with_sharding_constraint`, whose errors name the caller."""
    if isinstance(spec, str):
        raise ArgumentError(
            f"{caller}: the spec is the string {spec!r}; expected one entry for each dimension, such as "
            f"({spec!r}, None)"
        )
    if current_recording() is None:
        return x
    try:
        specs = jax.tree.broadcast(spec, x, is_leaf=is_spec)
    except ValueError:
        shapes = jax.tree.map(lambda v: getattr(v, "shape", v), x)
        raise ArgumentError(
            f"{caller}: expected a tuple with one entry for each dimension, such as ('batch', None), or a pytree prefix of the "
            f"value with such leaves; found {type(spec).__name__} {spec!r:.80} for a value of shape {shapes!s:.80}"
        ) from None
    pairs: list[tuple[Any, Any]] = []  # errors are to end at the user's line, and not in jax.tree.map
    jax.tree.map(lambda *pair: pairs.append(pair), x, specs)
    new = [v if s is None else _constrain(caller, v, s) for v, s in pairs]
    return jax.tree.unflatten(jax.tree.structure(x), new)


def is_spec(spec: Any) -> bool:
    """Whether something says how one array, or all below, lies: a spec, a tuple of names, or None for nothing."""
    return spec is None or isinstance(spec, (PartitionSpec, NamedSharding)) or _is_names(spec)


def _is_names(spec: Any) -> bool:
    return isinstance(spec, tuple) and all(
        n is None or n is PartitionSpec.UNCONSTRAINED or isinstance(n, str)
        or (isinstance(n, tuple) and all(isinstance(m, str) for m in n))
        for n in spec
    )  # fmt: skip


def _constrain(caller: str, value: PyTree, spec: Any) -> PyTree:
    number = isinstance(value, (bool, int, float, complex))
    if not number and not hasattr(value, "shape"):
        raise ArgumentError(
            f"{caller}: expected arrays, and then what to say of each; found {type(value).__name__} {value!r:.80}, which is no array"
        )
    if not isinstance(spec, (PartitionSpec, NamedSharding)) and not _is_names(spec):
        raise ArgumentError(
            f"{caller}: expected a spec, one entry for each dimension, found {type(spec).__name__} {spec!r:.80} for a value of "
            f"shape {np.shape(value)}"
        )
    names = tuple(spec.spec) if isinstance(spec, NamedSharding) else tuple(spec)
    if number:
        if names:
            raise AxisError(
                f"{caller}: {len(names)} axis names {names} for the number {value!r}, which has no dimensions"
            )
        return value
    scope = current_scope()
    if scope is None or (scope.task is not None and scope.task.mesh is None):
        if len(names) > value.ndim:
            raise AxisError(f"{caller}: {len(names)} axis names {names} for a value of shape {value.shape}")
        where = {} if caller == CONSTRAINT else {"where": caller}
        return constraint_p.bind(value, names=names, rules=rules_around(), **where)
    if scope.mesh is None:
        return jax.lax.with_sharding_constraint(value, PartitionSpec())
    return jax.lax.with_sharding_constraint(value, scope.resolve(names, value.shape, rules_around()))
