"""What a compiled step does, counted: devices, compilations, transfers, buffers."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh._runtime._observe import Observer
from stages import WIDTH, assert_same, back, dense, front, loss, microbatched, parameters, reference, rows

JAX_VERSION = tuple(int(n) for n in jax.__version__.split(".")[:2])
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


class Arrivals(Observer):
    """Writes down the shapes of the arguments that had to be moved."""

    def __init__(self):
        self.shapes = []

    def moves_argument(self, position, value, sharding):
        self.shapes.append(value.shape)


def update(loss_and_grads, state, x):
    p, opt = state
    value, grads = loss_and_grads(p, x)
    updates, opt = OPTIMIZER.update(grads, opt, p)
    return (optax.apply_updates(p, updates), opt), value


def wide_stages():
    """The two layers on unequal submeshes of 4 and 2 devices, with sharded weights and activations."""
    devices = np.array(jax.devices())
    meshes = Mesh(devices[:4].reshape(2, 2), ("data", "model")), Mesh(devices[4:6].reshape(2, 1), ("data", "model"))
    rules = (("batch", "data"), ("hidden", "model"))

    def layer(w, x):
        w = mm.with_sharding_constraint(w, (None, "hidden"))
        return mm.with_sharding_constraint(dense(w, x), ("batch", "hidden"))

    one, two = (mm.task(layer, n, mesh=m, logical_axes=rules) for n, m in zip(("one", "two"), meshes, strict=True))
    return meshes, lambda p, x: jnp.mean(two(p["back"], one(p["front"], x)) ** 2)


@pytest.fixture(scope="module")
def wide():
    """A training step on the wide stages, compiled, with the state it starts from."""
    meshes, f = wide_stages()
    step = mm.jit(functools.partial(update, microbatched(jax.value_and_grad(f))), donate_argnums=0)
    state = parameters(), OPTIMIZER.init(parameters())
    return meshes, step, step.lower(state, rows()).compile()


def fresh_state():
    return parameters(), OPTIMIZER.init(parameters())


def test_every_executable_spans_exactly_its_submesh(wide):
    """No fragment touches a device that is not its own."""
    _, _, compiled = wide
    lowered = compiled._lowered
    assert {f.submesh for f in compiled.program.fragments} == {0, 1}
    for fragment, executable in zip(compiled.program.fragments, lowered.executables, strict=True):
        submesh = set(compiled.program.submeshes[fragment.submesh].devices.flat)
        shardings = [*executable.input_shardings[0], *executable.output_shardings]
        assert shardings
        for sharding in shardings:
            assert set(sharding.device_set) == submesh, fragment


def test_results_lie_where_their_state_and_their_tasks_are(wide):
    """Updated parameters and moments on the submesh of their stage, as the reported shardings say."""
    meshes, step, compiled = wide
    state, value = step(fresh_state(), rows())
    moments = state[1][1][0]
    for tree in (state[0], moments.mu, moments.nu):
        assert tree["front"].sharding.is_equivalent_to(NamedSharding(meshes[0], P(None, "model")), 2)
        assert tree["back"].sharding.device_set == set(meshes[1].devices.flat)
    jax.tree.map(
        lambda x, s: np.testing.assert_(x.sharding == s and isinstance(s, NamedSharding)),
        (state, value),
        compiled.output_shardings,
    )


def test_step_two_moves_no_state(wide):
    """Input and output shardings of the state are equal, and a second step compiles nothing."""
    _, step, compiled = wide
    assert compiled.input_shardings[0][0] == compiled.output_shardings[0]
    step = mm.jit(step.fun, donate_argnums=0)
    state, _ = step(fresh_state(), rows())
    (made,) = step._compiled.values()
    arrivals = Arrivals()
    made.call_flat(jax.tree.leaves((state, rows())), arrivals)
    assert len(step._compiled) == 1
    # The batch, and the optimizer's step counter, which both submeshes read.
    assert set(arrivals.shapes) == {(), rows().shape}


def _decayed_by_a_norm(p, memory, rate, x):
    value, grads = jax.value_and_grad(loss)(p, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda w, g: w * (1 - 0.1 * norm) - 0.1 * g, p, grads), memory, rate * 0.9


def _momentum_before_it_is_updated(p, memory, rate, x):
    value, grads = jax.value_and_grad(loss)(p, x)
    p = jax.tree.map(lambda w, m: w - value * m, p, memory)
    return p, jax.tree.map(lambda m, g: 0.9 * m + g, memory, grads), rate * 0.9


def _weights_looked_ahead(p, memory, rate, x):
    ahead = jax.tree.map(lambda w, m: w + jnp.tanh(rate * m), p, memory)
    value, grads = jax.value_and_grad(loss)(ahead, x)
    p = jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)
    return p, jax.tree.map(lambda m, g: 0.9 * m + g, memory, grads), rate * 0.9 + 0.1 * value


def assert_no_weight_crosses(step, *state):
    """Neither in a call nor before the second one, and the values are those of the plain function."""
    # Each is too large to be computed in two places.
    state = jax.tree.map(lambda w: jnp.tile(w, (8, 8)) / 8 if w.ndim else w, state)
    x = jnp.tile(rows(), (1, 8))
    jitted = mm.jit(step)
    after = jitted(*state, x)
    (compiled,) = jitted._compiled.values()
    arrivals = Arrivals()
    compiled.call_flat(jax.tree.leaves((after, x)), arrivals)
    assert set(arrivals.shapes) <= {(), x.shape}
    assert all(e.var.aval.shape[1:] in {(), x.shape[1:]} and e.nbytes <= x.nbytes for e in compiled.program.edges)
    assert_same(after, reference(jitted, *state, x))


@pytest.mark.parametrize("step", [_decayed_by_a_norm, _momentum_before_it_is_updated, _weights_looked_ahead])
def test_an_update_is_not_drawn_to_the_scalar_that_scales_it(step):
    """The scalar crosses, of whatever submesh it is; no weight and no moment does, and a second step moves none."""
    assert_no_weight_crosses(step, parameters(0), parameters(1), jnp.float32(0.1))


PENALTIES = {
    "squares": lambda value, weights: value + 0.1 * sum(jnp.sum(w**2) for w in weights),
    "a norm": lambda value, weights: value + 0.1 * jnp.sqrt(sum(jnp.sum(w**2) for w in weights)),
    "a factor": lambda value, weights: value * (1 + sum(jnp.mean(jnp.abs(w)) for w in weights)),
    "orthogonal": lambda value, weights: value + 0.1 * sum(jnp.sum((w.T @ w - jnp.eye(len(w))) ** 2) for w in weights),
}


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_penalty_on_weights_is_computed_where_they_are(penalty, num_microbatches):
    """A number of each submesh crosses, and comes back for the gradient, in a loop over microbatches too."""

    def penalised(p, x):
        return PENALTIES[penalty](loss(p, x), [p["front"], p["back"]])

    def step(p, value, x):
        value, grads = microbatched(jax.value_and_grad(penalised), num_microbatches=num_microbatches)(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    assert_no_weight_crosses(step, parameters(), jnp.float32(0.0))


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_product_between_tasks_is_differentiated_where_its_weight_is(num_microbatches):
    """Forward and backward on one submesh, so that the weight is on one: activations and their gradients cross."""

    def between(p, x):
        return jnp.mean(back(p["back"], front(p["front"], x) @ p["between"]) ** 2)

    def step(p, x):
        _, grads = microbatched(jax.value_and_grad(between), num_microbatches=num_microbatches)(p, x)
        return (jax.tree.map(lambda w, g: w - 0.1 * g, p, grads),)

    assert_no_weight_crosses(step, {**parameters(0), "between": parameters(1)["front"]})


def test_transfers_in_one_call_are_those_of_the_report():
    """Two stages, four microbatches: an activation forward and a gradient back in each, and nothing else in the loop."""
    report = mm.jit(microbatched()).lower(parameters(), rows()).compile().report()
    lines = {(e.source, e.target): e for e in report.edges}
    assert lines[0, 1].transfers == 4 and lines[0, 1].nbytes == 4 * 2 * WIDTH * 4
    assert lines[1, 0].transfers == 4 and lines[1, 0].nbytes == 4 * 2 * WIDTH * 4


def test_what_crosses_is_what_a_hand_would_count():
    """Bytes and transfers of each edge of three programs, of weights that are too large to be computed twice."""
    width, batch, count = 32, 8, 4
    weight, activation = 4 * width * width, 4 * batch * width
    ws = [jnp.eye(width) * k for k in (1, 2, 3)]
    x = jnp.ones((batch, width))
    third = mm.task(dense, "third", devices=[2])

    def edges(step, *args):
        report = mm.jit(step).lower(*args).compile().report()
        return {(e.source, e.target): (e.transfers, e.nbytes) for e in report.edges}

    def skip(ws, x):
        h = front(ws[0], x)
        return third(ws[2], back(ws[1], h) + h)

    # The sum is on the second submesh, so that h crosses once and the sum once.
    assert edges(skip, ws, x) == {(0, 1): (1, activation), (1, 2): (1, activation)}

    def chain(ws, x):
        return jnp.mean(third(ws[2], back(ws[1], front(ws[0], x))) ** 2)

    looped = microbatched(jax.value_and_grad(chain), num_microbatches=count)
    each_way = (count, activation)  # a quarter of the rows, four times
    assert edges(looped, ws, x) == {(0, 1): each_way, (1, 0): each_way, (1, 2): each_way, (2, 1): each_way}

    def tied(p, x):
        return jnp.mean(back(p["w"].T, front(p["w"], x)) ** 2)

    def step(p, x):
        value, grads = microbatched(jax.value_and_grad(tied), num_microbatches=count)(p, x)
        return jax.tree.map(lambda w, g: w - g, p, grads), value

    # The weight goes out once a step. Its gradient from there comes back once, with the last activation's gradient.
    crossing = edges(step, {"w": ws[1]}, x)
    assert crossing == {(0, 1): (count + 1, activation + weight), (1, 0): (count, activation + weight)}


def normed(p, h):
    h = h - jnp.mean(h, -1, keepdims=True)
    return h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-5) * p["scale"] + p["shift"]


BETWEEN = {
    "scale": lambda p, h: h * p["scale"],
    "gate": lambda p, h: h * jax.nn.sigmoid(p["scale"]),
    "norm": normed,
    "norm without weights": lambda p, h: normed({"scale": 1.0, "shift": 0.0}, h),
    "dense": lambda p, h: jax.nn.relu(h @ p["kernel"] + p["shift"]),
}


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_stands_between_two_tasks_costs_no_transfer(between, in_loop):
    """One activation goes to the next stage and one gradient comes back, as if nothing stood there."""
    p = {
        **parameters(),
        "scale": jnp.arange(1.0, 1 + WIDTH),
        "shift": jnp.ones(WIDTH),
        "kernel": parameters(3)["front"],
    }

    def f(p, x):
        return jnp.mean(back(p["back"], BETWEEN[between](p, front(p["front"], x))) ** 2)

    step = jax.value_and_grad(f)
    step, count = (microbatched(step), 4) if in_loop else (step, 1)
    compiled = mm.jit(step).lower(p, rows()).compile()
    lines = {(e.source, e.target): (e.transfers, e.nbytes) for e in compiled.report().edges}
    assert lines == {(0, 1): (count, rows().nbytes), (1, 0): (count, rows().nbytes)}
    assert_same(compiled(p, rows()), reference(step, p, rows()))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble-h1"])
def test_a_residual_stream_outside_of_tasks_crosses_once(schedule):
    """Blocks alone are tasks; norms with weights of their own and sums are not. Training moves nothing else, nor a state."""
    width, layers, devices = 16, 6, 3
    blocks = [mm.task(dense, f"block{k}", devices=[k * devices // layers]) for k in range(layers)]
    rng = np.random.default_rng(0)
    drawn = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = [{"w": drawn(width, width), "scale": jnp.ones(width), "shift": drawn(width)} for _ in range(layers)]
    x = drawn(32, width)

    def f(params, x):
        for block, p in zip(blocks, params, strict=True):
            x = x + block(p["w"], normed(p, x))
        return jnp.mean(x**2)

    grads, sgd = microbatched(jax.value_and_grad(f), schedule=schedule), optax.sgd(1e-2, momentum=0.9)

    def step(state, x):
        value, g = grads(state[0], x)
        updates, opt = sgd.update(g, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt), value

    state = params, sgd.init(params)
    compiled = mm.jit(step).lower(state, x).compile()
    crossing = [(e.source, e.target, e.loop) for e in compiled.program.edges]
    assert sorted(crossing) == [(0, 1, 0), (1, 0, 0), (1, 2, 0), (2, 1, 0)]
    after, wanted = compiled(state, x), reference(step, state, x)
    assert_same(after, wanted)
    arrivals = Arrivals()
    compiled.call_flat(jax.tree.leaves((after[0], x)), arrivals)
    assert set(arrivals.shapes) <= {(), x.shape}
    assert_same(compiled(after[0], x), reference(step, wanted[0], x))


def test_a_tied_gradient_crosses_once_a_call():
    """Each stage accumulates its own part; the parts are added once after the loop."""

    def tied(w, x):
        return jnp.mean(back(w.T, front(w, x)) ** 2)

    step = microbatched(jax.value_and_grad(tied), num_microbatches=8)
    program = mm.jit(step).lower(parameters()["front"], rows()).program
    weights = [e for e in program.edges if e.var.aval.shape == (WIDTH, WIDTH)]
    assert [e.loop for e in weights] == [None]


def test_a_global_norm_crosses_as_one_scalar_a_submesh():
    """Ten parameters a stage are summed where they are."""

    def f(p, x):
        for w in p["front"]:
            x = front(w, x)
        for w in p["back"]:
            x = back(w, x)
        return jnp.mean(x**2)

    def step(p, x):
        grads = jax.grad(f)(p, x)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda w, g: w - g / norm, p, grads)

    p = {k: [w] * 4 for k, w in parameters().items()}
    program = mm.jit(step).lower(p, rows()).program
    assert sum(e.var.aval.shape == () for e in program.edges) <= 2


def test_compilations_do_not_grow_with_microbatches():
    """From 4 to 64 microbatches of the same size take equally many."""
    made = set()
    for count in (4, 8, 16, 64):
        step = mm.jit(microbatched(num_microbatches=count))
        made.add(step.lower(parameters(), rows(2 * count)).compile().report().compiled)
    assert len(made) == 1, made


def test_identical_layers_share_executables():
    """Eight layers on two submeshes compile as few fragments as four."""

    def compiled(layers):
        def f(ws, x):
            for i in range(layers):
                x = mm.task(dense, f"layer{i}", devices=[i * 2 // layers])(ws[i], x)
            return jnp.mean(x**2)

        ws = [parameters(i)["front"] for i in range(layers)]
        return mm.jit(f).lower(ws, rows()).compile().report()

    four, eight = compiled(4), compiled(8)
    assert len(eight.fragments) >= len(four.fragments)
    assert eight.compiled <= four.compiled + 1


def test_equal_tasks_on_equal_submeshes_of_a_ring_share_executables():
    """A stage visited again runs the executable of the first visit."""

    def f(w, x):
        for i in range(6):
            x = mm.task(dense, f"s{i}", devices=[i % 2])(w, x)
        return x

    report = mm.jit(f).lower(parameters()["front"], rows()).compile().report()
    assert len(report.fragments) == 6
    assert report.compiled <= 4  # the first visit neither donates what it reads, nor knows where the weight will lie


def test_a_second_call_compiles_nothing():
    """Same shapes, other values: no tracing and no compilation, neither by us nor by JAX."""
    step = mm.jit(microbatched())
    jax.block_until_ready(step(parameters(), rows()))
    seen = []

    def listen(name, secs, **_):
        seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        args = parameters(1), rows(8, 2)
        jax.block_until_ready(args)
        seen.clear()
        jax.block_until_ready(step(*args))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [name for name in seen if "compile" in name or "trace" in name], seen


def test_no_device_value_goes_through_the_host_inside_a_step(wide):
    """The transfer guard forbids it. JAX 0.10 does not check copies between devices on CPU; 0.12 does."""
    _, step, compiled = wide
    state, _ = compiled(fresh_state(), rows())
    with jax.transfer_guard_device_to_host("disallow"):
        state, value = compiled(state, rows())
        jax.block_until_ready((state, value))


@pytest.mark.skipif(JAX_VERSION < (0, 12), reason="the guard does not see copies between CPU devices before JAX 0.12")
def test_the_guard_of_the_test_above_can_fail():
    """A copy that needs the host is caught."""
    meshes, _ = wide_stages()
    x = jax.device_put(jnp.ones((4, 4)), NamedSharding(meshes[0], P("data", "model")))
    with jax.transfer_guard_device_to_host("disallow"), pytest.raises(Exception, match="[Dd]isallowed"):
        jax.block_until_ready(jax.device_put(x, NamedSharding(meshes[1], P(None, None))))


def test_live_arrays_are_constant_over_a_hundred_steps(wide):
    """Nothing is kept from step to step, on any device."""
    _, step, compiled = wide
    state, x = fresh_state(), rows()
    counts = set()
    gc.freeze()  # what other tests left behind stays, all of it
    try:
        for i in range(100):
            state, value = compiled(state, x)
            if i >= 2:
                counts.add((len(jax.live_arrays()), sum(a.nbytes for a in jax.live_arrays())))
    finally:
        gc.unfreeze()
    jax.block_until_ready(state)
    assert len(counts) == 1, counts


def test_accumulators_are_donated():
    """Each backward fragment of a loop reuses the buffers of its gradients' accumulators, in every microbatch."""
    compiled = mm.jit(microbatched()).lower(parameters(), rows()).compile()
    lowered, program = compiled._lowered, compiled.program
    accumulators = {inner: out for loop in program.loops for inner, out, _, _ in loop.carries}
    assert sum(v.aval.shape == (WIDTH, WIDTH) for v in accumulators) == 2
    for fragment in program.fragments:
        for k, v in enumerate(fragment.invars):
            if v in accumulators and v.aval.shape:
                assert k in dict(lowered.layout.donation[fragment.index]), fragment
                text = lowered.executables[fragment.index].as_text()
                assert "input_output_alias" in text.splitlines()[0]


