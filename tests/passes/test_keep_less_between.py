"""What stands between tasks keeps the fewest bytes for the backward pass."""

import pytest

from flat import lines, program, run, text

PROGRAM = """
    tasks: front 0, back 1
    inputs: w f32[64,64], x f32[128,64]
    loop 0: 2 microbatches, gpipe
    xs b f32[64,64] = first, second
    carry a f32[64,64] = zero, then t, at last total
    first = x[0:64]
    second = x[64:128]
    zero = lax.full((64, 64), 0.0)
    0: h = front: b @ w
    0: p = lax.mul(h, 2.0)
    0: q = lax.{function}(p)
    {between}
    0: g = front_bwd: {reads}
    0: t = a + g
    results: total
"""


def changed(*, function="neg", between="", reads="p @ q"):
    """The program before the pass and after it."""
    before = program(PROGRAM.format(function=function, between=between, reads=reads))
    return lines(before), lines(run("keep_less_between", before))


def test_what_is_cheap_is_computed_again():
    """Of two arrays one is held, from which the other is a negation away."""
    assert changed()[1] == text("""
        inputs: a f32[64,64], b f32[128,64]
        loop 0 step: 2 microbatches
          xs c f32[64,64] = d, e
          carry f f32[64,64] = g, then h, at last i
        d f32[64,64] = slice(b) start_indices=(0, 0) limit_indices=(64, 64)
        e f32[64,64] = slice(b) start_indices=(64, 0) limit_indices=(128, 64)
        g f32[64,64] = broadcast_in_dim(0.0) broadcast_dimensions=() [layout follows loop]
        0: j f32[64,64] = task front(c, a)
        0: k f32[64,64] = mul(j, 2.0)
        0: l f32[64,64] = neg(k)
        0: m f32[64,64] = neg(k) [backward, on {'unnamed_0': 1}]
        0: n f32[64,64] = task front_bwd(k, m)
        0: h f32[64,64] = add(f, n)
        results: i
    """)


def test_what_is_held_anyway_costs_nothing():
    """The backward pass reads what the others are made of: it computes both of them again."""
    after = changed(reads="p @ q + h")[1]
    assert "m f32[64,64] = mul(j, 2.0) [backward" in after
    assert "n f32[64,64] = neg(m) [backward" in after
    assert "task front_bwd(m, n, j)" in after


@pytest.mark.parametrize(
    "what",
    [
        {"function": "exp"},  # expensive on a CPU
        {"reads": "q @ q"},  # one is held, whichever
        {"between": "0: r = back_bwd: q @ p", "reads": "p @ q + r"},  # held elsewhere
    ],
)
def test_what_would_not_hold_less_stays(what):
    """As it is."""
    before, after = changed(**what)
    assert after.replace(" [layout follows loop]", "") == before
