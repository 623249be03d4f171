"""Training steps of stacked layers: everything about a layer stays on the submesh that runs it."""

from __future__ import annotations

import warnings
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh import _compat
from manymesh._runtime._observe import Observer
from manymesh.flax import shard_axes, task
from stages import assert_same, microbatched, reference

WIDTH, ROWS = 8, 4
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def stages(count, size=1, axes=("stage", "m")):
    """A mesh of ``count`` submeshes of ``size`` devices, and the submeshes."""
    devices = np.array(jax.devices()[: count * size]).reshape(count, size)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * 2)
    return mesh, mm.submeshes(mesh, axes[0])


def dense(p, h):
    return jnp.tanh(h @ p["w"] + p["b"])


def parameters(layers, seed=0):
    w = np.random.default_rng(seed).normal(size=(layers, WIDTH, WIDTH)) / np.sqrt(WIDTH)
    return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros((layers, WIDTH))}


def batch(rows=ROWS):
    return jnp.asarray(np.random.default_rng(9).normal(size=(rows, WIDTH)), jnp.float32)


def loss_of(submeshes):
    layer = mm.task(dense, "layer", mesh=submeshes)

    def loss(p, x):
        return jnp.mean(jax.lax.scan(lambda h, q: (layer(q, h), None), x, p)[0] ** 2)

    return loss


