"""Compilation: side by side, once each, quiet, and tried again after a failure."""

import io
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh._runtime import _compile
from stages import assert_agrees, assert_same, back, front, loss, microbatched, parameters, reference, rows

pytestmark = pytest.mark.once


def test_requests_run_side_by_side():
    """Two that take their time meet, and each gets its own result."""
    meeting = threading.Barrier(2, timeout=120)

    def request(word):
        def run():
            return (yield pool.submit(lambda: meeting.wait() and 0 or word))

        return run

    seen = []
    with _compile.ThreadPoolExecutor(2) as pool:
        results = _compile.run_requests(["a", "b"], [request("one"), request("two")], seen.append)
    assert results == ["one", "two"]
    assert sorted(seen) == ["a", "b"]


def test_stages_compile_at_the_same_time(monkeypatch):
    """On submeshes of one device nothing is waited for: XLA gets several fragments at once."""
    inside, most, lock = [0], [0], threading.Lock()
    real = _compile.ThreadPoolExecutor.submit

    def submit(self, work):
        def counted():
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            try:
                return work()
            finally:
                with lock:
                    inside[0] -= 1

        return real(self, counted)

    monkeypatch.setattr(_compile.ThreadPoolExecutor, "submit", submit)

    def wide(w, x):
        for _ in range(12):
            x = jnp.tanh(jnp.sort(x @ w, 0) + jnp.sin(x))
        return x

    stages = [mm.task(wide, f"s{i}", devices=[i]) for i in range(4)]
    mm.jit(lambda ws, x: [s(w, x * i) for i, (s, w) in enumerate(zip(stages, ws, strict=True))]).lower(
        [jnp.eye(4)] * 4, rows()
    ).compile()
    assert most[0] > 1


def test_shardings_do_not_depend_on_the_order_of_compilation():
    """However threads run, each fragment sees what one after the other would give."""
    devices = np.array(jax.devices())
    meshes = [Mesh(devices[:4].reshape(2, 2), ("d", "m")), Mesh(devices[4:].reshape(2, 2), ("d", "m"))]

    def layer(w, x):
        return mm.with_sharding_constraint(jnp.tanh(x @ mm.with_sharding_constraint(w, (None, "m"))), ("d", None))

    one, two = (mm.task(layer, n, mesh=m) for n, m in zip(("one", "two"), meshes, strict=True))

    def f(p, x):
        return jnp.mean(two(p["back"], one(p["front"], x)) ** 2)

    found = set()
    for _ in range(3):
        compiled = mm.jit(microbatched(jax.value_and_grad(f))).lower(parameters(), rows()).compile()
        found.add(str((compiled.input_shardings, compiled.output_shardings, compiled.report())))
    assert len(found) == 1


def test_a_fragment_that_does_not_compile(monkeypatch):
    """The error names the fragment, and the next call tries again."""

    def fail(*_):
        raise RuntimeError("out of registers")

    step = mm.jit(loss)
    with monkeypatch.context() as patched:
        patched.setattr(jax.stages.Lowered, "compile", fail)
        with pytest.raises(RuntimeError, match="out of registers") as caught:
            step(parameters(), rows())
    assert any("while compiling fragment" in note for note in caught.value.__notes__)
    assert_same(step(parameters(), rows()), reference(step, parameters(), rows()))


def test_the_settings_of_the_callers_thread_hold(monkeypatch):
    """Settings of JAX belong to a thread; compilation in others must not lose them."""
    with jax.enable_x64(True):
        x = jnp.ones((4, 4), jnp.float64)
        step = mm.jit(lambda x: back(x, front(x, x)))
        assert step(x).dtype == jnp.float64
        assert_agrees(lambda x: back(x, front(x, x)), x)


