"""What stands between tasks keeps the fewest bytes for the backward pass."""

import pytest

from flat import lines, program, run, text

LOOP = """
inputs: w f32[64,64], x f32[128,64]
loop 0: 2 microbatches, gpipe
xs b f32[64,64] = first, second
carry a f32[64,64] = zero, then t, at last total
first = x[0:64]
second = x[64:128]
zero = lax.full((64, 64), 0.0)
"""


def looped(tasks, *body):
    """A loop over two microbatches of one array, which adds up what its body calls t."""
    return program("\n".join([f"tasks: {tasks}", LOOP, *body, "results: total"]))


def changed(*, function="neg", between=(), reads="p @ q"):
    """The program before the pass and after it."""
    before = looped(
        "front 0, back 1", "0: h = front: b @ w", "0: p = lax.mul(h, 2.0)", f"0: q = lax.{function}(p)", *between,
        f"0: g = front_bwd: {reads}", "0: t = a + g",
    )  # fmt: skip
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
        {"between": ["0: r = back_bwd: q @ p"], "reads": "p @ q + r"},  # held elsewhere
    ],
)
def test_what_would_not_hold_less_stays(what):
    """As it is."""
    before, after = changed(**what)
    assert after.replace(" [layout follows loop]", "") == before


KEPT = "(lambda p: (-p, p))(b @ w)"  # a task that ends in something cheap, and what it keeps


def ends(*, made=f"h, p = front: {KEPT}", between=(), reads="g @ p"):
    """The program before the pass and after it."""
    before = looped(
        "front 0, mid 0, back 1", f"0: {made}", "0: y = mid: h @ w", *between,
        "0: g = mid_bwd: y @ h", f"0: d = front_bwd: {reads}", "0: t = a + d",
    )  # fmt: skip
    return lines(before).replace(" [layout follows loop]", ""), lines(run("keep_less_between", before))


def test_what_a_task_ends_in_is_computed_again():
    """The next task reads it; its backward pass has it of what the first task keeps."""
    after = ends()[1]
    assert "task front(c, a)\n0: l f32[64,64] = task mid(j, a)\n0: m f32[64,64] = neg(k) [backward" in after
    assert "task mid_bwd(l, m)" in after


def test_what_another_submesh_has_since_its_forward_pass_is_computed_again():
    """A skip connection, say: each submesh has its own, and neither waits for the other."""
    after = ends(between=["0: z = back: h @ w", "0: u = back_bwd: z @ h"], reads="g @ p + u")[1]
    assert " = neg(k) [backward" in after


@pytest.mark.parametrize(
    "what",
    [
        {"made": "h = front: -(b @ w)", "reads": "g"},  # nobody has what it is made of
        {"made": "h, p = front: (lambda p: (jnp.exp(p), p))(b @ w)"},  # expensive on a CPU
        # it would have to be equal to its maximum, in another executable
        {"reads": "g @ p + jnp.where(h == jnp.max(h, 0) * jnp.ones_like(h), 1.0, 0.0)"},
        {
            "between": ["0: m = jnp.max(-h, 0, keepdims=True)", "0: e = -h [backward]"],  # and not only at once
            "reads": "g @ p + jnp.where(e == m * jnp.ones_like(e), 1.0, 0.0)",
        },
    ],
)
def test_what_a_task_ends_in_stays(what):
    """As it is."""
    before, after = ends(**what)
    assert after.replace(" [layout follows loop]", "") == before


def test_a_sum_over_many_layers_is_kept_now_and_then():
    """What is computed again would be read of every layer before it."""
    layers = [f"0: p{i}, h{i} = f{i}: (lambda p: (p, h{i - 1} + p))(h{i - 1} @ w)" for i in range(1, 21)]
    backward = [f"0: g{i} = f{i}_bwd: g{i + 1} @ h{i} + p{i}" for i in range(20, 0, -1)]
    tasks = ", ".join(f"f{i} 0" for i in range(21))
    flat = looped(tasks, "0: h0 = f0: b @ w", *layers, "0: g21 = f0_bwd: h20 @ h0", *backward, "0: t = a + g1")
    after = run("keep_less_between", flat)
    again = [n for n in after.nodes if n.phase == 1 and n.primitive == "add" and n.mesh is not None]
    forward = {v for n in after.nodes if n.loop == 0 and n.phase == 0 for v in n.outputs}
    held = {v for n in after.nodes if n.phase == 1 for v in n.inputs} & forward
    assert len(held) == 21 + 2, "h0, what each task computes, and two sums on the way"
    assert len(again) < 20 * 8
