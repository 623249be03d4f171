"""Where unmarked equations run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import manymesh as mm
from flat import node, placed, program, run
from manymesh._passes import _together
from manymesh._passes._beside import _Names
from manymesh._passes._cut import least_cut
from manymesh._passes._place import NothingPlacedError, _Placer
from stages import assert_agrees


def test_equations_follow_the_bytes():
    """What reads a task's result, what a task reads, what replaces a state, and what is small."""
    flat = program(
        """
        tasks: one 0, two 1
        inputs: x f32[512], y f32[512], k f32[]
        s = lax.exp(k)
        a = one: x + s
        b = two: y + s
        c = a * 2.0
        d = lax.sin(y)
        e = two: d + b
        f = y * 3.0
        results: c, e, f
        """,
        states=[("x", 2)],
    )
    after = run("place", flat)
    assert placed(after) == [("exp", 0, 1), ("one", 0), ("two", 1), ("mul", 0), ("sin", 1), ("two", 1), ("mul", 0)]
    reasons = after.placement.reason
    assert [reasons[n] for n in after.nodes if n.task is None] == ["cloned", "reads", "state", "reads"]


def test_small_values_that_a_loop_starts_from_take_its_layout():
    """The only change that placement makes to a program."""
    flat = program("""
        tasks: one 0
        inputs: x f32[4]
        loop 0: 2 microbatches, gpipe
        carry z f32[4] = zero, then t, at last total
        zero = lax.full((4,), 0.0)
        0: t = one: x + z
        results: total
    """)
    after = run("place", flat)
    assert not node(flat, "broadcast_in_dim").layout_follows_loop
    assert node(after, "broadcast_in_dim").layout_follows_loop


def test_an_equation_beside_a_task_is_on_its_submesh():
    """Whatever it reads."""
    flat = program("""
        tasks: one 0, two 1
        inputs: x f32[512]
        a = one: x + 1.0
        b = a * 2.0 [with two]
        c = two: b * 3.0
        results: c
    """)
    assert placed(run("place", flat)) == [("one", 0), ("mul", 1), ("two", 1)]


def test_a_program_without_a_place():
    """It says so."""
    with pytest.raises(NothingPlacedError):
        run("place", program("inputs: x f32[4]\na = lax.sin(x)\nresults: a"))


def test_states_that_no_task_reads_are_where_their_next_values_are():
    """One that is only written, and one that is read where it is computed anew; what a reader far away gets is sent."""
    flat = program(
        """
        tasks: one 0, two 1
        inputs: x f32[512], last f32[512], size f32[512], shown f32[512]
        a = one: x + 1.0
        b = two: x * 3.0
        c = b * 2.0
        d = size + a
        e = lax.max(size, b)
        f = shown * a
        g = lax.sin(b)
        results: c, d, e, f, g
        """,
        states=[("last", 0), ("size", 2), ("shown", 4)],
    )
    placement = run("place", flat).placement
    homes = {name: placement.home[v] for name, v in zip(("x", "last", "size", "shown"), flat.invars, strict=True)}
    assert homes["last"] == placement.home[flat.outvars[0]] == 1
    assert homes["size"] == placement.home[flat.outvars[2]]
    assert homes["shown"] == placement.home[flat.outvars[4]] == 0


def test_a_state_that_only_arithmetic_reads_stays_where_it_is_made():
    """Not where a task reads it as it is, or where more would cross than comes back: a row for the sake of a number."""
    flat = program(
        """
        tasks: one 0, two 1
        inputs: x f32[512], m f32[512], t f32[512], k f32[]
        a = one: x * 2.0
        b = a + m
        c = two: b * 3.0
        d = one: t + x
        e = two: d + c
        g = a * k
        h = two: g + e
        i = two: lax.reduce_sum(c, axes=(0,))
        results: c, e, h, i
        """,
        states=[("m", 0), ("t", 1), ("k", 3)],
    )
    placement = run("place", flat).placement
    homes = {name: placement.home[v] for name, v in zip("xmtk", flat.invars, strict=True)}
    assert homes == {"x": 0, "m": 1, "t": 0, "k": placement.home[flat.invars[3]]}
    assert [placement.node[n] for n in flat.nodes if n.task is None] == [(1,), (1,)]


