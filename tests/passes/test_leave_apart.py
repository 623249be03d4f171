"""A vector of what lies on several submeshes is put together nowhere, where only its parts and sums over it are read."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import manymesh as mm
from flat import program, run
from stages import assert_agrees

SOURCE = """
    tasks: one 0, two 1
    inputs: x f32[512], y f32[1024], z f32[1536]
    a = one: x + 1.0
    b = two: y + 1.0
    v = lax.concatenate([a, b], 0)
    {}
    results: {}
"""


def left(lines, results):
    """The primitives outside of tasks that are left after the pass, dead ones removed."""
    after = run("remove_dead", run("leave_apart", program(SOURCE.format("\n".join(lines), results))))
    return [n.primitive for n in after.nodes if n.task is None]


def test_a_sum_over_a_vector_is_one_of_sums_over_its_parts():
    assert left(["w = lax.square(v)", "s = jnp.sum(w)"], "s") == ["square", "reduce_sum", "square", "reduce_sum", "add"]


def test_pieces_are_taken_of_parts():
    """What is a part is that part."""
    lines = ["s = jnp.sum(v)", "w = v * s", "p = w[0:512]", "q = w[512:1000]"]
    found = left(lines, "p, q")
    assert sorted(found) == ["add", "mul", "mul", "reduce_sum", "reduce_sum", "slice"]


def test_a_number_is_spread_out_for_each_part():
    """What all elements are compared with."""
    lines = ["s = jnp.sum(v)", "b = lax.broadcast(s, (1536,))", "w = lax.max(v, b)", "p = w[0:512]", "q = w[512:1536]"]
    found = sorted(left(lines, "p, q"))
    assert found == ["add", "broadcast_in_dim", "broadcast_in_dim", "max", "max", "reduce_sum", "reduce_sum"]


def test_a_number_that_keeps_its_dimension_is_a_number():
    """As the mean that a variance is taken around."""
    lines = ["s = jnp.mean(v, keepdims=True)", "w = lax.sub(v, s)", "b = lax.broadcast_in_dim(s, (1536,), (0,))"]
    lines += ["u = lax.max(w, b)", "p = u[0:512]", "q = jnp.sum(w)"]
    assert "concatenate" not in left(lines, "p, q")


def test_a_piece_that_is_several_parts_is_no_more_whole():
    lines = [
        "u = lax.concatenate([a, b, a, b], 0)",
        "w = u[512:2048]",
        "s = jnp.max(w)",
        "p = w[1024:1536]",
        "q = u[1536:]",
    ]
    found = left(lines, "s, p")
    assert "concatenate" not in found and found.count("reduce_max") == 2
    assert "concatenate" in left(lines, "q")  # which is read as it is


@pytest.mark.parametrize(
    ("lines", "results"),
    [
        (["s = lax.sin(v)"], "s"),  # all of it is read
        (["p = v[100:1000]"], "p"),  # a piece of both
        (["p = v[0:512:2]"], "p"),  # some of a part
        (["s = lax.dot(v, z)"], "s"),  # a product with something that is no such vector
        (["w = v + z", "s = jnp.sum(w)"], "s"),  # with something that is no such vector
        (["w = lax.rev(v, (0,))", "s = jnp.sum(w)"], "s"),  # not element by element
        (["w = lax.bitcast_convert_type(v, 'uint8')", "s = jnp.sum(w)"], "s"),  # nor what makes several of each
        (["w = lax.concatenate([a, a], 0)", "s = jnp.sum(w)"], "s"),  # all on one submesh
    ],
)
def test_what_stays(lines, results):
    before = program(SOURCE.format("\n".join(lines), results))
    dead = [n.primitive for n in run("remove_dead", before).nodes if n.task is None]
    assert left(lines, results) == dead and "concatenate" in dead


# Programs

WIDTH = 32
TASKS = [mm.task(lambda w, x: jnp.tanh(x @ w), f"layer_{i}", devices=[i // 2]) for i in range(4)]


def gradient(ws, x):
    def loss(ws, x):
        for task, w in zip(TASKS, ws, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    return mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=2, reduce="mean")(ws, x)


def clip(grads):
    vector, back = ravel_pytree(grads)
    return back(vector * jnp.minimum(1.0, 1e-3 / jnp.linalg.norm(vector)))


def finite(grads):
    vector, _ = ravel_pytree(grads)
    return jax.tree.map(lambda g: jnp.where(jnp.all(jnp.isfinite(vector)), g, 0), grads)


def largest(grads):
    vector = jnp.concatenate([jnp.ravel(g) for g in grads])
    return jax.tree.map(lambda g: g / jnp.max(jnp.abs(vector)), grads)


def cosine(grads):
    one, two = ravel_pytree(grads)[0], ravel_pytree(jax.tree.map(jnp.tanh, grads))[0]
    return jax.tree.map(lambda g: g * jnp.vdot(one, two) / (jnp.vdot(one, one) + 1e-6), grads)


def standardised(grads):
    vector, back = ravel_pytree(grads)
    return back((vector - jnp.mean(vector, keepdims=True)) / (jnp.std(vector) + 1))


def sharpest(grads):
    vector, _ = ravel_pytree(grads)
    return jax.tree.map(lambda g: g * jnp.max(jax.nn.softmax(vector)), grads)


@pytest.mark.parametrize("change", [clip, finite, largest, cosine, standardised, sharpest])
def test_of_a_vector_of_gradients_numbers_cross(change):
    def step(ws, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, change(gradient(ws, x)))

    args = (
        [jnp.eye(WIDTH) + 0.1 * i for i in range(4)],
        jnp.asarray(np.random.default_rng(0).normal(size=(4, WIDTH)), "float32"),
    )
    report = mm.jit(step).lower(*args).report()
    assert all(v.nbytes <= 4 for v in report.values if v.times == 1)
    assert_agrees(step, *args, tolerance=1e-4)


def test_a_state_of_one_vector_stays_one():
    """Of `optax.flatten` all is one vector: it is what was asked for."""
    adam = optax.flatten(optax.adam(1e-2))

    def step(ws, state, x):
        updates, state = adam.update(gradient(ws, x), state, ws)
        return optax.apply_updates(ws, updates), state

    ws = [jnp.eye(WIDTH)] * 4
    assert_agrees(step, ws, adam.init(ws), jnp.ones((4, WIDTH)))
