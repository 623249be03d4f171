"""Models that people write, each equal to plain JAX in values and gradients."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import manymesh as mm
from flax import nnx
from manymesh.flax import shard_axes, task
from stages import assert_agrees, assert_same, initial, microbatched, reference

pytestmark = pytest.mark.once

DEVICES = np.array(jax.devices())
VOCABULARY, WIDTH, LENGTH, HEADS = 11, 8, 4, 2


def mesh(devices, axes=("data", "model"), shape=None):
    """A mesh of device ids, as ``(len, 1)`` unless a shape is given."""
    return Mesh(DEVICES[list(devices)].reshape(shape or (len(devices), 1)), axes)


def tokens(rows=8, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCABULARY, (rows, LENGTH)))


def floats(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def grads_of(loss):
    """Values and gradients of ``loss(params, batch)``, whole and in microbatches."""
    whole = jax.value_and_grad(loss)
    return whole, microbatched(whole, num_microbatches=2)


def check(loss, params, batch):
    """The whole step and the microbatched one agree with plain JAX."""
    for step in grads_of(loss):
        assert_agrees(step, params, batch, tolerance=5e-5)


def next_token_loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:]).mean()


class Block(nn.Module):
    """Pre-norm attention and a feed-forward layer; annotated."""

    @nn.compact
    def __call__(self, x):
        x = mm.with_sharding_constraint(x, ("batch", None, None))
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS)(h, mask=nn.make_causal_mask(h[..., 0]))
        h = nn.Dense(2 * WIDTH, kernel_init=shard_axes(None, "hidden"))(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH, kernel_init=shard_axes("hidden", None))(nn.gelu(h))


RULES = (("batch", "data"), ("hidden", "model"))


class Embedding(nn.Module):
    """Token embedding, and the tied output head as its other method."""

    def setup(self):
        self.table = nn.Embed(VOCABULARY, WIDTH)

    def __call__(self, ids):
        return self.table(ids)

    def logits(self, x):
        return self.table.attend(x)


# What it costs that they do not divide is said once, as a warning.
@pytest.mark.filterwarnings("ignore:.*are not used in equal blocks by 3 submeshes:UserWarning")
def test_a_linen_transformer_with_scanned_layers_over_three_submeshes(layers=4):
    """Four layers stacked by nn.scan; the embedding is on the first submesh, the head on the last."""
    submeshes = [mesh(ids, shape=(1, 2)) for ids in ((0, 1), (2, 3), (4, 5))]

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, ids):
            x = task(nn.Embed, "embed", mesh=submeshes[0])(VOCABULARY, WIDTH)(ids)
            layer = task(Block, "layer", mesh=submeshes, logical_axes=RULES)
            stack = nn.scan(
                lambda module, carry, _: (module(carry), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=layers,
                metadata_params={nn.PARTITION_NAME: None},
            )
            x, _ = stack(layer(name="layers"), x, None)
            return task(nn.Dense, "head", mesh=submeshes[2])(VOCABULARY)(x)

    model = Transformer()
    params = initial(model.init, jax.random.key(0), tokens())["params"]
    program = mm.jit(lambda p, b: model.apply({"params": p}, b)).lower(params, tokens()).program
    assert {f.submesh for f in program.fragments if f.name.startswith("layer")} == {0, 1, 2}
    _, looped = grads_of(lambda p, b: next_token_loss(model.apply({"params": p}, b), b))
    assert_agrees(looped, params, tokens(), tolerance=5e-5)


def test_a_tied_embedding_over_four_stages():
    """One table is looked up on the first stage and is the head of the last; its gradient is whole."""
    stages = [task(Block, f"stage{i}", devices=[i]) for i in range(4)]

    class Tied(nn.Module):
        def setup(self):
            self.embedding = Embedding()
            self.blocks = [stage() for stage in stages]

        def __call__(self, ids):
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            return self.embedding.logits(x)

    model = Tied()
    params = initial(model.init, jax.random.key(0), tokens())["params"]
    _, looped = grads_of(lambda p, b: next_token_loss(model.apply({"params": p}, b), b))
    assert_agrees(looped, params, tokens(), tolerance=5e-5)


def test_two_towers():
    """Two branches on two submeshes, joined on a third of another size."""
    left = mm.task(lambda w, x: jnp.tanh(x @ w), "left", devices=[0, 1], device_axes=("m",))
    right = mm.task(lambda w, x: jax.nn.gelu(x @ w), "right", devices=[2])

    def score(a, b):
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(a @ b.T)))

    join = mm.task(score, "join", devices=[4, 5, 6, 7], device_axes=("m",))

    def loss(p, batch):
        return join(left(p["left"], batch["query"]), right(p["right"], batch["document"]))

    params = {"left": floats(6, WIDTH), "right": floats(5, WIDTH, seed=1)}
    batch = {"query": floats(8, 6, seed=2), "document": floats(8, 5, seed=3)}
    program = mm.jit(loss).lower(params, batch).program
    assert sorted(f.name for f in program.fragments) == ["join", "left", "right"]
    check(loss, params, batch)


def test_an_encoder_whose_output_feeds_every_decoder_stage():
    """A value read on three other submeshes; its gradient comes back from all of them."""

    def encode(w, x):
        return jnp.tanh(x @ w)

    def decode(p, memory, y):
        weights = jax.nn.softmax(y @ p["query"] @ memory.swapaxes(-1, -2))
        return y + jnp.tanh(weights @ memory @ p["value"])

    encoder = mm.task(encode, "encoder", devices=[0])
    decoders = [mm.task(decode, f"decoder{i}", devices=[i + 1]) for i in range(3)]

    def loss(p, batch):
        memory, y = encoder(p["encoder"], batch["source"]), batch["target"]
        for decoder, of_stage in zip(decoders, p["decoders"], strict=True):
            y = decoder(of_stage, memory, y)
        return jnp.mean(y**2)

    params = {
        "encoder": floats(WIDTH, WIDTH),
        "decoders": [{k: floats(WIDTH, WIDTH, seed=i) / 4 for k in ("query", "value")} for i in range(3)],
    }
    batch = {"source": floats(8, 5, WIDTH), "target": floats(8, 3, WIDTH, seed=1)}
    crossing = [(e.source, e.target) for e in mm.jit(loss).lower(params, batch).program.edges]
    assert [(0, t) in crossing for t in (1, 2, 3)] == [True] * 3
    check(loss, params, batch)


def test_a_mixture_of_experts():
    """Two groups of experts on two submeshes; the router's choice decides which rows count."""

    def experts(ws, gates, x):
        return jnp.einsum("be,bed->bd", gates, jnp.tanh(jnp.einsum("bi,eid->bed", x, ws)))

    router = mm.task(lambda w, x: jax.nn.softmax(x @ w), "router", devices=[0])
    groups = [mm.task(experts, f"experts{i}", devices=[2 * i + 2, 2 * i + 3], device_axes=("e",)) for i in range(2)]

    def loss(p, x):
        probabilities = router(p["router"], x)
        best, index = jax.lax.top_k(probabilities, 2)
        gates = jnp.sum(jax.nn.one_hot(index, 4) * best[..., None], 1)
        y = sum(g(w, gates[:, 2 * i : 2 * i + 2], x) for i, (g, w) in enumerate(zip(groups, p["experts"], strict=True)))
        balance = 4 * jnp.sum(jnp.mean(probabilities, 0) * jnp.mean(gates > 0, 0))
        return jnp.mean(y**2) + 0.01 * balance

    params = {"router": floats(WIDTH, 4), "experts": [floats(2, WIDTH, WIDTH, seed=i) for i in range(2)]}
    check(loss, params, floats(8, WIDTH, seed=5))


