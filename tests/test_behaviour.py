"""Nothing is silently wrong: whatever plain JAX computes, the compiled step computes."""

import collections
import dataclasses
import functools
import gc
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from stages import (
    WIDTH,
    assert_agrees,
    assert_same,
    back,
    dense,
    front,
    loss,
    microbatched,
    parameters,
    reference,
    rows,
)

# Arguments


def test_weights_and_batch_are_fresh_on_every_call():
    """No value of an earlier call is baked into a program."""
    step = mm.jit(microbatched())
    for seed in range(3):
        args = parameters(seed), rows(8, seed + 10)
        assert_same(step(*args), reference(step, *args))


def test_a_closed_over_array_is_read_anew_when_the_step_is_traced_anew():
    """Executables are shared by structure; the constants of a program are never shared with another one."""
    scale = {"value": jnp.full((WIDTH,), 2.0)}

    def step(x):
        return back(jnp.eye(WIDTH), front(jnp.eye(WIDTH), x) * scale["value"])

    jitted = mm.jit(step)
    assert_same(jitted(rows(2)), reference(step, rows(2)))
    scale["value"] = jnp.full((WIDTH,), 5.0)
    assert_same(jitted(rows(4)), reference(step, rows(4)))
    jitted.clear_cache()
    assert_same(jitted(rows(2)), reference(step, rows(2)))


def test_a_closed_over_python_number_is_read_anew_when_the_step_is_traced_anew():
    """Literals are part of what makes an executable."""
    power = {"value": 2.0}

    def step(x):
        return front(jnp.eye(WIDTH), x) * power["value"]

    jitted = mm.jit(step)
    jitted(rows(2))
    power["value"] = 3.0
    assert_same(jitted(rows(4)), reference(step, rows(4)))
    jitted.clear_cache()
    assert_same(jitted(rows(2)), reference(step, rows(2)))


def test_a_second_batch_shape_compiles_a_second_program():
    """Both programs stay usable side by side."""
    step = mm.jit(microbatched())
    for count in (8, 16, 8):
        assert_same(step(parameters(), rows(count)), reference(step, parameters(), rows(count)))


def test_a_second_dtype_compiles_a_second_program():
    """A float and an integer batch of one shape do not share a program."""
    step = mm.jit(lambda x: back(jnp.eye(WIDTH), front(jnp.eye(WIDTH), x * 2)))
    for x in (jnp.ones((2, WIDTH)), jnp.ones((2, WIDTH), jnp.int32), jnp.ones((2, WIDTH), jnp.bfloat16)):
        assert_same(step(x), reference(step, x))


@pytest.mark.parametrize(("wide", "narrow"), [("int64", "int32"), ("uint64", "uint32"), ("float64", "float32")])
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # JAX 0.12, of the shape
def test_host_values_of_64_bits_are_what_jax_makes_of_them(wide, narrow):
    """They share the program of 32 bits where 64 are switched off, as arrays, as scalars and as shapes, and not where they are on."""
    step = mm.jit(lambda x, by: front(jnp.eye(WIDTH), x + by))
    shape = functools.partial(jax.ShapeDtypeStruct, (2, WIDTH))
    step.prepare(shape(wide), np.dtype(narrow).type(1))
    for dtype, other in ((narrow, wide), (wide, narrow), (wide, wide)):
        args = np.ones((2, WIDTH), dtype), np.dtype(other).type(1)
        assert_same(step(*args), reference(step, *args))
    assert repr(step).endswith("1 program compiled")
    with jax.enable_x64(True):
        for dtype in (wide, narrow, wide):
            args = np.ones((2, WIDTH), dtype), np.dtype(narrow).type(1)
            assert_same(step(*args), reference(step, *args))
    assert repr(step).endswith("3 programs compiled")


def test_keyword_arguments_and_defaults():
    """They mean what they mean in a call of the plain function, in any order."""

    def step(params, x, *, scale=3.0, shift):
        return loss(params, x) * scale + shift

    assert_agrees(step, parameters(), rows(), shift=jnp.float32(1))
    assert_agrees(step, parameters(), shift=1.0, x=rows(), scale=jnp.float32(2))


def test_lambdas_partials_methods_and_local_functions():
    """Anything callable can be a step or a task."""

    class Model:
        def __init__(self, w):
            self.w = w

        def __call__(self, x):
            return x @ self.w

        def method(self, x):
            return x + self.w[0]

    def local(x):
        model = Model(jnp.eye(WIDTH) * 3)
        x = mm.task(model, devices=[0])(x)
        x = mm.task(model.method, devices=[1])(x)
        x = mm.task(functools.partial(jnp.multiply, 2.0), devices=[0])(x)
        return mm.task(lambda y: y - 1, devices=[1])(x)

    assert_agrees(local, rows())
    assert_agrees(lambda x: local(x), rows())
    assert_same(mm.jit(functools.partial(local))(rows()), reference(local, rows()))


