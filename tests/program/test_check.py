"""The checker of flat programs: each rule fails on a program that is broken for it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from flat import changed, node, program, run
from manymesh import _compat
from manymesh._program import Carry, Pieces
from manymesh._program._check import check
from manymesh._program._flat import Pins

SOURCE = """
    tasks: one 0
    inputs: x f32[4], k f32[2]
    loop 0: 2 microbatches, gpipe
    xs b f32[2] = p, q
    carry a f32[2] = k, then t, at last total
    ys c f32[2], d f32[2] = h
    p = x[0:2]
    q = lax.neg(k)
    0: h = one: b * 2.0
    0: t = lax.max(a, h)
    e = c * total
    f = lax.sin(x)
    results: e
"""


def fresh(shape=(2,), dtype="float32"):
    return _compat.new_var(jax.core.ShapedArray(shape, jnp.dtype(dtype)))


def with_loop(flat, **fields):
    return replace(flat, loops=(replace(flat.loops[0], **fields),))


def with_carry(flat, **fields):
    (carry,) = flat.loops[0].carries
    return with_loop(flat, carries=(replace(carry, **fields),))


def with_eqn(flat, name, **fields):
    return changed(flat, name, eqn=node(flat, name).eqn.replace(**fields))


def moved(flat, name, to):
    """The program with one node at another position."""
    nodes = [n for n in flat.nodes if n is not node(flat, name)]
    nodes.insert(to, node(flat, name))
    return replace(flat, nodes=tuple(nodes))


BROKEN = {
    "twice": (lambda f: with_eqn(f, "sin", outvars=[f.invars[0]]), "sin f32[4] is defined twice"),
    "twice an input": (lambda f: replace(f, invars=(*f.invars, f.invars[0])), "input f32[4] is defined twice"),
    "before it is defined": (lambda f: moved(f, "mul", 0), "mul reads f32[2] before it is defined"),
    "never defined": (lambda f: with_eqn(f, "sin", invars=[fresh()]), "sin reads f32[2] before it is defined"),
    "another scope": (lambda f: with_eqn(f, "mul", invars=[f.loops[0].xs[0].inner] * 2), "a variable of a loop's body"),
    "no such loop": (lambda f: changed(f, "sin", loop=3), "in a loop that the program does not have"),
    "constants": (lambda f: replace(f, consts={f.invars[1]: 1.0}), "constants are the first inputs"),
    "pinned input": (lambda f: replace(f, pins=Pins({fresh(): None})), "a pinned input is no input"),
    "pinned result": (lambda f: replace(f, pins=Pins(states=((f.invars[0], 7),))), "a pinned result is no result"),
    "carry's shape": (lambda f: with_carry(f, init=fresh((3,))), "a carry of f32[2] becomes f32[3]"),
    "carry's dtype": (lambda f: with_carry(f, final=fresh((2,), "int32")), "a carry of f32[2] becomes i32[2]"),
    "carry's start": (lambda f: with_carry(f, init=fresh()), "loop 0 reads f32[2] before it is defined"),
    "carry from outside": (lambda f: with_carry(f, out=f.invars[1]), "carries f32[2], which its body does not make"),
    "number of pieces": (
        lambda f: with_loop(f, xs=(replace(f.loops[0].xs[0], outer=f.loops[0].xs[0].outer[:1]),)),
        "1 pieces for 2 microbatches",
    ),
    "shape of a piece": (
        lambda f: with_loop(f, xs=(replace(f.loops[0].xs[0], outer=(f.invars[0],) * 2),)),
        "a piece of f32[2] has another shape",
    ),
    "piece undefined": (
        lambda f: with_loop(f, xs=(replace(f.loops[0].xs[0], outer=(fresh(), fresh())),)),
        "loop 0 reads f32[2] before it is defined",
    ),
    "collected from outside": (
        lambda f: with_loop(f, ys=(replace(f.loops[0].ys[0], inner=f.invars[1]),)),
        "collects f32[2], which its body does not make",
    ),
    "collected literal": (
        lambda f: with_loop(f, ys=(Pieces(f.loops[0].ys[0].inner, (f.loops[0].ys[0].outer[0], literal())),)),
        "a loop makes the pieces that it collects",
    ),
    "unknown task": (lambda f: changed(f, "one", task="other"), "no task is known for the mark 'other'"),
    "unknown neighbour": (lambda f: changed(f, "sin", colocated_with="other"), "no task is known for the mark 'other'"),
    "no call": (lambda f: changed(f, "sin", task="one"), "task 'one' is sin, and no call"),
    "forward weight": (lambda f: changed(f, "one", weight=True), "makes weight gradients, but is forward"),
    "moving task": (lambda f: changed(f, "one", unstacks=True), "task 'one' only moves values"),
    "preparing inside": (lambda f: changed(f, "max", layout_follows_loop=True), "prepares a loop, but is inside one"),
    "result undefined": (lambda f: replace(f, outvars=(fresh(),)), "the caller reads f32[2] before it is defined"),
    "result of a body": (lambda f: replace(f, outvars=f.loops[0].ys[:1] and (f.loops[0].ys[0].inner,)), "the caller"),
}


def literal():
    (eqn,) = jax.make_jaxpr(lambda x: x + 1.0)(jnp.ones(2)).eqns
    aval = jax.core.ShapedArray((2,), jnp.float32)
    return _compat.Literal(jnp.ones(2), aval) if eqn else None


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_fails_on_a_program_broken_for_it(name):
    """And says what is wrong."""
    flat = program(SOURCE)
    check(flat)
    breaking, message = BROKEN[name]
    with pytest.raises(AssertionError) as error:
        check(breaking(flat))
    assert message in str(error.value)


def test_a_carry_that_another_one_takes_over_is_made_by_the_body():
    """The body of the loop knows it, though no equation makes it."""
    flat = program(SOURCE)
    (first,) = flat.loops[0].carries
    second = Carry(fresh(), first.inner, flat.invars[1], fresh())
    check(with_loop(flat, carries=(first, second)))


PLACED = {
    "other nodes": (lambda f: replace(f, nodes=tuple(replace(n) for n in f.nodes)), "placed nowhere"),
    "no such submesh": (lambda f: on(f, "sin", 4), "on a submesh that is not there"),
    "elsewhere": (lambda f: replace(f, tasks={"one": replace_mesh(f.tasks["one"])}), "one is not where it has to be"),
    "no home": (lambda f: replace(f, placement=replace(f.placement, home={})), "has no home"),
}


def on(flat, name, submesh):
    places = {**flat.placement.node, node(flat, name): (submesh,)}
    return replace(flat, placement=replace(flat.placement, node=places))


def replace_mesh(task):
    return type(task)(task.name, mesh=Mesh(jax.devices()[1:2], ("x",)))


@pytest.mark.parametrize("name", PLACED)
def test_a_placement_is_that_of_its_program(name):
    """One of other nodes, or one that contradicts a task, is none."""
    flat = run("place", program(SOURCE.replace("results: e", "results: e, f")))
    check(flat)
    breaking, message = PLACED[name]
    with pytest.raises(AssertionError) as error:
        check(breaking(flat))
    assert message in str(error.value)
