"""Gradients are summed over the devices that share a batch once a call, not once a microbatch: read in the compiled text."""

import re
from math import prod
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import manymesh as mm
from flat import switch_off
from manymesh._passes._unreduced._links import links
from stages import assert_same, reference

pytestmark = pytest.mark.once

C = mm.with_sharding_constraint
RULES = (("batch", "data"), ("hidden", "model"))
COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")


def meshes(data=2, model=2, axes=("data", "model")):
    devices = np.array(jax.devices()[: 2 * data * model]).reshape(2, data, model)
    return [Mesh(d, axes) for d in devices]


def two(body, *, on=None, rules=RULES, second=None):
    """A loss of two stages on submeshes; parameters ``{"one", "two"}``."""
    on = meshes() if on is None else on
    one = mm.task(body, "one", mesh=on[0], logical_axes=rules)
    other = mm.task(body if second is None else second, "two", mesh=on[1], logical_axes=rules)
    return lambda p, x: jnp.mean(other(p["two"], one(p["one"], x)) ** 2)


def step_of(fun, **options):
    """`fun` over two microbatches."""
    options = {"argnum": 1, "num_microbatches": 2, "reduce": "mean", **options}
    return lambda p, x: mm.microbatch(fun, **options)(p, x)


def training(loss, **options):
    return step_of(jax.value_and_grad(loss), **options)


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape) * 0.3, jnp.float32)


def pair(*shape):
    return {"one": array(*shape, seed=1), "two": array(*shape, seed=2)}


def collectives(compiled, loop):
    """(fragment, shapes of what it moves) of each collective inside or outside loops."""
    lowered = compiled._lowered
    found = []
    for fragment, executable in zip(compiled.program.fragments, lowered.executables, strict=True):
        if (fragment.loop is not None) == loop:
            for match in COLLECTIVE.finditer(executable.as_text()):
                shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
                found.append((fragment.name, [tuple(map(int, filter(None, s.split(",")))) for s in shapes]))
    return found


def summed_once(step, *args, tolerance=2e-5):
    """Compiles a step, compares it with the reference mode, and checks that nothing is summed in its loops."""
    compiled = mm.jit(step).lower(*args).compile()
    assert collectives(compiled, loop=True) == []
    moved = [s for _, shapes in collectives(compiled, loop=False) for s in shapes]
    assert len(moved) == sum(bool(r.axes) for r in compiled.program.reductions) > 0
    assert all(r.axes and not r.why for r in compiled.program.reductions)
    assert_same(compiled(*args), reference(jax.jit(step), *args), tolerance)
    return compiled


# --- a transformer-like model, data and tensor parallel ---------------------------------------------


def block(p, x):
    """Layer normalisation and two dense layers, the hidden dimension over ``model``: x of [batch, sequence, embed]."""
    x = C(x, ("batch", None, None))
    centered = x - x.mean(-1, keepdims=True)
    y = centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["offset"]
    h = jnp.tanh(jnp.einsum("bse,eh->bsh", y, C(p["up"], (None, "hidden"))) + p["bias"])
    return x + jnp.einsum("bsh,he->bse", h, p["down"])


def transformer(on):
    """Embedding and output head are tied and lie on two submeshes."""

    def head(table, x, y):
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ table.T), y[..., None], -1))

    embed = mm.task(lambda table, ids: table[C(ids, ("batch", None))], "embed", mesh=on[0], logical_axes=RULES)
    blocks = [mm.task(block, f"block{i}", mesh=on[i], logical_axes=RULES) for i in (0, 1)]
    out = mm.task(head, "head", mesh=on[1], logical_axes=RULES)

    def loss(p, batch):
        x = embed(p["table"], batch["x"])
        for run, q in zip(blocks, p["blocks"], strict=True):
            x = run(q, x)
        return out(p["table"], x, batch["y"])

    layer = lambda i: {  # noqa: E731
        "up": array(8, 16, seed=i), "down": array(16, 8, seed=i), "scale": 1 + array(8, seed=i),
        "offset": array(8, seed=i + 2), "bias": array(16, seed=i),
    }  # fmt: skip
    ids = np.random.default_rng(0).integers(0, 32, (2, 8, 6))
    return loss, {"table": array(32, 8), "blocks": [layer(0), layer(1)]}, {"x": ids[0], "y": ids[1]}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
