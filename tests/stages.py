"""Two tasks on two devices, and what it means for a compiled step to agree with the reference mode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import manymesh as mm

WIDTH = 4


def dense(w, x):
    return jnp.tanh(x @ w)


front = mm.task(dense, "front", devices=[0])
back = mm.task(dense, "back", devices=[1])


def loss(params, x):
    """Mean square of two dense layers: parameters ``{"front", "back"}`` of shape [WIDTH, WIDTH], x of [rows, WIDTH]."""
    return jnp.mean(back(params["back"], front(params["front"], x)) ** 2)


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) for k in ("front", "back")}


def rows(count=8, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, WIDTH)), jnp.float32)


def microbatched(fun=None, *, argnum=1, num_microbatches=4, reduce="mean", **options):
    """`mm.microbatch` of the loss and its gradients, with short defaults."""
    fun = jax.value_and_grad(loss) if fun is None else fun
    return mm.microbatch(fun, argnum=argnum, num_microbatches=num_microbatches, reduce=reduce, **options)


def initial(init, *args, **kwargs):
    """Variables of a Linen module as its ``init`` describes them, with numbers of NumPy.

    Called as it is, ``init`` compiles a program for each line of the model.
    """
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(init, *args, **kwargs)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) * 0.3, s.dtype), shapes)


def reference(fun, *args, **kwargs):
    """The call in reference mode."""
    with mm.ignore_transforms():
        return fun(*args, **kwargs)


def on_host(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None)


def assert_same(actual, expected, tolerance=2e-5):
    """Structure, shapes and dtypes are equal; values to within float tolerance, integers exactly."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array)
        assert (a.shape, a.dtype) == (jnp.shape(e), e.dtype)
        if jnp.issubdtype(e.dtype, jnp.floating):
            np.testing.assert_allclose(on_host(a), on_host(e), rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(on_host(a), on_host(e))


def assert_agrees(fun, *args, tolerance=2e-5, **kwargs):
    """The compiled function equals the same function in reference mode. Returns the compiled one's result."""
    actual = mm.jit(fun)(*args, **kwargs)
    assert_same(actual, reference(jax.jit(fun), *args, **kwargs), tolerance)
    return actual
