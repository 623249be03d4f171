"""Every schedule on real programs: the values of the plain loop, the same bits within a class."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from manymesh import schedules

TABLE = [(1, 4), (2, 4), (3, 5), (4, 8), (8, 16)]
NAMES = [n for n in schedules.names() if n != "custom"]
WIDTH = 4


def block(w, x):
    return x + jnp.tanh(x @ w[0]) @ w[1]


@functools.cache
def chain(devices):
    """A chain of one block a stage, its step and its arguments."""
    tasks = [mm.task(block, f"s{i}", devices=[d]) for i, d in enumerate(devices)]

    def loss(params, x):
        for run, p in zip(tasks, params, strict=True):
            x = run(p, x)
        return jnp.mean(x**2)

    def step(params, x, schedule, microbatches):
        run = mm.microbatch(
            jax.value_and_grad(loss), argnum=1, num_microbatches=microbatches, schedule=schedule, reduce="mean"
        )
        return run(params, x)

    rng = np.random.default_rng(0)
    weight = lambda: jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) * 0.3, jnp.float32)  # noqa: E731
    return mm.jit(step, static_argnums=(2, 3)), [(weight(), weight()) for _ in devices]


def placement(name, stages):
    """Devices of a chain that the schedule admits, with `stages` submeshes where it wants two stages on each."""
    line = tuple(range(stages))
    if name == "interleaved":
        return line * 2 if stages <= 4 else line
    return line + line[::-1] if name in ("zbv", "dualpipev") else line


@pytest.mark.parametrize("stages,microbatches", TABLE)
def test_every_schedule_gives_the_values_of_the_plain_loop(stages, microbatches):
    """Loss and gradients, for every schedule that admits the shape; equal bits where the backward is cut alike."""
    first = {}
    for name in NAMES:
        if stages > 4 and name in ("zbv", "dualpipev"):
            continue  # sixteen stages: planned without devices in tests/schedules
        step, params = chain(placement(name, stages))
        x = jnp.asarray(np.random.default_rng(1).normal(size=(2 * microbatches, WIDTH)), jnp.float32)
        result = jax.tree.map(np.asarray, step(params, x, name, microbatches))
        with mm.ignore_transforms():
            expected = step(params, x, "gpipe", microbatches)
        for a, e in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, e, rtol=2e-5, atol=1e-5)
        key = (placement(name, stages), schedules.get(name).splits_backward)
        for a, e in zip(jax.tree.leaves(result), jax.tree.leaves(first.setdefault(key, result)), strict=True):
            np.testing.assert_array_equal(a, e)


def test_the_weight_gradients_are_a_fragment_of_their_own():
    """Zero-bubble schedules split the backward of every stage, the first included; others do not."""
    step, params = chain((0, 1, 2))
    x = jnp.ones((8, WIDTH))
    kinds = {f.name: f.kind for f in step.lower(params, x, "zero-bubble-h1", 4).program.fragments if f.tasks}
    assert kinds == {f"s{i}{end}": kind for i in range(3) for end, kind in (("", "F"), ("_bwd", "B"), ("_wgt", "W"))}
    assert not any(f.kind == "W" for f in step.lower(params, x, "1f1b", 4).program.fragments)


ROWS = [["front", "front", "front_bwd", "front_bwd"], ["back", "back_bwd", "back", "back_bwd"]]


def two_tasks(rows, **statements):
    front = mm.task(block, "front", devices=[0])
    back = mm.task(lambda w, x: jnp.sum(block(w, x)), "back", devices=[1])
    loss = lambda ws, x: back(ws[1], front(ws[0], x))  # noqa: E731
    run = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=2, custom_schedule=rows, **statements)
    params = [(jnp.eye(WIDTH), jnp.eye(WIDTH))] * 2
    return run, params, jnp.ones((4, WIDTH))


def test_a_custom_schedule_of_task_names():
    """Rows of names run as written, and give what the plain loop gives."""
    run, params, x = two_tasks(ROWS, num_stages=2, interleave=1)
    with mm.ignore_transforms():
        expected = run(params, x)
    for a, e in zip(jax.tree.leaves(mm.jit(run)(params, x)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5)


@pytest.mark.parametrize(
    "rows,statements,words",
    [
        ([["frnt"], ["back"]], {}, "row 0 of custom_schedule names 'frnt'; did you mean 'front'?"),
        ([ROWS[0], ["back", "back", "back_bwd", "back_bwd"]], {"num_stages": 3}, "num_stages=3, but the program has 2"),
        (ROWS, {"interleave": 2}, "interleave=2 says how many stages each submesh has"),
        (
            [["front", "front_bwd", "front", "front_bwd"], ["back", "back", "back_bwd", "back_bwd"]],
            {},
            "front:B0 waits for back:B0 waits for back:F1 waits for front:F1 waits for front:B0",
        ),
        ([ROWS[0], ["back", "back_bwd"]], {}, "back:F1"),
    ],
)
def test_an_impossible_custom_schedule_says_why(rows, statements, words):
    """Unknown names, wrong statements, circles and gaps are refused before anything compiles."""
    run, params, x = two_tasks(rows, **statements)
    with pytest.raises(mm.errors.ScheduleError) as error:
        mm.jit(run).lower(params, x)
    assert words in str(error.value)


def test_a_v_schedule_on_a_chain_says_what_it_needs():
    """ZBV needs two stages a submesh."""
    step, params = chain((0, 1, 2))
    with pytest.raises(mm.errors.ScheduleError, match="needs two stages on each submesh in a V"):
        step.lower(params, jnp.ones((8, WIDTH)), "zbv", 4)
