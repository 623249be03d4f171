"""Sums over submeshes: added up on each first, then once across."""

from flat import lines, placed, program, run, text


def test_terms_are_added_up_where_they_are():
    """One value crosses, in place of one for each addition."""
    flat = program("""
        tasks: one 0, two 1
        inputs: x f32[512], y f32[512]
        a = one: x + 1.0
        b = two: y + 1.0
        c = one: x + 2.0
        d = two: y + 2.0
        e = a + b + c + d
        results: e
    """)
    assert lines(run("regroup_sums", flat)) == text("""
        inputs: a f32[512], b f32[512]
        c f32[512] = task one(a)
        d f32[512] = task two(b)
        e f32[512] = task one(a)
        f f32[512] = task two(b)
        g f32[512] = add(c, e)
        h f32[512] = add(d, f)
        i f32[512] = add(g, h)
        results: i
    """)


def test_every_submesh_has_its_own_accumulator():
    """The sum of the two is taken once, after the loop."""
    flat = program("""
        tasks: one 0, two 1
        inputs: x f32[512], y f32[512]
        loop 0: 2 microbatches, gpipe
        carry z f32[512] = zero, then t, at last total
        zero = lax.full((512,), 0.0)
        0: a = one: x + 1.0
        0: b = two: y + 1.0
        0: t = z + (a + b)
        results: total
    """)
    after = run("regroup_sums", flat)
    assert lines(after) == text("""
        inputs: a f32[512], b f32[512]
        loop 0 step: 2 microbatches
          carry c f32[512] = d, then e, at last f
          carry g f32[512] = h, then i, at last j
        k f32[512] = broadcast_in_dim(0.0) broadcast_dimensions=() [layout follows loop]
        h f32[512] = optimization_barrier(k) [layout follows loop]
        d f32[512] = broadcast_in_dim(0.0) broadcast_dimensions=() [layout follows loop]
        0: l f32[512] = task one(a)
        0: m f32[512] = task two(b)
        0: e f32[512] = add(c, l)
        0: i f32[512] = add(g, m)
        n f32[512] = add(f, j)
        results: n
    """)
    assert placed(run("place", after))[3:7] == [("one", 0), ("two", 1), ("add", 0), ("add", 1)]


def test_a_sum_that_crosses_once_stays():
    """As often as there are submeshes less one."""
    flat = run(
        "place",
        program("""
            tasks: one 0, two 1
            inputs: x f32[512], y f32[512]
            a = one: x + 1.0
            b = one: x + 2.0
            c = two: y + 1.0
            e = a + b + c
            results: e
        """),
    )
    assert lines(run("regroup_sums", flat)) == lines(flat)
