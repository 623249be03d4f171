"""The def-use index knows equations, and the ties of loops."""

import pytest

from flat import program

pytestmark = pytest.mark.once

SOURCE = """
    tasks: one 0
    inputs: x f32[4], k f32[2]
    loop 0: 2 microbatches, gpipe
    xs b f32[2] = p, q
    carry a f32[2] = k, then t, at last total
    ys c f32[2], d f32[2] = h
    p = x[0:2]
    q = x[2:4]
    0: h = one: b * 2.0
    0: t = lax.max(a, h)
    e = c * total
    results: e
"""


def test_makers_readers_and_positions():
    """Of equations, in order."""
    flat = program(SOURCE)
    p, q, h, t, e = flat.nodes
    index = flat.index
    assert index is flat.index
    assert [index.producer[v] for n in flat.nodes for v in n.outputs] == [p, q, h, t, e]
    assert index.readers[flat.invars[0]] == [p, q]
    assert index.readers[h.outputs[0]] == [t]
    assert e.outputs[0] not in index.readers
    assert [index.position[n] for n in flat.nodes] == [0, 1, 2, 3, 4]
    assert index.bodies == {None: [p, q, e], 0: [h, t]}


def test_what_is_read_by_more_than_equations():
    """By the caller, and by a loop under another name."""
    flat = program(SOURCE)
    p, q, h, t, e = (n.outputs[0] for n in flat.nodes)
    k = flat.invars[1]
    assert flat.index.results == {e}
    assert flat.index.read_by_loops == {k, p, q, h, t}
    assert flat.index.leaving == {e, k, p, q, h, t}
    assert flat.index.uses[h] == 2 and flat.index.uses[e] == 1 and flat.index.uses[flat.invars[0]] == 2


def test_ties_of_loops_both_ways():
    """What enters, what is in the body, what comes out, and under which name a value goes on."""
    flat = program(SOURCE)
    p, q, h, t, _ = (n.outputs[0] for n in flat.nodes)
    ((carry,), (piece,), (copies,)) = flat.loops[0].carries, flat.loops[0].xs, flat.loops[0].ys
    index = flat.index
    assert index.scope == dict.fromkeys([h, t, carry.inner, piece.inner], 0)
    assert index.enters_loop == dict.fromkeys([p, q, carry.init], 0)
    assert index.made_by_loop == dict.fromkeys([carry.final, *copies.outer], 0)
    assert index.continues_as == {
        t: [carry.final], carry.init: [carry.inner], p: [piece.inner], q: [piece.inner], h: list(copies.outer),
    }  # fmt: skip
    assert index.comes_from == {carry.inner: t, carry.final: t, **dict.fromkeys(copies.outer, h)}
