"""Reports of lowered and compiled steps."""

import io
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console

import manymesh as mm
import manymesh.nnx
from flax import nnx
from manymesh._cost import _view
from manymesh._cost._clock import Durations
from manymesh._cost._view import sums
from manymesh._program import Reduction
from manymesh._report import Memory, Report, _off
from manymesh._shown import format_bytes
from manymesh.inspect import Hardware
from manymesh.schedules import Costs
from stages import WIDTH, assert_same, back, loss, microbatched, parameters, rows

pytestmark = pytest.mark.once
MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def step(p, x):
    value, grads = microbatched()(p, x)
    return jax.tree.map(lambda w, g: w - g, p, grads), value


def lowered(fun=step, *args):
    return mm.jit(fun, donate_argnums=0).lower(*(args or (parameters(), rows())))


def planned(stages, count, width=64):
    """A chain of tasks on planned devices, two for each."""
    mesh = jax.make_mesh((stages, 2), ("stage", "data"), devices=mm.planned_devices(2 * stages))

    def layer(w, x):
        return jnp.tanh(mm.with_sharding_constraint(x, ("data",)) @ w)

    tasks = [mm.task(layer, f"stage_{i}", mesh=m) for i, m in enumerate(mm.submeshes(mesh, "stage"))]

    def objective(ws, x):
        for task, w in zip(tasks, ws, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    grad = mm.microbatch(jax.value_and_grad(objective), argnum=1, num_microbatches=count, reduce="mean")
    weights = [jax.ShapeDtypeStruct((width, width), "float32")] * stages
    return mm.jit(grad).lower(weights, jax.ShapeDtypeStruct((8 * count, width), "float32"))


def test_nothing_is_compiled_for_a_report(monkeypatch):
    """Nor put on a device."""
    made = lowered()

    def refuse(*args, **kwargs):
        raise AssertionError("a report acts")

    monkeypatch.setattr(jax, "device_put", refuse)
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    report = made.report(Hardware.h100())
    assert report.compiled is None and report.off == ()
    assert {f.executable for f in report.fragments} == {None}


def test_what_marks_a_task_in_a_loop_costs_nothing():
    """A long loop around a task of one submesh is one task, which holds it: neither operations nor copies of its arguments."""
    cell = mm.task(lambda w, x: jnp.tanh(x @ w), "cell", devices=[0])

    def rolled(w, x):
        return jax.lax.scan(lambda h, _: (cell(w, h), None), x, None, length=40)[0]

    made = mm.jit(rolled).lower(jnp.eye(32), jnp.ones((8, 32))).compile()
    (line,), (memory,) = made.report().fragments, made.report().memory.values()
    assert line.counted.flops == 40 * (2 * 8 * 32 * 32 + 8 * 32)
    assert line.counted.nbytes < 1.2 * 4 * 40 * (32 * 32 + 4 * 8 * 32)
    assert line.counted.temporary_bytes == 4 * 8 * 32
    assert not any("manymesh" in h.name for h in memory.holds)


def test_a_task_says_where_it_is_and_what_it_does():
    """Products of [2, 4] and [4, 4], one each way forward; two back, but one where no gradient goes on; little besides."""
    tasks = {task.name: task for task in lowered().report().tasks}
    product = 2 * 2 * WIDTH * WIDTH
    assert (tasks["front"].submesh, tasks["back"].submesh) == (0, 1)
    assert {t.parameters for t in (tasks["front"], tasks["back"])} == {WIDTH * WIDTH}
    assert tasks["front"].runs == tasks["back"].runs == 4
    assert 4 * product <= tasks["front"].forward_flops < 6 * product
    assert 4 * product <= tasks["front"].backward_flops < 8 * product
    assert 8 * product <= tasks["back"].backward_flops < 12 * product


def test_a_task_without_a_forward_pass_has_its_parameters():
    """As one that is computed again for its gradient, where nobody wants the loss."""
    task = mm.task(jax.checkpoint(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w)), "only", devices=[0])
    report = mm.jit(jax.grad(task)).lower(jnp.ones((8, 8)), jnp.ones((4, 8))).report()
    assert [f.kind for f in report.fragments] == ["B"]
    assert [(line.parameters, line.parameter_bytes) for line in report.tasks] == [(64, 256)]