def test_donated_state_is_updated_in_place(wide):
    """Parameters and moments take over old buffers: every matrix that an update makes is aliased to one it reads."""
    _, _, compiled = wide
    updates = [f for f in compiled.program.fragments if f.loop is None and f.name.startswith("after")]
    matrices = [sum(v.aval.ndim == 2 for v in f.outvars) for f in updates]
    assert sum(matrices) >= 6
    for fragment, count in zip(updates, matrices, strict=True):
        head = compiled._lowered.executables[fragment.index].as_text().splitlines()[0]
        assert head.count("may-alias") + head.count("must-alias") >= count, fragment


def test_arguments_that_are_not_donated_are_not_copied_home_again():
    """Parameters that already lie at home are used as they are."""
    step = mm.jit(loss)
    placed = {k: jax.device_put(w, jax.devices()[i]) for i, (k, w) in enumerate(parameters().items())}
    compiled = step.lower(placed, rows()).compile()
    placed = jax.tree.map(jax.device_put, placed, compiled.input_shardings[0][0])
    arrivals = Arrivals()
    compiled.call_flat(jax.tree.leaves((placed, rows())), arrivals)
    assert arrivals.shapes == [(8, WIDTH)]


def test_results_that_are_arguments_are_copies_on_every_shard():
    """Also where an array has several shards."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    x = jax.device_put(rows(), NamedSharding(mesh, P("d")))
    f = mm.jit(lambda x: (mm.task(jnp.sum, mesh=mesh)(x), x))
    y = f(x)[1]
    assert y.sharding == x.sharding
    pointers = [{s.data.unsafe_buffer_pointer() for s in a.addressable_shards} for a in (x, y)]
    assert not pointers[0] & pointers[1]
    assert_same(y, x)


def test_memory_of_each_device():
    """Peak bytes are at least the arguments', and every device of the program is listed."""
    compiled = mm.jit(microbatched()).lower(parameters(), rows()).compile()
    memory = compiled.memory_analysis()
    assert set(memory) == set(jax.devices()[:2])
    for record in memory.values():
        assert record.peak_bytes >= record.argument_bytes >= WIDTH * WIDTH * 4


