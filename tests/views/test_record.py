"""Runs are recorded: every launch and transfer once, in an order that can have been, with times from the devices."""

from __future__ import annotations

import dataclasses
import glob
import json
import logging
import threading
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from manymesh import inspect, schedules
from manymesh._plan._instructions import Receive, Run
from manymesh._runtime._describe import rows
from manymesh.errors import ArgumentError
from manymesh.inspect import Span
from views.steps import MICROBATCHES, made_up, predicted, two_stages

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def recorded():
    """Two recorded calls of a compiled step, and what an unrecorded run gives."""
    step, params, x = two_stages()
    compiled = step.lower(params, x).compile()
    plain = jax.tree.map(jnp.copy, params)
    for _ in range(2):
        plain, _ = compiled(plain, x)
    with mm.inspect.record() as run:
        for _ in range(2):
            params, _ = compiled(params, x)
    return compiled, run, params, plain


def test_every_instruction_is_there_once(recorded):
    """For each call as many launches and transfers as the plan has, with their names, stages and microbatches."""
    compiled, run, _, _ = recorded
    plan, program = compiled._lowered.plan, compiled.program
    expected: Counter[object] = Counter()
    for ins in plan.instructions:
        if isinstance(ins, Run):
            f = program.fragments[ins.fragment]
            kind = "other" if f.loop is None else {"F": "forward", "B": "backward", "W": "weight"}[f.kind]
            expected[f.name, kind, ins.submesh, f.stage, ins.microbatch] += 1
        elif isinstance(ins, Receive):
            maker = program.fragments[ins.tag.maker]
            label = f"{maker.name} -> submesh {ins.submesh}"
            expected[label, "transfer", ins.submesh, maker.stage, ins.tag.microbatch] += 1
    for call in range(2):
        found = Counter((s.label, s.kind, s.submesh, s.stage, s.microbatch) for s in run.spans if s.step == call)
        assert found == expected
    assert run.steps == ("train", "train") and run.submeshes == ("d 2, devices 0,1", "device 2")
    kinds = Counter(s.kind for s in run.spans)
    assert kinds["forward"] == kinds["backward"] == 2 * 2 * MICROBATCHES


def test_times_can_have_been(recorded):
    """Nothing ends before it starts, a device does one thing at a time, and nothing is read before it is made."""
    _, run, _, _ = recorded
    assert all(0 <= s.start <= s.end for s in run.spans)
    for submesh in range(2):
        own = sorted((s for s in run.spans if s.submesh == submesh and s.kind != "transfer"), key=lambda s: s.start)
        assert all(a.end <= b.start + 1e-9 for a, b in zip(own, own[1:], strict=False))
    at = {(s.step, s.label, s.microbatch): s for s in run.spans}
    for step in range(2):
        for m in range(MICROBATCHES):
            chain = [
                "front", "front -> submesh 1", "back", "back_bwd", "back_bwd -> submesh 0", "front_bwd",
            ]  # fmt: skip
            spans = [at[step, label, m] for label in chain]
            assert all(a.end <= b.start + 1e-9 for a, b in zip(spans, spans[1:], strict=False)), spans


def test_results_are_those_of_an_unrecorded_run(recorded):
    """Bit by bit, with buffers donated as ever."""
    _, _, params, plain = recorded
    jax.tree.map(np.testing.assert_array_equal, params, plain)


def test_transfers_say_what_they_carry(recorded):
    """Shape, maker and bytes."""
    _, run, _, _ = recorded
    crossing = {s.label: s for s in run.spans if s.kind == "transfer"}
    assert crossing["front -> submesh 1"].carries == "float32[2,8] from front"
    assert (crossing["front -> submesh 1"].nbytes, crossing["front -> submesh 1"].source) == (64, 0)


def test_times_come_from_the_devices():
    """A launch that returns at once takes as long as its device computes; the one behind it waits for it."""

    def work(x):
        return jax.lax.fori_loop(0, 400, lambda _, y: jnp.sin(y @ y), x)

    slow = mm.task(work, "slow", devices=[0])
    quick = mm.task(lambda x: x @ x, "quick", devices=[1])
    step = mm.jit(lambda x: quick(slow(x)))
    x = jnp.ones((160, 160))
    jax.block_until_ready(step(x))
    with mm.inspect.record() as run:
        begin = time.perf_counter()
        y = step(x)
        issued = time.perf_counter() - begin
        jax.block_until_ready(y)
        whole = time.perf_counter() - begin
    assert issued < whole / 2, "the step was not asynchronous, which this test is about"
    spans = {s.label: s for s in run.spans}
    assert spans["slow"].seconds > 0.7 * (whole - issued)
    assert spans["quick"].start >= spans["slow"].end and run.seconds > 0.7 * whole


