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


@pytest.mark.parametrize("microbatches", [None, 4])
@pytest.mark.parametrize("name", ["adamw", "momentum", "adan"])
def test_the_buffer_of_a_state_goes_to_its_next_value(name, microbatches):
    """Also where gradients, which die in the update too, have its shape; so XLA copies no moment before it writes one."""
    optimizer = {"adamw": optax.adamw(0.1), "momentum": optax.sgd(0.1, momentum=0.9), "adan": optax.adan(0.1)}[name]
    tasks = [mm.task(lambda p, x: jnp.tanh(x @ p["w"] @ p["v"]), f"t{i}", devices=[i]) for i in range(2)]

    def loss(p, x):
        for task, q in zip(tasks, p, strict=True):
            x = task(q, x)
        return jnp.mean(x**2)

    def step(state, x):
        grad = jax.value_and_grad(loss)
        if microbatches:
            grad = mm.microbatch(grad, argnum=1, num_microbatches=microbatches, schedule="1f1b", reduce="mean")
        value, grads = grad(state[0], x)
        updates, moments = optimizer.update(grads, state[1], state[0])
        return value, (optax.apply_updates(state[0], updates), moments)

    p = [{name: np.full((8, 8), 0.1, np.float32) for name in "wv"} for _ in tasks]
    state = p, jax.tree.map(np.asarray, optimizer.init(p))
    lowered = mm.jit(step, donate_argnums=0).lower(state, np.ones((8, 8), np.float32))
    after = {v: out for out, v in lowered.layout.replaces.items()}
    for loop in lowered.program.loops:
        after |= {inner: out for inner, out, _, _ in loop.carries}
    compiled, kept = lowered.compile(), 0
    for f, executable in zip(lowered.program.fragments, compiled._lowered.executables, strict=True):
        pairs = [(f.invars[k], f.outvars[o]) for k, o in lowered.layout.donation.get(f.index, ())]
        states = [(v, out) for v, out in pairs if after.get(v) in f.outvars]
        assert all(out is after[v] for v, out in states), f.name
        kept += len(states)
        # A backward pass reads the weights that it also updates; Adan reads the gradient of the last step beside the new one.
        if states and not f.tasks and name != "adan":
            assert not re.search(r"f32\[8,8\]\S* copy\(", executable.as_text()), f.name
    assert kept >= len(jax.tree.leaves(state[0])) * (2 if microbatches is None else 3)


def test_a_stack_that_a_loop_makes_anew_is_not_written_over():
    """A loop that cuts slices off a cache and stacks up the next one needs both: XLA would stack up a third, and copy it."""

    def layers(x, ws, cache):
        def layer(x, each):
            w, kept = each
            kept = kept.at[1].set(x[0])
            return jnp.tanh(x @ w + kept.sum(0)), kept

        return jax.lax.scan(layer, x, (ws, cache))

    tasks = [mm.task(layers, f"layers_{i}", devices=[i]) for i in range(2)]

    def step(caches, ws, x):
        nexts = []
        for task, w, cache in zip(tasks, ws, caches, strict=True):
            x, cache = task(x, w, cache)
            nexts.append(cache)
        return nexts, x

    caches, ws = [jnp.ones((4, 64, 8))] * 2, [jnp.ones((4, 8, 8))] * 2
    x = jnp.ones((2, 8))
    with mm.ignore_transforms():
        expected = mm.jit(step)(caches, ws, x)
    lowered = mm.jit(step, donate_argnums=0).lower(caches, ws, x)
    compiled = lowered.compile()
    given = jax.tree.map(jnp.copy, caches)
    assert_same(compiled(given, ws, x), expected)
    assert all(cache.is_deleted() for cache in given)
    for stats in (e.memory_analysis() for e in compiled._lowered.executables):
        assert stats.temp_size_in_bytes < caches[0].nbytes
    for device, memory in compiled.memory_analysis().items():
        assert lowered.memory_analysis()[device].peak_bytes == pytest.approx(memory.peak_bytes, rel=0.1)
