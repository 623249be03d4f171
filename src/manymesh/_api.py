"""`jit` and what it returns: tracing, planning, compiling, calling."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _compat, meta
from ._compiled import Compiled
from ._errors import ArgumentError, AxisError, MeshError
from ._implicit import Matcher, registered
from ._mark import Recording, carry_box_names, current_recording, recording, transforms_ignored
from ._passes._build import build
from ._passes._scopes import scope_names
from ._program import Program
from ._progress import compiling
from ._runtime._compile import Executables
from ._runtime._emit import emit
from ._runtime._execute import Executor
from ._runtime._instructions import Plan
from ._runtime._lower import lower
from ._task import mesh_devices
from ._topology import auto_mesh, require_devices


def jit(
    fun: Callable[..., Any],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    compiler_options: dict[str, Any] | None = None,
    strict: bool = False,
) -> Jitted:
    """Compiles a function for many submeshes; the counterpart of ``jax.jit``.

    Args:
      fun: a function of pytrees, with tasks in it. Differentiation goes inside: ``mm.jit`` around ``jax.grad``.
      static_argnums, static_argnames: arguments that are part of the program; hashable.
      donate_argnums, donate_argnames: arguments whose buffers the step may reuse; they are deleted by the call.
      in_shardings: pytree prefix of the arguments of `NamedSharding` on submeshes, or None to infer.
      out_shardings: pytree prefix of the result, likewise.
      compiler_options: handed to XLA for every fragment.
      strict: whether findings (a logical name that no rule knows) are errors instead of one warning.

    Returns:
      A callable. Each distinct structure, shape, dtype and static value of arguments is traced and compiled once.

    Raises:
      ManyMeshError: whatever is wrong with tasks, axes, schedules or placement, before anything runs.

    Example:
      >>> import jax, jax.numpy as jnp, manymesh as mm
      >>> first = mm.task(lambda x: x + 1, "first", devices=[0])
      >>> second = mm.task(lambda x: x * 2, "second", devices=[1])
      >>> f = mm.jit(lambda x: second(first(x)))
      >>> f(jnp.arange(3)).tolist()
      [2, 4, 6]
    """
    return Jitted(
        fun, static_argnums, static_argnames, donate_argnums, donate_argnames, in_shardings, out_shardings,
        compiler_options, strict,
    )  # fmt: skip


def _tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, (int, str)) else tuple(value)


@dataclass(eq=False)
class _Arguments:
    """One call's arguments, flat."""

    leaves: list[Any]
    treedef: Any
    static: tuple[tuple[Any, Any], ...]
    dyn_args: tuple[Any, ...]
    dyn_kwargs: dict[str, Any]