@pytest.mark.parametrize("at", [0, 3])
def test_a_task_does_not_take_the_time_in_which_its_argument_arrives(at):
    """It starts when the argument is there, at its home or from another device; that is no transfer of the step."""
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda _, y: jnp.sin(y @ y), x))
    front = mm.task(lambda x, key: x + jax.random.uniform(key), "front", devices=[0])
    back = mm.task(jnp.sin, "back", devices=[1])
    step = mm.jit(lambda x, key: back(front(x, key)))
    x, key = (jax.device_put(a, jax.devices()[at]) for a in (jnp.ones((160, 160)), jax.random.key(0)))
    jax.block_until_ready(step(slow(x), key))
    with mm.inspect.record() as run:
        step(slow(x), key)
    assert [s.label for s in run.spans] == ["front", "front -> submesh 1", "back"]
    first = run.spans[0]
    assert first.waited_for == "args[0] to arrive" and first.start > first.seconds


def test_threads_end_with_the_recording(recorded):
    """Those that wait are gone, and the next call is told to nobody."""
    compiled, run, params, _ = recorded
    assert not [t for t in threading.enumerate() if t.name.startswith("manymesh-record")]
    count = len(run.spans)
    compiled(jax.tree.map(jnp.copy, params), jnp.ones((MICROBATCHES * 2, 4)))
    assert len(run.spans) == count


def test_an_error_inside_leaves_what_was_recorded():
    """The recording holds the calls before it."""
    step = mm.jit(mm.task(jnp.sin, "wave", devices=[0]))
    with pytest.raises(ZeroDivisionError), mm.inspect.record() as run:
        step(jnp.ones(2))
        raise ZeroDivisionError
    assert [s.label for s in run.spans] == ["wave"]


def test_a_launch_that_raises_leaves_no_annotation_open(monkeypatch):
    """What the profiler sees after it is not below it."""
    compiled = mm.jit(mm.task(jnp.sin, "wave", devices=[0])).lower(jnp.ones(2)).compile()
    open_now: list[str] = []

    class Annotation:
        is_enabled = staticmethod(lambda: True)

        def __init__(self, name, **details):
            self.name = name

        def __enter__(self):
            open_now.append(self.name)

        def __exit__(self, *error):
            open_now.remove(self.name)

    def fail(*inputs):
        assert open_now == ["wave other"]
        raise ZeroDivisionError

    monkeypatch.setattr(jax.profiler, "TraceAnnotation", Annotation)
    monkeypatch.setattr("manymesh._runtime._watch._profiled", lambda: True)
    compiled(jnp.ones(2))
    executor = compiled._executor
    monkeypatch.setattr(executor, "_issues", [dataclasses.replace(issue, call=fail) for issue in executor._issues])
    with pytest.raises(ZeroDivisionError), mm.inspect.record():
        compiled(jnp.ones(2))
    assert open_now == []


def test_steps_on_other_submeshes_have_rows_of_their_own():
    """The submeshes of an actor are not those of the learner, and another step may number the same ones otherwise."""

    def step(*devices):
        tasks = [mm.task(jnp.sin, f"on_{d}", devices=[d]) for d in devices]
        return mm.jit(lambda x: tasks[1](tasks[0](x)))

    learner, actor, evaluation = step(0, 1), step(4, 5), step(1, 0)
    with mm.inspect.record() as run:
        for each in (learner, actor, evaluation):
            each(jnp.ones(2))
    assert run.submeshes == ("device 0", "device 1", "device 4", "device 5")
    assert {s.label: run.submeshes[s.submesh] for s in run.spans if s.kind != "transfer"} == {
        f"on_{d}": f"device {d}" for d in (0, 1, 4, 5)
    }
    ways = {(s.source, s.submesh, s.label) for s in run.spans if s.kind == "transfer"}
    assert ways == {(0, 1, "on_0 -> submesh 1"), (2, 3, "on_4 -> submesh 3"), (1, 0, "on_1 -> submesh 0")}
    assert {s.waited_for for s in run.spans if s.label == "on_5"} <= {"on_4 -> submesh 3", "its launch", ""}


