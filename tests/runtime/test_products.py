"""Products over several dimensions that lie side by side are computed as products over one."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh

import manymesh as mm
from manymesh._compat import jaxprs_in, open_jaxpr
from manymesh._runtime._products import Products
from stages import assert_same, reference


def contracted(jaxpr):
    """For each product in a jaxpr, how many dimensions it is over."""
    found = []
    for eqn in open_jaxpr(jaxpr).eqns:
        if eqn.primitive is lax.dot_general_p:
            found.append(len(eqn.params["dimension_numbers"][0][0]))
        for inner in jaxprs_in(eqn):
            found += contracted(inner)
    return found


@st.composite
def products(draw):
    """Shapes of two factors and the dimensions that their product is over, in any order, next to others in any place."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    shapes, dims = [], []
    for _ in range(2):
        labels = draw(st.permutations([*range(len(sizes)), *("free",) * draw(st.integers(0, 2))]))
        shapes.append(tuple(2 if label == "free" else sizes[label] for label in labels))
        dims.append([labels.index(k) for k in range(len(sizes))])
    return shapes, dims


@given(products())
def test_the_same_numbers_over_no_more_dimensions(drawn):
    """Also where only some dimensions lie side by side, or in another order."""
    shapes, dims = drawn
    x, y = (jnp.asarray(np.random.default_rng(k).integers(-4, 4, s), jnp.float32) for k, s in enumerate(shapes))
    jaxpr = jax.make_jaxpr(lambda x, y: lax.dot_general(x, y, (dims, ((), ()))))(x, y)
    joined = Products().joined(jaxpr)
    np.testing.assert_array_equal(jaxpr_as_fun(joined)(x, y)[0], jaxpr_as_fun(jaxpr)(x, y)[0])
    pairs = sorted(zip(*dims, strict=True))
    runs = 1 + sum((a + 1, b + 1) != later for (a, b), later in zip(pairs, pairs[1:], strict=False))
    assert contracted(joined) == [runs]
    assert (joined is jaxpr) == (runs == len(pairs))


def test_what_a_product_says_of_itself_stays():
    """Its precision, and the type that it adds up in."""
    x = jnp.ones((2, 3, 4), jnp.bfloat16)

    def product(x):
        dims = ((0, 1), (0, 1)), ((), ())
        return lax.dot_general(x, x, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    before = jax.make_jaxpr(product)(x)
    (eqn,) = [e for e in Products().joined(before).eqns if e.primitive is lax.dot_general_p]
    kept = {"precision", "preferred_element_type"}
    assert {k: eqn.params[k] for k in kept} == {k: before.eqns[0].params[k] for k in kept}
    assert eqn.outvars == before.eqns[0].outvars


def test_inside_of_loops_branches_and_calls():
    """And equal layers stay one object, which JAX lowers once; what holds no such product stays what it was."""
    layer = jax.jit(lambda w, x: jnp.einsum("bti,btj->ij", x, x) @ w)

    def f(w, x):
        w = lax.fori_loop(0, 2, lambda i, w: layer(w, x), w)
        return lax.cond(w.sum() > 0, lambda w: layer(w, x), jnp.negative, layer(layer(w, x), x))

    w, x = jnp.ones((3, 3)), jnp.ones((2, 4, 3))
    before = jax.make_jaxpr(f)(w, x)
    after = Products().joined(before)
    assert set(contracted(before)) == {1, 2} and set(contracted(after)) == {1}
    calls = [e.params["jaxpr"] for e in after.eqns if e.primitive.name in ("jit", "pjit")]
    assert len(calls) == 2 and calls[0] is calls[1]
    np.testing.assert_array_equal(jaxpr_as_fun(after)(w, x)[0], f(w, x))
    assert Products().joined(after) is after


@pytest.mark.parametrize("devices", [1, 2])
def test_the_gradient_of_a_kernel_on_one_device(devices, monkeypatch):
    """One device moves neither factor; where a dimension may be sharded, products are left as they are."""
    joined, seen = Products.joined, []
    monkeypatch.setattr(Products, "joined", lambda self, jaxpr: seen.append(jaxpr) or joined(self, jaxpr))
    meshes = [Mesh(np.array(jax.devices()[k : k + devices]), ("data",)) for k in (0, 4)]
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"t{k}", mesh=mesh) for k, mesh in enumerate(meshes)]

    def step(w, x):
        loss = lambda w: jnp.mean(tasks[1](w, tasks[0](w, x)) ** 2)  # noqa: E731
        return jax.grad(loss)(w)

    w = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(4, 6, 8)).astype(np.float32)
    compiled = mm.jit(step).lower(w, x).compile()
    assert_same(compiled(w, x), reference(jax.jit(step), w, x))
    f, executable = next(
        pair
        for pair in zip(compiled.program.fragments, compiled._lowered.executables, strict=True)
        if "bwd" in pair[0].name
    )
    assert 2 in contracted(f.jaxpr)
    text = executable.as_text()
    moved = re.findall(r"f32\[([\d,]+)\]\S* transpose\(", text)
    sizes = [math.prod(map(int, dims.split(","))) for dims in moved]
    assert bool(seen) == (devices == 1)
    if devices == 1:
        assert all(size <= 64 for size in sizes), moved  # the gradient itself, at most
        assert "lhs_contracting_dims={0}" in text