def test_a_mean_that_becomes_a_state_is_made_beside_its_rows():
    """The state is on the other submesh; a number goes there, and not the rows."""
    flat = program(
        """
        tasks: one 0, two 1
        inputs: x f32[512], m f32[]
        a = one: x * 2.0
        b = two: a * m
        s = lax.reduce_sum(a, axes=(0,))
        n = s / 512.0
        results: b, n
        """,
        states=[("m", 1)],
    )
    after = run("place", flat)
    assert after.placement.home[flat.invars[1]] == 1
    assert ("reduce_sum", 0) in placed(after)


def test_what_nobody_needs_is_beside_its_neighbours():
    """Leaves next to it decide, and where there are none those below; neighbours in two places decide nothing."""
    places = {"a 0 x value": 1, "a 0 y value": 0, "a 1 loss": 1, "a 1 more x": 0, "b c x": 2}
    names = _Names((tuple(name.split()), at) for name, at in places.items())
    found = {
        name: names.of_neighbours(tuple(name.split()))
        for name in ("a 0 x count", "a 1 of", "a 0 z value", "a 2", "d", "b c y z")
    }
    assert found == {"a 0 x count": 1, "a 1 of": 1, "a 0 z value": None, "a 2": None, "d": None, "b c y z": 2}


def test_a_count_that_goes_through_a_loop_is_beside_its_total():
    """Nobody needs it anywhere. A loop gets no stage for its sake."""
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"t{i}", devices=[i]) for i in range(3)]

    def loop(params, metric, x):
        def one(params, metric, x):
            loss = jnp.mean(tasks[1](params[1], tasks[0](params[0], x)) ** 2)
            return loss, {k: m + (loss if k == "total" else 1) for k, m in metric.items()}

        return mm.microbatch(one, argnum=2, num_microbatches=2, state_argnum=1)(params, metric, x)

    def step(params, metric, other, x):
        loss, metric = loop(params, metric, x)
        again, counted = loop(params, {"count": other["count"]}, 2 * x)
        return loss + again, metric, {**counted, "weight": tasks[2](other["weight"], other["weight"])}

    args = [jnp.ones((4, 4)) / 4] * 2, {"total": jnp.zeros(()), "count": jnp.int32(0)}
    args += {"count": jnp.int32(0), "weight": jnp.ones((4, 4)) / 4}, jnp.ones((4, 4))
    compiled = mm.jit(step).lower(*args).compile()
    at = jax.tree.map(lambda s: [d.id for d in s.device_set], compiled.input_shardings[0][1:3])
    assert at == ({"total": [1], "count": [1]}, {"count": [0], "weight": [2]})
    assert compiled.input_shardings[0][1:3] == compiled.output_shardings[1:]
    assert [loop.placement for loop in compiled.program.loops] == [(0, 1)] * 2
    assert_agrees(step, *args)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_count_that_comes_out_of_a_loop_is_beside_what_it_counts(reduce):
    """``correct / count`` works outside of the step; again no loop gets a stage for it."""
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"t{i}", devices=[i]) for i in range(3)]

    def one(params, x):
        return {"correct": jnp.sum(tasks[1](params[1], tasks[0](params[0], x)) > 0), "count": x.shape[0]}

    def step(params, x):
        loop = mm.microbatch(one, argnum=1, num_microbatches=2, reduce=reduce)
        again = loop(params, 2 * x)
        return loop(params, x), again["correct"], {"w": tasks[2](params[2], params[2]), "count": again["count"]}

    args = [jnp.ones((4, 4)) / 4] * 3, jnp.ones((4, 4))
    compiled = mm.jit(step).lower(*args).compile()
    at = jax.tree.map(lambda s: [d.id for d in s.device_set], compiled.output_shardings)
    assert at == ({"correct": [1], "count": [1]}, [1], {"w": [2], "count": [0]})
    assert [loop.placement for loop in compiled.program.loops] == [(0, 1)] * 2
    assert_agrees(step, *args)