class Jitted:
    """What `jit` returns."""

    def __init__(
        self, fun: Any, static_argnums: Any, static_argnames: Any, donate_argnums: Any, donate_argnames: Any,
        in_shardings: Any, out_shardings: Any, compiler_options: Any, strict: bool,
    ) -> None:  # fmt: skip
        if not callable(fun):
            raise ArgumentError(f"mm.jit takes a function, found {type(fun).__name__}")
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.in_shardings, self.out_shardings = in_shardings, out_shardings
        self.compiler_options, self.strict = compiler_options, strict
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.static_argnums, self.static_argnames = _named(fun, _tuple(static_argnums), _tuple(static_argnames))
        self.donate_argnums, self.donate_argnames = _named(fun, _tuple(donate_argnums), _tuple(donate_argnames))
        self._compiled: dict[Any, Compiled] = {}
        self._executables = Executables()
        self._warned: set[str] = set()
        self._reference = jax.jit(
            fun, static_argnums=self.static_argnums or None, static_argnames=self.static_argnames or None
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; compiles it first where these shapes, dtypes and statics are new."""
        if transforms_ignored():
            return self._reference(*_gathered(args), **_gathered(kwargs))
        if current_recording() is not None:
            return self.fun(*args, **kwargs)  # a step inside a step is part of it
        given = self._flatten(args, kwargs)
        return self._compiled_for(given).call_flat(given.leaves)

    def prepare(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compiles for arguments, arrays or `jax.ShapeDtypeStruct`, so that calls with such arguments find it done."""
        return self._compiled_for(self._flatten(args, kwargs))

    def _compiled_for(self, given: _Arguments) -> Compiled:
        # 1, 1.0 and True are equal and hash alike, but make different programs.
        static = tuple((k, type(v), v) for k, v in given.static)
        key = (given.treedef, static, _settings(), registered(), tuple(_signature(x) for x in given.leaves))
        compiled = self._compiled.get(key)
        if compiled is None:
            self._check_donation(given)
            compiled = self._compiled[key] = self._trace(given).lower().compile()
        return compiled

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method of a class, the step takes the instance as its first argument."""
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces the step for arguments, arrays or `jax.ShapeDtypeStruct`."""
        return self._trace(self._flatten(args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces the step and splits it over its submeshes."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result; nothing is compiled."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forgets every program and executable made by this function."""
        self._compiled.clear()
        self._executables = Executables()

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        static: list[tuple[Any, Any]] = []
        numbers = {k % len(args) for k in self.static_argnums if -len(args) <= k < len(args)} if args else set()
        if numbers or self.static_argnames:
            static = [(k, args[k]) for k in sorted(numbers)]
            static += [(k, kwargs[k]) for k in sorted(kwargs) if k in self.static_argnames]
            for k, value in static:
                try:
                    hash(value)
                except TypeError as error:
                    raise ValueError(
                        f"mm.jit({self.name}): static argument {k!r} has to be hashable: {error}"
                    ) from None
        dyn_args = tuple(None if k in numbers else a for k, a in enumerate(args))
        dyn_kwargs = {k: v for k, v in kwargs.items() if k not in self.static_argnames}
        leaves, treedef = jax.tree.flatten((dyn_args, dyn_kwargs))
        return _Arguments(leaves, treedef, tuple(static), dyn_args, dyn_kwargs)

    def _trace(self, given: _Arguments) -> Traced:
        statics = dict(given.static)
        record = Recording(implicit=Matcher(registered()))
        paths = jax.tree_util.tree_leaves_with_path((given.dyn_args, given.dyn_kwargs))
        avals = [_abstract(self.name, path, x) for path, x in paths]
        out_tree: list[Any] = []

        def flat_fun(*leaves: Any) -> list[Any]:
            args, kwargs = jax.tree.unflatten(given.treedef, leaves)
            if record.implicit:
                args, kwargs = jax.tree.map(_carried, (args, kwargs), is_leaf=_is_foreign_box)
            full = tuple(statics.get(k, a) for k, a in enumerate(args))
            kwargs = {**kwargs, **{k: v for k, v in statics.items() if isinstance(k, str)}}
            out = self.fun(*full, **kwargs)
            out_leaves, tree = jax.tree.flatten(out)
            out_tree.append(tree)
            return out_leaves

        flat_fun.__name__ = flat_fun.__qualname__ = self.name
        try:
            with recording(record), _compat.without_mesh():
                closed, shapes = jax.make_jaxpr(flat_fun, return_shape=True)(*avals)
        except AxisError as error:
            raise _with_parameter(error, given) from None
        self._report(record, None)
        return Traced(self, given, record, closed, shapes, out_tree[-1])

    def _check_donation(self, given: _Arguments) -> None:
        """Refuses one array in two places where a donation would take it away from the other one."""
        donated = _donated(given, self.donate_argnums, self.donate_argnames)
        seen: dict[int, int] = {}
        for i, x in enumerate(given.leaves):
            k = seen.setdefault(id(x), i)
            if k != i and isinstance(x, jax.Array) and not donated.isdisjoint((i, k)):
                paths = [p for p, _ in jax.tree_util.tree_leaves_with_path((given.dyn_args, given.dyn_kwargs))]
                raise ValueError(
                    f"mm.jit({self.name}): arguments{_keystr(paths[k])} and{_keystr(paths[i])} are one array of shape "
                    f"{x.shape}, and it is donated; donate neither, or pass a copy (jnp.copy) as one of them"
                )

    def _report(self, record: Recording, closed: Any) -> None:
        if self.strict and record.findings:
            raise AxisError(f"mm.jit({self.name}, strict=True): {'; '.join(record.findings)}")
        new = [f for f in record.findings if f not in self._warned]
        self._warned.update(new)
        if closed is not None and record.implicit:
            unmatched = record.implicit.unmatched(scope_names(closed))
            new += [text for pattern, text in unmatched.items() if f"pattern {pattern}" not in self._warned]
            self._warned.update(f"pattern {pattern}" for pattern in unmatched)
        if new:
            warnings.warn(f"mm.jit({self.name}): {'; '.join(new)}", stacklevel=_users_level())


def _is_foreign_box(x: Any) -> bool:
    """Whether it is a box of Flax, which does not tell us what its names are when it is opened."""
    return not isinstance(x, meta.AxisMetadata) and all(
        hasattr(x, name) for name in ("names", "value", "unbox", "replace_boxed")
    )


def _carried(x: Any) -> Any:
    if not _is_foreign_box(x) or not hasattr(x.value, "aval"):
        return x
    rules = tuple(tuple(r) for r in getattr(x, "rules", None) or ())
    return x.replace_boxed(carry_box_names(x.value, tuple(x.names), rules, type(x).__name__))


def _named(fun: Any, numbers: tuple[int, ...], names: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Completes argument numbers by names and names by numbers, as ``jax.jit`` does."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return numbers, names
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    more_names = tuple(positional[k] for k in numbers if -len(positional) <= k < len(positional))
    more_numbers = tuple(positional.index(n) for n in names if n in positional)
    return tuple(sorted({*numbers, *more_numbers})), tuple(sorted({*names, *more_names}))


def _users_level() -> int:
    """The ``stacklevel`` at which the caller's warning points to the line that called into this package."""
    here, level, frame = __name__.split(".")[0], 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == here:
        frame, level = frame.f_back, level + 1
    return level


_TRACING = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
)


def _settings() -> tuple[Any, ...]:
    """Settings of JAX that change what a trace gives."""
    return tuple(getattr(jax.config, name) for name in _TRACING)


def _signature(x: Any) -> Any:
    if type(x) is _compat.ConcreteArray:  # almost every leaf; its own properties ask the aval, one by one
        aval = x.aval
        return (aval.shape, aval.dtype, aval.weak_type)
    if isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return (x.shape, x.dtype, getattr(x, "weak_type", False))
    return type(x)


def _abstract(name: str, path: Any, x: Any) -> jax.ShapeDtypeStruct:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
    if isinstance(x, jax.core.Tracer):
        raise ArgumentError(
            f"mm.jit({name}): argument{_keystr(path)} is a tracer {x.aval.str_short()}; a step that runs on several submeshes cannot "
            "be a part of jax.jit, jax.grad, jax.vmap or jax.eval_shape: apply these inside the function that mm.jit "
            "wraps, or use the step's own eval_shape"
        )
    if isinstance(x, jax.Array) and x.is_deleted():
        raise RuntimeError(
            f"mm.jit({name}): argument{_keystr(path)} of shape {x.shape}: Array has been deleted (it was donated to an earlier call)"
        )
    try:
        return _compat.abstract(jax.typeof(x))
    except TypeError:
        raise ArgumentError(
            f"mm.jit({name}): argument{_keystr(path)} is {type(x).__name__} {x!r}, which is no array; make it static "
            "(static_argnums, static_argnames) or close over it"
        ) from None


def _keystr(path: Any) -> str:
    """``args[0]['w']`` of a path into ``(args, kwargs)``."""
    which, *rest = path
    head = "args" if getattr(which, "idx", 0) == 0 else "kwargs"
    return f" {head}{jax.tree_util.keystr(tuple(rest))}"


def _gathered(tree: Any) -> Any:
    """For the reference mode: arrays of different submeshes come to one device."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    if len({frozenset(x.sharding.device_set) for x in arrays}) <= 1:
        return tree
    device = jax.devices()[0]
    return jax.tree.map(lambda x: jax.device_put(x, device) if isinstance(x, jax.Array) else x, tree)


def _with_parameter(error: AxisError, given: _Arguments) -> AxisError:
    """The error with the paths of the parameters it is about: those with the same names and shape."""
    names, shape = getattr(error, "names", None), getattr(error, "shape", None)
    if names is None or "parameter" in str(error):
        return error
    boxed = jax.tree_util.tree_leaves_with_path(
        (given.dyn_args, given.dyn_kwargs), is_leaf=lambda x: hasattr(x, "names") and hasattr(x, "unbox")
    )
    found = [
        p for p, x in boxed if hasattr(x, "names") and tuple(x.names) == tuple(names) and np.shape(x.value) == shape
    ]
    if not found:
        found = [p for p, x in boxed if np.shape(x) == shape]
    if not found:
        return error
    new = AxisError(f"parameter{' or'.join(_keystr(p) for p in found[:3])}: {error}")
    for note in getattr(error, "__notes__", ()):
        new.add_note(note)
    return new


@dataclass(eq=False)
class Traced:
    """A step as one jaxpr, with the meaning of its marks.

    Attributes:
      jaxpr: the closed jaxpr of the step.
    """

    _jitted: Jitted
    _given: _Arguments
    _record: Recording
    jaxpr: Any
    _shapes: Any
    _out_tree: Any

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the result, in its structure."""
        return jax.tree.unflatten(self._out_tree, [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in self._shapes])

    def lower(self) -> Lowered:
        """Splits the step over its submeshes and lays out the instructions."""
        j, given = self._jitted, self._given
        static = {k for k, _ in given.static}
        dynamic = tuple(a for k, a in enumerate(given.dyn_args) if k not in static)
        wanted_in = {} if j.in_shardings is None else _expand("in_shardings", j.in_shardings, dynamic)
        out = jax.tree.unflatten(self._out_tree, self._shapes)
        wanted_out = {} if j.out_shardings is None else _expand("out_shardings", j.out_shardings, out)
        pinned_out = {i: auto_mesh(s.mesh) for i, s in wanted_out.items()}
        given_away = _donated(given, j.donate_argnums, j.donate_argnames)
        pairs = self._states(given_away)
        pinned_in = {i: auto_mesh(s.mesh) for i, s in wanted_in.items()}
        try:
            program = build(self.jaxpr, self._record, pinned_in, pinned_out, pairs)
        except AxisError as error:
            raise _with_parameter(error, given) from None
        if program is None:
            program = self._without_tasks()
        j._report(self._record, self.jaxpr)
        shift = len(program.consts)
        donated = frozenset(shift + i for i in given_away)
        states = [(shift + i, o) for i, o in pairs if program.outputs[o][1] == program.home[program.invars[shift + i]]]
        plan = emit(program, donated)
        given_in = {i: s for i, x in enumerate(given.leaves) if (s := _arrival(x, program)) is not None}
        given_in.update(wanted_in)
        return Lowered(self, program, plan, given_in, wanted_out, states, donated)

    def _without_tasks(self) -> Program:
        """The program where no task and no sharding says what runs where: everything is where its arguments are."""
        committed = {i: m for i, x in enumerate(self._given.leaves) if (m := _mesh_of(x)) is not None}
        default = next(iter(committed.values()), Mesh(np.array(jax.devices()[:1]), ("device",)))
        everything = {i: default for i in range(len(self._given.leaves))}
        results = {i: default for i in range(len(self._shapes))}
        try:
            program = build(self.jaxpr, self._record, committed, {}) if committed else None
        except MeshError:  # arguments on overlapping devices; one place then
            program = None
        program = program or build(self.jaxpr, self._record, everything, results)
        if program is None:  # nothing comes in and nothing goes out
            program = Program((default,), (), (), (), (), (), (), {}, {}, ())
        return program

    def _states(self, donated: frozenset[int]) -> list[tuple[int, int]]:
        """(input, result) pairs where the result is the next value of the input."""
        shapes = jax.tree.unflatten(self._out_tree, self._shapes)
        results: dict[Any, list[int]] = {}
        for o, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(shapes)):
            for start in range(len(path) + 1):
                results.setdefault((path[start:], leaf.shape, leaf.dtype), []).append(o)
        pairs, taken = [], set()
        inputs = jax.tree_util.tree_leaves_with_path((self._given.dyn_args, self._given.dyn_kwargs))
        for i, ((path, _), aval) in enumerate(zip(inputs, self.jaxpr.in_avals, strict=True)):
            if len(path) == 2 and i not in donated:
                continue  # a bare array and a result of its shape are not the same thing over time
            for o in results.get((path[2:], aval.shape, aval.dtype), ()):
                if o not in taken:
                    pairs.append((i, o))
                    taken.add(o)
                    break
        return pairs


def _donated(given: _Arguments, argnums: tuple[int, ...], argnames: tuple[str, ...]) -> frozenset[int]:
    """Positions of the leaves of donated arguments."""
    count = len(given.dyn_args)
    numbers = {k % count for k in argnums if -count <= k < count} if count else set()
    paths = jax.tree_util.tree_leaves_with_path((given.dyn_args, given.dyn_kwargs))
    return frozenset(
        i
        for i, ((which, head, *_), _) in enumerate(paths)
        if (head.idx in numbers if which.idx == 0 else head.key in argnames)
    )


def _mesh_of(x: Any) -> Mesh | None:
    """The mesh that an argument was put on, if it was put anywhere."""
    sharding = getattr(x, "sharding", None)
    if sharding is None or not getattr(x, "committed", True):
        return None
    if isinstance(sharding, NamedSharding):
        return auto_mesh(sharding.mesh) if isinstance(sharding.mesh, Mesh) else None
    devices = sorted(sharding.device_set, key=lambda d: d.id)
    return Mesh(np.array(devices), ("device",))


def _arrival(x: Any, program: Program) -> Any:
    """The sharding an argument already has, if that is a layout on one of the submeshes."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    if not getattr(x, "committed", True):
        return None
    devices = mesh_devices(sharding.mesh)
    if any(mesh_devices(m) == devices for m in program.submeshes):
        return sharding
    return None


def _expand(label: str, prefix: Any, tree: Any) -> dict[int, Any]:
    """position of a leaf -> its sharding, from a pytree prefix."""
    is_leaf = lambda s: s is None or isinstance(s, jax.sharding.Sharding)  # noqa: E731
    try:
        expanded = jax.tree.map(lambda s, part: [s] * len(jax.tree.leaves(part)), prefix, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise ArgumentError(
            f"{label}: its structure is no prefix of the {'result' if label.startswith('out') else 'arguments'}: {error}"
        ) from None
    flat = jax.tree.leaves(expanded, is_leaf=is_leaf)
    for s in flat:
        if s is not None and not isinstance(s, NamedSharding):
            hint = "; say on which submesh: NamedSharding(submesh, spec)" if isinstance(s, PartitionSpec) else ""
            raise ArgumentError(f"{label}: expected NamedSharding on a submesh or None, found {s!r}{hint}")
    return {i: s for i, s in enumerate(flat) if s is not None}


@dataclass(eq=False)
class Lowered:
    """A step split over its submeshes, laid out, not yet compiled.

    Attributes:
      program: fragments and edges.
      plan: the instructions of one call.
    """

    _traced: Traced
    program: Program
    plan: Plan
    _given: dict[int, Any]
    _wanted: dict[int, Any]
    _states: list[tuple[int, int]]
    _donated: frozenset[int]
    _literals: dict[int, Any] = field(default_factory=dict)

    def as_text(self) -> str:
        """The program and the instructions of one call, readable."""
        return f"{self.program!r}\n{self.plan.text([f.name for f in self.program.fragments])}"

    def compile(self) -> Compiled:
        """Compiles every fragment.

        Raises:
          MeshError: a submesh has `planned_devices`.
        """
        jitted = self._traced._jitted
        require_devices(jitted.name, self.program.submeshes)
        shift = len(self.program.consts)
        before = (jitted._executables.compiled, jitted._executables.reused)
        direct = self._made_in_place()
        with compiling(jitted.name, len(self.program.fragments)) as progress:
            lowered = lower(
                self.program, self.plan, jitted._executables,
                given={shift + i: s for i, s in self._given.items()}, wanted=direct, states=self._states,
                compiler_options=jitted.compiler_options, progress=progress,
            )  # fmt: skip
        literals = {
            o: jax.device_put(
                _host_value(v), self._wanted.get(o, NamedSharding(self.program.submeshes[s], PartitionSpec()))
            )
            for o, (v, s) in enumerate(self.program.outputs)
            if not _compat.is_var(v)
        }
        made = (jitted._executables.compiled - before[0], jitted._executables.reused - before[1])
        return Compiled(
            Executor(lowered, literals), self._traced._given.treedef, self._traced._out_tree,
            tuple(sorted(i - shift for i in self._donated)), made, jitted.name,
            {o: s for o, s in self._wanted.items() if o not in direct and o not in literals},
        )  # fmt: skip

    def _made_in_place(self) -> dict[int, Any]:
        """The wanted shardings that a fragment can give its result; another task's submesh, or a second layout of one
        value, is reached by moving the finished result."""
        direct: dict[int, Any] = {}
        made: dict[Any, int] = {}
        for o, sharding in self._wanted.items():
            v, s = self.program.outputs[o]
            if _compat.is_var(v) and auto_mesh(sharding.mesh) == self.program.submeshes[s]:
                first = made.setdefault(v, o)
                if self._wanted[first].spec == sharding.spec:
                    direct[o] = sharding
        return direct


def _host_value(literal: Any) -> Any:
    """A literal result; a plain Python number stays weakly typed, as from jax.jit."""
    value = np.asarray(literal.val, literal.aval.dtype)
    return value.item() if literal.aval.weak_type else value
