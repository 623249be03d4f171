"""`manymesh.equinox.jit`: arrays are traced, everything else is part of the program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, TypeVar, get_args, overload

import equinox as eqx
import jax
import numpy as np

from .._api._jit import FunctionLike
from .._api._jit import jit as plain_jit
from .._api._lowered import Lowered
from .._api._traced import Traced
from .._errors import ArgumentError
from .._mark import current_recording
from .._shown import name_of
from .._types import PyTree

P = ParamSpec("P")
R = TypeVar("R")

Donate = Literal["all", "all-except-first", "none"]


@jax.tree_util.register_pytree_node_class
class _Static:
    """What is no array in a tree; itself a pytree without leaves."""

    def __init__(self, leaves: tuple[Any, ...], structure: Any) -> None:
        self.leaves = leaves
        self.structure = structure

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        """No leaves; all of it is structure. 1, 1.0 and True are equal, but make different programs."""
        return (), (self.leaves, tuple(map(type, self.leaves)), self.structure)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: PyTree) -> _Static:
        """The same again."""
        return cls(aux[0], aux[2])


def _split(tree: PyTree) -> tuple[Any, _Static]:
    arrays, rest = eqx.partition(tree, _is_array)
    leaves, structure = jax.tree.flatten(rest)
    return arrays, _Static(tuple(leaves), structure)


def _is_array(x: Any) -> bool:
    return bool(eqx.is_array(x) or isinstance(x, (np.ndarray, np.generic, jax.ShapeDtypeStruct)))


def _join(arrays: PyTree, static: _Static) -> PyTree:
    return eqx.combine(arrays, jax.tree.unflatten(static.structure, static.leaves))


class Jitted(FunctionLike, Generic[P, R]):
    """What `jit` returns: called as the function it wraps."""

    def __init__(self, fun: Callable[P, R], donate: Donate, options: dict[str, Any]) -> None:
        if donate not in get_args(Donate):
            raise ArgumentError(f"equinox.jit: donate has to be one of {', '.join(get_args(Donate))}, found {donate!r}")
        functools.update_wrapper(self, fun)
        self.fun = fun
        numbers = {"all": (0, 1), "all-except-first": (1,), "none": None}[donate]

        def pure(first: Any, others: Any, static: _Static) -> Any:
            head, (args, kwargs) = _join((first, others), static)
            return _split(fun(*head, *args, **kwargs))

        pure.__name__ = pure.__qualname__ = name_of(fun)
        self._jitted = plain_jit(pure, donate_argnums=numbers, **options)

    def __repr__(self) -> str:
        return repr(self._jitted).replace("mm.jit", "equinox.jit", 1)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step."""
        if current_recording() is not None:
            return self.fun(*args, **kwargs)  # a step inside a step is part of it
        result: R = _join(*self._jitted(*_arguments(args, kwargs)))
        return result

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Traces the step for arguments with arrays or `jax.ShapeDtypeStruct`."""
        return self._jitted.trace(*_arguments(args, kwargs))

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Traces the step and splits it over its submeshes."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> PyTree:
        """The result with shapes and dtypes for arrays; nothing is compiled."""
        return _join(*self.trace(*args, **kwargs).out_info)

    def clear_cache(self) -> None:
        """Forgets every program and executable made by this function."""
        self._jitted.clear_cache()


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, _Static]:
    """The first argument, the others, and what is no array in any of them."""
    (first, others), static = _split((args[:1], (args[1:], kwargs)))
    for leaf in static.leaves:
        try:
            hash(leaf)
        except TypeError:
            raise ArgumentError(
                f"equinox.jit: an argument holds {type(leaf).__name__} {leaf!r}, which is no array and cannot be hashed, "
                "so it cannot be part of a program; make it an array, or close over it"
            ) from None
    return first, others, static


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