def test_only_tensor_parallel_collectives_are_left_in_the_loop(schedule):
    """With hidden dimensions over `model`, each block moves one activation forward and one back, and no gradient."""
    loss, p, batch = transformer(meshes())
    step = training(loss, schedule=schedule)
    compiled = mm.jit(step).lower(p, batch).compile()
    inside = collectives(compiled, loop=True)
    assert sorted(name for name, _ in inside) == ["block0", "block0_bwd", "block1", "block1_bwd"]
    assert all(shapes == [(2, 6, 8)] for _, shapes in inside), inside
    # 5 parameters a block, the table on each of two submeshes, and the loss: each once.
    outside = collectives(compiled, loop=False)
    assert sum(len(shapes) for _, shapes in outside) == 13
    assert {r.axes for r in compiled.program.reductions} == {("data",)} and len(compiled.program.reductions) == 13
    assert "13 of 13 sums over a sharded batch are taken once a call" in str(compiled.report())
    assert_same(compiled(p, batch), reference(jax.jit(step), p, batch))


@pytest.mark.parametrize("update", [False, True])
def test_waiting_takes_no_memory(monkeypatch, update):
    """Each device keeps as many bytes as when every microbatch is summed, and a total takes over the parts' buffer."""
    loss, p, batch = transformer(meshes(4, 1))

    def step(p, batch):
        _, grads = training(loss)(p, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads) if update else grads

    waiting = mm.jit(step, donate_argnums=0).lower(p, batch).compile()
    switch_off(monkeypatch, "leave_unreduced")
    at_once = mm.jit(step, donate_argnums=0).lower(p, batch).compile()
    assert any((8, 16) in shapes for _, shapes in collectives(at_once, loop=True)), "the comparison sums in the loop"
    for device, memory in at_once.memory_analysis().items():
        assert waiting.memory_analysis()[device].peak_bytes <= memory.peak_bytes
    finals = {final for *_, final in waiting.program.loops[0].carries}
    totals = [f for f in waiting.program.fragments if not finals.isdisjoint(f.invars)]
    assert {f.submesh for f in totals} == {0, 1}
    for f in totals:
        text = waiting._lowered.executables[f.index].as_text().splitlines()[0]
        assert text.count("may-alias") + text.count("must-alias") == len(f.outvars)


def test_every_schedule_gives_the_same_bits():
    """Law 2 with parts."""
    loss, p, batch = transformer(meshes())
    results = [
        mm.jit(training(loss, schedule=s, num_microbatches=4))(p, batch) for s in ("gpipe", "1f1b", "eager-1f1b")
    ]
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), results[0], other)


# --- what can wait ----------------------------------------------------------------------------------


def dense(w, x):
    return jnp.tanh(C(x, ("batch", None)) @ w)


def half(w, x):
    """bf16 compute, float32 parameters and sums."""
    return jnp.tanh(C(x, ("batch", None)).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)


def scanned(ws, x):
    """Stacked layers: the gradient leaves a scan step by step."""
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), C(x, ("batch", None)), ws)[0]


def remat_scanned(ws, x):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), C(x, ("batch", None)), ws)[0]


def repeated(w, x):
    """One weight in every step: the scan adds its gradient up."""
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), C(x, ("batch", None)), None, length=3)[0]


def convolution(w, x):
    dims = ("NHWC", "HWIO", "NHWC")
    x = C(x, ("batch", None, None, None))
    return jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims))


def depthwise(w, x):
    dims = ("NHWC", "HWIO", "NHWC")
    x = C(x, ("batch", None, None, None))
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=4)