def test_nothing_recorded_can_be_shown():
    """An empty block gives an empty timeline in every form."""
    with mm.inspect.record() as run:
        pass
    assert run.spans == () and run.bubble_fraction == 0 and str(run.timeline()).startswith("recording: nothing ran")
    assert "</html>" in run.timeline().html()


def test_saved_and_loaded_it_is_the_same(tmp_path, recorded):
    """Every field of every span; and the file is a trace for Perfetto as it is."""
    _, run, _, _ = recorded
    path = run.save(tmp_path / "run.json")
    again = inspect.Recording.load(path)
    assert again == run and again.spans[0] == run.spans[0]
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(run.spans)
    assert all({"name", "ts", "dur", "pid", "tid"} <= e.keys() for e in events if e["ph"] == "X")


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"manymesh": {"fields": ["a"], "spans": [[1]]}}'])
def test_another_file_is_refused(tmp_path, text):
    """With its name, and how to make one."""
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"other.json is no recording of manymesh .* mm.inspect.record"):
        inspect.Recording.load(path)


def test_what_is_off_most_comes_first():
    """By the seconds of a step; each with measured, predicted, and how often it runs."""
    found = made_up().compare(predicted())
    first = found.differences[0]
    assert (first.label, first.kind, first.runs) == ("back_bwd", "backward", 2)
    assert first.measured == pytest.approx(4e-3) and first.predicted == pytest.approx(3.6e-3)
    assert first.seconds == pytest.approx(0.8e-3) and first.ratio == pytest.approx(1 / 0.9)
    off = [abs(d.seconds) for d in found.differences]
    assert off == sorted(off, reverse=True) and len(off) == 8
    assert "most is off in backward 'back_bwd' on submesh 1" in found.summary()


def test_what_never_ran_and_what_nobody_predicted_is_said():
    """One of the two times is missing."""
    rows = [r for r in predicted() if r[1] != "after_0"] + [(0, "after_9", "other", None, None, 0.0, 5e-3)]
    found = {d.label: d for d in made_up().compare(rows).differences}
    assert found["after_9"].measured is None and found["after_9"].seconds == pytest.approx(-5e-3)
    assert found["after_0"].predicted is None and found["after_0"].seconds == pytest.approx(1e-3)
    assert "was predicted but never ran" in made_up().compare(rows).summary()


def test_a_recording_of_several_calls_is_a_prediction():
    """As of one call: what takes as long in each is off by nothing, and each call stands beside its own."""
    run, later = made_up(), 0.05
    again = tuple(s._replace(start=s.start + later, end=s.end + later, step=1) for s in run.spans)
    twice = dataclasses.replace(run, spans=run.spans + again, steps=("train", "train"))
    for measured, prediction in ((twice, twice), (twice, run), (run, twice)):
        found = measured.compare(prediction)
        assert found.predicted_seconds == pytest.approx(found.measured_seconds) == pytest.approx(0.02)
        assert found.predicted_bubble == pytest.approx(found.measured_bubble)
        assert all(d.seconds == pytest.approx(0) for d in found.differences)
        assert {d.label: d.runs for d in found.differences}["front"] == 2
        drawn = measured.timeline(prediction)
        assert [(s.label, s.step) for s in drawn.predicted] == [(s.label, s.step) for s in drawn.spans]
        assert [s.start for s in drawn.predicted] == pytest.approx([s.start for s in drawn.spans])


def test_what_other_processes_recorded_is_not_said_never_to_have_run():
    """Of a prediction only the submeshes that were recorded here count, as of what was measured."""
    whole = inspect.Recording(made_up().spans, made_up().submeshes, made_up().steps)
    here = inspect.Recording(
        tuple(s for s in whole.spans if s.submesh == 0), whole.submeshes, whole.steps, elsewhere=(1,)
    )
    compared = here.compare(predicted())
    assert {d.submesh for d in compared.differences} == {0}
    assert all(d.measured is not None for d in compared.differences)
    assert compared.differences == tuple(d for d in whole.compare(predicted()).differences if d.submesh == 0)
    assert here.compare(here.spans).measured_bubble == here.compare(here.spans).predicted_bubble


