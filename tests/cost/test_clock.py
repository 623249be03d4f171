"""A plan on a clock: what `simulate` says of its schedule, and what sharing cores does to it."""

import functools

import jax
import jax.numpy as jnp
import pytest

import manymesh as mm
from manymesh import schedules
from manymesh._cost._clock import Durations, run_clock
from manymesh._plan._instructions import Run, Send
from stages import microbatched, parameters, rows

pytestmark = pytest.mark.once

FORWARD, BACKWARD, WEIGHT, HOP = (1.0, 1.5, 0.5, 1.25), (2.0, 2.5, 1.5, 2.25), (1.0, 1.0, 0.5, 1.0), 0.125


@functools.cache
def pipeline(schedule, stages, count):
    """A training step's lowered form, one stage a submesh or as the schedule's own placement has it."""
    placement = schedules.get(schedule).default_placement(stages)
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"stage_{i}", devices=[s]) for i, s in enumerate(placement)]

    def loss(ws, x):
        for task, w in zip(tasks, ws, strict=True):
            x = task(w, x)
        return jnp.sum(x)

    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=count, schedule=schedule)
    shape = jax.ShapeDtypeStruct((4, 4), "float32")
    return mm.jit(grad).lower([shape] * stages, jax.ShapeDtypeStruct((4 * count, 4), "float32")), placement


def durations(lowered, transfer=HOP):
    """The times above for the fragments of the stages, none for what is outside of them."""
    program = lowered.program
    splits = any(f.kind == "W" for f in program.fragments)
    whole = {"F": FORWARD, "B": BACKWARD, "W": WEIGHT}
    runs = [0.0] * len(program.fragments)
    for f in program.fragments:
        if f.loop is not None and f.tasks:
            runs[f.index] = whole[f.kind][f.stage] - (WEIGHT[f.stage] if splits and f.kind == "B" else 0)
    crossing = {
        (i.submesh, i.target, i.variables): transfer if program.fragments[i.tag.maker].loop is not None else 0.0
        for i in lowered.plan.instructions
        if isinstance(i, Send)
    }
    return Durations(runs, crossing)


@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        ("gpipe", 4),
        ("1f1b", 4),
        ("1f1b", 7),
        ("eager-1f1b", 7),
        ("zero-bubble-h1", 7),
        ("zero-bubble-h2", 7),
        ("interleaved", 4),
    ],
)
def test_a_plan_takes_what_the_simulator_says_of_its_schedule(schedule, count):
    """Unequal stages, transfers that take time: makespan and bubble."""
    lowered, placement = pipeline(schedule, 4, count)
    course = run_clock(lowered.program, lowered.plan, durations(lowered))
    (loop,) = lowered.program.loops
    expected = schedules.simulate(
        loop.schedule, num_microbatches=count, placement=placement, forward=FORWARD, backward=BACKWARD, weight=WEIGHT,
        transfer=HOP,
    )  # fmt: skip
    assert course.seconds == pytest.approx(expected.makespan)
    assert course.loop_bubbles == pytest.approx([expected.bubble_fraction])


def test_cores_enough_for_all_are_as_if_each_device_had_its_own():
    """The clock of shared cores agrees with the other one where there is nothing to share."""
    lowered, _ = pipeline("1f1b", 4, 4)
    alone = durations(lowered)
    shared = Durations(alone.runs, alone.transfers, cores=64.0, demand=[1.0] * len(alone.runs))
    first, second = (run_clock(lowered.program, lowered.plan, d) for d in (alone, shared))
    assert second.seconds == pytest.approx(first.seconds)
    assert list(second.ends) == pytest.approx(list(first.ends))


def test_one_core_does_everything_one_after_the_other():
    """All the work, and no transfer beside it."""
    lowered, _ = pipeline("1f1b", 4, 4)
    alone = durations(lowered, transfer=0.0)
    course = run_clock(lowered.program, lowered.plan, Durations(alone.runs, cores=1.0, demand=[1.0] * len(alone.runs)))
    assert course.seconds == pytest.approx(4 * (sum(FORWARD) + sum(BACKWARD)))


def test_a_fragment_that_uses_two_cores_alone_shares_them():
    """Two at a time that want both of two cores take twice as long; that want one each, no longer."""
    lowered, _ = pipeline("gpipe", 2, 4)
    alone = durations(lowered, transfer=0.0)
    times = {
        demand: run_clock(
            lowered.program, lowered.plan, Durations(alone.runs, cores=2.0, demand=[demand] * len(alone.runs))
        ).seconds
        for demand in (1.0, 2.0)
    }
    assert times[1.0] == pytest.approx(run_clock(lowered.program, lowered.plan, alone).seconds)
    assert times[2.0] == pytest.approx(4 * (sum(FORWARD[:2]) + sum(BACKWARD[:2])))


@pytest.mark.parametrize("unit", [1e-3, 1e4 / 3, 1e8 / 7])
def test_cores_are_shared_alike_on_a_clock_of_any_length(unit):
    """A large model on this machine takes years: late on the clock, what rounding leaves of a run is less than a tick."""
    lowered, _ = pipeline("1f1b", 4, 7)
    found = durations(lowered)

    def course(unit):
        runs, transfers = [unit * t for t in found.runs], {k: unit * t for k, t in found.transfers.items()}
        return run_clock(lowered.program, lowered.plan, Durations(runs, transfers, cores=2.1, demand=[1.3] * len(runs)))

    assert course(unit).seconds == pytest.approx(unit * course(1.0).seconds)
    assert list(course(unit).ends) == pytest.approx([unit * end for end in course(1.0).ends])


