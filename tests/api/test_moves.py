"""What users say of values between tasks means what it says: where they go, and how they lie there."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from stages import assert_same, microbatched, parameters, reference, rows

FIRST, SECOND = (Mesh(np.array(jax.devices()[i : i + 2]), ("data",)) for i in (0, 2))
first = mm.task(lambda w, x: jnp.tanh(x @ w), "first", mesh=FIRST)
second = mm.task(lambda w, x: jnp.tanh(x @ w), "second", mesh=SECOND)


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def constrain(x, mesh, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("say", [put, constrain])
def test_a_value_on_its_way_to_the_next_task(say):
    """It arrives there as was said, forward and backward, in a loop too; the values are those of the plain function."""

    def loss(p, x):
        return jnp.mean(second(p["back"], say(first(p["front"], x), SECOND, "data")) ** 2)

    compiled = mm.jit(lambda p, x: second(p["back"], say(first(p["front"], x), SECOND, "data")))
    y = compiled(parameters(), rows())
    assert y.sharding.device_set == set(SECOND.devices.flat) and y.sharding.spec[0] == "data"
    step = microbatched(jax.value_and_grad(loss), num_microbatches=2)
    plain = microbatched(
        jax.value_and_grad(lambda p, x: jnp.mean(second(p["back"], first(p["front"], x)) ** 2)), num_microbatches=2
    )
    assert_same(mm.jit(step)(parameters(), rows()), reference(jax.jit(plain), parameters(), rows()))


def test_a_result_that_is_put_somewhere():
    """On another submesh, in a layout, or on one device of no task."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def step(p, x):
        y = first(p["front"], x)
        return put(y, mesh, None, "data"), put(second(p["back"], y), FIRST), y + 0

    results = mm.jit(step)(parameters(), rows())
    assert results[0].sharding == NamedSharding(mesh, P(None, "data"))
    assert results[1].sharding.device_set == set(FIRST.devices.flat)
    assert_same(
        results, mm.jit(lambda p, x: (y := first(p["front"], x), second(p["back"], y), y))(parameters(), rows())
    )


@pytest.mark.parametrize("say", [put, constrain])
@pytest.mark.parametrize("patterns", [False, True])
def test_what_was_put_on_a_mesh_is_read_by_a_task_on_a_mesh_of_another_size(say, patterns):
    """Loops and Python's numbers inside of the task, which JAX refuses to mix with values of another mesh; see also
    `jax.grad` through it, and ids, which have no gradient."""
    alone = Mesh(np.array(jax.devices()[4:5]), ("data",))

    def scanned(w, x, ids):
        rolled = jax.lax.scan(lambda c, row: (jnp.tanh(c + row), c), jnp.zeros(x.shape[1:]), x)[1]
        return (0 + rolled[ids]) @ w

    def loss(second, p, x, put_there):
        h = put_there(first(p["front"], x))
        ids = put_there(jnp.argsort(x[:, 0]))
        with jax.named_scope("between"):
            h = jnp.roll(h, 1)
        return jnp.sum(second(p["back"], h, ids) ** 2)

    def step(second, put_there):
        return lambda p, x: jax.value_and_grad(lambda p: loss(second, p, x, put_there))(p)

    placed = mm.jit(step(mm.task(scanned, "second", mesh=SECOND), lambda x: say(x, alone)))
    plain = jax.jit(step(scanned, lambda x: x))
    with mm.register_task("between", mesh=alone) if patterns else contextlib.nullcontext():
        assert_same(placed(parameters(), rows()), plain(parameters(), rows()))


def centred(x, mesh):
    """What is left of rows without their mean, over the devices of a mesh, by hand."""
    return jax.shard_map(
        lambda x: x - jax.lax.pmean(x.mean(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )(x)


@pytest.mark.parametrize("mesh", [FIRST, SECOND])
@pytest.mark.parametrize("around", [lambda fun: fun, jax.checkpoint, jax.jit])
def test_collectives_by_hand_between_tasks_are_on_the_submesh_that_they_name(mesh, around):
    """Forward and backward, in a loop too; on gradients as well."""

    def loss(p, x):
        return jnp.mean(second(p["back"], around(lambda h: centred(h, mesh))(first(p["front"], x))) ** 2)

    def step(p, x):
        value, grads = microbatched(jax.value_and_grad(loss), num_microbatches=2)(p, x)
        return value, jax.tree.map(lambda g: centred(g, mesh), grads)

    lowered = mm.jit(step).lower(parameters(), rows())
    found = [(lowered.program.submeshes[s], why) for name, s, why, _ in lowered.program.unmarked if name == "shard_map"]
    assert set(found) == {(mesh, "its submesh")}
    with mm.ignore_transforms():
        expected = jax.jit(step)(parameters(), rows())
    assert_same(lowered.compile()(parameters(), rows()), expected)


def test_collectives_by_hand_over_several_submeshes():
    """Between tasks they are told at once, with the user's line; as a task of their own they run."""
    both = Mesh(np.array(jax.devices()[:4]), ("data",))
    by_hand = mm.task(lambda x: centred(x, both), "by hand", mesh=both)

    def step(say):
        return lambda p, x: jax.grad(lambda p: jnp.sum(second(p["back"], say(first(p["front"], x)))))(p)

    for say, words in (
        (lambda x: centred(x, both), "jax.shard_map at "),
        (lambda x: jax.pmap(lambda row: 2 * row)(x), "jax.pmap, which makes a mesh of its own, at "),
        (lambda x: jax.pmap(lambda row: 2 * row, "rows")(x), "jax.pmap, which makes a mesh of its own, at "),
    ):
        with pytest.raises(mm.errors.PlacementError) as caught:
            mm.jit(step(say)).lower(parameters(), rows(4))
        assert f"{words}{__file__}" in str(caught.value) and "is on devices 0-3" in str(caught.value)
    assert_same(
        mm.jit(step(by_hand))(parameters(), rows()), jax.jit(step(lambda x: x - x.mean()))(parameters(), rows())
    )