def attention(w, x):
    """Batch dimensions of a contraction, a reshape that merges batch and sequence, and one that splits embed."""
    q = (C(x, ("batch", None, None)).reshape(-1, 8) @ w).reshape(*x.shape[:2], 2, 4)
    return x + jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, q)), q).reshape(x.shape)


def added_twice(w, x):
    """The terms of a gradient meet inside the task, one through a slice and a pad."""
    return jnp.tanh(C(x, ("batch", None)) @ w) + x[:, :4] @ w[:4] * 2.0


def stacked(w, x):
    """Two branches in one value, as of a mixture."""
    x = C(x, ("batch", None))
    return jnp.max(jnp.stack([jnp.tanh(x @ w), x @ w], -1), -1)


def unstacked(w, x):
    """A part of each for gates and for values; the gradient of the weight is one of pieces that are stacked."""
    gates, values = jnp.unstack(jnp.stack([C(x, ("batch", None)), x * 2.0], 1) @ w, axis=1)
    return jnp.tanh(gates) * values


def weights_unstacked(w, x):
    """Layers of a stack in a Python loop."""
    x = C(x, ("batch", None))
    for layer in jnp.unstack(w):
        x = jnp.tanh(x @ layer)
    return x


def changed(change):
    """A layer whose weight has a gradient of which something is made in the task."""

    @jax.custom_vjp
    def own(w):
        return w

    own.defvjp(lambda w: (w, None), lambda _, g: (change(g),))
    return lambda w, x: dense(own(w), x)


def selected(g):
    """In a call, of numbers of which one is made there and one is handed in."""
    even = jnp.arange(g.size).reshape(g.shape) % 2 == 0
    made = jax.jit(lambda: jnp.zeros(g.shape))
    return (
        jax.jit(lambda g, zero: jax.lax.select(even, g, zero))(jax.lax.select(~even, g, made()), jnp.zeros(g.shape)) + g
    )


