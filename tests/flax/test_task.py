"""What a Linen module may do inside a task: everything that it may do outside."""

from __future__ import annotations

import enum
import functools
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.errors import ScopeParamNotFoundError
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from linen_models import WIDTH, Block, Scaled, plain, rows
from manymesh import errors
from manymesh.flax import shard_axes, task
from stages import assert_agrees, assert_same, reference

FRONT, BACK = {"devices": [0]}, {"devices": [1]}
RULES = (("batch", "data"), ("hidden", "model"), ("embed", None))


def square(start=0):
    return Mesh(np.array(jax.devices()[start : start + 4]).reshape(2, 2), ("data", "model"))


def fragments(fun, *args):
    return {f.name for f in mm.jit(fun).lower(*args).program.fragments}


# --- random keys ----------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(x))


class NoisyPair(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = task(Noisy, "first", **FRONT)()(x, train)
        return task(Noisy, "second", **BACK)()(x, train=train)


def test_dropout_is_that_of_the_plain_model():
    """Keys enter a task as arguments, folded by module path as ever; a bool stays a bool."""
    model = NoisyPair()
    variables = model.init(jax.random.key(0), rows(), train=False)

    def apply(variables, x, key):
        return model.apply(variables, x, rngs={"dropout": key})

    step = mm.jit(apply)
    one, two = (step(variables, rows(), jax.random.key(seed)) for seed in (1, 2))
    assert_same(one, reference(jax.jit(apply), variables, rows(), jax.random.key(1)))
    assert (np.asarray(one) == 0).any() and (np.asarray(one) != np.asarray(two)).any()


def test_dropout_differs_per_microbatch():
    """Equal rows in every microbatch, another mask in each."""
    model = NoisyPair()
    variables = model.init(jax.random.key(0), rows(), train=False)
    step = mm.microbatch(
        lambda v, x, key: model.apply(v, x, rngs={"dropout": key}),
        argnum=1, num_microbatches=4, reduce="stack", rng_argnum=2,
    )  # fmt: skip
    out = assert_agrees(step, variables, jnp.ones((8, WIDTH)), jax.random.key(1))
    masks = {np.asarray(part != 0).tobytes() for part in out}
    assert len(masks) == 4


# --- variables other than parameters --------------------------------------------------------------------------


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(WIDTH)(x))


class Recording(nn.Module):
    """Writes to three collections."""

    @nn.compact
    def __call__(self, x):
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing() and self.is_mutable_collection("counters"):
            calls.value += 1
        x = nn.Dense(WIDTH)(x)
        self.sow("intermediates", "hidden", x)
        return self.perturb("hidden", x)


class TwoOf(nn.Module):
    kind: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        x = task(self.kind, "first", **FRONT)()(x)
        return task(self.kind, "second", **BACK)()(x)


def test_batch_statistics_come_back():
    """Running averages are written inside the tasks and returned by ``apply``."""
    model = TwoOf(Normed)
    variables = model.init(jax.random.key(0), rows())

    def step(variables, x):
        def loss(params):
            out, updates = model.apply(variables | {"params": params}, x, mutable=["batch_stats"])
            return jnp.mean((out - 1) ** 2), updates

        return jax.grad(loss, has_aux=True)(variables["params"])

    grads, updates = assert_agrees(step, variables, rows())
    means = [updates["batch_stats"][f"Normed_{i}"]["BatchNorm_0"]["mean"] for i in (0, 1)]
    assert [list(mean.sharding.device_set) for mean in means] == [[jax.devices()[0]], [jax.devices()[1]]]
    assert (np.asarray(means[0]) != 0).any()


@pytest.mark.parametrize("mutable", [False, ["counters"], True], ids=str)
def test_collections_are_written_or_not_as_asked(mutable):
    """Counters, ``sow`` and ``perturb`` in tasks; ``is_mutable_collection`` says what it says in the plain model."""
    model = TwoOf(Recording)
    variables = model.init(jax.random.key(0), rows())
    variables.pop("intermediates", None)
    assert_agrees(lambda v, x: model.apply(v, x, mutable=mutable), variables, rows())


