"""However a user writes that a layer takes its weights out of the stack: in the loop nothing is made of weights.

Made in each microbatch it would be held from the forward to the backward pass, by each microbatch that is under way: as many
copies of a stage's weights as there are of its activations.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import manymesh as mm
from stages import assert_same

LAYERS, WIDTH, ROWS = 4, 32, 16
STAGES = [Mesh(np.array([d]), ("m",), axis_types=(AxisType.Auto,)) for d in jax.devices()[:2]]


def layer(w, h):
    return h + jnp.tanh(h @ w["up"]) @ w["down"]


SCANNED = mm.task(layer, "layer", mesh=STAGES)
ALONE = [mm.task(layer, "layer", mesh=STAGES[i // 2]) for i in range(LAYERS)]


def scanned(ws, h):
    return lax.scan(lambda h, w: (SCANNED(w, h), None), h, ws)[0]


def alone(cut):
    """Each layer by itself, its weights cut out by a function."""

    def run(ws, h):
        for i in range(LAYERS):
            h = ALONE[i](jax.tree.map(lambda w: cut(w, i), ws), h)  # noqa: B023 (called at once)
        return h

    return run


def of_all(change):
    """The scan over what a function makes of the stacks."""
    return lambda ws, h: scanned(jax.tree.map(change, ws), h)


def stages(inside):
    """Two layers in a task, which takes their weights apart by itself."""
    tasks = [mm.task(inside, "layer", mesh=s) for s in STAGES]

    def run(ws, h):
        for i, task in enumerate(tasks):
            h = task(jax.tree.map(lambda w: w[2 * i : 2 * i + 2], ws), h)  # noqa: B023 (called at once)
        return h

    return run


def each(change=lambda w: w):
    """Layers one after the other, of what a function makes of the weights of each."""

    def run(ws, h):
        for j in range(2):
            h = layer(jax.tree.map(lambda w: change(w[j]), ws), h)  # noqa: B023 (called at once)
        return h

    return run


def counted(ws, h):
    return lax.fori_loop(0, LAYERS, lambda i, h: SCANNED(jax.tree.map(lambda w: w[i], ws), h), h)


WAYS = {
    "index": alone(lambda w, i: w[i]),
    "take": alone(lambda w, i: jnp.take(w, i, axis=0)),
    "dynamic": alone(lambda w, i: lax.dynamic_index_in_dim(w, i, keepdims=False)),
    "split": alone(lambda w, i: jnp.split(w, LAYERS)[i][0]),
    "list": alone(lambda w, i: list(w)[i]),
    "fori_loop": counted,
    "numbers": lambda ws, h: lax.scan(
        lambda h, i: (SCANNED(jax.tree.map(lambda w: w[i], ws), h), None), h, jnp.arange(LAYERS)
    )[0],
    "in a task, by a scan": stages(lambda ws, h: lax.scan(lambda h, w: (layer(w, h), None), h, ws)[0]),
    "in a task": stages(each()),
    "in a task, cast": stages(each(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32))),
    "in a task, scaled": stages(each(lambda w: w * 0.5)),
    "in a task, by numbers": stages(
        lambda ws, h: lax.fori_loop(0, 2, lambda j, h: layer(jax.tree.map(lambda w: w[j], ws), h), h)
    ),
    "a part": lambda ws, h: scanned(jax.tree.map(lambda w: w[:LAYERS], ws), h),
    "cast": of_all(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32)),
    "scaled": of_all(lambda w: w * 0.5),
    "normalised": of_all(lambda w: w / jnp.linalg.norm(w, axis=(1, 2), keepdims=True)),
    "transposed": alone(lambda w, i: w.swapaxes(1, 2)[i].T),
    "an adapter": of_all(lambda w: w + 0.1 * jnp.einsum("lij,ljk->lik", w[..., :2], w[:, :2, :])),
}


def step_of(way, schedule="gpipe"):
    optimizer = optax.adam(1e-2)

    def loss(ws, x):
        return jnp.mean((way(ws, x) - 1) ** 2)

    def step(ws, moments, x):
        grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=8, schedule=schedule, reduce="mean")
        value, grads = grad(ws, x)
        updates, moments = optimizer.update(grads, moments, ws)
        return optax.apply_updates(ws, updates), moments, value

    rng = np.random.default_rng(0)
    shapes = {"up": (LAYERS, WIDTH, WIDTH), "down": (LAYERS, WIDTH, WIDTH)}
    ws = {k: jnp.asarray(rng.normal(size=s), jnp.float32) / WIDTH for k, s in shapes.items()}
    return step, (ws, optimizer.init(ws), jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32))


def peak(lowered):
    return max(memory.peak_bytes for memory in lowered.report().memory.values())


@pytest.fixture(scope="module")
def usual():
    """The most bytes that a device holds where the scan takes the stacks as they are."""
    step, args = step_of(scanned)
    return peak(mm.jit(step).lower(*args))


@pytest.mark.parametrize("name", WAYS)
def test_weights_are_cut_out_once(name, usual):
    step, args = step_of(WAYS[name])
    jitted = mm.jit(step)
    lowered = jitted.lower(*args)
    in_loop = [f.name for f in lowered.program.fragments if f.loop is not None]
    assert all(each.startswith("layer") for each in in_loop)
    # What is made of weights is held once, and so is what their gradients are made of; not eight times.
    weights = sum(w.nbytes for w in jax.tree.leaves(args[0])) // 2
    assert peak(lowered) <= usual + 2 * weights
    with mm.ignore_transforms():
        wanted = jax.jit(step)(*args)
    assert_same(jitted(*args), wanted)


def test_a_penalty_on_weights_is_computed_once():
    """What every microbatch would add to its loss is one number; it is made of all weights."""

    def loss(ws, x):
        return jnp.mean(scanned(ws, x) ** 2) + 1e-3 * sum(jnp.sum(w**2) for w in jax.tree.leaves(ws))

    step, (ws, _, x) = step_of(scanned)
    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=8, schedule="1f1b", reduce="mean")
    step = mm.jit(lambda ws, x: grad(ws, x))
    fragments = step.lower(ws, x).program.fragments
    assert all(f.name.startswith("layer") for f in fragments if f.loop is not None)
    squares = [f.loop for f in fragments if re.search(r"32,32\] = integer_pow\[y=2", str(f.jaxpr))]
    assert squares and set(squares) == {None}
    with mm.ignore_transforms():
        wanted = jax.jit(lambda ws, x: grad(ws, x))(ws, x)
    assert_same(step(ws, x), wanted)


def test_what_each_layer_adds_to_the_loss_is_no_launch():
    """Stacked by the scan, as a balance of experts is; the gradient of each is the same number in every microbatch."""
    balanced = mm.task(lambda w, h: ((n := layer(w, h)), jnp.mean(jax.nn.softmax(n) ** 2)), "layer", mesh=STAGES)

    def loss(ws, x):
        h, balance = lax.scan(lambda h, w: balanced(w, h), x, ws)
        return jnp.mean(h**2) + 0.01 * jnp.sum(balance)

    _, (ws, _, x) = step_of(scanned)
    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=8, schedule="1f1b", reduce="mean")
    step = mm.jit(lambda ws, x: grad(ws, x))
    assert len([f for f in step.lower(ws, x).program.fragments if f.loop is not None]) == 2 * LAYERS
    with mm.ignore_transforms():
        wanted = jax.jit(lambda ws, x: grad(ws, x))(ws, x)
    assert_same(step(ws, x), wanted)


def merged(rank):
    """A layer that adds what is made of two adapters to each of its weights."""

    def run(w, h):
        w = {k: v + 0.1 * v[:, :rank] @ v[:rank] for k, v in w.items()}
        return layer(w, h)

    return run


ADAPTED = mm.task(merged(2), "layer", mesh=STAGES)
WITHIN = {
    "each in a task": lambda ws, h: lax.scan(lambda h, w: (ADAPTED(w, h), None), h, ws)[0],
    "one after the other": stages(lambda ws, h: merged(2)({k: w[1] for k, w in ws.items()}, h)),
    "by a scan": stages(lambda ws, h: lax.scan(lambda h, w: (merged(2)(w, h), None), h, ws)[0]),
}
PLAIN = {
    "each in a task": scanned,
    "one after the other": stages(lambda ws, h: layer({k: w[1] for k, w in ws.items()}, h)),
    "by a scan": WAYS["in a task, by a scan"],
}


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble-h1"])
@pytest.mark.parametrize("name", WITHIN)
def test_a_merged_weight_is_not_held_by_each_microbatch(name, schedule):
    """It is as large as a weight, and made of little: the backward pass makes it again."""

    def held(way):
        step, (ws, moments, _) = step_of(way, schedule)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(32 * ROWS, WIDTH)), jnp.float32)
        lowered = mm.jit(step).lower(ws, moments, x)
        peak = max(lowered.report().memory.values(), key=lambda memory: memory.peak_bytes)
        return step, (ws, moments, x), peak.made_of["activations"]

    *_, usual = held(PLAIN[name])
    step, args, activations = held(WITHIN[name])
    assert activations <= usual
    with mm.ignore_transforms():
        wanted = jax.jit(step)(*args)
    assert_same(mm.jit(step)(*args), wanted)
