"""Where blocks end: uneven layers, readers of the whole, what the caller asks for, loops, other dimensions."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh._layout._solve import solve
from stages import assert_agrees, assert_same, microbatched, reference

pytestmark = pytest.mark.once

WIDTH, ROWS = 16, 4
DEVICES = np.array(jax.devices()[:4])
MESH = Mesh(DEVICES[:2].reshape(2, 1), ("stage", "m"), axis_types=(AxisType.Auto,) * 2)
TWO = mm.submeshes(MESH, "stage")


def loss_of(meshes=TWO, axis=0):
    layer = mm.task(lambda w, h: jnp.tanh(h @ w), "layer", mesh=meshes)

    def loss(ws, x):
        return jnp.mean(lax.scan(lambda h, w: (layer(w, h), None), x, jnp.moveaxis(ws, axis, 0))[0] ** 2)

    return loss


def weights(layers=4, axis=0):
    ws = np.random.default_rng(0).normal(size=(layers, WIDTH, WIDTH)) / np.sqrt(WIDTH)
    return jnp.moveaxis(jnp.asarray(ws, jnp.float32), 0, axis)


def batch(rows=ROWS):
    return jnp.asarray(np.random.default_rng(9).normal(size=(rows, WIDTH)), jnp.float32)


def update(loss, ws, x):
    value, grads = jax.value_and_grad(loss)(ws, x)
    return ws - 0.1 * grads, value


def test_layers_that_do_not_divide():
    """One warning says what it costs, and what would not; values are right."""
    loss = loss_of(
        mm.submeshes(Mesh(DEVICES[:3].reshape(3, 1), ("stage", "m"), axis_types=(AxisType.Auto,) * 2), "stage")
    )
    step = mm.jit(lambda p, x: loss(p["w"], x))
    size = 4 * WIDTH * WIDTH
    with pytest.warns(UserWarning) as caught:
        lowered = step.lower({"w": weights(5)}, batch())
    (warning,) = caught
    assert str(warning.message) == (
        "mm.jit(<lambda>): the 5 layers of args[0]['w'] are not used in equal blocks by 3 submeshes of one shape, so "
        f"they lie together on one submesh between steps: {3 * size} bytes go out to the others in every step, and where "
        "they are trained or changed as many come back; use a number of layers that 3 divides, such as 3 or 6, or a stack of 6 "
        "of which the scan takes the first 5 (see docs: tutorials/stacked)"
    )
    assert warning.filename == __file__
    assert sum(e.nbytes for e in lowered.program.edges if e.nbytes == size) == 3 * size
    assert not lowered.program.stacked_inputs
    with pytest.raises(mm.errors.AxisError, match="5 layers of args"):
        mm.jit(step.fun, strict=True).lower({"w": weights(5)}, batch())


@pytest.mark.parametrize("layers", [7, 10, 13])
def test_a_last_stage_with_fewer_layers(layers, recwarn):
    """What is read of a longer stack stays in blocks, weights, moments and gradients; no weight crosses, or is cut in the loop."""
    devices = np.array(jax.devices()).reshape(4, 2)
    stages = mm.submeshes(Mesh(devices, ("stage", "m"), axis_types=(AxisType.Auto,) * 2), "stage")
    share = -(-layers // 4)
    layer = mm.task(lambda x, w: (jnp.tanh(x @ w), None), "layer", mesh=[stages[i // share] for i in range(layers)])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def loss(params, x):
        return jnp.mean(lax.scan(layer, x, params["w"][:layers])[0] ** 2)

    def step(params, moments, x):
        grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean")
        value, grads = grad(params, x)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    params = {"w": weights(4 * share)}
    state, plain = (params, optimizer.init(params)), (params, optimizer.init(params))
    jitted = mm.jit(step)
    program = jitted.lower(*state, batch()).program
    for _ in range(2):
        *state, value = jitted(*state, batch())
        with mm.ignore_transforms():
            *plain, wanted = jax.jit(step)(*plain, batch())
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        assert got.ndim < 3 or got.sharding.spec[0] == "stage"
    assert not recwarn.list
    assert not [e for e in program.edges if e.var.aval.shape[-2:] == (WIDTH, WIDTH)]
    assert {f.name.split("_")[0] for f in program.fragments if f.loop == 0} == {"layer"}


def test_layers_before_an_early_exit():
    """Those that are used are the first half, which is the block of one submesh; what that costs is said."""
    step = mm.jit(lambda p, x: loss_of()(p["w"][:4], x))
    with pytest.warns(UserWarning, match="the 8 layers of args.0..'w'. are not used in equal blocks by 2 submeshes"):
        step.lower({"w": weights(8)}, batch())


def test_layers_that_are_dealt_out_in_rounds():
    """The warning says in which shape each submesh would keep its own."""
    stages = mm.submeshes(Mesh(DEVICES[:2].reshape(2, 1), ("stage", "m"), axis_types=(AxisType.Auto,) * 2), "stage")
    layer = mm.task(lambda x, w: (jnp.tanh(x @ w), None), "layer", mesh=list(stages) * 2)
    step = mm.jit(lambda p, x: lax.scan(layer, x, p["w"])[0])
    with pytest.warns(UserWarning, match=r"dealt out in 2 rounds: keep them in the shape \(2, 4, ...\) and take"):
        step.lower({"w": weights(8)}, batch())
    in_rounds = mm.jit(lambda p, x: lax.scan(lambda x, row: lax.scan(layer, x, row), x, p["w"])[0])
    given = {"w": weights(8).reshape(2, 4, WIDTH, WIDTH)}
    assert len(in_rounds.lower(given, batch()).program.stacked_inputs) == 1
    with mm.ignore_transforms():
        expected = in_rounds(given, batch())
    np.testing.assert_allclose(in_rounds(given, batch()), expected, rtol=1e-5)


def test_elements_that_are_not_used_in_equal_parts():
    """All parameters in one vector: it has no layers of which there could be more."""
    one, two = mm.submeshes(Mesh(DEVICES[:2].reshape(2, 1), ("stage", "m"), axis_types=(AxisType.Auto,) * 2), "stage")
    front = mm.task(lambda w, x: x * w, "front", mesh=one)
    back = mm.task(lambda w, x: x * w, "back", mesh=two)
    step = mm.jit(lambda w, x: back(w[300:], front(w[:300].sum(), x)))
    with pytest.warns(
        UserWarning, match="the 800 elements of args.0. are not used .* let each submesh use as many elements"
    ):
        step.lower(jnp.ones(800), jnp.ones(500))


def test_rows_of_a_grid_are_no_layers():
    """Two models that exchange their borders read a row of each other's state, and nobody is told of layers."""
    below = mm.task(lambda t, flux: t.at[0].add(flux), "below", mesh=TWO[0])
    above = mm.task(lambda u, row: u.at[-1].add(0.1 * row), "above", mesh=TWO[1])

    def step(t, u):
        flux = 0.1 * (u[-1] - t[0])
        return below(t, flux), above(u, t[0])

    grids = batch(64), batch(64)
    jitted = mm.jit(step, strict=True)  # a finding is an error
    assert sorted(e.nbytes for e in jitted.lower(*grids).program.edges) == [4 * WIDTH, 4 * WIDTH]
    assert_same(jitted(*grids), reference(jitted, *grids))


