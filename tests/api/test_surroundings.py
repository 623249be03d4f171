"""What is around a call changes its program as it changes that of plain JAX, and nothing is left behind."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh import meta
from stages import WIDTH, assert_same, back, front, loss, microbatched, parameters, reference, rows


def noise(x, key):
    return front(jnp.eye(WIDTH), x) + jax.random.normal(key, x.shape)


def test_a_setting_that_changes_random_numbers():
    """The program is made and compiled anew, as under jax.jit."""
    step, key = mm.jit(noise), jax.random.key(0)
    before = step(rows(), key)
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        after = step(rows(), key)
        assert_same(after, reference(noise, rows(), key))
    assert not np.array_equal(before, after)
    assert_same(step(rows(), key), before)
    assert len(step._compiled) == 2


@pytest.mark.parametrize("rules", [meta.logical_axis_rules, nn.logical_axis_rules])
def test_the_surrounding_axis_rules(rules):
    """Ours and Flax's: another rule is another program, the same one again is not."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    constrain = meta.with_logical_constraint if rules is meta.logical_axis_rules else nn.with_logical_constraint
    step = mm.jit(mm.task(lambda x: constrain(2 * x, ("batch", "embed")), "double", mesh=mesh))
    with rules([("batch", None), ("embed", "data")]):
        step(rows())
    with rules([["batch", "data"], ("embed", None)]):
        step(rows())
        step(rows())
    assert len(step._compiled) == 2


CONSTRAINTS = {
    "ours": mm.with_sharding_constraint,
    "meta": meta.with_logical_constraint,
    "flax": nn.with_logical_constraint,
    "a box": lambda x, names: meta.unbox(meta.LogicallyPartitioned(x, names)),
}


@pytest.mark.parametrize("constrain", CONSTRAINTS.values(), ids=CONSTRAINTS)
@pytest.mark.parametrize("rules", [meta.logical_axis_rules, nn.logical_axis_rules])
def test_rules_around_count_for_every_name_in_a_task(rules, constrain):
    """One meaning of names, whoever says them: the task's own first, then those around it, as far as its submesh has the axes.

    So it is in a task inside another one, whose rules come before those around both.
    """
    stages = mm.submeshes(jax.make_mesh((2, 2, 2), ("stage", "data", "model")), "stage")
    around = [("batch", ("stage", "data")), ("embed", "stage"), ("hidden", "model")]

    def double(x):
        return constrain(2 * x, ("batch", "hidden"))

    whole = mm.task(double, "double", mesh=stages[1])
    own = mm.task(double, "double", mesh=stages[1], logical_axes=[("hidden", None)])
    other = mm.task(double, "double", mesh=stages[1], logical_axes=[("embed", "model")])
    inside = mm.task(mm.task(double, mesh=stages[1]), "double", mesh=stages[1], logical_axes=[("hidden", None)])
    x = jnp.ones((4, 8))
    with rules(around):
        found = [tuple(mm.jit(task)(x).sharding.spec) for task in (whole, own, other, inside)]
    assert found == [("data", "model"), ("data",), ("data", "model"), ("data",)]


@pytest.mark.parametrize("rules", [meta.logical_axis_rules, nn.logical_axis_rules])
def test_rules_around_count_in_tasks_that_scopes_make(rules):
    """And for a constraint outside every task: it knows them where it ends."""

    def step(x):
        with jax.named_scope("double"):
            y = mm.with_sharding_constraint(2 * x, ("batch", "hidden"))
        return y, mm.with_sharding_constraint(y.T, ("hidden", "batch"))

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    with mm.register_task("double", mesh=mesh), rules([("batch", "data"), ("hidden", "model")]):
        inside, outside = mm.jit(step)(jnp.ones((4, 8)))
    assert (tuple(inside.sharding.spec), tuple(outside.sharding.spec)) == (("data", "model"), ("model", "data"))


