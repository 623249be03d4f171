"""`Task` describes where; `task` marks what."""

import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from stages import WIDTH, assert_agrees, assert_same, back, dense, front, microbatched, parameters, rows

U = P.UNCONSTRAINED


def mesh_2x2(start=0):
    return Mesh(np.array(jax.devices()[start : start + 4]).reshape(2, 2), ("data", "model"))


# Descriptions


def test_equal_descriptions_are_equal_and_hash_alike():
    """Devices and their ids are the same thing, and lists are tuples."""
    one = mm.Task("a", devices=[0, 1], device_axes=["x"], logical_axes=[["batch", ["x"]]])
    two = mm.Task("a", devices=jax.devices()[:2], device_axes=("x",), logical_axes=(("batch", ("x",)),))
    assert one == two and hash(one) == hash(two) and len({one, two}) == 1
    assert one != mm.Task("b", devices=[0, 1], device_axes=["x"], logical_axes=[["batch", ["x"]]])
    assert one != mm.Task("a", devices=[1, 0], device_axes=["x"], logical_axes=[["batch", ["x"]]])


def test_a_description_cannot_be_changed():
    """It is frozen."""
    with pytest.raises(AttributeError):
        mm.Task("a").name = "b"


def test_explicit_and_auto_meshes_describe_the_same_place():
    """Tasks on both share a submesh."""
    explicit, auto = (jax.make_mesh((2,), ("x",), axis_types=(t,)) for t in (AxisType.Explicit, AxisType.Auto))
    assert mm.Task("a", mesh=explicit) == mm.Task("a", mesh=auto)


def test_an_array_of_devices_gives_the_shape_of_the_mesh():
    """Also as nested lists."""
    task = mm.Task("a", devices=np.arange(4).reshape(2, 2), device_axes=("x", "y"))
    assert dict(task.mesh.shape) == {"x": 2, "y": 2}
    assert mm.Task("a", devices=[[0, 1], [2, 3]], device_axes=("x", "y")) == task


def test_the_repr_says_what_is_needed_to_make_it_again():
    """Name, shape, devices and rules."""
    text = repr(mm.Task("a", mesh=mesh_2x2(), logical_axes=[("hidden", "model")]))
    assert text == "Task('a', mesh={'data': 2, 'model': 2}, devices=[0, 1, 2, 3], logical_axes=(('hidden', 'model'),))"
    assert repr(mm.Task()) == "Task(None)"


@pytest.mark.parametrize(
    ("rules", "names", "spec", "unknown"),
    [
        (None, ("data", "model"), P("data", "model"), ()),
        (None, (("data", "model"), None), P(("data", "model")), ()),
        ([("batch", "data"), ("hidden", "model")], ("batch", "hidden"), P("data", "model"), ()),
        ([("batch", "data")], (None, "batch"), P(None, "data"), ()),
        ([("batch", None)], ("batch", "model"), P(None, "model"), ()),
        ([("batch", ("data", "model"))], ("batch", None), P(("data", "model")), ()),
        ([("a", "data"), ("b", "data")], ("b", "a"), P(None, "data"), ()),
        ([("a", "data"), ("b", "data"), ("b", "model")], ("b", "a"), P("model", "data"), ()),
        ([("a", "data"), ("b", "model")], (("a", "b"),), P(("data", "model")), ()),
        ([("a", "data")], ("typo", "a"), P(None, "data"), ("typo",)),
        (None, (U, "data"), P(U, "data"), ()),
        (None, (), P(), ()),
    ],
)
def test_names_become_device_axes(rules, names, spec, unknown):
    """By priority of rule; a taken axis falls through to a later rule; what nothing knows is replicated and reported."""
    assert mm.Task("a", mesh=mesh_2x2(), logical_axes=rules).resolve(names, (4, 4)[: max(len(names), 1)]) == (
        spec,
        unknown,
    )


def test_unnamed_devices_mean_replication():
    """Without device_axes no name can mean a device axis."""
    assert mm.Task("a", devices=[0, 1]).resolve(("data", "unnamed_0"), (4, 4)) == (P(), ())
    task = mm.task(lambda x: mm.with_sharding_constraint(x * 2, ("batch", None)), devices=[0, 1])
    y = mm.jit(task)(rows())
    assert y.sharding.is_fully_replicated and y.devices() == set(jax.devices()[:2])


# Marks


