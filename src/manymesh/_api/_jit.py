"""`jit`: a step that is traced, planned and compiled at its first call with new shapes, and called."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, Self, TypeVar, overload

import jax

from .. import _compat
from .._calling import PLAIN
from .._compiled import Compiled
from .._errors import ArgumentError
from .._mark import current_recording, transforms_ignored
from .._shown import Shown, name_of
from .._types import PyTree
from ._arguments import (
    Arguments,
    array_of_host,
    as_tuple,
    call_inside,
    check_apart,
    check_donation,
    check_named,
    check_options,
    check_values,
    flatten,
    gathered,
    named,
    places,
    signature,
    surroundings,
    types_of,
)
from ._kept import kept
from ._lowered import Lowered
from ._step import Step
from ._swapped import swapped_results
from ._trace import trace
from ._traced import Traced

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Q = ParamSpec("Q")
S = TypeVar("S")


class _LeftOut:
    """What stands for an argument that was left out, also in signatures."""

    def __repr__(self) -> str:
        return "..."


_LEFT_OUT = _LeftOut()


@overload
def jit(
    fun: Callable[P, R],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    compiler_options: dict[str, Any] | None = None,
    strict: bool = False,
) -> Jitted[P, R]: ...


@overload
def jit(
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    compiler_options: dict[str, Any] | None = None,
    strict: bool = False,
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


@_compat.boundary
def jit(
    fun: Any = _LEFT_OUT,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    compiler_options: dict[str, Any] | None = None,
    strict: bool = False,
) -> Jitted[P, R] | Callable[[Callable[P, R]], Jitted[P, R]]:
    """Compiles a function for many submeshes; the counterpart of ``jax.jit``.

    Args:
      fun: a function of pytrees, with tasks in it. Differentiation goes inside: ``mm.jit`` around ``jax.grad``.
        Left out, as in ``@mm.jit(donate_argnums=0)``, the result is a decorator.
      static_argnums, static_argnames: arguments that are part of the program; hashable.
      donate_argnums, donate_argnames: arguments whose buffers the step may reuse; they are deleted by the call,
        with a warning where no result could be the next value of one.
      in_shardings: pytree prefix of the arguments of `NamedSharding` on submeshes, or of one device, or None to infer.
      out_shardings: pytree prefix of the result, likewise.
      compiler_options: handed to XLA for every fragment.
      strict: whether findings are errors instead of one warning: a logical name that no rule knows, a constraint that
        vmap took the axis of, a task whose results nobody reads, a sharding on another mesh of the devices of a task,
        microbatches in a step without a task, with stages in no order, in turns around a loop of unknown length, or
        differentiated from outside, gradients of three pieces or more that are added up by hand, a batch that is also what is
        differentiated, a sum of losses that are means, stacked layers that are not used in equal blocks, or that something
        reads whole, puts together or draws numbers for on one submesh, a module of Flax NNX that is changed in place and not
        returned. A pattern of `register_task` that matches no scope stays a warning.

    Returns:
      A callable. Each distinct structure, shape, dtype and static value of arguments is traced and compiled once, also where
      ``jit`` is called again on the same function with the same settings and arguments in the same places.

    Raises:
      ManyMeshError: whatever is wrong with tasks, axes, schedules or placement, before anything runs. Its traceback ends
        at the user's line; ``jax.config.update("jax_traceback_filtering", "off")`` shows all of it.
      FloatingPointError: under ``jax_debug_nans``, with the task and the line that made the value.

    A program is kept for each setting of JAX that changes traces, and for the surrounding axis rules, ours and Flax's.
    Under ``jax.disable_jit`` the step is the plain function. A step without a task runs where its arguments are; if that is
    nowhere yet, on the mesh that it names, as in `jax.shard_map`, or else on the default device.

    Example:
      >>> import jax, jax.numpy as jnp, manymesh as mm
      >>> first = mm.task(lambda x: x + 1, "first", devices=[0])
      >>> second = mm.task(lambda x: x * 2, "second", devices=[1])
      >>> f = mm.jit(lambda x: second(first(x)))
      >>> f(jnp.arange(3)).tolist()
      [2, 4, 6]
    """
    make = functools.partial(
        Jitted, static_argnums=static_argnums, static_argnames=static_argnames, donate_argnums=donate_argnums,
        donate_argnames=donate_argnames, in_shardings=in_shardings, out_shardings=out_shardings,
        compiler_options=compiler_options, strict=strict,
    )  # fmt: skip
    return make if fun is _LEFT_OUT else make(fun)


def _hashable(fun: Callable[P, R]) -> Callable[P, R]:
    """A function as ``jax.jit`` takes it; what Equinox makes of one may be an object that has no hash."""
    try:
        hash(fun)
    except TypeError:
        return functools.partial(fun)
    return fun


class Method(Protocol[Q, R_co]):
    """A step as a method, bound to an object; it has the attributes of the step, which take the object first."""

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R_co:
        """Runs the step."""

    def __getattr__(self, name: str) -> Any: ...


class FunctionLike(Generic[P, R]):
    """What stands for a function where Python treats functions in a way of their own."""

    def __deepcopy__(self, memo: object) -> Self:
        """Itself: what it holds besides is compiled programs."""
        return self

    @overload
    def __get__(self, instance: None, owner: object = None) -> Self: ...

    @overload
    def __get__(self: FunctionLike[Concatenate[S, Q], R], instance: S, owner: object = None) -> Method[Q, R]: ...

    def __get__(self, instance: object, owner: object = None) -> object:
        """As a method of a class, it takes the instance as its first argument."""
        return self if instance is None else types.MethodType(self, instance)  # type: ignore[arg-type]  # it has __call__


class _Program(NamedTuple):
    """A program of a function.

    Attributes:
      places: where its arguments were put for which it was made: its layouts may follow them.
      follows: whether it has no task, and is where its arguments are.
    """

    compiled: Compiled
    places: tuple[Any, ...]
    follows: bool

    def fits(self, places: tuple[Any, ...]) -> bool:
        """Whether a program that is made for arguments in these places would be the same."""
        pairs = zip(places, self.places, self.compiled.homes, strict=True)
        return all(place == first or (place is not None and place == home) for place, first, home in pairs)


class _Programs:
    """What is known of a function under one set of settings, by every `Jitted` that was made of it.

    Attributes:
      step: the function and the settings.
      known: its programs, by what is around a call and the types of the arguments.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.known: dict[Any, list[_Program]] = {}

    def find(self, key: Any, places: tuple[Any, ...]) -> _Program | None:
        """A program for arguments in these places."""
        return next((program for program in self.known.get(key, ()) if program.fits(places)), None)