FORMS = {
    "a barrier": (changed(lambda g: sum(jax.lax.optimization_barrier((g, 2 * g)))), (8, 8), (8, 8), {}),
    "in a loop": (changed(lambda g: jax.lax.fori_loop(0, 3, lambda _, g: 0.5 * g, g)), (8, 8), (8, 8), {}),
    "selected": (changed(selected), (8, 8), (8, 8), {}),
    "stacked": (stacked, (8, 8), (8, 8), {}),
    "unstacked": (unstacked, (8, 8), (8, 8), {}),
    "unstacked weights": (weights_unstacked, (2, 8, 8), (8, 8), {}),
    "dense": (dense, (8, 8), (8, 8), {}),
    "remat": (jax.checkpoint(dense), (8, 8), (8, 8), {}),
    "bf16": (half, (8, 8), (8, 8), {}),
    "scan": (scanned, (3, 8, 8), (8, 8), {}),
    "remat in scan": (remat_scanned, (3, 8, 8), (8, 8), {}),
    "one weight in a scan": (repeated, (8, 8), (8, 8), {}),
    "convolution": (convolution, (3, 3, 4, 4), (8, 6, 6, 4), {}),
    "depthwise convolution": (depthwise, (3, 3, 1, 4), (8, 6, 6, 4), {}),
    "attention": (attention, (8, 8), (8, 6, 8), {}),
    "added twice": (added_twice, (8, 8), (8, 8), {}),
    "batch second": (lambda w, x: jnp.tanh(C(x, (None, "batch", None)) @ w), (8, 8), (6, 8, 8), {"dim": 1}),
    "last": (dense, (8, 8), (8, 8), {"reduce": "last"}),
    "sum": (dense, (8, 8), (8, 8), {"reduce": "sum"}),
    "split backward": (dense, (8, 8), (8, 8), {"schedule": "zero-bubble-h1"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_sums_that_wait(form):
    """Many ways in which a weight meets a batch, on submeshes that are all data parallel."""
    body, weight, batch, options = FORMS[form]
    step = training(two(body, on=meshes(4, 1)), **options)
    summed_once(step, pair(*weight), array(*batch), tolerance=3e-2 if form == "bf16" else 2e-5)


def test_a_barrier_around_all_that_is_added_up():
    """Of two submeshes, and with what is a number."""
    fun = jax.value_and_grad(two(dense, on=meshes(4, 1)))
    summed_once(step_of(lambda p, x: jax.lax.optimization_barrier(fun(p, x))), pair(8, 8), array(8, 8))


@pytest.mark.parametrize("start", [0.0, jnp.float32(0)])
@pytest.mark.parametrize("remat", [False, True])
def test_a_loss_in_pieces(start, remat):
    """Summed piece by piece in a scan, to save memory: what it starts with may be a Python number."""

    def in_pieces(w, x):
        def add(total, piece):
            return total + jnp.sum((C(piece, ("batch", None)) @ w[:4]) ** 2), None

        pieces = jnp.moveaxis(x.reshape(len(x), 2, 4), 1, 0)
        return jax.lax.scan(jax.checkpoint(add) if remat else add, start, pieces)[0] / x.size

    first, second = (
        mm.task(f, f.__name__, mesh=m, logical_axes=RULES)
        for f, m in zip((dense, in_pieces), meshes(4, 1), strict=True)
    )
    step = training(lambda p, x: second(p["two"], first(p["one"], x)))
    compiled = summed_once(step, pair(8, 8), array(8, 8))
    assert {r.value for r in compiled.program.reductions} == {"float32[]", "float32[8,8]"}


def test_the_sharding_travels():
    """To a stage that says nothing, to a smaller submesh, and from a constraint outside every task."""
    plain = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    summed_once(training(two(dense, second=plain, on=meshes(4, 1))), pair(8, 8), array(8, 8))
    devices = np.array(jax.devices())
    unequal = [Mesh(devices[:4].reshape(4, 1), ("data", "model")), Mesh(devices[4:6].reshape(2, 1), ("data", "model"))]
    compiled = summed_once(training(two(dense, on=unequal)), pair(8, 8), array(8, 8))
    assert {len(compiled.program.submeshes[r.submesh].devices.flat) for r in compiled.program.reductions} == {4, 2}
    outside = two(plain, on=meshes(4, 1))
    summed_once(training(lambda p, x: outside(p, C(x, ("data", None)))), pair(8, 8), array(8, 8))


def test_a_count_of_two_submeshes_of_which_one_is_a_device():
    """Each computes it of its own rows: on one it is a sum over devices, on the other it is not."""
    devices = np.array(jax.devices())
    several, alone = (Mesh(d.reshape(-1, 1), ("data", "model")) for d in (devices[:4], devices[4:5]))
    masked = lambda w, x, m, n: dense(w, x) * m[:, None] / n  # noqa: E731
    first = mm.task(masked, "one", mesh=several, logical_axes=RULES)
    second = mm.task(lambda w, x, n: jnp.tanh(x @ w) / n, "two", mesh=alone)

    def loss(p, batch):
        x, mask, weights = batch
        count = jnp.dot(mask, weights)
        return jnp.mean(second(p["two"], first(p["one"], x, mask, count), count)) * count

    args = pair(8, 8), (array(8, 8), jnp.arange(8.0), jnp.ones(8))
    assert_same(mm.jit(training(loss))(*args), reference(jax.jit(training(loss)), *args))


def test_tied_weights_and_terms_without_a_batch():
    """A weight of three tasks on two submeshes, and a penalty on the weights inside the loop."""
    on = meshes(4, 1)
    first, second = (mm.task(dense, f"t{i}", mesh=m, logical_axes=RULES) for i, m in enumerate(on))

    def loss(w, x):
        return jnp.mean(second(w, second(w, first(w, x))) ** 2) + 0.1 * jnp.sum(w**2)

    step = training(loss)
    summed_once(step, array(8, 8), array(8, 8))
    step = training(lambda p, x: two(dense, on=on)(p, x) + 0.1 * sum(jnp.sum(w**2) for w in p.values()))
    summed_once(step, pair(8, 8), array(8, 8))


def test_several_loops():
    """Gradient accumulation in one loop, an evaluation in another, on the updated weights."""
    loss = two(dense, on=meshes(4, 1))

    def step(p, x):
        _, grads = training(loss)(p, x)
        p = jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)
        return p, mm.microbatch(loss, argnum=1, num_microbatches=2, reduce="mean")(p, x)

    compiled = summed_once(step, pair(8, 8), array(8, 8))
    assert sorted(r.loop for r in compiled.program.reductions) == [0, 0, 1]


def test_a_weighted_mean_waits_but_for_its_count():
    """The gradient is multiplied by the count in parts; the count itself is needed in every microbatch."""
    loss = two(dense, on=meshes(4, 1))
    fun = jax.value_and_grad(lambda p, x: (loss(p, x), {"n": jnp.sum(x > 0).astype(jnp.float32)}), has_aux=True)
    step = step_of(fun, reduce=mm.WeightedMean("n"))
    args = pair(8, 8), array(8, 8)
    compiled = mm.jit(step).lower(*args).compile()
    assert all(shapes == [()] for _, shapes in collectives(compiled, loop=True))
    assert {r.value for r in compiled.program.reductions if not r.axes} == {"float32[]"}
    assert_same(compiled(*args), reference(jax.jit(step), *args))


def test_sequence_parallel_activations_are_gathered_as_before(monkeypatch):
    """Where an axis shards the sequence and a hidden dimension in turn, no collective takes the place of a sum."""

    def body(p, x):
        y = C(C(x, ("batch", "model", None)) * p["scale"], ("batch", None, None))
        h = C(jnp.tanh(y @ p["up"]), ("batch", None, "hidden"))
        return C(h @ p["down"], ("batch", "model", None))

    p = {k: {"scale": array(8), "up": array(8, 16), "down": array(16, 8)} for k in ("one", "two")}
    step, x = training(two(body)), array(8, 6, 8)
    waiting = mm.jit(step).lower(p, x).compile()
    axes = {(r.task, r.value): r.axes for r in waiting.program.reductions}
    assert axes["one_bwd", "float32[8]"] == ("data", "model")
    assert axes["one_bwd", "float32[8,16]"] == ("data",)
    assert_same(waiting(p, x), reference(jax.jit(step), p, x))
    switch_off(monkeypatch, "leave_unreduced")
    at_once = mm.jit(step).lower(p, x).compile()
    inside = lambda c: sorted(n for n, shapes in collectives(c, loop=True) if max(map(len, shapes)) == 3)  # noqa: E731
    assert inside(waiting) == inside(at_once)
    assert len(collectives(waiting, loop=True)) == len(inside(waiting)) < len(collectives(at_once, loop=True))


# --- what cannot wait -------------------------------------------------------------------------------


def fsdp(w, x):
    return jnp.tanh(C(x, ("batch", None)) @ C(w, ("data", None)))


def clipped(p, x):
    value, grads = jax.value_and_grad(two(dense, on=meshes(4, 1)))(p, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values()))
    return value, jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)


