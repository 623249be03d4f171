"""What every microbatch would compute alike leaves its loop, or joins its one reader."""

import jax
import jax.numpy as jnp

import manymesh as mm
from flat import lines, looped, program, run, text
from manymesh._passes._hoist import SMALL

BODY = """
    tasks: front 0
    inputs: s f32[]
    loop 0: 2 microbatches, gpipe
    carry a f32[] = zero, then t, at last total
    zero = lax.full((), 0.0) * s
    0: r = lax.exp(s)
    0: h = front: lax.tanh(r)
    0: t = {last}
    results: total
"""


def test_what_several_equations_read_is_computed_once():
    """An equation of the body that depends on nothing in it."""
    after = run("hoist_loop_invariants", program(BODY.format(last="a + h * r")))
    assert lines(after) == text("""
        inputs: a f32[]
        loop 0 step: 2 microbatches
          carry b f32[] = c, then d, at last e
        c f32[] = mul(0.0, a)
        f f32[] = exp(a)
        0: g f32[] = task front(f)
        0: h f32[] = mul(g, f)
        0: d f32[] = add(b, h)
        results: e
    """)


def test_what_one_equation_reads_stays_with_it():
    """It fuses there, in the phase of its reader."""
    flat = program("""
        tasks: front 0
        inputs: s f32[]
        loop 0: 2 microbatches, gpipe
        carry a f32[] = zero, then t, at last total
        zero = lax.full((), 0.0) * s
        0: r = lax.exp(s)
        0: h = front_bwd: lax.tanh(r)
        0: t = a + h
        results: total
    """)
    after = run("hoist_loop_invariants", flat)
    assert "0: f f32[] = exp(a) [backward]" in lines(after)


def test_what_depends_on_a_microbatch_stays():
    """Also through another equation."""
    flat = program("""
        inputs: s f32[]
        loop 0: 2 microbatches, gpipe
        carry a f32[] = zero, then t, at last total
        zero = lax.full((), 0.0) * s
        0: r = lax.exp(a)
        0: t = r * lax.sin(r) + lax.cos(r)
        results: total
    """)
    assert run("hoist_loop_invariants", flat) is flat


LARGE = f"""
    tasks: front 0
    inputs: s f32[{SMALL}]
    loop 0: 2 microbatches, gpipe
    carry a f32[{SMALL}] = s, then t, at last total
    {{}}
    results: total
"""


def test_what_is_large_and_read_in_both_passes_is_computed_once():
    """Each microbatch would hold its own until its backward pass. What it is made of comes along."""
    flat = looped(
        LARGE, "q = s * 2.0", "r = lax.exp(q)", "h = front: r * a", "g = front_bwd: r * h", "t = a + g"
    )  # fmt: skip
    after = lines(run("hoist_loop_invariants", flat))
    assert "\ne f32[1024] = mul(a, 2.0)\nf f32[1024] = exp(e)\n" in after


def test_each_pass_has_its_own_transpose():
    """It costs nothing where it is read."""
    flat = program("""
        tasks: front 0
        inputs: s f32[32,64], x f32[64,32]
        loop 0: 2 microbatches, gpipe
        carry a f32[64,32] = x, then t, at last total
        0: q = lax.transpose(s, (1, 0))
        0: h = front: q * a
        0: g = front_bwd: q * h
        0: t = a + g
        results: total
    """)
    after = run("hoist_loop_invariants", flat)
    twice = [n for n in after.nodes if n.primitive == "transpose"]
    assert [n.loop for n in twice] == [0, 0] and [n.backward for n in twice] == [False, True]
    assert [n.inputs[0] for n in after.nodes if n.task] == [n.outputs[0] for n in twice]


def test_a_number_made_of_what_is_large_is_computed_once():
    """With one reader as well: a penalty on the weights."""
    flat = looped(LARGE, "q = s * s", "r = jnp.sum(q)", "h = front: r * a", "t = a + h")
    after = run("hoist_loop_invariants", flat)
    assert [n.primitive for n in after.nodes if n.loop is None] == ["mul", "reduce_sum"]


def test_what_is_large_stays():
    """It would be held for the whole loop."""
    flat = program(f"""
        inputs: s f32[{SMALL}]
        loop 0: 2 microbatches, gpipe
        carry a f32[{SMALL}] = s, then t, at last total
        0: r = lax.exp(s)
        0: t = a + r * lax.sin(r)
        results: total
    """)
    assert run("hoist_loop_invariants", flat) is flat


def test_in_a_program():
    """The scale is computed in one fragment outside the loop, and by no fragment of its body."""
    front = mm.task(lambda w, x: jnp.tanh(x @ w), "front", devices=[0])
    back = mm.task(lambda w, x: jnp.tanh(x @ w), "back", devices=[1])

    def loss(w, s, x):
        scale = jnp.exp(s)
        return jnp.mean(back(w, front(w, x) * scale) * scale)

    step = mm.jit(mm.microbatch(loss, argnum=2, num_microbatches=2, reduce="mean", schedule="gpipe"))
    program = step.trace(jnp.ones((4, 4)), 1.0, jnp.ones((4, 4))).lower().program
    computes = [f.loop for f in program.fragments for e in f.jaxpr.eqns if e.primitive.name == "exp"]
    assert computes and set(computes) == {None}


def test_the_primitive_of_the_example():
    """`jnp.exp` is one equation, so that the count above means something."""
    assert [e.primitive.name for e in jax.make_jaxpr(jnp.exp)(1.0).eqns] == ["exp"]
