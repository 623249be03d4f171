"""Trees that are equal to the last bit, and what to restore one like."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def assert_same_bits(found, expected):
    """Structure, dtypes, shardings and bits are the same."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(e)
        if isinstance(e, jax.Array):
            assert (a.sharding, a.aval.weak_type) == (e.sharding, e.aval.weak_type)
        if isinstance(e, (jax.Array, np.ndarray)):
            assert (a.shape, a.dtype) == (e.shape, e.dtype)
        if isinstance(e, jax.Array) and jnp.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def blank(state):
    """What to restore like: where and what, and none of the values."""
    return jax.tree.map(
        lambda x: (
            0
            if isinstance(x, int)
            else np.zeros_like(x)
            if isinstance(x, np.ndarray)
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        ),
        state,
    )