def test_the_thread_that_issues_holds_everything_up():
    """Where issuing takes longer than running, a step takes what issuing takes."""
    lowered = mm.jit(microbatched()).lower(parameters(), rows())
    count = len(lowered.program.fragments)
    runs = sum(type(i).__name__ == "Run" for i in lowered.plan.instructions)
    course = run_clock(lowered.program, lowered.plan, Durations([0.0] * count, issues=[1.0] * count))
    assert course.seconds == runs


@pytest.mark.parametrize("cores", [None, 64.0])
def test_a_step_begins_with_its_first_launch(cores):
    """As in a recording: what a device waits for before it starts is a part of it where that is the launch alone."""
    lowered = mm.jit(microbatched()).lower(parameters(), rows())
    program, plan = lowered.program, lowered.plan
    count = len(program.fragments)
    given = Durations([4.0] * count, issues=[1.0] * count, cores=cores, demand=[1.0] * count)
    course = run_clock(program, plan, given)
    runs = [(k, i) for k, i in enumerate(plan.instructions) if isinstance(i, Run)]
    (first, _), *_ = runs
    assert (course.starts[first], course.ends[first]) == pytest.approx((0.0, 5.0))
    for submesh in range(len(program.submeshes)):
        own = [k for k, i in runs if i.submesh == submesh]
        assert all(course.ends[a] <= course.starts[b] for a, b in zip(own, own[1:], strict=False))
        assert any(course.ends[k] - course.starts[k] == pytest.approx(4.0) for k in own)  # launched while another runs
    report = lowered.report(times=given)
    compared = mm.inspect.Recording().compare(report)
    assert compared.predicted_seconds == pytest.approx(report.prediction.seconds)
    assert compared.predicted_bubble == pytest.approx(report.prediction.bubble_fraction)


def test_submeshes_that_share_a_device_take_turns():
    """Two tasks on two meshes of which one is a part of the other run one after the other there."""
    wide = mm.task(lambda x: x @ x, "wide", devices=[0, 1], device_axes=("d",))
    narrow = mm.task(lambda x: x @ x, "narrow", devices=[1])
    far = mm.task(lambda x: x @ x, "far", devices=[2])
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    both = {}
    for name, other in (("narrow", narrow), ("far", far)):
        lowered = mm.jit(lambda x, other=other: (wide(x), other(x))).lower(x)
        program = lowered.program
        both[name] = run_clock(program, lowered.plan, Durations([1.0] * len(program.fragments))).seconds
    assert both == {"narrow": 2.0, "far": 1.0}


def tied():
    """A table that both stages read, with tasks between that do not."""
    tasks = [
        mm.task(lambda w, x: jnp.tanh(x @ w), name, devices=[s]) for s, name in enumerate(("look", "middle", "score"))
    ]

    def loss(table, w, x):
        look, middle, score = tasks
        return jnp.sum(score(table, middle(w, look(table, x))))

    shape = jax.ShapeDtypeStruct((4, 4), "float32")
    return mm.jit(loss).lower(shape, shape, shape)


@pytest.mark.parametrize("cores", [None, 64.0])
def test_arguments_that_go_on_from_their_home_take_their_time(cores):
    """Whoever reads it waits for it, nobody else does; what is sent on that link after it waits too."""
    lowered = tied()
    program, plan = lowered.program, lowered.plan
    (place,) = (n for n, (i, s, _) in enumerate(plan.inputs) if s != program.home[program.invars[i]])
    i, target, _ = plan.inputs[place]
    home = program.home[program.invars[i]]
    names = {f.name: f.index for f in program.fragments}
    runs, demand = [1.0] * len(names), [1.0] * len(names)

    def course(seconds):
        given = Durations(runs, cores=cores, demand=demand, arguments={place: seconds})
        found = run_clock(program, plan, given)
        starts = {f.name: found.starts[k] for k, i in enumerate(plan.instructions)
                  if isinstance(i, Run) for f in program.fragments if f.index == i.fragment}  # fmt: skip
        return found, starts

    (found, starts), reader = course(10.0), ("look", "middle", "score")[target]
    assert {home, target} == {0, 2} and found.arguments == {place: (0.0, 10.0)}
    assert starts[reader] == pytest.approx(10.0)
    first = {"look": 0.0, "middle": 1.0, "score": 2.0} if reader == "score" else {"middle": 11.0, "score": 12.0}
    assert all(starts[name] == pytest.approx(t) for name, t in first.items() if name != reader)
    assert found.seconds == pytest.approx(11.0 if reader == "score" else 13.0)
    found, starts = course(1.5)
    late = 0.0 if reader == "score" else 1.5
    assert [starts[n] for n in ("look", "middle", "score")] == pytest.approx([late, late + 1, late + 2])


def test_a_report_counts_arguments_that_go_on():
    """On hardware, by its link: where nothing else takes time, each of three tables of one size takes its turn or not."""
    slow = mm.inspect.Hardware("slow", {"float32": 1e15}, 1e15, 64.0, link_latency=0.0, launch_overhead=0.0)
    lowered = tied()
    table = 4 * 4 * 4 / 64.0
    report = lowered.report(slow)
    (way,) = (v for v in report.values if v.name == "args[0]")
    waits = way.target == 0  # else it is there long before the last stage needs it
    assert report.prediction.seconds == pytest.approx(table * (2 + waits))
