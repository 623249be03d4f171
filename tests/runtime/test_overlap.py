"""Submeshes that share devices without being equal: an embedding on all devices, blocks on halves, a loss on all."""

import faulthandler
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import manymesh as mm
from manymesh._plan._instructions import Run, Send
from stages import assert_same, on_host, reference

DEVICES = np.array(jax.devices())
WIDTH, VOCABULARY, ROWS, STEPS = 16, 8, 16, 20
RULES = (("batch", "data"), ("hidden", "model"))
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05, momentum=0.9))


def mesh(ids, shape):
    return Mesh(DEVICES[list(ids)].reshape(shape), ("data", "model"))


ALL, FRONT, BACK = mesh(range(4), (2, 2)), mesh((0, 1), (2, 1)), mesh((2, 3), (1, 2))
LEFT, MIDDLE, RIGHT = mesh((0, 1), (2, 1)), mesh((1, 2), (1, 2)), mesh((2, 3, 4, 5), (2, 2))
# Submeshes of the embedding, the two blocks and the loss.
PLACES = {
    "halves of all": (ALL, FRONT, BACK, ALL),
    "a chain": (LEFT, MIDDLE, RIGHT, RIGHT),
    "a half, all, a device": (FRONT, ALL, mesh((3,), (1, 1)), FRONT),
    "all in another order": (ALL, mesh((3, 1, 2, 0), (2, 2)), BACK, mesh((0, 2, 1, 3), (2, 2))),
}


@pytest.fixture(autouse=True)
def no_deadlock():
    """Ends the process with a traceback of all threads, where nothing goes on."""
    faulthandler.dump_traceback_later(240, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def model(places):
    """``loss(params, tokens)`` of a tied embedding, two blocks and a loss, on the submeshes."""

    def embed(table, tokens):
        return mm.with_sharding_constraint(table, (None, "hidden"))[tokens]

    def block(w, x):
        w = mm.with_sharding_constraint(w, (None, "hidden"))
        return x + mm.with_sharding_constraint(jnp.tanh(x @ w), ("batch", None))

    def cross_entropy(table, x, tokens):
        scores = x @ mm.with_sharding_constraint(table, ("hidden", None)).T
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens).mean()

    names = ("embed", "one", "two", "loss")
    embed, one, two, last = (
        mm.task(f, n, mesh=m, logical_axes=RULES)
        for f, n, m in zip((embed, block, block, cross_entropy), names, places, strict=True)
    )

    def loss(params, tokens):
        x = two(params["two"], one(params["one"], embed(params["table"], tokens)))
        return last(params["table"], x, tokens)

    return loss


def fresh():
    """Parameters, moments and tokens."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = {"table": draw(VOCABULARY, WIDTH), "one": draw(WIDTH, WIDTH), "two": draw(WIDTH, WIDTH)}
    return (params, OPTIMIZER.init(params)), jnp.asarray(rng.integers(VOCABULARY, size=ROWS))


def train(state, tokens, loss, schedule):
    params, moments = state
    grad = jax.value_and_grad(loss)
    if schedule is not None:
        grad = mm.microbatch(grad, argnum=1, num_microbatches=4, schedule=schedule, reduce="mean")
    value, grads = grad(params, tokens)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def after(steps, step):
    """The state after some steps, and all losses."""
    state, tokens = fresh()
    losses = []
    for _ in range(steps):
        state, value = step(state, tokens)
        losses.append(value)
    return state, losses


@functools.cache
def expected():
    """What every placement has to give: the plain program's."""
    loss = model((ALL,) * 4)
    with mm.ignore_transforms():
        return after(STEPS, jax.jit(functools.partial(train, loss=loss, schedule=None)))


@pytest.mark.parametrize(
    "places,schedule", [*zip(PLACES, ("1f1b", "gpipe", None, None), strict=True), ("a chain", "1f1b")]
)
def test_twenty_steps_with_donation_equal_the_plain_program(places, schedule):
    """Losses and the whole state; a donated alias would be an array that is deleted, or other numbers.

    The last step is taken where nothing may come to the host, which JAX 0.10 does not check on CPU.
    """
    step = mm.jit(functools.partial(train, loss=model(PLACES[places]), schedule=schedule), donate_argnums=0)
    state, losses = after(STEPS - 1, step)
    with jax.transfer_guard_device_to_host("disallow"):
        state, value = jax.block_until_ready(step(state, fresh()[1]))
    want_state, want = expected()
    np.testing.assert_allclose([float(x) for x in (*losses, value)], [float(x) for x in want], rtol=2e-4)
    assert_same(jax.tree.map(lambda x: jnp.asarray(on_host(x), x.dtype), state), want_state, tolerance=2e-3)


