"""What `jax.checkpoint` computes again around tasks of several submeshes starts, on each, from what came there before."""

import functools
import warnings

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flat import lines, program, run, switch_off
from manymesh._passes._numbered import numbers
from manymesh._program import Node
from stages import assert_agrees

BODY = """
    tasks: one 0, two 1
    inputs: w f32[4], x f32[8]
    loop 0: 2 microbatches, gpipe
    xs b f32[4] = p, q
    carry z f32[4] = w, then t, at last total
    p = x[:4]
    q = x[4:]
    0: h = one: lax.sin(b)
    0: k = two: lax.sin(h)
    0: again = one_bwd: lax.sin(b) [in rematted_computation]
    {}
    results: total
"""
MADE_AGAIN = {"results": {"h": "one", "again": "one"}}


def reads(equations, name):
    """Which value a node reads, of the one of the forward pass and the one computed again, before and after."""
    flat = program(BODY.format("\n".join(f"0: {line}" for line in equations)), **MADE_AGAIN)
    after = run("recompute_apart", flat)
    forward, again = flat.results
    found = []
    for each in (flat, after):
        (node,) = [n for n in each.nodes if (n.task or n.primitive) == name and n.backward]
        found.append(["forward" if v is forward else "again" for v in node.inputs if v in (forward, again)])
    return found


def test_another_submesh_reads_what_came_in_the_forward_pass():
    assert reads(["t = two_bwd: z + k * lax.cos(again)"], "two") == [["again"], ["forward"]]


def test_the_same_submesh_computes_it_again():
    text = BODY.format("0: k2 = two_bwd: lax.cos(h)\n0: t = one_bwd: z + k2 * lax.cos(again)")
    flat = program(text, **MADE_AGAIN)
    assert lines(run("recompute_apart", flat)) == lines(flat)


def test_what_is_outside_of_tasks_counts_to_those_it_goes_to():
    equations = ["g = lax.exp(again) [in rematted_computation]", "t = two_bwd: z + k * g"]
    assert reads(equations, "exp") == [["again"], ["forward"]]
    equations[1] = "t = one_bwd: z + k * g"
    assert reads(equations, "exp") == [["again"], ["again"]]


# Whole steps

WIDTH, STAGES = 8, 4


def layer(w, x):
    return x + jax.nn.relu(jax.nn.gelu(x @ w[0]) @ w[1])