def logged(p, x):
    value, grads = jax.value_and_grad(two(dense, on=meshes(4, 1)))(p, x)
    return value, grads, jnp.sqrt(jnp.sum(grads["one"] ** 2))


def in_a_map(w, x):
    """The sum over the batch happens where the rewriting does not look."""
    x = C(x, ("batch", None))
    return x + jax.lax.fori_loop(0, 2, lambda i, s: s + jnp.sum(x, 0) * w[0], jnp.zeros(8))


def experts(w, x):
    """`data` shards the batch, and then the experts."""
    y = C(jnp.einsum("be,xef->xbf", C(x, ("batch", None)), w), ("data", None, None))
    return C(jnp.sum(y, 0), ("batch", None))


def filtering(w, x):
    """Positions go through a grouped convolution with a weight, of which JAX maps the gradient only in part."""
    positions = jnp.linspace(0, 1, 64).reshape(1, 8, 8)
    dims = ("NWC", "WIO", "NWC")
    kernel = jax.lax.conv_general_dilated(positions, w, (1,), "SAME", dimension_numbers=dims, feature_group_count=8)
    return jnp.tanh(C(x, ("batch", None)) @ kernel[0])


def rows_of(p, x, fun):
    """What ``fun`` makes of all rows of a task's result."""
    run = mm.task(lambda w, x: fun(dense(w, x)), "one", mesh=meshes(4, 1)[0], logical_axes=RULES)
    return run(p["one"], x)


