"""The memory of a report, beside the arrays that are alive while the step runs."""

import functools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh._plan._instructions import Run
from manymesh._runtime._observe import Observer

pytestmark = pytest.mark.once

WIDTH, COUNT = 16, 4


class Alive(Observer):
    """The most bytes on each device: the arrays that are alive when a fragment starts, and what XLA says it needs."""

    def __init__(self, compiled, arguments):
        self.program, self.peak = compiled.program, defaultdict(int)
        self.stats = [e.memory_analysis() for e in compiled._lowered.executables]
        self.outs = [e.output_shardings for e in compiled._lowered.executables]
        own = {id(x) for x in arguments}
        self.others = [x for x in jax.live_arrays() if id(x) not in own]
        self.ids = {id(x) for x in self.others}

    def begin(self, position, instruction, inputs):
        if not isinstance(instruction, Run):
            return
        held, seen = defaultdict(int), set()
        for x in jax.live_arrays():
            for shard in () if id(x) in self.ids or x.is_deleted() else x.addressable_shards:
                buffer = shard.device, shard.data.unsafe_buffer_pointer()
                held[shard.device] += 0 if buffer in seen else shard.data.nbytes
                seen.add(buffer)
        stats, f = self.stats[instruction.fragment], self.program.fragments[instruction.fragment]
        made = sum(
            int(np.prod(s.shard_shape(v.aval.shape))) * v.aval.dtype.itemsize
            for v, s in zip(f.outvars, self.outs[f.index], strict=True)
        )
        for device in self.program.submeshes[f.submesh].devices.flat:
            more = made - stats.alias_size_in_bytes + stats.temp_size_in_bytes
            self.peak[device] = max(self.peak[device], held[device] + more)


@functools.cache
def trained(schedule="1f1b", donate=True):
    """A step of Adam on three stages, the last of them on two devices that share the batch."""
    meshes = [jax.sharding.Mesh(np.array(jax.devices()[a:b]), ("data",)) for a, b in ((0, 1), (1, 2), (2, 4))]

    def layer(w, x):
        return jnp.tanh(mm.with_sharding_constraint(x, ("data",)) @ w["up"]) @ w["down"]

    tasks = [mm.task(layer, f"stage_{i}", mesh=mesh) for i, mesh in enumerate(meshes)]
    optimizer = optax.adam(1e-3)

    def loss(ws, x):
        for task, w in zip(tasks, ws, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    def step(state, x):
        ws, moments = state
        grad = mm.microbatch(
            jax.value_and_grad(loss), argnum=1, num_microbatches=COUNT, schedule=schedule, reduce="mean"
        )
        value, grads = grad(ws, x)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(ws, updates), moments), value

    ws = [{"up": jnp.eye(WIDTH, 8 * WIDTH), "down": jnp.eye(8 * WIDTH, WIDTH)} for _ in tasks]
    args = (ws, optimizer.init(ws)), jnp.ones((8 * COUNT, WIDTH))
    lowered = mm.jit(step, donate_argnums=0 if donate else ()).lower(*args)
    compiled = lowered.compile()
    return lowered, compiled, args


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble-h1"])
@pytest.mark.parametrize("donate", [True, False])
def test_the_peak_is_that_of_the_arrays_that_are_alive(schedule, donate):
    """To a part in a hundred, on every device, for arguments that are donated or stay."""
    _, compiled, args = trained(schedule, donate)
    given = jax.device_put(jax.tree.map(lambda x: np.array(x), args), compiled.input_shardings[0])
    leaves = jax.tree.leaves((given, {}))
    alive = Alive(compiled, leaves)
    del given
    compiled.call_flat(leaves, alive)
    found = compiled.report().memory
    assert {d: m.peak_bytes for d, m in found.items()} == pytest.approx(dict(alive.peak), rel=0.01)


