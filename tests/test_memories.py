"""States in the memory of the host: where they lie between steps, when they come to their devices, what a report says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import manymesh as mm
from manymesh import _compat
from manymesh._plan._instructions import Run
from manymesh._runtime._observe import Observer
from manymesh._runtime._relayout import Relayouts
from stages import assert_same, reference

HOST, WIDTH = "pinned_host", 8
MESHES = [Mesh(np.array(jax.devices()[k : k + 2]), ("model",)) for k in (0, 2)]
TASKS = [mm.task(lambda w, x: jnp.tanh(x @ w), f"t{k}", mesh=m) for k, m in enumerate(MESHES)]


def lying(k, kind):
    return NamedSharding(MESHES[k], PartitionSpec(None, "model"), memory_kind=kind)


def train(params, moments, x):
    """Momentum: parameters and moments are lists, one matrix for each task."""

    def loss(params, x):
        for task, w in zip(TASKS, params, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean")
    value, grads = grad(params, x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value


def with_spaces(params, moments, x):
    """As one has to write it for `jax.jit`."""
    moments = jax.tree.map(lambda m: jax.device_put(m, jax.memory.Space.Device), moments)
    params, moments, value = train(params, moments, x)
    return params, jax.tree.map(lambda m: jax.device_put(m, jax.memory.Space.Host), moments), value


def with_shardings(params, moments, x):
    moments = [jax.device_put(m, lying(k, "device")) for k, m in enumerate(moments)]
    params, moments, value = train(params, moments, x)
    return params, [jax.device_put(m, lying(k, HOST)) for k, m in enumerate(moments)], value


def arguments(kind):
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(WIDTH, WIDTH)).astype("f4") / 3 for _ in TASKS]
    moments = [jax.device_put(np.zeros((WIDTH, WIDTH), "f4"), lying(k, kind)) for k in range(2)]
    return params, moments, rng.normal(size=(8, WIDTH)).astype("f4")


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def check_steps(step, given, expected_kind):
    """Three steps, whose moments lie where they should, and whose values are those of the reference mode."""
    params, moments, x = given
    expected = jax.tree.map(np.asarray, (params, moments))
    for _ in range(3):
        params, moments, value = step(params, moments, x)
        *expected, value_of_reference = reference(jax.jit(train), *expected, x)
        assert kinds(moments) == {expected_kind} and kinds((params, value)) == {"device"}
        assert_same(
            [value, *map(jnp.asarray, jax.tree.leaves((params, moments)))],
            jax.tree.leaves([value_of_reference, *expected]),
        )


@pytest.mark.parametrize("fun", [train, with_spaces, with_shardings])
@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_a_state_stays_in_the_memory_in_which_it_comes(fun, donated):
    """Step after step, and nothing is compiled for the second."""
    step = mm.jit(fun, donate_argnums=donated)
    check_steps(step, arguments(HOST), HOST)
    assert len(set(map(id, step._compiled.values()))) <= 2  # parameters come as NumPy first


def test_what_the_user_says_counts():
    """Of arguments and of results, one without the other; a sharding without a kind means the devices, as everywhere."""
    host, device = [[lying(k, kind) for k in range(2)] for kind in (HOST, "device")]
    check_steps(mm.jit(train, in_shardings=(None, host, None)), arguments("device"), HOST)
    check_steps(mm.jit(train, out_shardings=(None, host, None)), arguments("device"), HOST)
    check_steps(mm.jit(train, out_shardings=(None, device, None)), arguments(HOST), "device")


def test_one_function_for_both_memories():
    """Two programs: each keeps the state where it is."""
    step = mm.jit(train)
    check_steps(step, arguments("device"), "device")
    check_steps(step, arguments(HOST), HOST)


def test_a_state_is_made_where_the_step_wants_it():
    """The shardings of a compiled step say the memory, too."""
    compiled = mm.jit(train).lower(*arguments(HOST)).compile()
    shardings = compiled.input_shardings[0][1]
    assert {s.memory_kind for s in shardings} == {s.memory_kind for s in compiled.output_shardings[1]} == {HOST}
    made = mm.jit(lambda: [jnp.zeros((WIDTH, WIDTH))] * 2, out_shardings=shardings)()
    assert kinds(made) == {HOST}
    params, _, x = arguments("device")
    check_steps(compiled, (params, made, x), HOST)
    described = jax.tree.leaves(mm.jit(train).lower(*arguments(HOST)).out_info[1])
    assert {x.sharding.memory_kind for x in described} == {HOST}


@pytest.mark.parametrize("observed", [False, True])
def test_it_comes_to_its_devices_when_it_is_read(observed, monkeypatch):
    """Not before the optimizer runs, which is when the last backward pass has been issued."""
    step = mm.jit(train, donate_argnums=(0, 1))
    compiled = step.lower(*arguments(HOST)).compile()
    executor = compiled._executor
    issued: list[int] = []
    brought: list[int] = []
    spied = lambda call: lambda *args: (issued.append(1), call(*args))[1]  # noqa: E731
    executor._code = [(spied(call), *rest) for call, *rest in executor._code]
    real = Relayouts.bring

    def bring(self, x, sharding):
        if isinstance(x, jax.Array) and x.sharding.memory_kind == HOST:
            brought.append(len(issued))
        return real(self, x, sharding)

    monkeypatch.setattr(Relayouts, "bring", bring)
    if observed:
        with mm.inspect.record():
            compiled(*arguments(HOST))
        assert len(brought) == 2
    else:
        compiled(*arguments(HOST))
        names = [f.name for f in compiled.program.fragments]
        order = [names[i.fragment] for i in compiled._lowered.plan.instructions if hasattr(i, "fragment")]
        first = min(k for k, name in enumerate(order) if name.startswith("after"))
        assert len(brought) == 2 and min(brought) >= first


def test_what_a_report_counts():
    """The devices hold the moments while the optimizer runs, and not during the passes."""
    at_home = mm.jit(train, donate_argnums=(0, 1)).lower(*arguments("device")).report().memory
    away = mm.jit(train, donate_argnums=(0, 1)).lower(*arguments(HOST)).report().memory
    moment = WIDTH * WIDTH * 4 // 2
    for d in away:
        assert at_home[d].argument_bytes - away[d].argument_bytes == moment
        assert away[d].peak_bytes < at_home[d].peak_bytes


def test_stacked_layers():
    """A stack on the mesh of all its submeshes lies there in the memory of the host, too."""
    devices = np.array(jax.devices()[:2])
    host = NamedSharding(Mesh(devices, ("stage",)), PartitionSpec("stage"), memory_kind=HOST)
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"s{k}", mesh=Mesh(devices[k : k + 1], ("d",))) for k in range(2)]

    def step(p, m, x):
        def loss(p, x):
            for k, task in enumerate(tasks):
                x = task(p["w"][k], x)
            return jnp.mean(x**2)

        grad = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=2, schedule="1f1b", reduce="mean")
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, grad(p, x))
        return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m

    rng = np.random.default_rng(0)
    p, x = {"w": rng.normal(size=(2, WIDTH, WIDTH)).astype("f4")}, rng.normal(size=(8, WIDTH)).astype("f4")
    m = {"w": jax.device_put(np.zeros((2, WIDTH, WIDTH), "f4"), host)}
    expected, jitted = (p, jax.tree.map(np.asarray, m)), mm.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        p, m = jitted(p, m, x)
        expected = reference(jax.jit(step), *expected, x)
        assert m["w"].sharding.is_equivalent_to(host, 3) and kinds(p) == {"device"}
        assert_same((p, m), expected)


def test_stacked_layers_that_come_otherwise_than_a_step_was_compiled_for():
    """A step compiled ahead of time for arrays of the devices takes one in the memory of the host."""
    devices = np.array(jax.devices()[:2])
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"s{k}", mesh=Mesh(devices[k : k + 1], ("d",))) for k in range(2)]
    w, x = np.ones((2, WIDTH, WIDTH), "f4") / 3, np.ones((4, WIDTH), "f4")
    step = mm.jit(lambda w, x: tasks[1](w[1], tasks[0](w[0], x)))
    compiled = step.lower(w, x).compile()
    host = compiled.input_shardings[0][0].with_memory_kind(HOST)
    assert len(host.device_set) == 2
    assert_same(compiled(jax.device_put(w, host), x), reference(step, w, x))


@pytest.mark.parametrize("around", [mm.ignore_transforms, jax.disable_jit])
def test_the_reference_mode(around):
    """A state that lies in the memory of the host is computed with, as by the step itself."""
    step = mm.jit(train)
    given = arguments(HOST)
    expected = step(*given)
    with around():
        found = step(*given)
    assert_same(*(jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree) for tree in (found, expected)))


def test_a_single_device():
    """An array that was put on a device, on no mesh."""
    step = mm.jit(lambda s, x: {"w": 0.9 * s["w"] + TASKS[0](x, x)})
    given = jax.device_put(np.ones((8, 8), "f4"), SingleDeviceSharding(jax.devices()[0], memory_kind=HOST))
    assert kinds(step({"w": given}, np.eye(8, dtype="f4"))) == {HOST}


def test_values_of_the_host_itself_are_not_meant():
    """What NumPy has goes to the devices, and what comes of it stays there."""
    step = mm.jit(train)
    params, moments, x = arguments("device")
    assert kinds(step(params, [np.asarray(m) for m in moments], x)[:2]) == {"device"}


def test_steps_that_the_host_runs_in_parts():
    """A loop whose length the data says, between the gradients and the optimizer."""

    def step(s, x):
        grads = jax.grad(lambda ws: jnp.mean(TASKS[1](ws[1], TASKS[0](ws[0], x)) ** 2))(s["w"])

        def halve(gs):
            return [TASKS[k](g, g) / 2 for k, g in enumerate(gs)]

        grads = jax.lax.while_loop(lambda gs: jnp.max(jnp.abs(gs[0])) > 1e-3, halve, grads)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, s["m"], grads)
        return {"w": jax.tree.map(lambda w, m: w - 0.1 * m, s["w"], m), "m": m}

    params, moments, x = arguments(HOST)
    s, jitted = {"w": params, "m": moments}, mm.jit(step, donate_argnums=0)
    expected = jax.tree.map(np.asarray, s)
    for _ in range(2):
        s, expected = jitted(s, x), reference(jax.jit(step), expected, x)
        assert kinds(s["m"]) == {HOST} and kinds(s["w"]) == {"device"}
        assert_same(s, expected)


def test_checkpoints(tmp_path):
    """What is restored as the step wants it lies in the memory of the host again."""
    params, moments, x = arguments(HOST)
    step = mm.jit(train)
    params, moments, _ = step(params, moments, x)
    mm.checkpoint.save(tmp_path / "state", (params, moments))
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), (params, moments))
    restored = mm.checkpoint.restore(tmp_path / "state", like)
    assert kinds(restored[0]) == {"device"} and kinds(restored[1]) == {HOST}
    assert_same(restored, (params, moments))
    compiled = step.lower(params, moments, x).compile()
    described = mm.checkpoint.argument_of(compiled, 1)
    assert {s.sharding.memory_kind for s in jax.tree.leaves(described)} == {HOST}


@pytest.mark.parametrize("kind", [HOST, "device"])
def test_what_is_put_together_says_in_which_memory_it_is(kind):
    """As an array of one process does, and also what other processes have: it tells two programs of a step apart."""
    x = jax.device_put(jnp.ones((WIDTH, WIDTH)), lying(0, kind))
    aval = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    assert _compat.assemble(aval, _compat.pieces(x)).aval.memory_space == x.aval.memory_space


def offloaded(num_microbatches):
    """A pipeline whose tasks put what they keep for their backward passes into the memory of the host."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst=HOST
    )

    def layer(w, x):
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h")) @ w

    tasks = [mm.task(jax.checkpoint(layer, policy=policy), f"t{k}", mesh=mesh) for k, mesh in enumerate(MESHES)]

    def loss(params, x):
        for task, w in zip(tasks, params, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    return mm.microbatch(
        jax.value_and_grad(loss), argnum=1, num_microbatches=num_microbatches, schedule="gpipe", reduce="mean"
    )


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2),
    reason="XLA offloaded nothing on CPU under a jax.jit with shardings before JAX 0.10.2",
)
@pytest.mark.parametrize("num_microbatches", [4, 1])  # with one, a gradient has the shape of what is kept
def test_what_a_policy_offloads_lies_in_the_memory_of_the_host_between_tasks(num_microbatches):
    """There alone: no fragment brings it back, no result takes over its buffer, and no device is said to hold it."""
    params, _, x = arguments("device")
    fun = offloaded(num_microbatches)
    compiled = mm.jit(fun).lower(params, x).compile()
    made = {}

    class Watch(Observer):
        def end(self, position, instruction, outputs):
            if isinstance(instruction, Run):
                made[instruction.fragment] = [x.sharding.memory_kind for x in outputs]

    result = compiled.call_flat(jax.tree.leaves((params, x)), Watch())
    assert_same(result, reference(jax.jit(fun), params, x))
    fragments = compiled.program.fragments
    kept = {f.name: [_compat.is_in_host_memory(v.aval) for v in f.outvars] for f in fragments}
    assert {name: sum(host) for name, host in kept.items() if any(host)} == {"t0": 1, "t1": 1}
    for f in fragments:
        assert made[f.index] == [HOST if host else "device" for host in kept[f.name]]
        pairs = compiled._lowered.layout.donation.get(f.index, ())
        assert not any(_compat.is_in_host_memory(f.invars[i].aval) for i, _ in pairs)
    here = compiled.report().memory[jax.devices()[0]]
    assert not any("t0" in line.name and line.kind == "activations" for line in here.holds)
    assert compiled.memory_analysis()[jax.devices()[0]] == here
    if num_microbatches > 1:
        assert compiled.measure(params, x).activation[0] == 2 * WIDTH * 4 / 2  # its piece of the batch


def test_what_a_policy_offloads_is_planned_for_devices_that_are_not_here():
    """A report counts it on no device, without asking planned devices for kinds of memory, of which they have none."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst=HOST
    )

    def layer(w, x):
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h")) @ w

    def activations(layer):
        tasks = [mm.task(layer, f"t{k}", devices=[d]) for k, d in enumerate(mm.planned_devices(2))]

        def loss(ws, x):
            return jnp.mean(tasks[1](ws[1], tasks[0](ws[0], x)) ** 2)

        step = mm.jit(mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=8, schedule="gpipe"))
        w, x = jax.ShapeDtypeStruct((32, 32), "float32"), jax.ShapeDtypeStruct((256, 32), "float32")
        return step.lower([w, w], x).report().memory[mm.planned_devices(1)[0]].made_of["activations"]

    assert activations(jax.checkpoint(layer, policy=policy)) < 0.7 * activations(layer)