def test_static_arguments_by_position_and_by_name():
    """Each distinct value makes its own program; both ways of naming it are one."""

    def step(x, power, mode="a"):
        y = front(jnp.eye(WIDTH), x)
        return back(jnp.eye(WIDTH), y * power) if mode == "a" else y

    by_number, by_name = mm.jit(step, static_argnums=(1, 2)), mm.jit(step, static_argnames=("power", "mode"))
    for jitted in (by_number, by_name):
        assert_same(jitted(rows(), 2), reference(step, rows(), 2))
        assert_same(jitted(rows(), 3), reference(step, rows(), 3))
        assert_same(jitted(rows(), power=3, mode="b"), reference(step, rows(), 3, "b"))


def test_equal_static_arguments_of_different_types_are_different():
    """1, 1.0 and True are equal to Python; the results differ in dtype."""
    step = mm.jit(lambda x, by: front(jnp.eye(2, dtype=x.dtype), x) if by is True else x * by, static_argnums=1)
    for by in (1, 1.0, True):
        assert_same(step(jnp.arange(4).reshape(2, 2), by), reference(step, jnp.arange(4).reshape(2, 2), by))


def test_nested_pytrees_none_and_empty_containers():
    """Structures survive on the way in and on the way out."""

    def step(tree, nothing):
        y = front(tree["a"][0], tree["b"]["x"])
        return {"y": back(tree["a"][1], y), "none": None, "empty": ({}, [], ()), "nothing": nothing, "list": [y, (y,)]}

    p = parameters()
    assert_agrees(step, {"a": (p["front"], p["back"], None), "b": {"x": rows(), "e": {}}}, None)


def test_numpy_and_python_scalars():
    """Host values are arguments like any other; Python scalars stay weakly typed."""

    def step(x, factor, count, flag):
        y = front(jnp.eye(WIDTH, dtype=jnp.bfloat16), x.astype(jnp.bfloat16)) * factor
        return jnp.where(flag, y, -y), y * count, factor * 2, count + 1

    x = np.ones((2, WIDTH))
    assert_agrees(step, x, 0.5, 3, True)
    assert_agrees(step, x, np.float32(0.5), np.int32(3), np.bool_(False))
    step = mm.jit(step)
    assert_same(step(x, 0.5, 3, True), reference(step, x, 0.5, 3, True))
    assert_same(step(x, 0.25, 4, False), reference(step, x, 0.25, 4, False))
    assert_same(step(x, 1, 4, False), reference(step, x, 1, 4, False))


def test_python_numbers_and_strings_given_to_a_task_stay_static():
    """A task sees the Python value, not a tracer."""

    def act(x, kind, times, flag=False, nothing=None):
        assert isinstance(times, int) and flag is True and nothing is None
        for _ in range(times):
            x = getattr(jnp, kind)(x)
        return {"x": x, "kind": kind, "times": times}

    run = mm.task(act, devices=[1])

    def step(x):
        out = run(front(jnp.eye(WIDTH), x), "sin", 2, flag=True)
        assert out["kind"] == "sin"
        return out["x"] * out["times"]

    assert_agrees(step, rows())


def test_typed_random_keys_are_arguments_and_results():
    """A key goes in, is split, and comes out as a key."""

    def step(key, x):
        key, use = jax.random.split(key)
        y = front(jnp.eye(WIDTH), x + jax.random.normal(use, x.shape))
        return key, mm.task(lambda k, y: y * jax.random.bernoulli(k, 0.5, y.shape), devices=[1])(use, y)

    assert_agrees(step, jax.random.key(3), rows())
    assert_agrees(step, jax.random.PRNGKey(3), rows())