def step_of(loss, optimizer, **loop):
    grad = jax.value_and_grad(loss)
    grad = microbatched(grad, **loop) if loop else grad

    def step(params, state, x):
        value, grads = grad(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def bytes_by_device(tree):
    found = Counter()
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            found[shard.device.id] += shard.data.nbytes
    return found


def argument_bytes(lowered):
    """Bytes of the arguments on each device, from the layout alone."""
    found = Counter()
    for v in lowered.program.invars:
        for s in lowered.program.input_submeshes[v]:
            sharding = lowered.layout.sharding(v, s)
            for d in sharding.device_set:
                found[d.id] += int(np.prod(sharding.shard_shape(v.aval.shape))) * v.aval.dtype.itemsize
    return found


class Moves(Observer):
    """Counts arguments that are not where the step wants them."""

    def __init__(self):
        self.moved = []

    def moves_argument(self, position, value, sharding):
        self.moved.append(np.shape(value))


def test_eight_layers_of_a_scan_on_four_submeshes():
    """As much on each device as the unrolled model has; no weight crosses; the second step moves nothing."""
    submeshes = stages(4)[1]

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = task(nn.Dense, "layer", mesh=submeshes)
            layers = nn.scan(lambda m, h, _: (nn.tanh(m(h)), None), variable_axes={"params": 0}, length=8,
                             split_rngs={"params": True})  # fmt: skip
            return layers(layer(WIDTH, name="layers"), x, None)[0]

    model, x = Stack(), batch()
    params = model.init(jax.random.key(0), x)["params"]
    state = CLIPPED.init(params)
    step = step_of(lambda p, x: jnp.mean(model.apply({"params": p}, x) ** 2), CLIPPED, num_microbatches=2)
    jitted = mm.jit(step, donate_argnums=(0, 1))
    lowered = jitted.lower(params, state, x)

    layers = [mm.task(dense, f"layer{i}", mesh=submeshes[i // 2]) for i in range(8)]

    def unrolled(p, x):
        for layer, q in zip(layers, p, strict=True):
            x = layer(q, x)
        return jnp.mean(x**2)

    listed = [{"w": jnp.zeros((WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)}] * 8
    other = mm.jit(step_of(unrolled, CLIPPED, num_microbatches=2)).lower(listed, CLIPPED.init(listed), x)
    assert argument_bytes(lowered) == argument_bytes(other)

    activation = 4 * WIDTH * ROWS // 2
    assert max(e.nbytes for e in lowered.program.edges) == activation  # one of one microbatch
    compiled = lowered.compile()
    # Forward and back over each border in each microbatch; the rest are numbers of the norm.
    assert sum(e.nbytes for e in compiled.report().edges) < 2 * 3 * 2 * activation + 200

    expected, held = (params, state), None
    given = jax.tree.map(jnp.copy, (params, state))
    for n in range(3):
        moves = Moves()
        before = jax.tree.leaves(given)
        *given, value = compiled.call_flat(jax.tree.leaves((*given, x)), moves)
        *expected, wanted = reference(jitted, *expected, x)
        assert_same((given, value), (list(expected), wanted), 1e-4)
        assert all(a.is_deleted() for a in before)
        layers_moved = [shape for shape in moves.moved if shape[:1] == (8,)]
        assert bool(layers_moved) == (n == 0)  # after that only the step's number and the batch
        shardings = [a.sharding for a in jax.tree.leaves(given)]
        assert held is None or shardings == held
        held = shardings
    assert len(set(bytes_by_device([a for a in jax.tree.leaves(given) if a.ndim]).values())) == 1
    assert jax.tree.leaves(compiled.output_shardings)[:-1] == held == jax.tree.leaves(compiled.input_shardings)[:-1]


@pytest.fixture(scope="module")
def trained():
    """A step of four layers on two submeshes, compiled, for arguments in no particular place."""
    step = step_of(loss_of(stages(2)[1]), optax.sgd(0.1, momentum=0.9))
    jitted = mm.jit(step)
    params = parameters(4)
    state = optax.sgd(0.1, momentum=0.9).init(params)
    return jitted, (params, state, batch())


MIXES = {
    "roll": lambda x: jnp.roll(x, 1, 0),
    "flip": lambda x: x[::-1],
    "one layer": lambda x: x.at[jnp.argmax(x[:, 0, 0])].multiply(0.5),
    "layer by layer": lambda x: jax.lax.map(lambda w: w / (1 + jnp.sum(w**2)), x),
}


@pytest.mark.parametrize("name", MIXES)
def test_a_state_whose_next_value_is_computed_whole_stays_in_blocks(name):
    """The update reads all layers together; what it makes goes back to where they are."""
    mesh, submeshes = stages(2)
    loss = loss_of(submeshes)

    def update(p, x):
        value, grads = jax.value_and_grad(loss)(p, x)
        return {"w": MIXES[name](p["w"] - 0.1 * grads["w"]), "b": p["b"] - 0.1 * grads["b"]}, value

    step = mm.jit(update)
    p, value = step(parameters(4), batch())
    assert_same((p, value), reference(step, parameters(4), batch()))
    assert p["w"].sharding == NamedSharding(mesh, P("stage"))
    assert step.lower(p, batch()).compile().input_shardings[0][0]["w"] == p["w"].sharding


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_state_of_each_layer_goes_from_one_microbatch_to_the_next(schedule):
    """It is read and written where its layer is, so that the schedule applies."""
    submeshes = stages(2)[1]

    def layer(p, mean, h):
        return dense(p, h) - mean, 0.9 * mean + 0.1 * h.mean(0)

    layer = mm.task(layer, "layer", mesh=submeshes)

    def grad(p, means, x):
        def loss(p):
            h, new = jax.lax.scan(lambda h, q: layer(*q, h), x, (p, means))
            return jnp.mean(h**2), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return (value, grads), new

    step = mm.jit(mm.microbatch(grad, argnum=2, state_argnum=1, num_microbatches=4, reduce="mean", schedule=schedule))
    arguments = parameters(4), jnp.zeros((4, WIDTH)), batch(8)
    assert f"4 microbatches, {schedule}, stages on submeshes (0, 1)" in str(step.lower(*arguments).program)
    assert_same(step(*arguments), reference(step, *arguments))


def test_arguments_in_every_form(trained):
    """On the host, on one device, on a submesh, replicated over all, cut otherwise: they are moved; results are alike."""
    jitted, args = trained
    mesh, submeshes = stages(2)
    compiled = jitted.prepare(*args)
    expected = reference(jitted, *args)
    forms = [
        jax.tree.map(np.asarray, args[:2]),
        jax.device_put(args[:2], jax.devices()[3]),
        jax.device_put(args[:2], NamedSharding(submeshes[1], P())),
        jax.device_put(args[:2], NamedSharding(mesh, P())),
        jax.device_put(args[:2], NamedSharding(mesh, P(None, "stage"))),
    ]
    for form in forms:
        found = compiled(*form, args[2])
        assert_same(found, expected)
        assert found[0]["w"].sharding == compiled.input_shardings[0][0]["w"]
        assert not any(x.is_deleted() for x in jax.tree.leaves(form) if isinstance(x, jax.Array))


def test_state_of_an_spmd_pipeline_fits(trained):
    """As it is, without a copy; its mesh keeps its names, in whatever order its axes are."""
    jitted, args = trained
    devices = np.array(jax.devices()[:2])
    mesh = Mesh(devices.reshape(1, 2), ("data", "pipe"), axis_types=(AxisType.Auto,) * 2)
    given = jax.device_put(args[:2], NamedSharding(mesh, P("pipe")))
    compiled = jitted.lower(*given, args[2]).compile()
    assert compiled.input_shardings[0][0]["w"] == NamedSharding(mesh, P("pipe"))
    moves = Moves()
    found = compiled.call_flat([*jax.tree.leaves(given), jax.device_put(args[2], jax.devices()[0])], moves)
    assert moves.moved == [(ROWS, WIDTH)] or not moves.moved  # the batch comes on no mesh
    assert_same(found, reference(jitted, *args))
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(found[:2]))
    # The same executables take the same arrays on a mesh whose axes are in another order, and still move nothing.
    turned = Mesh(devices.reshape(2, 1), ("pipe", "data"), axis_types=(AxisType.Auto,) * 2)
    moves = Moves()
    compiled.call_flat([*jax.tree.leaves(jax.device_put(args[:2], NamedSharding(turned, P("pipe")))), args[2]], moves)
    assert (4, WIDTH, WIDTH) not in moves.moved


def test_blocks_are_the_shards(trained):
    """What is cut from an argument, and what is put together of results, is the same memory."""
    jitted, args = trained
    compiled = jitted.prepare(*args)
    results = compiled(*args)
    pointers = [s.data.unsafe_buffer_pointer() for s in results[0]["w"].addressable_shards]
    blocks = compiled._stacks.cut(jax.tree.leaves((*results[:2], args[2])))
    assert len(blocks) == 2 * 4 + 1
    assert [p.unsafe_buffer_pointer() for b in blocks[2:4] for p in _compat.pieces(b)] == pointers
    assert [b.sharding.device_set for b in blocks[2:4]] == [{d} for d in jax.devices()[:2]]
    (again,) = compiled._stacks.join(blocks[2:4])[:1]
    assert np.array_equal(np.asarray(blocks[2]), np.asarray(results[0]["w"])[:2]) and again is not None


def test_names_of_blocks(trained):
    """The layout calls them by the argument's path."""
    jitted, args = trained
    lowered = jitted.lower(*args)
    for k in (0, 1):
        assert f"    args[0]['w'] block {k} " in str(lowered.layout)
    assert {name for name in lowered.layout.names.values() if "[0]['w']" in name} == {
        f"{what}[0]['w'] block {k}" for what in ("args", "result") for k in (0, 1)
    }
    assert jitted.eval_shape(*args)[0]["w"].shape == (4, WIDTH, WIDTH)


def test_orbax_saves_and_restores_it_as_it_is(trained, tmp_path):
    jitted, args = trained
    params, state, _ = jitted(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, at import and in use
        import orbax.checkpoint as ocp

        described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (params, state))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", (params, state))
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "state", described)
    jax.tree.map(np.testing.assert_array_equal, restored, (params, state))
    moves = Moves()
    compiled = jitted.prepare(*args)
    found = compiled.call_flat(
        [*jax.tree.leaves(restored), jax.device_put(args[2], stages(2)[1][0].devices.flat[0])], moves
    )
    assert (4, WIDTH, WIDTH) not in moves.moved
    assert_same(found, reference(jitted, params, state, args[2]))


def everything_but_biases(params):
    return jax.tree.map(lambda x: x.ndim > 2, params)


OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw with mask": optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(1e-2, mask=everything_but_biases, mu_dtype=jnp.bfloat16)
    ),
    "lion": optax.lion(1e-2, weight_decay=0.1),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "ema": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "lamb": optax.lamb(1e-2),
    "adaptive clipping": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "several steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 2),
    "muon": optax.contrib.muon(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    """Every state with a layer in each row is in blocks, and no more than an activation or a row's numbers crosses."""
    optimizer, params = OPTIMIZERS[name], parameters(4)
    state = optimizer.init(params)
    jitted = mm.jit(step_of(loss_of(stages(2)[1]), optimizer))
    program = jitted.lower(params, state, batch()).program  # findings would be errors
    stacked = [x for x in jax.tree.leaves((params, state)) if x.ndim and x.shape[0] == 4]
    assert len(program.stacked_inputs) == len(program.stacked_outputs) == len(stacked)
    if name != "adaptive clipping":  # its norms are sums over the first dimension, the layers
        assert max(e.nbytes for e in program.edges) <= 4 * ROWS * WIDTH
    if name in ("adafactor", "several steps"):  # the others' equations are those of `test_ties`
        given = expected = (params, state)
        for _ in range(2):
            *given, _ = jitted(*given, batch())
            *expected, _ = reference(jitted, *expected, batch())
        assert_same(given, expected, 1e-4)


RULES = (("batch", "data"), ("hidden", "model"), ("embed", None))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = mm.with_sharding_constraint(x, ("batch", "embed"))
        h = nn.Dense(2 * WIDTH, kernel_init=shard_axes("embed", "hidden"))(x)
        return x + nn.Dense(WIDTH, kernel_init=shard_axes("hidden", "embed"))(nn.gelu(h)), None


def test_boxes_on_sharded_submeshes():
    """`nn.scan` names the new axis; inside a submesh the weights are sharded as their boxes say."""
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    mesh = Mesh(devices, ("stage", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    block = task(Block, "block", mesh=mm.submeshes(mesh, "stage"), logical_axes=RULES)
    layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4,
                     metadata_params={nn.PARTITION_NAME: "layers"})  # fmt: skip

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return layers(name="layers")(x, None)[0]

    model, x = Model(), batch(8)
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), x)["params"], tx=CLIPPED)

    def step(state, x):
        grad = microbatched(jax.value_and_grad(lambda p, x: jnp.mean(model.apply({"params": p}, x) ** 2)),
                            num_microbatches=2)  # fmt: skip
        value, grads = grad(state.params, x)
        return state.apply_gradients(grads=grads), value

    jitted = mm.jit(step, donate_argnums=0)
    expected = reference(jitted, state, x)
    found = jitted(state, x)
    assert_same(found, expected, 1e-4)
    params = found[0].params["layers"]
    first, second = params["Dense_0"]["kernel"], params["Dense_1"]["kernel"]
    assert first.names == ("layers", "embed", "hidden")
    assert first.value.sharding.spec == P("stage", None, "model") and second.value.sharding.spec == P("stage", "model")
    for moment in (found[0].opt_state[1][0].mu, found[0].opt_state[1][0].nu):
        assert jax.tree.map(lambda a: a.sharding, moment) == jax.tree.map(lambda a: a.sharding, found[0].params)
    assert first.value.sharding.mesh.devices.shape == (2, 2, 2)
    assert len(jitted._compiled) == 1
    jitted(*found[:1], x)  # its own result is what it wants
    assert len(jitted._compiled) == 1


def frozen_by_slicing(loss, ws, x):
    low, top = ws[:2], ws[2:]
    grads = jax.grad(lambda top: loss(jnp.concatenate([jax.lax.stop_gradient(low), top]), x))(top)
    return jnp.concatenate([low, top - 0.1 * grads])


def frozen_in_the_loss(loss, ws, x):
    grads = jax.grad(lambda ws: loss(jnp.concatenate([jax.lax.stop_gradient(ws[:2]), ws[2:]]), x))(ws)
    return ws - 0.1 * grads


def updated_layer_by_layer(loss, ws, x):
    grads = jax.grad(loss)(ws, x)
    return jnp.stack([w - 0.1 * g for w, g in zip(ws, grads, strict=True)])


def updated_in_halves(loss, ws, x):
    """One of them is scaled, and grows by the other way of writing it."""
    grads = jax.grad(loss)(ws, x)
    return jnp.concatenate([jnp.maximum(ws[:2] - grads[:2], -1.0), 0.9 * ws[2:] + ws[2:] * 0.1 - 0.2 * grads[2:]])


def test_a_state_that_tasks_make_layer_by_layer_stays_in_blocks():
    """What they make is put together on each submesh."""
    mesh, submeshes = stages(2)
    loss = loss_of(submeshes)
    sgd = [mm.task(lambda w, g: w - 0.1 * g, "sgd", mesh=submeshes[i // 2]) for i in range(4)]

    def update(p, x):
        grads = jax.grad(loss)(p, x)
        return {"w": jnp.stack([f(p["w"][i], grads["w"][i]) for i, f in enumerate(sgd)]), "b": p["b"]}

    step = mm.jit(update, strict=True)
    lowered = step.lower(parameters(4), batch())
    assert all(e.var.aval.shape[-2:] != (WIDTH, WIDTH) for e in lowered.program.edges)
    new = step(parameters(4), batch())
    assert_same(new, reference(step, parameters(4), batch()))
    assert new["w"].sharding == NamedSharding(mesh, P("stage"))


PARTS = {f.__name__: f for f in (frozen_by_slicing, frozen_in_the_loss, updated_layer_by_layer, updated_in_halves)}


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in a state"])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_state_that_are_updated_apart_stay_in_blocks(name, alone):
    """No weight crosses, and the next value lies where the state did."""
    mesh, submeshes = stages(2)
    loss = loss_of(submeshes)

    def update(ws, x):
        new = PARTS[name](lambda ws, x: loss({"w": ws, "b": jnp.zeros((4, WIDTH))}, x), ws if alone else ws["w"], x)
        return new if alone else ({"w": new}, jnp.sum(new[0]))

    step = mm.jit(update, strict=True)  # a finding is an error
    ws = parameters(4)["w"] if alone else {"w": parameters(4)["w"]}
    lowered = step.lower(ws, batch())
    assert all(e.var.aval.shape[-2:] != (WIDTH, WIDTH) for e in lowered.program.edges)
    new = step(ws, batch())
    assert_same(new, reference(step, ws, batch()))
    assert jax.tree.leaves(new)[0].sharding == NamedSharding(mesh, P("stage"))
    assert jax.tree.leaves(lowered.compile().input_shardings)[0] == NamedSharding(mesh, P("stage"))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("kept", [False, True])
def test_stacked_random_keys_are_in_blocks(kept, impl, recwarn):
    """A key for each layer, kept or split in every microbatch, as NNX does: a pipeline, in which no key crosses."""
    submeshes = [Mesh(np.array(jax.devices()[2 * k : 2 * k + 2]), ("data",)) for k in range(2)]

    def layer(x, ws):
        w, key = ws
        noise, after = (key, key) if kept else jax.random.split(key)
        return jnp.tanh(x @ w) * jax.random.uniform(noise, x.shape), after

    layer = mm.task(layer, "layer", mesh=submeshes)

    def f(w, keys, x):
        def loss(w):
            y, after = jax.lax.scan(layer, x, (w, keys))
            return jnp.mean(y**2), after

        grads, after = jax.grad(loss, has_aux=True)(w)
        return grads, after

    step = mm.jit(mm.microbatch(f, argnum=2, num_microbatches=4, state_argnum=1, reduce="mean"))
    w, x = jnp.linspace(-1, 1, 4 * 8 * 8).reshape(4, 8, 8), jnp.linspace(-1, 1, 64).reshape(8, 8)
    keys = expected = jax.random.split(jax.random.key(0, impl=impl), 4)
    program = step.lower(w, keys, x).program
    assert not recwarn.list
    assert {e.var.aval.dtype for e in program.edges} == {jnp.dtype("float32")}
    for _ in range(2):
        grads, keys = step(w, keys, x)
        with mm.ignore_transforms():
            reference, expected = step(w, expected, x)
        np.testing.assert_allclose(np.asarray(grads), np.asarray(reference), rtol=2e-5, atol=1e-6)
        np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(expected))
    assert (keys.dtype, len(keys.devices()), keys.is_fully_replicated) == (expected.dtype, 4, False)
    assert repr(step).endswith("1 program compiled")
