"""The benchmarks start and agree with themselves; how fast anything is, is no matter here."""

import importlib
import sys
from pathlib import Path

import pytest

from manymesh import schedules

pytestmark = pytest.mark.once

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a benchmark by name; what they import from each other is found beside them."""
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (FOLDER / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint",
        "compile",
        "decoder",
        "dispatch",
        "failures",
        "gpu",
        "importing",
        "memory",
        "one_core",
        "peers",
        "pipeline",
        "planning",
        "predict",
        "processes",
        "recording",
        "restarts",
        "run",
        "stalls",
        "transports",
        "two_processes",
    ],  # fmt: skip
)
def test_a_benchmark_can_be_imported(benchmark, name):
    assert callable(benchmark(name).main)


@pytest.mark.parametrize("how", ["submeshes", "hosted", "offloaded"])
def test_gpt2_in_tasks_and_in_one_jit_train_alike(benchmark, how):
    size = benchmark("gpu").Size(2, 8, 2, 4, 16, 4, 2, 2)
    row = benchmark("gpu").compare(size, how, 2, rounds=1, seconds=1)  # asserts equal losses
    assert row["met"] in (True, False)


def test_by_hand_and_with_manymesh_train_alike(benchmark):
    size = benchmark("_model").Size(blocks=2, width=8, hidden=16, batch=8, microbatches=4)
    row = benchmark("pipeline").compare(size, "zero-bubble-h1", rounds=2, seconds=1)  # asserts equal losses
    assert row["met"] in (True, False)


def test_the_orders_by_hand_are_those_of_the_schedules(benchmark):
    hand = benchmark("_hand")
    for name in hand.SCHEDULES:
        for stages, count in ((1, 2), (2, 3), (4, 8)):
            ours = schedules.get(name).order(tuple(range(stages)), count).rows
            rows = [[(a.kind, a.stage, a.microbatch) for a in row] for row in ours]
            assert hand.rows(name, stages, count) == rows
            assert sorted(hand.issue(rows)) == sorted(action for row in rows for action in row)


def test_as_many_activations_live_as_the_simulator_says(benchmark):
    row = benchmark("memory").measure("1f1b", stages=2, count=3)
    assert (row["ours"], row["met"]) == ("2, 1", True)


def test_planning_needs_no_device(benchmark, monkeypatch):
    planning = benchmark("planning")
    monkeypatch.setattr(planning, "GIGABYTES", float("inf"))  # what other tests have taken in this process counts, too
    assert planning.measure("1f1b", stages=3, count=4)["met"] is True


def test_checkpoints_beside_orbax_and_tensorstore(benchmark):
    checkpoint = benchmark("checkpoint")
    rows = checkpoint.compare("small", checkpoint.state_of(4, 4096), rounds=1)  # asserts equal values
    assert [row["what"] for row in rows] == ["save small"] * 2 + ["restore small"] * 2


def test_recording_is_measured_with_every_span(benchmark):
    recording = benchmark("recording")
    size = benchmark("_model").Size(blocks=2, width=8, hidden=8, batch=8, microbatches=2)
    row = recording.recorded(size, "1f1b", rounds=2, seconds=1)
    assert row["what"].endswith(" spans") and " 0 spans" not in row["what"]
    assert recording.off(size, "1f1b", calls=100)["met"] in (True, False)


def test_what_is_predicted_of_the_readme_is_what_is_measured(benchmark):
    """Bytes that cross are equal; the peak of each device is within five parts in a hundred before compiling, three after.

    It is larger by the result or two that stay alive on CPU to be waited for.
    """
    step, args = benchmark("_steps").readme()
    lowered = step.lower(*args)
    crossed, before, after = benchmark("predict").bytes_and_peaks("readme", lowered, lowered.compile(), args)
    assert crossed["figure"] == "+0.0 %"
    assert before["met"] and abs(float(after["figure"].removesuffix(" %"))) < 3
