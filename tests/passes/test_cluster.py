"""Which equations become one fragment, and which stage of its loop it is."""

import jax
import jax.numpy as jnp
import optax
import pytest

import manymesh as mm
from flat import program, run
from manymesh import _compat
from manymesh._passes._cluster import cluster
from manymesh._passes._fragments import cut
from manymesh._passes._run import run_passes
from manymesh._passes._stages import number_stages
from stages import assert_agrees


def clusters(source, scope=None):
    """For each cluster in order, what it holds."""
    flat = run("place", program(source))
    order, _ = cluster(flat, scope)
    by_position = flat.index.position.__getitem__
    return [[n.task or n.primitive for n in sorted(c.nodes, key=by_position)] for c in order]


def test_what_one_task_alone_reads_or_feeds_joins_it():
    """A cast before, a loss after."""
    assert clusters("""
        tasks: one 0, two 1
        inputs: x f32[512]
        a = lax.exp(x)
        b = one: a + 1.0
        c = two: b + 1.0
        d = lax.sin(c)
        e = lax.cos(d)
        results: e
    """) == [["exp", "one"], ["two", "sin", "cos"]]


def test_two_tasks_never_merge():
    """Equal layers then stay equal."""
    assert clusters("""
        tasks: one 0
        inputs: x f32[512]
        a = one: x + 1.0
        b = one: a + 1.0
        results: b
    """) == [["one"], ["one"]]


def test_a_path_through_another_submesh_is_no_cycle():
    """What is before the other task and what is after it are two fragments."""
    assert clusters("""
        tasks: one 0, two 1
        inputs: x f32[512]
        a = one: x + 1.0
        b = lax.sin(a)
        c = two: b * 2.0
        d = b * c
        e = one: d + 1.0
        results: e
    """) == [["one", "sin"], ["two", "mul"], ["one"]]


TOWERS = """
    tasks: image 0, text 1
    inputs: x f32[64,64], y f32[64,64]
    {first}
    {loop}a = image: x * 2.0
    {loop}b = text: {read} * 2.0
    {loop}c = a * b
    {loop}d = lax.sin(c)
    {loop}t = text_bwd: d * 2.0
    {loop}i = image_bwd: d * {of}
    {loop}s = t + i
    results: {last}
"""


def test_a_submesh_waits_for_another_only_for_what_its_task_needs():
    """A contrastive loss is no part of either tower; where the second needs the first anyway, it is part of that."""
    where = {"first": "", "loop": "", "last": "s", "of": "2.0"}
    apart = [["image"], ["text"], ["mul", "sin"], ["text"], ["image"], ["add"]]
    assert clusters(TOWERS.format(read="y", **where)) == apart
    # The second tower reads the first one, whose backward pass reads that of the second.
    chained = [["image"], ["text", "mul", "sin"], ["text"], ["image", "add"]]
    assert clusters(TOWERS.format(read="a", **{**where, "of": "t"})) == chained


def test_in_a_loop_a_loss_is_part_of_a_stage():
    """There are other microbatches for the time that one waits."""
    first = "loop 0: 2 microbatches, gpipe\n    carry z f32[64,64] = zero, then s, at last total\n    zero = lax.full((64, 64), 0.0)"
    source = TOWERS.format(read="y", of="2.0", first=first, loop="0: ", last="total")
    assert ["text", "mul", "sin"] in clusters(source, 0)


def test_what_several_wait_for_joins_the_one_that_all_others_wait_for():
    """A mask that a loss and its backward pass read, say, is no fragment of its own."""
    image, text = (mm.task(lambda w, x: jnp.tanh(x @ w), name, devices=[i]) for i, name in enumerate(("image", "text")))

    def loss(w, x):
        scores = image(w, x) @ text(w, x).T
        return jnp.mean(jax.nn.logsumexp(scores, 0) + jax.nn.logsumexp(scores, 1) - 2 * jnp.diag(scores))

    args = jnp.eye(32), jnp.ones((32, 32))
    program = mm.jit(jax.value_and_grad(loss)).lower(*args).program
    unmarked = [f.name for f in program.fragments if not f.tasks]
    assert len(unmarked) == 3  # the loss, its backward pass, and the sum of the two gradients
    assert_agrees(jax.value_and_grad(loss), *args)