def test_the_name_defaults_to_that_of_what_is_wrapped():
    """Function, class of a callable object, or what the user says."""

    class Layer:
        def __call__(self, x):
            return x + 1

    def names(fun, *args, **kwargs):
        return [
            t
            for f in mm.jit(mm.task(fun, *args, devices=[0], **kwargs)).lower(rows()).program.fragments
            for t in f.tasks
        ]

    assert names(jnp.sin) == ["sin"]
    assert names(Layer()) == ["Layer"]
    assert names(lambda x: x + 1) == ["<lambda>"]
    assert names(jnp.sin, "layer 1/β") == ["layer 1/β"]
    ready = mm.task(jnp.sin, task=mm.Task("ready", devices=[0]))
    assert [t for f in mm.jit(ready).lower(rows()).program.fragments for t in f.tasks] == ["ready"]


def test_a_partial_application_is_called_like_its_function():
    """A task, a loop and a step, in programs and in errors."""

    def scaled(by, w, x):
        return by * dense(w, x)

    def mean_of(by, params, x):
        one, two = (mm.task(functools.partial(scaled, by), devices=[k]) for k in (0, 1))
        return jnp.mean(two(params["back"], one(params["front"], x)))

    loop = microbatched(functools.partial(functools.partial(mean_of, 2.0)))
    step = mm.jit(functools.partial(loop))
    program = step.lower(parameters(), rows()).program
    assert [f.name for f in program.fragments if f.loop is not None] == ["scaled", "scaled_2"]
    assert program.loops[0].name == "mean_of" and repr(step).startswith("mm.jit(mean_of)")
    with pytest.raises(mm.errors.MicrobatchError, match=r"microbatch\(mean_of\)"):
        microbatched(functools.partial(mean_of, 2.0), num_microbatches=3)(parameters(), rows())


def test_a_task_as_a_decorator():
    """Its arguments are checked where it stands, the function when it comes."""

    @mm.task(name="second", devices=[1])
    def last(x):
        """Its own words."""
        return 2 * x

    @mm.task(devices=[0])
    def first(x):
        return x + 1

    step = mm.jit(lambda x: last(first(x)))
    assert [f.name for f in step.lower(jnp.ones(2)).program.fragments] == ["first", "second"]
    np.testing.assert_array_equal(step(jnp.ones(2)), 4 * np.ones(2))
    assert last.__doc__ == "Its own words."
    with pytest.raises(mm.errors.TaskError, match="give either mesh, or devices"):
        mm.task(mesh=mesh_2x2(), devices=[1])
    with pytest.raises(mm.errors.ArgumentError, match=r"@task\(name='last', \.\.\.\) before the function"):
        mm.task("last", devices=[1])
    with pytest.raises(mm.errors.ArgumentError, match="found int 3"):
        mm.task(devices=[1])(3)


def test_wrapping_keeps_name_and_docstring():
    """As a decorator it is invisible."""

    @mm.task
    def layer(x):
        """A layer."""
        return x

    assert (layer.__name__, layer.__doc__) == ("layer", "A layer.")


def test_enums_none_and_callables_given_to_a_task_stay_static():
    """Whatever is no array reaches the function as it is, also by keyword."""

    class Mode(enum.Enum):
        FAST = 1

    def layer(x, mode, *, act, w=None, rest=()):
        assert mode is Mode.FAST and w is None and rest == ()
        return act(x)

    run = mm.task(layer, devices=[0])
    assert_agrees(lambda x: run(x, Mode.FAST, act=jnp.sin), rows())


def test_keyword_arguments_of_a_task_are_differentiated():
    """Arrays by keyword are traced like any other."""
    run = mm.task(lambda *, w, x, scale=2.0: jnp.tanh(x @ w) * scale, "run", devices=[0])
    assert_agrees(jax.grad(lambda p, x: run(x=x, w=p["front"], scale=p["back"][0, 0]).sum()), parameters(), rows())


def test_a_task_that_closes_over_values_of_other_stages():
    """They are inputs of the task like its arguments, gradients included."""

    def f(p, x):
        y = front(p["front"], x)
        return mm.task(lambda h: jnp.mean((h @ p["back"] + y.sum()) ** 2), "closure", devices=[1])(y)

    assert_agrees(microbatched(jax.value_and_grad(f)), parameters(), rows())


def test_tasks_without_arguments_and_tasks_that_return_their_arguments():
    """A constant made on a submesh, and the identity, which moves a value there and back."""
    constant = mm.task(lambda: jnp.arange(4.0), "constant", devices=[1])
    same = mm.task(lambda x: x, "same", devices=[1])
    for f in (
        lambda p, x: back(p["back"], front(p["front"], x) + constant()),
        lambda p, x: (same(x), front(p["front"], same(x))),
    ):
        assert_agrees(f, parameters(), rows())
        assert_agrees(microbatched(f, reduce="concat"), parameters(), rows())


