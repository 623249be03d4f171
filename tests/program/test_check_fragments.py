"""The checker of programs of fragments: each rule fails on a program that is broken for it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from flat import program as flat_program
from manymesh import _compat
from manymesh._passes._fragments import cut
from manymesh._passes._run import run_passes
from manymesh._program._check_fragments import check

SOURCE = """
    tasks: one 0, two 1
    inputs: x f32[512], y f32[512]
    loop 0: 2 microbatches, gpipe
    xs b f32[256] = p, q
    carry a f32[256] = zero, then t, at last total
    ys c f32[256], d f32[256] = k
    p = x[0:256]
    q = x[256:512]
    zero = lax.full((256,), 0.0)
    0: h = one: b * 2.0
    0: k = two: lax.sin(h)
    0: t = a + k
    e = two: d * total
    f = one: y * 3.0
    results: e, f
"""


@pytest.fixture(scope="module")
def program():
    """Two tasks in a loop, and something before and after it."""
    built = cut(run_passes(flat_program(SOURCE)))
    check(built)
    return built


def fresh(shape=(256,)):
    return _compat.new_var(jax.core.ShapedArray(shape, jnp.dtype("float32")))


def with_fragment(p, name, **fields):
    return replace(p, fragments=tuple(replace(f, **fields) if f.name == name else f for f in p.fragments))


def with_jaxpr(p, name, **fields):
    (f,) = [f for f in p.fragments if f.name == name]
    return with_fragment(p, name, jaxpr=f.jaxpr.replace(**fields))


def with_loop(p, **fields):
    return replace(p, loops=(replace(p.loops[0], **fields),))


def with_carry(p, **fields):
    names = ("inner", "out", "init", "final")
    (carry,) = p.loops[0].carries
    return with_loop(p, carries=(tuple((dict(zip(names, carry, strict=True)) | fields).values()),))


BROKEN = {
    "in no scope": (lambda p: replace(p, order=p.order[1:]), "a fragment is in no scope, or in two"),
    "index": (lambda p: replace(p, fragments=p.fragments[::-1]), "a fragment"),
    "loop": (lambda p: replace(p, loops=p.loops * 2), "a loop runs once"),
    "submesh": (lambda p: with_fragment(p, "two_2", submesh=5), "on a submesh that is not there"),
    "stage": (lambda p: with_loop(p, placement=p.loops[0].placement[::-1]), "is in a stage elsewhere"),
    "reads": (lambda p: with_jaxpr(p, "one_2", invars=[fresh()]), "fragment 'one_2' reads f32[256], which is not on"),
    "makes twice": (lambda p: with_jaxpr(p, "one_2", outvars=[p.invars[1]]), "makes f32[512], which is there already"),
    "not sent": (lambda p: replace(p, edges=()), "fragment 'two' reads f32[256], which is not on its submesh"),
    "edge from nowhere": (
        lambda p: replace(p, edges=(*p.edges, replace(p.edges[0], var=fresh()))),
        "an edge of f32[256] begins where nothing makes it",
    ),
    "edge to itself": (
        lambda p: replace(p, edges=(*p.edges, replace(p.edges[0], target=p.edges[0].source))),
        "an edge of f32[256] ends where it begins",
    ),
    "carry's shape": (lambda p: with_carry(p, init=fresh((3,))), "a carry of f32[256] becomes f32[3]"),
    "carry's start": (lambda p: with_carry(p, init=fresh()), "what f32[256] begins with is not on submesh 1"),
    "carry's end": (lambda p: with_carry(p, out=fresh()), "a carry leaves f32[256] elsewhere"),
    "number of pieces": (
        lambda p: with_loop(p, xs=tuple((v, outer[:1]) for v, outer in p.loops[0].xs)),
        "f32[256] has 1 pieces",
    ),
    "piece": (
        lambda p: with_loop(p, xs=tuple((v, (fresh(), fresh())) for v, _ in p.loops[0].xs)),
        "what f32[256] begins with is not on submesh 0",
    ),
    "collected": (
        lambda p: with_loop(p, ys=tuple((fresh(), outer) for _, outer in p.loops[0].ys)),
        "f32[256] is collected where it is not",
    ),
    "number of copies": (
        lambda p: with_loop(p, ys=tuple((v, outer[:1]) for v, outer in p.loops[0].ys)),
        "1 copies of f32[256] are collected",
    ),
    "result": (lambda p: replace(p, outputs=((p.outputs[0][0], 0),)), "a result of f32[256] is not on submesh 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_fails_on_a_program_broken_for_it(program, name):
    """And says what is wrong."""
    breaking, message = BROKEN[name]
    with pytest.raises(AssertionError) as error:
        check(breaking(program))
    assert message in str(error.value)


def test_a_carry_is_there_where_it_is_read_alone(program):
    """A body that reads an accumulator on a submesh to which nothing sends what the microbatch before left."""
    (inner, *_), *_ = program.loops[0].carries
    broken = with_jaxpr(program, "one", invars=[*program.fragments[program.order[0]].invars[:0], inner])
    with pytest.raises(AssertionError, match=r"what f32\[256\] begins with is not on submesh 0"):
        check(broken)