@pytest.mark.parametrize(
    "tasks, stages, in_order",
    [("one, two", (0, 1), True), ("one, two, one", (0, 1, 0), True), ("one, one", (0,), True)],
)
def test_a_stage_is_what_a_submesh_does_between_two_crossings(tasks, stages, in_order):
    """Two tasks of one submesh after each other are one stage."""
    body = "\n".join(f"0: h{i + 1} = {name}: h{i} * 2.0" for i, name in enumerate(tasks.split(", ")))
    last = len(tasks.split(", "))
    flat = run(
        "place",
        program(f"""
tasks: one 0, two 1
inputs: x f32[512]
loop 0: 2 microbatches, gpipe
carry h0 f32[512] = x, then h{last}, at last total
{body}
results: total
"""),
    )
    order, preds = cluster(flat, 0)
    number, placement, applies = number_stages(order, preds)
    assert (placement, applies is None) == (stages, in_order)
    assert [placement[number[c]] for c in order] == [c.submesh for c in order]


@pytest.mark.parametrize(
    "body, apart, joined",
    [
        # the second submesh looks something up that it needs with what comes from the first
        ("a = one: x * 2.0; b = two: y * 2.0; c = two: a + b", (0, 1, 1), (0, 1)),
        # the first submesh is needed before it comes again, so that it cannot wait
        ("a = one: x * 2.0; b = two: a + 1.0; c = one: a + b", (0, 1, 0), (0, 1, 0)),
        # another model, the result of which a stage compares with its own
        ("a = one: x * 2.0; b = two: a * 2.0; d = three: y * 2.0; c = two: b + d; e = two: c * d", (0, 2, 1), (0, 2, 1)),
        ("a = one: x * 2.0; b = two: a * 2.0; d = three: y * 2.0; f = four: d + 1.0; c = two: f * 2.0; e = two: b + c",
         (0, 2, 1, 3, 1), (0, 2, 3, 1)),
        # both wait
        ("a = one: x * 2.0; b = two: a + 1.0; d = two: y * 2.0; e = two: d * y; f = two: b + e", (0, 1, 1), (0, 1)),
    ],
)  # fmt: skip
def test_a_stage_that_can_wait_is_one_with_a_later_one_of_its_submesh(body, apart, joined):
    lines = body.split("; ")
    flat = program(f"""
tasks: one 0, two 1, three 2, four 3
inputs: x f32[512], y f32[512]
loop 0: 2 microbatches, gpipe
carry h f32[512] = x, then t, at last total
{chr(10).join(f"0: {line}" for line in lines)}
0: t = {["one", "two", "three", "four"][apart[-1]]}: h + {lines[-1].split()[0]}
results: total
""")
    order, preds = cluster(run("place", flat), 0)
    assert number_stages(order, preds)[1] == apart
    number, placement, against = number_stages(order, preds, joined=True)
    assert (placement, against) == (joined, None)
    assert [placement[number[c]] for c in order] == [c.submesh for c in order]


def test_fragments_are_called_after_their_tasks():
    """With their own phase: a forward pass after a backward one, of an updated model, is a forward pass."""
    built = cut(
        run_passes(
            program("""
        tasks: one 0, two 1
        inputs: x f32[512]
        a = one: x + 1.0
        b = two: a + 1.0
        c = two_bwd: b + 2.0
        d = one: c + 1.0
        results: d
    """)
        )
    )
    assert [f.name for f in built.fragments] == ["one", "two", "two_bwd", "one_2"]
    assert [(e.source, e.target, e.loop, e.nbytes) for e in built.edges] == [(0, 1, None, 2048), (1, 0, None, 2048)]
    assert [f.kind for f in built.fragments] == ["F", "F", "B", "F"]


def test_an_optimizer_keeps_no_scaled_moments():
    """What only prepares a state for the gradients is computed with them, and a state's own arithmetic as well."""
    assert clusters("""
        tasks: one 0
        inputs: w f32[512], m f32[512], n i32[]
        a = one: w * 2.0
        g = one_bwd: a + 1.0
        scaled = 0.9 * m
        after = scaled + g
        count = n + 1
        d = lax.convert_element_type(count, jnp.float32)
        u = after / d
        v = w - u
        results: v, after, count
    """) == [["one"], ["one", "mul", "add", "add", "convert_element_type", "div", "sub"]]