def test_registered_dataclasses_and_named_tuples():
    """Any pytree node, with static fields of its own."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        w: jax.Array
        name: str = dataclasses.field(metadata={"static": True}, default="x")

    pair = collections.namedtuple("pair", "w rest")
    assert_agrees(lambda s, x: State(front(s.w, x), s.name + "y"), State(parameters()["front"]), rows())
    assert_agrees(lambda t, x: pair(front(t.w, x), None), pair(parameters()["front"], None), rows())


def test_a_step_as_a_method():
    """The instance is an argument, as with jax.jit."""

    class Model:
        w = 2 * jnp.eye(WIDTH)

        @functools.partial(mm.jit, static_argnums=0)
        def step(self, x):
            """Says something."""
            return front(self.w, x)

    assert_same(Model().step(rows()), dense(2 * jnp.eye(WIDTH), rows()))
    assert (Model.step.__name__, Model.step.__doc__) == ("step", "Says something.")


def test_a_decorator_with_arguments():
    """As `jax.jit` without a function."""

    @mm.jit(donate_argnums=0)
    def step(x):
        return front(jnp.eye(WIDTH), x)

    x = rows()
    assert_same(step(x), dense(jnp.eye(WIDTH), rows()))
    assert x.is_deleted()
    with pytest.raises(mm.errors.ArgumentError, match="takes a function, found NoneType"):
        mm.jit(None)
    with pytest.raises(
        mm.errors.MicrobatchError, match=r"expected a function, found tuple .*; write microbatch\(jax.value"
    ):
        mm.microbatch((1.0, 2.0), argnum=1, num_microbatches=2)


def test_counts_are_where_what_they_count_is():
    """Of a metric in the state and of one in the results, so that their means can be computed outside of the step."""

    def step(metric, p, x, mask):
        value = loss(p, x)
        metric = {"total": metric["total"] + value, "count": metric["count"] + 1}
        return (value, {"correct": value * 2, "of": mask.sum(), "rows": len(x)}), metric

    first = {"total": jnp.zeros(()), "count": jnp.zeros((), jnp.int32)}
    mask = np.ones(8, bool)
    (_, seen), metric = assert_agrees(step, first, parameters(), rows(), mask)
    assert [x.devices() for x in jax.tree.leaves((seen, metric))] == [{jax.devices()[1]}] * 5
    assert float(seen["correct"] / seen["of"] / seen["rows"] + metric["total"] / metric["count"]) > 0


def test_settings_of_jax_that_change_a_program_make_another_one():
    """Numbers are 64 bits wide where the user says so, also after a call where they were not."""
    step = mm.jit(lambda n: (jnp.arange(3) * n, front(jnp.eye(2), jnp.ones((2, 2)))))
    assert step(2)[0].dtype == jnp.int32
    with jax.enable_x64(True):
        assert step(2)[0].dtype == jnp.int64
    product = mm.jit(lambda x: mm.task(jnp.matmul, "product", devices=[0])(x, x))
    product(jnp.eye(2))
    with jax.default_matmul_precision("highest"):
        product(jnp.eye(2))
    assert len(product._compiled) == 2


def test_arrays_of_64_bits_where_these_are_switched_off():
    """Refused before anything runs, as a trace would take them for 32 bits."""
    with jax.enable_x64(True):
        x = jnp.ones((8, WIDTH), "float64")
    with pytest.raises(
        mm.errors.ArgumentError, match=r"args\[1\] is an array of dtype float64.* float32; .*enable_x64\(True\)"
    ):
        mm.jit(loss)(parameters(), x)
    with jax.enable_x64(True):
        assert mm.jit(loss)(parameters(), x).dtype == jnp.float64


def test_64_bits_that_a_step_switches_on_for_a_part():
    """What it makes there is read by a task, and row by row, where they are switched off again."""

    def f(p, x):
        with jax.enable_x64(True):
            number = (100 * x).astype("int64") + 2**40
            h = x.astype("float64") + 1e-9

        def narrow(w, h):  # makes it one of 32 bits
            return jnp.sin(lax.convert_element_type(h, "float32") @ w)

        h = mm.task(narrow, "narrow", devices=[0])(p["front"], h)
        return lax.scan(lambda h, row: (back(p["back"], h), row), h, number)

    assert assert_agrees(f, parameters(), rows(3))[1].dtype == "int64"


def test_64_bits_where_they_are_allowed_and_not_the_default():
    """With ``jax_explicit_x64_dtypes``, also the zeros with which the sums of a loop begin."""
    before = jax.config.jax_explicit_x64_dtypes  # type: ignore[attr-defined]  # JAX adds its settings as it is imported
    jax.config.update("jax_explicit_x64_dtypes", "allow")
    try:
        if jax.typeof(jax.ShapeDtypeStruct((), "float64")).dtype != jnp.float64:
            pytest.skip("this version of JAX has no shapes of such types")
        p, x = jax.tree.map(lambda x: x.astype("float64"), (parameters(), rows()))
        assert mm.jit(microbatched())(p, x)[0].dtype == "float64"
        assert_agrees(microbatched(), p, x)
    finally:
        jax.config.update("jax_explicit_x64_dtypes", before)


def test_calls_from_several_threads():
    """Three threads that share a step get their own results."""
    step, results = mm.jit(microbatched()), {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: step(parameters(i), rows())})) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(3):
        assert_same(results[i], reference(step, parameters(i), rows()))


# Results


def test_integer_boolean_and_literal_results():
    """Results that no task computes keep their dtype and value."""

    def step(x):
        y = front(jnp.eye(WIDTH), x)
        return y, jnp.argmax(y, -1), (y > 0).sum(), True, 7, 2.5, jnp.int8(4), jnp.zeros(3), np.arange(2)

    assert_agrees(step, rows())


def test_results_that_are_arguments_unchanged():
    """They come back equal, and are buffers of their own, as with jax.jit."""
    step = mm.jit(lambda p, x: (p, front(p, x), x))
    p, x = parameters()["front"], rows()
    out = step(p, x)
    assert_same(out, reference(step, p, x))
    p.delete(), x.delete()
    assert not out[0].is_deleted() and not out[2].is_deleted()
    np.asarray(out[0])


def test_duplicated_results_are_buffers_of_their_own():
    """Deleting or donating one leaves the other alone, as with jax.jit."""
    step = mm.jit(lambda p, x: (lambda y: (y, y))(front(p, x)))
    one, two = step(parameters()["front"], rows())
    assert_same(one, two)
    one.delete()
    assert not two.is_deleted()


def test_a_literal_result_can_be_deleted_and_comes_back_in_the_next_call():
    """No buffer that the user gets is kept for later."""
    step = mm.jit(lambda p, x: (front(p, x), 3))
    step(parameters()["front"], rows())[1].delete()
    assert int(step(parameters()["front"], rows())[1]) == 3


def test_a_closed_over_array_as_a_result_can_be_deleted_and_comes_back():
    """A constant of the program is not handed out itself."""
    constant = jnp.arange(3.0)
    step = mm.jit(lambda p, x: (front(p, x), constant))
    step(parameters()["front"], rows())[1].delete()
    assert_same(step(parameters()["front"], rows())[1], jnp.arange(3.0))


def test_a_step_without_results():
    """A function that returns nothing returns nothing."""
    assert mm.jit(lambda x: None)(rows()) is None
    assert mm.jit(lambda: ())() == ()

    def step(x):
        front(jnp.eye(WIDTH), x)
        return {"nothing": None}

    assert mm.jit(step)(rows()) == {"nothing": None}


def test_a_step_without_tasks_runs_where_its_arguments_are():
    """A function that names no submesh is jax.jit's."""
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[4:], axis_types=(AxisType.Auto,))
    x = jax.device_put(rows(), NamedSharding(mesh, P("d")))
    y = mm.jit(lambda x: x * 2)(x)
    assert_same(y, rows() * 2)
    assert y.sharding.device_set == set(jax.devices()[4:])
    assert mm.jit(lambda: jnp.arange(3))().tolist() == [0, 1, 2]
    committed = jax.device_put(rows(), jax.devices()[3])
    assert mm.jit(lambda x: x * 2)(committed).devices() == {jax.devices()[3]}


