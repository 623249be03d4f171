"""Calls that are opened."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from manymesh import _compat
from manymesh._program._calls import inlined_jaxpr


def test_opened_calls_keep_the_names_around_them():
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    @jax.jit
    def outer(x):
        with jax.named_scope("outer"):
            return inner(x) * 2

    def whole(x):
        with jax.named_scope("first"):
            x = outer(x)
        with jax.named_scope("second"):
            x = outer(x)
        return x + 1

    eqns, _ = inlined_jaxpr(jax.make_jaxpr(whole)(1.0))
    assert [(e.primitive.name, _compat.name_stack(e)) for e in eqns] == [
        ("sin", "first/outer/inner"), ("mul", "first/outer"),
        ("sin", "second/outer/inner"), ("mul", "second/outer"),
        ("add", ""),
    ]  # fmt: skip
