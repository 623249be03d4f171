"""What numbers of a program are, where no argument has a say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from manymesh import _compat
from manymesh._passes._known import _RULES, LARGEST, Known
from manymesh._program._calls import inlined

N = np.array([5, -3, 0, 7, 2], np.int32)
M = np.array([2, 4, -5, 3, -2], np.int32)

SAID = {
    "arithmetic": lambda n, m: (abs(n) + n * m - (-m), jnp.sign(n), lax.clamp(-1, n, 3)),
    "division": lambda n, m: (n // m, n % m, lax.div(n, m), lax.rem(n, m), jnp.divmod(m, 3)),
    "the smallest integer": lambda n, m: (
        lax.div(np.int8(-128), m.astype(np.int8)),
        lax.rem(np.int8(-128), m.astype(np.int8)),
    ),
    "many cases": lambda n, m: lax.select_n(jnp.int32(67), *(jnp.int32(k) + n for k in range(70))),
    "overflow": lambda n, m: n * jnp.int32(2**30) + m.astype(jnp.int8) * jnp.int8(100),
    "bits": lambda n, m: (n & m, n | m, n ^ m, ~n),
    "comparisons": lambda n, m: (n < m, n <= m, n > m, n >= m, n == m, n != m, ~(n < m)),
    "extremes": lambda n, m: (jnp.maximum(n, m), jnp.minimum(n, m)),
    "selection": lambda n, m: (jnp.where(n < m, n, m), lax.select_n(n < 2, n, m), lax.select_n(jnp.int32(1), n, m, n)),
    "shapes": lambda n, m: (n[None].T, n.reshape(5, 1), m[::-1], jnp.stack([n, m], 1), jnp.concatenate([m, n])),
    "broadcasts": lambda n, m: (n + m[:, None], jnp.broadcast_to(n[:, None], (5, 2)), jnp.broadcast_to(n, (3, 5))),
    "counting": lambda n, m: (jnp.arange(4), lax.broadcasted_iota(jnp.int32, (2, 3), 1), jnp.arange(2, 9, 3)),
    "parts": lambda n, m: (n[1:4:2], n[3], lax.dynamic_slice(n, (jnp.int32(9),), (2,)), n[jnp.int32(-2)]),
    "types": lambda n, m: (
        n.astype(jnp.uint8),
        (n > 0).astype(jnp.int16),
        n.astype(bool),
        jnp.full(3, 2.7).astype(int),
    ),
    "copies": lambda n, m: jnp.array(n, copy=True),
    "spread": lambda n, m: (jnp.zeros((3, 2)), jnp.full((2,), 1.5, jnp.bfloat16)),
}


def learned(fun, *consts):
    """What `Known` says of the results of a function, and the equations that it was told."""
    closed = _compat.open_jaxpr(jax.make_jaxpr(lambda: fun(*map(jnp.asarray, consts)))())
    known = Known()
    for v, c in zip(closed.constvars, closed.consts, strict=True):
        known.hold(v, c)
    eqns, alias = inlined(closed.eqns)
    for eqn in eqns:
        known.learn(eqn)
    return [known(alias.get(v, v) if _compat.is_var(v) else v) for v in closed.outvars], eqns


@pytest.mark.parametrize("name", SAID)
def test_numbers_are_what_jax_computes(name):
    found, _ = learned(SAID[name], N, M)
    expected = jax.tree.leaves(SAID[name](jnp.asarray(N), jnp.asarray(M)))
    for got, want in zip(found, expected, strict=True):
        assert got is not None and got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_every_rule_is_used():
    """So that none is a guess."""
    seen = {eqn.primitive.name for fun in SAID.values() for eqn in learned(fun, N, M)[1]}
    new = {"stack"} if jax.__version_info__ < (0, 10, 1) else set()  # there it is several equations
    assert _RULES.keys() - seen == new


def test_what_is_not_known():
    """Other numbers than integers, results that are not defined, what is large, and what depends on any of these."""
    large = np.arange(LARGEST + 1)
    said = [
        lambda n, m: n * 0.5,
        lambda n, m: lax.div(n, m - m),
        lambda n, m: lax.rem(n, m - m) + 1,
        lambda n, m: jnp.full(2, jnp.inf).astype(int),  # XLA makes it the largest
        lambda n, m: jnp.full(2, 2.0**31).astype(int),
        lambda n, m: jnp.full(2, jnp.nan, jnp.bfloat16).astype(int),
        lambda n, m: jnp.full(2, -1.5).astype(jnp.uint8),
        lambda n, m: jnp.asarray(large)[:2],
        lambda n, m: jnp.zeros(3) + 1,
        lambda n, m: jnp.cumsum(n),
    ]
    for fun in said:
        assert learned(fun, N, M)[0] == [None]


def test_zeros():
    """Also of more bytes than there are, as the gradient of a stack starts from that is planned for another machine."""
    closed = _compat.open_jaxpr(
        jax.make_jaxpr(
            lambda: (
                jnp.zeros((2, 3)),
                jnp.ones(2),
                jnp.arange(1),
                jnp.zeros(0),
                jnp.zeros((2**24, 2**24)),
                jnp.full(2, -0.0, jnp.bfloat16),
                jnp.full(2, 0j),
            )
        )()
    )
    known = Known()
    for eqn in closed.eqns:
        known.learn(eqn)
    assert [known.is_zero(v) for v in closed.outvars] == [True, False, True, False, True, False, True]