def test_empty_arrays():
    """Arrays without elements pass through tasks, loops and submeshes."""
    assert_agrees(lambda w, x: back(w, front(w, x)), jnp.eye(WIDTH), jnp.zeros((0, WIDTH)))


def test_weak_types_are_those_of_jax():
    """So that feeding a result back compiles no second program."""

    def step(x, n):
        return front(jnp.eye(WIDTH), x), n + 1, n * 2.0, 3, 2.5, True, jnp.sum(x) * n

    actual, expected = mm.jit(step)(rows(), 2), reference(jax.jit(step), rows(), 2)
    assert [v.weak_type for v in actual] == [v.weak_type for v in expected]


def test_in_and_out_shardings_say_where():
    """A sharding by name of a submesh, for what no task computes; static arguments are not counted."""
    s = NamedSharding(Mesh(np.array(jax.devices()[2:4]), ("d",)), P("d"))
    f = mm.jit(
        lambda n, x, y: (x * n, back(jnp.eye(WIDTH), y)),
        static_argnums=0, in_shardings=(s, None), out_shardings=(s, None),
    )  # fmt: skip
    doubled, y = f(2, rows(), rows())
    assert doubled.sharding == s and y.devices() == {jax.devices()[1]}
    assert_same(doubled, rows() * 2)
    assert f.lower(2, rows(), rows()).compile().output_shardings[0] == s


def test_shardings_of_one_device():
    """As `jax.jit` takes them; that of a task's only device is the submesh of the task."""
    here, there, other = map(jax.sharding.SingleDeviceSharding, jax.devices()[:3])
    task = mm.task(lambda p, x: jnp.tanh(x @ p["w"]), "only", devices=[1])
    step = mm.jit(lambda p, x: (task(p, x), x.sum()), in_shardings=(there, here), out_shardings=(other, here))
    lowered = step.lower({"w": jnp.eye(4)}, jnp.ones((2, 4)))
    assert sorted(d.id for mesh in lowered.program.submeshes for d in mesh.devices.flat) == [0, 1, 2]
    y, total = step({"w": jnp.eye(4)}, jnp.ones((2, 4)))
    assert y.devices() == other.device_set and total.devices() == here.device_set and float(total) == 8


def test_out_shardings_on_another_submesh_than_the_task():
    """The result of a task, an argument, literals and results of a loop are brought where they are wanted."""
    mesh = Mesh(np.array(jax.devices()[4:8]), ("d",))
    s, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())

    def step(p, x):
        value, grads = microbatched()(p, x)
        return front(p["front"], x), x, 3, jnp.zeros(4), value, grads

    compiled = mm.jit(step, out_shardings=(s, s, whole, s, whole, s)).lower(parameters(), rows()).compile()
    out = compiled(parameters(), rows())
    jax.tree.map(lambda v, t: np.testing.assert_(v.sharding == t), out, compiled.output_shardings)
    assert [v.sharding for v in out[:5]] == [s, s, whole, s, whole]
    assert_same(out, reference(jax.jit(step), parameters(), rows()))


def test_out_shardings_of_one_value_in_several_places():
    """Each copy lies where it was asked for."""
    one, two = (Mesh(np.array(jax.devices()[i : i + 2]), ("d",)) for i in (4, 6))
    wanted = NamedSharding(one, P("d")), NamedSharding(one, P()), NamedSharding(two, P()), None
    f = mm.jit(lambda p, x: (lambda y: (y, y, y, y))(front(p, x)), out_shardings=wanted)
    out = f(parameters()["front"], rows())
    assert tuple(v.sharding for v in out[:3]) == wanted[:3]
    assert_same(out, (dense(parameters()["front"], rows()),) * 4)