class Jitted(FunctionLike[P, R], Shown):
    """What `jit` returns."""

    calling = PLAIN

    def __init__(
        self, fun: Callable[P, R], static_argnums: Any, static_argnames: Any, donate_argnums: Any, donate_argnames: Any,
        in_shardings: Any, out_shardings: Any, compiler_options: Any, strict: bool,
    ) -> None:  # fmt: skip
        if not callable(fun):
            raise ArgumentError(f"mm.jit takes a function, found {type(fun).__name__}")
        check_options(compiler_options)
        functools.update_wrapper(self, fun)
        check_named("static", fun, as_tuple(static_argnums), as_tuple(static_argnames))
        check_named("donate", fun, as_tuple(donate_argnums), as_tuple(donate_argnames))
        static = named(fun, as_tuple(static_argnums), as_tuple(static_argnames))
        donated = named(fun, as_tuple(donate_argnums), as_tuple(donate_argnames))
        check_apart(static, donated)
        self.fun, self.name = fun, name_of(fun)
        settings = *static, *donated, in_shardings, out_shardings, compiler_options, strict
        programs = kept(fun, settings, lambda: _Programs(Step(fun, self.name, *settings, self.calling)))
        self._step, self._programs = programs.step, programs
        self._compiled: dict[Any, Compiled] = {}
        self._without_tasks: dict[Any, list[Compiled]] = {}  # programs that are where their arguments are, by key
        self._structure: Any = None  # of the arguments that were compiled for last
        # What was around the last call of a program that is always in one place, its types, and that program.
        self._last: tuple[Any, list[Any], Compiled | None] = None, [], None
        self._reference = jax.jit(_hashable(fun), static_argnums=static[0] or None, static_argnames=static[1] or None)

    def __repr__(self) -> str:
        count = len({id(x) for x in self._compiled.values()})
        return f"mm.jit({self.name}): {count} program{'s' * (count != 1)} compiled"

    @_compat.boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step; compiles it first where these shapes, dtypes and statics are new."""
        if transforms_ignored():
            result: R = self._reference(*gathered(args), **gathered(kwargs))
            return result
        if current_recording() is not None:  # a step inside a step is part of it
            result = call_inside(self._step, self.fun, args, kwargs, array_of_host)
            return result
        if _compat.jit_is_disabled():
            result = self._reference(*gathered(args), **gathered(kwargs))
            return result
        given = self._flatten(args, kwargs)
        if _compat.is_staging() and not any(isinstance(x, jax.core.Tracer) for x in given.leaves):
            raise ArgumentError(
                f"mm.jit({self.name}) is called while JAX traces another function, such as one of jax.jit; a step runs as "
                "programs of its own and cannot be a part of another one: apply jax.jit inside the function that mm.jit wraps"
            )
        result = self._compiled_for(given, called=True).run(given.leaves)
        return result

    @_compat.boundary
    def prepare(self, *args: PyTree, **kwargs: PyTree) -> Compiled:
        """Compiles for arguments, arrays or `jax.ShapeDtypeStruct`, so that calls with such arguments find it done."""
        return self._compiled_for(self._flatten(args, kwargs))

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return flatten(self._step, args, kwargs)

    def _compiled_for(self, given: Arguments, called: bool = False) -> Compiled:
        # 1, 1.0 and True are equal and hash alike, but make different programs.
        static = tuple((k, type(v), v) for k, v in given.static)
        around, types = (given.treedef, static, surroundings()), types_of(given.leaves)
        last, last_types, same = self._last
        if same is not None and types == last_types and around == last:
            return same
        key: Any = (*around, tuple(map(signature, given.leaves)))
        compiled = self._compiled.get(key)
        if compiled is None and key in self._without_tasks:
            compiled = self._following(key, places(given.leaves))
        if compiled is None:
            check_donation(self._step, given)
            if called:
                check_values(self._step, given)
            at = places(given.leaves)
            program = self._programs.find(key, at)
            if program is None:
                program = self._made(given, at)
                self._programs.known.setdefault(key, []).append(program)
            compiled = program.compiled
            if program.follows:
                self._without_tasks.setdefault(key, []).append(compiled)
                self._compiled[key, at] = compiled
            else:
                self._compiled[key] = compiled
            self._structure = given.treedef
        if key in self._compiled:
            self._last = around, types, compiled
        return compiled

    def _made(self, given: Arguments, at: tuple[Any, ...]) -> _Program:
        """A program that is traced and compiled now."""
        try:
            lowered = trace(self._step, given).lower()
        except Exception as error:
            for text in swapped_results(self.name, self._structure, given):  # it may well be the cause
                error.add_note(text)
            raise
        return _Program(lowered.compile(), at, lowered.follows_arguments)

    def _following(self, key: Any, at: tuple[Any, ...]) -> Compiled | None:
        """The program without tasks for arguments in these places: what was made for the same, or what is there.

        A state that may go anywhere comes back from its first step in a place; the second step is the same program.
        """
        known = self._compiled.get((key, at))
        if known is None and any(place is not None for place in at):
            for compiled in self._without_tasks[key]:
                if all(place is None or place == w for place, w in zip(at, compiled.homes, strict=True)):
                    known = self._compiled[key, at] = compiled
        return known

    @_compat.boundary
    def trace(self, *args: PyTree, **kwargs: PyTree) -> Traced:
        """Traces the step for arguments, arrays or `jax.ShapeDtypeStruct`."""
        return trace(self._step, self._flatten(args, kwargs))

    @_compat.boundary
    def lower(self, *args: PyTree, **kwargs: PyTree) -> Lowered:
        """Traces the step and splits it over its submeshes."""
        return self.trace(*args, **kwargs).lower()

    @_compat.boundary
    def eval_shape(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Shapes and dtypes of the result; nothing is compiled."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forgets every program and executable made by this function."""
        self._compiled.clear()
        self._last = None, [], None
        self._without_tasks.clear()
        self._programs.known.clear()
        self._step.executables.clear()
        self._step.compiled_for.clear()