def test_intermediates_can_be_captured():
    """``capture_intermediates`` sees calls inside tasks and of tasks."""
    model = TwoOf(Block)
    variables = model.init(jax.random.key(0), rows())
    _, seen = assert_agrees(lambda v, x: model.apply(v, x, capture_intermediates=True), variables, rows())
    assert "__call__" in seen["intermediates"]["Block_1"]["Dense_0"]


def test_gradients_of_perturbations():
    """The gradient of a hidden value, through a collection."""
    model = TwoOf(Recording)
    variables = model.init(jax.random.key(0), rows())
    params, marks = variables["params"], variables["perturbations"]

    def loss(params, marks, x):
        return jnp.sum(
            model.apply({"params": params, "perturbations": marks, "counters": variables["counters"]}, x) ** 2
        )

    assert_agrees(jax.grad(loss, argnums=1), params, marks, rows())


# --- methods --------------------------------------------------------------------------------------------------


class Coder(nn.Module):
    def setup(self):
        self.into, self.out = nn.Dense(8), nn.Dense(WIDTH)

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x, *, scale=1.0):
        return jnp.tanh(self.into(x)) * scale

    def decode(self, h):
        return self.out(h)


def test_methods_can_be_tasks():
    """Each call of a method that was named is one task; the others are part of the program around."""
    model = task(Coder, "coder", methods=("encode", "decode"), **BACK)()
    variables = model.init(jax.random.key(0), rows())
    assert jax.tree.structure(variables) == jax.tree.structure(Coder().init(jax.random.key(0), rows()))

    def encode(v, x):
        return model.apply(v, x, scale=2.0, method="encode")

    hidden = assert_agrees(encode, variables, rows())
    assert hidden.sharding.device_set == {jax.devices()[1]}
    assert "coder" in fragments(encode, variables, rows())
    assert_agrees(lambda v, h: model.apply(v, h, method=Coder.decode), variables, hidden)
    assert_agrees(lambda v, x: model.apply(v, x, method=lambda m, y: m.decode(m.encode(y)) + y), variables, rows())


def test_methods_that_were_not_named_are_no_tasks():
    """By default only ``__call__`` is."""
    model = task(Coder, "coder", **BACK)()
    variables = model.init(jax.random.key(0), rows())
    assert "coder" in fragments(model.apply, variables, rows())
    assert "coder" not in fragments(lambda v, x: model.apply(v, x, method="encode"), variables, rows())


class Tied(nn.Module):
    """The table of the embedding is the output head of another submesh."""

    wrap: bool = True

    def setup(self):
        wrap = task if self.wrap else plain
        self.embed = wrap(nn.Embed, "embed", **FRONT)(7, WIDTH)
        self.body = wrap(Block, "body", **BACK)()
        self.attend = wrap(self.embed.attend, "head", **BACK)

    def __call__(self, tokens):
        return self.attend(self.body(self.embed(tokens)))