def filled(y):
    return jnp.take(jnp.sum(y, 0), jnp.array([0, 99]), mode="fill", fill_value=1.0)


def counted_in_bytes(y):
    """More than there is room for: the sum goes around, as in plain JAX."""
    return jnp.sum(jnp.full(y.shape, 50, jnp.int8) * (y > -2).astype(jnp.int8), 0, dtype=jnp.int8).astype(jnp.int32)


def too_large_in_parts(y):
    """Rows that are too large for float16, and have a sum that is not."""
    signs = jnp.array([1.0, 1.0, -1.0, -1.0])[:, None]
    return jnp.sum(9e4 * signs * (y > -2), 0).astype(jnp.float16).astype(jnp.float32)


REFUSED = {
    "fsdp": (
        training(two(fsdp, on=meshes(4, 1))), (8, 8),
        "one_bwd float32[8,8] on submesh 0, in every microbatch: it is sharded over 'data' itself (fsdp), and parts "
        "would take 4 times its memory",
    ),
    "max": (
        training(two(dense, on=meshes(4, 1)), reduce="max"), (8, 8),
        "two_bwd float32[8,8] on submesh 1, in every microbatch: max is applied to it in every microbatch, and cannot be "
        "applied to parts",
    ),
    "clipped in the loop": (
        step_of(clipped), (8, 8),
        "one_bwd float32[8,8] on submesh 0, in every microbatch: integer_pow reads its terms in every microbatch",
    ),
    "a norm in the loop": (
        step_of(logged), (8, 8),
        "one_bwd float32[] on submesh 0, in every microbatch: sqrt is applied to it in every microbatch, and cannot be "
        "applied to parts",
    ),
    "a loop inside": (
        step_of(lambda p, x: jnp.sum(two(in_a_map, on=meshes(4, 1))(p, x))), (8, 8), None,
    ),
    "read in a scan": (
        training(two(changed(lambda g: jax.lax.fori_loop(0, 2, lambda _, c: 0.5 * c + g, g)), on=meshes(4, 1))), (8, 8),
        "one_bwd float32[8,8] on submesh 0, in every microbatch: a scan reads it in every step",
    ),
    "integer division": (
        step_of(lambda p, x: rows_of(p, x, lambda y: jax.lax.div(jnp.sum((y > 0).astype(jnp.int32)), 3)), reduce="sum"),
        (8, 8),
        "one int32[] on submesh 0, in every microbatch: div is applied to it in every microbatch, and cannot be applied "
        "to parts",
    ),
    "narrow counts": (
        step_of(lambda p, x: rows_of(p, x, counted_in_bytes), reduce="sum"), (8, 8),
        "one int32[8] on submesh 0, in every microbatch: convert_element_type is applied to it in every microbatch, and cannot be "
        "applied to parts",
    ),
    "half precision": (
        step_of(lambda p, x: rows_of(p, x, too_large_in_parts), reduce="sum"), (8, 8),
        "one float32[8] on submesh 0, in every microbatch: convert_element_type is applied to it in every microbatch, and cannot be "
        "applied to parts",
    ),
    "filling": (
        step_of(lambda p, x: rows_of(p, x, filled)), (8, 8),
        "one float32[2] on submesh 0, in every microbatch: gather is applied to it in every microbatch, and cannot be "
        "applied to parts",
    ),
    "groups": (
        training(two(filtering, on=meshes(4, 1))), (3, 1, 8),
        "one_bwd float32[3,1,8] on submesh 0, in every microbatch: conv_general_dilated is applied to it in every microbatch, "
        "and cannot be applied to parts",
    ),
    "experts": (
        training(two(experts, on=meshes(4, 1))), (4, 8, 8),
        "one_bwd float32[4,8,8] on submesh 0, in every microbatch: other dimensions of the activations are sharded over "
        "'data' too",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_the_report_says_what_could_not_wait_and_why(case):
    """Values are right all the same."""
    step, weight, line = REFUSED[case]
    args = pair(*weight), array(8, 8)
    compiled = mm.jit(step).lower(*args).compile()
    assert_same(compiled(*args), reference(jax.jit(step), *args))
    report = compiled.report()
    assert report.reductions == compiled.program.reductions
    lines = [text.strip() for text in str(report).splitlines()]
    if line is not None:
        assert line in map(repr, report.reductions)
        (told,) = [text for text in lines if text.endswith(line.partition(" on ")[2].partition(", ")[2])]
        assert line.split()[0] in told and line.split()[1] in told


def test_nothing_is_said_of_what_each_device_has_for_itself():
    """Experts by hand: their gradients are sums over no devices, unlike that of a weight which all of them have."""

    def by_hand(w, x):
        mine = jax.shard_map(
            lambda e, v, x: jnp.tanh(x @ e[0] @ v), in_specs=(P("data"), P(), P("data")), out_specs=P("data")
        )
        return C(mine(w["expert"], w["shared"], C(x, ("batch", None))), ("batch", None))

    step = training(two(by_hand, on=meshes(4, 1)))
    args = {k: {"expert": array(4, 8, 8), "shared": array(8, 8)} for k in ("one", "two")}, array(8, 8)
    report = mm.jit(step).lower(*args).report()
    told = {(r.value, r.why) for r in report.reductions if r.why}
    assert told == {("float32[8,8]", "shard_map over the batch cannot be done in parts")}


def test_a_gradient_that_is_also_collected_is_summed_at_once():
    """Two reductions of one gradient: the stacked one needs it whole, so the mean reads it whole."""
    loss = two(dense, on=meshes(4, 1))

    def fun(p, x):
        grads = jax.grad(loss)(p, x)
        return grads, grads["one"]

    step = step_of(fun, reduce=("mean", "stack"))
    args = pair(8, 8), array(8, 8)
    compiled = mm.jit(step).lower(*args).compile()
    assert_same(compiled(*args), reference(jax.jit(step), *args))
    why = {r.task: r.why for r in compiled.program.reductions}
    assert why == {"one_bwd": "the result reads its terms in every microbatch", "two_bwd": ""}


def test_parts_of_a_gradient_go_together():
    """The halves of a split wait together or not at all."""
    loss = two(dense, on=meshes(4, 1))
    step = step_of(lambda p, x: tuple(jnp.split(jax.grad(loss)(p, x)["one"], 2)), reduce=("mean", "max"))
    args = pair(8, 8), array(8, 8)
    compiled = mm.jit(step).lower(*args).compile()
    assert_same(compiled(*args), reference(jax.jit(step), *args))
    assert sorted(r.why.split()[0] for r in compiled.program.reductions) == ["max", "slice"]


def test_part_of_the_axes():
    """A batch over two axes, one of which also shards the weights: the other waits."""
    on = meshes(2, 2, ("data", "fsdp"))
    body = lambda w, x: jnp.tanh(C(x, ("batch", None)) @ C(w, (None, "fsdp")))  # noqa: E731
    step = training(two(body, on=on, rules=(("batch", ("data", "fsdp")),)))
    args = pair(8, 8), array(8, 8)
    compiled = mm.jit(step).lower(*args).compile()
    assert {r.axes for r in compiled.program.reductions if r.value == "float32[8,8]"} == {("data",)}
    assert_same(compiled(*args), reference(jax.jit(step), *args))


def test_nothing_is_said_without_a_sharded_batch():
    """Neither on single devices, nor where only weights are sharded."""
    plain = training(two(dense, on=meshes(1, 1)))
    tensor = training(two(lambda w, x: jnp.tanh(x @ C(w, (None, "hidden")))))
    for step in (plain, tensor):
        report = mm.jit(step).lower(pair(8, 8), array(8, 8)).compile().report()
        assert report.reductions == () and "once a call" not in str(report)


# --- laws -------------------------------------------------------------------------------------------


@st.composite
def layers(draw):
    """A stage as a list of operations on [batch, sequence, 8] or [batch, 8] and its weights' shapes."""
    ops = {
        "dense": lambda w, x: x @ w,
        "bias": lambda w, x: x + w[0],
        "scale": lambda w, x: x * w[0] + jnp.tanh(x),
        "cast": lambda w, x: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) * 0.1 + x,
        "transposed": lambda w, x: jnp.swapaxes(jnp.swapaxes(x, 0, -1) * 1.5, 0, -1) @ w.T,
        "flat": lambda w, x: (x.reshape(-1, 8) @ w).reshape(x.shape),
        "halves": lambda w, x: jnp.concatenate([x[..., :4] @ w[:4], jnp.tanh(x)], -1) @ jnp.concatenate([w, w]),
        "lookup": lambda w, x: x + w[jnp.argmax(x, -1)],
        "masked": lambda w, x: jnp.where(x > 0, x @ w, 0.0) + x,
        "loop": lambda w, x: jax.lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, None, length=2)[0],
    }
    names = draw(st.lists(st.sampled_from(sorted(ops)), min_size=1, max_size=4))
    remat = draw(st.booleans())

    def body(ws, x):
        x = C(x, ("batch",) + (None,) * (x.ndim - 1))
        for name, w in zip(names, ws, strict=True):
            x = ops[name](w, x)
        return jnp.tanh(x)

    return SimpleNamespace(names=names, body=jax.checkpoint(body) if remat else body)