def test_what_a_later_phase_reads_elsewhere_stays_early():
    """The other submesh does not wait for the backward pass of the one that has it."""
    assert clusters("""
        tasks: one 0, two 1
        inputs: w f32[512], m f32[512]
        a = one: w * 2.0
        b = two: w * 3.0
        scaled = lax.sin(m)
        g = one_bwd: a + scaled
        h = two_bwd: b + scaled
        results: g, h
    """) == [["one"], ["two"], ["sin"], ["one"], ["two"]]


def test_what_one_fragment_alone_waits_for_joins_it():
    """A step size and what uses it, behind a loop: one launch."""
    assert clusters("""
        tasks: one 0
        inputs: x f32[512], n i32[]
        loop 0: 2 microbatches, gpipe
        carry h f32[512] = x, then k, at last total
        0: k = one: h * 2.0
        count = n + 1
        d = lax.convert_element_type(count, jnp.float32)
        e = lax.sin(d)
        u = total / d
        v = total * e
        results: u, v, count
    """)[-1] == ["add", "convert_element_type", "sin", "div", "mul"]


AGAIN = """
    tasks: one 0, two 1
    inputs: x f32[512]
    a = one: x + 1.0
    b = two: a + 1.0
    c = two_bwd: a + 1.0 [in rematted_computation]
    d = two_bwd: c * b
    {}
    results: d
"""


def test_what_a_task_computes_again_is_one_with_its_backward_pass():
    """Not so where another one reads it, too, as where `jax.checkpoint` is around both."""
    assert clusters(AGAIN.format("")) == [["one"], ["two"], ["two", "two"]]
    assert clusters(AGAIN.format("e = one_bwd: c * a").replace("results: d", "results: d, e")) == [
        ["one"], ["two"], ["two"], ["two"], ["one"],
    ]  # fmt: skip


def hidden(w, x):
    return x + jax.nn.gelu(x @ w[0]) @ w[1]


def as_it_is(fun):
    return fun


def trained(inside, around, schedule):
    """Fragments, their names, and bytes at the peak of a step of four layers on two submeshes."""
    tasks = [mm.task(inside(hidden), f"layer{i}", devices=[i // 2]) for i in range(4)]

    def loss(ws, x):
        for task, w in zip(tasks, ws, strict=True):
            x = around(task)(w, x)
        return jnp.mean(x**2)

    step = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, schedule=schedule, reduce="mean")
    ws = [(jnp.ones((8, 64)), jnp.ones((64, 8)))] * 4
    assert_agrees(step, ws, jnp.ones((16, 8)) / 8)
    compiled = mm.jit(step).lower(ws, jnp.ones((16, 8))).compile()
    return [f.name for f in compiled.program.fragments], [m.peak_bytes for m in compiled.memory_analysis().values()]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
def test_a_checkpoint_around_a_task_costs_what_one_inside_does(schedule):
    inside = trained(jax.checkpoint, as_it_is, schedule)
    around = trained(as_it_is, jax.checkpoint, schedule)
    none = trained(as_it_is, as_it_is, schedule)
    assert sorted(around[0]) == sorted(inside[0])
    assert around[1] == inside[1]
    assert max(around[1]) < max(none[1])


def clipped(width):
    """A training step of two stages whose gradients are clipped by the norm of all of them, under Adam."""
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), name, devices=[i]) for i, name in enumerate(("front", "back"))]

    def loss(ws, x):
        for task, w in zip(tasks, ws, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    def train(ws, state, x):
        grads = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=2, schedule="1f1b", reduce="mean")(ws, x)
        updates, state = optimizer.update(grads, state, ws)
        return optax.apply_updates(ws, updates), state

    optimizer = optax.chain(optax.clip_by_global_norm(1e-3), optax.adam(1e-2))
    ws = [jnp.eye(width) + 0.1 * k for k in range(2)]
    return train, (ws, optimizer.init(ws), jnp.ones((4, width)))