def test_shardings_on_a_part_of_a_submesh():
    """Some devices of a submesh of tasks are as good a place as a submesh of no task."""
    part = NamedSharding(Mesh(np.array(jax.devices()[1:3]), ("d",)), P("d"))
    wide = mm.task(dense, "wide", devices=range(4))
    f = mm.jit(lambda p, x: (wide(p, x), x * 2.0), in_shardings=(None, part), out_shardings=part)
    y, doubled = f(parameters()["front"], rows())
    assert y.sharding == doubled.sharding == part
    assert_same((y, doubled), (dense(parameters()["front"], rows()), rows() * 2.0))


def test_effects_happen_once_for_each_microbatch(capfd):
    """Prints in and between tasks, also where nothing reads what they print."""

    def f(p, x):
        y = front(p["front"], x)
        jax.debug.print("between {}", y.sum())
        loud = mm.task(lambda w, y: (jax.debug.print("inside {}", y.sum()), dense(w, y))[1], "loud", devices=[1])
        return jnp.mean(loud(p["back"], y))

    mm.jit(microbatched(jax.value_and_grad(f)))(parameters(), rows())
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert (printed.count("between"), printed.count("inside")) == (4, 4)

    def dead(p, x):
        mm.task(lambda y: jax.debug.print("inside {}", y.sum()), "dead", devices=[1])(x)
        jax.debug.print("outside {}", x.sum())
        return front(p["front"], x)

    mm.jit(dead)(parameters(), rows())
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert (printed.count("outside"), printed.count("inside")) == (1, 1)


def test_callbacks():
    """Pure ones compute, ordered ones happen."""
    seen = []

    def f(p, x):
        y = front(p["front"], x)
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(y.shape, y.dtype), y, vmap_method="sequential")
        return back(p["back"], y)

    def g(p, x):
        y = front(p["front"], x)
        jax.experimental.io_callback(lambda v: seen.append(float(v)), None, y.sum(), ordered=True)
        return back(p["back"], y)

    assert_agrees(microbatched(f, reduce="concat"), parameters(), rows())
    mm.jit(g)(parameters(), rows())
    jax.effects_barrier()
    assert len(seen) == 1


# Training steps


def train_step(optimizer, p, opt, x, **options):
    value, grads = microbatched(**options)(p, x)
    updates, opt = optimizer.update(grads, opt, p)
    return optax.apply_updates(p, updates), opt, value


def test_ordered_effects_of_scopes_keep_their_turn():
    """Scopes that come up again are tasks of their own where effects of others are between."""
    seen = []

    def told(word, w, x, scope):
        with jax.named_scope(scope):
            jax.debug.callback(lambda _: seen.append(word), x, ordered=True)
            return dense(w, x)

    def step(w, x):
        first, other = told("first", w, x, "one"), told("other", w, x, "two")
        jax.debug.callback(lambda _: seen.append("outside"), x, ordered=True)
        return told("first again", w, first, "one"), told("other again", w, other, "two")

    arguments = jnp.eye(4), rows()
    with mm.register_task("one", devices=[0]), mm.register_task("two", devices=[1]):
        expected = reference(jax.jit(step), *arguments)
        jax.effects_barrier()
        seen.clear()
        assert_same(mm.jit(step)(*arguments), expected)
        jax.effects_barrier()
    assert seen == ["first", "other", "outside", "first again", "other again"]


@pytest.mark.parametrize("looped", [False, True])
def test_ordered_effects_outside_tasks_keep_their_turn(looped):
    """Before those of a task that comes later, also where only the update behind it reads what they go with."""
    seen = []

    def tell(word, x):
        jax.debug.callback(lambda _: seen.append(word), x, ordered=True)

    def layer(w, x):
        tell("task", x.sum())
        return dense(w, x)

    task = mm.task(layer, "layer", devices=[0])

    def rate_of(n):
        ask = jax.experimental.io_callback
        return ask(lambda n: seen.append("rate") or np.float32(0.1 * n), n, n, ordered=True)

    def step(w, n, x):
        rate, halved = rate_of(n), n / 2
        tell("halved", halved)
        grad = jax.value_and_grad(lambda w, x: jnp.mean(task(w, x) ** 2))
        if looped:
            grad = mm.microbatch(grad, argnum=1, num_microbatches=2, reduce="mean", schedule="gpipe")
        value, g = grad(w, x)
        return w - rate * halved * g, value

    arguments = jnp.eye(4), jnp.float32(1), rows()
    expected = reference(jax.jit(step), *arguments)
    jax.effects_barrier()
    plain, seen[:] = [*seen], []
    assert_same(mm.jit(step)(*arguments), expected)
    jax.effects_barrier()
    assert seen == plain == ["rate", "halved", *["task"] * (1 + looped)]