def test_a_gradient_is_where_the_task_is_that_takes_it():
    """Where it meets another one in equal bytes, and where what it is multiplied by is brought to that task anyhow."""
    flat = program("""
        tasks: one 0, two 1
        inputs: x f32[512], y f32[512]
        a = one: lax.exp(x)
        b = two: lax.sin(y) + a
        p = one_bwd: x * 2.0
        q = two_bwd: y * 2.0
        s = lax.add(p, q) [backward]
        r = two_bwd: lax.cos(s)
        t = lax.mul(a, 3.0) [backward]
        u = lax.add(t, y) [backward]
        v = two_bwd: lax.cos(u)
        results: b, r, v
    """)
    after = run("place", flat)
    assert [at for n in after.nodes if n.task is None for at in after.placement.node[n]] == [1, 1, 1]


def net(p, x):
    return jnp.tanh(x @ p["in"]) @ p["out"]


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("student_first", [False, True])
def test_a_teacher_sends_to_its_student(looped, student_first):
    """Whichever is written first: a loss of both is where the backward pass is, and no gradient crosses."""
    student = mm.task(net, "student", devices=[0])
    teacher = mm.task(net, "teacher", devices=[1])

    def loss(p, frozen, x):
        s = student(p, x) if student_first else None
        t = jax.lax.stop_gradient(teacher(frozen, x))
        s = student(p, x) if s is None else s
        return -jnp.mean(jnp.sum(jax.nn.softmax(t / 2) * jax.nn.log_softmax(s / 2), -1))

    grad = jax.value_and_grad(loss)
    if looped:
        grad = mm.microbatch(grad, argnum=2, num_microbatches=4, schedule="1f1b", reduce="mean")
    rng = np.random.default_rng(0)
    p, frozen = ({k: rng.normal(size=(16, 16)).astype("f4") for k in ("in", "out")} for _ in range(2))
    args = p, frozen, rng.normal(size=(64, 16)).astype("f4")
    jitted = mm.jit(grad)
    program = jitted.lower(*args).program
    made = [program.submeshes[e.source].devices.flat[0].id for e in program.edges if e.var.aval.ndim == 2]
    assert made == [1]  # what the teacher says
    for a, b in zip(jax.tree.leaves(jitted(*args)), jax.tree.leaves(jax.jit(grad)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_gradients_from_everywhere_meet_where_their_state_is():
    """As many layers on each submesh: their stacked gradient goes to the weights, which do not go there and back."""
    stages = [mm.task(lambda x, w: (jnp.tanh(x @ w), None), "layer", devices=[i % 2]) for i in range(4)]

    def loss(params, x):
        for i, stage in enumerate(stages):
            x, _ = stage(x, params["w"][i])
        return jnp.mean(x**2)

    def step(params, x):
        grad = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=4, schedule="interleaved", reduce="mean")
        return jax.tree.map(lambda p, g: p - 0.1 * g / (1 + jnp.abs(g)), params, grad(params, x))

    rng = np.random.default_rng(0)
    args = {"w": rng.normal(size=(4, 32, 32)).astype("f4")}, rng.normal(size=(32, 32)).astype("f4")
    program = mm.jit(step).lower(*args).program
    once = [e.var.aval.size for e in program.edges if e.loop is None and e.var.aval.size >= 32 * 32]
    assert once == [32 * 32] * 4  # two weights go to the other submesh, and two gradients come back
    np.testing.assert_allclose(mm.jit(step)(*args)["w"], jax.jit(step)(*args)["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_metrics_of_several_stages_go_to_the_last(schedule):
    """Most of the numbers are from the first stage, which is no reason to send the others back: that would be one stage more."""
    early, late = (mm.task(lambda w, x: jnp.tanh(x @ w), devices=[i]) for i in range(2))

    def loss(ws, x):
        a = early(ws[0], x)
        b = early(ws[1], a)
        c = late(ws[2], b)
        return jnp.mean(c**2), jnp.stack([jnp.mean(h) for h in (a, b, c)])

    grad = jax.value_and_grad(loss, has_aux=True)
    step = mm.microbatch(grad, argnum=1, num_microbatches=4, schedule=schedule, reduce="mean")
    rng = np.random.default_rng(0)
    args = [rng.normal(size=(4, 4)).astype("f4") for _ in range(3)], rng.normal(size=(8, 4)).astype("f4")
    (plan,) = mm.jit(step).lower(*args).program.loops
    assert plan.placement == (0, 1) and plan.in_order
    for a, e in zip(jax.tree.leaves(mm.jit(step)(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
def test_noise_is_made_where_it_is_needed_first(schedule):
    """Most read it where the loss is; made there, it would be one stage more, before the first one."""
    early, late = (mm.task(lambda w, x: jnp.tanh(x @ w), devices=[i]) for i in range(2))

    def loss(ws, x, key):
        amount, noise = jax.random.uniform(key, (len(x), 1)), jax.random.normal(key, x.shape)
        found = late(ws[1], early(ws[0], (1 - amount) * x + amount * noise)) @ ws[2]
        return jnp.mean(amount * (found - noise) ** 2), jnp.mean((found - noise) ** 2)

    grad = jax.value_and_grad(loss, has_aux=True)
    step = mm.microbatch(grad, argnum=1, num_microbatches=4, schedule=schedule, reduce="mean", rng_argnum=2)
    rng = np.random.default_rng(0)
    args = [rng.normal(size=(32, 32)).astype("f4") for _ in range(3)], rng.normal(size=(64, 32)).astype("f4")
    program = mm.jit(step).lower(*args, jax.random.key(0)).program
    assert program.loops[0].placement == (0, 1)
    assert sorted((e.source, e.target) for e in program.edges if e.loop is not None) == [(0, 1), (0, 1), (1, 0)]
    with mm.ignore_transforms():
        expected = step(*args, jax.random.key(0))
    for a, e in zip(jax.tree.leaves(mm.jit(step)(*args, jax.random.key(0))), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stages", [2, 4])
def test_distances_are_made_where_they_are_needed_first(stages):
    """And their gradient, with what adds it up, is where they are: it is made for all stages outside of tasks."""

    def attend(w, x, bias):
        scores = jnp.einsum("bnd,bmd->bnm", x @ w, x)[:, None] + bias
        return x + jnp.mean(jax.nn.softmax(scores), 1) @ x

    tasks = [mm.task(attend, f"attend_{i}", devices=[i]) for i in range(stages)]

    def loss(params, x, points):
        apart = -jnp.sum(jnp.abs(points[:, :, None] - points[:, None]), -1)[:, None]
        for task, w in zip(tasks, params["w"], strict=True):
            x = task(w, x, apart * params["slope"][:, None, None])
        return jnp.mean(x**2)

    step = mm.microbatch(jax.value_and_grad(loss), argnum=(1, 2), num_microbatches=4, schedule="1f1b", reduce="mean")
    rng = np.random.default_rng(0)
    params = {"w": [rng.normal(size=(4, 4)).astype("f4") for _ in tasks], "slope": np.float32([1, 2, 3])}
    args = params, rng.normal(size=(8, 16, 4)).astype("f4"), rng.normal(size=(8, 16, 4)).astype("f4")
    (plan,) = mm.jit(step).lower(*args).program.loops
    assert plan.placement == tuple(range(stages)) and plan.in_order
    assert_agrees(step, *args, tolerance=1e-4)


def test_a_state_that_is_another_result_too_stays_where_it_is():
    """Where the other result is wanted, it is sent: the next step moves no state."""
    meshes = [Mesh(np.array(jax.devices()[i : i + 1]), ("d",)) for i in range(2)]
    first, second = (mm.task(jnp.tanh, f"on {i}", mesh=mesh) for i, mesh in enumerate(meshes))

    def step(state, x):
        def one(x, state):
            y = second(first(x))
            return y.sum(), (0.5 * state[0] + 0.1 * jnp.tanh(y).mean(), state[0])  # a mean, and what it was

        total, state = mm.microbatch(one, argnum=0, num_microbatches=2, state_argnum=1)(x, state)
        return state, (total, state)

    shown, args = NamedSharding(meshes[0], PartitionSpec()), ((np.float32(1), np.float32(2)), np.ones((4, 8), "f4"))
    compiled = mm.jit(step, out_shardings=(None, shown)).lower(*args).compile()
    state, (_, again) = compiled(*args)
    home = NamedSharding(meshes[1], PartitionSpec())
    assert [x.sharding for x in state] == list(compiled.input_shardings[0][0]) == [home] * 2
    assert [x.sharding for x in again] == [shown] * 2 and [*map(float, again)] == [*map(float, state)]


@pytest.mark.parametrize("said", ["nothing", "in", "out", "both", "parameters"])
def test_what_a_step_is_told_of_its_own_layout_changes_nothing(said):
    """A tied table with moments: in whichever way its home is given, its update is there, and as much crosses."""
    meshes = [Mesh(np.array(jax.devices()[i : i + 1]), ("d",)) for i in range(2)]
    embed = mm.task(lambda table, ids: table[ids], "embed", mesh=meshes[0])
    head = mm.task(lambda table, h: jnp.mean(jnp.tanh(h @ table.T) ** 2), "head", mesh=meshes[1])
    optimizer = optax.adam(1e-3)

    def step(params, state, ids):
        grad = mm.microbatch(
            jax.grad(lambda p, ids: head(p["t"], embed(p["t"], ids))), argnum=1, num_microbatches=2, reduce="mean"
        )
        updates, state = optimizer.update(grad(params, ids), state, params)
        return optax.apply_updates(params, updates), state

    params = {"t": np.ones((64, 8), "f4")}
    args = params, jax.tree.map(np.asarray, optimizer.init(params)), np.arange(4)
    first = mm.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    there = NamedSharding(meshes[1], PartitionSpec())
    options = {
        "nothing": {},
        "in": {"in_shardings": first.input_shardings[0]},
        "out": {"out_shardings": first.output_shardings},
        "both": {"in_shardings": first.input_shardings[0], "out_shardings": first.output_shardings},
        "parameters": {"in_shardings": ({"t": there}, None, None), "out_shardings": ({"t": there}, None)},
    }[said]
    lowered = mm.jit(step, donate_argnums=(0, 1), **options).lower(*args)
    moments = lowered.compile().input_shardings[0][1][0]
    assert [moments.mu["t"], moments.nu["t"]] == [there] * 2
    assert sum(e.nbytes for e in lowered.program.edges) == sum(e.nbytes for e in first.program.edges)


def test_a_state_that_comes_from_elsewhere_is_only_handed_on():
    """Weights for an actor: they are where they come from, and their new values go there, cast or not."""
    learner, actor = (NamedSharding(Mesh(np.array(jax.devices()[i : i + 1]), ("d",)), PartitionSpec()) for i in (0, 1))
    update = mm.task(lambda w, g: w - g, "update", mesh=learner.mesh)
    act = mm.task(jnp.tanh, "act", mesh=actor.mesh)
    weights = jax.device_put({"w": jnp.ones((4, 4))}, learner)

    def step(weights, g):
        new = {"w": update(weights["w"], g)}
        return new, act(new["w"])

    program = mm.jit(step, out_shardings=({"w": actor}, None)).lower(weights, jnp.ones((4, 4))).program
    assert [program.home[v] for v in program.invars] == [0, 0]
    assert [(e.source, e.target) for e in program.edges] == [(0, 1)]


def test_weights_that_two_directions_share_are_spread():
    """A bidirectional pipeline: each submesh has one layer with its moments, all of it, and not the first half of them two."""
    meshes = [Mesh(np.array(jax.devices()[i : i + 1]), ("d",)) for i in range(4)]
    up, down = (
        [mm.task(lambda w, x: jnp.tanh(x @ w["w"] + w["b"]), f"{name}{i}", mesh=m) for i, m in enumerate(order)]
        for name, order in (("up", meshes), ("down", meshes[::-1]))
    )
    optimizer = optax.sgd(0.1, momentum=0.9)

    def run(tasks, ws, x):
        for task, w in zip(tasks, ws, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    def step(ws, state, x):
        grad = mm.microbatch(
            jax.grad(lambda ws, x: run(up, ws, x) + run(down, ws, x)), argnum=1, num_microbatches=4, reduce="mean"
        )
        updates, state = optimizer.update(grad(ws, x), state)
        return optax.apply_updates(ws, updates), state

    ws = [{"b": np.zeros(8, "f4"), "w": np.eye(8, dtype="f4")} for _ in meshes]
    args = ws, jax.tree.map(np.asarray, optimizer.init(ws)), np.ones((8, 8), "f4")
    compiled = mm.jit(step).lower(*args).compile()
    states = compiled.program.invars[len(compiled.program.consts) :][:16]
    assert [compiled.program.home[v] for v in states] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert_agrees(step, *args, tolerance=1e-4)


def test_cuts_are_looked_for_only_where_something_crosses(monkeypatch):
    """A scale that each of many layers reshapes for itself is where it is; once that was most of the time of a plan."""
    cuts = []
    monkeypatch.setattr(_together, "least_cut", lambda count, *args: cuts.append(count) or least_cut(count, *args))
    layers = range(4)
    flat = program(
        "\n".join(
            [
                f"tasks: {', '.join(f'layer_{i} {i}' for i in layers)}",
                f"inputs: h0 f32[8,512], {', '.join(f's{i} f32[512]' for i in layers)}",
                "loop 0: 2 microbatches, gpipe",
                "carry z f32[8,512] = zero, then t, at last total",
                "zero = lax.full((8, 512), 0.0)",
                *(
                    f"0: r{i} = s{i}.reshape(1, 512)\n0: a{i} = layer_{i}: h{i} * r{i}\n0: h{i + 1} = lax.sin(a{i})"
                    for i in layers
                ),
                "0: t = layer_3: z + h4\nresults: total",
            ]
        )
    )
    after = run("place", flat)
    assert [at for name, *at in placed(after) if name == "reshape"] == [[i] for i in layers]
    assert cuts == [1] * 3  # for each sine between two layers


def test_a_small_state_that_nobody_needs_stays_with_what_it_is_made_of():
    """Weights of before, taken over now and then: the small ones lie with the weights, which are read nowhere else."""
    tasks = [mm.task(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]), f"t{i}", devices=[i]) for i in range(2)]
    params = [{"w": jnp.ones((32, 32)) / 32, "b": jnp.ones(32)} for _ in tasks]

    def loss(params, x):
        return jnp.mean(tasks[1](params[1], tasks[0](params[0], x)) ** 2)

    def step(params, slow, count, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        take = count % 2
        kept = jax.tree.map(lambda p, s: take * p + (1 - take) * s, params, slow)
        moved = jax.tree.map(lambda p, g, s: p - 0.1 * g + 0.01 * (s - p), params, grads, slow)
        return value, moved, kept, count + 1

    args = params, params, jnp.int32(0), jnp.ones((4, 32))
    compiled = mm.jit(step).lower(*args).compile()
    at = jax.tree.map(lambda s: sorted(d.id for d in s.device_set), compiled.input_shardings[0][:2])
    assert at == ([{"b": [i], "w": [i]} for i in range(2)],) * 2
    assert_agrees(step, *args)


def test_a_state_stays_where_the_home_of_another_draws_it():
    """What scales a norm between two tasks moves to the second one, and most of what reads the count of steps with it."""
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"t{i}", devices=[i]) for i in range(2)]
    optimizer = optax.adam(0.1, eps=0.1)

    def loss(params, stats, x):
        h = tasks[0](params["w"][0], x)
        mean, var = jnp.mean(h, 0), jnp.var(h, 0)
        h = (h - mean) * (jax.lax.rsqrt(var + 0.1) * params["scale"]) + params["bias"]
        new = {"mean": 0.9 * stats["mean"] + 0.1 * mean, "var": 0.9 * stats["var"] + 0.1 * var}
        return jnp.mean(tasks[1](params["w"][1], h) ** 2), new

    def step(params, stats, state, x):
        grad = mm.microbatch(jax.grad(loss, has_aux=True), argnum=2, num_microbatches=2, state_argnum=1)
        grads, stats = grad(params, stats, x)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), stats, state

    params = {"w": [jnp.ones((4, 8)) / 4, jnp.ones((8, 1))], "scale": jnp.ones(8), "bias": jnp.ones(8)}
    stats = {"mean": jnp.zeros(8), "var": jnp.ones(8)}
    args = params, stats, optimizer.init(params), jnp.sin(jnp.arange(32.0)).reshape(8, 4)
    compiled = mm.jit(step).lower(*args).compile()
    assert compiled.input_shardings[0][:3] == compiled.output_shardings
    assert_agrees(step, *args)


def test_the_home_of_a_count_is_found_without_placing_all_again(monkeypatch):
    """Only what runs wherever it is read is about it, so that its home decides nothing else: the plan of a large model halves."""
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"t{i}", devices=[i]) for i in range(2)]
    optimizer = optax.adamw(0.1)

    def step(params, state, x):
        def loss(params, x):
            h = tasks[0](params[0], x @ params[1])
            return jnp.mean(tasks[1](params[2] @ params[3] @ params[4], h))

        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    # Most of what reads the count is on the second submesh, and it is made on the first.
    params = [jnp.ones((64, 64)) / 64] * 5
    args = params, optimizer.init(params), jnp.ones((2, 64))
    runs, run_all = [], _Placer.run
    monkeypatch.setattr(_Placer, "run", lambda self, *late: runs.append(late) or run_all(self, *late))

    def planned():
        runs.clear()
        jax.clear_caches()
        lowered = mm.jit(step).lower(*args)
        return len(runs), str(lowered.program), str(lowered.layout)

    few, *found = planned()
    monkeypatch.setattr(_Placer, "move_alone", lambda self, states: False)
    many, *wanted = planned()
    assert found == wanted
    assert few < many


@pytest.mark.parametrize("unmarked", [True, False], ids=["looked up outside", "looked up in a task"])
def test_a_tied_head_of_few_tokens_is_where_its_table_lies(unmarked):
    """One token of each sequence: activations go to the table, which is larger than all of them, and no table to them."""
    front, back = (
        mm.task(lambda w, x: x + jnp.tanh(x @ w), name, devices=[i]) for i, name in enumerate(("front", "back"))
    )
    embed = (lambda e, t: e[t]) if unmarked else mm.task(lambda e, t: e[t], "embed", devices=[0])

    def decode(p, tokens):
        h = back(p["back"], front(p["front"], embed(p["table"], tokens)))
        return jnp.argmax(h @ p["table"].T, -1)

    p = {"table": jnp.sin(jnp.arange(512.0 * 16)).reshape(512, 16), "front": jnp.eye(16), "back": jnp.eye(16)}
    report = mm.jit(decode).lower(p, jnp.arange(4)).report()
    assert {(e.source, e.target): e.nbytes for e in report.edges} == {(0, 1): 4 * 16 * 4, (1, 0): 4 * 16 * 4}
    assert_agrees(decode, p, jnp.arange(4))


def test_a_tied_head_of_many_tokens_is_where_they_are():
    """As many as there are rows of the table: the table goes to them, once."""
    front, back = (
        mm.task(lambda w, x: x + jnp.tanh(x @ w), name, devices=[i]) for i, name in enumerate(("front", "back"))
    )

    def score(p, tokens):
        return jnp.mean(back(p["back"], front(p["front"], p["table"][tokens])) @ p["table"].T)

    p = {"table": jnp.ones((64, 16)), "front": jnp.eye(16), "back": jnp.eye(16)}
    report = mm.jit(score).lower(p, jnp.arange(256) % 64).report()
    assert {(e.source, e.target): e.nbytes for e in report.edges} == {(0, 1): 256 * 16 * 4 + 64 * 16 * 4}


@pytest.mark.parametrize("looped", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_penalty_on_a_weight_is_where_a_task_reads_its_cast(looped, dtype):
    """Not where it is added to the loss, if the step updates no weight: a number crosses, instead of the weight."""
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"t{k}", devices=[k]) for k in range(2)]

    def loss(ws, x):
        y = x.astype(dtype)
        for task, w in zip(tasks, ws, strict=True):
            y = task((0.9 * w).astype(dtype), y)
        return jnp.mean(y.astype("float32") ** 2) + 0.01 * sum(jnp.sum(w * w) for w in ws)

    grad = jax.value_and_grad(loss)
    if looped:
        grad = mm.microbatch(grad, argnum=1, num_microbatches=2, reduce="mean", schedule="1f1b")
    ws, x = [jnp.ones((64, 64))] * 2, jnp.ones((4, 64))
    program = mm.jit(grad).lower(ws, x).program
    assert [program.input_submeshes[v] for v in program.invars[len(program.consts) :][:2]] == [(0,), (1,)]


@pytest.mark.parametrize("logged", ["norm", "cosine"])
def test_a_gradient_of_the_last_step_is_where_the_next_one_is_made(logged):
    """Kept in the state for a number about all of them: each stays where its task is, and the number is added up."""
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"t{k}", devices=[k // 2]) for k in range(4)]

    def loss(ws, x):
        for task, w in zip(tasks, ws, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    def step(state, x):
        ws, before = state
        grads = jax.grad(loss)(ws, x)
        number = optax.tree.norm(before) if logged == "norm" else optax.tree.vdot(before, grads)
        if logged == "cosine":
            number /= 1 + optax.tree.norm(before) * optax.tree.norm(grads)
        return ([w - 0.1 * g for w, g in zip(ws, grads, strict=True)], grads), number

    ws, x = [jnp.eye(64)] * 4, jnp.ones((4, 64))
    lowered = mm.jit(step).lower((ws, ws), x)
    assert all(v.nbytes <= x.nbytes for v in lowered.report().values)
    (_, before), _ = lowered.compile()((ws, ws), x)
    assert [next(iter(g.devices())).id for g in before] == [0, 0, 1, 1]
    assert_agrees(step, (ws, ws), x, tolerance=1e-5)


def test_placing_looks_at_each_reader_a_few_times(monkeypatch):
    """Twice the layers, twice the work: where a state is made was once looked for through all that reads anything."""
    looked = []
    readers = _Placer._readers
    monkeypatch.setattr(_Placer, "_readers", lambda self, *args: looked.append(1) or readers(self, *args))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))

    def planned(count):
        tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"t{i}", devices=[i // (count // 2)]) for i in range(count)]

        def loss(params, x):
            for task, w in zip(tasks, params, strict=True):
                x = task(w, x)
            return jnp.mean(x**2)

        def step(params, state, x):
            updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
            return optax.apply_updates(params, updates), state

        params = [jnp.ones((4, 4)) / 4] * count
        looked.clear()
        mm.jit(step).lower(params, optimizer.init(params), jnp.ones((2, 4)))
        return len(looked)

    few, many = planned(8), planned(16)
    assert 0 < many < 2.5 * few