def test_a_simulation_is_a_prediction():
    """Tasks of a stage and phase are matched with it together; what it says nothing of is left out."""
    simulation = schedules.simulate("1f1b", 2, 2, forward=2e-3, backward=2e-3)
    found = made_up().compare(simulation)
    assert {d.label for d in found.differences} == {"stage 0", "stage 1"}
    assert {d.kind for d in found.differences} == {"forward", "backward"}
    by = {(d.label, d.kind): d for d in found.differences}
    assert by["stage 1", "forward"].seconds == pytest.approx(0)
    assert by["stage 1", "backward"].seconds == pytest.approx(4e-3)


def test_a_timeline_predicts_calls_and_not_what_lies_between_them():
    """Two calls of 4 ms, between which the host does something for 6 ms; 2 ms are predicted for each."""
    spans = [
        Span(submesh, label, "forward", submesh, 0, start + begin, start + begin + 2e-3, step)
        for step, start in enumerate((0.0, 10e-3))
        for submesh, label, begin in ((0, "front", 0.0), (1, "back", 2e-3))
    ]
    run = inspect.Recording(tuple(spans), ("device 0", "device 1"), ("step", "step"))
    timeline = run.timeline([(0, "front", "forward", 0, 0, 0.0, 1e-3), (1, "back", "forward", 1, 0, 1e-3, 2e-3)])
    assert timeline.summary == "14.0 ms measured, bubble 71.4%; 4.00 ms predicted, bubble 50.0%"
    assert [(s.step, s.start) for s in timeline.predicted] == [(0, 0.0), (0, 1e-3), (1, 10e-3), (1, 11e-3)]


def test_a_plan_on_a_clock_is_a_prediction(recorded):
    """Its rows have the labels of a recording: everything is matched, and the figures are those of the clock."""
    compiled, run, _, _ = recorded
    lowered = compiled._lowered
    count = len(lowered.plan.instructions)
    clock = list(range(count)), list(range(1, count + 1))
    found = run.compare(rows(lowered.program, lowered.layout, lowered.plan, *clock, {}))
    assert all(d.measured is not None and d.predicted in (1, 2) for d in found.differences)
    assert {d.predicted for d in found.differences if d.kind == "transfer"} == {2}  # from its Send to its Receive
    assert found.predicted_seconds == count


def test_a_report_is_a_prediction(recorded):
    """From measured fragments or from what is known of a machine: every span of the run is in it."""
    compiled, run, *_ = recorded
    report = compiled.report(mm.inspect.Hardware.h100())
    found = run.compare(report)
    assert all(d.measured is not None and d.predicted is not None for d in found.differences)
    assert 0 < found.predicted_seconds == pytest.approx(report.prediction.seconds)
    for reads in (run.compare, run.timeline):
        with pytest.raises(ArgumentError, match=r"counts FLOPs, not seconds; write report\(hardware\)"):
            reads(compiled.report())


def test_arguments_that_go_on_from_their_home_are_recorded_and_predicted():
    """A table that two submeshes read is sent once a call, from where it is; what only moves at first is no part of it."""
    look = mm.task(lambda table, x: jnp.tanh(table[x]), "look", devices=[0])
    score = mm.task(lambda table, h: jnp.sum(jnp.square(h @ table.T)), "score", devices=[1])
    step = mm.jit(lambda table, x: score(table, look(table, x)))
    table, x = jnp.ones((50, 4)), jnp.arange(8)
    compiled = step.lower(table, x).compile()
    home = compiled.input_shardings[0][0].device_set
    other = 1 if home == {jax.devices()[0]} else 0
    table = jax.device_put(table, compiled.input_shardings[0][0])
    compiled(table, x)
    with mm.inspect.record() as run:
        for _ in range(2):
            compiled(table, x)
    report = compiled.report(mm.inspect.Hardware.h100())
    name = f"args[0] -> submesh {other}"
    found = [s for s in run.spans if s.label == name]
    assert [(s.step, s.kind, s.submesh, s.source, s.nbytes, s.carries) for s in found] == [
        (step, "transfer", other, 1 - other, 50 * 4 * 4, "float32[50,4]") for step in range(2)
    ]
    readers = [s for s in run.spans if s.label == ("look", "score")[other]]
    assert all(a.start <= a.end <= b.end for a, b in zip(found, readers, strict=True))
    assert sum(s[1] == name for s in report.spans) == 1
    differences = {d.label: d for d in run.compare(report).differences}
    assert all(d.measured is not None and d.predicted is not None for d in differences.values())
    assert "3 transfers" not in repr(compiled) and "2 transfers a call" in repr(compiled)
    taken = compiled.durations(table, x, repeats=1)
    assert len(taken.arguments) == 1 and min(taken.arguments.values()) > 0


