"""Every error says where, what was expected, what was found and what to do."""

import dataclasses
import functools
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh import errors
from stages import WIDTH, back, front, loss, microbatched, parameters, rows

pytestmark = pytest.mark.once


def mesh(shape=(2, 2), axes=("data", "model"), start=0):
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[start : start + count]).reshape(shape), axes)


def raises(kind, *parts):
    """Expects an error of a type (and of its ManyMesh class) whose text has every part, in order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(re.escape(p) for p in parts))


def test_every_error_class_is_a_built_in_error_too():
    """A caller can catch ValueError, TypeError or RuntimeError."""
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]
    assert len(classes) > 5
    for c in classes:
        if c is not errors.ManyMeshError:
            assert issubclass(c, errors.ManyMeshError)
            assert issubclass(c, (ValueError, TypeError, KeyError, RuntimeError))


# Tasks


def test_logical_axes_without_a_mesh():
    """There is nothing for the rules to refer to."""
    with raises(ValueError, "task 'a'", "logical_axes", "no mesh or device_axes", "give mesh="):
        mm.Task("a", logical_axes=[("batch", "data")])
    with raises(errors.TaskError, "logical_axes", "no mesh or device_axes"):
        mm.task(loss, devices=[0, 1], logical_axes=[("batch", "data")])


def test_a_mesh_together_with_devices():
    """A mesh says both."""
    for extra in ({"devices": [0]}, {"device_axes": ("data",)}):
        with raises(ValueError, "task 'a'", "mesh already says", "either mesh, or devices"):
            mm.Task("a", mesh=mesh(), **extra)


def test_a_ready_task_together_with_a_description():
    """task= is complete."""
    with raises(ValueError, "task= is a complete description"):
        mm.task(loss, task=mm.Task("a", devices=[0]), devices=[1])


def test_a_wrong_number_of_device_axes():
    """One name for each dimension."""
    with raises(ValueError, "task 'a'", "('x', 'y') names 2 axes", "shape (2,)", "one name for each"):
        mm.Task("a", devices=[0, 1], device_axes=("x", "y"))
    with raises(ValueError, "('data',) names 1 axes", "shape (2, 2)"):
        mm.Task("a", devices=[[0, 1], [2, 3]], device_axes="data")
    with raises(errors.TaskError, "device_axes ('x',) without devices"):
        mm.Task("a", device_axes=("x",))
    with raises(errors.TaskError, "device_axes ('x',) without devices"):
        mm.Task("a", device_axes="x")
    assert mm.Task("a", devices=[0, 1], device_axes="data").mesh.axis_names == ("data",)


def test_an_unknown_device_axis_in_a_rule():
    """The rule, the axis and the axes that exist."""
    with raises(ValueError, "task 'a'", "('hidden', 'modle')", "'modle'", "('data', 'model')"):
        mm.Task("a", mesh=mesh(), logical_axes=[("hidden", "modle")])


@pytest.mark.parametrize(
    "rules", [["batch"], [("batch",)], [("a", "b", "c")], "batch", [("batch", 1)], {"batch": "data"}]
)
def test_rules_that_are_no_pairs(rules):
    """The form that is expected, and what was found; a mapping is a fair way to say it."""
    if isinstance(rules, dict):
        assert mm.Task("a", mesh=mesh(), logical_axes=rules).logical_axes == (("batch", "data"),)
        return
    with raises(ValueError, "task 'a'", "logical_axes", "pairs"):
        mm.Task("a", mesh=mesh(), logical_axes=rules)


def test_a_task_on_devices_that_do_not_exist():
    """The id, and the ids that exist."""
    with raises(ValueError, "there is no device 99", "has 0 to 7", "device_count=100", "mm.planned_devices(100)"):
        mm.task(loss, "a", devices=[0, 99])
    with raises(ValueError, "there is no device -1", "positions count from 0"):
        mm.task(loss, "a", devices=[-1])
    with raises(errors.MeshError, "[3] are named more than once"):
        mm.Task("a", devices=[3, 3])
    with raises(errors.MeshError, "empty"):
        mm.Task("a", devices=[])
    with raises(errors.MeshError, "rows of different lengths", "[[0, 1], [2]]"):
        mm.Task("a", devices=[[0, 1], [2]])
    with raises(errors.MeshError, "expected jax devices or their positions", "str 'cpu'"):
        mm.Task("a", devices=["cpu"])


def test_a_mesh_that_is_no_mesh():
    """A common slip: the name of the axis instead of the submesh; found type."""
    with raises(TypeError, "task 'a'", "mesh", "Mesh", "str 'stage'"):
        mm.Task("a", mesh="stage")


def test_a_task_that_is_no_function():
    """Found type, and what to give."""
    with raises(TypeError, "task", "function", "int"):
        mm.task(3, devices=[0])


def test_nested_tasks_on_different_submeshes():
    """Both names, both device lists."""
    outer = mm.task(lambda p, x: back(p["back"], x), "outer", devices=[0])
    with raises(
        ValueError, "task 'back' on devices [1]", "inside task 'outer' on devices [0]", "call one after the other"
    ):
        mm.jit(outer)(parameters(), rows())


def test_tasks_on_devices_of_several_backends():
    """Planned devices stand for another backend here; the ids of both and what to do."""
    other = mm.task(lambda w, x: x @ w, "other", devices=mm.planned_devices(2)[1:])

    def step(p, x):
        return other(p["back"], front(p["front"], x))

    with raises(errors.MeshError, "several backends", "cpu (ids [0])", "planned (ids [1])", "jax.devices()"):
        mm.jit(step).lower(parameters(), rows())


def test_an_array_in_two_places_of_which_one_is_donated():
    """Both paths, the shape, and what to do."""
    step = mm.jit(lambda p, q: jax.tree.map(jnp.add, p, q), donate_argnums=0)
    p = parameters()
    with raises(ValueError, "args[0]['back'] and args[1]['back'] are one array", "(4, 4)", "jnp.copy"):
        step({"back": p["back"]}, {"back": p["back"]})


def test_an_array_in_two_places_of_a_later_call():
    """The same where the step is compiled and the array lies where it is wanted: a target network set to the network."""

    def step(state, x):
        loss_now, grads = jax.value_and_grad(loss)(state["net"], x)
        return loss_now, {**state, "net": jax.tree.map(lambda p, g: p - g, state["net"], grads)}

    jitted = mm.jit(step, donate_argnums=0)
    _, state = jitted({"net": parameters(0), "target": parameters(1)}, rows())
    for call in (jitted, jitted.lower(state, rows()).compile()):
        with raises(ValueError, "args[0]['net']['back'] and args[0]['target']['back'] are one array", "jnp.copy"):
            call({**state, "target": state["net"]}, rows())
    with mm.ignore_transforms():
        expected, _ = jitted({**state, "target": state["net"]}, rows())
    actual, _ = jitted({**state, "target": jax.tree.map(jnp.copy, state["net"])}, rows())
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_an_error_inside_a_task_carries_the_name_of_the_task():
    """The user's own exception, with a note."""

    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        mm.jit(mm.task(broken, "stage_3", devices=[0]))(rows())
    assert any("stage_3" in note for note in caught.value.__notes__)


