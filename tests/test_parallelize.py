"""`parallelize`: compiled ahead, parameters made in place, batches brought from anywhere."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from stages import assert_same, reference

pytestmark = pytest.mark.once

DEVICES = np.array(jax.devices())
EIGHT = Mesh(DEVICES, ("x",))
SHAPES = {"w1": (16, 32), "w2": (32, 8)}


def model():
    """Two einsum layers: rows of the first weight over devices 0-3, columns of the second over 4-7."""
    one, two = Mesh(DEVICES[:4], ("x",)), Mesh(DEVICES[4:], ("x",))

    def first(w, x):
        w = mm.with_sharding_constraint(w, ("x", None))
        return jnp.einsum("bi,ij->bj", mm.with_sharding_constraint(x, ("x", None)), w)

    def second(w, x):
        return jnp.einsum("bi,ij->bj", x, mm.with_sharding_constraint(w, (None, "x")))

    one_task, two_task = mm.task(first, "first", mesh=one), mm.task(second, "second", mesh=two)
    return (one, two), lambda p, x: two_task(p["w2"], one_task(p["w1"], x))


def init_params():
    keys = jax.random.split(jax.random.key(0))
    return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, SHAPES.items(), strict=True)}


def host_batches():
    """Batches 0, 1, 2, ... that are told apart by their values."""
    return (np.full((8, 16), i, np.float32) for i in itertools.count())


def whole_parameters(array):
    """The most elements of an array that one device holds."""
    return max(s.data.size for s in array.addressable_shards)


@pytest.mark.parametrize("where", ["host", "one", "eight"])
def test_the_tutorial_program(where):
    """Each parameter on its four devices, the batch on the first four, also when it arrives on all eight."""
    (one, two), f = model()
    batches = host_batches()
    place = {
        "host": lambda b: b,
        "one": lambda b: jax.device_put(b, DEVICES[7]),
        "eight": lambda b: jax.device_put(b, NamedSharding(EIGHT, P("x"))),
    }[where]
    run, init, next_batch = mm.parallelize(f, init_params=init_params, get_input_batch=lambda: place(next(batches)))
    params = init()
    assert params["w1"].sharding.is_equivalent_to(NamedSharding(one, P("x", None)), 2)
    assert params["w2"].sharding.is_equivalent_to(NamedSharding(two, P(None, "x")), 2)
    assert_same(params, init_params())
    for i in range(3):
        batch = next_batch()
        assert batch.sharding.is_equivalent_to(NamedSharding(one, P("x", None)), 2)
        assert_same(batch, jnp.full((8, 16), float(i)))
        result = run(params, batch)
        assert result.sharding.device_set == set(DEVICES[4:])
        assert_same(result, reference(f, init_params(), jnp.full((8, 16), float(i))))


def test_parameters_are_never_whole_on_one_device():
    """Nor is anything that leads to them: no fragment of the initialisation has a whole one."""
    _, f = model()
    batch = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    _, init = mm.parallelize(f, init_params=init_params, initial_batch=batch)
    for name, array in init().items():
        assert whole_parameters(array) == np.prod(SHAPES[name]) // 4
    text = init.lower().compile().as_text()
    for rows, columns in SHAPES.values():
        assert f"[{rows},{columns}]" not in text and f"[{rows * columns}]" not in text
    assert "f32[4,32]" in text and "f32[32,2]" in text  # the shards are there


def test_everything_is_compiled_before_the_first_call():
    """A call traces nothing; another batch shape compiles once more."""
    _, f = model()
    traces = []

    def counted(params, x):
        traces.append(x.shape)
        return f(params, x)

    run, init = mm.parallelize(counted, init_params=init_params, initial_batch=np.ones((8, 16), np.float32))
    assert traces == [(8, 16)]
    params = init()
    run(params, np.ones((8, 16), np.float32))
    run(params, jnp.ones((8, 16)))
    assert traces == [(8, 16)]
    run(params, jnp.ones((4, 16)))
    assert traces == [(8, 16), (4, 16)]
    assert "first" in str(run.compiled.report())


def test_a_training_step_with_gradients_and_microbatches():
    """What comes back lies where the parameters are."""
    _, f = model()
    loss = mm.microbatch(
        jax.value_and_grad(lambda p, x: jnp.mean(f(p, x) ** 2)), argnum=1, num_microbatches=2, reduce="mean"
    )

    def step(params, x):
        value, grads = loss(params, x)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    run, init, next_batch = mm.parallelize(step, init_params=init_params, get_input_batch=lambda: np.ones((8, 16)))
    params = init()
    new, _ = run(params, next_batch())
    assert jax.tree.map(lambda x: x.sharding, new) == jax.tree.map(lambda x: x.sharding, params)
    assert_same(run(params, next_batch()), reference(step, init_params(), jnp.ones((8, 16))))


def test_in_reference_mode():
    """All three are the plain functions."""
    _, f = model()
    run, init, next_batch = mm.parallelize(f, init_params=init_params, get_input_batch=lambda: jnp.ones((8, 16)))
    with mm.ignore_transforms():
        result = run(init(), next_batch())
    assert len(result.devices()) == 1
    assert_same(result, f(init_params(), jnp.ones((8, 16))))


def test_without_parameters():
    """The function then takes the batch alone."""
    double = mm.task(lambda x: 2 * x, "double", devices=[3])
    run, init, next_batch = mm.parallelize(double, get_input_batch=lambda: np.ones(4, np.float32))
    assert init is None
    assert next_batch().devices() == {DEVICES[3]}
    assert_same(run(next_batch()), 2 * jnp.ones(4))


def test_bad_arguments():
    """No batch to look at; a task on other devices."""
    _, f = model()
    with pytest.raises(TypeError, match="shape of a batch: give get_input_batch, or initial_batch"):
        mm.parallelize(f, init_params=init_params)
    with pytest.raises(ValueError, match=r"'second' runs on devices \[6, 7\], .* devices=\[0, 1, 2, 3, 4, 5\]"):
        mm.parallelize(f, init_params=init_params, initial_batch=np.ones((8, 16)), devices=range(6))


def test_a_batch_with_a_random_key_and_a_number():
    """The step is compiled for what the calls bring: a typed key, and a number whose type is weak."""

    def loss(params, batch):
        noise = jax.random.uniform(batch["key"], (8, 8))
        return f(params, batch["x"]) + noise * batch["scale"]

    _, f = model()
    batch = {"x": np.ones((8, 16), np.float32), "key": jax.random.key(3), "scale": 2}
    run, init, batches = mm.parallelize(loss, init_params=init_params, get_input_batch=lambda: batch)
    assert_same(run(init(), batches()), reference(loss, init_params(), batch))
    assert "1 program" in repr(run._jitted)


def test_a_last_batch_of_another_length():
    """It is computed where the function can have it, and refused in words where its layout cannot be; nothing runs then."""
    (one, _), f = model()
    lengths = iter([8, 4, 3])
    run, init, batches = mm.parallelize(
        f, init_params=init_params, get_input_batch=lambda: np.ones((next(lengths), 16), np.float32)
    )
    params = init()
    assert [run(params, batches()).shape for _ in range(2)] == [(8, 8), (4, 8)]
    with pytest.raises(
        mm.errors.AxisError, match=r"dimension 0 \('x'\) of shape \(3, 16\) does not divide over axis 'x'"
    ):
        run(params, batches())

    task, lengths = mm.task(lambda x: x * 2, "only", mesh=one), iter([8, 3])
    by_rows = mm.task(
        lambda x: mm.with_sharding_constraint(x, ("x" if x.shape[0] == 8 else None,)) + 1, "rows", mesh=one
    )
    run, _, batches = mm.parallelize(
        lambda x: task(by_rows(x)), get_input_batch=lambda: np.ones(next(lengths), np.float32)
    )
    assert [run(batches()).tolist() for _ in range(2)] == [[4] * 8, [4] * 3]


def test_a_batch_of_another_structure():
    """The step compiles for it, as a call with it does."""
    (one, _), _ = model()
    task, given = (
        mm.task(lambda x: x * 2, "only", mesh=one),
        iter([{"x": np.ones(4)}, {"x": np.ones(4), "y": np.ones(4)}]),
    )
    run, _, batches = mm.parallelize(lambda batch: task(sum(batch.values())), get_input_batch=lambda: next(given))
    assert [run(batches()).tolist() for _ in range(2)] == [[2] * 4, [4] * 4]
