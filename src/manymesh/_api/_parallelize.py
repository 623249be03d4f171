"""`parallelize`: a function, its parameters and its batches, placed before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from .. import _compat
from .._compiled import Compiled
from .._errors import ArgumentError, MeshError
from .._mark import ignore_transforms, transforms_ignored
from .._task import mesh_devices
from .._topology import resolve_devices
from .._types import PyTree
from ._jit import Jitted, jit


@_compat.boundary
def parallelize(
    fun: Callable[..., Any],
    *,
    init_params: Callable[[], Any] | None = None,
    get_input_batch: Callable[[], Any] | None = None,
    initial_batch: Any = None,
    devices: Any = None,
) -> tuple[Any, ...]:
    """Compiles a function ahead of time, with what makes its parameters and batches where it wants them.

    Args:
      fun: ``fun(params, batch)`` with tasks in it; ``fun(batch)`` without ``init_params``.
      init_params: ``init_params()`` makes the parameters, a pytree of arrays.
      get_input_batch: ``get_input_batch()`` gives the next batch, on the host or on any devices.
      initial_batch: a batch, or `jax.ShapeDtypeStruct` in its place. Without it the first batch of
        ``get_input_batch`` is looked at; it is not lost, but given out first.
      devices: jax devices or their ids, to which the tasks are held.

    Returns:
      ``(sharded_fun, sharded_init_params)``, and ``sharded_get_input_batch`` if ``get_input_batch`` is given:
      ``sharded_fun`` has the arguments and results of ``fun``, is compiled, and has the compiled step as
      ``sharded_fun.compiled``; ``sharded_init_params()`` makes each parameter on the submesh that uses it, never
      whole on one device (None without ``init_params``); ``sharded_get_input_batch()`` gives batches where the
      function wants them.

    Raises:
      ArgumentError: neither ``get_input_batch`` nor ``initial_batch``; a value in place of a function.
      MeshError: a task runs on other devices than ``devices``.

    Example:
      >>> import jax, jax.numpy as jnp, manymesh as mm
      >>> first = mm.task(lambda w, x: x @ w, "first", devices=[0, 1])
      >>> second = mm.task(lambda w, x: x @ w, "second", devices=[2, 3])
      >>> model = lambda params, x: second(params[1], first(params[0], x))
      >>> run, init, batches = mm.parallelize(
      ...     model, init_params=lambda: (jnp.eye(4), 2 * jnp.eye(4)), get_input_batch=lambda: jnp.ones((8, 4))
      ... )
      >>> float(run(init(), batches()).sum())
      64.0
    """
    for label, value in (("fun", fun), ("init_params", init_params), ("get_input_batch", get_input_batch)):
        if value is not None and not callable(value):
            instead = {"init_params": "lambda: params", "get_input_batch": "initial_batch="}.get(
                label, "the function itself"
            )
            raise ArgumentError(
                f"parallelize: {label} has to be a function, found {type(value).__name__}; write {instead}"
            )
    first: list[Any] = []
    if initial_batch is None:
        if get_input_batch is None:
            raise ArgumentError("parallelize needs the shape of a batch: give get_input_batch, or initial_batch")
        first.append(get_input_batch())
    batch = jax.tree.map(seen, first[0] if first else initial_batch)
    arguments = (batch,) if init_params is None else (jax.eval_shape(_plain(init_params)), batch)
    step = Parallelized(jit(fun), arguments)
    if devices is not None:
        _check_devices(step.compiled, resolve_devices(devices).flat)
    *of_params, of_batch = step.compiled.input_shardings[0]
    init = jit(_plain(init_params), out_shardings=of_params[0]) if init_params is not None else None
    if get_input_batch is None:
        return step, init
    return step, init, _Batches(get_input_batch, first, of_batch, step.compiled)


class Parallelized:
    """A function that is compiled for arguments of known shapes, and compiles again for others.

    Attributes:
      compiled: the compiled step.
    """

    def __init__(self, jitted: Jitted[..., Any], arguments: tuple[Any, ...]) -> None:
        self._jitted = jitted
        self.compiled = jitted.prepare(*arguments)

    @_compat.boundary
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the function."""
        return self._jitted(*args, **kwargs)


class _Batches:
    """Gives out batches where the step wants them, the one that was looked at first."""

    def __init__(self, get: Callable[[], Any], seen: list[Any], shardings: Any, compiled: Compiled) -> None:
        self._get, self._seen, self._shardings, self._compiled = get, seen, shardings, compiled

    def __call__(self) -> PyTree:
        batch = self._seen.pop() if self._seen else self._get()
        structure: Any = jax.tree.structure(batch)
        if transforms_ignored() or structure != jax.tree.structure(self._shardings):
            return batch  # as it came, for which the step compiles
        return jax.tree.map(self._placed, batch, self._shardings)

    def _placed(self, x: Any, sharding: NamedSharding) -> Any:
        """A part of a batch where the step wants it. One of a shape that is not cut so, as the last batch may have, stays as it
        came: the step compiles for it, or says what is wrong with it."""
        try:
            sharding.shard_shape(np.shape(x))
        except ValueError:
            return x
        return self._compiled.bring(x, sharding)


def seen(x: Any) -> jax.ShapeDtypeStruct:
    """What a call of the step would see: also a random key, and a Python number, whose type is weak."""
    return _compat.abstract(x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x))


def _plain(fun: Callable[[], Any]) -> Callable[[], Any]:
    """The function without its tasks: where its results are wanted says where everything is made."""

    def plain() -> Any:
        with ignore_transforms():
            return fun()

    return plain


def _check_devices(compiled: Compiled, allowed: Iterable[Any]) -> None:
    given = set(allowed)
    for name, submesh in compiled.runs_on():
        outside = set(mesh_devices(submesh)) - given
        if outside:
            raise MeshError(
                f"parallelize: {name!r} runs on devices {sorted(d.id for d in outside)}, which are not among "
                f"devices={sorted(d.id for d in given)}; place its task on these, or give all devices that tasks use"
            )