@pytest.mark.parametrize("prediction", [3, [(1, 2)], [(0, "x", "sideways", None, None, 0.0, 1.0)]])
def test_no_prediction_is_refused(prediction):
    """With the form that is expected."""
    with pytest.raises(ArgumentError, match=r"prediction|kinds are forward, backward"):
        made_up().compare(prediction)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start": "0"}, "starts at '0' and ends at 1.0; expected are two numbers of seconds"),
        ({"end": None}, "starts at 0.0 and ends at None; expected are two"),
        (
            {"start": 3.0},
            "starts at 3.0 and ends at 1.0; .* the end not before the start",
        ),  # as of a start and a duration
        ({"end": float("nan")}, "starts at 0.0 and ends at nan; expected are two"),
        ({"kind": ["F"]}, r"is of kind \['F'\]; kinds are"),
        ({"submesh": "0"}, "is on submesh '0'; expected is its number"),
    ],
)
def test_a_row_that_is_no_stretch_of_time_is_refused(change, words, tmp_path):
    """In a prediction and in a file, before anything is drawn of it."""
    span = Span(0, "x", "F", 0, 0, 0.0, 1.0)._replace(**change)
    with pytest.raises(ArgumentError, match=f"^row 0 of the prediction {words}"):
        made_up().timeline([tuple(span[:7])])
    path = tmp_path / "run.json"
    run = json.loads(made_up().save(path).read_text())
    run["manymesh"]["spans"][0] = [*span[:2], "forward" if span.kind == "F" else span.kind, *span[3:]]
    path.write_text(json.dumps(run))
    with pytest.raises(ArgumentError, match=f"run.json is no recording of manymesh .*span 0 {words}"):
        inspect.Recording.load(path)


def test_profiles_name_every_launch(tmp_path, recorded):
    """Also where two tasks share an executable; transfers by what they carry. Without a profile there is no observer."""
    from manymesh._runtime._watch import observer_of

    compiled, _, params, _ = recorded
    assert observer_of("train", compiled._lowered) is None
    params = jax.tree.map(jnp.copy, params)
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(compiled(params, jnp.ones((MICROBATCHES * 2, 4))))
    (path,) = glob.glob(f"{tmp_path}/**/*.xplane.pb", recursive=True)
    data = jax.profiler.ProfileData.from_file(path)
    found = Counter(e.name for plane in data.planes for line in plane.lines for e in line.events)
    for m in range(MICROBATCHES):
        assert found[f"front forward stage 0 microbatch {m}"] == 1
        assert found[f"back_bwd backward stage 1 microbatch {m}"] == 1
        assert found[f"receive front -> submesh 1 microbatch {m}: float32[2,8] from front"] == 1


def test_compilation_is_told(caplog, capsys):
    """To a callback, one fragment at a time; to the logger; and, in a pipe, to nobody else."""
    seen = []
    run = mm.jit(lambda x: mm.task(jnp.cos, "b", devices=[1])(mm.task(jnp.sin, "a", devices=[0])(x)))
    with caplog.at_level(logging.DEBUG, "manymesh"), inspect.progress(seen.append):
        run(jnp.ones(3))
    assert [(p.done, p.total) for p in seen] == [(0, 2), (1, 2), (2, 2)]
    assert {p.fragment for p in seen} == {"", "a", "b"}
    assert [r.levelname for r in caplog.records if r.name == "manymesh"] == ["DEBUG", "DEBUG", "INFO"]
    assert "2 fragments are compiled" in caplog.text
    with inspect.progress(False):
        run(jnp.ones(4))
    assert len(seen) == 3 and capsys.readouterr() == ("", "")
