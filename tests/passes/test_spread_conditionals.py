"""A conditional over values of several submeshes is opened: each branch where its values are."""

from flat import lines, placed, program, run, text

COND = """
    tasks: one 0, two {second}
    inputs: x f32[512], y f32[512], k i32[]
    a = one: x + 1.0
    b = two: y + 1.0
    c, d = lax.cond(k, lambda p, q: (p * 2.0, q), lambda p, q: (p, q * 3.0), a, b)
    e = one: c + 1.0
    f = two: d + 1.0
    results: e, f
"""


def test_both_branches_run_where_their_values_are():
    """And the results are selected there."""
    after = run("spread_conditionals", program(COND.format(second=1)))
    assert lines(after) == text("""
        inputs: a f32[512], b f32[512], c i32[]
        d f32[512] = task one(a)
        e f32[512] = task two(b)
        f bool[] = ne(c, 0)
        g i32[] = convert_element_type(f) new_dtype=int32
        h f32[512] = mul(e, 3.0)
        i f32[512] = mul(d, 2.0)
        j f32[512] = select_n(g, d, i)
        k f32[512] = select_n(g, h, e)
        l f32[512] = task one(j)
        m f32[512] = task two(k)
        results: l, m
    """)
    assert placed(run("place", after))[4:8] == [("mul", 1), ("mul", 0), ("select_n", 0), ("select_n", 1)]


def test_a_conditional_of_one_submesh_stays():
    """XLA then runs one branch."""
    assert "cond(" in lines(run("spread_conditionals", program(COND.format(second=0))))
