"""The gradient of stacked layers has one accumulator for each layer."""

from flat import lines, placed, program, run

STACK = """
    tasks: one 0, two 1
    inputs: x f32[4], y f32[4]
    loop 0: 2 microbatches, gpipe
    carry z f32[2,4] = zero, then t, at last total
    zero = lax.full((2, 4), 0.0)
    0: a = one: x + 1.0
    0: b = two: y + 1.0
    0: s = lax.concatenate([a[None], b[None]], 0)
    0: m = {term}
    0: t = z + m
    results: total
"""


def test_slices_are_added_where_they_are_made():
    """Casts and factors on the way are applied to each; the whole stack is dead then, and made once after the loop."""
    after = run("remove_dead", run("accumulate_each_layer", program(STACK.format(term="s * 2.0"), stacked={"s": "ab"})))
    assert lines(after).splitlines()[2:] == [
        "  carry c f32[4] = d, then e, at last f",
        "  carry g f32[4] = h, then i, at last j",
        "k f32[2,4] = broadcast_in_dim(0.0) broadcast_dimensions=()",
        "l f32[1,4] = slice(k) start_indices=(0, 0) limit_indices=(1, 4) [layout follows loop]",
        "d f32[4] = squeeze(l) dimensions=(0,) [layout follows loop]",
        "m f32[1,4] = slice(k) start_indices=(1, 0) limit_indices=(2, 4) [layout follows loop]",
        "h f32[4] = squeeze(m) dimensions=(0,) [layout follows loop]",
        "0: n f32[4] = task one(a)",
        "0: o f32[4] = task two(b)",
        "0: p f32[4] = mul(n, 2.0)",
        "0: e f32[4] = add(c, p)",
        "0: q f32[4] = mul(o, 2.0)",
        "0: i f32[4] = add(g, q)",
        *lines(after).splitlines()[15:],  # the stack, which JAX writes as one equation or as several
    ]
    assert [at for name, *at in placed(run("place", after)) if name == "add"] == [[0], [1]]


def test_what_mixes_layers_is_added_up_whole():
    """A sum over the layers, say."""
    flat = program(STACK.format(term="lax.cumsum(s, axis=0)"), stacked={"s": "ab"})
    assert run("accumulate_each_layer", flat) is flat