@pytest.mark.parametrize("between", ["a task", "a scan", "a loop", "other submeshes"])
def test_ordered_effects_around_tasks_happen_in_turn(between):
    """Each reads a counter of the host: what it gets is a result of the step."""
    calls = itertools.count()

    def number():
        ask = jax.experimental.io_callback
        return ask(lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), jnp.float32), ordered=True)

    add, plain, other = (
        mm.task(fun, name, devices=[i])
        for fun, name, i in (
            (lambda x: x + number(), "add", 0),
            (lambda x: 2 * x, "plain", 0),
            (lambda x: 3 * x, "other", 1),
        )
    )

    def step(x):
        first = number()
        if between == "a task":
            y = add(x)
        elif between == "a scan":
            y, _ = jax.lax.scan(lambda c, _: (add(add(c) * number()), number()), x, None, length=2)
        elif between == "a loop":
            y = mm.microbatch(add, argnum=0, num_microbatches=2, reduce="concat")(x)
        else:
            y = plain(x) + number()
            first = first - other(number() * y).sum() + number()
        return first, y, number(), plain(y) + number()

    def results(run):
        nonlocal calls
        calls = itertools.count()
        found = jax.block_until_ready(run(rows()))
        jax.effects_barrier()
        return found

    jitted = mm.jit(step)
    with mm.ignore_transforms():
        expected = results(jitted)
    for _ in range(2):
        assert_same(results(jitted), expected)


def test_adamw_with_global_norm_clipping():
    """Three steps of a real optimizer, whose norm reads every submesh."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2))
    step = mm.jit(functools.partial(train_step, optimizer))
    plain = jax.jit(functools.partial(train_step, optimizer))
    state = mine = (parameters(), optimizer.init(parameters()))
    for i in range(3):
        *mine, value = step(*mine, rows(8, i))
        *state, expected = reference(plain, *state, rows(8, i))
        assert_same((tuple(mine), value), (tuple(state), expected))


def test_an_average_of_the_parameters():
    """An exponential moving average beside the parameters stays with them."""

    def step(p, ema, x):
        _, grads = microbatched()(p, x)
        p = jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)
        return p, jax.tree.map(lambda e, w: 0.9 * e + 0.1 * w, ema, p)

    p, ema = assert_agrees(step, parameters(), parameters(), rows())
    for k, device in (("front", 0), ("back", 1)):
        assert p[k].devices() == ema[k].devices() == {jax.devices()[device]}


def test_donated_state_is_used_again():
    """Donate, take the result, go on: the state never has two copies, and the numbers are the plain ones."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = mm.jit(functools.partial(train_step, optimizer), donate_argnums=(0, 1))
    plain = functools.partial(train_step, optimizer)
    mine, state = (parameters(), optimizer.init(parameters())), (parameters(), optimizer.init(parameters()))
    for i in range(3):
        before = jax.tree.leaves(mine)
        *mine, _ = step(*mine, rows(8, i))
        *state, _ = reference(plain, *state, rows(8, i))
        assert all(x.is_deleted() for x in before)
        assert_same(mine, state)


def test_donation_by_name_and_of_nested_state():
    """donate_argnames means the same."""
    step = mm.jit(
        lambda state, x: ({"p": jax.tree.map(jnp.add, state["p"], jax.grad(loss)(state["p"], x))}),
        donate_argnames="state",
    )
    state = {"p": parameters()}
    expected = reference(step, {"p": parameters()}, rows())
    assert_same(step(state=state, x=rows()), expected)
    assert all(w.is_deleted() for w in jax.tree.leaves(state))


def test_negative_numbers_of_arguments_count_from_the_last_one_of_the_function():
    """Whether that one is given by number, by name or not at all: another one was donated, or static, in its place."""
    step = mm.jit(lambda x, state: (front(jnp.eye(WIDTH), x), 2 * state), donate_argnums=-1)
    for call in (step, lambda x, state: step(x, state=state)):
        x, state = rows(), rows()
        call(x, state)
        assert (x.is_deleted(), state.is_deleted()) == (False, True)
    power = mm.jit(lambda x, n=2: front(jnp.eye(WIDTH), x) ** n, static_argnums=-1)
    for given in ({}, {"n": 3}):
        assert_same(power(rows(), **given), reference(power, rows(), **given))


def test_a_donated_argument_that_is_handed_through_is_the_result():
    """Donation of an unchanged part of the state loses nothing, also twice in a row."""
    step = mm.jit(lambda s, x: ({"w": s["w"], "n": s["n"] + 1}, front(s["w"], x)), donate_argnums=0)
    state = {"w": parameters()["front"], "n": jnp.int32(0)}
    for _ in range(3):
        state, y = step(state, rows())
    assert int(state["n"]) == 3
    assert_same(y, dense(parameters()["front"], rows()))


def test_what_is_not_donated_stays_valid():
    """A call leaves every other argument as it was."""
    p, x = parameters(), rows()
    jitted = mm.jit(microbatched(), donate_argnums=())
    jitted(p, x)
    assert_same((p, x), (parameters(), rows()))
    placed = jax.tree.map(jax.device_put, p, {"front": jax.devices()[0], "back": jax.devices()[1]})
    jitted(placed, x), jitted(placed, x)
    assert_same(placed, parameters())


