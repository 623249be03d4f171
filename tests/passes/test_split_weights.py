"""Backward tasks fall into what somebody waits for and weight gradients."""

import jax
import jax.numpy as jnp
import pytest

import manymesh as mm
from flat import program, run, text

TASK = """
    tasks: front 0
    inputs: w f32[4,4], x f32[2,4]
    loop 0: 2 microbatches, {schedule}
    carry b f32[2,4] = x, then y, at last last
    carry a f32[4,4] = w, then t, at last total
    0: h, r = front: (lax.tanh(b @ w), lax.cos(b))
    0: gx, gw = front_bwd: ((h * r) @ w.T, b.T @ (h * r))
    0: y = front_bwd: gx + 1.0
    0: t = a + gw
    results: total, last
"""


def test_the_weight_gradient_is_a_task_of_its_own():
    """It reads what the first half computed, so that nothing is computed twice."""
    after = run("split_weights", program(TASK.format(schedule="zero-bubble-h1")))
    halves = str(after).split("0: k ")[1].split("0: d ")[0]
    assert "0: k " + halves.rstrip() == text("""
        0: k f32[2,4], l f32[4,2], m f32[2,4] = task front_bwd(i, j, a, c)
            inputs: a f32[2,4], b f32[2,4], c f32[4,4], d f32[2,4]
            e f32[2,4] = mul(a, b)
            f f32[4,4] = transpose(c) permutation=(1, 0)
            g f32[2,4] = dot_general(e, f)
            h f32[4,2] = transpose(d) permutation=(1, 0)
            i f32[2,4] = mul(a, b)
            results: g, h, i
        0: n f32[4,4] = task front_wgt(l, m)
            inputs: a f32[4,2], b f32[2,4]
            c f32[4,4] = dot_general(a, b)
            results: c
    """)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_other_schedules_keep_the_task_whole(schedule):
    """Nothing changes."""
    flat = program(TASK.format(schedule=schedule))
    assert run("split_weights", flat) is flat


def test_a_result_that_a_task_waits_for_is_no_weight_gradient():
    """Directly, or through an unmarked equation."""
    flat = program("""
        tasks: front 0
        inputs: w f32[4,4], x f32[4,4]
        loop 0: 2 microbatches, zero-bubble-h1
        carry b f32[4,4] = x, then y, at last last
        0: g = front_bwd: b.T @ w
        0: k = g * 2.0
        0: y = front_bwd: k + 1.0
        results: last
    """)
    assert run("split_weights", flat) is flat


@pytest.mark.parametrize("names, splits", [(["front_wgt"], True), ([(0, "front_wgt")], True), (["back_wgt"], False)])
def test_rows_of_the_user_split_it_if_they_name_a_weight_half(names, splits):
    """Of a task of the loop; a task that is itself called ``back_wgt`` is none."""
    tasks = {"back_wgt": mm.Task("back_wgt", devices=[1])}
    flat = program(TASK.format(schedule="1f1b"), rows=[["front", "front_bwd", *names]], tasks=tasks)
    assert ("front_wgt" in str(run("split_weights", flat))) == splits


def test_the_gradient_of_experts_is_split_off():
    """A product of groups of rows is a product; its weight gradient does not hold up the stage before."""

    def experts(ws, x):
        sizes = jnp.array([3, x.shape[0] - 3], jnp.int32)
        return x + jnp.tanh(jax.lax.ragged_dot(x, ws, sizes))

    front = mm.task(lambda w, x: jnp.tanh(x @ w), "front", devices=[0])
    middle = mm.task(experts, "experts", devices=[1])

    def loss(weights, x):
        return jnp.sum(middle(weights[1], front(weights[0], x)))

    def step(weights, x):
        grad = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=2, schedule="zero-bubble-h1")
        return grad(weights, x)

    weights, x = [jnp.ones((4, 4)), jnp.ones((2, 4, 4))], jnp.ones((16, 4))
    fragments = mm.jit(step).lower(weights, x).program.fragments
    assert [f.name for f in fragments if f.submesh == 1 and f.kind != "F"] == ["experts_bwd", "experts_wgt"]
