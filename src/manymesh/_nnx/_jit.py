"""`manymesh.nnx.jit`: a step over modules and optimizers, which it updates in place."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import flax.nnx as nnx
import jax

from .. import _compat
from .._api._arguments import array_of_host, call_inside
from .._api._jit import FunctionLike
from .._api._jit import Jitted as PlainJitted
from .._api._kept import kept
from .._api._lowered import Lowered
from .._api._traced import Traced
from .._calling import Calling
from .._compiled import Compiled
from .._errors import ArgumentError, TaskError
from .._findings import Finding
from .._mark import carry_box_names, current_recording
from .._shown import name_of
from .._types import PyTree
from .._wrapping import object_of
from ..meta._axes import Axes
from ..meta._rules import Rules
from ._lift import PureResult, call_lifted, call_split, constrained, is_node, merge_result, pure
from ._names import rooted

P = ParamSpec("P")
R = TypeVar("R")


class _Merged(Calling):
    """With modules, which the step updates."""

    def call(self, run: Callable[..., PureResult], args: Any, kwargs: Any) -> Any:
        return call_lifted(run, args, kwargs)

    def take(self, take: Callable[..., R], args: Any, kwargs: Any) -> R:
        return call_split(take, args, kwargs)


class _Step(PlainJitted[..., PureResult]):
    """A step of what modules are split into."""

    calling = _Merged()


class Jitted(FunctionLike[P, R]):
    """What `jit` returns: called as the function it wraps, on the same modules."""

    def __init__(self, fun: Callable[P, R], options: dict[str, Any]) -> None:
        if not callable(fun):
            raise ArgumentError(f"nnx.jit takes a function, found {type(fun).__name__}")
        functools.update_wrapper(self, fun)
        self.fun = fun
        out_shardings = options["out_shardings"]
        wanted = None if out_shardings is None else (None, out_shardings)
        options = {**options, "out_shardings": wanted}
        self._jitted = kept(fun, (_Step, options), lambda: _Step(_carried(pure(rooted(_told(fun)))), **options))

    def __repr__(self) -> str:
        return repr(self._jitted).replace("mm.jit", "nnx.jit", 1)

    @_compat.boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step and updates the modules among its arguments."""
        if current_recording() is not None:
            inside: R = call_inside(self._jitted._step, self.fun, args, kwargs, array_of_host, is_node)
            return inside  # a step inside a step is part of it
        with _giving(args, kwargs):
            result: R = call_lifted(self._jitted, args, kwargs)
        return result

    @_compat.boundary
    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Compiled:
        """Compiles for such arguments, so that a call with them finds it done; the modules stay as they are."""
        with _giving(args, kwargs):
            return call_split(self._jitted.prepare, args, kwargs)

    @_compat.boundary
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Traces the step; the modules stay as they are."""
        with _giving(args, kwargs):
            return call_split(self._jitted.trace, args, kwargs)

    @_compat.boundary
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Traces the step and splits it over its submeshes; the modules stay as they are."""
        return self.trace(*args, **kwargs).lower()

    @_compat.boundary
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> PyTree:
        """Shapes and dtypes of the result; nothing is compiled."""
        return merge_result(self.trace(*args, **kwargs).out_info[1])

    def clear_cache(self) -> None:
        """Forgets every program and executable made by this function."""
        self._jitted.clear_cache()