def test_the_same_array_as_two_arguments():
    """One buffer, two parameters."""
    w = parameters()["front"]
    assert_agrees(microbatched(), {"front": w, "back": w}, rows())


def test_donated_arrays_from_another_device():
    """They are brought home, and are gone afterwards."""
    step = mm.jit(lambda p, x: jax.tree.map(jnp.subtract, p, jax.grad(loss)(p, x)), donate_argnums=0)
    elsewhere = jax.device_put(parameters(), jax.devices()[5])
    expected = reference(jax.jit(step.fun), parameters(), rows())
    assert_same(step(elsewhere, rows()), expected)
    assert elsewhere["front"].is_deleted()
    host = {k: np.array(v) for k, v in parameters().items()}
    assert_same(step(host, rows()), expected)
    assert_same(jax.tree.map(jnp.asarray, host), parameters())


# Meshes around the step


def mesh_of(axis_type, shape=(2, 2)):
    return jax.make_mesh(
        shape, ("stage", "data"), axis_types=(axis_type,) * 2, devices=jax.devices()[: shape[0] * shape[1]]
    )


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_called_under_set_mesh(axis_type):
    """An ambient mesh, of either kind, has no say."""
    with jax.set_mesh(mesh_of(axis_type)):
        actual = mm.jit(microbatched())(parameters(), rows())
    assert_same(actual, reference(microbatched(), parameters(), rows()))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_stages_on_the_submeshes_of_a_mesh_of_any_kind(axis_type):
    """Submeshes of jax.make_mesh, with parameters that arrive sharded over them."""
    whole = mesh_of(axis_type)
    meshes = mm.submeshes(whole, "stage")
    rules = (("batch", "data"),)

    def layer(w, x):
        return dense(w, mm.with_sharding_constraint(x, ("batch", None)))

    one, two = (mm.task(layer, n, mesh=m, logical_axes=rules) for n, m in zip("ab", meshes, strict=True))

    def f(p, x):
        return jnp.mean(two(p["back"], one(p["front"], x)) ** 2)

    step = mm.jit(microbatched(jax.value_and_grad(f)))
    expected = reference(step, parameters(), rows())
    assert_same(step(parameters(), rows()), expected)
    p = {
        k: jax.device_put(v, NamedSharding(m, P("data")))
        for (k, v), m in zip(parameters().items(), meshes, strict=True)
    }
    assert_same(step(p, rows()), expected)
    with jax.set_mesh(whole):
        everywhere = jax.device_put(rows(), NamedSharding(whole, P("data")))
        assert_same(step(p, everywhere), expected)
        assert_same(mm.jit(microbatched(jax.value_and_grad(f)))(p, everywhere), expected)


def test_arguments_sharded_over_the_explicit_whole_mesh():
    """Values that carry an Explicit sharding are traced without it."""
    whole = mesh_of(AxisType.Explicit)
    p = jax.tree.map(lambda w: jax.device_put(w, NamedSharding(whole, P("stage", "data"))), parameters())
    x = jax.device_put(rows(), NamedSharding(whole, P("data")))
    assert_same(mm.jit(microbatched())(p, x), reference(microbatched(), parameters(), rows()))


def test_a_task_called_outside_the_compiler_is_the_plain_function():
    """Eagerly, under jax.jit, grad and vmap."""
    expected = jax.value_and_grad(lambda p, x: jnp.mean(dense(p["back"], dense(p["front"], x)) ** 2))(
        parameters(), rows()
    )
    assert_same(jax.value_and_grad(loss)(parameters(), rows()), expected)
    assert_same(jax.jit(jax.value_and_grad(loss))(parameters(), rows()), expected)
    assert_same(jax.vmap(front, (None, 0))(parameters()["front"], rows()), dense(parameters()["front"], rows()))


def test_reference_mode_inside_and_around():
    """It holds for functions made before, and ends with its block."""
    step = mm.jit(microbatched())
    with mm.ignore_transforms():
        plain = step(parameters(), rows())
        assert plain[1]["back"].devices() == {jax.devices()[0]}
    assert_same(step(parameters(), rows()), plain)
    assert step(parameters(), rows())[1]["back"].devices() == {jax.devices()[1]}


def test_a_step_inside_a_step():
    """An inner mm.jit is part of the outer program."""
    inner = mm.jit(loss)
    assert_agrees(lambda p, x: jax.value_and_grad(inner)(p, x), parameters(), rows())


def test_two_steps_that_share_a_model_do_not_share_state():
    """A training and an evaluation step of the same functions, called in turns."""
    train, evaluate = mm.jit(microbatched()), mm.jit(loss)
    for seed in range(2):
        p = parameters(seed)
        assert_same(train(p, rows())[0], reference(train, p, rows())[0])
        assert_same(evaluate(p, rows()), reference(evaluate, p, rows()))


def test_lowered_and_compiled_steps_are_callable():
    """trace, lower and compile take shapes; the result takes arrays."""
    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), (parameters(), rows()))
    step = mm.jit(microbatched())
    compiled = step.trace(*shapes).lower().compile()
    assert_same(compiled(parameters(), rows()), reference(step, parameters(), rows()))
    out = step.eval_shape(*shapes)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), out) == jax.tree.map(
        lambda v: (v.shape, v.dtype), reference(step, parameters(), rows())
    )


