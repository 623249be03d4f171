"""Training that goes on from a checkpoint, on another layout, as if nothing had happened; and what is read for it."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
import manymesh.equinox
from flax import nnx
from manymesh._checkpoint import _store
from manymesh._runtime._observe import Observer

pytestmark = pytest.mark.once

LAYERS, WIDTH, ROWS = 4, 8, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
STACKED = {"layers": "layer_{}"}


def meshes(count, size):
    devices = np.array(jax.devices()[: count * size]).reshape(count, size)
    return mm.submeshes(Mesh(devices, ("stage", "model")), "stage")


def dense(p, h):
    return h + jnp.tanh(mm.with_sharding_constraint(h @ p["w"], (None, "model")) + p["b"])


def unrolled(stages):
    """The loss of layers of their own, some on each stage."""
    per_stage = LAYERS // len(stages)
    layers = {f"layer_{i}": mm.task(dense, f"layer_{i}", mesh=stages[i // per_stage]) for i in range(LAYERS)}

    def loss(params, batch):
        for name, layer in layers.items():
            batch = layer(params[name], batch)
        return jnp.mean(batch**2)

    return loss


def scanned(stages):
    """The loss of the same layers stacked, and split over the stages."""
    layer = mm.task(dense, "layer", mesh=stages)
    return lambda params, batch: jnp.mean(
        jax.lax.scan(lambda h, p: (layer(p, h), None), batch, params["layers"])[0] ** 2
    )


def parameters(stacked=False):
    rng = np.random.default_rng(0)
    params = {f"layer_{i}": {"w": rng.normal(size=(WIDTH, WIDTH)) / 3, "b": np.zeros(WIDTH)} for i in range(LAYERS)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return {"layers": jax.tree.map(lambda *x: jnp.stack(x), *params.values())} if stacked else params


def initial(stacked=False):
    params = parameters(stacked)
    return {"params": params, "opt": OPTIMIZER.init(params), "step": 0}


def batch(number):
    """The batch with a number: the position in the data."""
    return jnp.asarray(np.random.default_rng(100 + number).normal(size=(ROWS, WIDTH)), jnp.float32)


def step_of(loss):
    def step(state, x):
        grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, schedule="1f1b", reduce="mean")
        value, grads = grad(state["params"], x)
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}, value

    return mm.jit(step, donate_argnums=0)


STEPS = {
    "2 stages": (lambda: step_of(unrolled(meshes(2, 2))), False),
    "4 stages": (lambda: step_of(unrolled(meshes(4, 1))), False),
    "stacked, 2 stages": (lambda: step_of(scanned(meshes(2, 1))), True),
}


class Moves(Observer):
    """The shapes of arguments that are not where the step wants them."""

    def __init__(self):
        self.moved = []

    def moves_argument(self, position, value, sharding):
        self.moved.append(np.shape(value))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses of six steps in two stages, and checkpoints after the third."""
    directory = tmp_path_factory.mktemp("run")
    step, state, losses = STEPS["2 stages"][0](), initial(), []
    with mm.checkpoint.Manager(directory) as manager:
        for number in range(6):
            state, loss = step(state, batch(number))
            losses.append(float(loss))
            if number == 2:
                manager.save(3, state, metadata={"next batch": 3})
    return directory, losses


@pytest.mark.parametrize("name", STEPS)
def test_training_goes_on_on_another_layout(name, undisturbed, tmp_path) -> None:
    """Losses are those of the run that was not interrupted, and the first step moves no more than the others."""
    directory, losses = undisturbed
    make, stacked = STEPS[name]
    step = make()
    described = jax.eval_shape(functools.partial(initial, stacked))
    described["step"] = jax.ShapeDtypeStruct((), jnp.int32, weak_type=True)
    lowered = step.lower(described, batch(0))
    like = mm.checkpoint.argument_of(lowered, 0)
    with mm.checkpoint.Manager(directory) as manager:
        state, start = manager.restore(like=like, stacked=STACKED), manager.metadata()["next batch"]
    compiled = step.prepare(state, batch(0))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    assert shardings == compiled.input_shardings[0][0] == jax.tree.map(lambda x: x.sharding, like)
    assert jax.tree.leaves(compiled.arguments) == jax.tree.leaves(lowered.arguments)
    found, moved = [], []
    for number in range(start, 6):
        moves = Moves()
        leaves = jax.tree.leaves((state, jax.device_put(batch(number), compiled.input_shardings[0][1])))
        state, loss = compiled.call_flat(leaves, moves)
        found.append(float(loss))
        moved.append(moves.moved)
    # Adam's count is read on every stage and has one home: it crosses in every step, as in a run that goes on.
    assert moved[0] == moved[1] == moved[2] and set(moved[0]) <= {()}
    assert step.prepare(state, batch(0)) is compiled  # what comes back has the types of what was saved
    np.testing.assert_allclose(found, losses[3:], rtol=1e-6)
    assert int(state["step"]) == 6