def test_a_stack_of_which_an_update_reads_all_has_its_layers_once():
    """Where nothing is added up before, the first layer's backward pass updates the whole stack."""
    meshes = [Mesh(np.array(jax.devices()[i : i + 1]), ("x",)) for i in (0, 1)]
    layer = mm.task(lambda w, x: jnp.tanh(x @ w), "layer", mesh=meshes)

    def train(ws, x):
        grads = jax.grad(lambda ws: jnp.mean(jax.lax.scan(lambda h, w: (layer(w, h), None), x, ws)[0] ** 2))(ws)
        return jax.tree.map(lambda w, g: 0.9 * w - g, ws, grads)

    report = mm.jit(train, donate_argnums=0).lower(jnp.ones((4, 8, 8)), jnp.ones((2, 8))).report()
    assert [(t.parameters, t.parameter_bytes) for t in report.tasks if t.parameters] == [(2 * 8 * 8, 4 * 2 * 8 * 8)] * 2


def test_a_task_that_is_called_several_times_runs_as_often():
    """Also one whose layers are unstacked, whose copies are parameters as the stack is."""
    meshes = [Mesh(np.array(jax.devices()[i : i + 1]), ("x",)) for i in (0, 1)]
    layer = mm.task(lambda w, x: jnp.tanh(x @ w), "layer", mesh=meshes)

    def stacked(ws, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (layer(w, h), None), x, ws)[0] ** 2)

    for fun in (stacked, jax.grad(stacked)):
        loop = mm.microbatch(fun, argnum=1, num_microbatches=4, reduce="mean")
        report = mm.jit(loop).lower(jnp.ones((6, 8, 8)), jnp.ones((8, 8))).report()
        assert [t.runs for t in report.tasks if t.name == "layer"] == [12, 12]
        forward = [f for f in report.fragments if f.name.startswith("layer") and f.kind == "F"]
        assert sum(t.forward_flops for t in report.tasks if t.name == "layer") == sum(
            f.runs * f.figures.flops for f in forward
        )
        for memory in report.memory.values():
            assert memory.made_of["parameters"] == 2 * 3 * 4 * 8 * 8  # the stack, and its layers
            assert memory.made_of["activations"] <= 12 * 4 * 2 * 8


def test_an_update_beside_a_task_adds_no_parameters_to_it():
    """Those of all layers on a submesh may be updated with the last backward pass there, once their norm is known.

    A head that is in no task runs with the last one, and counts with it.
    """
    places = [mm.task(lambda w, x: jnp.tanh(x @ w), f"layer_{i}", devices=[i % 2]) for i in range(4)]

    def loss(ws, x):
        for task, w in zip(places, ws[:4], strict=True):
            x = task(w, x)
        return jnp.mean((x @ ws[4]) ** 2)

    def train(ws, x):
        grads = jax.grad(loss)(ws, x)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        return [w - 0.1 * g / norm for w, g in zip(ws, grads, strict=True)]

    report = mm.jit(train, donate_argnums=0).lower([jnp.eye(8)] * 4 + [jnp.ones((8, 2))], jnp.ones((2, 8))).report()
    found = {t.name: t.parameters for t in report.tasks if t.parameters}
    assert found == {**{f"layer_{i}": 64 for i in range(3)}, "layer_3": 64 + 16}