def test_shapes_of_results_are_those_of_arguments_of_the_next_call():
    """Also of what is weakly typed: what is prepared for them is not compiled once more when the results come."""

    def step(x, n):
        return front(jnp.eye(WIDTH), x), n + 1

    jitted = mm.jit(step)
    assert jitted.eval_shape(rows(), 0) == jax.eval_shape(step, rows(), 0)
    assert jitted.lower(rows(), 0).out_info[1].weak_type
    jitted.prepare(*jitted.eval_shape(rows(), 0))
    jitted(*jitted(rows(), 0))
    assert "1 program compiled" in repr(jitted)


def test_a_result_that_changes_its_layout_stays_weakly_typed():
    """It is handed through, or made, and asked for in another layout or elsewhere."""
    meshes = [Mesh(np.array(jax.devices()[k : k + 2]), ("d",)) for k in (0, 2)]
    task = mm.task(lambda x: 2 * x, "double", mesh=meshes[0])
    places = [NamedSharding(m, spec) for m in meshes for spec in (P(), P("d"))]
    x = jax.device_put(jnp.full(4, 1.0), places[1])

    def fun(x):
        return task(jnp.ones(4)), x, x, x * 2, x * 2

    found = mm.jit(fun, out_shardings=(None, places[0], places[3], places[0], places[3]))(x)
    assert [y.weak_type for y in found] == [y.weak_type for y in jax.jit(fun)(x)] == [False, True, True, True, True]


def test_nothing_refers_to_arguments_after_the_call():
    """Arrays die when the user lets them go."""
    step = mm.jit(microbatched())
    step(parameters(), rows())
    gc.freeze()  # what other tests left behind takes a second to go through, and some of it would go
    try:
        before = len(jax.live_arrays())
        result = step(parameters(5), rows(8, 5))
        del result
        gc.collect()
        assert len(jax.live_arrays()) == before
    finally:
        gc.unfreeze()


def test_a_function_of_nothing():
    """Every result is a literal, here or where out_shardings say."""
    assert_agrees(lambda: (jnp.ones(()), jnp.zeros(3)))
    where = NamedSharding(Mesh(np.array(jax.devices()[2:3]), ("d",)), P())
    assert mm.jit(lambda: 1.0, out_shardings=where)().devices() == {jax.devices()[2]}


def test_a_callback_between_tasks_is_called_once():
    """Its result is small, and read on two submeshes, which is no reason to call it on both."""
    calls = []

    def temperature():
        calls.append(1)
        return np.float32(len(calls))

    @mm.jit
    def step(x):
        t = jax.pure_callback(temperature, jax.ShapeDtypeStruct((), jnp.float32))
        return back(jnp.eye(WIDTH) * t, front(jnp.eye(WIDTH) * t, x)), t

    for count in (1, 2):
        _, t = jax.block_until_ready(step(rows()))
        assert t == count == len(calls)


def test_calls_of_many_kinds_in_turn_find_their_own_programs():
    double = mm.task(lambda x: x * 2, "double", devices=[1])
    f = mm.jit(lambda tree, by: [double(x) + jnp.asarray(by, x.dtype) for x in tree.values()], static_argnums=1)
    x, y = jnp.ones(3), jnp.ones(3, jnp.int32)
    calls = [
        ({"a": x}, 1),
        ({"b": x}, 1),
        ({"a": x}, True),
        ({"a": x}, 2),
        ({"a": y}, 1),
        ({"a": x[:2]}, 1),
    ]
    calls += [({"a": x.astype(jnp.bfloat16)}, 1), ({"a": np.ones(3, np.float32)}, 1), ({"a": x, "b": y}, 1)]
    for _ in range(3):
        for call in calls:
            for _ in range(2):
                found, wanted = f(*call), [2 * v + call[1] for v in jax.tree.leaves(call[0])]
                assert [(v.shape, v.dtype) for v in found] == [(v.shape, v.dtype) for v in wanted]
                assert all(jnp.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert repr(f) == "mm.jit(<lambda>): 8 programs compiled"
    with jax.enable_x64(True):
        assert f({"a": jnp.ones(3, jnp.float64)}, 1)[0].dtype == jnp.float64
        assert f(*calls[0])[0].dtype == jnp.float32
    assert f(*calls[0])[0].dtype == jnp.float32


def test_the_reference_mode_leaves_a_state_where_its_tasks_put_it():
    """A task that says by itself on which devices it runs has its parameters there in the next step, and no other array."""
    mesh = Mesh(jax.devices()[:2], ("data",))
    body = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    layer = mm.task(body(lambda w, x: jnp.tanh(x * w)), "layer", mesh=mesh)
    step = mm.jit(lambda w, x: w - jax.grad(lambda w: jnp.mean(layer(w, x)))(w))
    with mm.ignore_transforms():
        expected = step(step(jnp.ones(()), rows()), rows())
    assert_same(step(step(jnp.ones(()), rows()), rows()), expected)
