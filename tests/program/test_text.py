"""A flat program as text."""

from dataclasses import FrozenInstanceError

import jax
import jax.numpy as jnp
import pytest

import manymesh as mm
from flat import program, text
from manymesh._passes._flatten import flatten
from stages import loss, parameters, rows

SOURCE = """
    tasks: one 0
    inputs: x f32[4], k f32[2]
    loop 0: 2 microbatches, gpipe
    xs b f32[2] = p, q
    carry a f32[2] = k, then t, at last total
    ys c f32[2], d f32[2] = h
    p = x[0:2] [layout follows loop]
    q = x[2:4] [unstacks]
    0: h = one_bwd: b * 2.0
    0: t = lax.max(a, h) [with one]
    e = c * total
    results: e
"""


def test_everything_that_a_program_says():
    """Loops, scopes, phases, what nodes say, and what a task computes."""
    assert str(program(SOURCE)) == text("""
        inputs: a f32[4], b f32[2]
        loop 0 step: 2 microbatches
          xs c f32[2] = d, e
          carry f f32[2] = b, then g, at last h
          ys i, j = k
        d f32[2] = slice(a) start_indices=(0,) limit_indices=(2,) [layout follows loop]
        e f32[2] = slice(a) start_indices=(2,) limit_indices=(4,) [unstacks]
        0: k f32[2] = task one_bwd(c)
            inputs: a f32[2]
            b f32[2] = mul(a, 2.0)
            results: b
        0: g f32[2] = max(f, k) [with one]
        l f32[2] = mul(i, h)
        results: l
    """)


def test_equal_programs_print_equally():
    """Whatever their variables are called inside; and the text that is read back is the text."""
    assert str(program(SOURCE)) == str(program(SOURCE))
    fun = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2)
    traced = [mm.jit(fun).trace(parameters(), rows()) for _ in range(2)]
    one, two = (str(flatten(t.jaxpr, t._record)) for t in traced)
    assert one == two
    assert one.count("task front(") == 1 and one.count("task back_bwd(") == 1


def test_many_variables_have_names_of_several_letters():
    """After z comes aa."""
    adds = "\n".join(f"a{i + 1} = a{i} + 1.0" for i in range(30))
    assert str(program(f"inputs: a0 f32[]\n{adds}\nresults: a30")).splitlines()[-2:] == [
        "ae f32[] = add(ad, 1.0)",
        "results: ae",
    ]


def test_programs_nodes_and_loops_are_frozen():
    """Also what a program maps."""
    flat = program(SOURCE)
    for thing, name in (
        (flat, "nodes"),
        (flat.nodes[0], "loop"),
        (flat.loops[0], "xs"),
        (flat.loops[0].xs[0], "inner"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, name, None)
    with pytest.raises(TypeError):
        flat.tasks["two"] = None


def test_literals_print_their_value():
    """Arrays their shape."""
    flat = program("inputs: x f32[2]\ny = x * 2.5 + jnp.float32(3)\nresults: y")
    assert "mul(a, 2.5)" in str(flat) and "add(b, 3.0)" in str(flat)
    assert jnp.float32(3) == 3