def test_what_crosses_has_a_name():
    """An activation, its gradient; a weight that two submeshes read by its path; and it adds up to the edges."""

    def tied(p, x):
        return jnp.sum(back(p["front"], mm.task(lambda w, x: x @ w, "first", devices=[0])(p["front"], x)))

    report = lowered().report()
    assert {v.name: (v.source, v.target, v.type, v.times) for v in report.values} == {
        "front -> back": (0, 1, "float32[2,4]", 4),
        "back_bwd -> front_bwd": (1, 0, "float32[2,4]", 4),
    }
    wide = {"front": jnp.ones((WIDTH, WIDTH))}
    values = {v.name: v for v in mm.jit(tied).lower(wide, rows()).report().values}
    assert values["args[0]['front']"].total_bytes == 4 * WIDTH * WIDTH
    for made in (report, mm.jit(tied).lower(wide, rows()).report()):
        for e in made.edges:
            between = [v for v in made.values if (v.source, v.target) == (e.source, e.target)]
            assert sum(v.total_bytes for v in between) == e.nbytes
            assert sum(v.values * v.times for v in between) == e.values


def test_a_gradient_that_crosses_is_named_by_what_makes_and_reads_it():
    """That of a tied table, which is summed on both submeshes, goes once a call to the one that has the table."""

    def loss(p, x):
        return jnp.mean(back(p["table"], mm.task(lambda w, x: x @ w, "first", devices=[0])(p["table"], x)) ** 2)

    def step(p, x):
        grads = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=4, reduce="mean")(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)

    report = mm.jit(step).lower({"table": jnp.ones((WIDTH, WIDTH))}, rows()).report()
    (gradient,) = [v for v in report.values if v.times == 1 and v.name != "args[0]['table']"]
    maker, reader = gradient.name.split(" -> ")
    fragments = {f.name: f.submesh for f in report.fragments}
    assert maker in ("first_bwd", "back_bwd") and reader.startswith("after_")
    assert (fragments[maker], fragments[reader]) == (gradient.source, gradient.target)


def test_what_crosses_to_the_next_microbatch_says_so():
    """Its reader is there, and it is no result."""
    early, late = (
        mm.task(lambda s, x: jnp.tanh(x + s), "early", devices=[0]),
        mm.task(lambda h: 2 * h, "late", devices=[1]),
    )

    def body(state, x):
        h = late(early(state["m"], x))
        return jnp.sum(h), {"m": h}

    with pytest.warns(UserWarning, match="in no order"):
        report = mm.jit(microbatched(body, state_argnum=0)).lower({"m": jnp.ones((2, WIDTH))}, rows()).report()
    assert {v.name: v.times for v in report.values} == {"early -> late": 4, "late -> early of the next microbatch": 4}


def test_after_compiling_the_figures_are_those_of_xla():
    """Ours stand beside them, and where they differ it says where and by how much."""
    made = lowered()
    compiled = made.compile()
    before, after = made.report(), compiled.report()
    assert (before.edges, before.values, before.schedules) == (after.edges, after.values, after.schedules)
    costs = compiled.cost_analysis()
    for f, ours in zip(after.fragments, before.fragments, strict=True):
        cost = costs[f.name]
        assert f.figures.flops == cost.get("flops", 0) + cost.get("transcendentals", 0)
        assert f.counted == ours.figures
    assert "our own count" in str(before) and "XLA's" in str(after)


def test_a_wrong_count_is_named(monkeypatch):
    """A fragment of which XLA says something else."""
    compiled = mm.jit(lambda x: back(x, x)).lower(jnp.ones((64, 64))).compile()
    (executable,) = compiled._lowered.executables

    class Other:
        def cost_analysis(self):
            return {"flops": 1e6, "bytes accessed": executable.cost_analysis()["bytes accessed"]}

        def memory_analysis(self):
            return executable.memory_analysis()

    monkeypatch.setattr(compiled._lowered, "executables", [Other()])
    (off,) = [o for o in compiled.report().off if o.what == "flops"]
    assert (off.where, off.found) == ("back", 1e6)
    assert off.by == pytest.approx(off.counted / 1e6 - 1)
    assert f"back: flops {off.counted:.6g}, 1e+06 ({off.by:+.1%})" in str(compiled.report())


