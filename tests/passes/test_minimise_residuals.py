"""A task keeps the fewest bytes from which its backward pass can have the rest cheaply."""

from flat import program, run, text

TASK = """
    tasks: front {place}
    inputs: w f32[4,4], x f32[2,4]
    loop 0: 2 microbatches, gpipe
    carry b f32[2,4] = x, then b, at last last
    carry a f32[4,4] = w, then t, at last total
    0: h, r, k = front: (lambda z: (z, 1.0 - z * z, z * 3.0))(lax.tanh(b @ w))
    0: g = front_bwd: b.T @ (r * k)
    0: t = a + g
    results: total
"""


def test_values_that_follow_from_one_are_computed_again():
    """Of three arrays one is kept; the others are a multiplication away."""
    after = run("minimise_residuals", program(TASK.format(place=0)))
    tasks = str(after).split("0: h ")[1].split("0: f ")[0]
    assert "0: h " + tasks.rstrip() == text("""
        0: h f32[2,4] = task front(c, a)
            inputs: a f32[2,4], b f32[4,4]
            c f32[2,4] = dot_general(a, b)
            d f32[2,4] = tanh(c)
            results: d
        0: i f32[4,4] = task front_bwd(c, h)
            inputs: a f32[2,4], b f32[2,4]
            c f32[2,4] = mul(b, b)
            d f32[2,4] = sub(1.0, c)
            e f32[2,4] = mul(b, 3.0)
            f f32[4,2] = transpose(a) permutation=(1, 0)
            g f32[2,4] = mul(d, e)
            h f32[4,4] = dot_general(f, g)
            results: h
    """)


def test_a_task_without_a_submesh_stays():
    """It becomes part of its neighbours, where XLA sees both passes."""
    flat = program(TASK.format(place=""))
    assert run("minimise_residuals", flat) is flat


MERGED = """
    tasks: front 0
    inputs: a f32[32,{rank}], b f32[{rank},32], x f32[64,32]
    loop 0: 2 microbatches, gpipe
    carry c f32[64,32] = x, then h, at last last
    carry t f32[32,32] = w, then u, at last total
    w = lax.full((32, 32), 0.0)
    0: h, k = front: (lambda m: (c @ m, m))(a @ b)
    0: g = front_bwd: c.T @ (c @ k)
    0: u = t + g
    results: total
"""


def test_a_small_product_of_weights_is_made_again():
    """Of two rows, where 64 go through the task: less than an eighth of its arithmetic."""
    after = str(run("minimise_residuals", program(MERGED.format(rank=2))))
    assert "f32[64,32] = task front(d, a, b)" in after
    assert after.split("task front_bwd")[1].count("dot_general") == 3


def test_a_large_product_of_weights_is_kept():
    """It would take as long as the task itself."""
    flat = program(MERGED.format(rank=32))
    assert run("minimise_residuals", flat) is flat