def test_names_that_neither_a_task_nor_the_rules_around_it_know():
    """What is known is said, device axes left out."""
    task = mm.task(
        lambda x: mm.with_sharding_constraint(2 * x, ("batch", "hiden")), "double", devices=[0], device_axes=["d"]
    )
    with (
        meta.logical_axis_rules([("batch", None), ("hidden", "d")]),
        pytest.warns(UserWarning, match=r"'hiden' .* \(the rules know \['batch', 'hidden'\]\).*did you mean 'hidden'"),
    ):
        mm.jit(task).lower(jnp.ones((4, 8)))


def test_an_ambient_mesh_is_no_other_program():
    """It is hidden while a step is traced, so that calls inside and outside share one program."""
    step = mm.jit(noise)
    step(rows(), jax.random.key(0))
    with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("data",))):
        step(rows(), jax.random.key(0))
    assert len(step._compiled) == 1


def trained(p, x, count=None):
    """A gradient through collectives by hand, once or as often as a loop says that the host runs."""

    def centred(w, x):
        def by_hand(w, x):
            return jnp.tanh(x @ w) - jax.lax.pmean(x.mean(), "data")

        return jax.shard_map(by_hand, in_specs=(P(), P("data")), out_specs=P("data"))(w, x)

    devices = np.array(jax.devices())
    one, two = (mm.task(centred, n, mesh=Mesh(devices[i : i + 2], ("data",))) for n, i in (("one", 0), ("two", 2)))
    grad = jax.grad(lambda p: jnp.mean(two(p["back"], one(p["front"], x)) ** 2))
    return grad(p) if count is None else jax.lax.fori_loop(0, count, lambda _, p: grad(p), p)


@pytest.mark.parametrize("count", [(), (2,)], ids=["once", "looped"])
def test_an_ambient_mesh_of_another_size_has_no_say_after_the_trace(count):
    """Where it was set first when the step was split, reported or compiled, too; all of which run rules of JAX's own."""
    expected = mm.jit(trained)(parameters(), rows(), *count)
    traced = mm.jit(trained).trace(parameters(), rows(), *count)
    lowered = mm.jit(trained).lower(parameters(), rows(), *count)
    step = mm.jit(trained)
    step(parameters(), rows(16), *count)
    with jax.set_mesh(Mesh(np.array(jax.devices()).reshape(2, 4), ("stage", "data"))):
        results = [step(parameters(), rows(), *count)]
        jax.tree.leaves((traced.lower().arguments, lowered.arguments, lowered.out_info))
        results += [
            lowered.compile()(parameters(), rows(), *count),
            traced.lower().compile()(parameters(), rows(), *count),
        ]
    for result in results:
        assert_same(result, expected)


