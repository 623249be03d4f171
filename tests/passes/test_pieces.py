"""Equations that read at known places, in equations for one dimension and piece each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import manymesh as mm
from manymesh import _compat
from manymesh._passes._flatten import flatten

X = np.random.default_rng(0).normal(size=(6, 4, 5)).astype("f4")
LINES = np.array([[3], [1]])
ORDER = np.array([4, 0, 2, 5, 1, 3])

READ = {
    "an index": lambda x: x[2],
    "the last": lambda x: x[jnp.int32(-1)],
    "two indices": lambda x: x[2, 1],
    "two computed indices": lambda x: x[jnp.int32(2), jnp.int32(-1)],
    "an index of the middle": lambda x: x[:, jnp.int32(2)],
    "an index and a slice": lambda x: x[2, 1:3],
    "steps": lambda x: x[1::2],
    "steps backwards": lambda x: x[::-2],
    "a window": lambda x: lax.dynamic_slice_in_dim(x, jnp.int32(2) * 2, 2),
    "a window moved inside": lambda x: lax.dynamic_slice(x, (jnp.int32(5), jnp.int32(0), jnp.int32(-2)), (2, 4, 5)),
    "all of it": lambda x: lax.dynamic_slice(x, (0, 0, 0), (6, 4, 5)),
    "rows": lambda x: x[np.array([1, 2, 3])],
    "rows of anywhere": lambda x: x[np.array([5, 0, 1, 0])],
    "columns": lambda x: x[:, np.array([1, 2])],
    "last columns": lambda x: x[..., jnp.array([3, 4])],
    "one in an array": lambda x: x[np.array([4])],
    "taken": lambda x: jnp.take(x, 3, axis=1),
    "taken in order": lambda x: jnp.take(x, ORDER[2], axis=0),
    "an entry of an order": lambda x: x[jnp.asarray(ORDER)[jnp.int32(1)]],
    "clipped": lambda x: x.at[jnp.int32(3)].get(mode="clip"),
    "along an axis": lambda x: jnp.take_along_axis(x, jnp.full((1, 1, 1), 2), 0),
}
DATA = {  # the places depend on data, are outside, or are too many
    "an argument": lambda x: x[x[0, 0, 0].astype(int)],
    "outside": lambda x: x.at[jnp.int32(7)].get(mode="fill", fill_value=0.5),
    "rows of a column": lambda x: x[:, np.array([0, 2])],
    "a table of places": lambda x: x[LINES],
    "many": lambda x: jnp.concatenate([x] * 6)[np.arange(34) // 2 * 2],
}
PLACES = {"dynamic_slice", "dynamic_update_slice", "gather", "scatter-add"}


def both(read):
    """What is read and its gradient, each entry with a weight of its own."""

    def fun(x):
        y, pull = jax.vjp(read, x)
        return y, pull(jnp.arange(1, y.size + 1, dtype=y.dtype).reshape(y.shape))[0]

    return fun


def flat(fun):
    traced = mm.jit(fun).trace(X)
    return flatten(traced.jaxpr, traced._record)


def evaluated(program):
    """The results of a flat program without tasks."""
    env = dict(zip(program.invars, [*program.consts.values(), X], strict=True))

    def read(v):
        return env[v] if _compat.is_var(v) else v.val

    for n in program.nodes:
        out = n.eqn.primitive.bind(*[read(v) for v in n.eqn.invars], **n.eqn.params)
        env.update(zip(n.eqn.outvars, out if n.eqn.primitive.multiple_results else [out], strict=True))
    return [read(v) for v in program.outvars]


@pytest.mark.parametrize("name", [*READ, *DATA])
def test_pieces_are_what_was_read(name):
    """And their gradients are put where they were read, added up where that was twice."""
    fun = both({**READ, **DATA}[name])
    program = flat(fun)
    for got, want in zip(evaluated(program), fun(jnp.asarray(X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert (name in DATA) == (not PLACES.isdisjoint(n.primitive for n in program.nodes))


@pytest.mark.parametrize("name", READ)
def test_each_equation_cuts_one_dimension(name):
    for n in flat(both(READ[name])).nodes:
        if n.primitive == "slice":
            cut = zip(
                n.eqn.params["start_indices"], n.eqn.params["limit_indices"], n.eqn.invars[0].aval.shape, strict=True
            )
            assert sum((a, b) != (0, size) for a, b, size in cut) == 1
            assert set(n.eqn.params["strides"] or [1]) == {1}
        if n.primitive == "pad":
            assert sum(any(config) for config in n.eqn.params["padding_config"]) == 1
