"""Generated programs whose tasks are modules of Linen, NNX or Equinox.

A layer of a `Program` becomes a block: a kernel and a bias around the layer's operations, and then small modules of the
framework, one after the other. With tasks the step runs under the adapter's ``jit``; without any it is the framework's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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

from .operations import WIDTH, Surroundings, apply
from .optimizers import optimizer
from .program import Layer, Program
from .wraps import inner_wrapped

PARTS = ("linear", "layer_norm", "batch_norm", "dropout", "mlp")
BLOCKS = 2  # in a scan

State = Any
# A step from a state to the next one and a loss, and from a state to its arrays by path.
Steps = tuple[Callable[[State], tuple[State, Any]], Callable[[State], dict[str, Any]], State]


def begin(
    program: Program,
    schedule: str | None,
    tasks: bool,
    perturb: Callable[[Any], Any] = lambda tree: tree,
    options: dict[str, Any] | None = None,
) -> Steps:
    """The step of a program, what a state holds, and the first state.

    Args:
      program: one with a framework.
      schedule: of the loop over microbatches; None for no loop.
      tasks: whether layers are tasks.
      perturb: applied to the parameters and the batch.
      options: of the compiler.
    """
    jits = {"linen": (mm.jit, jax.jit), "nnx": (mm.nnx.jit, nnx.jit), "equinox": (mm.equinox.jit, eqx.filter_jit)}
    ours, plain = jits[program.framework]
    jit = functools.partial(ours if tasks else plain, **({} if options is None else {"compiler_options": options}))
    return FRAMEWORKS[program.framework](program, schedule, tasks, perturb, jit)


def _wrapped(program: Program, i: int, block: Any, tasks: bool) -> Any:
    """The i-th block as a task, unless a scope makes one of it."""
    if not tasks or program.layers[i].placed != "task":
        return block
    face = {"linen": mm.flax, "nnx": mm.nnx, "equinox": mm.equinox}[program.framework]
    return face.task(block, f"t{i}", **program.placement(i, program.meshes()))


def _body(layer: Layer, kernel: Any, bias: Any, x: Any, ids: Any) -> Any:
    def operate(h: Any, n: Any) -> Any:
        around = Surroundings(jax.lax.stop_gradient(kernel) if layer.inner == "while" else kernel, n, None)
        for name in layer.operations:
            h = apply(name, h, around)
        return h

    return inner_wrapped(layer.inner, operate, x, ids) @ kernel + bias


def _after(program: Program, i: int, x: Any, ids: Any) -> Any:
    """What the model does with the result of a block, outside of tasks."""
    layer = program.layers[i]
    if layer.between is not None:
        x = apply(layer.between, x, Surroundings(jnp.eye(WIDTH), ids, None))
    return program.put(i, x, program.meshes())


def _by_path(tree: Any, prefix: str) -> dict[str, Any]:
    rows = jax.tree_util.tree_leaves_with_path(tree)
    found = {prefix + jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in rows}
    return {path: x for path, x in found.items() if isinstance(x, jax.Array)}


def _loop(program: Program, fun: Any, schedule: str | None, microbatch: Any = mm.microbatch, **options: Any) -> Any:
    if schedule is None:
        return fun
    chosen = program.scheduled(schedule, backward=True)
    return microbatch(fun, num_microbatches=program.microbatches, reduce=program.reduce, **chosen, **options)


def _training(program: Program, schedule: str | None, grad: Any, tx: Any) -> Any:
    """A step of ``(model or parameters, statistics, moments)``, a batch and a key."""

    def step(state: Any, batch: Any, key: Any) -> Any:
        model, stats, moments = state
        loop = _loop(program, grad, schedule, argnum=2, state_argnum=1, rng_argnum=3)
        (loss, grads), stats = loop(model, stats, batch, key)
        updates, moments = tx.update(grads, moments, eqx.filter(model, eqx.is_inexact_array))
        return (eqx.apply_updates(model, updates), stats, moments), (loss, _by_path(grads, ""))

    return step


def kernels(program: Program) -> dict[int, str]:
    """Where the arrays of a state have the kernel of each block that is one task."""
    start, end = {"linen": ("0/t", "/kernel"), "nnx": ("0/t", "/kernel"), "equinox": ("0/blocks/", "/kernel")}[
        program.framework
    ]
    boxed = "/value" if program.framework == "linen" else ""
    return {
        i: f"{start}{i}{end}" + boxed * (layer.annotated == "box")
        for i, layer in enumerate(program.layers)
        if layer.wrap != "stacked"
    }


# --- Linen ------------------------------------------------------------------------------------------------


class LinenBlock(nn.Module):
    layer: Layer

    @nn.compact
    def __call__(self, x: Any, ids: Any) -> Any:
        layer, init = self.layer, nn.initializers.lecun_normal()
        if layer.annotated == "box":
            init = nn.with_logical_partitioning(init, layer.kernel_axes)
        x = _body(
            layer,
            self.param("kernel", init, (WIDTH, WIDTH)),
            self.param("bias", nn.initializers.zeros, (WIDTH,)),
            x,
            ids,
        )
        for part in layer.modules:
            x = self.part(part, x)
        return x if layer.activation is None else nn.with_logical_constraint(x, layer.activation)

    def part(self, part: str, x: Any) -> Any:
        if part == "linear":
            return nn.Dense(WIDTH)(x)
        if part == "layer_norm":
            return nn.LayerNorm()(x)
        if part == "batch_norm":
            return nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
        if part == "dropout":
            return nn.Dropout(0.5, deterministic=False)(x)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(x)))


class LinenModel(nn.Module):
    program: Program
    tasks: bool

    @nn.compact
    def __call__(self, x: Any, ids: Any) -> Any:
        for i, layer in enumerate(self.program.layers):
            block = _wrapped(self.program, i, LinenBlock, self.tasks)
            if layer.wrap == "checkpoint":
                block = nn.remat(block)
            if layer.wrap == "stacked":
                scanned = nn.scan(
                    lambda block, x, ids: (jnp.tanh(block(x, ids)), None),
                    variable_axes={"params": 0, "batch_stats": 0},
                    split_rngs={"params": True, "dropout": True},
                    in_axes=nn.broadcast,
                    length=BLOCKS,
                    metadata_params={nn.PARTITION_NAME: None},
                )
                x = scanned(block(layer, name=f"t{i}"), x, ids)[0]
            else:
                x = block(layer, name=f"t{i}")(x, ids)
            x = _after(self.program, i, x, ids)
        return x


def linen(program: Program, schedule: str | None, tasks: bool, perturb: Any, jit: Any) -> Steps:
    model, tx = LinenModel(program, tasks), optimizer(program.optimizer, program.clipped)
    x, ids = _batch(program)
    first = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    init = jax.jit(LinenModel(program, False).init)  # one program: without, each line of the model is one
    variables = dict(init(first, x, ids))
    params, x = perturb((variables.pop("params"), x))

    def loss_of(params: Any, stats: Any, batch: Any, key: Any) -> Any:
        y, new = model.apply({"params": params, **stats}, *batch, mutable=list(stats), rngs={"dropout": key})
        return jnp.mean(y**2), new

    def grad(params: Any, stats: Any, batch: Any, key: Any) -> Any:
        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params, stats, batch, key)
        return (loss, grads), stats

    step = _training(program, schedule, grad, tx)
    jitted = jit(step, donate_argnums=(0,) if program.donate else ())
    state = params, variables, jax.tree.map(jnp.copy, tx.init(params))
    return lambda state: jitted(state, (x, ids), jax.random.key(3)), lambda state: _by_path(state, ""), state


# --- NNX --------------------------------------------------------------------------------------------------


class NNXBlock(nnx.Module):
    def __init__(self, layer: Layer, rngs: nnx.Rngs) -> None:
        self.layer = layer
        init = nnx.initializers.lecun_normal()
        if layer.annotated == "box":
            init = nnx.with_partitioning(init, layer.kernel_axes)
        self.kernel = nnx.Param(init(rngs.params(), (WIDTH, WIDTH)))
        self.bias = nnx.Param(jnp.zeros(WIDTH))
        self.parts = nnx.List([NNX_PARTS[part](rngs) for part in layer.modules])

    def __call__(self, x: Any, ids: Any) -> Any:
        x = _body(self.layer, self.kernel[...], self.bias[...], x, ids)
        for part in self.parts:
            x = part(x)
        return x


class NNXMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.gelu(self.up(x)))


NNX_PARTS: dict[str, Any] = {
    "linear": lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
    "layer_norm": lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs),
    "batch_norm": lambda rngs: nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs),
    "dropout": lambda rngs: nnx.Dropout(0.5, rngs=rngs),
    "mlp": NNXMLP,
}


# The names of kernels are those of one layer; this makes room for the dimension of the layers.
_UNNAMED = {"transform_metadata": {nnx.PARTITION_NAME: None}}
_STACKED = functools.partial(nnx.vmap, **_UNNAMED)


class NNXModel(nnx.Module):
    def __init__(self, program: Program, tasks: bool, rngs: nnx.Rngs) -> None:
        self.program = program
        for i, layer in enumerate(program.layers):
            block = _wrapped(program, i, NNXBlock, tasks)
            make = functools.partial(_made, block, layer)
            setattr(self, f"t{i}", _STACKED(make)(rngs.split(BLOCKS)) if layer.wrap == "stacked" else make(rngs))

    def __call__(self, x: Any, ids: Any) -> Any:
        for i, layer in enumerate(self.program.layers):
            call = nnx.remat(_called) if layer.wrap == "checkpoint" else _called
            if layer.wrap == "stacked":
                call = _nnx_scanned
            x = _after(self.program, i, call(getattr(self, f"t{i}"), x, ids), ids)
        return x


def _made(block: Any, layer: Layer, rngs: Any) -> Any:
    return block(layer, rngs)


def _called(block: Any, x: Any, ids: Any) -> Any:
    return block(x, ids)


def _nnx_scanned(blocks: Any, x: Any, ids: Any) -> Any:
    def body(x: Any, block: Any) -> Any:
        return jnp.tanh(block(x, ids))

    return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **_UNNAMED)(x, blocks)


def of_nnx(program: Program, schedule: str | None, tasks: bool, perturb: Any, jit: Any) -> Steps:
    with nnx.use_eager_sharding(False):
        model = NNXModel(program, tasks, nnx.Rngs(0))
    x, ids = _batch(program)
    params, x = perturb((nnx.state(model, nnx.Param), x))
    nnx.update(model, params)
    held = nnx.Optimizer(model, optimizer(program.optimizer, program.clipped), wrt=nnx.Param)

    def loss_of(model: Any, batch: Any) -> Any:
        return jnp.mean(model(*batch) ** 2)

    def step(model: Any, held: Any, batch: Any) -> Any:
        grad = nnx.value_and_grad(loss_of)
        loss, grads = _loop(program, grad, schedule, mm.nnx.microbatch, argnum=1)(model, batch)
        held.update(model, grads)
        return loss, nnx.to_pure_dict(grads)

    jitted = jit(step, donate_argnums=(0, 1) if program.donate else None)

    def run(state: Any) -> Any:
        return state, jitted(*state, (x, ids))

    def arrays(state: Any) -> dict[str, Any]:
        trees = [nnx.to_pure_dict(nnx.state(part, nnx.Not(nnx.RngKey))) for part in state]
        return _by_path(trees, "")

    return run, arrays, (model, held)


# --- Equinox ----------------------------------------------------------------------------------------------


class EquinoxBlock(eqx.Module):
    layer: Layer = eqx.field(static=True)
    kernel: Any
    bias: Any
    parts: list[Any]

    def __init__(self, layer: Layer, key: Any) -> None:
        self.layer = layer
        self.kernel = jax.random.normal(key, (WIDTH, WIDTH)) * 0.5
        self.bias = jnp.zeros(WIDTH)
        keys = jax.random.split(key, len(layer.modules) + 1)
        self.parts = [EQUINOX_PARTS[part](key) for part, key in zip(layer.modules, keys, strict=False)]

    def __call__(self, x: Any, ids: Any, state: Any, key: Any) -> Any:
        kernel = self.kernel
        if self.layer.annotated == "box":
            kernel = mm.with_sharding_constraint(kernel, self.layer.kernel_axes)
        x = _body(self.layer, kernel, self.bias, x, ids)
        for part in self.parts:
            if isinstance(part, eqx.nn.BatchNorm):
                x, state = jax.vmap(part, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
            elif isinstance(part, eqx.nn.Dropout):
                x = part(x, key=key)
            elif isinstance(part, eqx.nn.MLP):
                x = x + jax.vmap(part)(x)
            else:
                x = jax.vmap(part)(x)
        return x, state


EQUINOX_PARTS: dict[str, Any] = {
    "linear": lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key),
    "layer_norm": lambda key: eqx.nn.LayerNorm(WIDTH),
    "batch_norm": lambda key: eqx.nn.BatchNorm(WIDTH, axis_name="batch", momentum=0.5, mode="batch"),
    "dropout": lambda key: eqx.nn.Dropout(0.5),
    "mlp": lambda key: eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key),
}


class EquinoxModel(eqx.Module):
    program: Program = eqx.field(static=True)
    blocks: list[Any]

    def __init__(self, program: Program, tasks: bool, key: Any) -> None:
        self.program = program
        self.blocks = []
        for i, layer in enumerate(program.layers):
            make = functools.partial(_made, _wrapped(program, i, EquinoxBlock, tasks), layer)
            own = jax.random.fold_in(key, i)
            stacked = layer.wrap == "stacked"
            self.blocks.append(eqx.filter_vmap(make)(jax.random.split(own, BLOCKS)) if stacked else make(own))

    def __call__(self, x: Any, ids: Any, state: Any, key: Any) -> Any:
        for i, (layer, block) in enumerate(zip(self.program.layers, self.blocks, strict=True)):
            own = jax.random.fold_in(key, i)
            if layer.wrap == "stacked":
                x = _equinox_scanned(block, x, ids, state, own)
            else:
                call = eqx.filter_checkpoint(_run_block) if layer.wrap == "checkpoint" else _run_block
                x, state = call(block, x, ids, state, own)
            x = _after(self.program, i, x, ids)
        return x, state


def _run_block(block: Any, x: Any, ids: Any, state: Any, key: Any) -> Any:
    return block(x, ids, state, key)


def _equinox_scanned(blocks: Any, x: Any, ids: Any, state: Any, key: Any) -> Any:
    arrays, static = eqx.partition(blocks, eqx.is_array)

    def body(x: Any, arrays: Any) -> Any:
        return jnp.tanh(eqx.combine(arrays, static)(x, ids, state, key)[0]), None

    return jax.lax.scan(body, x, arrays)[0]


def equinox(program: Program, schedule: str | None, tasks: bool, perturb: Any, jit: Any) -> Steps:
    model, stats = eqx.nn.make_with_state(EquinoxModel)(program, tasks, jax.random.key(0))
    tx = optimizer(program.optimizer, program.clipped)
    x, ids = _batch(program)
    model, x = perturb((model, x))

    def loss_of(model: Any, stats: Any, batch: Any, key: Any) -> Any:
        y, stats = model(*batch, stats, key)
        return jnp.mean(y**2), stats

    def grad(model: Any, stats: Any, batch: Any, key: Any) -> Any:
        (loss, stats), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model, stats, batch, key)
        return (loss, grads), stats

    step = _training(program, schedule, grad, tx)
    # The batch and the key are used again, so that only the first argument is donated, whole.
    jitted = jit(step)
    state = model, stats, jax.tree.map(_copied, tx.init(eqx.filter(model, eqx.is_inexact_array)))
    return lambda state: jitted(state, (x, ids), jax.random.key(3)), lambda state: _by_path(state, ""), state


def _copied(x: Any) -> Any:
    return jnp.copy(x) if eqx.is_array(x) else x


def _batch(program: Program) -> tuple[Any, Any]:
    batch = program.batch()
    return batch["x"], batch["ids"]


FRAMEWORKS: dict[str, Callable[..., Steps]] = {"linen": linen, "nnx": of_nnx, "equinox": equinox}