def test_what_would_be_printed_as_no_difference_is_none():
    """Four bytes of a peak of thousands are what the compiler rounds to."""
    counted, held = ({0: Memory(0, first), 1: Memory(0, second)} for first, second in ((12680, 900), (12684, 1000)))
    assert [(o.where, f"{o.by:+.1%}") for o in _off((), held, counted)] == [("1", "-10.0%")]


def test_figures_of_what_other_processes_run_are_said_to_be_ours(monkeypatch):
    compiled = lowered().compile()
    assert compiled.report().elsewhere == () and "figures are XLA's\n" in str(compiled.report())
    names = [f.name for f in compiled.program.fragments]
    there = [e if name != "back" else None for e, name in zip(compiled._lowered.executables, names, strict=True)]
    monkeypatch.setattr(compiled._lowered, "executables", there)
    report = compiled.report()
    assert report.elsewhere == ("back",) and report.to_dict()["elsewhere"] == ["back"]
    assert "figures are XLA's, of 1 that other processes run our own count" in str(report)
    (line,) = (f for f in report.fragments if f.name == "back")
    assert line.figures == line.counted


INSIDE = {  # what a task does with its argument -> the axes that are idle then
    "nothing": (lambda x: x, {"data", "model"}),
    "a constraint": (lambda x: mm.with_sharding_constraint(x, ("data", None)), {"model"}),
    "one that does not last": (
        lambda x: mm.with_sharding_constraint(jnp.sin(mm.with_sharding_constraint(x, ("data", "model"))), (None, None)),
        set(),
    ),
    "shard_map": (
        lambda x: jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(x),
        {"model"},
    ),
    "shard_map that numbers devices": (
        lambda x: jax.shard_map(
            lambda x: x + jax.lax.axis_index("model"),
            mesh=MESH,
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=False,
        )(x),
        set(),
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_axes_that_shard_nothing(name):
    """The devices along them all compute the same, which nobody wants."""
    said, idle = INSIDE[name]
    step = mm.jit(mm.task(lambda w, x: jnp.sum(said(x) @ w), "task", mesh=MESH))
    report = step.lower(jnp.eye(4), jnp.ones((4, 4))).report()
    assert {(a.submesh, a.axis, a.size) for a in report.idle} == {(0, axis, 2) for axis in idle}
    for axis in idle:
        assert f"nothing is sharded over axis {axis!r} of submesh 0: 2 devices compute the same" in str(report)


def test_sums_that_stay_in_parts_hide_no_axis_that_shards_nothing():
    """The batch is sharded, so that sums over it stay in parts until the loop ends: by a ``shard_map`` of ours."""

    def layer(w, x):
        return jnp.tanh(mm.with_sharding_constraint(x, ("data",)) @ w)

    loss = mm.task(lambda w, x: jnp.mean(layer(w, x) ** 2), "task", mesh=MESH)
    step = mm.jit(mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, reduce="mean"))
    report = step.lower(jnp.eye(4), jnp.ones((8, 4))).report()
    assert any(r.axes for r in report.reductions)
    assert {(a.submesh, a.axis, a.size) for a in report.idle} == {(0, "model", 2)}


def test_a_key_that_is_put_beside_its_count_shards_nothing():
    """As JAX does for dropout of NNX, whose key and count are in a state."""
    rngs = nnx.Rngs(0)
    layer = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    dropped = manymesh.nnx.task(layer, "dropped", mesh=MESH)
    step = manymesh.nnx.jit(nnx.grad(lambda module, x: jnp.mean(module(x) ** 2)))
    lowered = step.lower(dropped, jnp.ones((4, 4)))
    assert {a.axis for a in lowered.report().idle} == {"data", "model"}


def test_devices_that_submeshes_share():
    """They take turns there, which the clock knows; a mistake in a list of devices is seen by it."""

    def report(devices):
        whole, part = (mm.task(lambda w, x: jnp.sin(x @ w), f"on {d}", devices=list(d)) for d in devices)
        loss = mm.microbatch(lambda w, x: jnp.sum(part(w, whole(w, x))), argnum=1, num_microbatches=4)
        return mm.jit(loss).lower(jnp.eye(8), jnp.ones((48, 8))).report()

    apart, across = report([range(4), range(4, 7)]), report([range(4), range(2, 5)])
    assert apart.shared == () and "take turns" not in str(apart)
    (shared,) = across.shared
    assert shared.submeshes == (0, 1) and len(shared.devices) == 2
    assert f"submeshes (0, 1) share 2 devices, {shared.devices}".replace("'", "") in str(across).replace("'", "")
    assert across.prediction.bubble_fraction > apart.prediction.bubble_fraction


def test_the_time_of_a_step_is_for_a_hardware():
    """Twice the rates, half the time; nobody's rates, no seconds but a bubble."""
    made = planned(2, 4, width=1024)
    fast, slow = (Hardware("x", {"float32": r}, r, r, 0.0, 0.0) for r in (2e12, 1e12))
    times = [made.report(h).prediction for h in (fast, slow)]
    assert times[1].seconds == pytest.approx(2 * times[0].seconds)
    assert times[1].bubble_fraction == pytest.approx(times[0].bubble_fraction)
    nobody = made.report().prediction
    assert nobody.seconds is None and nobody.by == "FLOPs" and 0 < nobody.bubble_fraction < 1
    assert "report(hardware) tells seconds" in str(made.report())
    assert "s by x: bubble" in str(made.report(fast))
    with pytest.raises(mm.errors.ArgumentError, match=r"found str 'h100'; Hardware.*\.h100\(\).* are ready"):
        made.report("h100")


def test_a_fragment_says_what_its_time_goes_for():
    """Arithmetic, memory, links or launches, whichever the hardware is poor in."""
    made = planned(2, 2)
    rich = {"peak": 1e18, "memory": 1e18, "link": 1e18, "latency": 0.0, "launch": 0.0}

    def bound(**poor):
        h = rich | poor
        hardware = Hardware("x", {"float32": h["peak"]}, h["memory"], h["link"], h["latency"], h["launch"])
        report = made.report(hardware)
        return next(f.bound for f in report.fragments if f.name == "stage_0_bwd")

    assert [bound(peak=1.0), bound(memory=1.0), bound(launch=1.0)] == ["compute", "memory", "launch"]


def test_a_sum_of_means_is_in_the_report():
    """With the number by which it multiplies the loss."""

    def summed(p, x):
        return mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4)(p, x)

    with pytest.warns(UserWarning, match="4 times"):
        made = lowered(summed, parameters(), rows())
    (finding,) = made.report().findings
    assert "are 4 times those of the whole batch" in finding
    assert f"finding: {finding}" in str(made.report()).splitlines()
    assert lowered().report().findings == ()