def test_an_ambient_mesh_of_another_size_has_no_say_in_a_call():
    """In which a donated argument is handed through; and where fragments are timed."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    update = microbatched(lambda p, x: front(p["front"], x), reduce="concat")
    with jax.set_mesh(mesh):
        compiled = mm.jit(lambda p, x: (p, update(p, x)), donate_argnums=0).lower(parameters(), rows()).compile()
        given = parameters()
        assert compiled.durations(given, rows()) and compiled.measure(given, rows()).forward
        kept, result = compiled(given, rows())
    assert given["front"].is_deleted()
    assert_same((kept, result), (parameters(), jnp.tanh(rows() @ parameters()["front"])))


def test_a_step_without_tasks_is_where_its_arguments_are():
    """Also when it was called with arguments elsewhere before."""
    step, double = mm.jit(lambda x: x + 1), mm.jit(lambda x: front(jnp.eye(WIDTH), x))
    mesh = Mesh(np.array(jax.devices()[4:6]), ("data",))
    places = [jax.devices()[0], jax.devices()[3], NamedSharding(mesh, P("data")), jax.devices()[3]]
    for place in places:
        x = jax.device_put(rows(), place)
        assert step(x).sharding.device_set == x.sharding.device_set
        double(x)
    assert len(step._compiled) == 3
    assert len(double._compiled) == 1  # a task says where it is


def test_a_step_without_tasks_is_on_the_default_device():
    """Where nothing that it is given was put anywhere, as under jax.jit; what was put somewhere has the last word."""
    step, x = mm.jit(lambda x: x + 1), np.ones(2, np.float32)
    first, other, third = jax.devices()[:3]
    assert step(x).devices() == {first}
    for said, device in ((other, other), ("cpu", first), (None, first)):
        with jax.default_device(said):
            for given in (x, jnp.asarray(x)):
                assert step(given).devices() == jax.jit(step.fun)(given).devices() == {device}
            assert step(jax.device_put(x, third)).devices() == {third}


MESH = Mesh(np.array(jax.devices()[4:8]), ("data",))
ON_MESH = NamedSharding(MESH, P("data"))


@pytest.mark.parametrize(
    "named",
    [
        lambda x: jax.shard_map(lambda x: 2 * x, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(x),
        lambda x: jax.lax.with_sharding_constraint(2 * x, ON_MESH),
        lambda x: jax.device_put(2 * x, ON_MESH) + 1,
        lambda x: jax.lax.map(lambda x: jax.lax.with_sharding_constraint(2 * x, NamedSharding(MESH, P())), x),
    ],
    ids=["shard_map", "constraint", "put", "in a loop"],
)
def test_a_step_without_tasks_is_on_the_mesh_that_it_names(named):
    """Where its arguments are nowhere yet, as under jax.jit."""
    step = mm.jit(named)
    for x in (rows(), step(rows())):  # the second one is there
        y = step(x)
        assert y.sharding.device_set == set(MESH.devices.flat)
        assert_same(y, jax.jit(named)(x))
    with pytest.raises(ValueError, match="incompatible devices"):
        step(jax.device_put(rows(), jax.devices()[0]))


def test_the_second_step_without_tasks_is_the_same_program():
    """What may go anywhere comes back from somewhere; and what was nowhere before goes there too."""
    step = mm.jit(lambda state, x: {"w": state["w"] - 0.1 * x.sum(), "count": state["count"] + 1})
    state = {"w": np.ones(WIDTH, np.float32), "count": np.int32(0)}
    for _ in range(3):
        state = step(state, np.ones(4, np.float32))
    assert len({id(compiled) for compiled in step._compiled.values()}) == 1
    assert int(state["count"]) == 3
    elsewhere = jax.device_put(state, jax.devices()[2])
    assert step(elsewhere, np.ones(4, np.float32))["w"].devices() == {jax.devices()[2]}
    assert len({id(compiled) for compiled in step._compiled.values()}) == 2


def test_without_jit_a_step_is_the_plain_function():
    """As jax.jit is, and later calls compile as ever; with the first one of a process at that."""
    seen = []

    def step(p, x):
        seen.append(isinstance(x, jax.core.Tracer))
        return mm.microbatch(loss, argnum=1, num_microbatches=2)(p, x)

    jitted = mm.jit(step)
    with jax.disable_jit():
        plain = jitted(parameters(), rows())
        program = jitted.lower(parameters(), rows()).program
    assert seen == [False, True]
    assert [f.name for f in program.fragments if f.tasks] == ["front", "back"]
    assert_same(jitted(parameters(), rows()), plain)


def test_a_number_that_comes_back_as_an_array_compiles_once():
    """The count of steps of a Flax TrainState is a Python int first, then the weakly typed array that the step made."""
    state = TrainState.create(apply_fn=None, params=parameters(), tx=optax.sgd(0.1))

    @mm.jit
    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state.params, x)
        return value, state.apply_gradients(grads=grads)

    assert state.step == 0 and type(state.step) is int
    for _ in range(3):
        _, state = step(state, rows())
    assert int(state.step) == 3
    assert len(step._compiled) == 1


def test_python_numbers_of_several_kinds_are_several_programs():
    """A bool, an int and a float promote differently."""
    step = mm.jit(lambda x, n: front(jnp.eye(WIDTH), x) * n)
    for number in (True, 2, 3, 0.5, 1.5, 2j):
        assert_same(step(rows(), number), reference(step, rows(), number))
    assert len(step._compiled) == 4


def test_a_key_closed_over_by_a_task_and_by_an_inner_jit():
    """A typed key is a constant like any other."""
    key = jax.random.key(7)

    @jax.jit
    def more(x):
        return x + jax.random.normal(key, x.shape)

    noisy = mm.task(lambda x: x * jax.random.bernoulli(key, 0.5, x.shape), "noisy", devices=[1])

    def step(x):
        return more(noisy(front(jnp.eye(WIDTH), x)))

    assert_same(mm.jit(step)(rows()), reference(step, rows()))


def test_python_numbers_that_a_task_returns_stay_static():
    """As strings do: the code after the task may branch on them."""

    def describe(x):
        return {"x": 2 * x, "rows": x.shape[0], "scale": 0.5, "even": True}

    def step(x):
        out = mm.task(describe, "describe", devices=[1])(front(jnp.eye(WIDTH), x))
        assert [type(out[k]) for k in ("rows", "scale", "even")] == [int, float, bool]
        return out["x"].reshape(out["rows"], -1) * out["scale"] if out["even"] else back(jnp.eye(WIDTH), out["x"])

    assert_same(mm.jit(step)(rows()), reference(step, rows()))


def test_nan_checks_name_the_task_and_the_line():
    """JAX's public error, from the forward pass, the backward pass and code between tasks."""
    logs = mm.task(jnp.log, "logs", devices=[1])
    roots = mm.task(lambda x: jnp.sqrt(x), "roots", devices=[1])
    x = -jnp.ones((2, WIDTH))
    steps = {
        "task 'logs', at": lambda x: back(jnp.eye(WIDTH), logs(front(jnp.eye(WIDTH), x))),
        "the backward pass of task 'front', at .*stages.py.*dense": jax.grad(
            lambda x: roots(front(jnp.eye(WIDTH), 0 * x)).sum()
        ),
        "task 'front', at .*test_surroundings.py": lambda x: front(jnp.eye(WIDTH), jnp.log(x)),
        r"what is outside of tasks on submesh \d, at .*test_surroundings.py": lambda x: jax.tree.map(
            lambda g: jnp.log(-1 - g**2), microbatched(jax.grad(loss), num_microbatches=2)(parameters(), x)
        ),
    }
    with jax.debug_nans(True):
        for words, fun in steps.items():
            with pytest.raises(FloatingPointError, match=f"NaN in a result of .*{words}") as caught:
                mm.jit(fun, donate_argnums=0)(x)
            assert "'jit(" not in str(caught.value)
        assert not x.is_deleted()  # nothing is donated, so that the step can be repeated
    assert mm.jit(steps["task 'logs', at"])(x).shape == x.shape