def test_progress_is_shown_on_a_terminal_only(monkeypatch, capsys):
    """One bar on standard error, with the step's name; none where that is a file or a pipe."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    mm.jit(loss).lower(parameters(), rows()).compile()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    mm.jit(loss).lower(parameters(), rows()).compile()
    assert "compiling loss" in terminal.getvalue()


def of_tasks(directory):
    """The cached executables of the two tasks."""
    names = [p.name for p in directory.iterdir() if p.name.endswith("-cache")]
    return sorted(n for n in names if n.startswith(("jit_front", "jit_back")))


def test_the_persistent_cache_of_jax_is_used(tmp_path):
    """A second process, or a cleared step, finds every executable on disk."""
    asked = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in asked}
    try:
        for name, value in asked.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()
        step = mm.jit(loss)
        step(parameters(), rows())
        written = of_tasks(tmp_path)
        assert any("front" in name for name in written)
        assert any("back" in name for name in written)
        step.clear_cache()
        jax.clear_caches()
        step(parameters(), rows())
        assert of_tasks(tmp_path) == written
        # Executables from the disk cannot be written out again for other devices; nobody tries.
        equal, args = chain(4)
        first = mm.jit(equal)(*args)
        jax.clear_caches()
        assert_same(mm.jit(equal)(*args), first)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()


def by_axis(mesh):
    """A stage that says how its activation lies, for any submesh."""
    return lambda w, x: jnp.tanh(mm.with_sharding_constraint(x, ("d", None)) @ w)


def by_sharding(mesh):
    """The same, on a mesh that the user named."""
    return lambda w, x: jnp.tanh(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("d"))) @ w)


def by_hand(mesh):
    """The same, each device's rows by hand, under a checkpoint in a loop."""
    rows = jax.checkpoint(jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")))
    return lambda w, x: jnp.tanh(jax.lax.scan(lambda x, _: (rows(x, w), None), x, None, length=3)[0])


def by_rule(mesh):
    """The same in what the user differentiates by hand."""

    @jax.custom_vjp
    def constrained(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("d")))

    constrained.defvjp(lambda x: (constrained(x), None), lambda _, g: (constrained(g),))
    return lambda w, x: jnp.tanh(constrained(x) @ w)


def three_times(mesh):
    """What `by_hand` computes."""
    return lambda w, x: jnp.tanh(x @ w @ w @ w)


EQUAL = {by_axis: by_axis, by_sharding: by_axis, by_hand: three_times, by_rule: by_axis}


def chain(count, devices_each=1, stage=by_axis, devices=None):
    """A pipeline of equal stages, the gradient of its loss in a microbatch loop, and arguments for it."""
    devices = np.array(jax.devices() if devices is None else devices)
    meshes = [Mesh(devices[k * devices_each : (k + 1) * devices_each], "d") for k in range(count)]
    tasks = [mm.task(stage(mesh), f"s{k}", mesh=mesh) for k, mesh in enumerate(meshes)]

    def total(weights, x):
        for task, w in zip(tasks, weights, strict=True):
            x = task(w, x)
        return jnp.sum(x)

    step = mm.microbatch(jax.value_and_grad(total), argnum=1, num_microbatches=4, schedule="1f1b")
    return step, ([jnp.eye(4) * (k + 1) for k in range(count)], rows(16))


@pytest.mark.parametrize(("stage", "devices_each"), [(by_axis, 1), (by_axis, 2), (by_sharding, 2), (by_hand, 2)])
def test_equal_stages_compile_once_for_all_submeshes(stage, devices_each):
    """The executable of one stage is loaded again on the devices of the next: values, places and counts."""
    counts = {}
    for stages in (3, 4, 8 // devices_each):
        step, args = chain(stages, devices_each, stage)
        compiled = mm.jit(step).lower(*args).compile()
        counts[stages] = compiled.report().compiled
        value, grads = compiled(*args)
        with mm.ignore_transforms():  # plain JAX has one mesh, not one of each stage
            assert_same((value, grads), jax.jit(chain(stages, devices_each, EQUAL[stage])[0])(*args))
        for k, grad in enumerate(grads):
            assert sorted(d.id for d in grad.devices()) == list(range(k * devices_each, (k + 1) * devices_each))
    assert len(set(counts.values())) == 1, counts


@pytest.mark.parametrize("stage", [by_axis, by_sharding, by_hand, by_rule])
def test_stages_that_name_their_mesh_are_planned_too(stage):
    """No device is asked for: layouts are those of real ones."""
    planned, real = (chain(3, 2, stage, devices) for devices in (mm.planned_devices(8, "cpu"), None))
    planned, real = (mm.jit(step).lower(*args) for step, args in (planned, real))
    assert str(planned.layout) == str(real.layout)
    assert planned.report().memory


def test_what_cannot_be_loaded_again_is_compiled(monkeypatch):
    """The same results, at the price of compiling."""
    step, args = chain(4)
    shared = mm.jit(step).lower(*args).compile()
    monkeypatch.setattr(_compile._compat, "load_executable", lambda *args, **kwargs: None)
    alone = mm.jit(step).lower(*args).compile()
    assert alone.report().compiled > shared.report().compiled
    assert alone.report().compiled + alone.report().reused == shared.report().compiled + shared.report().reused
    assert_same(alone(*args), shared(*args))


def test_host_callbacks_in_equal_stages():
    """A callback belongs to this process: every stage has an executable of its own, and the callback runs in each."""
    seen = []

    def note(x):
        seen.append(x.shape)
        return x

    def stage(x):
        return jax.pure_callback(note, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

    tasks = [mm.task(stage, f"s{k}", devices=[k]) for k in range(3)]
    out = mm.jit(lambda x: tasks[2](tasks[1](tasks[0](x))))(rows())
    np.testing.assert_allclose(out, rows() + 3, rtol=1e-6)
    assert len(seen) == 3