TASKS = [mm.task(layer, f"layer{i}", devices=[i // 2]) for i in range(2 * STAGES)]


def parameters():
    draw = np.random.default_rng(0)
    return [(0.3 * draw.normal(size=(2, WIDTH, WIDTH))).astype(np.float32) for _ in TASKS]


def batch(rows=16):
    return np.random.default_rng(1).normal(size=(rows, WIDTH)).astype(np.float32)


def through(ws, x):
    """All layers, a skip connection around the third one, and a scale between two stages."""
    for i, (task, w) in enumerate(zip(TASKS, ws, strict=True)):
        x = task(w, x) + (0.1 * x if i == 2 else 0) if i != 3 else 1.5 * task(w, x)
    return x


def loss(ws, x):
    return jnp.mean(through(ws, x) ** 2)


def step(loss, schedule="1f1b"):
    """Gradients over four microbatches; a warning is an error."""
    return mm.jit(
        mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, schedule=schedule, reduce="mean"),
        strict=True,
    )


def crossing(lowered):
    """Bytes that cross in each microbatch, forward and back."""
    return sum(e.nbytes for e in lowered.program.edges if e.loop is not None)


POLICIES = {
    "nothing": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "no batch dims": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@pytest.mark.parametrize(
    ("policy", "schedule"),
    [*((name, "1f1b") for name in POLICIES), ("nothing", "zero-bubble-h1"), ("nothing", "gpipe")],
)
def test_a_checkpoint_around_the_whole_model_is_a_pipeline(policy, schedule):
    """Nothing more crosses than without it."""
    whole = step(jax.checkpoint(loss, policy=POLICIES[policy]), schedule)
    lowered = whole.lower(parameters(), batch())
    assert lowered.program.loops[0].in_order
    assert lowered.program.loops[0].placement == tuple(range(STAGES))
    assert crossing(lowered) == crossing(step(loss, schedule).lower(parameters(), batch()))
    assert_agrees(whole.fun, parameters(), batch())


def in_a_v(schedule, checkpoint, places=(0, 1, 1, 0)):
    """A U-Net whose skip connections stay on their submeshes, and an embedding that all of a submesh's blocks read."""

    def down(w, x):
        return jnp.tanh(x @ w), jnp.sin(x @ w)

    def up(w, x, skip, time):
        return jnp.tanh((x + skip) @ w) * time

    embed = mm.task(lambda x: jnp.cos(x[:, :1]), "time", devices=[places[0]])
    downs = [mm.task(down, f"down_{i}", devices=[places[i]]) for i in range(2)]
    ups = [mm.task(up, f"up_{i}", devices=[places[3 - i]]) for i in range(2)]

    def loss(ws, x):
        time, skips = embed(x), []
        for task, w in zip(downs, ws[:2], strict=True):
            x, skip = task(w, x)
            skips.append(skip)
        for task, w in zip(reversed(ups), ws[2:], strict=True):
            x = task(w, x, skips.pop(), time)
        return jnp.mean(x**2)

    return step(jax.checkpoint(loss) if checkpoint else loss, schedule), [w[0] for w in parameters()[:4]]


@pytest.mark.parametrize(
    ("schedule", "places"),
    [("1f1b", (0, 1, 1, 0)), ("zbv", (0, 1, 1, 0)), ("zero-bubble-h1", (0, 1, 1, 0)), ("interleaved", (0, 1, 0, 1))],
)
def test_what_goes_to_a_later_stage_of_its_submesh_is_kept(schedule, places):
    """It crosses nothing, but to compute it again is no part of the backward pass of the stage that reads it."""
    whole, ws = in_a_v(schedule, True, places)
    plain, _ = in_a_v(schedule, False, places)
    lowered = whole.lower(ws, batch())
    assert lowered.program.loops[0].in_order
    assert lowered.program.loops[0].placement == plain.lower(ws, batch()).program.loops[0].placement
    assert crossing(lowered) == crossing(plain.lower(ws, batch()))
    assert_agrees(whole.fun, ws, batch())


def test_tasks_that_print_are_a_pipeline_too():
    """What is printed again is nothing that others read."""

    def printing(w, x):
        jax.debug.callback(lambda _: None, x[0, 0])
        return jnp.tanh(x @ w)

    tasks = [mm.task(printing, f"t{i}", devices=[i]) for i in range(2)]

    def loss(ws, x):
        return jnp.mean(tasks[1](ws[1], tasks[0](ws[0], x)) ** 2)

    ws = [w[0] for w in parameters()[:2]]
    whole = step(jax.checkpoint(loss))
    lowered = whole.lower(ws, batch())
    assert lowered.program.loops[0].in_order
    assert crossing(lowered) == crossing(step(loss).lower(ws, batch()))
    assert_agrees(whole.fun, ws, batch())


def test_a_task_in_a_branch_that_is_computed_again_is_told_of():
    """It is no pipeline, and the error says what makes one."""
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"t{i}", devices=[i]) for i in range(2)]

    def loss(wrap, ws, x):
        h = jax.lax.cond(x[0, 0] > 0, lambda x: wrap(tasks[0])(ws[0], x), lambda x: 2 * x, x)
        return jnp.mean(wrap(tasks[1])(ws[1], h) ** 2)

    ws = [w[0] for w in parameters()[:2]]
    with pytest.raises(
        mm.errors.PlacementError, match=r"jax.checkpoint around both .* put it around each task instead"
    ):
        step(jax.checkpoint(lambda ws, x: loss(lambda task: task, ws, x))).lower(ws, batch())
    each = step(lambda ws, x: loss(jax.checkpoint, ws, x))
    assert each.lower(ws, batch()).program.loops[0].in_order
    assert_agrees(each.fun, ws, batch())


def test_without_the_pass_it_is_none(monkeypatch):
    switch_off(monkeypatch, "recompute_apart")
    with pytest.raises(mm.errors.PlacementError, match="one after the other"):
        step(jax.checkpoint(loss)).lower(parameters(), batch())


def test_only_what_crosses_is_kept():
    """Each stage but the first keeps what came to it for its backward pass, and no value of its two layers."""

    def kept(loss):
        program = step(loss).lower(parameters(), batch()).program
        forward = {v for f in program.body(0) if f.kind == "F" for v in f.outvars}
        read = {(v, f.submesh) for f in program.body(0) if f.kind != "F" for v in f.invars if v in forward}
        return len(read)

    assert kept(jax.checkpoint(loss)) == STAGES - 1
    assert kept(loss) > 4 * STAGES


def halves(ws, x):
    """Two stages in each checkpoint, one in a checkpoint more."""

    def half(ws, x, first):
        for task, w in zip(TASKS[first : first + STAGES], ws, strict=True):
            x = task(w, x)
        return x

    x = jax.checkpoint(lambda ws, x: half(ws, x, 0))(ws[:STAGES], x)
    x = jax.checkpoint(jax.checkpoint(lambda ws, x: half(ws, x, STAGES)))(ws[STAGES:], x)
    return jnp.mean(x**2)


def scanned(ws, x):
    """A scan over all layers, each of which goes through two submeshes."""
    here, there = (mm.task(layer, name, devices=[i]) for i, name in enumerate(("here", "there")))

    def both(x, w):
        return there(w, here(w, x)), None

    return jnp.mean(jax.checkpoint(lambda ws, x: jax.lax.scan(both, x, ws)[0])(jnp.stack(ws[:2]), x) ** 2)


def scanned_by_layer(ws, x):
    """The same with the checkpoint inside of the scan."""
    here, there = (mm.task(layer, name, devices=[i]) for i, name in enumerate(("here", "there")))

    def both(x, w):
        return jax.checkpoint(lambda w, x: there(w, here(w, x)))(w, x), None

    return jnp.mean(jax.lax.scan(both, x, jnp.stack(ws[:2]))[0] ** 2)


def branches(ws, x):
    """A branch that goes through other stages than its counterpart."""

    def run(ws, x):
        x = TASKS[0](ws[0], x)
        x = jax.lax.cond(
            jnp.sum(x) > 0,
            lambda x: TASKS[6](ws[6], TASKS[4](ws[4], TASKS[2](ws[2], x))),
            lambda x: TASKS[6](ws[5], x),
            x,
        )
        return TASKS[7](ws[7], x)

    return jnp.mean(jax.checkpoint(run)(ws, x) ** 2)


def vmapped(ws, x):
    """Each row by itself."""
    return jnp.mean(jax.checkpoint(jax.vmap(through, (None, 0)))(ws, x) ** 2)


def several_results(ws, x):
    """Tasks with results that swap places, of which one is an integer and one is handed through."""

    def both(w, a, b):
        return b, layer(w, a), jnp.argmax(a, axis=-1), a

    tasks = [mm.task(both, f"both{i}", devices=[i]) for i in range(3)]

    def run(ws, x):
        a, b = x, 2 * x
        for task, w in zip(tasks, ws[:3], strict=True):
            a, b, at, same = task(w, a, b)
            b = b + at[:, None] * 1e-2 + 0.1 * same
        return a * b

    return jnp.mean(jax.checkpoint(run)(ws, x))


def penalised(ws, x):
    """A gradient within the forward pass, checkpointed as well."""

    def critic(x):
        return jnp.mean(jax.checkpoint(through)(jax.tree.map(lambda w: 0.3 * w, ws), x) ** 2)

    return critic(x) + jnp.sum(jax.grad(critic)(x) ** 2)


@pytest.mark.parametrize(
    "loss", [halves, scanned, scanned_by_layer, branches, vmapped, several_results, penalised], ids=lambda f: f.__name__
)
def test_it_is_the_same_function(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if loss is penalised else "error")
        assert_agrees(
            mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean"),
            parameters(), batch(),
        )  # fmt: skip
        assert_agrees(jax.value_and_grad(loss), parameters(), batch(8))


def test_tangents_of_what_is_computed_again_are_no_results():
    """Forward mode over a gradient makes each result twice: itself, and how it changes."""

    def product(ws, x):
        along = jax.tree.map(jnp.ones_like, ws)
        return jax.jvp(jax.grad(lambda ws: jax.checkpoint(loss)(ws, x)), (ws,), (along,))

    assert_agrees(product, parameters(), batch(4))


def test_a_gradient_of_tangents():
    """The forward pass makes tangents as well, and both are computed again."""

    def along(ws, x):
        return jax.jvp(lambda x: jax.checkpoint(loss)(ws, x), (x,), (x,))[1]

    assert_agrees(jax.grad(along), parameters(), batch(4))


# One function, which JAX traces once, in several calls: they have one mark, and one may be dead


def chained(ws, x):
    for task, w in zip(TASKS[::2], ws, strict=False):
        x = task(w, x)
    return x


once = jax.checkpoint(chained)


def swapped(w, a, b):
    return layer(w, a) - 0.5 * b


def of_two(ws, a, b):
    first, second = (mm.task(swapped, f"of_two{i}", devices=[i]) for i in range(2))
    return second(ws[1], first(ws[0], a, b), first(ws[2], b, a))


of_two_once = jax.checkpoint(of_two)


def mixed(a, b, x):
    first = mm.task(lambda a, b, x: layer(a, x) - 0.5 * layer(b, x), "mixed_first", devices=[0])
    second = mm.task(layer, "mixed_second", devices=[1])
    return second(b, first(a, b, x))


mixed_once = jax.checkpoint(mixed)

SEVERAL = {
    "a metric, then a gradient of others": lambda ws, x: (
        jnp.mean(once(ws, x)), jax.grad(lambda ws: jnp.mean(once(ws, 2 * x)))(ws),
    ),
    "one of the other": jax.grad(lambda ws, x: jnp.mean(once(ws, once(ws, x)))),
    "each for itself, and together": jax.grad(
        lambda ws, x: jnp.mean(once(ws, x) ** 2) + jnp.mean(jax.vmap(lambda x: once(ws, x))(jnp.stack([2 * x, 3 * x])))
    ),
    "values of some, then gradients of others": lambda ws, x: (
        jax.lax.map(lambda x: jnp.mean(once(ws, x)), jnp.stack([3 * x, 2 * x, x])),
        jax.lax.map(lambda x: jax.grad(lambda ws: jnp.mean(once(ws, x)))(ws), jnp.stack([x, 2 * x, 3 * x])),
    ),
    "operands that change places": lambda ws, x: (
        jnp.mean(of_two_once(ws, x, 2 * x)), jax.grad(lambda ws: jnp.mean(of_two_once(ws, 2 * x, x)))(ws),
    ),
    "weights that change places in rounds of a scan": jax.grad(lambda ws, x: jnp.mean(
        jax.lax.scan(lambda z, _: (mixed_once(ws[1], ws[0], mixed_once(ws[0], ws[1], z)), None), x, None, length=2)[0]
    )),
    "whole numbers that change places": lambda ws, x: (
        jnp.mean(counted(ws, x, jnp.arange(8), jnp.arange(8)[::-1])),
        jax.grad(lambda ws: jnp.mean(counted(ws, x, jnp.arange(8)[::-1], jnp.arange(8))))(ws),
    ),
}  # fmt: skip


@jax.checkpoint
def counted(ws, x, i, j):
    first = mm.task(lambda w, x, i, j: layer(w, x)[i] * j[:, None], "first", devices=[0])
    second = mm.task(layer, "second", devices=[1])
    return second(ws[1], first(ws[0], x, i, j))


@pytest.mark.parametrize("step", SEVERAL)
def test_calls_of_one_function_are_told_apart(step):
    assert_agrees(SEVERAL[step], [0.5 * w for w in parameters()], batch(8))


def test_rounds_of_a_scan_that_are_checkpointed_are_a_pipeline():
    """A rollout; of its weights, which all rounds read, JAX takes what it can out of the scan."""

    def loss(ws, x):
        once = jax.checkpoint(lambda x: chained(ws, x))
        return jnp.mean(jax.lax.scan(lambda x, _: (once(x), None), x, None, length=2)[0] ** 2)

    lowered = step(loss).lower(parameters(), batch())
    assert lowered.program.loops[0].in_order
    assert len(lowered.program.edges) == 14, "twice through four stages, and their gradients back"
    assert_agrees(step(loss).fun, parameters(), batch())


def test_an_encoder_called_twice_is_a_pipeline():
    """Numbers between its tasks are made in each call, and are equal."""

    @jax.checkpoint
    def encode(ws, x):
        for i, (task, w) in enumerate(zip(TASKS, ws, strict=True)):
            x = task(w, x) + (0.1 * jnp.arange(WIDTH) if i == 3 else 0)
        return x

    def loss(ws, x):
        return jnp.mean((encode(ws, x) - encode(ws, 0.5 * x)) ** 2)

    assert step(loss).lower(parameters(), batch()).program.loops[0].in_order
    assert_agrees(step(loss).fun, parameters(), batch())


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (np.nan, 1.0)])
def test_numbers_that_calls_are_told_apart_by(numbers):
    """The two zeros are two numbers, and what is none is itself."""

    def where(w, x, number):
        return layer(w, x) + jnp.nan_to_num(jnp.copysign(1.0, number) + jnp.abs(number))

    first = jax.jit(mm.task(where, "first", devices=[0]))
    second = mm.task(layer, "second", devices=[1])

    @jax.checkpoint
    def chained(ws, x):
        one, other = (first(ws[0], x, jnp.float32(number)) for number in numbers)
        return second(ws[1], one + 3 * other)

    whole = step(lambda ws, x: jnp.mean(chained(ws, x) ** 2))
    assert whole.lower(parameters()[:2], batch()).program.loops[0].in_order
    assert_agrees(whole.fun, parameters()[:2], batch())