def test_a_nan_whose_step_cannot_run_once_more_names_the_task():
    """Also one that ran well before, which JAX itself knows as one of its jits."""

    @mm.jit
    def step(x):
        assert isinstance(x, jax.core.Tracer)
        return logs(front(jnp.eye(WIDTH), x))

    logs = mm.task(jnp.log, "logs", devices=[1])
    with jax.debug_nans(True):
        step(jnp.ones((2, WIDTH)))
        with pytest.raises(FloatingPointError, match="NaN in a result of task 'logs'; jax_debug_nans"):
            step(-jnp.ones((2, WIDTH)))


def test_a_nan_is_looked_for_where_jax_no_longer_does():
    """After a `jax.numpy.var`, say, JAX does not heed a setting of all threads in compiled functions of this one."""
    logs = mm.task(jnp.log, "logs", devices=[1])
    step = mm.jit(lambda x: logs(front(jnp.eye(WIDTH), x)))
    jax.config.update("jax_debug_nans", True)
    try:
        step(jnp.ones((2, WIDTH)))
        with jax.debug_nans(False):
            pass
        with pytest.raises(FloatingPointError, match="task 'logs', at"):
            step(-jnp.ones((2, WIDTH)))
    finally:
        jax.config.update("jax_debug_nans", False)