def test_sums_that_are_taken_in_every_microbatch_are_told_together():
    """As many as there are layers, for one reason."""
    why = "stack reads its terms in every microbatch"
    found = [Reduction(f"layer_{k}_bwd", "float32[32]", k // 3, 0, (), why) for k in range(6)]
    found += [
        Reduction("head_bwd", "float32[8]", 1, 0, (), "another"),
        Reduction("a", "float32[8]", 0, 0, ("data",), ""),
    ]
    assert list(sums(found)) == [
        "1 of 8 sums over a sharded batch are taken once a call",
        f"  layer_0_bwd .. layer_5_bwd (6): 6 x float32[32] on submeshes (0, 1), in every microbatch: {why}",
        "  head_bwd: float32[8] on submesh 1, in every microbatch: another",
    ]


def test_a_report_is_plain_data():
    """JSON, and back the same numbers."""
    report = lowered().report(Hardware.h200())
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["prediction"]["seconds"] == report.prediction.seconds
    assert plain["hardware"]["name"] == "H200"
    assert sum(v["total_bytes"] for v in plain["values"]) == sum(e.nbytes for e in report.edges)
    assert {name: m["peak_bytes"] for name, m in plain["memory"].items()} == {
        str(d): m.peak_bytes for d, m in report.memory.items()
    }


def test_a_report_is_shown_by_rich_and_told_in_a_line():
    """A page in a terminal, as narrow as it is, and in a notebook; one line as ``repr``."""
    report = lowered().report()
    out = io.StringIO()
    Console(file=out, width=100).print(report)
    assert "front -> back" in out.getvalue()
    assert report._repr_html_().startswith("<pre") and "front -&gt; back" in report._repr_html_()
    assert "\n" not in repr(report) and f"at most {report.peak_bytes} bytes" in repr(report)
    assert isinstance(report, Report)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (_view._flops(999.4e9), "999 GFLOP"),
        (_view._flops(999.6e9), "1 TFLOP"),
        (_view._flops(1.25e18), "1.25 EFLOP"),
        (_view._seconds(0.9996), "1 s"),
        (_view._seconds(0.0994), "99.4 ms"),
        (_view._seconds(1234.5), "1234 s"),
        (format_bytes(2**20 - 1), "1.0 MiB"),
        (format_bytes(2**20 - 100), "1023.9 KiB"),
    ],
)
def test_numbers_just_below_a_unit_are_one_of_it(written, text):
    """Not a thousand of the one before, and never in powers of ten."""
    assert written == text