@functools.cache
def lowered(schedule="1f1b", donate=0):
    state, tokens = fresh()
    loss = model(PLACES["halves of all"])
    return mm.jit(functools.partial(train, loss=loss, schedule=schedule), donate_argnums=donate).lower(state, tokens)


def test_every_device_runs_the_program_s_order():
    """One order of all instructions: what two submeshes issue on a common device is a part of it."""
    plan, program = lowered().plan, lowered().program
    shared = [s for s, m in enumerate(program.submeshes) if DEVICES[0] in m.devices]
    assert len(shared) == 2
    runs = [i for i in plan.instructions if isinstance(i, Run) and i.submesh in shared]
    body = {program.fragments[r.fragment].name: r for r in reversed(runs) if r.microbatch == 0}
    order = [n for n in ("embed", "one", "loss", "loss_bwd", "one_bwd", "embed_bwd") if n in body]
    assert len(order) >= 4
    positions = [plan.instructions.index(body[n]) for n in order]
    assert positions == sorted(positions)


def test_what_aliases_is_not_donated():
    """Both ends of each transfer between overlapping submeshes keep their buffers."""
    plan, program = lowered().plan, lowered().program
    ends = set()
    for a, b in zip(plan.instructions, plan.instructions[1:], strict=False):
        if isinstance(a, Send):
            one, two = (set(program.submeshes[s].devices.flat) for s in (a.submesh, a.target))
            ends |= {*a.inputs, *b.outputs} if one & two else set()
    assert ends and ends <= set(plan.aliases)
    donated = {i.inputs[k] for i in plan.instructions if isinstance(i, Run) for k in plan.donatable.get(i.fragment, ())}
    assert donated and donated.isdisjoint(plan.aliases)


@pytest.mark.parametrize("order", [None, (3, 1, 2, 0)], ids=["halves", "another order"])
def test_a_value_that_dies_on_one_submesh_is_read_later_on_another(order):
    """An argument and a value made on the way: were they donated at their last reader on one submesh, where a result
    could take over the buffer, then their copies on the other would be gone."""
    whole = Mesh(DEVICES[:4], ("x",))
    part = Mesh(DEVICES[:2] if order is None else DEVICES[list(order)], ("y",))
    double, square = mm.task(lambda w: 2 * w, "double", mesh=whole), mm.task(lambda h: h * h, "square", mesh=whole)
    late = mm.task(lambda w, h, c: w + 10 * h + 100 * c, "late", mesh=part)

    def f(w):
        h = double(w)
        return late(w, h, square(h))

    step, w = mm.jit(f, donate_argnums=0), np.arange(64, dtype=np.float32).reshape(8, 8)
    plan, names = step.lower(w).plan, [f.name for f in step.lower(w).program.fragments]
    runs = [i for i in plan.instructions if isinstance(i, Run)]
    assert [names[i.fragment] for i in runs] == ["double", "square", "late"]
    assert all(len(i.free) >= 1 for i in runs), "both values die where the next one is made"
    for _ in range(2):
        assert_same(step(jnp.array(w)), reference(f, w))


@pytest.mark.parametrize("donate", [(), 0])
def test_results_are_nobody_else_s(donate):
    """Deleting one result leaves the others and the arguments that were not donated."""
    one = mm.task(lambda w, x: x * w.sum(), "one", mesh=ALL)
    two = mm.task(lambda w, x: x + w.sum(), "two", mesh=FRONT)

    def f(w, x):
        h = one(w, x)
        return h, two(w, h), w

    w, x = np.arange(64, dtype=np.float32).reshape(8, 8), jnp.ones((8, 8))
    step = mm.jit(f, donate_argnums=donate)
    want = [np.asarray(y) for y in reference(f, w, x)]
    for kept in range(3):
        given = jax.device_put(w, jax.sharding.NamedSharding(ALL, jax.sharding.PartitionSpec()))
        results = list(step(given, x))
        survivor = results.pop(kept)
        for y in results:
            y.delete()
        np.testing.assert_array_equal(np.asarray(survivor), want[kept])
        assert donate == 0 or np.array_equal(np.asarray(given), w)


def test_the_memory_of_a_device_counts_all_its_submeshes():
    """What arrives on a device for the whole and for the half of which it is."""
    one = mm.task(lambda w: jnp.sum(w), "one", mesh=ALL)
    two = mm.task(lambda v, s: v * s, "two", mesh=FRONT)
    w, v = jnp.ones((32, 32)), jnp.ones((64, 32))
    memory = mm.jit(lambda w, v: two(v, one(w))).lower(w, v).compile().memory_analysis()
    arguments = [memory[d].argument_bytes for d in DEVICES[:4]]
    assert arguments == [w.nbytes + v.nbytes] * 2 + [w.nbytes] * 2
    assert all(memory[d].peak_bytes >= memory[d].argument_bytes for d in memory)
