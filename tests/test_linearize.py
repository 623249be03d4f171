"""Tasks are differentiated as fast as plain functions, and to the same equations as without that."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax._src.interpreters import ad

import manymesh as mm
from manymesh import _compat, _repeats
from manymesh._layout import _solve
from manymesh._runtime import _lower


def layers(count):
    """A loss of one task, a Python loop over so many equal layers."""

    def body(weights, x):
        for w in weights:
            x = x + jnp.sin(x @ w) * 2.0 - jax.nn.gelu(x) / jnp.sqrt(jnp.sum(x**2) + 1)
        return x

    task = mm.task(body, "layers", devices=[0])
    weights = [jnp.full((4, 4), 0.1 * (i + 1)) for i in range(count)]
    return jax.value_and_grad(lambda weights, x: jnp.sum(task(weights, x))), weights, jnp.ones((2, 4))


def other_kinds(_):
    """What has rules, constants, integers or several results of its own."""

    def body(w, x):
        y = jax.nn.relu(x) * w[0] + jnp.where(x > 0, x, -0.0) + jnp.where(x > 0, x, 0.0)
        top, where = jax.lax.top_k(jnp.abs(y), 2)
        y = jax.checkpoint(lambda v: jnp.exp(v) * v)(y) + top.sum() + where.sum() + jnp.maximum(3.0, w[1])
        return jax.lax.scan(lambda c, a: (jnp.tanh(c * a), c), y, y)[0] + jnp.cumsum(y, axis=1) * jnp.float32(3)

    task = mm.task(body, "kinds", devices=[0])
    return (
        jax.value_and_grad(lambda w, x: jnp.sum(task(w, x) ** 2)),
        jnp.array([0.3, 0.4]),
        jnp.linspace(-1.0, 1, 16).reshape(4, 4),
    )


def traced(fun, *args):
    jax.clear_caches()
    return str(mm.jit(fun).trace(*args).jaxpr)


def test_equal_equations_are_linearized_once(monkeypatch):
    monkeypatch.setattr(_repeats, "find_runs", lambda tokens, weights: [])  # those in no block of equal ones
    anew = []
    linearize = ad.linearize_from_jvp
    monkeypatch.setattr(ad, "linearize_from_jvp", lambda *args: anew.append(1) or linearize(*args))

    def times(count):
        del anew[:]
        traced(*layers(count))
        return len(anew)

    # The border of a task says which operand it is, so that each operand's is another equation.
    few, many = times(3), times(12)
    assert 0 < few <= many <= few + 12 - 3


@pytest.mark.parametrize("make", [layers, other_kinds])
def test_what_is_left_is_what_was_left_without_it(make, monkeypatch):
    fun, *args = make(3)
    fast = traced(fun, *args)
    monkeypatch.setattr(_compat.Apart, "__call__", lambda self, jaxpr: jaxpr)
    slow = traced(fun, *args)
    if make is layers:
        assert slow == fast
    # JAX 0.12 sums the cotangents of what an equation reads twice (x * x) at once, as it does in a plain program.
    kinds = [Counter(re.findall(r"\] = (\w+)|:\S+ = (\w+)", text)) for text in (slow, fast)]
    assert kinds[0] == kinds[1] and len(kinds[0]) > 8


@pytest.mark.parametrize("make", [layers, other_kinds])
def test_values(make):
    fun, *args = make(3)
    found, wanted = mm.jit(fun)(*args), jax.jit(fun)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert jnp.allclose(a, b, rtol=2e-5, atol=1e-6), (a, b)


def test_a_fragment_is_not_traced_again(monkeypatch):
    fun, *args = layers(2)
    monkeypatch.setattr(_solve, "fragment_function", None)
    mm.jit(fun)(*args)


def test_the_smallest_fragment_is_compiled_first_then_the_largest(monkeypatch):
    small = mm.task(lambda x: x + 1, "small", devices=[0])
    large = mm.task(lambda x: sum(jnp.sin(x * i) for i in range(9)), "large", devices=[1])
    inside = mm.task(jax.jit(lambda x: jnp.cos(jnp.sin(x)) * x), "inside", devices=[2])
    asked = []
    run = _lower.run_requests
    monkeypatch.setattr(_lower, "run_requests", lambda names, *rest: asked.extend(names) or run(names, *rest))
    assert mm.jit(lambda x: inside(large(small(x))))(jnp.ones(())).shape == ()
    assert asked == ["small", "large", "inside"]