def test_nnx_goes_on_as_the_undisturbed_run(tmp_path) -> None:
    """Modules and optimizers by their states; the step says where they belong before it ever ran."""

    def fresh(seed):
        model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(seed)), nnx.Dropout(0.1, rngs=nnx.Rngs(seed)))
        model.layers[0] = mm.nnx.task(model.layers[0], "linear", devices=[2])
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @mm.nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    x = jnp.ones((2, 4))
    model, optimizer = fresh(0)
    train_step(model, optimizer, x)
    mm.checkpoint.save(tmp_path / "state", nnx.state((model, optimizer)))
    expected = [float(train_step(model, optimizer, x)) for _ in range(2)]

    model, optimizer = fresh(1)
    lowered = train_step.lower(model, optimizer, x)
    like = [mm.checkpoint.argument_of(lowered, k) for k in (0, 1)]
    for node, state in zip((model, optimizer), mm.checkpoint.restore(tmp_path / "state", like), strict=True):
        nnx.update(node, state)
    kernel = model.layers[0].kernel.get_value()
    assert kernel.sharding == like[0]["layers"][0]["kernel"].get_value().sharding
    assert kernel.sharding.device_set == {jax.devices()[2]}
    assert [float(train_step(model, optimizer, x)) for _ in range(2)] == expected


def test_equinox_goes_on_as_the_undisturbed_run(tmp_path) -> None:
    """What a step wants of a module is a module."""

    def fresh(seed):
        model = mm.equinox.task(eqx.nn.Linear(4, 4, key=jax.random.key(seed)), "linear", devices=[2])
        return model, optax.adam(1e-2).init(eqx.filter(model, eqx.is_array))

    @mm.equinox.jit(donate="all-except-first")
    def train_step(x, model, moments):
        loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        updates, moments = optax.adam(1e-2).update(grads, moments, model)
        return loss, eqx.apply_updates(model, updates), moments

    x = jnp.ones((2, 4))
    _, *state = train_step(x, *fresh(0))
    mm.checkpoint.save(tmp_path / "state", state)
    expected = float(train_step(x, *state)[0])

    lowered = train_step.lower(x, *fresh(1))
    like = [mm.checkpoint.argument_of(lowered, k) for k in (1, 2)]
    state = mm.checkpoint.restore(tmp_path / "state", like)
    assert isinstance(state[0], eqx.nn.Linear) and state[0].weight.sharding.device_set == {jax.devices()[2]}
    assert float(train_step(x, *state)[0]) == expected


def test_nnx_in_dictionaries_goes_on_as_the_undisturbed_run(tmp_path) -> None:
    """Modules below a dictionary, and a state of averages beside them, are wanted by the names that they are saved under."""

    def fresh(seed):
        model = mm.nnx.task(nnx.Linear(4, 8, rngs=nnx.Rngs(seed)), "linear", devices=[2])
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}

    @mm.nnx.jit
    def train_step(state, average, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(state["model"])
        state["optimizer"].update(state["model"], grads)
        params = nnx.state(state["model"], nnx.Param)
        return loss, jax.tree.map(lambda mean, p: 0.9 * mean + 0.1 * p, average, params)

    x, state = jnp.ones((2, 4)), fresh(0)
    _, average = train_step(state, nnx.state(state["model"], nnx.Param), x)
    mm.checkpoint.save(tmp_path / "state", {"state": nnx.state(state), "average": average})
    expected = train_step(state, average, x)

    state = fresh(1)
    lowered = train_step.lower(state, nnx.state(state["model"], nnx.Param), x)
    like = {"state": mm.checkpoint.argument_of(lowered, 0), "average": mm.checkpoint.argument_of(lowered, 1)}
    assert jax.tree.structure(like["average"]) == jax.tree.structure(average)
    restored = mm.checkpoint.restore(tmp_path / "state", like)
    for name, node in state.items():
        nnx.update(node, restored["state"][name])
    assert state["model"].kernel.get_value().sharding.device_set == {jax.devices()[2]}
    jax.tree.map(np.testing.assert_array_equal, train_step(state, restored["average"], x), expected)


# --- what is read -------------------------------------------------------------------------------------------


def bytes_read():
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def test_only_what_is_needed_is_read(tmp_path, monkeypatch) -> None:
    """Some leaves, one layer of a stack, the part of one process: their bytes and little more."""
    monkeypatch.setattr(_store, "CHUNK_BYTES", 1 << 15)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    size = 1 << 20
    state = {
        "params": jax.device_put(jnp.ones((512, 512)), NamedSharding(mesh, P("x"))),
        "opt": jax.device_put(jnp.ones((512, 512)), NamedSharding(mesh, P())),
        "layers": jax.device_put(jnp.ones((4, 256, 256)), NamedSharding(mesh, P(None, "x"))),
    }
    mm.checkpoint.save(tmp_path / "state", state)

    def cost(like, **options):
        before = bytes_read()
        mm.checkpoint.restore(tmp_path / "state", like, **options)
        return (bytes_read() - before) / size

    def described(*shape, sharding=None):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    whole = {name: described(*x.shape) for name, x in state.items()}
    assert 3 <= cost(whole) < 3.1
    assert 1 <= cost({"params": described(512, 512)}) < 1.05
    spread = NamedSharding(mesh, P(None, "x"))
    assert 1 <= cost({"opt": described(512, 512, sharding=NamedSharding(mesh, P()))}) < 1.05  # once, not once a device
    assert 1 <= cost({"opt": described(512, 512, sharding=spread)}) < 1.05  # chunks that devices share as well
    assert 0.25 <= cost({"layer_2": described(256, 256)}, stacked=STACKED) < 0.3