def test_a_large_plan_is_told_in_a_page_in_seconds():
    """What is alike is folded with its count; 64 stages and 64 microbatches, on devices that nobody has."""
    made = planned(64, 64)
    assert made.layout.decisions  # which is not the report's to find
    start = time.process_time()
    report = made.report(Hardware.tpu_v5p())
    text = str(report)
    assert time.process_time() - start < 60  # a second on an idle machine; what is quadratic takes minutes
    assert len(text.splitlines()) < 160 and len(repr(report)) < 300
    assert "62 x stage_1 ... stage_62" in text
    assert "126 x 0 -> 1 ... 63 -> 62" in text
    assert len(report.memory) == 128


def test_a_device_that_is_too_small_is_said_to_be():
    """By the hardware's memory."""
    small = Hardware("tiny", {"float32": 1.0}, 1.0, 1.0, memory_bytes=100)
    text = str(lowered().report(small))
    assert "it DOES NOT FIT in the 100 B of tiny" in text
    assert text.splitlines()[1].startswith("DOES NOT FIT the 100 B of tiny: 2 of 2 devices need more, up to ")
    assert "it fits in" in (text := str(lowered().report(Hardware.h100()))) and "FIT" not in text


def test_measured_durations_make_a_prediction():
    """Of the step and of each fragment, also in the report before compiling."""
    made = lowered()
    compiled = made.compile()
    taken = compiled.durations(parameters(), rows(), repeats=1)
    assert len(taken.runs) == len(taken.issues) == len(made.program.fragments)
    assert all(t > 0 for t in taken.issues) and set(taken.transfers) == set(taken.transfer_issues)
    for report in (made.report(times=taken), compiled.report(times=taken)):
        assert report.prediction.by == "measured fragments"
        assert report.prediction.seconds >= max(f.seconds for f in report.fragments)
    p = parameters()
    compiled.durations(p, rows(), repeats=1)
    assert not any(x.is_deleted() for x in jax.tree.leaves(p))  # donated ones are copied


def test_what_are_no_durations_of_this_step_is_refused():
    """Costs of stages, which `measure` gives, above all."""
    made = lowered()
    compiled = made.compile()
    for wrong in (Costs(forward=1.0), {"front": 1.0}, 1.0):
        with pytest.raises(TypeError, match=rf"times has to be what compiled\.durations.*found {type(wrong).__name__}"):
            compiled.report(times=wrong)
    with pytest.raises(TypeError, match=f"times has 1 fragments and the step {len(made.program.fragments)}"):
        made.report(times=Durations([1.0]))