def test_a_reader_of_the_whole():
    """It gets it, and one warning says what that costs; the next value stays in blocks."""

    def step(ws, x):
        ws, value = update(loss_of(), ws, x)
        return ws, value, jnp.sort(ws.reshape(-1))[:3]

    jitted = mm.jit(step)
    text = r"a stacked value float32\[1024\]: in blocks .* but 'sort' reads the whole: 2048 bytes come together on one"
    with pytest.warns(UserWarning, match=text):
        lowered = jitted.lower(weights(), batch())
    assert len(lowered.program.stacked_inputs) == len(lowered.program.stacked_outputs) == 1
    assert_same(lowered.compile()(weights(), batch()), reference(jitted, weights(), batch()))


def test_shardings_that_are_asked_for():
    """A layout in blocks is one that can be asked for; one submesh for all layers is another, as before."""
    spread, gathered = NamedSharding(MESH, P("stage")), NamedSharding(TWO[1], P())
    ws, x = weights(), batch()
    expected = reference(mm.jit(lambda ws, x: update(loss_of(), ws, x)), ws, x)
    for sharding, blocks in ((spread, 1), (gathered, 0)):
        step = mm.jit(
            lambda ws, x: update(loss_of(), ws, x), in_shardings=(sharding, None), out_shardings=(sharding, None)
        )
        with (
            contextlib.nullcontext() if blocks else pytest.warns(UserWarning, match="'sub' reads the whole: 2048 bytes")
        ):
            lowered = step.lower(ws, x)
        assert len(lowered.program.stacked_inputs) == len(lowered.program.stacked_outputs) == blocks
        compiled = lowered.compile()
        assert compiled.input_shardings[0][0] == compiled.output_shardings[0] == sharding
        found = compiled(ws, x)
        assert found[0].sharding == sharding
        assert_same(found, expected)
    # Neither is the place of one task.
    step = mm.jit(lambda ws, x: update(loss_of(), ws, x), in_shardings=(NamedSharding(MESH, P()), None))
    with (
        pytest.raises(mm.errors.MeshError, match=r"in_shardings of args\[0\] is on devices \[0, 1\]"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        step.lower(ws, x)


def test_parallelize_makes_parameters_in_blocks():
    """Each layer where it is used, never whole on one device."""
    run, init, batches = mm.parallelize(
        loss_of(), init_params=lambda: jax.random.normal(jax.random.key(0), (4, WIDTH, WIDTH)), get_input_batch=batch
    )
    params = init()
    assert params.sharding == run.compiled.input_shardings[0][0]
    assert {s.data.shape for s in params.addressable_shards} == {(2, WIDTH, WIDTH)}
    np.testing.assert_allclose(run(params, batches()), reference(jax.jit(loss_of()), params, batch()), rtol=1e-5)


@pytest.mark.parametrize("axis", [1, 2])
def test_layers_along_another_dimension(axis):
    """As `nn.scan` with another ``variable_axes``: that dimension is cut."""
    ws = weights(axis=axis)
    step = mm.jit(lambda ws, x: update(loss_of(axis=axis), ws, x))
    program = step.lower(ws, batch()).program
    assert max(e.nbytes for e in program.edges) <= 4 * ROWS * WIDTH
    found = step(ws, batch())
    assert_same(found, reference(step, ws, batch()))
    assert found[0].sharding.spec == P(*[None] * axis, "stage")


def test_results_of_layers():
    """Stacks of what layers give, with and without microbatches, and carries of a loop that no sum of slices replaces."""
    layer = mm.task(lambda w, h: (jnp.tanh(h @ w), jnp.max(h @ w, 0)), "layer", mesh=TWO)

    def run(ws, x):
        return lax.scan(lambda h, w: layer(w, h), x, ws)

    ws, x = weights(), batch()
    for fun, edge in ((run, ROWS), (microbatched(run, num_microbatches=2, reduce=("concat", "max")), ROWS // 2)):
        program = mm.jit(fun).lower(ws, x).program
        assert max(e.nbytes for e in program.edges) == 4 * edge * WIDTH
        assert assert_agrees(fun, ws, x)[1].sharding.spec == P("stage")
    found = assert_agrees(microbatched(run, num_microbatches=2, reduce=("concat", "stack")), ws, x)[1]
    assert found.shape == (2, 4, WIDTH) and found.sharding.spec == P(None, "stage")


def test_two_scans_over_the_same_weights():
    """The second in reverse: a layer is used by one submesh in both."""
    layer = mm.task(lambda w, h: jnp.tanh(h @ w), "layer", mesh=TWO)

    def loss(ws, x):
        h = lax.scan(lambda h, w: (layer(w, h), None), x, ws)[0]
        return jnp.mean(lax.scan(lambda h, w: (layer(w.T, h), None), h, ws, reverse=True)[0] ** 2)

    step = mm.jit(lambda ws, x: update(loss, ws, x))
    program = step.lower(weights(), batch()).program
    assert len(program.stacked_inputs) == 1 and max(e.nbytes for e in program.edges) == 4 * ROWS * WIDTH
    assert_same(step(weights(), batch()), reference(step, weights(), batch()))


def test_results_own_their_memory():
    """Unchanged results, results twice, results of donated arguments: deleting one leaves the others alone."""

    def step(ws, kept, x):
        new, value = update(loss_of(), ws, x)
        return new, new, kept, value + jnp.sum(kept * ws)

    args = (weights(), 2 * weights(), batch())
    jitted = mm.jit(step, donate_argnums=(0, 1))
    assert len(jitted.lower(*args).program.stacked_inputs) == 2
    expected = reference(jitted, *args)
    given = jax.tree.map(jnp.copy, args)
    found = jitted(*given)
    assert_same(found, expected)
    assert [x.is_deleted() for x in given] == [True, True, False]
    again = mm.jit(step)(*args)
    again[0].delete()
    again[2].delete()
    assert_same((again[1], args[1]), (expected[1], 2 * weights()))


def test_planned_devices():
    """Blocks are planned for devices that are not there."""
    devices = np.array(mm.planned_devices(4)).reshape(2, 2)
    meshes = [Mesh(row, ("m",)) for row in devices]
    lowered = mm.jit(lambda ws, x: update(loss_of(meshes), ws, x)).lower(
        jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32), batch()
    )
    assert "args[0] block 1" in str(lowered.layout)


def test_blocks_lie_alike():
    """What is decided of one block is decided of all, each on its submesh: outside they are one array."""
    mesh = Mesh(DEVICES.reshape(2, 2), ("stage", "m"), axis_types=(AxisType.Auto,) * 2)
    meshes = mm.submeshes(mesh, "stage")
    program = mm.jit(lambda ws, x: update(loss_of(meshes), ws, x)).lower(weights(), batch()).program
    asked = {len(program.consts) + 1: NamedSharding(meshes[1], P(None, None, "m"))}
    layout = solve(program, asked=asked, arriving={}, wanted={}, states=[], names={})
    blocks = [program.invars[len(program.consts) + i] for i in (0, 1)]
    assert [layout.spec(v, program.home[v]) for v in blocks] == [P(None, None, "m")] * 2


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_the_keys_of_a_key_are_no_layers(key, recwarn):
    """A step that splits one in three, for two submeshes and for the next step."""
    first, last = (mm.task(lambda w, x: x @ w, name, devices=[d]) for d, name in enumerate(("first", "last")))

    @mm.jit
    def step(w, key):
        key, a, b = jax.random.split(key, 3)
        h = first(w, jax.random.normal(a, (4, 3)))
        return last(w, h + jax.random.uniform(b, (4, 1))), key

    step(jnp.ones((3, 3)), key(0))
    assert not recwarn.list


def test_tokens_of_a_sequence_are_no_layers():
    """A scan over time reads a token on one submesh and the next one on another."""
    first, last = (
        mm.task(f, n, devices=[i])
        for i, (f, n) in enumerate(((lambda w, x: w[x], "first"), (lambda h, y: h * y, "last")))
    )

    def fun(w, tokens):
        def one(h, xy):
            h = h + first(w, xy[0])
            return h, last(h, xy[1])

        return lax.scan(one, jnp.zeros(()), (tokens[:-1], tokens[1:]))

    args = jnp.arange(8.0), jnp.array([1, 2, 3, 4, 5])
    assert_same(mm.jit(fun, strict=True)(*args), jax.jit(fun)(*args))
