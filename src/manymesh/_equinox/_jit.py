"""`manymesh.equinox.jit`: arrays are traced, everything else is part of the program."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, get_args, overload

import equinox as eqx
import jax
import numpy as np

from .. import _compat
from .._api._arguments import Arguments, array_of_host, call_inside
from .._api._jit import FunctionLike
from .._api._jit import Jitted as PlainJitted
from .._api._kept import kept
from .._api._lowered import Lowered
from .._api._traced import Traced
from .._calling import Calling
from .._compiled import Compiled
from .._errors import ArgumentError, TaskError
from .._findings import Finding
from .._mark import current_recording
from .._shown import name_of
from .._types import PyTree
from .._wrapping import object_of

P = ParamSpec("P")
R = TypeVar("R")

Donate = Literal["all", "all-except-first", "none"]


class _Unnamed:
    """The key of what `Packed` holds: a path through it reads as the user's own."""

    def __str__(self) -> str:
        return ""


@jax.tree_util.register_pytree_with_keys_class
class Packed:
    """An argument or a result, its arrays apart from the rest; a pytree of the arrays."""

    def __init__(self, arrays: PyTree, rest: tuple[Any, ...], structure: Any) -> None:
        self.arrays = arrays
        self.rest = rest
        self.structure = structure

    def tree_flatten(self) -> tuple[tuple[PyTree], Any]:
        """All but the arrays is structure. 1, 1.0 and True are equal, but make different programs."""
        return (self.arrays,), (self.rest, tuple(map(type, self.rest)), self.structure)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[_Unnamed, PyTree]], Any]:
        """The same, for paths."""
        (arrays,), aux = self.tree_flatten()
        return ((_Unnamed(), arrays),), aux

    @classmethod
    def tree_unflatten(cls, aux: Any, children: tuple[PyTree]) -> Packed:
        """The same again."""
        return cls(*children, aux[0], aux[2])

    def unpacked(self) -> Any:
        """The argument or result."""
        return eqx.combine(self.arrays, jax.tree.unflatten(self.structure, self.rest))


def _packed(tree: PyTree) -> Packed:
    arrays, rest = eqx.partition(tree, _is_array)
    leaves, structure = jax.tree.flatten(rest)
    return Packed(arrays, tuple(leaves), structure)


def _is_array(x: Any) -> bool:
    return bool(eqx.is_array(x) or isinstance(x, (np.ndarray, np.generic, jax.ShapeDtypeStruct)))


def _own(x: Any) -> Any:
    return array_of_host(x) if isinstance(x, (np.ndarray, np.generic)) else x


def _place(call: str) -> str:
    """How to place an argument, by a call for each of its arrays."""
    which = "mm.checkpoint.argument_of({name}.lower(...), {which})) for these arguments"
    return f"jax.tree.map(lambda x, like: {call} if eqx.is_array(x) else x, {{argument}}, {which}"


