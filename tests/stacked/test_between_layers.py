"""What an optimizer does with a stack layer by layer is done where the layers are: nothing of it crosses."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from jax.flatten_util import ravel_pytree

import manymesh as mm
from stages import assert_agrees, assert_same, reference

LAYERS, WIDTH, ROWS, MICROBATCHES = 4, 16, 8, 4
layer = mm.task(
    lambda w, x: jnp.tanh(x @ w),
    "layer",
    mesh=mm.submeshes(jax.make_mesh((2,), ("s",), devices=jax.devices()[:2]), "s"),
)


def loss(w, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0] ** 2)


def gradient(w, x):
    return mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=MICROBATCHES, reduce="mean")(w, x)


def positive(g):
    return jnp.einsum("lij,lkj->lik", g, g) + jnp.eye(WIDTH)


def newton(y):
    return y - 0.1 * y @ y.mT @ y


def keys():
    """One for each layer."""
    return jax.random.split(jax.random.key(3), LAYERS)


OPERATIONS = {
    "eigh": lambda g: jnp.abs(jnp.linalg.eigh(positive(g))[1]),
    "qr": lambda g: jnp.abs(jnp.linalg.qr(g + jnp.eye(WIDTH))[0]),
    "singular values": lambda g: g / jnp.linalg.svd(g, compute_uv=False)[:, :1, None],
    "cholesky": lambda g: jnp.linalg.cholesky(positive(g)),
    "solve": lambda g: jnp.linalg.solve(positive(g), g),
    "inverse": lambda g: jnp.linalg.inv(positive(g)),
    "quantiles": lambda g: jnp.clip(
        g, *(jnp.quantile(g.reshape(LAYERS, -1), q, axis=1)[:, None, None] for q in (0.1, 0.9))
    ),
    "the largest": lambda g: g * (jnp.abs(g) >= jax.lax.top_k(jnp.abs(g).reshape(LAYERS, -1), 10)[0][:, -1:, None]),
    "convolution": lambda g: jax.vmap(jax.vmap(lambda r: jnp.convolve(r, jnp.ones(3), "same")))(g),
    "Fourier": lambda g: jnp.fft.fft(g, axis=-1).real,
    "functions": lambda g: jax.grad(lambda g: jnp.sum(jnp.tanh(g) + jnp.log2(jnp.abs(g) + 1) + jax.lax.erf(g)))(g),
    "polynomial": lambda g: jnp.polyval(jnp.ones(4), g),
    "special functions": lambda g: (
        jax.scipy.special.gammainc(jnp.abs(g) + 0.1, 1.0) + jax.scipy.special.polygamma(1, g + 2)
    ),
    "bits": lambda g: jax.lax.population_count((100 * g).astype(int)).astype(g.dtype),
    "looked up": lambda g: jnp.take_along_axis(g, jnp.argmax(g, -1, keepdims=True), -1) + g,
    "looked up in a table": lambda g: g * jnp.take(jnp.arange(1.0, WIDTH + 1), jnp.argsort(g, -1)),
    "gradient of what is looked up": jax.grad(lambda g: jnp.sum(jnp.sort(g, -1)[..., :3] ** 2)),
    "set": lambda g: g.at[:, 0].set(0.0).at[..., jnp.array([1, 3])].multiply(2.0),
    "added to": jax.vmap(lambda r: r.at[jnp.argmax(r[:, 0])].add(r[0])),
    "repeated": lambda g: jnp.tile(g[..., : WIDTH // 2], (1, 1, 2)),
    "gradient of what is repeated": jax.grad(lambda g: jnp.sum(jnp.tile(g, (1, 1, 2)) ** 2)),
    "a barrier": lambda g: jax.lax.optimization_barrier((g, jnp.sum(g, (1, 2)), jnp.float32(1)))[0],
    "map": lambda g: jax.lax.map(newton, g),
    "fori_loop": lambda g: jax.lax.fori_loop(0, 3, lambda _, y: newton(y), g),
    "noise": lambda g: g + jax.vmap(lambda k: jax.random.normal(k, g.shape[1:]))(keys()),
    "dropped": lambda g: jnp.where(jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, g.shape[1:]))(keys()), g, 0),
    "scan": lambda g: jax.lax.scan(lambda y, _: (newton(y), None), g, None, length=3)[0],
}


def arguments():
    return jnp.sin(jnp.arange(float(LAYERS * WIDTH**2))).reshape(LAYERS, WIDTH, WIDTH) / 4, jnp.ones((ROWS, WIDTH))


def bytes_of_weights(step, *args):
    """What crosses in a call besides activations and numbers."""
    report = mm.jit(step, strict=True).lower(*args).report()
    return sum(v.total_bytes for v in report.values if v.times == 1 and v.nbytes > 64)


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_layer_crosses(name):
    """Whatever takes each layer by itself; a warning would be an error."""

    def step(w, x):
        return w - 0.1 * OPERATIONS[name](gradient(w, x))

    assert bytes_of_weights(step, *arguments()) == 0
    assert_agrees(step, *arguments(), tolerance=2e-3)


def test_one_result_in_blocks_and_one_whole():
    """What makes several results makes each where the layers are; one that is asked for elsewhere is put together there."""

    def step(w, x):
        values, vectors = jnp.linalg.eigh(positive(gradient(w, x)))
        return w - 0.1 * jnp.abs(vectors), values

    mesh = jax.make_mesh((1,), ("one",), devices=jax.devices()[:1])
    one = jax.sharding.NamedSharding(mesh, jax.P())
    jitted = mm.jit(step, out_shardings=(None, one))
    lowered = jitted.lower(*arguments())
    assert len(lowered.program.stacked_outputs) == 1
    assert_same(jitted(*arguments()), reference(jax.jit(step), *arguments()), 2e-3)


def test_a_state_lies_as_its_next_value():
    """Also where nothing reads it layer by layer, such as a gradient that is only kept."""

    def step(kept, w, x):
        g = gradient(w, x)
        return jnp.sum(kept), g, w - 0.1 * g

    jitted, (w, x) = mm.jit(step, donate_argnums=0), arguments()
    assert len(jitted.lower(w, w, x).program.stacked_inputs) == 2
    expected = reference(jax.jit(step), w, w, x)
    assert_same(jitted(w + 0, w, x), expected)


def test_noise_of_all_layers_at_once_is_told():
    """It is drawn on one submesh: how many bytes are sent, and how each submesh draws its own."""

    def step(w, x):
        return w - 0.1 * (gradient(w, x) + jax.random.bits(jax.random.key(3), w.shape).astype(jnp.float32))

    with pytest.warns(
        UserWarning, match=rf"random numbers .*test_between_layers.* {2 * LAYERS * WIDTH**2} bytes .*jax.vmap"
    ):
        mm.jit(step).lower(*arguments())


def clipped(vector, back):
    return back(vector * jnp.minimum(1.0, 1e-2 / jnp.linalg.norm(vector)))


def standardised(vector, back):
    return back((vector - jnp.mean(vector)) / (jnp.std(vector) + 1))


def sharpened(vector, back):
    return jax.tree.map(lambda g: g * jnp.max(jax.nn.softmax(vector)), back(vector))


def of_pairs(step):
    """A step on two stacks of different sizes, and where it is taken: the gradient of each stack as one vector."""

    def apply(ws, x):
        def loss_of(ws):
            return jnp.mean(jax.lax.scan(lambda x, w: (x + layer(w["b"], layer(w["a"], x)), None), x, ws)[0] ** 2)

        vector, back = ravel_pytree(jax.grad(loss_of)(ws))
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, step(vector, back))

    w, x = arguments()
    return apply, ({"a": w, "b": w + 0.1}, x)


@pytest.mark.parametrize("change", [clipped, standardised, sharpened])
def test_of_a_vector_of_stacks_numbers_cross(change):
    """What is made of all layers of all stacks at once, and taken apart again: each submesh does it with its own."""
    step, args = of_pairs(change)
    report = mm.jit(step).lower(*args).report()
    assert len(report.values) > 2 and all(v.nbytes <= max(4, args[1].nbytes) for v in report.values)
    assert_agrees(step, *args, tolerance=1e-4)


def test_a_vector_of_stacks_that_is_sorted_is_told():
    step, args = of_pairs(lambda vector, back: back(vector * (vector > jnp.sort(vector)[-8])))
    with pytest.warns(UserWarning, match=r"a vector float32\[2048\], at .*test_between_layers.*come together on one"):
        assert_agrees(step, *args, tolerance=1e-4)


def test_noise_for_a_vector_of_all_gradients_is_told():
    """There are no layers: what is said is of the arrays that the vector is made of, and of the user's line."""
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"dense_{k}", devices=[k]) for k in range(2)]

    def step(ws, x):
        grads = jax.grad(lambda ws: jnp.mean(tasks[1](ws[1], tasks[0](ws[0], x)) ** 2))(ws)
        vector, back = ravel_pytree(grads)
        return back(vector + jax.random.normal(jax.random.key(3), vector.shape))

    with pytest.warns(
        UserWarning, match=r"all parts of a vector \(uint32\[2048\], for .*test_between_layers.* a key for each array"
    ):
        mm.jit(step).lower([jnp.eye(2 * WIDTH)] * 2, jnp.ones((ROWS, 2 * WIDTH)))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_that_draw_together(impl):
    """Of some kinds the first of several keys draws the numbers of all, so that they are drawn on one submesh."""

    def step(w, x, keys):
        return w - 0.1 * (gradient(w, x) + jax.vmap(lambda k: jax.random.normal(k, w.shape[1:]))(keys))

    args = *arguments(), jax.random.split(jax.random.key(3, impl=impl), LAYERS)
    with pytest.warns(UserWarning, match="random numbers .* a Threefry key for each layer"):
        lowered = mm.jit(step).lower(*args)
    assert_same(lowered.compile()(*args), reference(jax.jit(step), *args))


def test_no_layers_at_all_are_in_any_block():
    """What is left of a stack when all its layers are taken, as a result and as what a task of another submesh reads."""
    w, x = arguments()
    assert_agrees(lambda w, x: (w - gradient(w, x), w[LAYERS:]), w, x)
    first, second = (mm.task(lambda w, x: x + jnp.sum(w), "sum", devices=[k]) for k in (0, 1))
    assert_agrees(lambda w, x: second(w[LAYERS:], first(w[0], x)), w, x)


def test_muon():
    """As it is told which dimensions of a stack are those of a matrix."""
    dimensions = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    muon = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=lambda p: jax.tree.map(lambda _: dimensions, p))

    def step(w, state, x):
        updates, state = muon.update({"w": gradient(w["w"], x)}, state, w)
        return optax.apply_updates(w, updates), state

    w, x = arguments()
    args = {"w": w}, muon.init({"w": w}), x
    assert bytes_of_weights(step, *args) == 0
    assert_agrees(step, *args, tolerance=2e-3)
