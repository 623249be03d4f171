"""How values get from one submesh to another: layouts, bytes, and who decides."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh._layout._transfers import plan_transfer
from manymesh._runtime._relayout import Relayouts
from stages import assert_same, reference

DEVICES = np.array(jax.devices())
FOUR = Mesh(DEVICES[:4].reshape(2, 2), ("data", "model"))
OTHER = Mesh(DEVICES[4:].reshape(2, 2), ("data", "model"))
TWO = Mesh(DEVICES[4:6].reshape(2, 1), ("data", "model"))
ONE = Mesh(DEVICES[6:7].reshape(1, 1), ("data", "model"))
SPECS = [P(), P("data"), P(None, "model"), P("model", "data"), P(("data", "model"))]


def sent(steps, shape):
    """Elements that arrive by copies."""
    return sum(s.sharding.mesh.size * np.prod(s.sharding.shard_shape(shape)) for s in steps if s.kind == "copy")


@pytest.mark.parametrize("target", [OTHER, TWO, ONE], ids=["4", "2", "1"])
def test_every_layout_reaches_every_other(target):
    """By copies between equal shards and changes of layout within a submesh; never through the host."""
    x = jnp.arange(64.0).reshape(8, 8)
    follow = Relayouts().follow
    for a, b in itertools.product(SPECS, SPECS):
        source, goal = NamedSharding(FOUR, a), NamedSharding(target, b)
        steps = plan_transfer(x.shape, source, goal)
        assert [s.kind for s in steps].count("copy") == 1
        y = follow(jax.device_put(x, source), steps)
        assert y.sharding.is_equivalent_to(goal, 2)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(x))


@pytest.mark.parametrize("written", [P(None), P(None, None), P("none"), P(None, "none")])
def test_a_layout_that_is_only_written_otherwise_needs_no_step(written):
    """JAX writes the layout of a key array with its dimensions, ours is without; an axis of one device cuts nothing."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "none"))
    assert plan_transfer((8, 8), NamedSharding(mesh, written), NamedSharding(mesh, P())) == ()


def test_the_cheaper_side_changes_the_layout():
    """A replicated value is cut before it is sent, a cut one gathered after; each element crosses once."""
    shape = (8, 8)
    whole, cut = P(), P("data", "model")
    for a, b, kinds in ((whole, cut, ["relayout", "copy"]), (cut, whole, ["copy", "relayout"])):
        steps = plan_transfer(shape, NamedSharding(FOUR, a), NamedSharding(OTHER, b))
        assert [s.kind for s in steps] == kinds
        assert sent(steps, shape) == 64
    steps = plan_transfer(shape, NamedSharding(FOUR, P("data")), NamedSharding(OTHER, P("data")))
    assert [s.kind for s in steps] == ["copy"]


def arrival_of(compiled, name):
    """The specs of what the fragment of that name reads."""
    (index,) = [f.index for f in compiled.program.fragments if f.name == name]
    return [s.spec for s in compiled._lowered.executables[index].input_shardings[0]]


def test_the_reader_decides_how_a_value_arrives():
    """Its first constraint does; without one the value keeps its producer's layout."""
    one = mm.task(lambda x: mm.with_sharding_constraint(x * 2, ("data", None)), "one", mesh=FOUR)

    def read(x):
        return mm.with_sharding_constraint(x.astype(jnp.bfloat16), (None, "model")) + 1

    for fun, spec in ((read, P(None, "model")), (lambda x: x + 1, P("data"))):
        two = mm.task(fun, "two", mesh=OTHER)
        f = mm.jit(lambda x, two=two: two(one(x)))
        x = jnp.arange(64.0).reshape(8, 8)
        compiled = f.lower(x).compile()
        assert arrival_of(compiled, "two") == [spec]
        assert_same(f(x), reference(f, x))
        (edge,) = compiled.report().edges
        assert (edge.values, edge.transfers, edge.nbytes) == (1, 1, 256)


def test_a_reader_inside_calls_decides_too():
    """The constraint may be in a nested jit, or outside every task, in device axes."""
    one = mm.task(lambda x: x * 2, "one", mesh=FOUR)
    inner = mm.task(jax.jit(lambda x: mm.with_sharding_constraint(x, (None, "model")) + 1), "two", mesh=OTHER)
    x = jnp.arange(64.0).reshape(8, 8)
    compiled = mm.jit(lambda x: inner(one(x))).lower(x).compile()
    assert arrival_of(compiled, "two") == [P(None, "model")]
    two = mm.task(lambda x: x + 1, "two", mesh=OTHER)
    compiled = mm.jit(lambda x: two(mm.with_sharding_constraint(one(x), ("data",)))).lower(x).compile()
    assert arrival_of(compiled, "two") == [P("data")]


def test_a_value_read_twice_on_a_submesh_crosses_once():
    """And what crosses together goes in one transfer."""
    one = mm.task(lambda x: (x * 2, x * 3), "one", mesh=FOUR)
    two, three = mm.task(lambda a, b: a + b, "two", mesh=OTHER), mm.task(lambda a, b: a - b, "three", mesh=OTHER)

    def f(x):
        a, b = one(x)
        return two(a, b), three(a, b)

    x = jnp.arange(64.0).reshape(8, 8)
    (edge,) = mm.jit(f).lower(x).compile().report().edges
    assert (edge.values, edge.transfers, edge.nbytes) == (2, 1, 512)
    assert_same(mm.jit(f)(x), reference(f, x))


def test_a_moment_is_sharded_as_its_parameter():
    """Also without microbatches, where its decay is computed before the gradient is there."""
    layer = mm.task(lambda w, x: jnp.tanh(x @ mm.with_sharding_constraint(w, (None, "model"))), "layer", mesh=FOUR)

    def step(state, x):
        w, mu = state
        mu = 0.9 * mu + 0.1 * jax.grad(lambda w: jnp.mean(layer(w, x) ** 2))(w)
        return w - mu, mu

    w = jnp.ones((32, 32))
    compiled = mm.jit(step).lower((w, w), w).compile()
    assert [s.spec for s in compiled.input_shardings[0][0]] == [P(None, "model")] * 2
    assert [s.spec for s in compiled.output_shardings] == [P(None, "model")] * 2