# Scopes, which no call marks


def attended(w, x):
    """What Flax, Haiku and others write: functions with rules of their own for derivatives, and calls in calls."""
    h = jax.nn.relu(x @ w[0]) + jax.nn.silu(x)
    return x + jax.nn.softmax(h @ w[1], axis=-1) * jax.nn.sigmoid(jax.nn.logsumexp(x, axis=-1, keepdims=True))


def in_scopes(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer{i}"):
            x = attended(w, x)
        x = x * 1.1
    return jnp.mean(x**2)


@pytest.mark.once
@pytest.mark.parametrize("policy", ["nothing", "dots"])
def test_a_checkpoint_around_scopes_is_a_pipeline(policy):
    with mm.register_task(r"layer(\d)", callback=lambda match, backward: mm.Task(devices=[int(match[1]) // 2])):
        whole = step(jax.checkpoint(in_scopes, policy=POLICIES[policy]))
        lowered = whole.lower(parameters(), batch())
        assert lowered.program.loops[0].in_order
        assert crossing(lowered) == crossing(step(in_scopes).lower(parameters(), batch()))
        assert_agrees(whole.fun, parameters(), batch())


def numbered(fun, *args):
    """The numbers of the results of a function."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    found = numbers([Node(e) for e in jaxpr.eqns])
    return [found[v] for v in jaxpr.outvars]


def test_values_that_are_computed_alike_have_one_number():
    x = jnp.ones(4)
    same, again, other, swapped, scaled, three = numbered(
        lambda x, y: (
            jax.nn.relu(x) - y, jax.jit(lambda v: jnp.maximum(v, 0) - y)(jax.lax.optimization_barrier(x)), jax.nn.relu(y) - x,
            y - jax.nn.relu(x), 2.0 * x, 3.0 * x,
        ), x, x,
    )  # fmt: skip
    assert same == again
    assert len({same, other, swapped, scaled, three}) == 5


def test_what_has_an_effect_is_equal_to_nothing():
    def fun(x):
        return [jax.experimental.io_callback(lambda v: v, x, x) for _ in range(2)]

    one, two = numbered(fun, jnp.ones(2))
    assert one != two


@pytest.mark.parametrize(("num_stages", "policy"), [(2, None), (3, None), (2, jax.checkpoint_policies.dots_saveable)])
def test_the_gradient_of_a_loop_computes_its_forward_pass_again(num_stages, policy):
    """As a contrastive loss over the whole batch does: the second loop is a pipeline with a forward and a backward pass."""
    tasks = [mm.task(lambda w, x: x + jnp.tanh(x @ w), f"t{i}", devices=[i]) for i in range(num_stages)]

    @functools.partial(jax.checkpoint, policy=policy)
    def encode(ws, x):
        for run_task, w in zip(tasks, ws, strict=True):
            x = run_task(w, x)
        return x

    @jax.value_and_grad
    def step(ws, x):
        z = mm.microbatch(encode, argnum=1, num_microbatches=4, reduce="concat")(ws, x)
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(z @ z.T)))

    ws = [jnp.eye(8) / (i + 1) for i in range(num_stages)]
    x = jax.random.normal(jax.random.key(0), (8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered = mm.jit(step).lower(ws, x)
    order = tuple(range(num_stages))
    assert all(loop.in_order for loop in lowered.program.loops)
    if policy is None:
        assert [loop.placement for loop in lowered.program.loops] == [order, order]
    assert_agrees(step, ws, x)
