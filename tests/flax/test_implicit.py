"""Linen models whose modules become tasks by their names."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import manymesh as mm
from manymesh import _compat
from manymesh.flax import parallelize_step, shard_axes
from stages import assert_agrees, assert_same, reference

pytestmark = pytest.mark.once

WIDTH, ROWS = 16, 24


@pytest.fixture(autouse=True)
def no_tasks_left():
    """What one test registers does not place another's program."""
    yield
    mm.clear_tasks()


def mesh(*ids):
    return Mesh(np.array([jax.devices()[i] for i in ids]), ("model",))


def batch():
    return jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), jnp.float32)


def fragments(fun, *args):
    """(name, devices) of each fragment that holds a task."""
    program = mm.jit(fun).lower(*args).program
    return [(f.name, [d.id for d in program.submeshes[f.submesh].devices.flat]) for f in program.fragments if f.tasks]


class Block(nn.Module):
    """Made in setup, with axes named for the parameters."""

    boxes: str = "ours"

    def setup(self):
        init = {
            "ours": shard_axes("embed", "hidden"),
            "flax": nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "hidden")),
        }[self.boxes]
        self.inside = nn.Dense(32, kernel_init=init)
        self.outside = nn.Dense(WIDTH)

    def __call__(self, x):
        return x + self.outside(nn.gelu(self.inside(x)))


class Model(nn.Module):
    """Some layers with names of their own, some with automatic ones."""

    remat: bool = False
    boxes: str = "ours"

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.remat else Block
        x = nn.Dense(WIDTH, name="embed")(x)
        x = block(boxes=self.boxes, name="first")(x)
        x = block(boxes=self.boxes, name="second")(x)
        return nn.Dense(1, name="head")(x)


RULES = [("hidden", "model"), ("embed", None)]


def training(model):
    params = model.init(jax.random.key(0), batch())

    def loss(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    return loss, params


@pytest.mark.parametrize("remat", [False, True])
def test_a_linen_model_is_placed_with_no_edit(remat):
    """By the names of its modules, as a pipeline."""
    mm.register_task("embed|first", mesh=mesh(0, 1), logical_axes=RULES)
    mm.register_task("second|head", mesh=mesh(2, 3), logical_axes=RULES)
    loss, params = training(Model(remat))
    step = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean")
    found = dict(fragments(step, params, batch()))
    assert {k: v for k, v in found.items() if "bwd" not in k} == {
        "embed": [0, 1], "first": [0, 1], "second": [2, 3], "head": [2, 3]
    }  # fmt: skip
    assert {k.split("_bwd")[0]: v for k, v in found.items() if "bwd" in k} == {
        "embed": [0, 1], "first": [0, 1], "second": [2, 3], "head": [2, 3]
    }  # fmt: skip
    jitted = mm.jit(step)
    assert_same(jitted(params, batch()), reference(jitted, params, batch()))
    program = jitted.lower(params, batch()).program
    assert program.loops[0].in_order
    for name in ("embed", "first", "second", "head"):  # both passes are of one task, so of one stage
        assert len({m for f in program.fragments for m in re.findall(rf"name=({name}__mm_?\d+)", str(f.jaxpr))}) == 1


def test_parallelize_step_leaves_the_placement_to_registered_tasks():
    """A model without tasks would otherwise be one task on the whole mesh."""

    class Loss(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.mean(Model()(x) ** 2)

    mm.register_task("embed|first", mesh=mesh(0, 1), logical_axes=RULES)
    mm.register_task("second|head", mesh=mesh(2, 3), logical_axes=RULES)
    whole = jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])
    step, state, _ = parallelize_step(Loss(), optax.sgd(1e-2), whole, batch())
    loss, state = step(state, batch())
    placed = {k: {d.id for d in jax.tree.leaves(v)[0].devices()} for k, v in state.params["Model_0"].items()}
    assert placed == {"embed": {0, 1}, "first": {0, 1}, "second": {2, 3}, "head": {2, 3}}
    assert np.isfinite(loss)


@pytest.mark.parametrize("boxes", ["ours", "flax"])
def test_boxes_mean_what_the_task_says(boxes):
    """Ours where they are opened; Flax's, which say nothing then, by what the arguments carry."""
    mm.register_task("embed|first", mesh=mesh(0, 1), logical_axes=RULES)
    mm.register_task("second|head", mesh=mesh(2, 3), logical_axes=RULES)
    loss, params = training(Model(boxes=boxes))
    program = mm.jit(jax.grad(loss)).lower(params, batch()).program
    spec = re.compile(r"spec=P\w*\(None, 'model'\)")
    constrained = {f.name for f in program.fragments if spec.search(str(f.jaxpr))}
    assert {"first", "second", "first_bwd", "second_bwd"} <= constrained
    assert not any(n.startswith(("embed", "head")) for n in constrained)
    step = mm.jit(jax.value_and_grad(loss))
    actual = step(params, batch())
    assert_same(actual, reference(step, params, batch()))
    kernel = actual[1]["params"]["first"]["inside"]["kernel"]
    assert kernel.value.sharding.spec == jax.sharding.PartitionSpec(None, "model")


