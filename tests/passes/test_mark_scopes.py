"""Equations of a named scope become a task."""

import pytest

import manymesh as mm
from flat import program, run, text


@pytest.fixture(autouse=True)
def layer():
    """One scope name that is a task."""
    with mm.register_task("layer", devices=[0]):
        yield


def test_each_phase_of_a_scope_is_one_task():
    """What is in no scope stays outside."""
    flat = program("""
        inputs: w f32[4,4], x f32[4,4]
        y = x @ w [in layer]
        h = lax.tanh(y) [in layer]
        r = lax.cos(y) [in layer]
        z = h * 2.0
        g = z * r [in transpose(layer)]
        results: g
    """)
    assert str(run("mark_scopes", flat)) == text("""
        inputs: a f32[4,4], b f32[4,4]
        c f32[4,4], d f32[4,4] = task layer(b, a)
            inputs: a f32[4,4], b f32[4,4]
            c f32[4,4] = dot_general(a, b)
            d f32[4,4] = tanh(c)
            e f32[4,4] = cos(c)
            results: d, e
        e f32[4,4] = mul(c, 2.0)
        f f32[4,4] = task layer_bwd(e, d)
            inputs: a f32[4,4], b f32[4,4]
            c f32[4,4] = mul(a, b)
            results: c
        results: f
    """)


def test_a_path_out_of_the_scope_and_back_cuts_it():
    """A task runs as a whole."""
    flat = program("""
        inputs: x f32[4]
        a = lax.sin(x) [in layer]
        b = lax.cos(a)
        c = lax.exp(b) [in layer]
        results: c
    """)
    assert [line for line in str(run("mark_scopes", flat)).splitlines() if "task" in line] == [
        "b f32[4] = task layer(a)",
        "d f32[4] = task layer(c)",
    ]


def test_sums_of_gradients_from_elsewhere_stay_outside():
    """Only the sum of the task's own terms is in it."""
    flat = program("""
        inputs: x f32[4], y f32[4]
        a = lax.sin(x) [in transpose(layer)]
        b = lax.cos(y)
        c = jax.interpreters.ad.add_jaxvals_p.bind(b, a) [in transpose(layer)]
        results: c
    """)
    assert str(run("mark_scopes", flat)).splitlines()[-2] == "e f32[4] = add_any(d, c) [backward]"


def test_the_tasks_are_in_the_program_alone():
    """The program that goes in stays what it is."""
    flat = program("""
        inputs: x f32[4]
        a = lax.sin(x) [in layer]
        results: a
    """)
    after = run("mark_scopes", flat)
    assert not flat.tasks and [t.name for t in after.tasks.values()] == ["layer"]
    assert str(run("mark_scopes", flat)) == str(after)
