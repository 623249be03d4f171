"""`manymesh.nnx.microbatch`: a function of modules as a loop over pieces of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from .. import _compat
from .._batch import check_arguments, check_positions, positions
from .._errors import MicrobatchError
from .._mark import current_recording, is_dynamic
from .._microbatch import check_next, state_of
from .._microbatch import microbatch as plain_microbatch
from .._shown import name_of
from .._types import PyTree
from ._lift import PureResult, call_lifted, has_nodes, is_split, pure

P = ParamSpec("P")
R = TypeVar("R")


@_compat.boundary
def microbatch(
    fun: Callable[P, R],
    dim: int = 0,
    size: int | None = None,
    argnum: int | Sequence[int] = 0,
    *,
    num_microbatches: int | None = None,
    schedule: Any = None,
    reduce: Any = "sum",
    rng_argnum: int | None = None,
    state_argnum: int | None = None,
    **options: Any,
) -> Callable[P, R]:
    """Runs a function of NNX modules on pieces of a batch and combines the results.

    As `manymesh.microbatch`, for functions that change their modules: statistics, counts of random keys and caches go
    from one microbatch to the next, as in a Python loop, and are in the modules when the loop is over. So each
    microbatch drops out other units.

    Args:
      fun: function of modules and arrays; commonly ``nnx.value_and_grad`` of a loss.
      dim, size, argnum, num_microbatches, schedule, reduce, rng_argnum, state_argnum: as for `manymesh.microbatch`; a
        state of arrays, besides that of the modules.
      **options: its other arguments.

    Returns:
      A function with the signature of ``fun``.

    Raises:
      MicrobatchError: as for `manymesh.microbatch`; or ``fun`` adds variables to a module (``sow``, a new cache).

    Example:
      >>> import jax.numpy as jnp, manymesh as mm
      >>> from flax import nnx
      >>> class Count(nnx.Module):
      ...     def __init__(self):
      ...         self.calls = nnx.Variable(jnp.array(0))
      ...     def __call__(self, x):
      ...         self.calls[...] += 1
      ...         return jnp.sum(x) * self.calls[...]
      >>> model = mm.nnx.task(Count(), devices=[1])
      >>> step = mm.nnx.jit(mm.nnx.microbatch(lambda model, x: model(x), argnum=1, num_microbatches=4))
      >>> float(step(model, jnp.ones(4))), int(model.calls[...])
      (10.0, 4)
    """
    loop: Callable[..., Callable[..., Any]] = functools.partial(
        plain_microbatch, dim=dim, size=size, num_microbatches=num_microbatches, schedule=schedule, reduce=reduce,
        **options,
    )  # fmt: skip
    name, argnums = name_of(fun), positions(name_of(fun), argnum)
    reference = loop(fun, argnum=argnum, rng_argnum=rng_argnum, state_argnum=state_argnum)

    @_compat.boundary
    @functools.wraps(fun)
    def over_microbatches(*args: P.args, **kwargs: P.kwargs) -> R:
        in_python = current_recording() is None and not _compat.is_staging()
        if in_python or not has_nodes((args, kwargs)):
            return reference(*args, **kwargs)  # type: ignore[no-any-return]  # what fun returns, combined
        count = len(args)
        check_positions(name, argnums, count)
        batches = [k % count for k in argnums]
        if any(has_nodes(args[k]) for k in batches):
            raise MicrobatchError(
                f"microbatch({name}): argnum {argnum} is the batch, but there is a module in it; pass the modules "
                "in other arguments"
            )
        if rng_argnum is not None and -count <= rng_argnum < count and has_nodes(args[rng_argnum]):
            raise MicrobatchError(
                f"microbatch({name}): rng_argnum {rng_argnum} is a random key, but there is a module in it; the keys of modules, "
                "such as nnx.Rngs, are others in each microbatch by themselves, without rng_argnum"
            )
        check_arguments(name, args, batches, rng_argnum, state_argnum)
        if state_argnum is not None and has_nodes(args[state_argnum]):
            raise MicrobatchError(
                f"microbatch({name}): state_argnum {state_argnum} is a state of arrays, but there is a module in it; what "
                "a function changes in modules goes from one microbatch to the next by itself, without state_argnum"
            )
        keys = None if rng_argnum is None else rng_argnum % count
        looped = functools.partial(loop, argnum=batches, rng_argnum=keys, state_argnum=count)
        state = None if state_argnum is None else state_argnum % count
        result: R = call_lifted(_Loop(pure(fun), looped, state), args, kwargs)
        return result

    return over_microbatches


class _Loop:
    """A pure function as a loop over microbatches: what goes from one to the next is the state of its modules, and an argument
    that is a state of its own."""

    def __init__(self, fun: Callable[..., PureResult], loop: Callable[..., Any], argument: int | None) -> None:
        self._fun = fun
        self._loop = loop
        self._argument = argument

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PureResult:
        parts, structure = jax.tree.flatten((args, kwargs), is_leaf=is_split)
        state, state_structure = jax.tree.flatten([x for x in parts if is_split(x)])
        # Modules are taken out of the arguments; None keeps their places.
        args, kwargs = jax.tree.unflatten(structure, [None if is_split(x) else x for x in parts])
        left: list[Any] = []
        k = self._argument
        own = None if k is None else args[k]

        @functools.wraps(self._fun)
        def one(*args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
            *args, (own, state) = args  # type: ignore[assignment]  # the last argument is ours
            if k is not None:
                args[k] = own  # type: ignore[index]  # a list by now
            modules = iter(jax.tree.unflatten(state_structure, state))
            plain = iter(jax.tree.leaves((tuple(args), kwargs)))
            full = [next(modules) if is_split(x) else next(plain) for x in parts]
            args, kwargs = jax.tree.unflatten(structure, full)
            nodes, out = self._fun(*args, **kwargs)
            following, following_structure = jax.tree.flatten(nodes)
            self._check(nodes, (args, kwargs), following, state)
            left.append(following_structure)
            if k is not None:
                out, own = self._next(k, out, own)
            return out, (own, following)

        without = [None if i == k else x for i, x in enumerate(args)]
        out, (own, state) = self._loop(one)(*without, (own, state), **kwargs)
        return jax.tree.unflatten(left[-1], state), out if k is None else (out, own)

    def _next(self, k: int, out: PyTree, own: PyTree) -> tuple[Any, Any]:
        """The result of a microbatch, and the next state of the argument that is one."""
        name = name_of(self._fun)
        out, following = state_of(name, k, out, jax.tree.structure(own))
        pairs = zip(jax.tree_util.tree_leaves_with_path(own), jax.tree.leaves(following), strict=True)
        for (path, old), new in pairs:
            if is_dynamic(new):
                check_next(name, f"the state args[{k}]{jax.tree_util.keystr(path)}", jax.typeof(old), jax.typeof(new))
        return out, following

    def _check(self, nodes: Any, given: Any, following: list[Any], state: list[Any]) -> None:
        """Refuses what a microbatch leaves in the modules, if the next one cannot begin with it."""
        name, found, expected = name_of(self._fun), len(following), len(state)
        if found == expected:
            for path, old, new in zip(_paths(nodes), state, following, strict=True):
                if is_dynamic(new):
                    check_next(name, path, jax.typeof(old), jax.typeof(new))
            return
        known = set(_paths(given))
        new = list(dict.fromkeys(path for path in _paths(nodes) if path not in known))
        raise MicrobatchError(
            f"microbatch({name}): in a microbatch the modules got {found} arrays, "
            f"before they had {expected}{' (' + ', '.join(new[:3]) + ')' if new else ''}; a loop keeps one structure, so "
            "make caches before it, and return what you would sow"
        )


def _paths(arguments: tuple[PyTree, PyTree]) -> list[str]:
    """``args[0].layers[0].kernel`` of every array in the arguments of a function."""
    found = _compat.leaves_with_paths(arguments)
    return [f"{'kwargs' if which.idx else 'args'}{jax.tree_util.keystr(tuple(path))}" for (which, *path), _ in found]
