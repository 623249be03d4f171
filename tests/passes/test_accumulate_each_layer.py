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
        "d f32[4] = broadcast_in_dim(0.0) broadcast_dimensions=() [layout follows loop]",
        "h f32[4] = broadcast_in_dim(0.0) broadcast_dimensions=() [layout follows loop]",
        "0: k f32[4] = task one(a)",
        "0: l f32[4] = task two(b)",
        "0: m f32[4] = mul(k, 2.0)",
        "0: e f32[4] = add(c, m)",
        "0: n f32[4] = mul(l, 2.0)",
        "0: i f32[4] = add(g, n)",
        *lines(after).splitlines()[12:],  # the stack, which JAX writes as one equation or as several
    ]
    assert [at for name, *at in placed(run("place", after)) if name == "add"] == [[0], [1]]


def test_a_start_that_is_no_constant_is_taken_apart():
    """Each layer starts from its slice of it."""
    source = (
        STACK.format(term="s").replace("y f32[4]", "y f32[4], r f32[2,4]").replace("lax.full((2, 4), 0.0)", "r * 2.0")
    )
    after = run("accumulate_each_layer", program(source, stacked={"s": "ab"}))
    assert lines(after).count("= slice(") == 2


def test_what_mixes_layers_is_added_up_whole():
    """A sum over the layers, say."""
    flat = program(STACK.format(term="lax.cumsum(s, axis=0)"), stacked={"s": "ab"})
    assert run("accumulate_each_layer", flat) is flat


def test_the_halves_of_a_value_are_added_where_they_are_made():
    """Not as layers of a stack, but as parts side by side, and what is between them and the sum is done to each."""
    source = STACK.replace("[2,4]", "[8]").replace("(2, 4)", "(8,)").replace("[a[None], b[None]]", "[a, b]")
    after = run("remove_dead", run("accumulate_each_layer", program(source.format(term="lax.neg(s)"))))
    assert [at for name, *at in placed(run("place", after)) if name == "add"] == [[0], [1]]
    assert [at for name, *at in placed(run("place", after)) if name == "neg"] == [[0], [1]]
    given = source.format(term="s").replace("y f32[4]", "y f32[4], r f32[8]").replace("lax.full((8,), 0.0)", "r * 2.0")
    assert lines(run("accumulate_each_layer", program(given))).count("= slice(") == 2