def test_live_bytes_of_gpipe_grow_with_microbatches_and_those_of_1f1b_do_not():
    """What each schedule is for, seen in the report."""

    def peak(schedule, count):
        step = mm.jit(microbatched(schedule=schedule, num_microbatches=count))
        memory = step.lower(parameters(), rows(64 * count)).compile().memory_analysis()
        return max(m.peak_bytes - m.argument_bytes for m in memory.values())

    assert peak("gpipe", 8) > 1.5 * peak("gpipe", 4)
    assert peak("1f1b", 8) < 1.6 * peak("1f1b", 4)


def test_the_report_and_the_program_name_every_task(wide):
    """They print without a device being touched."""
    _, _, compiled = wide
    for text in (str(compiled.report()), repr(compiled.program), compiled.as_text()):
        assert "one" in text and "two" in text and "one_bwd" in text
    assert set(compiled.cost_analysis()) == {f.name for f in compiled.program.fragments}


def test_the_report_says_where_unmarked_equations_went_and_why():
    """A line for each submesh and reason, and the same as data."""

    def step(p, x):
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    report = mm.jit(step).lower(parameters(), rows()).compile().report()
    assert ("sub", 0, "reads", 1) in report.unmarked and ("sub", 1, "reads", 1) in report.unmarked
    (line,) = [x for x in str(report).splitlines() if "unmarked on submesh 0, reads" in x]
    assert "sub" in line and "mul" in line


