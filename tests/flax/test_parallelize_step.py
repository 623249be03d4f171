"""`parallelize_step`: a whole training step, and a state that was never whole on one device."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import manymesh as mm
from linen_models import plain
from manymesh import errors, meta
from manymesh._flax import _step
from manymesh._runtime._observe import Observer
from manymesh.flax import TrainStep, parallelize_step, shard_axes, task
from stages import assert_same, reference

pytestmark = pytest.mark.once

INTO, HIDDEN = 12, 40  # shapes that occur nowhere else
RULES = (("hidden", "model"), ("embed", None), ("batch", None))
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def mesh():
    """Two stages of two devices, beside four devices that are nobody's."""
    return Mesh(np.array(jax.devices()[4:8]).reshape(2, 2), ("stage", "model"))


FIRST, SECOND = mm.submeshes(mesh(), "stage")


class Half(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(HIDDEN, kernel_init=shard_axes("embed", "hidden"), bias_init=shard_axes("hidden"))(x)
        h = nn.Dropout(self.dropout, deterministic=not self.dropout)(nn.gelu(h))
        return x + nn.Dense(INTO, kernel_init=shard_axes("hidden", "embed"))(h)


class Halves(nn.Module):
    """The loss of two halves on two submeshes: ``(x: float[batch, INTO], y: the same) -> scalar``."""

    tasks: bool = True
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, y):
        wrap = task if self.tasks else plain
        x = wrap(Half, "front", mesh=FIRST, logical_axes=RULES)(self.dropout)(x)
        x = wrap(Half, "back", mesh=SECOND, logical_axes=RULES)(self.dropout)(x)
        return jnp.mean((x - y) ** 2)


class MeanSquare(nn.Module):
    """A model without tasks, whose names are axes of the mesh."""

    @nn.compact
    def __call__(self, x):
        return jnp.mean(nn.Dense(8, kernel_init=shard_axes(None, "model"))(x) ** 2)


def batch(size=8, seed=0):
    x = np.random.default_rng(seed).normal(size=(size, INTO)).astype(np.float32)
    return x, np.sin(x)


def on_host(tree):
    """A copy that donation cannot take away."""
    return jax.tree.map(jnp.array, jax.device_get(tree))


@pytest.fixture(scope="module")
def made():
    """The step, its first state on the host, what prepares a batch, and the program that made the state."""
    inits = []

    def spy(fun, **kwargs):
        jitted = mm.jit(fun, **kwargs)
        if "out_shardings" in kwargs:
            inits.append(jitted)
        return jitted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_step, "jit", spy)
        step, state, found, prepare = parallelize_step(
            Halves(), OPTIMIZER, mesh(), local_batch=batch(), num_microbatches=4
        )
    assert found == mesh()
    (init,) = inits
    return step, state, prepare, init


@pytest.fixture
def fresh(made):
    """The step, and a state of its own for each test: a step eats its state."""
    step, state, prepare, _ = made
    return step, jax.tree.map(lambda x, s: jax.device_put(x, s), on_host(state), step.state_shardings), prepare


# --- what comes back ------------------------------------------------------------------------------------------


def test_a_global_batch_gives_three_things_and_a_local_one_four(made):
    """The step, a Flax train state, the mesh as given, and what prepares a batch."""
    step, state, prepare, _ = made
    assert isinstance(step, TrainStep) and isinstance(state, TrainState) and callable(prepare)
    given = mesh()
    step, state, found = parallelize_step(
        MeanSquare(), optax.sgd(0.1), given, jax.ShapeDtypeStruct((4, 3), jnp.float32)
    )
    assert isinstance(step, TrainStep) and isinstance(state, TrainState) and found is given
    loss, state = step(state, jnp.ones((4, 3)))
    assert loss.shape == () and int(state.step) == 1


def test_the_state_is_sharded_and_lies_where_its_task_runs(made):
    """No device holds the whole of a leaf that names sharded axes: parameters and both moments of Adam."""
    step, state, _, _ = made
    adam = next(part for part in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(part))
    for tree in (state.params, adam.mu, adam.nu):
        for half, submesh in (("Half_0", FIRST), ("Half_1", SECOND)):
            for layer in ("Dense_0", "Dense_1"):
                box = tree[half][layer]["kernel"]
                assert isinstance(box, meta.Partitioned)
                shards = box.value.addressable_shards
                assert {s.device for s in shards} == set(submesh.devices.flat)
                cut = box.names.index("hidden")
                assert {s.data.shape[cut] for s in shards} == {HIDDEN // 2}
                assert sum(s.data.size for s in shards) == box.value.size
    whole = [
        x for x in jax.tree.leaves(state) if x.ndim == 2 and any(s.data.shape == x.shape for s in x.addressable_shards)
    ]
    assert not whole


def is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)


