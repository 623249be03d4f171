"""What tasks keep for their backward pass: the fewest bytes, and nothing expensive computed twice."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import manymesh as mm
from flat import switch_off
from manymesh._key import Keys
from manymesh._passes import _cheap, _residuals
from manymesh._passes._cut import Network
from manymesh._program._calls import inlined
from stages import WIDTH, assert_agrees, rows

pytestmark = pytest.mark.once

ROWS = 8
ACTIVATION = ROWS * WIDTH * 4  # bytes


# The minimum cut


@st.composite
def networks(draw):
    """Edges between few nodes, each with a capacity; 0 is the source, 1 the sink."""
    nodes = draw(st.integers(2, 6))
    pairs = [(a, b) for a, b in itertools.permutations(range(nodes), 2) if a != 1 and b != 0]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=14))
    return nodes, {pair: draw(st.sampled_from([0, 1, 2, 3, 7, float("inf")])) for pair in chosen}


@given(networks())
def test_the_cut_is_minimal_and_closest_to_the_sink(case):
    """Beside every possible cut."""
    nodes, edges = case
    network = Network()
    network.add(0, 1, 0)
    for (a, b), capacity in edges.items():
        if (b, a) not in edges:  # one direction between two nodes, as in the network of a task
            network.add(a, b, capacity)
    kept = {(a, b): c for (a, b), c in edges.items() if (b, a) not in edges}

    def price(behind):
        return sum(c for (a, b), c in kept.items() if a not in behind and b in behind)

    others = range(2, nodes)
    sides = [{1, *more} for k in range(len(others) + 1) for more in itertools.combinations(others, k)]
    best = min(price(side) for side in sides)
    if best == float("inf"):
        return
    network.fill(0, 1)
    found = {node for node in network.behind(1) if node in {1, *others}}
    assert price(found) == best
    assert all(found <= side for side in sides if price(side) == best)


# Programs


def kept_bytes(fun, *args, **options):
    """Bytes that the forward fragments of the gradient hand to their backward fragments, once a microbatch."""
    program = mm.jit(gradient(fun, **options)).trace(*args).lower().program
    body = list(program.body(0))
    read = {v for f in body if f.kind != "F" for v in f.invars}
    return sum(
        int(np.prod(v.aval.shape)) * v.aval.dtype.itemsize
        for f in body if f.kind == "F" for v in f.outvars if v in read
    )  # fmt: skip


def gradient(fun, schedule="1f1b", devices=(0, 1)):
    """Of the mean over a microbatch loop, of two tasks with ``fun`` between two matrix products."""

    def layer(w, x):
        return fun(x @ w) @ w

    tasks = [mm.task(layer, f"layer_{k}", devices=[d]) for k, d in enumerate(devices)]

    def loss(w, x):
        for task in tasks:
            x = task(w, x)
        return jnp.mean(x**2)

    return mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, schedule=schedule, reduce="mean")


def arguments():
    return jnp.asarray(np.random.default_rng(3).normal(size=(WIDTH, WIDTH)), jnp.float32), rows(2 * ROWS)


# An activation function, and the bytes that a layer keeps of it.
CASES = {
    "gelu": (jax.nn.gelu, 2 * ACTIVATION),  # the operand and its tanh
    "relu": (jax.nn.relu, ACTIVATION),  # the operand, from which mask and result follow
    "silu": (jax.nn.silu, 2 * ACTIVATION),  # the operand and its sigmoid
    "tanh": (jnp.tanh, ACTIVATION),  # the result
    "polynomial": (lambda x: x**3 + 2 * x**2 - x, ACTIVATION),  # the operand
    "scaled": (lambda x: 3 * jnp.exp(x) + 1, ACTIVATION),  # the exponential
    "named": (lambda x: checkpoint_name(jnp.tanh(x), "h"), ACTIVATION),  # the result: a name is no value of its own
    "dropout": (lambda x: jnp.where(x > 0.5, x, 0) / 0.9, ACTIVATION + ROWS * WIDTH),  # the result, and a mask
    # The operand, the minimum, where it is, and how often: looked for again, it could be equal to no element.
    "lowest": (lambda x: x**2 - (0.3 * x + 0.1).min(axis=-1, keepdims=True), ACTIVATION + ROWS * WIDTH + 8 * ROWS),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_of_an_activation_function(name):
    """As a hand would count: beside the input of the layer, which the gradient of its first weight reads."""
    fun, expected = CASES[name]
    linear = kept_bytes(lambda x: x, *arguments())
    # A linear layer keeps x @ w for its second product; what an activation function keeps takes its place.
    assert kept_bytes(fun, *arguments()) - linear == 2 * (expected - ACTIVATION)
    assert_agrees(gradient(fun), *arguments())


# On an accelerator a function of one element costs nothing beside what it is read from. Of "lowest" the minimum stays.
ON_ACCELERATORS = CASES | {name: (CASES[name][0], ACTIVATION) for name in ("gelu", "silu", "dropout")}


@pytest.mark.parametrize("name", ON_ACCELERATORS)
def test_what_is_kept_on_an_accelerator(name):
    """Planned devices stand for some. Functions of one element are computed again, sums and extrema are not."""
    fun, expected = ON_ACCELERATORS[name]
    args = jax.eval_shape(arguments)
    linear = kept_bytes(lambda x: x, *args, devices=mm.planned_devices(2))
    assert kept_bytes(fun, *args, devices=mm.planned_devices(2)) - linear == 2 * (expected - ACTIVATION)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_as_on_an_accelerator(name, monkeypatch):
    """Those of the reference mode, though more is computed again."""
    monkeypatch.setattr(_residuals.Minimiser, "_cheap", lambda self, n: _cheap._CHEAP | _cheap._FUNCTIONS)
    assert_agrees(gradient(CASES[name][0]), *arguments())


def test_logits_in_half_precision_are_kept_and_their_exponentials_are_not():
    """The loss of a language model in bfloat16, whose softmax is float32."""

    def loss(w, x):
        logits = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
        return jax.nn.logsumexp(logits, axis=-1).mean()

    (device,) = mm.planned_devices(1)
    head = mm.task(loss, "head", devices=[device])
    grad = mm.microbatch(jax.value_and_grad(head), argnum=1, num_microbatches=2, schedule="1f1b", reduce="mean")
    program = (
        mm.jit(grad).lower(jax.ShapeDtypeStruct((WIDTH, 64), "f4"), jax.ShapeDtypeStruct((8, WIDTH), "f4")).program
    )
    forward, backward = program.body(0)
    kept = [v.aval for v in forward.outvars if v in set(backward.invars)]
    assert [(a.shape, a.dtype) for a in kept if a.size > 4 * WIDTH] == [((4, 64), jnp.bfloat16)]


MASK = np.tri(ROWS, dtype=bool)
OF_JAX = jnp.asarray(MASK)


def looking_back(x, mask):
    """Attention of each row to those before it."""
    return jax.nn.softmax(jnp.where(mask, x @ x.T, -1e9)) @ x


# Ways to a mask; all but the first close over an array.
MASKED = {
    "computed": lambda x: looking_back(x, jnp.tri(len(x), dtype=bool)),
    "around": lambda x: looking_back(x, MASK),
    "of jax": lambda x: looking_back(x, OF_JAX),
    "made in it": lambda x: looking_back(x, np.tri(len(x), dtype=bool)),
    "in a jit": jax.jit(lambda x: looking_back(x, np.tri(len(x), dtype=bool))),
    "in a jit in a jit": jax.jit(lambda x: jax.jit(lambda x: looking_back(x, MASK))(x) * MASK[-1, -1:]),
    "twice": lambda x: jax.jit(lambda x: looking_back(x, MASK))(x) + 0 * x * MASK[:, :1],
}


@pytest.mark.parametrize("name", MASKED)
def test_a_task_that_closes_over_an_array_keeps_as_little(name):
    """As one that computes the mask; no mask is kept, for it is no secret."""
    computed = kept_bytes(MASKED["computed"], *arguments())
    assert kept_bytes(MASKED[name], *arguments()) <= computed
    assert_agrees(gradient(MASKED[name]), *arguments())


def recurrence(x):
    """Each row from those before it, whose derivative pads with zeros."""
    both = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
    return jax.lax.associative_scan(both, (jax.nn.sigmoid(x), x))[1]


LARGEST = {
    "none is larger": lambda s: s >= jnp.max(s, -1, keepdims=True),
    "some is larger": lambda s: ~(s < jnp.max(s.astype("float32"), -1, keepdims=True)),
    "the first of them": lambda s: s == jnp.take_along_axis(s, jnp.argmax(s, -1, keepdims=True), -1),
    "two of them": lambda s: s >= jax.lax.top_k(s, 2)[0][:, 1:],
    "none is above zero": lambda s: s - jnp.max(s, -1, keepdims=True) >= 0,
    "none is larger, if any is": lambda s: (
        s >= jnp.maximum(0.1, jnp.max(jnp.max(s.reshape(6, 2, 4), -1), -1, keepdims=True))
    ),
    "none comes after it": lambda s: s >= jnp.sort(s, -1)[:, -1:],
}


@pytest.mark.parametrize("name", LARGEST)
def test_what_is_compared_with_one_of_them_is_compared_once(name):
    """Computed again in another executable, none need be equal to it to the last bit: what was found is kept."""
    front = mm.task(lambda w, x: jnp.where(LARGEST[name](s := (x @ w[0]) * w[1] + w[2]), s, 0.0), "front", devices=[0])
    back = mm.task(lambda x: jnp.sum(x**2), "back", devices=[1])
    grad = jax.grad(lambda w, x: back(front(w, x)))
    w, x = (np.eye(4, 8, dtype="float32"), np.linspace(1, 2, 8, dtype="float32"), np.ones(8, "float32")), np.eye(6, 4)
    args = w, x.astype("float32")
    (forward,) = [f for f in mm.jit(grad).lower(*args).program.fragments if f.name == "front"]
    assert "bool[6,8]" in [v.aval.str_short() for v in forward.outvars]
    assert_agrees(grad, *args)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_compared_with_the_larger_of_two_is_compared_once(dtype):
    """The larger one is there for the backward pass, and what it is compared with is not, but could be computed again."""

    def layer(w, x):
        one = x * w[0] + w[1]
        z = jnp.maximum(one.astype("float32"), x * x).astype(x.dtype)
        return z * z + jnp.where(one >= z, x, w[1]) * w[0], z

    front = mm.task(layer, "front", devices=[0])
    back = mm.task(lambda y, z: (jnp.sum(y**2) * jnp.sum(z**2)).astype("float32"), "back", devices=[1])
    grad = jax.grad(lambda w, x: back(*front(w, x)))
    w, x = (jnp.asarray(np.random.default_rng(n).integers(-8, 8, (n, 8)) / 4, dtype) for n in (2, 6))
    (backward,) = [f for f in mm.jit(grad).lower(w, x).program.fragments if f.name == "front_bwd"]
    assert "ge" not in {e.primitive.name for e in inlined(list(backward.jaxpr.eqns))[0]}
    if dtype == "float32":
        assert_agrees(grad, w, x)


def test_a_number_is_not_kept():
    """The backward pass has its own zeros."""
    body = list(mm.jit(gradient(recurrence)).lower(*arguments()).program.body(0))
    read = {v for f in body if f.kind != "F" for v in f.invars}
    kept = [v.aval.shape for f in body if f.kind == "F" for v in f.outvars if v in read]
    assert kept and () not in kept
    assert_agrees(gradient(recurrence), *arguments())


def test_what_the_host_and_loops_make_of_nothing_is_made_once():
    """The backward pass reads what the forward pass did, whatever the host would say to it."""

    def layer(w, x):
        table = jax.pure_callback(lambda: np.full(WIDTH, 2.0, "f4"), jax.ShapeDtypeStruct((WIDTH,), "f4"))
        powers = lax.while_loop(lambda p: p < 1000, lambda p: p * 2, 1)
        return x @ (w * table) / powers

    fun = jax.grad(lambda w, x: jnp.sum(mm.task(layer, "layer", devices=[0])(w, x)))
    program = mm.jit(fun).lower(*arguments()).program
    found = Counter(e.primitive.name for f in program.fragments for e in inlined(f.jaxpr.eqns)[0])
    assert found["pure_callback"] == found["while"] == 1
    assert_agrees(fun, *arguments())


def eight(layer):
    """The program of the gradient of eight equal layers, four on each submesh, in a loop over microbatches."""
    layers = [mm.task(layer, f"layer_{k}", devices=[k // 4]) for k in range(8)]

    def loss(ws, x):
        for layer, w in zip(layers, ws, strict=True):
            x = layer(w, x)
        return jnp.mean(x**2)

    w, x = arguments()
    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, schedule="1f1b")
    return mm.jit(grad).trace([w] * 8, x).lower().program


def test_layers_that_make_a_mask_each_are_equal_and_share_it():
    """One constant of the program, on both submeshes, and one executable for all between the first and the last."""
    program = eight(lambda w, x: looking_back(x, np.tri(len(x), dtype=bool)) @ w)
    masks = [v for v in program.invars[: len(program.consts)] if v.aval.shape == MASK.shape]
    assert [program.input_submeshes[v] for v in masks] == [(0, 1)]
    keys = Keys()
    body = list(program.body(0))
    for kind in "FB":  # the first has no gradient of x, the last is beside the loss
        assert len({keys(f.jaxpr) for f in body if f.kind == kind}) == 3


@pytest.mark.parametrize("name", ["attention", "perceptron"])
def test_of_equal_sizes_what_is_in_memory_anyway_is_kept(name):
    """On an accelerator: the product itself, not its softmax, and the product with its bias, which is read by the next one."""

    def attention(w, x):
        q, k, v = jnp.split(x @ w, 3, -1)
        scores = jnp.where(jnp.tri(len(x), dtype=bool), (q @ k.T) / 2, -1e9)
        return jnp.mean((jax.nn.softmax(scores) @ v) ** 2)

    def perceptron(w, x):
        return jnp.mean((jax.nn.gelu(x @ w + w[0]) @ w.T) ** 2)

    (device,) = mm.planned_devices(1)
    task = mm.task({"attention": attention, "perceptron": perceptron}[name], "task", devices=[device])
    grad = mm.microbatch(jax.value_and_grad(task), argnum=1, num_microbatches=2, schedule="1f1b", reduce="mean")
    program = mm.jit(grad).lower(jax.ShapeDtypeStruct((8, 48), "f4"), jax.ShapeDtypeStruct((512, 8), "f4")).program
    forward, backward = program.body(0)
    eqns, renamed = inlined(list(forward.jaxpr.eqns))
    producer = {v: e for e in eqns for v in e.outvars}
    kept = {outer: renamed.get(v, v) for outer, v in zip(forward.outvars, forward.jaxpr.outvars, strict=True)}
    shape, primitive = {"attention": ((256, 256), "dot_general"), "perceptron": ((256, 48), "add")}[name]
    made_by = [
        producer[v].primitive.name for o, v in kept.items() if o in set(backward.invars) and o.aval.shape == shape
    ]
    assert made_by == [primitive]


def expensive(program):
    """How often each operation that is not cheap appears in the fragments of a program."""
    found = Counter()

    is_cheap = _cheap._Cheap(_cheap._CHEAP)

    def count(eqns):
        for e in inlined(eqns)[0]:
            if not is_cheap(e):
                found[e.primitive.name] += 1

    for fragment in program.fragments:
        count(fragment.jaxpr.eqns)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_expensive_is_computed_twice(name, schedule, monkeypatch):
    """The same products, exponentials and sums as without, under a schedule that splits the backward pass too."""
    fun, _ = CASES[name]
    thin = mm.jit(gradient(fun, schedule)).trace(*arguments()).lower().program
    switch_off(monkeypatch, "minimise_residuals")
    thick = mm.jit(gradient(fun, schedule)).trace(*arguments()).lower().program
    assert expensive(thin) == expensive(thick)
    assert [f.kind for f in thin.fragments] == [f.kind for f in thick.fragments]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, schedule):
    """Those of the reference mode."""
    assert_agrees(gradient(CASES[name][0], schedule), *arguments())


def test_equal_layers_share_what_was_found(monkeypatch):
    """The cut is looked for once, and the layers stay one executable."""
    cuts = []
    real = _residuals.cheapest
    monkeypatch.setattr(_residuals, "cheapest", lambda *args: cuts.append(1) or real(*args))
    body = list(eight(lambda w, x: jax.nn.gelu(x @ w)).body(0))
    assert len(cuts) <= 3  # of eight layers; the first has no gradient of x
    keys = Keys()
    assert len({keys(f.jaxpr) for f in body if f.kind == "B"}) == 3  # the last is beside the gradient of the loss


def test_a_long_chain_of_cheap_operations():
    """More than Python would recurse into; of all their results only the first is kept."""

    def chain(x):
        y = x
        for _ in range(600):
            y = 0.99 * y + 0.1
        return x * x * y * y

    linear = kept_bytes(lambda x: x, *arguments())
    assert kept_bytes(chain, *arguments()) == linear


def test_a_cast_weight_is_not_kept():
    """Not even one cast inside an expression: the weight is there anyway."""

    def half(w, x):
        return (x.astype(jnp.bfloat16) @ (2 * w.astype(jnp.bfloat16))).astype(jnp.float32)

    tasks = [mm.task(half, f"half_{k}", devices=[k]) for k in range(2)]

    def loss(ws, x):
        for task, w in zip(tasks, ws, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    w, x = arguments()
    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, schedule="1f1b")
    program = mm.jit(grad).trace((w, w + 1), x).lower().program
    body = list(program.body(0))
    read = {v for f in body if f.kind != "F" for v in f.invars}
    shapes = [v.aval.shape for f in body if f.kind == "F" for v in f.outvars if v in read]
    assert (WIDTH, WIDTH) not in shapes