def test_what_others_wait_for_does_not_wait_for_an_update():
    """The norm of all gradients: no submesh updates before another one can."""
    train, args = clipped(512)
    lowered = mm.jit(train).lower(*args)
    program = lowered.program
    after = [f for f in program.fragments if f.name.startswith("after")]
    assert sorted(f.name for f in after) == ["after_0", "after_0_2", "after_1", "after_1_2"]
    results = {v for v, _ in program.outputs}
    sent = {e.var for e in program.edges if e.loop is None}
    for f in after:
        assert sent.isdisjoint(f.outvars) or results.isdisjoint(f.outvars), f.name
    report = lowered.report(mm.inspect.Hardware.h100())
    when = {label: (start, end) for _, label, _, _, _, start, end in report.spans}
    assert when["after_1"][0] < when["front_bwd"][1] and when["after_0_2"][0] < when["after_1_2"][1]
    assert when["after_1_2"][0] < when["after_0_2"][1]
    assert_agrees(train, *args)


def test_what_is_small_is_one_launch():
    """Where an update takes less than a launch, it is part of what others wait for."""
    train, args = clipped(32)
    names = [f.name for f in mm.jit(train).lower(*args).program.fragments]
    assert sorted(name for name in names if name.startswith("after")) == ["after_0", "after_1", "after_1_2"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (512, [["cos"], ["sin", "reduce_sum"], ["reduce_sum", "add"], ["mul"], ["mul"]]),
        (2, [["sin", "reduce_sum"], ["cos", "reduce_sum", "add", "mul"], ["mul"]]),
    ],
)
def test_work_does_not_wait_for_what_only_its_reader_waits_for(rows, expected):
    """A gradient is made before the norm of another one arrives; a small one with it, by one launch."""
    found = clusters(f"""
        tasks: one 0, two 1
        inputs: x f32[{rows},1024], y f32[{rows},1024]
        loop 0: 2 microbatches, gpipe
        carry h f32[{rows},1024] = x, then k, at last total
        carry i f32[{rows},1024] = y, then l, at last other
        0: k = one: h * 2.0
        0: l = two: i * 2.0
        p = lax.sin(total)
        q = lax.cos(other)
        s = jnp.sum(p)
        t = jnp.sum(q)
        c = s + t
        u = p * c
        v = q * c
        results: u, v
    """)
    assert sorted(c for c in found if c) == sorted(expected)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble-h1"])
def test_two_chains_in_opposite_directions_are_a_pipeline(schedule):
    """As in a model that reads both ways: the loss's backward pass begins with the stage that comes last."""
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"task_{i}", devices=[at]) for i, at in enumerate((0, 1, 1, 0))]

    def loss(ws, x):
        there, back = x, x
        for task, w in zip(tasks[:2], ws[:2], strict=True):
            there = task(w, there)
        for task, w in zip(tasks[2:], ws[2:], strict=True):
            back = task(w, back)
        return jnp.mean(there**2) + jnp.mean(back**2)

    grads = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=4, schedule=schedule, reduce="mean")
    args = [jnp.eye(8) + 0.1 * i for i in range(4)], jnp.sin(jnp.arange(64.0)).reshape(8, 8)
    assert mm.jit(grads).lower(*args).program.loops[0].in_order
    assert_agrees(grads, *args)


def test_what_nobody_waits_for_joins_a_task_that_waits_for_the_same():
    """The gradient of a scale between two tasks, which lie on two submeshes."""
    source = """
        tasks: one 0, two 1
        inputs: w f32[64,64], x f32[128,64]
        loop 0: 2 microbatches, gpipe
        xs b f32[64,64] = first, second
        carry k f32[64,64] = zero, then s, at last total
        carry l f32[64,64] = zero, then t, at last grad
        first = x[0:64]
        second = x[64:128]
        zero = lax.full((64, 64), 0.0)
        0: a = one: b * 2.0
        0: c = a * w
        0: d = two: c + 1.0
        0: g = two_bwd: d * 2.0
        0: s = k + g * a
        0: r = one_bwd: g @ w
        0: t = l + r
        results: total, grad
    """
    assert clusters(source, 0) == [["one", "mul"], ["two"], ["two"], ["mul", "add", "one", "add"]]


SAMPLED = """
    tasks: one 0, two 1
    inputs: x f32[512], k f32[512]
    k1 = lax.sin(k)
    k2 = lax.sin(k1)
    n1 = lax.cos(k1)
    n2 = lax.cos(k2)
    a = one: x + 1.0
    b = two: a + 1.0
    c = b * n1
    d = one: c + 1.0
    e = two: d + c
    f = e * n2
    g = one: f + 1.0
    h = two: g + f
    results: h
"""