@pytest.mark.parametrize("boxes", ["ours", "flax"])
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_the_box_of_a_parameter_may_hold_what_has_other_dimensions(boxes, name):
    """Adafactor keeps a row and a column in it, Muon nothing in some: the two names are not for those."""
    mm.register_task("embed|first", mesh=mesh(0, 1), logical_axes=RULES)
    mm.register_task("second|head", mesh=mesh(2, 3), logical_axes=RULES)
    loss, params = training(Model(boxes=boxes))
    optimizer = {
        "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
        "muon": optax.contrib.muon(1e-2),
    }[name]

    def step(state, x):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, moments = optimizer.update(grads, moments, params)
        return value, (optax.apply_updates(params, updates), moments)

    assert_agrees(step, (params, optimizer.init(params)), batch())


class Stacked(nn.Module):
    """Layers stacked by nn.scan."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.tanh(nn.Dense(WIDTH)(x)), None

        scan = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=5)
        x, _ = scan(name="layers")(x, None)
        return nn.Dense(1, name="head")(x)


# What it costs that they do not divide is said once, as a warning.
@pytest.mark.filterwarnings("ignore:.*are not used in equal blocks by 3 submeshes:UserWarning")
class Constrained(nn.Module):
    """A layer whose activations are constrained in Flax's words, and the result where it is called."""

    names: tuple = ("batch", "hidden")

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.with_logical_constraint(nn.Dense(WIDTH, use_bias=False)(x), self.names))


class Constraining(nn.Module):
    names: tuple = ("batch", "hidden")

    @nn.compact
    def __call__(self, x):
        x = Constrained(self.names, name="front")(x)
        x = nn.with_logical_constraint(x, (None, "hidden"))  # in no task
        return nn.remat(Constrained)(self.names, name="back")(x)


def loss_of_constraining(variables, x, names=("batch", "hidden")):
    return jnp.mean(Constraining(names).apply(variables, x) ** 2)


def constraints(fun, *args):
    """The specs of all constraints of a step, in order."""
    found = []

    def look(jaxpr):
        for eqn in _compat.open_jaxpr(jaxpr).eqns:
            if eqn.primitive.name == "sharding_constraint":
                found.append(tuple(eqn.params["sharding"].spec))
            for inner in _compat.jaxprs_in(eqn):
                look(inner)

    for f in mm.jit(fun).lower(*args).program.fragments:
        look(f.jaxpr)
    return found


def grid(*ids):
    return Mesh(np.array([jax.devices()[i] for i in ids]).reshape(2, 2), ("data", "model"))


def test_constraints_of_flax_mean_what_the_tasks_say():
    """Those in a scope are read by its task, those between two by the tasks on the submesh; elsewhere nothing changes."""
    rules = [("batch", "data"), ("hidden", "model")]
    mm.register_task("front", mesh=grid(0, 1, 2, 3), logical_axes=rules)
    mm.register_task("back", mesh=grid(4, 5, 6, 7), logical_axes=rules)
    variables, x = Constraining().init(jax.random.key(0), batch()), batch()
    with mm.ignore_transforms():
        assert "sharding" not in str(jax.make_jaxpr(loss_of_constraining)(variables, x)).replace("out_sharding", "")
    assert constraints(loss_of_constraining, variables, x) == [("data", "model"), (None, "model"), ("data", "model")]
    step = jax.value_and_grad(loss_of_constraining)
    assert_same(mm.jit(step)(variables, x), reference(step, variables, x))
    assert "sharding" not in str(jax.make_jaxpr(loss_of_constraining)(variables, x)).replace("out_sharding", "")


def test_a_name_that_nobody_knows_is_found_in_constraints_of_flax():
    """A scope that a task is registered for, or a task around a model: an error under ``strict``."""
    rules = [("batch", "data"), ("hidden", "model")]
    variables, x = Constraining().init(jax.random.key(0), batch()), batch()
    names = ("batch", "hiden")
    words = r"task 'front': axis name 'hiden' .*is in no rule .*did you mean 'hidden'\?"

    def by_hand(variables, x):
        return mm.task(loss_of_constraining, "front", mesh=grid(0, 1, 2, 3), logical_axes=rules)(variables, x, names)

    with pytest.raises(mm.errors.AxisError, match=words):
        mm.jit(by_hand, strict=True).lower(variables, x)
    mm.register_task("front", mesh=grid(0, 1, 2, 3), logical_axes=rules)
    mm.register_task("back", mesh=grid(0, 1, 2, 3), logical_axes=[*rules, ("hiden", None)])
    with pytest.raises(mm.errors.AxisError, match=words):
        mm.jit(lambda v, x: loss_of_constraining(v, x, names), strict=True).lower(variables, x)


def test_stacked_linen_layers_over_submeshes():
    """Five layers over three submeshes, which does not divide."""
    loss, params = training(Stacked())
    step = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, reduce="mean")
    mm.register_task(r"layers\[(\d+)\]", callback=lambda match, _: mm.Task(devices=[int(match[1]) // 2]))
    mm.register_task("head", devices=[2])
    found = fragments(step, params, batch())
    assert [d for n, d in found if "bwd" not in n] == [[0], [0], [1], [1], [2], [2]]
    assert {n.split("_bwd")[0]: d for n, d in found if "bwd" in n} == {
        **{f"layers[{i}]": [i // 2] for i in range(5)}, "head": [2]
    }  # fmt: skip
    assert_agrees(step, params, batch())