def test_the_state_is_never_whole_on_one_device_while_it_is_created(made):
    """No instruction of any program that creates it has the shape of a whole kernel."""
    _, _, _, init = made
    (compiled,) = init._compiled.values()
    text = compiled.as_text()
    assert f"f32[{INTO},{HIDDEN // 2}]" in text and f"f32[{HIDDEN // 2},{INTO}]" in text
    assert f"[{INTO},{HIDDEN}]" not in text and f"[{HIDDEN},{INTO}]" not in text


def test_the_state_does_not_depend_on_where_it_is_created(made):
    """The same seed gives the same numbers to a model in one task, all of whose parameters lie elsewhere."""
    _, state, _, _ = made
    whole = task(Halves(tasks=False), mesh=mesh(), logical_axes=RULES)
    _, other, _ = parallelize_step(whole, optax.sgd(0.1), mesh(), batch())
    assert_same(on_host(state.params), on_host(other.params), tolerance=1e-6)


def test_the_seed_may_be_a_key():
    """Other seeds give other parameters."""

    def kernel(rng):
        return parallelize_step(MeanSquare(), optax.sgd(0.1), mesh(), jnp.ones((4, 3)), rng=rng)[1].params["Dense_0"][
            "kernel"
        ]

    by_number, by_key, other = (on_host(kernel(rng)) for rng in (1, jax.random.key(1), 2))
    assert_same(by_number, by_key, tolerance=0)
    assert (np.asarray(other.value) != np.asarray(by_key.value)).all()
    plain = MeanSquare().init(jax.random.split(jax.random.key(1))[0], jnp.ones((4, 3)))  # as the documentation says
    assert_same(by_key, plain["params"]["Dense_0"]["kernel"], tolerance=1e-6)


# --- training -------------------------------------------------------------------------------------------------


def test_it_trains_as_a_plain_loop_does(fresh):
    """Flax, Optax and ``jax.jit`` on one device, for three steps."""
    step, state, prepare = fresh
    expected = on_host(state)
    model = Halves(tasks=False)

    @jax.jit
    def plain_step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: model.apply({"params": p}, *batch))(state.params)
        return loss, state.apply_gradients(grads=grads)

    for i in range(3):
        loss, state = step(state, prepare(batch(seed=i)))
        expected_loss, expected = plain_step(expected, batch(seed=i))
        assert_same(loss, expected_loss)
    assert_same(state, expected, tolerance=1e-4)
    assert int(state.step) == 3


def test_it_is_the_same_in_reference_mode(fresh):
    """Inside ``mm.ignore_transforms`` the step is plain JAX on one device."""
    step, state, prepare = fresh
    expected_loss, expected = reference(step, state, batch())
    assert expected_loss.sharding.device_set == {jax.devices()[0]}
    loss, state = step(state, prepare(batch()))
    assert_same(on_host((loss, state)), on_host((expected_loss, expected)), tolerance=1e-4)


class Arrivals(Observer):
    """Writes down the shapes of the arguments that had to be moved."""

    def __init__(self):
        self.shapes = []

    def moves_argument(self, position, value, sharding):
        self.shapes.append(value.shape)


def test_step_two_moves_nothing(fresh):
    """State and prepared batch lie where the step wants them: arrays are used as they are."""
    step, state, prepare = fresh
    assert step.state_shardings == step.compiled.output_shardings[1]
    _, state = step(state, prepare(batch()))
    arrivals, given = Arrivals(), prepare(batch())
    with jax.transfer_guard_device_to_host("disallow"):
        jax.block_until_ready(step.compiled.call_flat(jax.tree.leaves((state, given)), arrivals))
    # Both submeshes read the optimizer's step counter, which has one home. Nothing else is brought anywhere.
    assert all(shape == () for shape in arrivals.shapes), arrivals.shapes


def test_the_state_is_donated(fresh):
    """The old one is gone, and using it again says so."""
    step, state, prepare = fresh
    step(state, prepare(batch()))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    with pytest.raises(RuntimeError, match="(?s)Array has been deleted.*donated to an earlier call"):
        step(state, prepare(batch()))


def test_results_unpacked_the_wrong_way_round_are_caught_with_words(fresh):
    """The loss arrives where the state belongs."""
    step, state, prepare = fresh
    prepared = prepare(batch())
    state, _ = step(state, prepared)
    with pytest.raises(errors.ArgumentError, match=r"found float32\[\]; .* write loss, state = step\(state, batch\)"):
        step(state, prepared)