def test_noise_is_made_in_the_iteration_that_reads_it():
    """Not that of all of them first."""
    assert clusters(SAMPLED) == [
        ["one"], ["sin", "cos", "two", "mul"], ["one"], ["sin", "cos", "two", "mul"], ["one"], ["two"]
    ]  # fmt: skip


def test_what_picks_the_rows_of_an_update_is_made_with_the_update_before():
    """Also where tasks alone read it, forward and backward, and what it is made of is a piece of something."""
    source = """
        tasks: one 0, two 1
        inputs: x f32[512], k f32[2,512]
        k1 = k[0:1]
        k2 = k[1:2]
        s1 = lax.sin(k1)
        s2 = lax.sin(k2)
        a = one: x + s1
        b = two: a + 1.0
        c = one: b * s1
        u = c + a
        d = one: u + s2
        e = two: d + 1.0
        f = one: e * s2 + u
        results: f, u
    """
    assert clusters(source) == [
        ["slice", "sin", "one"], ["two"], ["slice", "sin", "one", "add"], ["one"], ["two"], ["one"]
    ]  # fmt: skip


def test_a_scan_of_updates_compiles_no_more_where_it_is_longer():
    """Each draws the rows of its batch, as in PPO: once the second update made the permutations of all of them."""
    front = mm.task(lambda w, x: jnp.tanh(x @ w), "front", devices=[0])
    back = mm.task(lambda w, h: jnp.mean((h @ w) ** 2), "back", devices=[1])
    loss = jax.value_and_grad(lambda p, x: back(p["back"], front(p["front"], x)))

    def step(params, x, key, length):
        def update(params, key):
            value, grads = loss(params, x[jax.random.permutation(key, 16)[:4]])
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return jax.lax.scan(update, params, jax.random.split(key, length))

    args = {"front": jnp.eye(8), "back": jnp.eye(8)}, jnp.sin(jnp.arange(128.0)).reshape(16, 8), jax.random.key(0)

    def largest(length):
        fragments = mm.jit(lambda *args: step(*args, length)).lower(*args).program.fragments
        return max(len(_compat.open_jaxpr(f.jaxpr).eqns) for f in fragments if f.tasks)

    assert largest(12) == largest(6)
    assert_agrees(lambda *args: step(*args, 6), *args)


def test_what_shrinks_a_value_does_not_wait_for_a_late_reader():
    """It would hold what it is made of over the tasks between, which nothing else does; what a later equation reads is there anyway."""
    source = """
        tasks: one 0, two 1
        inputs: x f32[512]
        a = one: x + 1.0
        b = lax.reduce_sum(a, axes=(0,))
        c = two: a + 1.0
        d = one: c + a
        e = two: d + 1.0
        f = d * b
        g = f + %s
        results: e, g
    """
    assert clusters(source % "1.0") == [["one", "reduce_sum"], ["two"], ["one", "mul", "add"], ["two"]]
    assert clusters(source % "a") == [["one"], ["two"], ["reduce_sum", "one", "mul", "add"], ["two"]]


@pytest.mark.parametrize("drawn", [False, True], ids=["alone", "with noise"])
def test_a_long_scan_holds_what_one_iteration_needs(drawn):
    """Neither all noise from the beginning, nor all values to the end, where what is made of them is stacked."""
    down = mm.task(lambda w, x: jnp.tanh(x @ w), "down", devices=[0])
    up = mm.task(lambda w, x: x @ w, "up", devices=[1])

    def sample(params, key, steps):
        def turn(carry, _):
            x, key = carry
            key, now = jax.random.split(key)
            y = x - 0.1 * up(params["up"], down(params["down"], x))
            return (y + 0.01 * jax.random.normal(now, x.shape) if drawn else y, key), jnp.sum(x**2)

        (x, _), sums = jax.lax.scan(turn, (jnp.ones((64, 8)), key), None, length=steps)
        return x, sums

    params = {"down": jnp.eye(8), "up": jnp.eye(8)}
    peaks = []
    for steps in (6, 20):
        compiled = mm.jit(lambda p, key, n=steps: sample(p, key, n)).lower(params, jax.random.key(0)).compile()
        peaks.append(max(memory.peak_bytes for memory in compiled.memory_analysis().values()))
    assert peaks[1] - peaks[0] < 64 * 8 * 4  # bytes of one value of an iteration, where it was one for each more
    assert_agrees(lambda p, key: sample(p, key, 6), params, jax.random.key(0))