def test_a_donated_state_that_is_not_returned_is_told():
    """Deleted by the call, it is lost; a warning as from jax.jit, and an error that does not speak of a result it has not."""
    step = mm.jit(lambda p, x: loss(p, x), donate_argnums=0)
    state = parameters()
    with pytest.warns(UserWarning, match=r"args\[0\]\['back'\], args\[0\]\['front'\]: donated.*no result is left"):
        step(state, rows())
    with pytest.raises(
        RuntimeError, match="donated to an earlier call, which deletes it: pass what that call returned"
    ):
        step(state, rows())
    kept = mm.jit(lambda p, q, x: (jax.tree.map(lambda w: 2 * w, p), loss(p, x)), donate_argnums=(0, 1))
    # The first take all there is.
    with pytest.warns(UserWarning, match=r"args\[1\]\['back'\], args\[1\]\['front'\]: donated"):
        kept.lower(parameters(), parameters(), rows())
    mm.jit(lambda p, x: (p, loss(p, x)), donate_argnums=0).lower(parameters(), rows())


def test_a_tracer_is_refused_in_the_same_words_before_and_after_a_call():
    step, args = mm.jit(loss), (parameters(), rows())
    for _ in range(2):
        with pytest.raises(mm.errors.ArgumentError, match="is a tracer.*jax.eval_shape.*the step's own eval_shape"):
            jax.eval_shape(step, *args)
        step(*args)


@pytest.mark.parametrize("place", [0, 3])
def test_a_donated_argument_is_deleted_however_it_is_used(place):
    """Read, moved, handed through, handed through twice, or all of these: as under jax.jit, and results stay good."""
    steps = [
        lambda x: x,
        lambda x: (x, x, 2 * x),
        lambda x: (x, front(jnp.eye(WIDTH), x)),
        lambda x: back(jnp.eye(WIDTH), x),
    ]
    for step in steps:
        x = jax.device_put(rows(), jax.devices()[place])
        expected = reference(step, rows())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jax.jit's own, of a donated buffer that is of no use
            results = mm.jit(step, donate_argnums=0)(x)
        assert x.is_deleted()
        assert_same(results, expected)


def test_names_of_flax_follow_the_task_around_a_model():
    """``nn.with_logical_constraint`` and boxes in a model that a plain function applies read the task's logical axes."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "hidden"))
            return nn.with_logical_constraint(nn.Dense(WIDTH, use_bias=False, kernel_init=init)(x), ("batch", "out"))

    variables = Model().init(jax.random.key(0), rows())
    layouts = []
    nothing = dict.fromkeys(["batch", "embed", "hidden", "out"])
    for name in ("batch", "hidden", "out"):
        task = mm.task(Model().apply, "model", mesh=mesh, logical_axes={**nothing, name: "data"})
        compiled = mm.jit(task).lower(variables, rows()).compile()
        kernel = compiled.input_shardings[0][0]["params"]["Dense_0"]["kernel"].value
        layouts.append((kernel.spec, compiled.output_shardings.spec))
    assert tuple(layouts[1][0]) == (None, "data")
    assert [tuple(spec)[:2] for _, spec in layouts[::2]] == [("data",), (None, "data")]


def test_keys_are_looked_after_in_the_whole_step():
    """``jax_debug_key_reuse``: a key used twice is an error, one that is split over fragments is none."""

    def step(p, x, key):
        key, sub = jax.random.split(key)
        dropped = lambda p, x, k: loss(p, x * jax.random.bernoulli(k, 0.5, x.shape))  # noqa: E731
        grads = mm.microbatch(jax.grad(dropped), argnum=1, num_microbatches=2, rng_argnum=2)(p, x, sub)
        return grads, key

    args = parameters(), rows(), jax.random.key(0)
    with jax.debug_key_reuse(True):
        assert_same(mm.jit(step)(*args)[0], reference(step, *args)[0])
        with pytest.raises(jax.errors.KeyReuseError):
            mm.jit(lambda p, x, key: noise(x, key) + noise(x, key))(*args)


def test_an_argument_without_a_name_is_static_or_donated_by_its_number() -> None:
    """A keyword that is called like it is another argument."""
    task = mm.task(lambda x: 2 * x, "task", devices=[1])

    def step(k, /, x, **more):
        return task(x) * k + more["k"]

    other = jnp.ones(2)
    assert mm.jit(step, static_argnums=0)(3, jnp.ones(2), k=other).tolist() == [7.0, 7.0]
    assert mm.jit(step, donate_argnums=0)(jnp.ones(2), jnp.ones(2), k=other).tolist() == [3.0, 3.0]
    assert not other.is_deleted()
