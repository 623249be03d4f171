"""Planning for devices that are not at hand."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import manymesh as mm
from manymesh import schedules
from manymesh._plan._instructions import Run

pytestmark = pytest.mark.once

WIDTH = 8


def block(w, x):
    return x + jnp.tanh(x @ w[0]) @ w[1]


def lower(devices, placement, microbatches, schedule):
    """A training step of one block a stage on submeshes of four devices, lowered for arguments without values."""
    submeshes = max(placement) + 1
    mesh = jax.make_mesh((submeshes, 2, len(devices) // submeshes // 2), ("stage", "data", "model"), devices=devices)
    meshes = mm.submeshes(mesh, "stage")
    tasks = [mm.task(block, f"s{i}", mesh=meshes[d]) for i, d in enumerate(placement)]

    def loss(params, x):
        for run, p in zip(tasks, params, strict=True):
            x = run(p, x)
        return jnp.mean(x**2)

    def step(params, x):
        grad = mm.microbatch(
            jax.value_and_grad(loss), argnum=1, num_microbatches=microbatches, schedule=schedule, reduce="mean"
        )
        value, grads = grad(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((2 * microbatches, WIDTH), jnp.float32)
    return mm.jit(step, donate_argnums=0).lower([(weight, weight) for _ in placement], x)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
def test_a_plan_is_that_of_real_devices(schedule):
    """The same fragments, edges, instructions and donations."""
    planned, real = (lower(d, (0, 1), 4, schedule) for d in (mm.planned_devices(8, "cpu"), jax.devices()[:8]))
    assert planned.as_text() == real.as_text()
    assert planned.plan.donatable and planned.plan == real.plan


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "eager-1f1b", "wavefront", "interleaved", "zero-bubble-h1", "zero-bubble-h2"]
)
def test_48_stages_on_8_submeshes(schedule):
    """Six stages on each of eight submeshes of four devices, 64 microbatches: every run once, in the rows' order."""
    lowered = lower(mm.planned_devices(32), tuple(range(8)) * 6, 64, schedule)
    (loop,) = lowered.program.loops
    order = loop.schedule.order(loop.placement, 64)
    assert loop.placement == tuple(range(8)) * 6
    assert max(schedules.check(order)) <= 64 * 6
    fragments = lowered.program.fragments
    for submesh, row in enumerate(order.rows):
        runs = [i for i in lowered.plan.stream(submesh) if isinstance(i, Run) and fragments[i.fragment].tasks]
        found = [(fragments[i.fragment].kind, fragments[i.fragment].stage, i.microbatch) for i in runs]
        assert found == [(a.kind, a.stage, a.microbatch) for a in row]
    # The simulator takes the program's own loop.
    work = 6 * 64 * 3
    assert schedules.simulate(order).makespan >= work


SCRIPT = """
import pathlib
import re
import resource, sys
import jax, jax.numpy as jnp, manymesh as mm
from manymesh.schedules import check, issue_order, simulate
meshes = mm.submeshes(jax.make_mesh((64, 8), ("stage", "data"), devices=mm.planned_devices(512)), "stage")
block = lambda w, x: x + jnp.tanh(x @ w[0]) @ w[1]
tasks = [mm.task(block, f"s{i}", mesh=m) for i, m in enumerate(meshes)]
def loss(params, x):
    for run, p in zip(tasks, params):
        x = run(p, x)
    return jnp.mean(x**2)
run = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=512, schedule="zero-bubble-h1", reduce="mean")
w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
lowered = mm.jit(run).lower([(w, w)] * 64, jax.ShapeDtypeStruct((4096, 1024), jnp.float32))
(loop,) = lowered.program.loops
order = loop.schedule.order(loop.placement, 512)
assert check(order) == (64,) * 64
assert simulate(order).makespan == 3 * 512 + 63
assert sum(hasattr(i, "fragment") and i.microbatch is not None for i in lowered.plan.instructions) >= 3 * 64 * 512
status = pathlib.Path("/proc/self/status")  # getrusage may report the most that the parent ever had
if status.exists():
    peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1])
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(peak)
"""


def test_64_stages_and_512_microbatches_take_little_memory():
    """Traced, split, scheduled, checked, simulated and laid out as instructions, in 2 GB; seconds: benchmarks/planning.py."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2e9


def test_a_plan_cannot_run():
    """Compiling and calling say why, and where the planned devices are."""
    planned = mm.planned_devices(4)
    front, back = mm.task(jnp.sin, "front", devices=planned[:1]), mm.task(jnp.cos, "back", devices=planned[2:])
    step = mm.jit(lambda x: back(front(x)))
    words = (
        r"mm.jit\(<lambda>\): submesh 0 \{'unnamed_0': 1\} has planned devices 0, which only stand for real ones: the "
        r"step can be lowered, but not compiled or run; describe it with devices of jax.devices\(\) for that"
    )
    lowered = step.lower(jnp.ones(4))
    assert "back: submesh 1" in lowered.as_text()
    with pytest.raises(mm.errors.MeshError, match=words):
        lowered.compile()
    with pytest.raises(mm.errors.MeshError, match=words):
        step(jnp.ones(4))


def test_a_plan_and_devices_do_not_mix():
    """Tasks on both are refused as tasks on two backends are."""
    front, back = mm.task(jnp.sin, "front", devices=[0]), mm.task(jnp.cos, "back", devices=mm.planned_devices(4)[2:])
    with pytest.raises(mm.errors.MeshError, match="several backends"):
        mm.jit(lambda x: back(front(x))).lower(jnp.ones(4))


def test_no_array_can_be_put_on_a_plan():
    """JAX's own functions say why, too."""
    sharding = NamedSharding(Mesh(np.array(mm.planned_devices(2)), ("x",)), PartitionSpec())
    words = r"PlannedDevice\(0\) only stands for a device: a step can be lowered for it, but no array can be put there, and it has no kinds"
    with pytest.raises(mm.errors.MeshError, match=words):
        jax.device_put(np.ones(2), sharding)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "4"])
def test_the_number_of_planned_devices(count):
    """A positive int."""
    with pytest.raises(mm.errors.MeshError, match=f"planned_devices: count has to be a positive int, found {count!r}"):
        mm.planned_devices(count)


def test_what_planned_devices_stand_for():
    """CPU or accelerators; which of them, says the hardware of a report."""
    (cpu,), (other,) = mm.planned_devices(1, "cpu"), mm.planned_devices(1)
    assert cpu != other and repr(cpu) == "PlannedDevice(0, cpu)" and cpu.platform == "cpu"
    with pytest.raises(
        mm.errors.MeshError, match=r"platform has to be 'cpu', or None .* found 'h100'; .* report\(mm.inspect"
    ):
        mm.planned_devices(1, "h100")


def test_planned_devices_are_values():
    """Those of two calls are the same, so that two modules can name them; none is a device at hand."""
    first, second = mm.planned_devices(3), mm.planned_devices(4)
    assert first == second[:3] and len({*first, *second}) == 4
    assert repr(first[2]) == "PlannedDevice(2)"
    assert not set(first) & set(jax.devices())
    task = mm.Task("a", devices=np.array(second).reshape(2, 2), device_axes=("x", "y"))
    assert repr(task) == "Task('a', mesh={'x': 2, 'y': 2}, devices=[0, 1, 2, 3])"
    with pytest.raises(mm.errors.MeshError, match=r"device ids \[1\] are named more than once"):
        mm.Task("a", devices=[first[1], first[1]])