def test_our_count_before_compiling_is_near():
    """With the room inside fragments counted, not asked of XLA: to within five parts in a hundred."""
    lowered, compiled, _ = trained()
    before, after = lowered.memory_analysis(), compiled.memory_analysis()
    for device, memory in after.items():
        assert before[device].argument_bytes == memory.argument_bytes
        assert before[device].peak_bytes == pytest.approx(memory.peak_bytes, rel=0.05)


def test_a_peak_says_what_it_is_made_of():
    """Its parts add up to it, and each is what a hand would count."""
    lowered, _, _ = trained()
    weights = 4 * 2 * 8 * WIDTH * WIDTH
    for d, memory in lowered.memory_analysis().items():
        assert sum(memory.made_of.values()) == memory.peak_bytes
        assert memory.made_of["parameters"] == weights
        assert memory.made_of["optimizer state"] in (2 * weights, 2 * weights + 4)  # the counter is on one of them
        # Where the batch is shared, each device holds its own terms of the gradients.
        assert weights <= memory.made_of["gradients"] < 1.1 * weights, d
        assert max(m.total_bytes for m in memory.timeline) == memory.peak_bytes
        assert sum(h.nbytes for h in memory.holds) <= memory.peak_bytes


def test_what_is_taken_over_at_the_peak_is_named_once():
    """By what a fragment makes of it, as in the kinds that the peak consists of."""
    task = mm.task(jnp.sin, "task", devices=[0])
    lowered = mm.jit(task, donate_argnums=0).lower(jnp.ones((64, 64)))
    for memory in (lowered.memory_analysis(), lowered.compile().memory_analysis()):
        (memory,) = memory.values()
        assert memory.made_of == {"results": memory.peak_bytes} == {"results": 4 * 64 * 64}
        assert [(h.name, h.kind, h.values, h.nbytes) for h in memory.holds] == [("result", "results", 1, 4 * 64 * 64)]


def test_activations_in_flight_are_those_of_the_schedule():
    """GPipe holds all microbatches; 1F1B as many as there are stages after."""

    def most(schedule):
        memory = trained(schedule)[0].memory_analysis()
        return [max(m.activation_bytes for m in memory[d].timeline) for d in jax.devices()[:3]]

    one, all_ = most("1f1b"), most("gpipe")
    assert all_[0] > 1.2 * one[0] and all_[2] > 2 * one[2]
    assert one[0] > 2 * one[2]  # the last stage frees what it made at once, and shares the batch
    for memory in trained("gpipe")[0].memory_analysis().values():
        assert [m.position for m in memory.timeline] == sorted(m.position for m in memory.timeline)


def test_pieces_of_a_batch_are_arguments():
    """Cut and cast before the loop: they wait for no backward pass, and no checkpoint makes them fewer."""
    task = mm.task(lambda w, x: jnp.tanh(x @ w), "task", devices=[0])

    def step(w, x):
        grad = jax.value_and_grad(lambda w, x: jnp.sum(task(w, x)))
        return mm.microbatch(grad, argnum=1, num_microbatches=8)(w, x.astype("float32"))

    lowered = mm.jit(step).lower(jnp.eye(4), jnp.ones((32, 4), "bfloat16"))
    (memory,) = lowered.memory_analysis().values()
    assert memory.made_of["arguments"] == 32 * 4 * (2 + 4)
    assert max(m.activation_bytes for m in memory.timeline) <= 4 * 4 * 4 * 2