def test_errors_of_jax_pass_through():
    """A boolean of a tracer and a shape error stay what they are."""
    with pytest.raises(jax.errors.TracerBoolConversionError):
        mm.jit(mm.task(lambda x: x if x.sum() > 0 else -x, "a", devices=[0]))(rows())
    with pytest.raises(TypeError, match="dot_general"):
        mm.jit(loss)(parameters(), jnp.ones((2, 3)))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        mm.jit(loss)(parameters())


# Control flow


def test_a_value_that_a_task_lets_out():
    """JAX's words for it, which name the task's function and its line, and what to do."""
    kept = []

    def attention(w, x):
        kept.append(jnp.tanh(x))
        return kept[-1] @ w

    front = mm.task(attention, "front", devices=[0])
    with pytest.raises(jax.errors.UnexpectedTracerError, match="attention at .*test_errors.py") as caught:
        mm.jit(lambda w, x: front(w, x).sum() + kept[-1].sum())(jnp.ones((3, 3)), jnp.ones((2, 3)))
    assert "return the value from the task" in caught.value.__notes__[0]


SAYING = {
    "constraint": lambda x: jax.lax.with_sharding_constraint(x, P("data")),
    "put": lambda x: jax.device_put(x, P("data")),
    "jit": jax.jit(lambda x: x + 1, in_shardings=P("data")),
    "by hand": lambda x: jax.shard_map(lambda x: x + 1, in_specs=P("data"), out_specs=P("data"))(x),
}