class _Unpacked(Calling):
    """With modules, of which a step has packed ones."""

    place = _place("jax.device_put(x, like.sharding)"), _place("mm.jit(lambda y: y, out_shardings=like.sharding)(x)")

    def call(self, run: Callable[..., Packed], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.take(run, args, kwargs).unpacked()

    def take(self, take: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        packed, named = _arguments(args, kwargs)
        return take(*packed, **named)


_UNPACKED = _Unpacked()


class _Step(PlainJitted[..., Packed]):
    """A step of packed arguments, some of which it may reuse."""

    calling = _UNPACKED

    def __init__(self, fun: Callable[..., Packed], donate: Donate, options: dict[str, Any], first: str | None) -> None:
        super().__init__(fun, None, None, None, None, None, None, **options)
        self._donate = donate
        self._first = first

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        given = super()._flatten(args, kwargs)
        if self._donate != "none":
            kept = self._leaves_of_first(given, kwargs) if self._donate == "all-except-first" else range(0)
            given.donated = [*range(kept.start), *range(kept.stop, len(given.leaves))]
        return given

    def _leaves_of_first(self, given: Arguments, kwargs: dict[str, Any]) -> range:
        """Where the leaves of the first argument are, which may be given by its name."""
        of_args, of_kwargs = given.treedef.children()
        if args := of_args.children():
            return range(args[0].num_leaves)
        if self._first not in kwargs:
            return range(0)
        counts = dict(zip(sorted(kwargs), (one.num_leaves for one in of_kwargs.children()), strict=True))
        start = sum(count for name, count in counts.items() if name < self._first)
        return range(start, start + counts[self._first])


class Jitted(FunctionLike[P, R]):
    """What `jit` returns: called as the function it wraps."""

    def __init__(self, fun: Callable[P, R], donate: Donate, options: dict[str, Any]) -> None:
        if donate not in get_args(Donate):
            raise ArgumentError(f"equinox.jit: donate has to be one of {', '.join(get_args(Donate))}, found {donate!r}")
        if not callable(fun):
            raise ArgumentError(f"equinox.jit takes a function, found {type(fun).__name__}")
        functools.update_wrapper(self, fun)
        self.fun = fun

        def packed(*given: Packed, **named: Packed) -> Packed:
            args, kwargs = [x.unpacked() for x in given], {k: v.unpacked() for k, v in named.items()}
            if (record := current_recording()) is not None:
                found = [*_functions_of_modules("args", args), *_functions_of_modules("kwargs", kwargs)]
                record.findings.update(dict.fromkeys(map(Finding, found), TaskError))
            return _packed(fun(*args, **kwargs))

        packed.__name__ = packed.__qualname__ = name_of(fun)
        self._jitted = kept(fun, (_Step, donate, options), lambda: _Step(packed, donate, options, _first_name(fun)))

    def __repr__(self) -> str:
        return repr(self._jitted).replace("mm.jit", "equinox.jit", 1)

    @_compat.boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step."""
        if current_recording() is not None:
            inside: R = call_inside(self._jitted._step, self.fun, args, kwargs, _own)
            return inside  # a step inside a step is part of it
        result: R = _UNPACKED.call(self._jitted, args, kwargs)
        return result

    @_compat.boundary
    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Compiled:
        """Compiles for arguments with arrays or `jax.ShapeDtypeStruct`, so that calls with such arguments find it done."""
        return _UNPACKED.take(self._jitted.prepare, args, kwargs)

    @_compat.boundary
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Traces the step for arguments with arrays or `jax.ShapeDtypeStruct`."""
        return _UNPACKED.take(self._jitted.trace, args, kwargs)

    @_compat.boundary
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Traces the step and splits it over its submeshes."""
        return self.trace(*args, **kwargs).lower()

    @_compat.boundary
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> PyTree:
        """The result with shapes and dtypes for arrays; nothing is compiled."""
        return self.trace(*args, **kwargs).out_info.unpacked()

    def clear_cache(self) -> None:
        """Forgets every program and executable made by this function."""
        self._jitted.clear_cache()


def _functions_of_modules(name: str, arguments: PyTree) -> list[str]:
    """A sentence about each field that is a wrapped function of a module with arrays, of which the argument knows nothing."""
    found = jax.tree_util.tree_leaves_with_path(arguments)
    modules = [(path, object_of(x, eqx.Module)) for path, x in found if not _is_array(x)]
    return [
        f"{name}{jax.tree_util.keystr(path)} is a function of a {type(of).__name__} that it was made with, whose arrays are no "
        "part of the argument: no gradient and no update gets there; make it with manymesh.equinox.task, of the module or of its "
        "method, or of a function that the module is an argument of"
        for path, of in modules
        if any(map(_is_array, jax.tree.leaves(of)))
    ]


def _first_name(fun: Callable[..., Any]) -> str | None:
    """The name by which the first argument of a function may be given; None if it has none."""
    try:
        first = next(iter(inspect.signature(fun).parameters.values()), None)
    except (TypeError, ValueError):  # some functions in C have no signature
        return None
    return first.name if first is not None and first.kind is first.POSITIONAL_OR_KEYWORD else None


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Packed, ...], dict[str, Packed]]:
    """The arguments, packed."""
    packed, named = tuple(map(_packed, args)), {k: _packed(v) for k, v in kwargs.items()}
    for leaf in (leaf for one in (*packed, *named.values()) for leaf in one.rest):
        try:
            hash(leaf)
        except TypeError:
            raise ArgumentError(
                f"equinox.jit: an argument holds {type(leaf).__name__} {leaf!r}, which is no array and cannot be hashed, "
                "so it cannot be part of a program; make it an array, or close over it"
            ) from None
    return packed, named


@overload
def jit(
    *, donate: Donate = "none", compiler_options: dict[str, Any] | None = None, strict: bool = False
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
@overload
def jit(
    fun: Callable[P, R],
    /,
    *,
    donate: Donate = "none",
    compiler_options: dict[str, Any] | None = None,
    strict: bool = False,
) -> Jitted[P, R]: ...
@_compat.boundary
def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    donate: Donate = "none",
    compiler_options: dict[str, Any] | None = None,
    strict: bool = False,
) -> Any:
    """Compiles a step over Equinox modules for many submeshes; stands where ``eqx.filter_jit`` stood.

    Args:
      fun: a function of modules, optimizer states and other pytrees, with tasks in it. Arrays among its arguments and
        results are traced; everything else (activation functions, strings, Python numbers) is part of the program.
        Without it, a decorator comes back.
      donate: whose buffers the step may reuse: those of ``"all"`` arguments, of ``"all-except-first"``, or of
        ``"none"``.
      compiler_options, strict: as for `manymesh.jit`.

    Returns:
      A callable with ``trace``, ``lower`` and ``eval_shape``.

    Raises:
      ArgumentError: another word for ``donate``; in a call, a value that is no array and cannot be hashed.
      ManyMeshError: as for `manymesh.jit`.

    Example:
      >>> import equinox as eqx, jax, jax.numpy as jnp, manymesh as mm
      >>> model = mm.equinox.task(eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0)), "model", devices=[1])
      >>> @mm.equinox.jit
      ... def train_step(model, x):
      ...     loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
      ...     return loss, eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
      >>> x = jnp.ones((4, 2))
      >>> first, model = train_step(model, x)
      >>> second, model = train_step(model, x)
      >>> bool(second < first), model.layers[0].weight.devices() == {jax.devices()[1]}
      (True, True)
    """
    options = {"compiler_options": compiler_options, "strict": strict}
    return (lambda fun: Jitted(fun, donate, options)) if fun is None else Jitted(fun, donate, options)