def test_lowered_answers_what_that_of_jax_does():
    """Structures, shapes with shardings, and costs without compiling."""
    made = lowered()
    args = (parameters(), rows())
    assert made.in_tree == jax.tree.structure((args, {}))
    value = made.compile()(*args)
    assert made.out_tree == jax.tree.structure(value)
    for info, x in zip(jax.tree.leaves(made.out_info), jax.tree.leaves(value), strict=True):
        assert (info.shape, info.dtype, info.sharding) == (x.shape, x.dtype, x.sharding)
    compiled = made.compile(compiler_options={"xla_embed_ir_in_executable": True})
    assert (compiled.in_tree, compiled.out_tree) == (made.in_tree, made.out_tree)
    assert compiled.in_avals == jax.tree.map(lambda x: jax.core.ShapedArray(x.shape, x.dtype), (args, {}))
    assert_same(compiled(parameters(), rows()), value)
    with pytest.raises(Exception, match="no_such_option"):
        made.compile({"no_such_option": True})
    costs = made.cost_analysis()
    assert set(costs) == {f.name for f in made.program.fragments}
    assert costs["front"]["flops"] >= 2 * 2 * WIDTH * WIDTH


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (({"front": 1.0}, [2.0, 3.0]), {}, r"compiled with args\[0\]\['back'\], which the call does not have; static"),
        (({"front": 1.0, "back": 1.0}, [2.0]), {"k": 1.0}, r"with args\[1\]\[1\], .*; called with kwargs\['k'\], which it was not"),
        (({"front": 1.0, "back": 1.0}, (2.0, 3.0)), {}, r"with args\[1\] of structure PyTreeDef\(\[\*, \*\]\), called with .*\(\*, \*\)"),
    ],
)  # fmt: skip
def test_a_call_of_another_structure_names_the_arguments(args, kwargs, text):
    """Those that differ, not the others."""
    compiled = (
        mm.jit(lambda p, xs: p["front"] * xs[0] + p["back"] * xs[1])
        .lower({"front": 1.0, "back": 1.0}, [2.0, 3.0])
        .compile()
    )
    with pytest.raises(TypeError, match=text) as error:
        compiled(*args, **kwargs)
    assert "'front'" not in str(error.value)


def test_out_info_of_what_is_stacked_is_whole():
    """Layers on two submeshes are one array in the result."""
    stages = [jax.sharding.Mesh(jax.devices()[i : i + 1], ("x",)) for i in (0, 1)]
    layer = mm.task(lambda w, h: jnp.tanh(h @ w), "layer", mesh=stages)

    def scanned(ws, h):
        return jnp.sum(jax.lax.scan(lambda h, w: (layer(w, h), None), h, ws)[0])

    made = mm.jit(jax.grad(scanned)).lower(jnp.ones((4, 8, 8)), jnp.ones((2, 8)))
    found = made.compile()(jnp.ones((4, 8, 8)), jnp.ones((2, 8)))
    assert (made.out_info.shape, made.out_info.sharding) == (found.shape, found.sharding)
    assert sum(t.parameters for t in made.report().tasks) == 4 * 8 * 8


@pytest.mark.parametrize(("kind", "width"), [("threefry2x32", 8), ("rbg", 16)])
def test_a_key_is_as_large_as_its_words(kind, width):
    """Of whatever kind."""
    front = mm.task(lambda keys: jax.vmap(jax.random.uniform)(keys), "front", devices=[0])
    back = mm.task(lambda keys, u: jax.vmap(jax.random.normal)(keys) * u, "back", devices=[1])
    keys = jax.random.split(jax.random.key(0, impl=kind), 16)
    report = mm.jit(lambda keys: back(keys, front(keys))).lower(keys).report()
    assert {v.nbytes for v in report.values if v.name == "args[0]"} == {16 * width}


def test_a_result_made_of_nothing_has_a_report():
    """As the branches of a conditional have them under a `jax.checkpoint` with a policy, of what another branch keeps."""
    front = mm.task(lambda x: (x * 2, jax.lax.empty((8,), jnp.float32)), "front", devices=[0])
    (task,) = mm.jit(front).lower(jnp.ones((4, 4))).report().tasks
    assert task.name == "front"