@overload
def jit(fun: Callable[P, R], /) -> Jitted[P, R]: ...
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
@overload
def jit(
    fun: Callable[P, R],
    /,
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
@_compat.boundary
def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    compiler_options: dict[str, Any] | None = None,
    strict: bool = False,
) -> Any:
    """Compiles a step over NNX modules for many submeshes; stands where ``nnx.jit`` stood.

    Modules and optimizers among the arguments are updated in place, each variable on the submesh of the task that
    uses it. Use `manymesh.nnx.microbatch` inside.

    Args:
      fun: a function of modules, optimizers and pytrees of arrays, with tasks in it. Without it, a decorator comes
        back.
      static_argnums, static_argnames: arguments that are part of the program; hashable.
      donate_argnums, donate_argnames: arguments whose old buffers the step may reuse: usually the model and the
        optimizer, which hold the new ones after the call.
      in_shardings: pytree prefix of the arguments, with one sharding or None for a whole module.
      out_shardings: pytree prefix of the result, likewise.
      compiler_options, strict: as for `manymesh.jit`.

    Returns:
      A callable with ``trace``, ``lower`` and ``eval_shape``, which leave the modules as they are.

    Raises:
      ManyMeshError: as for `manymesh.jit`.

    Example:
      >>> import jax.numpy as jnp, manymesh as mm, optax
      >>> from flax import nnx
      >>> model = mm.nnx.task(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), "model", devices=[1])
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
      >>> @mm.nnx.jit(donate_argnums=(0, 1))
      ... def train_step(model, optimizer, x):
      ...     loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
      ...     optimizer.update(model, grads)
      ...     return loss
      >>> losses = [float(train_step(model, optimizer, jnp.ones((2, 4)))) for _ in range(3)]
      >>> losses[2] < losses[1] < losses[0], int(optimizer.step[...])
      (True, 3)
    """
    options: dict[str, Any] = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "compiler_options": compiler_options,
        "strict": strict,
    }
    return (lambda fun: Jitted(fun, options)) if fun is None else Jitted(fun, options)


# The arguments of the step that is being called, as the caller has them.
_given: contextvars.ContextVar[PyTree] = contextvars.ContextVar("manymesh_nnx_given", default=())


@contextlib.contextmanager
def _giving(*arguments: PyTree) -> Iterator[None]:
    token = _given.set(arguments)
    try:
        yield
    finally:
        _given.reset(token)


def _told(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Tells, where the step is traced, of functions that modules among its arguments keep and that are of these modules themselves."""

    @functools.wraps(fun)
    def told(*args: PyTree, **kwargs: PyTree) -> Any:
        record = current_recording()
        if record is not None:
            record.findings.update(dict.fromkeys(map(Finding, _functions_of_modules(_given.get())), TaskError))
        return fun(*args, **kwargs)

    told.__name__ = name_of(fun)  # which a partial application does not have
    return told


def _functions_of_modules(tree: PyTree) -> list[str]:
    """A sentence about each attribute that is a wrapped function of a module whose variables the tree has, too.

    In the step a module is another object, and such a function still means the one outside.
    """
    roots = [x for x in jax.tree.leaves(tree, is_leaf=is_node) if is_node(x)]
    kept = {
        (name, type(module).__name__): of
        for root in roots
        for _, module in nnx.iter_modules(root)
        for name, value in vars(module).items()
        if (of := object_of(value, nnx.Module)) is not None
    }
    known = _variables(roots) if kept else set()
    return [
        f"the attribute {name!r} of {keeper} is a function of a module {type(of).__name__}, the one that it was made with and not "
        "the one in the step: no gradient and no update gets there; make it with manymesh.nnx.task, of the module, of its "
        "method, or of a function that the module is an argument of"
        for (name, keeper), of in kept.items()
        if known & _variables([of])
    ]


def _variables(roots: Iterable[Any]) -> set[int]:
    """The identities of variables."""
    return {id(x) for root in roots for _, x in nnx.iter_graph(root) if isinstance(x, nnx.Variable)}


def _carried(fun: Callable[..., PureResult]) -> Callable[..., PureResult]:
    """Lets the names of variables travel to tasks that only names of scopes will make."""

    @functools.wraps(fun)
    def carried(*args: PyTree, **kwargs: PyTree) -> PureResult:
        record = current_recording()
        if record is None or not record.implicit:
            return fun(*args, **kwargs)
        before = jax.tree.leaves((args, kwargs))
        args, kwargs = constrained((args, kwargs), _carry)
        after = jax.tree.leaves((args, kwargs))
        # A variable that the step leaves alone comes out as it went in, not as another value of the program.
        original = {id(new): old for old, new in zip(before, after, strict=True)}
        nodes, out = fun(*args, **kwargs)
        return jax.tree.map(lambda x: original.get(id(x), x), nodes), out

    return carried


def _carry(value: Any, axes: Axes, rules: Rules) -> Any:
    return carry_box_names(value, axes.names, rules, "nnx.Variable")