def test_a_task_without_a_place_runs_with_its_neighbours():
    """The placement is inferred from what it consumes."""
    anywhere = mm.task(dense, "anywhere")

    def f(p, x):
        return jnp.mean(anywhere(p["back"], back(p["back"], front(p["front"], x))) ** 2)

    assert_agrees(microbatched(jax.value_and_grad(f)), parameters(), rows())
    program = mm.jit(f).lower(parameters(), rows()).program
    (where,) = {f.submesh for f in program.fragments if "anywhere" in f.tasks}
    assert program.submeshes[where].devices.flat[0].id == 1
    assert_agrees(jax.value_and_grad(lambda p, x: jnp.mean(anywhere(p["back"], x))), parameters(), rows())


def test_a_nested_task_on_the_same_submesh_merges():
    """Or without a place of its own. The outer task is the one in the program."""
    inner = mm.task(dense, "inner", devices=[0])
    free = mm.task(dense, "free")
    outer = mm.task(lambda p, x: free(p["back"], inner(p["front"], x)), "outer", devices=[0])
    assert_agrees(microbatched(jax.value_and_grad(lambda p, x: outer(p, x).mean())), parameters(), rows())
    program = mm.jit(outer).lower(parameters(), rows()).program
    assert [t for f in program.fragments for t in f.tasks] == ["outer"]


def test_one_task_called_several_times_and_two_tasks_of_one_name():
    """Each call is its own piece of the program."""
    same = [mm.task(jnp.sin, "same", devices=[i]) for i in (0, 1)]
    f = mm.jit(lambda x: same[1](same[0](same[0](x))))
    assert_same(f(rows()), jnp.sin(jnp.sin(jnp.sin(rows()))))
    assert sum(t == "same" for fragment in f.lower(rows()).program.fragments for t in fragment.tasks) == 3


def test_tasks_on_meshes_of_other_names_over_the_same_devices():
    """Equal devices are no overlap, in whatever order and shape."""
    one = mm.task(dense, "one", mesh=mesh_2x2())
    for devices in (jax.devices()[:4], jax.devices()[3::-1]):
        two = mm.task(dense, "two", mesh=Mesh(np.array(devices), ("z",)))

        def f(p, x, two=two):
            return jnp.mean(two(p["back"], one(p["front"], x)) ** 2)

        assert_agrees(microbatched(jax.value_and_grad(f)), parameters(), rows())


# Constraints


def test_constraints_resolve_in_their_task():
    """One layer, two tasks with other rules: the same names mean other axes."""

    def layer(x):
        return mm.with_sharding_constraint(x * 2, ("batch", "hidden"))

    first = mm.task(layer, "first", mesh=mesh_2x2(0), logical_axes=[("batch", "data"), ("hidden", None)])
    second = mm.task(layer, "second", mesh=mesh_2x2(4), logical_axes=[("batch", None), ("hidden", "model")])
    one, two = mm.jit(lambda x: (lambda y: (y, second(y)))(first(x)))(rows())
    assert one.sharding.is_equivalent_to(NamedSharding(mesh_2x2(0), P("data")), 2)
    assert two.sharding.is_equivalent_to(NamedSharding(mesh_2x2(4), P(None, "model")), 2)


def test_constraints_on_trees_with_prefixes_and_every_kind_of_spec():
    """Tuples, PartitionSpec, NamedSharding, None; a spec for a whole subtree."""

    def layer(x):
        tree = {"a": (x, x + 1), "b": x + 2, "c": x + 3, "d": [x]}
        spec = {"a": ("data",), "b": P(None, "model"), "c": None, "d": NamedSharding(mesh_2x2(), P("model"))}
        return mm.with_sharding_constraint(tree, spec)

    out = mm.jit(mm.task(layer, "layer", mesh=mesh_2x2()))(rows())
    for leaf, spec in (
        (out["a"][0], P("data")),
        (out["a"][1], P("data")),
        (out["b"], P(None, "model")),
        (out["d"][0], P("model")),
    ):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh_2x2(), spec), 2)


def test_a_constraint_outside_tasks_travels_to_where_the_value_is():
    """There its names are device axes; elsewhere it does nothing."""
    layer = mm.task(lambda x: x + 1, "layer", mesh=mesh_2x2())
    y = mm.jit(lambda x: mm.with_sharding_constraint(layer(x) * 2, ("data", None)))(rows())
    assert y.sharding.is_equivalent_to(NamedSharding(mesh_2x2(), P("data")), 2)
    assert mm.with_sharding_constraint(3, ("data",)) == 3