def test_a_batch_of_another_shape_compiles_once_more(fresh):
    """And trains as well."""
    step, state, prepare = fresh
    model, params = Halves(tasks=False), on_host(state.params)
    loss, state = step(state, batch(16))
    assert_same(loss, jnp.asarray(model.apply({"params": params}, *batch(16))))
    loss, state = step(state, batch(16))
    assert len(step._jitted._compiled) == 1
    loss, state = step(state, prepare(batch()))
    loss, state = step(state, prepare(batch(16)))
    assert int(state.step) == 4


def test_a_prepared_batch_is_what_it_was(fresh):
    """Placed as the step wants it, values unchanged."""
    step, _, prepare = fresh
    prepared = prepare(batch())
    jax.tree.map(np.testing.assert_array_equal, prepared, batch())
    jax.tree.map(lambda x, s: np.testing.assert_(x.sharding == s), prepared, step.batch_shardings)


def test_a_batch_that_cannot_be_prepared(fresh):
    """The shapes that were expected, and those that were found."""
    _, _, prepare = fresh
    with pytest.raises(errors.ArgumentError, match=r"(?s)prepare_batch.*float32\[8,12\].*found.*float32\[8,11\]"):
        prepare(jax.tree.map(lambda x: x[:, 1:], batch()))
    with pytest.raises(errors.ArgumentError, match=r"(?s)prepare_batch.*found {x: float32"):
        prepare({"x": batch()[0]})


# --- random streams -------------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """A loss that is the share of ones that a task drops."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (1,))
        out = task(nn.Dropout, "drop", devices=[1])(0.5, deterministic=False)(x)
        return jnp.mean(out == 0) + 0 * scale[0]


def test_random_streams_differ_in_every_step_and_microbatch():
    """The same ones in each: the shares that are dropped would be equal if the keys were."""
    two_devices = Mesh(np.array(jax.devices()[:2]), ("stage",))
    ones = jnp.ones((8, 64))

    def losses(count, reduce):
        step, state, _ = parallelize_step(
            Dropped(), optax.sgd(0.0), two_devices, ones, num_microbatches=4, rngs=("dropout",), reduce=reduce
        )
        for _ in range(count):
            loss, state = step(state, ones)
            yield float(loss)

    total, again = losses(2, ("sum", "sum"))
    largest, _ = losses(2, ("max", "sum"))
    assert 1 < total < 3 and total != again
    assert largest != total / 4


# --- other losses, other batches ------------------------------------------------------------------------------


class Predicts(nn.Module):
    @nn.compact
    def __call__(self, x):
        return task(nn.Dense, "dense", devices=[4])(2)(x)


def test_a_loss_function_and_batches_of_any_structure():
    """``loss_fn`` calls the model itself; ``inputs`` says what the model is initialised with."""
    model, rows = Predicts(), {"x": jnp.ones((4, 3)), "label": jnp.zeros((4, 2))}

    def loss_fn(params, batch):
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["label"]) ** 2)

    step, state, _ = parallelize_step(
        model, optax.sgd(0.1), mesh(), rows, loss_fn=loss_fn, inputs=lambda batch: (batch["x"],), num_microbatches=2
    )
    expected = loss_fn(on_host(state.params), rows)
    first, state = step(state, rows)
    second, state = step(state, rows)
    assert_same(first, expected)
    assert second < first


class ByName(nn.Module):
    @nn.compact
    def __call__(self, image, *, label, train: bool):
        h = nn.Dropout(0.5, deterministic=not train)(task(nn.Dense, "in", devices=[4])(8)(image))
        return jnp.mean((task(nn.Dense, "out", devices=[5])(1)(h) - label) ** 2)


def test_a_model_with_keyword_only_arguments():
    """``inputs`` gives arguments by name, values of Python among them, and may compute on the batch."""
    rows = {"image": 255 * jnp.ones((4, 3)), "label": jnp.zeros((4, 1))}

    def given(train):
        return lambda batch: {"image": batch["image"] / 255, "label": batch["label"], "train": train}

    losses = {}
    for train in (False, True):
        step, state, _ = parallelize_step(
            ByName(), optax.sgd(0.1), mesh(), rows, inputs=given(train), num_microbatches=2, rngs=("dropout",)
        )
        whole = ByName().apply({"params": on_host(state.params)}, **given(False)(rows))
        losses[train], _ = step(state, rows)
    assert_same(losses[False], whole)
    assert losses[True] != losses[False]