@given(
    one=layers(), other=layers(), sizes=st.sampled_from([(4, 1), (2, 1), (2, 2)]), rank=st.sampled_from([2, 3]),
    count=st.sampled_from([2, 3]), schedule=st.sampled_from(["1f1b", "zero-bubble-h1"]),
    reduce=st.sampled_from(["mean", "sum"]),
)  # fmt: skip
def test_generated_layers_are_summed_once_and_right(one, other, sizes, rank, count, schedule, reduce):
    """Whatever the layers, no gradient is summed in the loop, and values equal the plain loop's."""
    loss = two(one.body, second=other.body, on=meshes(*sizes))
    p = {k: [array(8, 8, seed=i) for i in range(len(s.names))] for k, s in (("one", one), ("two", other))}
    x = array(*{2: (4 * count, 8), 3: (4 * count, 3, 8)}[rank])
    step = training(loss, num_microbatches=count, schedule=schedule, reduce=reduce)
    summed_once(step, p, x, tolerance=2e-2 if "cast" in one.names + other.names else 1e-4)


@given(st.permutations(range(4)), st.integers(0, 3), st.integers(0, 3))
def test_reshapes_link_the_major_dimension_of_each_group(order, cut, other):
    """Merging neighbours links the merged dimension with the first of them, and splitting links it back."""
    shape = [(2, 3, 5, 7)[k] for k in order]
    if cut > other:
        cut, other = other, cut
    merged = [*shape[:cut], prod(shape[cut : other + 1]), *shape[other + 1 :]]
    there = jax.make_jaxpr(lambda x: x.reshape(merged))(jnp.zeros(shape)).eqns
    back = jax.make_jaxpr(lambda x: x.reshape(shape))(jnp.zeros(merged)).eqns
    if not there:  # nothing was merged
        return
    expected = {(d if d <= cut else d + other - cut, d) for d in range(len(merged))}
    assert {(d, e) for _, d, _, e in links(there[0])} == expected
    assert {(e, d) for _, d, _, e in links(back[0])} == expected
