"""A whole training step from a Linen model and an optimizer, its state created where it will live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import optax  # type: ignore[import-untyped]  # it ships no types
from flax.training.train_state import TrainState
from jax.sharding import Mesh

from .. import _compat
from .._api._jit import jit
from .._api._parallelize import seen
from .._compiled import Compiled
from .._errors import ArgumentError, MeshError
from .._implicit import registered
from .._mark import Recording, ignore_transforms, recording, transforms_ignored
from .._microbatch import microbatch
from .._runtime._exchange import joined
from .._task import mesh_devices
from .._types import PyTree
from ._task import task


class TrainStep:
    """``step(state, batch) -> (loss, new_state)``, compiled ahead of time for the batch it was made with.

    Called inside `manymesh.ignore_transforms` it is the same step as plain JAX on one device. A batch of another
    shape compiles once more. The state is donated: use the returned one. Made with a ``local_batch`` in several processes, it
    takes what ``prepare_batch`` gives.

    Attributes:
      compiled: the `manymesh.Compiled` step, with ``report()``, ``memory_analysis()`` and shardings.
    """

    def __init__(self, fun: Callable[[Any, Any], Any], state: PyTree, batch: PyTree, strict: bool, joins: bool) -> None:
        self._jitted, self._joins = jit(fun, donate_argnums=0, strict=strict), joins
        self._shapes = _shapes((state, batch))
        self.compiled: Compiled = self._jitted.lower(state, batch).compile()

    def __repr__(self) -> str:
        return f"TrainStep({self.compiled!r})"

    @property
    def state_shardings(self) -> Any:
        """The sharding of every leaf of the state, in its structure."""
        return self.compiled.input_shardings[0][0]

    @property
    def batch_shardings(self) -> Any:
        """The sharding of every leaf of the batch, in its structure."""
        return self.compiled.input_shardings[0][1]

    @_compat.boundary
    def __call__(self, state: PyTree, batch: PyTree) -> tuple[jax.Array, Any]:
        """Runs one step."""
        if not isinstance(state, TrainState):
            raise ArgumentError(
                f"step(state, batch): expected the train state as the first argument, found {_text(state)}; the step returns "
                "(loss, state): write loss, state = step(state, batch)"
            )
        if self._joins and not transforms_ignored() and any(map(_is_part, jax.tree.leaves(batch))):
            raise ArgumentError(
                f"step(state, batch): the step was made with local_batch in {jax.process_count()} processes, and a host value is "
                f"taken to be the same in all of them; found {_text(batch)}: write step(state, prepare_batch(batch)), which "
                "joins the parts of the processes"
            )
        known = not transforms_ignored() and _shapes((state, batch)) == self._shapes
        run: Callable[..., Any] = self.compiled if known else self._jitted
        loss, state = run(state, batch)
        return loss, state


@_compat.boundary
def parallelize_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    global_batch: PyTree = None,
    local_batch: PyTree = None,
    *,
    loss_fn: Callable[..., jax.Array] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    num_microbatches: int | None = None,
    schedule: Any = "1f1b",
    reduce: Any = "mean",
    rng: jax.Array | int = 0,
    rngs: Sequence[str] = (),
    strict: bool = False,
) -> Any:
    """Makes a compiled training step and a train state that was never whole on one device.

    The step is compiled first, on shapes alone; the state is then created with the shardings it needs, each
    parameter and its optimizer state on the submesh of the task that uses it.

    Args:
      model: a Linen module, usually with `task` modules in it. Without any, the whole model is one task on ``mesh``.
      optimizer: an Optax transformation.
      mesh: the devices of the step; tasks may not use others.
      global_batch: a batch as the step will get it: a pytree of arrays or of `jax.ShapeDtypeStruct`.
      local_batch: instead of ``global_batch``, what one process loads; ``prepare_batch`` turns it into the global one: with
        several processes, their parts along dimension 0.
      loss_fn: ``loss_fn(params, batch) -> scalar``, which calls ``model.apply`` itself; with ``rngs`` it is
        ``loss_fn(params, batch, rngs)``. By default ``model.apply`` returns the loss.
      inputs: the arguments of the model for a batch, ``inputs(batch) -> tuple``, or a dictionary of them by name for a model with
        keyword-only ones, ``inputs=lambda batch: {"x": batch["image"], "train": True}``. By default a tuple batch is the
        positional arguments, anything else is the only one.
      num_microbatches: cut the batch along dimension 0; None trains on it whole.
      schedule: schedule of the microbatches, as for `manymesh.microbatch`.
      reduce: how losses and gradients of microbatches combine, as for `manymesh.microbatch`.
      rng: key, or seed, of the initial parameters and of ``rngs``. It is split: the parameters are those of
        ``model.init(jax.random.split(rng)[0], ...)``, and ``rngs`` are made of the other half.
      rngs: names of the random streams that ``apply`` gets, such as ``("dropout",)``: other keys in every
        step and microbatch.
      strict: as for `manymesh.jit`.

    Returns:
      ``(step, state, mesh)`` for a ``global_batch``, ``(step, state, mesh, prepare_batch)`` for a ``local_batch``:
      a `TrainStep`, a Flax ``TrainState`` with boxes around annotated parameters, the mesh as given, and a function
      that places a batch where the step wants it.

    Raises:
      ArgumentError: no module or no optimizer; both batches or none; a loss that is no scalar; a model with other variables than parameters.
      MeshError: a task uses devices that are not in ``mesh``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> from manymesh.flax import parallelize_step, task
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x, y):
      ...         h = nn.relu(task(nn.Dense, "front", devices=[0])(16)(x))
      ...         return jnp.mean((task(nn.Dense, "back", devices=[1])(1)(h) - y) ** 2)
      >>> mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
      >>> batch = (jnp.ones((8, 4)), jnp.ones((8, 1)))
      >>> step, state, mesh = parallelize_step(Model(), optax.sgd(0.1), mesh, batch, num_microbatches=2)
      >>> first, state = step(state, batch)
      >>> second, state = step(state, batch)
      >>> bool(second < first), int(state.step)
      (True, 2)
    """
    _check_arguments(model, optimizer, mesh, rngs, {"loss_fn": loss_fn, "inputs": inputs})
    batch = _abstract_batch(global_batch, local_batch)
    call = _calling(inputs)
    init_key, run_key = jax.random.split(jax.random.key(rng) if isinstance(rng, int) else rng)
    keys = {"params": init_key, **dict.fromkeys(rngs, run_key)}
    model = _placed(model, mesh, keys, call, batch)
    loss_of = _make_loss(model, loss_fn, call, rngs)
    grad = jax.value_and_grad(loss_of)
    if num_microbatches is not None:
        loop = {"num_microbatches": num_microbatches, "schedule": schedule, "reduce": reduce}
        grad = microbatch(grad, argnum=1, rng_argnum=2 if rngs else None, **loop)

    init = _make_init(model, optimizer, keys, call, batch)
    abstract_state = jax.eval_shape(init)
    drawn = run_key if rngs else None
    _check_loss(loss_of, abstract_state.params, batch, drawn)
    joins = local_batch is not None and jax.process_count() > 1
    step = TrainStep(_make_update(grad, drawn), abstract_state, batch, strict, joins)
    _check_devices(step.compiled, mesh)
    state = jit(_without_tasks(init), out_shardings=step.state_shardings)()
    return (step, state, mesh) if local_batch is None else (step, state, mesh, _make_prepare(step, local_batch))


# ``call(function, batch, *first, **more)`` calls it with ``first``, what the model takes of the batch, and ``more``.
_Call = Callable[..., Any]


def _calling(inputs: Callable[[Any], Any] | None) -> _Call:
    """How a model is called with a batch."""

    def call(function: Callable[..., Any], batch: PyTree, *first: Any, **more: Any) -> Any:
        found = inputs(batch) if inputs else batch if isinstance(batch, tuple) else (batch,)
        if isinstance(found, dict):
            return function(*first, **found, **more)
        if isinstance(found, (tuple, list)):
            return function(*first, *found, **more)
        what = "an array" if isinstance(found, jax.Array) else type(found).__name__
        raise ArgumentError(
            "parallelize_step: inputs has to return the arguments of the model in a tuple, or by name in a dictionary, found "
            f"{what}; of one argument write (x,)"
        )

    return call


def _check_arguments(
    model: object, optimizer: Any, mesh: object, rngs: object, functions: Mapping[str, object]
) -> None:
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}; write {model.__name__}(...)" if isinstance(model, type) else repr(model)
        raise ArgumentError(f"parallelize_step: the model has to be a Linen module, found {found}")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        name = getattr(optimizer, "__name__", "")
        hint = f"function {name}; write {name}(...), with a learning rate, say" if name else repr(optimizer)
        raise ArgumentError(f"parallelize_step: the optimizer has to be an optax.GradientTransformation, found {hint}")
    if not isinstance(mesh, Mesh):
        raise ArgumentError(
            f"parallelize_step: the mesh, its third argument, has to be a jax.sharding.Mesh, found {type(mesh).__name__}"
        )
    if isinstance(rngs, str):
        raise ArgumentError(f"parallelize_step: rngs takes several names, found the string {rngs!r}; write ({rngs!r},)")
    for label, value in functions.items():
        if value is not None and not callable(value):
            raise ArgumentError(f"parallelize_step: {label} has to be a function, found {type(value).__name__}")


def _make_init(
    model: nn.Module, optimizer: optax.GradientTransformation, keys: dict[str, jax.Array], call: _Call, batch: PyTree
) -> Callable[[], TrainState]:
    """The initial state, from keys and the shapes of a batch."""

    def init() -> TrainState:
        params = _only_params(call(model.init, _zeros(batch), keys))
        state: TrainState = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
        return state

    return init


def _make_update(
    loss_and_grad: Callable[..., Any], run_key: jax.Array | None
) -> Callable[[TrainState, Any], tuple[jax.Array, TrainState]]:
    """One step of training, with another key in every step."""

    def train_step(state: TrainState, batch: PyTree) -> tuple[jax.Array, TrainState]:
        key = None if run_key is None else jax.random.fold_in(run_key, state.step)
        loss, grads = loss_and_grad(state.params, batch, key)
        return loss, state.apply_gradients(grads=grads)

    return train_step


def _make_loss(
    model: nn.Module, loss_fn: Callable[..., Any] | None, call: _Call, rngs: Sequence[str]
) -> Callable[..., Any]:
    """``loss(params, batch, key)``; the key is None for a model without random streams."""

    def loss_of(params: PyTree, batch: PyTree, key: jax.Array | None) -> Any:
        streams = None if key is None else {name: jax.random.fold_in(key, i) for i, name in enumerate(rngs)}
        if loss_fn is None:
            return call(model.apply, batch, {"params": params}, rngs=streams)
        return loss_fn(params, batch) if streams is None else loss_fn(params, batch, streams)

    return loss_of


def _without_tasks(init: Callable[[], TrainState]) -> Callable[[], TrainState]:
    """The shardings of the state place everything, so that initializers need no task to say where."""

    def plain_init() -> TrainState:
        with ignore_transforms():
            return init()

    return plain_init


def _abstract_batch(global_batch: PyTree, local_batch: PyTree) -> Any:
    if (global_batch is None) == (local_batch is None):
        raise ArgumentError("parallelize_step takes either global_batch or local_batch, found " + (
            "neither" if global_batch is None else "both"
        ))  # fmt: skip
    given = _of_all(local_batch, jax.process_count()) if global_batch is None else global_batch
    return jax.tree.map(seen, given)


def _placed(model: nn.Module, mesh: Mesh, keys: Any, call: _Call, batch: PyTree) -> nn.Module:
    """The model, as one task on the mesh if there is no task in it."""
    record = Recording()
    try:
        with recording(record):
            jax.eval_shape(lambda k: call(model.init, _zeros(batch), k), keys)
    except TypeError as error:
        if "argument" in str(error) and not isinstance(error, ArgumentError):
            error.add_note(
                "parallelize_step: inputs= says what the model is called with, by default the parts of a tuple batch, or the batch; "
                'of arguments by name write inputs=lambda batch: {"x": batch, "train": True}'
            )
        raise
    return model if record.tasks or registered() else task(model, mesh=mesh)


def _zeros(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), tree)


def _only_params(variables: PyTree) -> Any:
    others = sorted(set(variables) - {"params"})
    if others:
        raise ArgumentError(
            f"parallelize_step trains parameters alone, but the model also has the collections {', '.join(others)}; "
            "write the step with manymesh.jit to carry them along"
        )
    return variables["params"]


def _check_loss(loss_of: Callable[..., Any], params: PyTree, batch: PyTree, key: Any) -> None:
    out = jax.eval_shape(loss_of, params, batch, key)
    if not isinstance(out, jax.ShapeDtypeStruct) or out.shape != ():
        raise ArgumentError(
            f"parallelize_step: expected a scalar loss, found {_text(out)}; let the model return its loss, or give "
            "loss_fn=lambda params, batch: ..."
        )


def _check_devices(compiled: Compiled, mesh: Mesh) -> None:
    allowed = {d.id for d in mesh_devices(mesh)}
    for _, submesh in compiled.runs_on():
        outside = sorted({d.id for d in mesh_devices(submesh)} - allowed)
        if outside:
            raise MeshError(
                f"parallelize_step: tasks use devices {outside}, which are not in the mesh with devices {sorted(allowed)}"
            )


def _of_all(local: Any, processes: int) -> Any:
    """The shapes of a batch of which every process loads a part."""

    def of_all(x: Any) -> jax.ShapeDtypeStruct:
        shape = jax.numpy.shape(x)
        if not shape:
            raise ArgumentError("parallelize_step: a scalar in local_batch cannot be joined over processes")
        one = seen(x)
        return jax.ShapeDtypeStruct((processes * shape[0], *shape[1:]), one.dtype, weak_type=one.weak_type)

    return local if processes == 1 else jax.tree.map(of_all, local)


def _make_prepare(step: TrainStep, local_batch: PyTree) -> Callable[[Any], Any]:
    shapes, processes = _shapes(local_batch), jax.process_count()

    def prepare_batch(local: Any) -> Any:
        """Places a batch where the step wants it; one with another number of rows, for which the step compiles once more."""
        found = _shapes(local)
        if found != shapes and _of_rows(found) != _of_rows(shapes):
            raise ArgumentError(
                f"prepare_batch: the step was made for a batch {_text(local_batch)}, found {_text(local)}; only the number of "
                "rows may be another one"
            )
        if processes > 1:
            return jax.tree.map(joined, local)
        return jax.tree.map(jax.device_put, local, step.batch_shardings) if found == shapes else local

    return prepare_batch


def _is_part(x: Any) -> bool:
    """Whether a leaf of a batch is what one process has loaded."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def _of_rows(shapes: Any) -> Any:
    """What `_shapes` says of a batch, whatever its number of rows."""
    kinds, treedef = shapes
    return tuple((shape[1:] if shape else None, dtype) for shape, dtype in kinds), treedef


def _shapes(tree: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return tuple((x.shape, x.dtype) for x in map(seen, leaves)), treedef


def _text(tree: PyTree) -> str:
    """``(float32[8,4], int32[8])``: the structure of a tree of arrays, with their dtypes and shapes."""

    def describe(x: Any) -> str:
        return f"{jax.numpy.result_type(x).name}[{','.join(map(str, jax.numpy.shape(x)))}]"

    return str(jax.tree.map(describe, tree)).replace("'", "")
