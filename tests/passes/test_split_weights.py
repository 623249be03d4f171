"""Backward tasks fall into what somebody waits for and weight gradients."""

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