def test_every_kind_of_value_is_told_apart():
    """Parameters in another dtype, beside a mask that is made of the batch; gradients that are handed out."""
    front, back = (
        mm.task(lambda w, x, mask: jnp.tanh(x @ w + mask), name, devices=[i])
        for i, name in enumerate(("front", "back"))
    )

    def loss(ws, x):
        cast = [w.astype(jnp.bfloat16) for w in ws]
        mask = jnp.where(x["keep"], 0.0, -1e9).astype(jnp.bfloat16)
        return jnp.sum(back(cast[1], front(cast[0], x["x"], mask), mask).astype(jnp.float32))

    def step(ws, x, scale):
        value, grads = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2)(ws, x)
        return value * scale, grads

    shape = jax.ShapeDtypeStruct((32, 32), "float32")
    batch = {"keep": jax.ShapeDtypeStruct((64, 32), "bool"), "x": jax.ShapeDtypeStruct((64, 32), "bfloat16")}
    args = [shape, shape], batch, jax.ShapeDtypeStruct((), "float32")
    lowered = mm.jit(step).lower(*args)
    kinds = lowered._estimate.kinds
    inputs = lowered.program.invars[len(lowered.program.consts) :]
    assert [kinds[v] for v in inputs] == ["parameters", "parameters", *["arguments"] * 3]
    assert [kinds[v] for v, _ in lowered.program.outputs[1:]] == ["gradients", "gradients"]
    tasks = {task.name: task.parameters for task in lowered.report().tasks}
    assert (tasks["front"], tasks["back"]) == (1024, 1024)  # though the tasks read casts of them


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_that_are_handed_out_are_no_next_values(count):
    """Though they have the form of the parameters; what an update makes is, also right after the backward pass."""
    front, back = (mm.task(lambda w, x: jnp.tanh(x @ w), name, devices=[i]) for i, name in enumerate(("front", "back")))

    def loss(ws, x):
        return jnp.mean(back(ws["back"], front(ws["front"], x)) ** 2)

    grad = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=count, reduce="mean")

    def update(state, x):
        ws, moments = state
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grad(ws, x))
        return jax.tree.map(lambda w, m: w - 0.1 * m, ws, moments), moments

    ws, x = {"front": jnp.eye(4), "back": jnp.eye(4)}, jnp.ones((2, 4))
    for fun, given, expected in (
        (grad, ws, ["gradients"] * 2),
        (update, (ws, ws), ["parameters"] * 2 + ["optimizer state"] * 2),
    ):
        lowered = mm.jit(fun).lower(given, x)
        kinds = lowered._estimate.kinds
        assert [kinds[v] for v, _ in lowered.program.outputs] == expected


def test_moments_that_an_update_before_another_pass_reads_are_no_parameters():
    """A step that trains and then evaluates: the update may run with the second forward pass."""
    front, back = (mm.task(lambda w, x: jnp.tanh(x @ w), name, devices=[i]) for i, name in enumerate(("front", "back")))

    def loss(ws, x):
        return jnp.mean(back(ws["back"], front(ws["front"], x)) ** 2)

    def step(ws, moments, x):
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(ws, x))
        ws = jax.tree.map(lambda w, m: w - 0.1 * m, ws, moments)
        return ws, moments, loss(ws, x)

    ws = {"front": jnp.eye(4), "back": jnp.eye(4)}
    lowered = mm.jit(step).lower(ws, ws, jnp.ones((2, 4)))
    kinds = lowered._estimate.kinds
    assert [kinds[v] for v in lowered.program.invars[:4]] == ["parameters"] * 2 + ["optimizer state"] * 2


@pytest.mark.parametrize("tied", [False, True])
def test_several_updates_in_a_step_hold_the_gradients_of_one(tied):
    """A scan over training steps, as a GAN's two phases: accumulators are made when their loop starts, also parts of them."""
    mesh = jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4])
    tasks = [
        mm.task(lambda w, x: jnp.tanh(mm.with_sharding_constraint(x, ("data",)) @ w), f"stage_{i}", mesh=m)
        for i, m in enumerate(mm.submeshes(mesh, "stage"))
    ]
    optimizer = optax.adam(1e-3)

    def loss(ws, x):
        return jnp.mean(tasks[1](ws[0 if tied else 1], tasks[0](ws[0], x)) ** 2)

    def once(state, x):
        ws, moments = state
        grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=COUNT, reduce="mean")
        value, grads = grad(ws, x)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(ws, updates), moments), value

    ws = [jnp.eye(WIDTH)] * 2
    state = ws, optimizer.init(ws)

    def held(steps):
        lowered = mm.jit(lambda state, xs: jax.lax.scan(once, state, xs)).lower(state, jnp.ones((steps, 32, WIDTH)))
        return lowered, [lowered.memory_analysis()[d].made_of["gradients"] for d in jax.devices()[:4]]

    lowered, of_several = held(4)
    assert of_several == pytest.approx(held(2)[1], abs=64)  # a loss of each step waits for its result
    kinds = [lowered._estimate.kinds[v] for v in lowered.program.invars[len(lowered.program.consts) :]]
    unread = "optimizer state" if tied else "parameters"  # a weight that no task reads
    assert kinds == ["parameters", unread, *["optimizer state"] * 5, "arguments"]
    schedules = [line for line in str(lowered.report()).splitlines() if "schedule 1f1b" in line]
    assert len(schedules) == 1 and schedules[0].startswith("4 x schedule")


