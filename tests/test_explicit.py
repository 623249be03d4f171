"""Code for Explicit axes in tasks: `jax.sharding.explicit_axes` where a layer wants the types, as anywhere in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from generated.laws import counted_compilations
from manymesh._runtime._relayout import Relayouts
from stages import assert_same, on_host

WIDTH, HIDDEN, ROWS = 8, 16, 4
AXES = ("data", "model")
SPECS = {"up": P(None, "model"), "down": P("model", None)}


def mesh_at(first, data=2, model=2):
    devices = np.array(jax.devices()[first : first + data * model])
    return Mesh(devices.reshape(data, model), AXES, axis_types=(AxisType.Explicit,) * 2)


MESHES = mesh_at(0), mesh_at(4)


def block(w, x):
    """Tensor parallel, in the words of Explicit axes: what it multiplies has a type, and so has what comes out."""
    h = jnp.einsum("bd,df->bf", x, w["up"], out_sharding=P("data", "model"))
    assert jax.typeof(h).sharding.spec == P("data", "model")
    h = jnp.sin(h) * jax.nn.sigmoid(h) + jnp.ones(h.shape, h.dtype, out_sharding=P("data", "model"))
    return jnp.einsum("bf,fd->bd", h, w["down"], out_sharding=P("data", None)) + x


layer = jax.sharding.explicit_axes(block, axes=AXES, in_sharding=(SPECS, P("data", None)))
TASKS = [mm.task(layer, name, mesh=m) for name, m in zip("ab", MESHES, strict=True)]


def weights(count=2):
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return [{k: jnp.asarray(rng.normal(size=s) * 0.2, jnp.float32) for k, s in shapes.items()} for _ in range(count)]


def batch():
    return jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), jnp.float32)


def loss(p, x):
    for t, w in zip(TASKS, p, strict=True):
        x = t(w, x)
    return jnp.mean(x**2)


def in_jax(fun, *args):
    """The function in plain JAX, where one mesh is around all of it."""
    auto = Mesh(MESHES[0].devices, AXES, axis_types=(AxisType.Auto,) * 2)
    with mm.ignore_transforms(), jax.set_mesh(auto):
        return jax.tree.map(lambda x: jnp.asarray(on_host(x), x.dtype), jax.jit(fun)(*args))


def same(fun, *args):
    step = mm.jit(fun)
    expected = in_jax(fun, *args)
    for _ in range(2):
        assert_same(step(*args), expected)
    return step


def test_gradients_and_layouts():
    """What the types say is the layout, of weights and of what the backward pass reads."""
    step = same(jax.value_and_grad(loss), weights(), batch())
    lowered = step.lower(weights(), batch())
    for w in lowered.arguments[0][0]:
        assert {k: P(*x.sharding.spec, *[None] * (2 - len(x.sharding.spec))) for k, x in w.items()} == SPECS
    hidden = {s for (v, _), s in lowered.layout.decisions.items() if v.aval.shape == (ROWS, HIDDEN)}
    assert hidden and {d.spec for d in hidden} == {P("data", "model")}


def test_the_mesh_of_the_task_need_not_be_explicit():
    places = {"a": np.arange(4).reshape(2, 2), "b": np.arange(4, 8).reshape(2, 2)}
    tasks = [mm.task(layer, name, devices=d, device_axes=AXES) for name, d in places.items()]
    same(jax.grad(lambda p, x: jnp.sum(tasks[1](p[1], tasks[0](p[0], x)) ** 2)), weights(), batch())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble-h1"])
def test_microbatches_under_a_schedule(schedule):
    step = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, reduce="mean", schedule=schedule)
    same(step, weights(), batch())


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_checkpoint(policy):
    first, second = (jax.checkpoint(t, policy=policy) for t in TASKS)
    same(jax.grad(lambda p, x: jnp.sum(second(p[1], first(p[0], x)) ** 2)), weights(), batch())


def test_checkpoint_inside():
    tasks = [mm.task(jax.checkpoint(layer), n, mesh=m) for n, m in zip("ab", MESHES, strict=True)]
    same(jax.grad(lambda p, x: jnp.sum(tasks[1](p[1], tasks[0](p[0], x)) ** 2)), weights(), batch())


def test_a_scan_over_layers_split_over_submeshes():
    each = mm.task(layer, "layer", mesh=MESHES)

    def fun(ws, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (each(w, h), None), x, ws)[0] ** 2)

    ws = jax.tree.map(lambda *x: jnp.stack(x), *weights(4))
    same(jax.value_and_grad(fun), ws, batch())


def test_a_scan_in_a_task():
    def layers(ws, x):
        return jax.lax.scan(lambda h, w: (layer(w, h), None), x, ws)[0]

    tasks = [mm.task(layers, n, mesh=m) for n, m in zip("ab", MESHES, strict=True)]
    ws = [jax.tree.map(lambda *x: jnp.stack(x), *weights(2)) for _ in tasks]
    same(jax.grad(lambda p, x: jnp.sum(tasks[1](p[1], tasks[0](p[0], x)) ** 2)), ws, batch())


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2), reason="plain JAX could not differentiate the branch before 0.10.2"
)
def test_branches_and_forward_derivatives():
    def fun(p, x):
        h = jax.lax.cond(x[0, 0] > 0, lambda: TASKS[0](p[0], x), lambda: x)
        return jnp.sum(TASKS[1](p[1], h) ** 2)

    same(jax.grad(fun), weights(), batch())
    same(lambda p, x: jax.jvp(lambda x: loss(p, x), (x,), (x,)), weights(), batch())


def test_submeshes_of_different_sizes():
    meshes = mesh_at(0), mesh_at(4, 2, 1)
    tasks = [mm.task(layer, n, mesh=m) for n, m in zip("ab", meshes, strict=True)]
    same(jax.grad(lambda p, x: jnp.sum(tasks[1](p[1], tasks[0](p[0], x)) ** 2)), weights(), batch())


def test_training():
    """States lie as their parameters; the second step compiles nothing."""
    optimizer = optax.adam(1e-2)

    def train(p, state, x):
        value, grads = mm.microbatch(
            jax.value_and_grad(loss), argnum=1, num_microbatches=2, reduce="mean", schedule="1f1b"
        )(p, x)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    step = mm.jit(train, donate_argnums=(0, 1))
    p, state = weights(), optimizer.init(weights())
    expected = in_jax(train, *in_jax(train, p, state, batch())[:2], batch())
    p, state, _ = step(p, state, batch())
    with counted_compilations() as made:
        p, state, value = step(p, state, batch())
    assert not made
    assert_same((p, state, value), expected, 1e-4)
    for w, mu in zip(p, state[0].mu, strict=True):
        assert jax.tree.map(lambda x: x.sharding, w) == jax.tree.map(lambda x: x.sharding, mu)
        assert w["up"].sharding.spec == SPECS["up"]


def test_arguments_that_lie_on_explicit_meshes():
    p = [
        jax.tree.map(lambda x, s, m=m: jax.device_put(x, NamedSharding(m, s)), w, SPECS)
        for w, m in zip(weights(), MESHES, strict=True)
    ]
    assert_same(mm.jit(jax.grad(loss))(p, batch()), in_jax(jax.grad(loss), weights(), batch()))


def placed(p):
    return [
        jax.tree.map(lambda x, s, m=m: jax.device_put(x, NamedSharding(m, s)), w, SPECS)
        for w, m in zip(p, MESHES, strict=True)
    ]


@pytest.mark.parametrize("asked", [False, True], ids=["given", "asked for"])
def test_what_comes_back_joins_what_was_given(asked):
    """Plain JAX refuses arrays on meshes of different types in one operation."""
    optimizer = optax.adam(1e-2)

    def train(p, state, x):
        updates, state = optimizer.update(jax.grad(loss)(p, x), state, p)
        return optax.apply_updates(p, updates), state

    p = placed(weights())
    at = jax.tree.map(lambda x: x.sharding, p)
    step = mm.jit(train, out_shardings=(at, None) if asked else None)
    state = optimizer.init(p)
    new, state = step(p, state, batch())
    types = jax.tree.map(jax.typeof, p)  # with their shardings
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state[0].mu) == types
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), new, at)))
    assert jax.tree.map(lambda a, b: jax.typeof(0.9 * a + 0.1 * b), p, new) == types
    with counted_compilations() as made:
        again, state = step(new, state, batch())
    assert not made
    lowered = step.lower(new, state, batch())
    described = [x.sharding for x in jax.tree.leaves(lowered.out_info[0])]
    assert {s.mesh for s in (*described, *jax.tree.leaves(lowered.compile().output_shardings[0]))} == set(MESHES)
    start = weights()
    expected = in_jax(lambda p, s, x: train(*train(p, s, x), x), start, optimizer.init(start), batch())
    assert_same((again, state), expected, 1e-4)


def test_a_result_that_is_asked_for_on_a_mesh_of_another_type():
    """It is on that one, whatever was given."""
    (first, _), p = MESHES, placed(weights())
    auto = NamedSharding(Mesh(first.devices, AXES, axis_types=(AxisType.Auto,) * 2), P(None, "model"))
    step = mm.jit(lambda p, x: (TASKS[0](p[0], x), p[0]["up"] * 2.0), out_shardings=(None, auto))
    hidden, twice = step(p, batch())
    assert hidden.sharding.mesh == first
    assert twice.sharding == auto
    assert_same(twice, weights()[0]["up"] * 2.0)


@pytest.mark.parametrize("meshes", [MESHES, MESHES[:1] * 2], ids=["several meshes", "one mesh"])
def test_the_reference_mode_takes_what_a_step_gives(meshes):
    """On Auto axes, as in a step: plain JAX would not say how a product of such arrays is to be sharded."""
    tasks = [mm.task(lambda w, x: jnp.sin(x @ w), name, mesh=m) for name, m in zip("ab", meshes, strict=True)]

    def fun(ws, x):
        grads = jax.grad(lambda ws: jnp.sum(tasks[1](ws[1], tasks[0](ws[0], x)) ** 2))(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)

    places = [NamedSharding(m, spec) for m, spec in zip(meshes, (P(None, "model"), P("model", None)), strict=True)]
    ws = jax.device_put([w["up"][:, :WIDTH] for w in weights()], places)
    step = mm.jit(fun)
    ws = step(ws, batch())
    assert [w.sharding.mesh for w in ws] == [*meshes]
    with mm.ignore_transforms():
        expected = step(ws, batch())
    assert_same(step(ws, batch()), jax.tree.map(lambda w: jnp.asarray(on_host(w), w.dtype), expected))


def test_a_nan_is_found_in_its_line():
    tasks = [
        mm.task(lambda w, x: jnp.log(x @ w), name, mesh=m) for name, m in zip(("front", "back"), MESHES, strict=True)
    ]
    ws = [jax.device_put(jnp.eye(8) - 2 * i, NamedSharding(m, P(None, "model"))) for i, m in enumerate(MESHES)]
    step = mm.jit(lambda ws, x: tasks[1](ws[1], tasks[0](ws[0], x)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"task 'back', at .*test_explicit.py"):
        step(ws, 2 + jnp.ones((ROWS, WIDTH)))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_a_none_more_in_a_spec_moves_nothing(kind, monkeypatch):
    """JAX writes the specs of Explicit arrays out to the last dimension, users those of batches."""
    brought, bring = [], Relayouts.bring
    monkeypatch.setattr(Relayouts, "bring", lambda self, x, s: brought.append(x) or bring(self, x, s))
    mesh = Mesh(MESHES[0].devices, AXES, axis_types=(kind,) * 2)
    task = mm.task(lambda w, x: jnp.sin(x @ w), "task", mesh=mesh)
    step = mm.jit(lambda w, x: task(w, x).sum(), in_shardings=(None, NamedSharding(mesh, P("data"))))
    w = jax.device_put(jnp.eye(WIDTH), NamedSharding(mesh, P()))
    step(w, batch())
    del brought[:]
    for k in range(2):
        step(w, jax.device_put(batch() + k, NamedSharding(mesh, P("data", None))))
    assert not brought
