"""What every adapter keeps: one list of checks, run with Linen, NNX and Equinox."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import manymesh as mm

sys.path.insert(0, str(Path(__file__).parent))
from frameworks import FRAMEWORKS, Framework, Outcome, X  # noqa: E402  # beside this file

each = pytest.mark.parametrize("name", FRAMEWORKS)


@functools.cache
def trained(name: str, tasks: bool) -> Outcome:
    return FRAMEWORKS[name].trains(tasks)


@functools.cache
def stacked(name: str, tasks: bool) -> Outcome:
    return FRAMEWORKS[name].stacks(tasks)


def assert_equal(ours: Outcome, plain: Outcome) -> None:
    np.testing.assert_allclose(ours.loss, plain.loss, rtol=1e-5)
    for path, x in plain.arrays.items():
        np.testing.assert_allclose(ours.arrays[path], x, rtol=1e-5, atol=1e-6, err_msg=path)


def devices(x: Any) -> list[int]:
    return sorted(d.id for d in x.devices())


@each
def test_values_are_those_of_the_framework_alone(name: str) -> None:
    """Gradients, with dropout and running means that go from one microbatch to the next."""
    assert_equal(trained(name, True), trained(name, False))


@each
def test_paths_of_parameters_are_those_of_the_plain_model(name: str) -> None:
    assert list(trained(name, True).arrays) == list(trained(name, False).arrays)
    assert FRAMEWORKS[name].paths <= set(trained(name, True).arrays)


@each
def test_what_a_task_uses_is_where_the_task_is(name: str) -> None:
    found = {path: devices(x) for path, x in trained(name, True).arrays.items()}
    assert {path: [0] for path in found if "front" in path} == {p: d for p, d in found.items() if "front" in p}
    assert {path: [1] for path in found if "back" in path} == {p: d for p, d in found.items() if "back" in p}


@each
def test_state_that_changes_is_handed_back(name: str) -> None:
    means = {path: np.asarray(x) for path, x in trained(name, True).arrays.items() if path.endswith("mean")}
    assert len(means) == 2 and all(np.abs(x).min() > 0 for x in means.values())


@each
def test_dropout_drops(name: str) -> None:
    """What the framework alone drops, about half of it, and something else in each microbatch."""
    found, expected = (np.asarray(trained(name, tasks).dropped) for tasks in (True, False))
    np.testing.assert_array_equal(found, expected)
    assert found.shape == (2, X.shape[0] // 2, X.shape[1]) and 0.1 < found.mean() < 0.9
    assert not np.array_equal(found[0], found[1])


@each
def test_tasks_in_a_scan_and_in_a_checkpoint(name: str) -> None:
    assert_equal(stacked(name, True), stacked(name, False))
    assert {tuple(devices(x)) for x in stacked(name, True).arrays.values()} == {(1,)}


@each
def test_a_table_lists_the_parameters_and_where_they_are(name: str) -> None:
    rows = {row.path: row for row in trained(name, True).table.rows}
    assert FRAMEWORKS[name].paths <= set(rows)
    for path in FRAMEWORKS[name].paths:
        assert rows[path].devices == ((0,) if "front" in path else (1,))
        assert rows[path].bytes_per_device == np.prod(rows[path].shape) * 4


@each
def test_errors_say_what_to_do(name: str) -> None:
    framework: Framework = FRAMEWORKS[name]
    where = framework.face.__name__.split(".")[1]
    with pytest.raises(mm.errors.TaskError, match=rf"^{where}.task: expected an? .*module.*, found 42 of type int"):
        framework.face.task(42, devices=[0])
    with pytest.raises(
        mm.errors.TaskError, match=rf"^{where}.task: \w+ has no method 'encode'; methods= names methods"
    ):
        framework.face.task(framework.module, devices=[0], methods=["encode"])
    with pytest.raises(mm.errors.TaskError, match=rf"^{where}.task: task= is a complete description"):
        framework.face.task(framework.module, task=mm.Task(devices=[0]), devices=[0])


@each
def test_errors_end_at_the_users_line(name: str) -> None:
    """In a call of `task` and of a step, however that is asked for."""
    face = FRAMEWORKS[name].face
    jit = getattr(face, "jit", mm.jit)
    step = jit(mm.task(lambda x: mm.microbatch(lambda x: x, num_microbatches=3)(x), "front", devices=[0]))
    calls = [
        lambda: face.task(FRAMEWORKS[name].module, devices=[0], methods=["encode"]),
        lambda: step(X),
        lambda: step.trace(X),
        lambda: step.lower(X),
        lambda: step.eval_shape(X),
    ]
    package = str(Path(mm.__file__).parent)
    for call in calls:
        with pytest.raises(mm.errors.ManyMeshError) as caught:
            call()
        found = traceback.extract_tb(caught.value.__traceback__)
        assert not [f for f in found if f.filename.startswith(package)], "".join(traceback.format_list(found))


@each
def test_one_task_of_one_class_is_one_class(name: str) -> None:
    """So that modules of it compare equal, and nothing is compiled twice."""
    framework = FRAMEWORKS[name]
    first, second = (framework.face.task(framework.module, "a", devices=[0]) for _ in range(2))
    assert first is second and issubclass(first, framework.module)
    assert framework.face.task(framework.module, "a", devices=[1]) is not first
    assert jax.devices()


@each
def test_a_decorated_class_is_the_class_of_the_call(name: str) -> None:
    """With its arguments checked at the decorator; an instance pickles by the name of its class."""
    framework = FRAMEWORKS[name]
    task, module = framework.face.task, framework.module
    assert task(devices=[1])(module) is task(module, devices=[1])
    with pytest.raises(mm.errors.TaskError, match="logical_axes were given, but no mesh"):
        task(logical_axes=[("a", "b")])
    made = framework.decorated()
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made) and "Task[" in type(made).__name__
    call = made.init_with_output if name == "linen" else None
    if call is not None:
        plain, out = call(jax.random.key(0), X)[0], mm.jit(call)(jax.random.key(0), X)[0]
    else:
        plain, out = made(X), framework.face.jit(lambda model, x: model(x))(made, X)
    np.testing.assert_allclose(out, plain, rtol=1e-6)
    assert devices(out) == [1]


@each
def test_a_copy_of_a_step_is_the_step(name: str) -> None:
    """As of a function: a trainer that holds one can be copied."""
    face = mm if name == "linen" else FRAMEWORKS[name].face
    step = face.jit(lambda x: x + 1)
    step(X)
    assert copy.deepcopy({"step": step})["step"] is step