def test_a_step_that_does_not_train_has_parameters_too():
    """Those of its first argument, but for what it gives back, as a cache is."""
    tasks = [mm.task(lambda w, cache, x: (jnp.tanh(x @ w + cache), cache + x), f"t{i}", devices=[i]) for i in range(2)]

    def decode(state, ws, caches, x):
        for i, task in enumerate(tasks):
            x, caches[i] = task(ws[i], caches[i], x)
        return state + 1, x, caches

    weight, row = (jax.ShapeDtypeStruct(s, "float32") for s in ((8, 8), (4, 8)))
    count = jax.ShapeDtypeStruct((), "float32")
    given = [weight] * 2, [row] * 2, row
    for fun, args, named, parameters in (
        (functools.partial(decode, 0), given, {}, range(2)),
        (decode, (count, *given), {}, ()),
        (lambda **kw: decode(0, **kw), (), dict(zip(("ws", "caches", "x"), given, strict=True)), ()),
    ):
        lowered = mm.jit(fun).lower(*args, **named)
        kinds = [lowered._estimate.kinds[v] for v in lowered.program.invars[len(lowered.program.consts) :]]
        assert kinds == ["parameters" if k in parameters else "arguments" for k in range(len(kinds))]


def test_what_is_large_inside_a_task_is_told_by_its_line():
    """What nobody sees from outside: here the scores of an attention, and not the parameters."""

    def attend(w, x):
        def layer(x, _):
            scores = x @ x.T
            return jnp.sin(scores) @ x, None

        return jax.lax.scan(layer, x @ w, None, length=2)[0]

    task = mm.task(attend, devices=[0])
    lowered = mm.jit(lambda w, x: task(w, x)).lower(*[jax.ShapeDtypeStruct(s, "float32") for s in ((8, 8), (256, 8))])
    line = attend.__code__.co_firstlineno + 2
    for report in (lowered.report(), lowered.compile().report()):
        (memory,) = report.memory.values()
        first = memory.holds[0]
        assert first.kind == "temporary"
        assert first.name.startswith("float32[256,256] of ")
        assert f"test_memory.py:{line}" in first.name
        assert sum(h.nbytes for h in memory.holds) <= memory.peak_bytes
        assert first.name in str(report)


def test_what_shares_a_device_is_counted_together():
    """A device that is in two submeshes holds what both have."""
    wide = mm.task(lambda x: x @ x, "wide", devices=[0, 1], device_axes=("d",))
    narrow = mm.task(lambda x: x @ x, "narrow", devices=[1])
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    memory = mm.jit(lambda x, y: (wide(x), narrow(y))).lower(x, x).memory_analysis()
    size = 4 * 64 * 64
    assert {d.id: m.argument_bytes for d, m in memory.items()} == {0: size, 1: 2 * size}


def test_a_layout_decides_how_much_a_device_holds():
    """A weight that two devices share is half on each."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    task = mm.task(lambda w, x: x @ w, "task", mesh=mesh)
    w = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P(None, "model")))
    x = jax.ShapeDtypeStruct((64,), "float32")
    memory = mm.jit(task).lower(w, x).memory_analysis()
    assert {m.argument_bytes for m in memory.values()} == {4 * 64 * 32 + 4 * 64}
