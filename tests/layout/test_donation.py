"""Buffers are handed on in pairs that are chosen once the layouts are known."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import manymesh as mm
from manymesh._layout._donation import donation_pairs
from stages import assert_same


def aliases(executable):
    """(input, result) pairs of an executable, as XLA has them."""
    head = executable.as_text().splitlines()[0]
    return {(int(i), int(o or 0)) for o, i in re.findall(r"\{(\d*)\}: \((\d+), \{\}, \w+-alias\)", head)}


@pytest.mark.parametrize("axes", [(None, "model"), ("data", None), ("model", "data")])
def test_xla_has_the_pairs_of_the_layout(axes):
    """Input by input and result by result, in a step whose values have one global shape and several layouts."""
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    first, second = (Mesh(d, ("data", "model")) for d in devices)
    a = mm.task(lambda w, x: jnp.tanh(x @ mm.with_sharding_constraint(w, axes)), "a", mesh=first)
    b = mm.task(lambda w, h: jnp.mean((h @ w) ** 2), "b", mesh=second)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))

    def step(p, s, x):
        value, g = jax.value_and_grad(lambda p: b(p[1], a(p[0], x)))(p)
        updates, s = optimizer.update(g, s, p)
        return optax.apply_updates(p, updates), s, value

    p = tuple(jax.random.normal(jax.random.key(i), (8, 8)) for i in range(2))
    s, x = optimizer.init(p), jnp.ones((8, 8))
    with mm.ignore_transforms():
        expected = mm.jit(step)(p, s, x)
    lowered = mm.jit(step, donate_argnums=(0, 1)).lower(p, s, x)
    compiled = lowered.compile()
    pairs = lowered.layout.donation
    assert sum(map(len, pairs.values())) >= 4
    for f, executable in zip(compiled.program.fragments, compiled._lowered.executables, strict=True):
        chosen = pairs.get(f.index, ())
        assert aliases(executable) == set(chosen)
        for k, o in chosen:
            pieces = [
                lowered.layout.sharding(v, f.submesh).shard_shape(v.aval.shape) for v in (f.invars[k], f.outvars[o])
            ]
            assert pieces[0] == pieces[1]
    assert_same(compiled(p, s, x), expected)


def test_only_what_may_be_donated_and_only_once():
    """An input that is not among those that may be donated stays, and each result takes over one buffer."""
    f = mm.jit(mm.task(lambda x, y: (x + y, x * y), devices=[0, 1], device_axes=("d",)))
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    lowered = f.lower(x, x)
    program, layout = lowered.program, lowered.layout
    assert donation_pairs(program, layout, {0: ()}) == {}
    assert donation_pairs(program, layout, {0: (1,)}) == {0: ((1, 0),)}
    assert donation_pairs(program, layout, {0: (0, 1)}) == {0: ((0, 0), (1, 1))}