def test_arguments_that_the_model_does_not_take():
    """Python says which; what gives them is named."""
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments") as caught:
        parallelize_step(ByName(), optax.sgd(0.1), mesh(), jnp.ones((4, 3)))
    assert 'write inputs=lambda batch: {"x": batch, "train": True}' in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="found an array; of one argument") as caught:
        parallelize_step(ByName(), optax.sgd(0.1), mesh(), jnp.ones((4, 3)), inputs=lambda batch: batch)
    assert not any("inputs=lambda" in note for note in caught.value.__notes__)


def test_a_model_without_tasks_is_one_task_on_the_mesh():
    """Names of axes are device axes of the mesh then."""
    x = jnp.ones((4, 3))
    step, state, _ = parallelize_step(MeanSquare(), optax.sgd(0.1), mesh(), x, num_microbatches=2)
    kernel = state.params["Dense_0"]["kernel"].value
    assert kernel.sharding.device_set == set(mesh().devices.flat)
    assert {s.data.shape for s in kernel.addressable_shards} == {(3, 4)}
    expected = MeanSquare().apply({"params": on_host(state.params)}, x)
    assert_same(step(state, x)[0], expected)


# --- errors ---------------------------------------------------------------------------------------------------


def raises(kind, *parts):
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, parts)))


def test_one_batch_is_needed_and_not_two():
    """Neither or both is a mistake."""
    with raises(errors.ArgumentError, "either global_batch or local_batch, found neither"):
        parallelize_step(Halves(), OPTIMIZER, mesh())
    with raises(errors.ArgumentError, "either global_batch or local_batch, found both"):
        parallelize_step(Halves(), OPTIMIZER, mesh(), batch(), batch())


def test_a_model_that_does_not_return_its_loss():
    """What it returned instead, and the remedy."""
    with raises(errors.ArgumentError, "expected a scalar loss, found float32[4,2]", "loss_fn=lambda params, batch"):
        parallelize_step(Predicts(), OPTIMIZER, mesh(), jnp.ones((4, 3)))


def test_a_model_with_other_variables_than_parameters():
    """They are named."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.mean(nn.BatchNorm(use_running_average=False)(x))

    with raises(errors.ArgumentError, "trains parameters alone", "batch_stats", "manymesh.jit"):
        parallelize_step(Model(), OPTIMIZER, mesh(), jnp.ones((4, 3)))


def test_a_task_outside_the_mesh():
    """Which devices, and which the mesh has."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.mean(task(nn.Dense, "far", devices=[1])(2)(x))

    with raises(errors.MeshError, "tasks use devices [1]", "not in the mesh", "[4, 5, 6, 7]"):
        parallelize_step(Model(), OPTIMIZER, mesh(), jnp.ones((4, 3)))


def test_microbatches_that_do_not_divide_the_batch():
    """The leaf, its shape, and what would work."""
    with raises(ValueError, "(8, 12)", "3"):
        parallelize_step(Halves(), OPTIMIZER, mesh(), batch(), num_microbatches=3)


def test_an_unknown_schedule_or_reduction():
    """The known ones are listed."""
    with raises(ValueError, "'1f2b'", "gpipe"):
        parallelize_step(Halves(), OPTIMIZER, mesh(), batch(), num_microbatches=2, schedule="1f2b")
    with raises(ValueError, "'average'", "mean"):
        parallelize_step(Halves(), OPTIMIZER, mesh(), batch(), num_microbatches=2, reduce="average")


def test_a_name_that_no_rule_knows_is_an_error_if_strict():
    """The same findings as those of ``mm.jit``."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.mean(nn.Dense(8, kernel_init=shard_axes(None, "modle"))(x) ** 2)

    with raises(ValueError, "'modle'"):
        parallelize_step(Model(), OPTIMIZER, mesh(), jnp.ones((4, 3)), strict=True)


def test_random_keys_in_the_state_and_in_the_batch():
    """An optimizer that adds noise keeps a typed key; so may a batch that brings its own noise."""
    model, (x, y) = Halves(), batch()
    given = {"x": x, "y": y, "noise": jax.random.key(4)}

    def loss(params, given):
        noise = jax.random.normal(given["noise"], given["x"].shape)
        return model.apply({"params": params}, given["x"] + noise, given["y"])

    optimizer = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(1)), optax.sgd(0.1))
    step, state, _, prepare = parallelize_step(
        model, optimizer, mesh(), local_batch=given, loss_fn=loss, inputs=lambda given: (given["x"], given["y"])
    )
    with mm.ignore_transforms():
        expected, _ = step(jax.tree.map(jnp.array, state), given)
    found, state = step(state, prepare(given))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert "0 programs" in repr(step._jitted) and int(state.opt_state[0].count) == 1