@pytest.mark.parametrize(
    "call", [lambda f: f(jnp.ones(4)), lambda f: mm.jit(f)(jnp.ones(4)), lambda f: jax.jit(f)(jnp.ones(4))]
)
def test_a_spec_without_a_mesh_in_a_task_that_is_a_plain_function(call):
    """There is no mesh in the reference mode, and none outside of `mm.jit`."""
    task = mm.task(lambda x: jax.lax.with_sharding_constraint(x, P("x")), "rows", devices=[0, 1], device_axes=("x",))
    assert mm.jit(task)(jnp.ones(4)).sharding.spec == P("x")
    with mm.ignore_transforms(), pytest.raises(RuntimeError) as found:
        call(task)
    assert found.value.__notes__[1].startswith(
        "outside of mm.jit, and in the reference mode, a task is a plain function"
    )
    other = mm.task(lambda x: mm.with_sharding_constraint(x, P("x")), "rows", devices=[0, 1], device_axes=("x",))
    with mm.ignore_transforms():
        assert call(other).tolist() == [1.0] * 4


def test_a_logical_name_where_a_device_axis_is_wanted():
    """As of a parameter of Linen whose initializer names logical axes, but by `with_partitioning`."""
    rules = (("embed", None), ("mlp", "x"))
    say = lambda constrain: mm.task(constrain, "wide", devices=[0, 1], device_axes=("x",), logical_axes=rules)  # noqa: E731
    with pytest.raises(ValueError, match="embed") as found:
        mm.jit(say(lambda w: jax.lax.with_sharding_constraint(w, P("embed", "mlp"))))(jnp.ones((4, 4)))
    note = found.value.__notes__[0]
    assert note.startswith("in task 'wide', whose device axes are ('x',)") and "with_logical_partitioning" in note
    given = mm.jit(say(lambda w: mm.with_sharding_constraint(w, ("embed", "mlp"))))(jnp.ones((4, 4)))
    assert given.sharding.spec == P(None, "x")