def test_a_constraint_is_differentiated_and_mapped():
    """Under grad, vmap and checkpoint, in and out of tasks."""

    def layer(w, x):
        return dense(mm.with_sharding_constraint(w, (None, "model")), mm.with_sharding_constraint(x, ("data", None)))

    run = mm.task(layer, "run", mesh=mesh_2x2())

    def f(p, x):
        y = mm.with_sharding_constraint(run(p["front"], x), ("data",))
        return jnp.mean(jax.checkpoint(jax.vmap(run, (None, 0)))(p["back"], y.reshape(2, -1, WIDTH)) ** 2)

    assert_agrees(jax.value_and_grad(f), parameters(), rows())


def task_bodies(fun, *args):
    """What the tasks of a traced function hold, in order."""
    jaxpr = mm.jit(fun).trace(*args).jaxpr
    inner = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
    return [e.params["jaxpr"] for e in inner.eqns if "__mm" in str(e.params.get("name"))]


def test_equal_tasks_hold_one_jaxpr():
    """So JAX differentiates and transposes it once, however many layers there are."""
    layers = [mm.task(lambda w, x: jnp.tanh(x @ w), f"layer_{k}", devices=[k]) for k in range(4)]

    def f(w, x):
        for layer in layers:
            x = layer(w, x)
        return jnp.sum(x)

    w, x = parameters()["front"], rows()
    assert len({id(body) for body in task_bodies(f, w, x)}) == 1
    forward, backward = task_bodies(jax.grad(f), w, x)[:4], task_bodies(jax.grad(f), w, x)[4:]
    assert len(forward) == len(backward) == 4
    assert len({id(body) for body in forward[1:]}) == 1  # x of the first layer has no gradient
    assert_agrees(jax.value_and_grad(f), w, x)


def test_tasks_that_differ_in_more_than_their_equations():
    """In the rule for a derivative, in a number; what they close over is an operand, so that these two are equal."""

    def scaled_gradient(factor):
        @jax.custom_vjp
        def identity(x):
            return x * 1.0

        identity.defvjp(lambda x: (x * 1.0, None), lambda _, g: (factor * g,))
        return identity

    def f(w, x):
        hidden = jnp.sin(w)
        x = mm.task(scaled_gradient(2.0), "two", devices=[0])(x @ w)
        x = mm.task(scaled_gradient(3.0), "three", devices=[0])(x)
        x = mm.task(lambda x: x @ hidden, "inside", devices=[1])(x)
        hidden = jnp.cos(w)
        x = mm.task(lambda x: x @ hidden, "outside", devices=[1])(x)
        for k in range(2):
            x = mm.task(lambda x, k=k: x * (k + 1), "number", devices=[0])(x)
        return jnp.mean(x**2)

    assert len({id(body) for body in task_bodies(f, parameters()["front"], rows())}) == 5
    assert_agrees(jax.value_and_grad(f, (0, 1)), parameters()["front"], rows())


def test_random_numbers_drawn_otherwise_are_others():
    """`jax.threefry_partitionable` counts where a key is used: in tasks, and between them."""

    def as_before(key, fun):
        with jax.threefry_partitionable(False):
            return fun(key)

    def noise(key):
        return jax.random.uniform(key, (WIDTH,))

    now = mm.task(lambda key, x: x + noise(key), "now", devices=[0])
    before = mm.task(lambda key, x: x + as_before(key, noise), "before", devices=[1])

    def f(key, x):
        x = before(key, now(key, x))
        first, second = as_before(key, jax.random.split), jax.random.split(key)
        return x, now(first[0], x), now(second[0], x)

    assert len({id(body) for body in task_bodies(f, jax.random.key(0), rows())}) == 2
    assert_agrees(f, jax.random.key(0), rows())


def test_equal_tasks_on_submeshes_of_other_shapes():
    """A constraint says something else there."""
    tall = Mesh(np.array(jax.devices()[4:]).reshape(4, 1), ("data", "model"))

    def f(x):
        for mesh in (mesh_2x2(), tall):
            x = mm.task(lambda x: jnp.sin(mm.with_sharding_constraint(x, ("data", "model"))), "wide", mesh=mesh)(x)
        return x

    assert len({id(body) for body in task_bodies(f, rows())}) == 2
    assert_agrees(f, rows())