def test_a_tied_table_gets_its_whole_gradient():
    """One part from the first submesh, one from the last."""
    tokens = jnp.arange(16).reshape(8, 2) % 7
    variables = Tied(wrap=False).init(jax.random.key(0), tokens)

    def grads(model):
        def loss(v, tokens):
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model.apply(v, tokens), tokens))

        grad = jax.value_and_grad(loss)
        return mm.microbatch(grad, argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean")

    step = mm.jit(grads(Tied()))
    expected = reference(jax.jit(grads(Tied(wrap=False))), variables, tokens)
    assert_same(step(variables, tokens), expected)
    names = {(f.name, f.submesh) for f in step.lower(variables, tokens).program.fragments}
    assert {("embed_bwd", 0), ("head_bwd", 1)} <= names


# --- arguments ------------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    DOUBLE = 2
    HALF = 0.5


class Choosy(nn.Module):
    @nn.compact
    def __call__(self, x, mode, *, mask=None, name_of_it="a", train: bool, sizes=(1, 2)):
        assert isinstance(mode, Mode) and isinstance(train, bool) and isinstance(name_of_it, str)
        x = nn.Dense(WIDTH * sizes[1])(x) * mode.value
        return {"out": x if mask is None else jnp.where(mask, x, 0), "name": name_of_it, "none": None}


def test_arguments_that_are_no_arrays_stay_what_they_are():
    """Bools, strings, None, enums and tuples of numbers are static; arrays are traced; a string may come out."""
    model = task(Choosy, **BACK)()
    mask = jnp.arange(8) % 2 == 0
    variables = model.init(jax.random.key(0), rows(), Mode.DOUBLE, train=True)

    def apply(v, x, mask):
        out = model.apply(v, x, Mode.HALF, mask=mask, train=False)
        assert (out["name"], out["none"]) == ("a", None)
        return out["out"]

    assert_agrees(apply, variables, rows(), mask)
    assert_agrees(lambda v, x: apply(v, x, None), variables, rows())


# --- the wrapped class ----------------------------------------------------------------------------------------


def test_a_wrapped_class_is_a_subclass_with_equal_instances():
    """Equal descriptions give one class, so that a module as a static argument compiles once."""
    one, two = task(nn.Dense, "a", **FRONT), task(nn.Dense, "a", **FRONT)
    assert one is two and issubclass(one, nn.Dense)
    assert one(4) == two(4) and hash(one(4)) == hash(two(4))
    assert one(4) != nn.Dense(4) and one is not task(nn.Dense, "b", **FRONT)
    assert one(4).clone() == one(4) and one(4).copy(features=5) == one(5)


def test_a_wrapped_module_can_be_pickled():
    """By its class and the ids of its devices."""
    model = task(nn.Dense, "a", mesh=square(4), logical_axes=RULES)(4, kernel_init=nn.initializers.ones)
    again = pickle.loads(pickle.dumps(model))
    assert again == model and type(again) is type(model)


def test_a_wrapped_module_is_the_plain_one_outside_a_step():
    """Eagerly, under ``jax.jit``, and in reference mode, all on one device."""
    model = task(nn.Dense, **BACK)(WIDTH)
    variables = model.init(jax.random.key(0), rows())
    expected = nn.Dense(WIDTH).apply(variables, rows())
    np.testing.assert_array_equal(model.apply(variables, rows()), expected)
    for out in (jax.jit(model.apply)(variables, rows()), reference(mm.jit(model.apply), variables, rows())):
        np.testing.assert_allclose(out, expected, rtol=1e-6)
        assert out.sharding.device_set == {jax.devices()[0]}


def test_the_task_is_named_after_the_module_and_not_the_other_way_round():
    """An own name names the task alone; without one the module's path in its parent does."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = task(nn.Dense, "the front", **FRONT)(WIDTH)(x)
            return task(nn.Dense, **BACK)(WIDTH, name="last")(x)

    variables = Net().init(jax.random.key(0), rows())
    assert set(variables["params"]) == {"Dense_0", "last"}
    assert {"the front", "last"} <= fragments(Net().apply, variables, rows())


def test_a_bound_module_runs_as_tasks():
    """``model.bind(variables)`` inside a step."""
    model = task(Scaled, "scaled", methods=("__call__", "undo"), **BACK)()
    variables = model.init(jax.random.key(0), rows())

    def apply(variables, x):
        bound = model.bind(variables)
        return bound.undo(bound(x))

    assert_agrees(apply, variables, rows())
    assert "scaled" in fragments(apply, variables, rows())


# --- shardings ------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Names by ours, by Flax's two boxes, and by Flax's constraint."""

    @nn.compact
    def __call__(self, x):
        lecun, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros
        x = nn.Dense(8, kernel_init=shard_axes("embed", "hidden"), bias_init=shard_axes("hidden"), name="ours")(x)
        x = nn.with_logical_constraint(x, ("batch", "hidden"))
        by_device = nn.with_partitioning(lecun, ("model", None))
        x = nn.Dense(8, kernel_init=by_device, bias_init=nn.with_partitioning(zeros, (None,)), name="device")(x)
        by_logic = nn.with_logical_partitioning(lecun, ("embed", "hidden"))
        return nn.Dense(8, kernel_init=by_logic, name="logical")(x)


def test_names_shard_parameters_on_the_submesh_of_their_task():
    """Parameters and Adam's moments alike."""
    model = nn.Sequential([task(Wide, "wide", mesh=square(4), logical_axes=RULES)()])
    params = model.init(jax.random.key(0), rows(4))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    def step(state, x):
        grad = jax.value_and_grad(lambda p, x: jnp.mean(model.apply({"params": p}, x) ** 2))
        loss, grads = mm.microbatch(grad, argnum=1, num_microbatches=2, reduce="mean")(state.params, x)
        return loss, state.apply_gradients(grads=grads)

    compiled = mm.jit(step).lower(state, rows(4)).compile()
    assert_same(compiled(state, rows(4)), reference(jax.jit(step), state, rows(4)), tolerance=1e-4)
    (shardings, _), _ = compiled.input_shardings
    for tree in (shardings.params, shardings.opt_state[0].mu, shardings.opt_state[0].nu):
        layers = nn.unbox(tree)["layers_0"]
        assert all(s.mesh.devices.tolist() == square(4).devices.tolist() for s in jax.tree.leaves(layers))
        specs = [layers[name]["kernel"].spec for name in ("ours", "device", "logical")]
        assert specs == [P(None, "model"), P("model"), P(None, "model")]
        assert layers["ours"]["bias"].spec == P("model")


def test_a_constraint_in_logical_names_holds_inside_a_task():
    """``nn.with_logical_constraint`` reads names by the rules of the task."""

    class Constrained(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.with_logical_constraint(2 * x, ("batch", "hidden"))

    out = mm.jit(lambda x: task(Constrained, mesh=square(), logical_axes=RULES)().apply({}, x))(rows(4))
    assert out.sharding.spec == P("data", "model")


class OfFlax(nn.Module):
    """Flax's own boxes around kernels that are made flat."""

    @nn.compact
    def __call__(self, x):
        lecun = nn.initializers.lecun_normal()
        logical = nn.with_logical_partitioning(lecun, ("embed", "hidden", None))
        x = nn.DenseGeneral((2, 2), kernel_init=logical, name="split")(x)
        device = nn.with_partitioning(lecun, ("model", None, "data"))
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), kernel_init=device, name="join")(x)