def test_a_state_that_an_earlier_task_reads_is_sent_by_the_plan():
    """It is at home where it is read; the next call moves no argument, and the report has the transfer."""
    early, late = mm.task(lambda s, x: jnp.tanh(x + s), devices=[0]), mm.task(lambda h: 2 * h, devices=[1])

    def step(state, x):
        m = late(early(state["m"], x))
        return {"m": m}, jnp.sum(m)

    jitted, x = mm.jit(step), jnp.ones((8, 64))
    compiled = jitted.lower({"m": x}, x).compile()
    state, _ = jitted({"m": x}, x)
    assert state["m"].devices() == {jax.devices()[0]}
    arrivals = Arrivals()
    compiled.call_flat([state["m"], jax.device_put(x, compiled.input_shardings[0][1])], arrivals)
    assert arrivals.shapes == []
    sent = {(e.source, e.target): e.nbytes for e in compiled.report().edges}
    assert sent == {(0, 1): x.nbytes, (1, 0): x.nbytes}


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1)], ids=["sgd", "momentum", "adam"]
)
def test_weights_that_one_task_reads_and_another_trains_are_where_they_are_trained(optimizer):
    """An actor and a learner: each weight goes to the actor once a step, and nothing comes back."""

    def net(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    actor, learner = (mm.task(net, name, devices=[i]) for i, name in enumerate(("actor", "learner")))

    def step(ws, state, x):
        actions = actor(ws, x).argmax(-1)
        grads = jax.grad(lambda ws: jnp.mean((learner(ws, x) - jax.nn.one_hot(actions, 32)) ** 2))(ws)
        updates, state = optimizer.update(grads, state, ws)
        return optax.apply_updates(ws, updates), state

    rng = np.random.default_rng(0)
    ws = [rng.normal(size=(32, 32)).astype("f4") / 6 for _ in range(2)]
    x = rng.normal(size=(8, 32)).astype("f4")
    jitted = mm.jit(step)
    program = jitted.lower(ws, optimizer.init(ws), x).program
    assert {program.home[v] for v in program.invars if np.size(v.aval) >= 32 * 32} == {1}
    assert [e for e in program.edges if e.nbytes >= 4 * 32 * 32] == []
    assert_same(jitted(ws, optimizer.init(ws), x), reference(jitted, ws, optimizer.init(ws), x))


def test_what_a_task_returns_twice_crosses_once():
    """As the last state and as a skip connection; so does its gradient, the sum of both."""

    def down(w, x):
        h = dense(w, x)
        return h, (x, h)

    down = mm.task(down, "down", devices=[0])
    up = mm.task(lambda w, h, skip: dense(w, h) * skip, "up", devices=[1])

    def f(p, x):
        h, skips = down(p["front"], x)
        return jnp.mean(up(p["back"], h, skips[1]) ** 2)

    step = microbatched(jax.value_and_grad(f))
    program = mm.jit(step).lower(parameters(), rows()).program
    assert [(e.source, e.target) for e in program.edges if e.loop is not None] == [(0, 1), (1, 0)]
    assert_same(mm.jit(step)(parameters(), rows()), reference(jax.jit(step), parameters(), rows()))


def test_an_update_in_a_step_of_its_own_is_where_the_gradients_are():
    """Small weights, too, that were nowhere yet; from then on no leaf of the state moves."""
    grads_of = mm.jit(jax.grad(loss))

    @mm.jit
    def apply(state, grads):
        p, opt = state
        updates, opt = OPTIMIZER.update(grads, opt, p)
        return optax.apply_updates(p, updates), opt

    state = fresh_state()
    for _ in range(2):
        state = apply(state, grads_of(state[0], rows()))
    places = [{k: [d.id for d in x.devices()] for k, x in tree.items()} for tree in (state[0], state[1][1][0].mu)]
    assert places == [{"front": [0], "back": [1]}] * 2
    edges = apply.lower(state, grads_of(state[0], rows())).report().edges
    assert all(e.nbytes <= 16 for e in edges), edges  # a norm, and the count of steps


def test_the_history_of_lbfgs_is_where_its_parameters_are():
    """It goes through all of it in a scan; of the parameters, 4 KiB each, nothing crosses, and step 2 moves no state."""
    optimizer = optax.lbfgs(1e-2, memory_size=3, linesearch=None)
    layers = [mm.task(lambda w, x: jnp.tanh(x @ w), f"layer_{k}", devices=[k]) for k in range(2)]

    def step(ws, state, x):
        grads = jax.grad(lambda ws: jnp.mean((layers[1](ws[1], layers[0](ws[0], x)) - 1) ** 2))(ws)
        updates, state = optimizer.update(grads, state, ws)
        return optax.apply_updates(ws, updates), state

    rng = np.random.default_rng(0)
    state = [rng.normal(size=(32, 32)).astype("f4") / 6 for _ in range(2)]
    state = expected = state, optimizer.init(state)
    x = rng.normal(size=(4, 32)).astype("f4")
    jitted = mm.jit(step)
    values = jitted.lower(*state, x).report().values
    assert max(v.nbytes for v in values) == x.nbytes, values
    for _ in range(5):  # more than it remembers
        state, expected = jitted(*state, x), reference(jitted, *expected, x)
        assert_same(state, expected, tolerance=1e-3)  # it divides by small differences
    history = state[1][0].diff_params_memory
    assert [[d.id for d in h.devices()] for h in history] == [[0], [1]]


def test_a_scan_that_is_handed_all_parameters_gets_those_that_it_reads():
    """No block of the others crosses; of a short scan none does, for each layer is where its weights are."""
    stages = [Mesh(jax.devices()[k : k + 1], ("x",)) for k in range(2)]
    layer = mm.task(lambda w, x: jnp.tanh(x @ w["read"] + x @ w["other"]), "layer", mesh=stages)

    def f(p, x):
        h, _ = jax.lax.scan(lambda h, w: (layer(w, h), None), x, p)
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w["read"].T), None), h, p, reverse=True)[0]

    def crossing(layers):
        p = {k: np.full((layers, 16, 16), 0.01, np.float32) for k in ("read", "other")}
        report = mm.jit(f).lower(p, np.ones((2, 16), np.float32)).report()
        return [v.name for v in report.values if v.nbytes > 1024]

    assert not crossing(4)
    with pytest.warns(UserWarning, match="reads the whole: 20480 bytes"):
        assert crossing(40) == ["args[0]['read'] block 1"]
