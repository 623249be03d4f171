"""The same two models in each framework, behind one interface for the contract of adapters.

`Trains` is two blocks, ``front`` on device 0 and ``back`` on device 1, each a dense layer, a running mean of what goes
through it, and dropout; its step is a gradient over two microbatches. `Stacks` scans over two equal layers in a task
inside a checkpoint. Both are built with tasks or without, by the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp

import manymesh as mm
import manymesh.equinox
import manymesh.flax
import manymesh.nnx
from flax import nnx

WIDTH = 4
X = jax.random.normal(jax.random.key(7), (4, WIDTH))


@dataclass(frozen=True)
class Outcome:
    """What a step computed.

    Attributes:
      loss: a number.
      arrays: all that the step left, by path; gradients under ``grad/``.
      table: of the parameters.
      dropped: in each microbatch, what the last block dropped, as ones; None where nothing is.
    """

    loss: Any
    arrays: dict[str, Any]
    table: Any
    dropped: Any = None


@dataclass(frozen=True)
class Framework:
    """One adapter and the models.

    Attributes:
      face: the adapter.
      trains, stacks: ``run(tasks) -> Outcome``, with tasks under the adapter's jit or without any under the framework's.
      module: a module class.
      decorated: an instance of a class that `task` stands above.
      paths: the paths of the parameters.
    """

    face: Any
    trains: Callable[[bool], Outcome]
    stacks: Callable[[bool], Outcome]
    module: type
    decorated: Callable[[], Any]
    paths: frozenset[str]


def by_path(tree: Any, prefix: str = "") -> dict[str, Any]:
    rows = jax.tree_util.tree_leaves_with_path(tree)
    return {prefix + jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in rows}


REDUCE = ("sum", "sum", "stack")  # loss, gradients, what is dropped


def dropped(y: Any) -> Any:
    return jnp.asarray(y == 0, jnp.float32)


def no_task(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model


# --- Linen ------------------------------------------------------------------------------------------------


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = jnp.tanh(nn.Dense(WIDTH)(x))
        mean = self.variable("stats", "mean", jnp.zeros, WIDTH)
        if train:
            mean.value = 0.5 * mean.value + 0.5 * x.mean(0)
        return nn.Dropout(0.5, deterministic=not train)(x - mean.value)


class LinenModel(nn.Module):
    tasks: bool

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        wrap = mm.flax.task if self.tasks else no_task
        x = wrap(LinenBlock, "front", devices=[0])(name="front")(x, train)
        return wrap(LinenBlock, "back", devices=[1])(name="back")(x, train)


def linen_trains(tasks: bool) -> Outcome:
    model = LinenModel(tasks)
    variables = model.init(jax.random.key(0), X, False)

    def loss_of(params: Any, stats: Any, x: Any, key: Any) -> Any:
        rngs = {"dropout": key}
        y, new = model.apply({"params": params, "stats": stats}, x, True, mutable=["stats"], rngs=rngs)
        return jnp.mean((y - 1) ** 2), (new["stats"], dropped(y))

    def grad(params: Any, stats: Any, x: Any, key: Any) -> Any:
        (loss, (stats, zeros)), grads = jax.value_and_grad(loss_of, has_aux=True)(params, stats, x, key)
        return (loss, grads, zeros), stats

    def step(variables: Any, x: Any) -> Any:
        loop = mm.microbatch(grad, argnum=2, reduce=REDUCE, num_microbatches=2, state_argnum=1, rng_argnum=3)
        (loss, grads, zeros), stats = loop(variables["params"], variables["stats"], x, jax.random.key(3))
        return loss, {"params": variables["params"], "stats": stats}, grads, zeros

    loss, variables, grads, zeros = (mm.jit if tasks else jax.jit)(step)(variables, X)
    return Outcome(loss, by_path(variables) | by_path(grads, "grad/"), mm.flax.tabulate(variables), zeros)


class LinenStack(nn.Module):
    tasks: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        wrap = mm.flax.task if self.tasks else no_task
        layer = nn.remat(wrap(nn.Dense, "layer", devices=[1]))
        scanned = nn.scan(
            lambda layer, x: (jnp.tanh(layer(x)), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return scanned(layer(WIDTH, name="layers"), x)[0]


def linen_stacks(tasks: bool) -> Outcome:
    model = LinenStack(tasks)
    params = model.init(jax.random.key(0), X)["params"]
    step = jax.value_and_grad(lambda params, x: jnp.sum(model.apply({"params": params}, x) ** 2))
    loss, grads = (mm.jit if tasks else jax.jit)(step)(params, X)
    return Outcome(loss, by_path(grads), mm.flax.tabulate(grads))


@mm.flax.task(devices=[1])
class LinenDecorated(nn.Module):
    width: int = WIDTH

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(self.width)(x)


# --- NNX --------------------------------------------------------------------------------------------------


class Stats(nnx.Variable):
    """Running statistics."""


class NNXBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mean = Stats(jnp.zeros(WIDTH))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(self.dense(x))
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * x.mean(0)
        return self.dropout(x - self.mean[...])


class NNXModel(nnx.Module):
    def __init__(self, tasks: bool, rngs: nnx.Rngs) -> None:
        wrap = mm.nnx.task if tasks else no_task
        self.front = wrap(NNXBlock, "front", devices=[0])(rngs)
        self.back = wrap(NNXBlock(rngs), "back", devices=[1])

    def __call__(self, x: Any) -> Any:
        return self.back(self.front(x))


def nnx_trains(tasks: bool) -> Outcome:
    model = NNXModel(tasks, nnx.Rngs(0))

    def loss_of(model: Any, x: Any) -> Any:
        y = model(x)
        return jnp.mean((y - 1) ** 2), dropped(y)

    def grad(model: Any, x: Any) -> Any:
        (loss, zeros), grads = nnx.value_and_grad(loss_of, has_aux=True)(model, x)
        return loss, grads, zeros

    def step(model: Any, x: Any) -> Any:
        return mm.nnx.microbatch(grad, argnum=1, num_microbatches=2, reduce=REDUCE)(model, x)

    loss, grads, zeros = (mm.nnx.jit if tasks else nnx.jit)(step)(model, X)
    state = nnx.state(model, nnx.Not(nnx.RngKey))
    arrays = by_path(nnx.to_pure_dict(state)) | by_path(nnx.to_pure_dict(grads), "grad/")
    return Outcome(loss, arrays, mm.nnx.tabulate(model), zeros)


class NNXStack(nnx.Module):
    def __init__(self, tasks: bool, rngs: nnx.Rngs) -> None:
        layer = (mm.nnx.task if tasks else no_task)(nnx.Linear, "layer", devices=[1])
        self.layers = nnx.vmap(lambda rngs: layer(WIDTH, WIDTH, rngs=rngs))(rngs.split(2))

    def __call__(self, x: Any) -> Any:
        call = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))
        return nnx.scan(lambda x, layer: call(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def nnx_stacks(tasks: bool) -> Outcome:
    model = NNXStack(tasks, nnx.Rngs(0))
    step = nnx.value_and_grad(lambda model, x: jnp.sum(model(x) ** 2))
    loss, grads = (mm.nnx.jit if tasks else nnx.jit)(step)(model, X)
    return Outcome(loss, by_path(nnx.to_pure_dict(grads)), mm.nnx.tabulate(grads))


@mm.nnx.task(devices=[1])
class NNXDecorated(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dense(x)


# --- Equinox ----------------------------------------------------------------------------------------------


class EquinoxBlock(eqx.Module):
    dense: eqx.nn.Linear
    mean: eqx.nn.StateIndex
    dropout: eqx.nn.Dropout

    def __init__(self, key: Any) -> None:
        self.dense = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.mean = eqx.nn.StateIndex(jnp.zeros(WIDTH))
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        x = jnp.tanh(jax.vmap(self.dense)(x))
        mean = 0.5 * state.get(self.mean) + 0.5 * x.mean(0)
        return self.dropout(x - mean, key=key), state.set(self.mean, mean)


class EquinoxModel(eqx.Module):
    front: EquinoxBlock
    back: EquinoxBlock

    def __init__(self, tasks: bool, key: Any) -> None:
        wrap = mm.equinox.task if tasks else no_task
        self.front = wrap(EquinoxBlock, "front", devices=[0])(jax.random.fold_in(key, 0))
        self.back = wrap(EquinoxBlock(jax.random.fold_in(key, 1)), "back", devices=[1])

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        x, state = self.front(x, state, jax.random.fold_in(key, 0))
        return self.back(x, state, jax.random.fold_in(key, 1))


def equinox_trains(tasks: bool) -> Outcome:
    model, state = eqx.nn.make_with_state(EquinoxModel)(tasks, jax.random.key(0))

    def loss_of(model: Any, state: Any, x: Any, key: Any) -> Any:
        y, state = model(x, state, key)
        return jnp.mean((y - 1) ** 2), (state, dropped(y))

    def grad(model: Any, state: Any, x: Any, key: Any) -> Any:
        (loss, (state, zeros)), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model, state, x, key)
        return (loss, grads, zeros), state

    def step(model: Any, state: Any, x: Any) -> Any:
        loop = mm.microbatch(grad, argnum=2, reduce=REDUCE, num_microbatches=2, state_argnum=1, rng_argnum=3)
        (loss, grads, zeros), state = loop(model, state, x, jax.random.key(3))
        return loss, grads, zeros, state, model

    loss, grads, zeros, state, model = (mm.equinox.jit if tasks else eqx.filter_jit)(step)(model, state, X)
    arrays = by_path(eqx.filter(model, eqx.is_array)) | by_path(grads, "grad/")
    means = {f"{name}/mean": state.get(getattr(model, name).mean) for name in ("front", "back")}
    return Outcome(loss, arrays | means, mm.equinox.tabulate(model), zeros)


class EquinoxStack(eqx.Module):
    layers: eqx.nn.Linear

    def __init__(self, tasks: bool, key: Any) -> None:
        layer = (mm.equinox.task if tasks else no_task)(eqx.nn.Linear, "layer", devices=[1])
        self.layers = eqx.filter_vmap(lambda key: layer(WIDTH, WIDTH, key=key))(jax.random.split(key))

    def __call__(self, x: Any) -> Any:
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        @jax.checkpoint
        def body(x: Any, arrays: Any) -> Any:
            return jnp.tanh(jax.vmap(eqx.combine(arrays, static))(x)), None

        return jax.lax.scan(body, x, arrays)[0]


def equinox_stacks(tasks: bool) -> Outcome:
    model = EquinoxStack(tasks, jax.random.key(0))
    step = eqx.filter_value_and_grad(lambda model, x: jnp.sum(model(x) ** 2))
    loss, grads = (mm.equinox.jit if tasks else eqx.filter_jit)(step)(model, X)
    return Outcome(loss, by_path(grads), mm.equinox.tabulate(grads))


@mm.equinox.task(devices=[1])
class EquinoxDecorated(eqx.Module):
    dense: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.dense = eqx.nn.Linear(WIDTH, WIDTH, key=key)

    def __call__(self, x: Any) -> Any:
        return jax.vmap(self.dense)(x)


_BLOCK = ("front", "back")
FRAMEWORKS = {
    "linen": Framework(
        mm.flax, linen_trains, linen_stacks, nn.Dense, LinenDecorated,
        frozenset(f"params/{b}/Dense_0/{p}" for b in _BLOCK for p in ("kernel", "bias")),
    ),
    "nnx": Framework(
        mm.nnx, nnx_trains, nnx_stacks, nnx.Linear, lambda: NNXDecorated(nnx.Rngs(0)),
        frozenset(f"{b}/dense/{p}" for b in _BLOCK for p in ("kernel", "bias")),
    ),
    "equinox": Framework(
        mm.equinox, equinox_trains, equinox_stacks, eqx.nn.Linear, lambda: EquinoxDecorated(jax.random.key(0)),
        frozenset(f"{b}/dense/{p}" for b in _BLOCK for p in ("weight", "bias")),
    ),
}  # fmt: skip