PLACES = [
    pytest.param(
        {"mesh": square(4), "logical_axes": RULES}, P(None, "model"), P("model", None, "data"), id="named axes"
    ),
    pytest.param({"devices": [4, 5]}, P(), P(), id="no axes"),
]


@pytest.mark.parametrize(("place", "split", "join"), PLACES)
def test_boxes_of_flax_come_out_as_they_went_in(place, split, join):
    """Created in a task, read there, and written back; constrained where the submesh has axes."""
    model = nn.Sequential([task(OfFlax, "boxed", **place)()])
    plain_model = nn.Sequential([OfFlax()])
    expected = jax.jit(plain_model.init)(jax.random.key(0), rows(4))
    variables = mm.jit(model.init)(jax.random.key(0), rows(4))
    assert_same(variables, expected, tolerance=1e-6)  # the structure knows the types of boxes

    mutable = ["params"] if "mesh" in place else []  # Flax constrains by itself what can be written, by device axes

    def apply(variables, x):
        return model.apply(variables, x, mutable=mutable), model.apply(variables, x)

    compiled = mm.jit(apply).lower(expected, rows(4)).compile()
    assert_same(compiled(expected, rows(4)), reference(jax.jit(apply), expected, rows(4)))
    for tree in (variables, compiled.input_shardings[0][0]):
        layers = tree["params"]["layers_0"]
        kernels = [layers[name]["kernel"].value for name in ("split", "join")]
        assert [getattr(k, "sharding", k).spec for k in kernels] == [split, join]


# --- errors ---------------------------------------------------------------------------------------------------


def raises(kind, *parts):
    return pytest.raises(kind, match="(?s)" + ".*".join(re.escape(p) for p in parts))


def test_descriptions_that_contradict_themselves():
    """The same words as for any task, as soon as the module is wrapped."""
    for error, parts, description in (
        (errors.TaskError, ("task 'a'", "logical_axes", "no mesh or device_axes"), {"logical_axes": RULES}),
        (errors.TaskError, ("logical_axes", "no mesh"), {"logical_axes": RULES, "devices": [0, 1]}),
        (errors.TaskError, ("mesh already says",), {"mesh": square(), "devices": [0]}),
        (errors.TaskError, ("mesh already says",), {"mesh": square(), "device_axes": ("x",)}),
        (errors.MeshError, ("('x',) names 1 axes", "shape (2, 1)"), {"devices": [[0], [1]], "device_axes": ("x",)}),
        (errors.AxisError, ("'batch'", "'dta'", "('data', 'model')"), {"mesh": square(), "logical_axes": [("batch", "dta")]}),
        (errors.MeshError, ("there is no device 64", "0 to 7"), {"devices": [0, 64]}),
        (errors.TaskError, ("task= is a complete description",), {"task": mm.Task("b"), "devices": [0]}),
    ):  # fmt: skip
        with raises(error, *parts):
            task(nn.Dense, "a", **description)
        assert issubclass(error, ValueError)