def test_an_nnx_model():
    """Split into a graph and a state; tasks merge the part they run."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(WIDTH, 16, rngs=rngs)
            self.second = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, x):
            h = mm.task(lambda m, x: nnx.relu(m(x)), "first", devices=[0])(self.first, x)
            return mm.task(lambda m, x: m(x), "second", devices=[1])(self.second, h)

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    check(lambda s, x: jnp.mean(nnx.merge(graph, s)(x) ** 2), state, floats(8, WIDTH))


def test_an_equinox_model():
    """Modules are pytrees: layers are arguments of tasks, their activation functions stay static."""
    keys = jax.random.split(jax.random.key(0), 2)
    model = [eqx.nn.MLP(WIDTH, WIDTH, 16, 1, key=k) for k in keys]
    tasks = [mm.task(lambda m, x: jax.vmap(m)(x), f"mlp{i}", devices=[i]) for i in range(2)]
    params, static = eqx.partition(model, eqx.is_array)

    def loss(params, x):
        for run, layer in zip(tasks, eqx.combine(params, static), strict=True):
            x = run(layer, x)
        return jnp.mean(x**2)

    check(loss, params, floats(8, WIDTH))


def test_bf16_compute_with_float32_master_weights():
    """Three steps of training; parameters and moments stay float32."""
    optimizer = optax.adamw(1e-2)

    def layer(w, x):
        return jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))

    stages = [mm.task(layer, f"stage{i}", devices=[i]) for i in range(2)]

    def loss(p, x):
        for stage, w in zip(stages, p, strict=True):
            x = stage(w, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(state, x):
        value, grads = microbatched(jax.value_and_grad(loss))(state[0], x)
        updates, moments = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    params = [floats(WIDTH, WIDTH), floats(WIDTH, WIDTH, seed=1)]
    state = plain = (params, optimizer.init(params))
    train, alone = mm.jit(step), jax.jit(step)
    for i in range(3):
        state, value = train(state, floats(8, WIDTH, seed=i))
        plain, expected = reference(alone, plain, floats(8, WIDTH, seed=i))
        assert_same(value, expected, tolerance=2e-2)
    assert_same(state, plain, tolerance=5e-2)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state) if x.ndim)


def test_dropout():
    """Another mask in every microbatch and layer, the same as without ManyMesh."""

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False)(jnp.tanh(nn.Dense(WIDTH)(x)))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = task(Noisy, f"noisy{i}", devices=[i])()(x)
            return x

    net = Net()
    params = initial(net.init, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, floats(8, WIDTH))["params"]

    def loss(p, x, key):
        return jnp.mean(net.apply({"params": p}, x, rngs={"dropout": key}) ** 2)

    looped = microbatched(jax.value_and_grad(loss), rng_argnum=2)
    for key in jax.random.split(jax.random.key(2)):
        assert_agrees(jax.value_and_grad(loss), params, floats(8, WIDTH), key)
        assert_agrees(looped, params, floats(8, WIDTH), key)


@pytest.mark.parametrize(
    "parts", [((0, 1, 2, 3), (4, 5), (6, 7)), ((0, 1), (2,), (3, 4, 5, 6))], ids=["4+2+2", "2+1+4"]
)
def test_submeshes_of_unequal_sizes(parts):
    """Data-parallel in each; also where a stage has one device."""

    def layer(w, x):
        return mm.with_sharding_constraint(jnp.tanh(x @ w), ("batch", None))

    stages = [
        mm.task(layer, f"stage{i}", mesh=mesh(ids), logical_axes=(("batch", "data"),)) for i, ids in enumerate(parts)
    ]

    def loss(p, x):
        for stage, w in zip(stages, p, strict=True):
            x = stage(w, x)
        return jnp.mean(x**2)

    params = [floats(WIDTH, WIDTH, seed=i) for i in range(3)]
    compiled = mm.jit(jax.grad(loss)).lower(params, floats(8, WIDTH)).compile()
    spans = {f.name: len(compiled.program.submeshes[f.submesh].devices.flat) for f in compiled.program.fragments}
    assert [spans[f"stage{i}_bwd"] for i in range(3)] == [len(p) for p in parts]
    check(loss, params, floats(8, WIDTH))


def two_stages():
    """Two dense layers whose weights are too large to be sent unseen, and their squared mean."""
    run = [mm.task(lambda w, x: jnp.tanh(x @ w), f"stage{i}", devices=[i]) for i in range(2)]

    def loss(p, x):
        return jnp.mean(run[1](p[1], run[0](p[0], x)) ** 2)

    return loss, [floats(32, 32, seed=i) / 6 for i in range(2)]


def train(step, state, steps=3):
    """Steps of the compiled and of the reference program, compared; returns the compiled step."""
    compiled, alone, plain = mm.jit(step), jax.jit(step), state
    for i in range(steps):
        state, value = compiled(state, floats(8, 32, seed=i))
        plain, expected = reference(alone, plain, floats(8, 32, seed=i))
        assert_same((state, value), (plain, expected), tolerance=1e-4)
    return compiled.lower(state, floats(8, 32)).compile()


def normed(scale, x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * scale * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)


def norm_before(run, p, h):
    for w, scale in zip(p["w"], p["scale"], strict=True):
        h = h + run(w, normed(scale, h))
    return h


def norm_after(run, p, h):
    for w, scale in zip(p["w"], p["scale"], strict=True):
        h = normed(scale, h + run(w, h))
    return h


def every_layer_before(run, p, h):
    layers = [h]
    for w in p["w"]:
        layers.append(run(w, sum(layers)))
    return layers[-1] + layers[1]


def highway(run, p, h):
    for w, scale in zip(p["w"], p["scale"], strict=True):
        h = normed(scale, h) * jax.nn.silu(run(w, normed(scale, h))) + jnp.tanh(h)
    return h


def skips_of_a_u_net(run, p, h):
    down = run(p["w"][0], h)
    middle = run(p["w"][1], normed(p["scale"][0], down))
    return run(p["w"][2], normed(p["scale"][1], middle + down)) * jax.nn.silu(down)


def two_layers_side_by_side(run, p, h):
    both = normed(p["scale"][0], h)
    h = h + run(p["w"][0], both) + run(p["w"][1], both)
    return normed(p["scale"][2], h + run(p["w"][2], normed(p["scale"][1], h)))


GLUES = [norm_before, norm_after, every_layer_before, highway, skips_of_a_u_net, two_layers_side_by_side]


@pytest.mark.parametrize("glue", GLUES)
def test_what_stands_between_tasks_leaves_a_pipeline(glue):
    """Norms, gates and skip connections outside of tasks: values go to later stages and their gradients to earlier ones."""
    stages = [mm.task(lambda w, x: jnp.tanh(x @ w), f"layer_{k}", devices=[k]) for k in range(3)]
    params = {"w": [floats(8, 8, seed=k) for k in range(3)], "scale": [jnp.ones(8)] * 3}

    def loss(p, x):
        layers = iter(stages)
        return jnp.mean(glue(lambda w, h: next(layers)(w, h), p, x) ** 2)

    step = microbatched(jax.value_and_grad(loss), num_microbatches=4)
    assert mm.jit(step, strict=True).lower(params, floats(16, 8)).program.loops[0].placement == (0, 1, 2)
    assert_agrees(step, params, floats(16, 8), tolerance=5e-5)


def bytes_of(compiled):
    """Bytes that cross in a step, between any submeshes."""
    return sum(e.nbytes for e in compiled.report().edges)


def test_gradient_accumulation_over_steps():
    """optax.MultiSteps decides in one lax.cond over all parameters; they stay where they are."""
    loss, params = two_stages()
    optimizer = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), every_k_schedule=2)

    def step(state, x):
        value, grads = microbatched(jax.value_and_grad(loss), num_microbatches=2)(state[0], x)
        updates, moments = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    compiled = train(step, (params, optimizer.init(params)), steps=4)
    assert bytes_of(compiled) < 4 * 8 * 32 * 4  # activations and scalars, no parameter


def test_an_average_of_parameters_metrics_and_two_loops():
    """An EMA beside the parameters, a loop that trains and one that only evaluates, and metrics of both."""
    loss, params = two_stages()

    def step(state, x):
        p, ema = state
        (value, norm), grads = microbatched(
            jax.value_and_grad(lambda p, x: (loss(p, x), jnp.max(x)), has_aux=True), num_microbatches=2
        )(p, x)
        p = jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)
        ema = jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, ema, p)
        evaluated = microbatched(loss, num_microbatches=4)(ema, x)
        return (p, ema), {"loss": value, "evaluated": evaluated, "largest": norm}

    compiled = train(step, (params, params))
    assert len(compiled.program.loops) == 2
    assert bytes_of(compiled) < 4 * 8 * 32 * 4
    ema = compiled.input_shardings[0][0][1]
    assert [sorted(d.id for d in s.device_set) for s in ema] == [[0], [1]]


def test_a_forward_program():
    """No gradients: results of every microbatch, in order."""
    loss, params = two_stages()
    run = [mm.task(lambda w, x: jnp.tanh(x @ w), f"stage{i}", devices=[i]) for i in range(2)]

    def predict(p, x):
        return run[1](p[1], run[0](p[0], x))

    assert_agrees(microbatched(predict, reduce="concat"), params, floats(8, 32))
    assert_agrees(predict, params, floats(8, 32))
