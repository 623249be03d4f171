"""Unmarked equations between tasks, put where least crosses."""

import pytest

from flat import program
from manymesh._passes._together import Together

NORM = """
    tasks: one 0, two 1
    inputs: x f32[512]
    a = one: x + 1.0
    b = lax.exp(a)
    c = b * a
    d = two: c + 1.0
    e = two_bwd: d + 1.0
    f = lax.sin(e) [backward]
    g = f / b [backward]
    h = one_bwd: g + 1.0
    results: d, h
"""
LOOP = """
    tasks: one 0, two 1, three 2
    inputs: x f32[2,512]
    loop 0: 2 microbatches, gpipe
    xs p f32[512] = u, v
    carry t f32[512] = zero, then e, at last total
    u = x[0]
    v = x[1]
    zero = lax.full((512,), 0.0) [layout follows loop]
"""
# The product reads two large values of the first stage and a small one of the second.
FORWARD = f"""{LOOP}    0: a = one: p + 1.0
    0: b = one: p + 2.0
    0: c = two: lax.reduce_sum(p, axes=(0,))
    0: d = lax.clamp(c, a, b)
    0: e = three: d + t
    results: total
"""
# The same the other way round: gradients come from the last stage.
BACKWARD = f"""{LOOP}    0: f = one: p * 3.0
    0: g = two: f * 3.0
    0: h = three: g * 3.0
    0: a = three_bwd: h + 1.0
    0: b = three_bwd: h + 2.0
    0: c = two_bwd: lax.reduce_sum(g, axes=(0,))
    0: d = lax.clamp(c, a, b) [backward]
    0: e = one_bwd: d + t
    results: total
"""
DEVICES = {"one": 0, "two": 1, "three": 2}


def settled(source, places, stages=()):
    """Where the nodes of ``places``, by primitive, are in the end, when they are where it says and may move."""
    flat = program(source)
    free = {n: places[n.primitive] for n in flat.nodes if n.task is None and n.primitive in places}
    assert len(free) == len(places)
    at = {**free, **{n: DEVICES[flat.tasks[n.task].name.removesuffix("_bwd")] for n in flat.nodes if n.task}}

    def place_of(v):
        return at.get(flat.index.producer.get(v))

    def places_of_readers(v):
        return [at[r] for r in flat.index.readers.get(v, ()) if r in at]

    moved = Together(flat, at, free, place_of, places_of_readers, stages).run()
    assert moved == {n for n, before in free.items() if at[n] != before}
    return {n.primitive: at[n] for n in free}


def test_a_norm_does_not_stand_on_both_sides():
    """Neither it nor its backward pass: one value crosses each way. What costs as little as it can stays."""
    after = settled(NORM, {"exp": 1, "mul": 0, "sin": 1, "div": 1})
    assert after["exp"] == after["mul"] == after["div"]
    for cheap in ({"exp": 0, "mul": 0, "sin": 1, "div": 0}, {"exp": 1, "mul": 1, "sin": 1, "div": 1}):
        assert settled(NORM, cheap) == cheap


@pytest.mark.parametrize(("source", "cheapest"), [(FORWARD, 0), (BACKWARD, 2)], ids=["forward", "backward"])
def test_a_pass_goes_from_stage_to_stage(source, cheapest):
    """Though less crossed if it did not; where stages have no order nothing keeps it."""
    assert settled(source, {"clamp": 2 - cheapest}, (0, 1, 2)) == {"clamp": 2 - cheapest}
    assert settled(source, {"clamp": 2 - cheapest}) == {"clamp": cheapest}


def test_what_the_tasks_of_its_own_side_need_stays():
    """It would go away and come back, for one value that crosses either way."""
    source = """
        tasks: one 0, two 1
        inputs: x f32[512], y f32[512]
        b = two: y + 1.0
        a = one: lax.reduce_sum(x, axes=(0,))
        c = lax.atan2(b, a + b)
        d = one: lax.reduce_sum(c, axes=(0,))
        e = two: d * c
        results: d, e
    """
    assert settled(source, {"atan2": 0, "add": 0}) == {"atan2": 0, "add": 0}


def test_so_many_that_they_are_a_part_of_the_model_stay(monkeypatch):
    """Where users have marked little, votes alone decide."""
    split = {"exp": 1, "mul": 0, "sin": 1, "div": 1}
    monkeypatch.setattr("manymesh._passes._together.MOST", 3)
    assert settled(NORM, split) == split