def test_what_is_no_module():
    """A number; a class of something else; a function that has nothing to do with modules."""
    for wrong, found in ((3, "found 3 of type int"), (dict, "found <class 'dict'> of type type")):
        with raises(errors.TaskError, "expected a Linen module", found, "manymesh.task"):
            task(wrong, **FRONT)
    with raises(errors.TaskError, "<lambda>", "neither takes a Linen module", "manymesh.task"):
        task(lambda x: x + 1, **FRONT)(rows())


def test_a_method_that_the_model_does_not_have():
    """It is named, and so is the model."""
    with raises(errors.TaskError, "Coder has no method 'encoded'", "methods="):
        task(Coder, methods=("encoded",), **FRONT)


def test_a_task_inside_a_task_on_other_devices():
    """Both are named."""

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return task(nn.Dense, "inner", **BACK)(WIDTH)(x)

    model = task(Outer, "outer", **FRONT)()
    variables = model.init(jax.random.key(0), rows())
    with raises(errors.TaskError, "'inner'", "[1]", "inside task 'outer'", "[0]"):
        mm.jit(model.apply)(variables, rows())


def test_a_parameter_that_does_not_divide():
    """Its path, its shape, the axis and the number of devices."""
    model = nn.Sequential(
        [task(nn.Dense, "odd", mesh=square(), logical_axes=RULES)(3, kernel_init=shard_axes("embed", "hidden"))]
    )
    params = model.init(jax.random.key(0), rows())
    path = "['params']['layers_0']['kernel']"
    with raises(errors.AxisError, path, "task 'odd'", "'hidden'", "(4, 3)", "'model'", "2 devices", "use 2 or 4"):
        mm.jit(model.apply)(params, rows())


def test_a_name_that_no_rule_knows():
    """One warning that names it; an error if the step is strict."""
    model = task(nn.Dense, "typo", mesh=square(), logical_axes=RULES)(WIDTH, kernel_init=shard_axes("embed", "hiden"))
    variables = model.init(jax.random.key(0), rows())
    with pytest.warns(UserWarning, match="(?s)'typo'.*'hiden'.*replication"):
        mm.jit(model.apply)(variables, rows())
    with raises(ValueError, "'hiden'"):
        mm.jit(model.apply, strict=True)(variables, rows())


def test_an_exception_inside_a_task_names_the_task():
    """A note is added to it; the exception stays what it is."""

    class Broken(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(x) @ jnp.ones((WIDTH + 1, 2))

    with pytest.raises(TypeError) as caught:
        mm.jit(lambda x: task(Broken, "the broken one", **FRONT)().init(jax.random.key(0), x))(rows())
    assert "in task 'the broken one'" in caught.value.__notes__


def test_missing_parameters_are_reported_by_flax():
    """Lifting changes nothing about Flax's own errors."""
    model = nn.Sequential([task(nn.Dense, "a", **FRONT)(WIDTH)])
    with raises(ScopeParamNotFoundError, 'parameter named "kernel"'):
        mm.jit(model.apply)({"params": {"layers_0": {"bias": jnp.zeros(WIDTH)}}}, rows())


def test_random_keys_do_not_depend_on_how_often_a_method_is_traced():
    """What comes laid out on the mesh of another task is traced again where the method has arrays of its own."""
    front, back = (Mesh(np.array(jax.devices()[k : k + 2]), ("data",)) for k in (0, 2))

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False)(x + jnp.asarray(np.arange(4.0)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = task(nn.Dense, mesh=front)(4)(x)
            x = jax.device_put(x, NamedSharding(back, P("data", None)))
            return task(Noisy, mesh=back)()(x)

    model, x, keys = Model(), jnp.ones((2, 4)), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(keys, x)
    run = functools.partial(model.apply, rngs={"dropout": jax.random.key(2)})
    np.testing.assert_allclose(mm.jit(run)(params, x), jax.jit(run)(params, x), rtol=1e-6)