@pytest.mark.parametrize("inside", [True, False], ids=["in a task", "outside of tasks"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_the_axis_of_a_pmap(inside, pieces):
    """JAX says to write shard_map around it, in which no task can be; what helps is said once."""
    mean = lambda w, x: jax.lax.pmean(x @ w if inside else front(w, x), "batch")  # noqa: E731
    task = mm.task(mean, "mean", devices=[0]) if inside else mean
    with pytest.raises(NameError, match="unbound axis name: batch") as caught:
        mm.jit(mm.microbatch(task, argnum=1, num_microbatches=pieces))(jnp.eye(WIDTH), rows())
    (note,) = (note for note in caught.value.__notes__ if "values are whole" in note)
    assert "leave out `jax.lax.pmean`" in note and "howto/migrate" in note


def test_a_pmap_around_tasks_that_are_scopes():
    """Which no task of a name of its own can be in."""

    def scoped(x):
        with jax.named_scope("first_half"):
            y = x * 2
        with jax.named_scope("second_half"):
            return y + 1

    said = raises(errors.PlacementError, "jax.pmap", "'first_half' on devices [0]", "leave it out")
    with mm.register_task("first_half", devices=[0]), mm.register_task("second_half", devices=[1]), said:
        mm.jit(lambda x: jax.pmap(scoped)(x))(jnp.ones((2, 4)))


@pytest.mark.parametrize("say", SAYING)
def test_a_spec_without_a_mesh_outside_of_tasks(say):
    """JAX says to set a mesh, which helps nothing: a step has several."""
    with jax.set_mesh(mesh()), pytest.raises((RuntimeError, ValueError), match="mesh") as caught:
        mm.jit(lambda w, x: SAYING[say](front(w, x)))(jnp.eye(WIDTH), jnp.ones((4, WIDTH)))
    note = caught.value.__notes__[0]
    for words in ("mm.jit(<lambda>): outside of tasks", "mm.with_sharding_constraint", "NamedSharding", "mesh="):
        assert words in note


@pytest.mark.parametrize(
    ("say", "given", "words"),
    [
        ("put", mesh, "in place of `jax.device_put(x, spec)`"),
        ("jit", mesh, "shardings of `jax.jit`"),
        ("constraint", lambda: None, "task 'inner' says no mesh"),
        ("by hand", lambda: None, "give the task `mesh=`"),
    ],
)
def test_a_spec_without_a_mesh_in_a_task(say, given, words):
    """Where the task has a mesh a constraint knows it; nothing is said of what is outside of tasks."""
    inner = mm.task(SAYING[say], "inner", mesh=given())
    with jax.set_mesh(mesh()), pytest.raises((RuntimeError, ValueError), match="mesh") as caught:
        mm.jit(inner)(jnp.ones((4, WIDTH)))
    notes = "\n".join(caught.value.__notes__)
    assert "in task 'inner'" in notes and words in notes and "outside of tasks" not in notes


def test_a_function_with_its_own_derivative_that_closes_over_a_value_of_the_loop():
    """JAX cannot have that in a jit that is differentiated, and a loop over microbatches is one."""
    own = jax.custom_vjp(lambda run, x: run(x), nondiff_argnums=(0,))
    own.defvjp(lambda run, x: (run(x), x), lambda run, x, ct: jax.vjp(run, x)[1](ct))

    def loss(w, x, scale):
        return jnp.mean(own(lambda h: back(jnp.eye(WIDTH), front(jnp.eye(WIDTH), h)) * scale, x @ w))

    mean = mm.microbatch(loss, argnum=1, num_microbatches=2, reduce="mean")
    with pytest.raises(jax.errors.UnexpectedTracerError, match="loss") as caught:
        mm.jit(jax.grad(mean))(jnp.eye(WIDTH), rows(), jnp.ones(WIDTH))
    assert any("jax.custom_vjp" in note and "as an argument" in note for note in caught.value.__notes__)


def test_a_piece_that_does_not_divide_over_devices():
    """The user gave eight rows; a note says how many a microbatch has."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    task = mm.task(lambda w, x: mm.with_sharding_constraint(x @ w, ("data",)), "t", mesh=mesh)
    run = mm.microbatch(task, argnum=1, num_microbatches=8, reduce="concat")
    with pytest.raises(errors.AxisError) as caught:
        mm.jit(run)(jnp.ones((3, 3)), jnp.ones((8, 3)))
    assert "each of 8 microbatches has 1 of 8 along dimension 0" in str(caught.value.__notes__)


def test_a_forgotten_argnum_is_told_where_shapes_do_not_fit():
    """The parameters are cut, and JAX speaks of the shapes of a product."""
    layer = mm.task(lambda w, x: x @ w, "layer", devices=[0])
    step = mm.jit(mm.microbatch(lambda w, x: layer(w, x), num_microbatches=2, reduce="mean"))
    with pytest.raises(TypeError) as caught:
        step(jnp.ones((4, 4)), jnp.ones((8, 4)))
    assert "2 of 4 along dimension 0 of args[0]" in str(caught.value.__notes__)
    assert "if args[0] is not the batch, write argnum=1" in str(caught.value.__notes__)
    with pytest.raises(TypeError) as caught:  # where they are as long as the batch
        mm.jit(mm.microbatch(lambda w, x: front(w, x), num_microbatches=2))(jnp.eye(WIDTH), jnp.ones((WIDTH, WIDTH)))
    assert "args[1] has that length, too" in str(caught.value.__notes__)
    assert "if args[0] is not the batch, write argnum=1" in str(caught.value.__notes__)


def test_argnum_names_the_parameters_as_well():
    """Of the arguments that it names, those with rows are the batch."""
    distance = lambda w, x, y: jnp.sum((front(w["a"], x) - y) ** 2 * w["b"])  # noqa: E731
    for argnum, batch in (((0, 1, 2), (1, 2)), ((0, 1), 1), ((-1, 0), -1)):
        step = mm.jit(mm.microbatch(distance, argnum=argnum, num_microbatches=4))
        with raises(errors.MicrobatchError, f"if args[0] is no part of the batch, write argnum={batch}"):
            step({"a": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones(3)}, rows(), rows())


def test_a_second_batch_that_argnum_does_not_name():
    """Labels go whole to each microbatch, and their shape does not fit: by position, and by keyword."""
    distance = lambda w, x, y: jnp.sum((front(w, x) - y) ** 2)  # noqa: E731
    step = mm.jit(mm.microbatch(distance, argnum=1, num_microbatches=2))
    with pytest.raises(TypeError) as caught:
        step(jnp.eye(WIDTH), rows(), rows())
    assert "args[2] has that length, too, and goes whole to each, as argnum does not name it" in str(
        caught.value.__notes__
    )
    with pytest.raises(TypeError) as caught:
        step(jnp.eye(WIDTH), rows(), y=rows())
    assert "y=, of length 8 along dimension 0 as the batch, goes whole" in str(caught.value.__notes__)


@pytest.mark.parametrize("argnum", [1, -2, (0, 1)])
def test_a_wrong_argnum_is_told_what_could_be_the_batch(argnum):
    """Three arguments, of which only the last has leaves of one length."""
    step = mm.microbatch(lambda p, q, x: loss(p, x), argnum=argnum, num_microbatches=4)
    called = "args[0] and args[1] are" if argnum == (0, 1) else "args[1] is"
    with raises(errors.MicrobatchError, f"if {called} not the batch, write argnum=2"):
        step({"w": jnp.eye(4), "b": jnp.ones(8)}, {"w": jnp.eye(8), "b": jnp.ones(4)}, rows())


def test_a_task_in_a_while_loop():
    """The construct, the line, and what to do instead."""

    def grown(x):
        more = lambda v: back(jnp.eye(WIDTH), front(jnp.eye(WIDTH), v)) + 1  # noqa: E731
        return jax.lax.while_loop(lambda v: jnp.sum(v) < 100, more, x)

    step = mm.microbatch(grown, num_microbatches=2, reduce="concat")

    with raises(errors.PlacementError, "microbatch(grown)", "lax.while_loop", "test_errors.py", "fixed length"):
        mm.jit(step, strict=True)(rows())


# Microbatches


def test_a_batch_that_does_not_divide():
    """The leaf, its shape, and the numbers that would work."""
    batch = {"x": rows(8), "y": jnp.ones((8, 2))}
    step = microbatched(lambda p, b: loss(p, b["x"]), num_microbatches=3)
    with raises(ValueError, "args[1]['x'] of shape (8, 4)", "length 8", "3 microbatches", "1, 2, 4, 8"):
        mm.jit(step)(parameters(), batch)
    with raises(errors.MicrobatchError, "(6, 4)", "pieces of size 4", "size that would work: 1, 2, 3, 6"):
        microbatched(num_microbatches=None, size=4)(parameters(), rows(6))
    with raises(errors.MicrobatchError, "num_microbatches=4 times size=4 is 16", "length 8"):
        microbatched(size=4)(parameters(), rows(8))
    with raises(errors.MicrobatchError, "(0, 4)", "length 0"):
        microbatched()(parameters(), rows(0))


@pytest.mark.parametrize("sizes", [{"num_microbatches": 4}, {"num_microbatches": None, "size": 2}])
@pytest.mark.parametrize("odd", [6, 5, 0])
def test_leaves_of_a_batch_that_do_not_agree(sizes, odd):
    """One leaf of each length is named, whether they divide or not: no number of pieces would do."""
    step = microbatched(lambda p, b: loss(p, b["x"]), **sizes)
    with raises(
        errors.MicrobatchError, f"(args[1]['x']: 8, args[1]['z']: {odd})", "cut leaves of one length"
    ) as caught:
        mm.jit(step)(parameters(), {"x": rows(8), "y": rows(8), "z": rows(odd)})
    assert "would work" not in str(caught.value)


def test_a_batch_without_the_dimension():
    """A scalar among the leaves, or too large a dim."""
    with raises(ValueError, "args[1]['n'] of shape ()", "no dimension 0"):
        microbatched(lambda p, b: loss(p, b["x"]))(parameters(), {"n": jnp.int32(3), "x": rows()})
    with raises(ValueError, "(8, 4)", "no dimension 2"):
        microbatched(dim=2)(parameters(), rows())


def test_a_batch_that_is_no_argument_or_holds_no_array():
    """Wrong argnum, batch by keyword, empty batch."""
    with raises(ValueError, "argnum 1", "1 positional argument", "by position"):
        microbatched()(parameters(), x=rows())
    with raises(ValueError, "no array to cut"):
        microbatched(lambda p, b: loss(p, rows()))(parameters(), {"x": None})


@pytest.mark.parametrize("number", [0, -1, 2.0, "4", True])
def test_a_number_of_microbatches_that_is_none(number):
    """A positive int."""
    with raises(ValueError, "num_microbatches", "positive int", repr(number)):
        microbatched(num_microbatches=number)


def test_no_number_of_microbatches():
    """One of the two has to be said."""
    with raises(ValueError, "microbatch(loss)", "num_microbatches= or size="):
        mm.microbatch(loss)


def test_an_unknown_schedule():
    """The names that exist, the likely one first."""
    with raises(ValueError, "1f1bb", "1f1b"):
        microbatched(schedule="1f1bb")
    with raises(errors.ScheduleError, "3"):
        microbatched(schedule=3)


def test_an_unknown_reduction():
    """In the tree, with a guess."""
    with raises(ValueError, "unknown reduction 'men'", "did you mean 'mean'?", "sum, mean, max"):
        microbatched(reduce=("sum", "men"))
    with raises(errors.MicrobatchError, "unknown reduction 'average'", "did you mean 'mean'?"):
        microbatched(reduce="average")
    with raises(errors.MicrobatchError, "unknown reduction None"):
        mm.microbatch(loss, num_microbatches=2, reduce=None)
    with raises(errors.MicrobatchError, "unknown reduction 3"):
        microbatched(reduce=3)


def test_a_reduction_that_does_not_fit_the_result():
    """Prefix errors, scalars that cannot be concatenated, a count that is not there."""
    for run in (lambda f: f, mm.jit):
        with raises(ValueError, "microbatch(", "('mean', 'sum', 'sum')", "prefix", "prefix pytree reduce"):
            run(microbatched(reduce=("mean", "sum", "sum")))(parameters(), rows())
        with raises(ValueError, "microbatch(", "scalar", "concatenated", "'stack'"):
            run(microbatched(reduce="concat"))(parameters(), rows())
        with raises(ValueError, "microbatch(", "WeightedMean('tokens')", "front", "has_aux"):
            run(microbatched(reduce=mm.WeightedMean("tokens")))(parameters(), rows())


def test_a_count_that_is_not_added_up():
    """Its own word is another one, or it is weighted itself."""

    def step(p, x):
        return {"loss": loss(p, x), "m": x.sum(), "n": x.max()}

    for word, how in (("mean", "reduced by 'mean'"), (mm.WeightedMean("m"), "averaged by another WeightedMean")):
        reduce = {"loss": mm.WeightedMean("n"), "m": "sum", "n": word}
        for run in (lambda f: f, mm.jit):
            with raises(ValueError, "result['n'], the count of WeightedMean('n'), is ", how, "reduce it by 'sum'"):
                run(microbatched(step, reduce=reduce))(parameters(), rows())


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_result_that_is_no_array(num_microbatches):
    """It is named, in a step and where the loop is the plain function."""
    step = mm.microbatch(lambda p, x: (loss(p, x), "text"), argnum=1, num_microbatches=num_microbatches)
    for run in (lambda fun: fun, mm.jit):
        with raises(
            mm.errors.MicrobatchError, "microbatch(<lambda>): result[1] is str 'text', no array; return arrays"
        ):
            run(step)(parameters(), rows())


def test_a_count_that_is_no_scalar_leaf():
    """The function gave more than one leaf; the leaf it gave has a shape."""

    def step(p, x):
        return loss(p, x), {"count": jnp.ones(3)}

    with raises(ValueError, "WeightedMean", "has to pick one leaf", "(0, {'count': 1})"):
        microbatched(step, reduce=mm.WeightedMean(lambda out: out))(parameters(), rows())
    with raises(ValueError, "WeightedMean", "has to pick one leaf", "it gave 5"):
        microbatched(step, reduce=mm.WeightedMean(lambda out: 5))(parameters(), rows())
    with raises(ValueError, "WeightedMean('count')", "shape (3,)", "has to be a scalar"):
        microbatched(step, reduce=mm.WeightedMean("count"))(parameters(), rows())


def test_random_keys_that_are_no_argument():
    """rng_argnum past the arguments, or an argument of other things, with the place of the first."""
    with raises(ValueError, "rng_argnum 2", "2 positional arguments"):
        microbatched(rng_argnum=2)(parameters(), rows())
    for run in (lambda f: f, mm.jit):
        with raises(errors.MicrobatchError, "microbatch(", "args[0]['back'] is float32", "jax.random.key(0)"):
            run(microbatched(rng_argnum=0))(parameters(), rows())
        with raises(errors.MicrobatchError, "microbatch(", "args[0]['seed'] is int", "jax.random.key(0)"):
            microbatched(rng_argnum=0)({"key": jax.random.key(0), "seed": 3}, rows())


def test_stages_that_contradict_the_program():
    """num_stages and interleave are statements."""
    with raises(ValueError, "num_stages", "3", "2"):
        mm.jit(microbatched(num_stages=3))(parameters(), rows())
    with raises(ValueError, "interleave", "2", "1"):
        mm.jit(microbatched(interleave=2))(parameters(), rows())
    mm.jit(microbatched(num_stages=2, interleave=1))(parameters(), rows())


# Axes


def constrained(names, rules=(("batch", "data"), ("hidden", "model")), name="decoder"):
    def layer(w, x):
        return mm.with_sharding_constraint(w, names).sum() + x.sum()

    return mm.task(layer, name, mesh=mesh(), logical_axes=rules)


def test_a_dimension_that_does_not_divide():
    """Task, parameter path, shape, axis, size, and sizes that would do."""
    layer = constrained((None, "hidden"))
    params = {"block": {"kernel": jnp.ones((4, 5)), "bias": jnp.ones(3)}}
    with raises(
        ValueError, "task 'decoder'", "dimension 1 ('hidden')", "(4, 5)", "axis 'model'", "2 devices", "4 or 6",
        "map 'hidden' to None", "args[0]['block']['kernel'] has this shape",
    ):  # fmt: skip
        mm.jit(lambda p, x: layer(p["block"]["kernel"], x))(params, rows())


def test_a_dimension_that_does_not_divide_over_two_axes():
    """The product of the sizes counts."""
    layer = constrained(("hidden",), rules=[("hidden", ("data", "model"))])
    with raises(errors.AxisError, "(6,)", "('data', 'model')", "4 devices", "4 or 8"):
        mm.jit(layer)(jnp.ones(6), rows())


def test_more_names_than_dimensions():
    """Names, shape."""
    with raises(ValueError, "task 'decoder'", "3 axis names", "('batch', None, 'hidden')", "(4, 4)", "2 dimensions"):
        mm.jit(constrained(("batch", None, "hidden")))(jnp.ones((4, 4)), rows())


def test_an_unknown_logical_name_warns_once():
    """The name, what the rules know, and what to do; the second program with the same slip stays silent."""
    step = mm.jit(constrained((None, "hiden")))
    with pytest.warns(
        UserWarning, match="(?s)'decoder'.*'hiden'.*'hidden'.*replication.*did you mean 'hidden'"
    ) as seen:
        step(jnp.ones((4, 4)), rows())
    assert len(seen) == 1 and seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(jnp.ones((4, 4)), rows())
        step(jnp.ones((8, 4)), rows())


def test_an_unknown_logical_name_is_an_error_under_strict():
    """strict=True stops before anything runs."""
    step = mm.jit(constrained((None, "hiden")), strict=True)
    with raises(ValueError, "strict=True", "'hiden'", "add a rule"):
        step(jnp.ones((4, 4)), rows())


def test_submeshes_of_an_unknown_axis():
    """The axes that the mesh has."""
    with raises(ValueError, "('data', 'model')", "'stage'"):
        mm.submeshes(mesh(), "stage")


# Calls


def test_a_donated_array_used_again():
    """Which argument, and why it is gone, also where the call would compile first; its shape still says what to plan."""
    step = mm.jit(lambda s, x: ({"w": s["w"] + 1}, front(s["w"], x)), donate_argnums=0)
    state = {"w": parameters()["front"]}
    step(state, rows())
    for x in (rows(), rows()[:4]):
        with raises(RuntimeError, "args[0]['w']", "(4, 4)", "deleted", "donated"):
            step(state, x)
    assert step.eval_shape(state, rows())[0]["w"].shape == (4, 4)
    assert step.lower(state, rows()).compile().input_shardings[0][0]["w"].device_set == state["w"].sharding.device_set


def test_unhashable_static_arguments():
    """As in JAX, a ValueError."""
    with raises(ValueError, "static argument 1", "hashable", "list"):
        mm.jit(lambda x, n: x, static_argnums=1)(rows(), [1])
    with raises(ValueError, "static argument 'n'", "hashable"):
        mm.jit(lambda x, n: x, static_argnames="n")(rows(), n={})


def test_an_argument_that_is_no_array():
    """Where it is, what it is, and what to do."""
    with raises(TypeError, "args[1]['mode']", "str 'fast'", "static"):
        mm.jit(lambda x, options: x)(rows(), {"mode": "fast"})
    with raises(TypeError, "kwargs['f']", "function", "static"):
        mm.jit(lambda x, f: x)(rows(), f=loss)


def test_an_argument_of_a_class_that_is_no_pytree():
    """A dataclass, and another class that holds arrays: what to register, without the numbers of all its arrays."""

    @dataclasses.dataclass
    class Described:
        params: dict

    class Plain:
        def __init__(self, params):
            self.params = params

    step = mm.jit(lambda state, x: loss(state.params, x))
    for state in (Described(parameters()), Plain(parameters())):
        with raises(errors.ArgumentError, f"args[0] is a {type(state).__name__}", "register_dataclass") as caught:
            step(state, rows())
        assert len(str(caught.value)) < 400
    with raises(errors.ArgumentError, "args[0] is str '", "no array; make it static") as caught:
        step("x" * 1000, rows())
    assert len(str(caught.value)) < 400


def test_not_a_function():
    """Found type."""
    with raises(TypeError, "mm.jit", "function", "int"):
        mm.jit(3)


@pytest.mark.parametrize(
    "transform",
    [jax.grad, jax.jit, jax.vmap, lambda f: functools.partial(jax.eval_shape, f)],
    ids=["grad", "jit", "vmap", "eval_shape"],
)
def test_a_transformation_around_a_step(transform):
    """It belongs inside; also when the step is compiled already, and has one submesh."""
    step = mm.jit(lambda x: jnp.sum(front(jnp.eye(WIDTH), jnp.atleast_2d(x))))
    for _ in range(2):
        with raises(TypeError, "tracer", "jax.grad", "inside the function that mm.jit wraps") as caught:
            transform(step)(jnp.ones((2, WIDTH)))
        assert "a step that runs on several" not in str(caught.value)
        step(jnp.ones((2, WIDTH)))
        step(jnp.ones(WIDTH))


def test_a_call_with_a_description_of_an_array():
    """Said before anything compiles; also of what is compiled already, and of an argument that nothing reads."""
    step = mm.jit(lambda p, batch: loss(p, batch["x"]))
    described = {"x": jax.ShapeDtypeStruct((8, WIDTH), "float32"), "y": jax.ShapeDtypeStruct((), "int32")}
    words = (
        "argument args[1]['x'] is a jax.ShapeDtypeStruct, which describes float32[8,4]",
        "call the step with an array",
    )
    with raises(errors.ArgumentError, "mm.jit(<lambda>): ", *words, "prepare"):
        step(parameters(), described)
    assert "0 programs" in repr(step)
    compiled = step.prepare(parameters(), described)
    for call in (step, compiled):
        with raises(errors.ArgumentError, *words):
            call(parameters(), described)
        with raises(errors.ArgumentError, "argument args[1]['y'] is a jax.ShapeDtypeStruct"):
            call(parameters(), {**described, "x": rows()})


def test_out_shardings_of_the_wrong_structure():
    """The label, and that it is no prefix."""
    s = NamedSharding(mesh((1,), ("d",)), P())
    with raises(TypeError, "out_shardings", "prefix of the result"):
        mm.jit(loss, out_shardings=(s, s))(parameters(), rows())
    with raises(TypeError, "in_shardings", "prefix of the arguments"):
        mm.jit(loss, in_shardings=(s, s, s))(parameters(), rows())
    with raises(TypeError, "at key path\n    in_shardings[0]\n"):
        mm.jit(loss, in_shardings=({"no": s}, s))(parameters(), rows())


def test_shardings_that_are_none():
    """A spec says no submesh, and a device is no sharding."""
    with raises(TypeError, "out_shardings", "NamedSharding", "P()", "NamedSharding(submesh, spec)"):
        mm.jit(loss, out_shardings=P())(parameters(), rows())
    with raises(TypeError, "in_shardings", "NamedSharding", "SingleDeviceSharding", "found CpuDevice(id=0)"):
        mm.jit(loss, in_shardings=jax.devices()[0])(parameters(), rows())


def test_a_compiled_step_called_with_other_arguments():
    """Structure, shape and dtype are fixed."""
    compiled = mm.jit(loss).lower(parameters(), rows()).compile()
    with raises(TypeError, "loss", "structure"):
        compiled(parameters())
    with raises(TypeError, "args[1]", "float32[8,4]", "float32[4,4]"):
        compiled(parameters(), rows(4))
    with raises(TypeError, "args[0]['front']", "float32[4,4]", "int32[4,4]"):
        compiled({**parameters(), "front": jnp.ones((4, 4), jnp.int32)}, rows())
    with raises(TypeError, "compiled with args[0], args[1], called with args[0], args[1], args[2]"):
        compiled(parameters(), rows(), ())
    with raises(TypeError, "compiled with no kwargs, called with kwargs['rest']"):
        compiled(parameters(), rows(), rest=None)
