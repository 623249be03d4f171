"""Long scans around tasks of one submesh: a recurrent cell, a rollout. They stay loops, and give what plain JAX gives."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import manymesh as mm
from manymesh._passes._flatten import UNROLLED
from stages import assert_agrees

WIDTH, LONG = 4, UNROLLED + 8
cell = mm.task(lambda w, h, x: jnp.tanh(h @ w + x), "cell", devices=[0])
other = mm.task(lambda w, h: jnp.tanh(h @ w), "other", devices=[0])
head = mm.task(lambda w, h: jnp.mean((h @ w) ** 2), "head", devices=[1])
rng = np.random.default_rng(0)
params = {k: jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 4, jnp.float32) for k in ("cell", "other", "head")}


def recurrent(length, second=None):
    """The loss of a recurrent network: parameters, and float32[batch, length, WIDTH]."""

    def loss(p, xs):
        def step(h, x):
            h = cell(p["cell"], h, x)
            return (h if second is None else second(p["other"], h)), h.sum()

        h, sums = lax.scan(step, jnp.zeros_like(xs[:, 0]), jnp.swapaxes(xs, 0, 1)[:length])
        return head(p["head"], h) + 1e-3 * jnp.mean(sums)

    return loss


def batch(size, length=LONG):
    return jnp.asarray(rng.normal(size=(size, length, WIDTH)), jnp.float32)


@pytest.mark.parametrize("second", [None, other], ids=["one task", "two tasks"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble-h1"])
def test_a_recurrent_network_in_a_pipeline(second, schedule):
    """A fragment for each stage and pass, as if the scan were in the task."""
    step = mm.microbatch(
        jax.value_and_grad(recurrent(LONG, second)), argnum=1, num_microbatches=4, schedule=schedule, reduce="mean"
    )
    args = params, batch(8)
    program = mm.jit(step).lower(*args).program
    assert len([f for f in program.fragments if f.loop is not None]) <= 6
    assert program.loops[0].in_order
    assert_agrees(step, *args)


def test_only_long_scans_of_one_submesh_stay_whole():
    """Shorter ones are layers; one that goes back and forth between submeshes cannot be one fragment."""
    for length, second, count in ((UNROLLED, None, UNROLLED), (LONG, None, 1)):
        program = mm.jit(recurrent(length, second)).lower(params, batch(2)).program
        assert [f.submesh for f in program.fragments if f.tasks].count(0) == count
    there = mm.task(lambda w, h: jnp.tanh(h @ w), "there", devices=[2])
    program = mm.jit(recurrent(LONG, there)).lower(params, batch(2)).program
    assert len(program.fragments) > LONG


def test_also_inside_of_a_short_scan():
    """Steps of training that a scan runs, each with a rollout."""

    def train(p, xs):
        def step(p, _):
            value, grads = jax.value_and_grad(recurrent(LONG))(p, xs)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

        return lax.scan(step, p, None, length=2)

    args = params, batch(2)
    tasks = [f.tasks for f in mm.jit(train).lower(*args).program.fragments if f.submesh == 0 and f.tasks]
    assert len(tasks) <= 4
    assert_agrees(train, *args)


def test_gradients_and_rematerialisation():
    """Also in a scan of scans, and where the cell is computed again."""

    def nested(p, xs):
        rows = jnp.swapaxes(xs, 0, 1).reshape(2, LONG // 2, -1, WIDTH)

        def step(h, x):
            return jax.checkpoint(lambda h, x: cell(p["cell"], h, x))(h, x), None

        h, _ = lax.scan(lambda h, row: lax.scan(step, h, row), jnp.zeros_like(xs[:, 0]), rows)
        return head(p["head"], h)

    assert_agrees(jax.value_and_grad(nested), params, batch(2))
    long = lambda p, xs: nested(p, jnp.tile(xs, (1, 4, 1))[:, :LONG])  # noqa: E731
    assert_agrees(jax.value_and_grad(jax.checkpoint(recurrent(LONG))), params, batch(2))
    assert_agrees(jax.value_and_grad(long), params, batch(2))


def test_a_rollout_with_random_keys_conditionals_and_effects():
    """What a reinforcement learner does on one submesh, whose results another one reads."""
    seen = []
    policy = mm.task(lambda w, s: jnp.tanh(s @ w), "policy", devices=[0])

    def step(p, s, key):
        def body(c, i):
            s, key = c
            key, now = jax.random.split(key)
            a = policy(p["cell"], s) + 0.1 * jax.random.normal(now, s.shape)
            s = lax.cond(i % 7 == 0, lambda s: jnp.zeros_like(s) + a, lambda s: s + 0.1 * a, s)
            jax.debug.callback(lambda i: seen.append(int(i)), i)
            return (s, key), jnp.mean(s)

        (s, _), rewards = lax.scan(body, (s, key), jnp.arange(LONG))
        return head(p["head"], s), rewards

    args = params, jnp.ones((2, WIDTH)), jax.random.key(0)
    assert_agrees(step, *args)
    jax.effects_barrier()
    assert sorted(seen) == sorted([*range(LONG)] * 2)  # here and in the reference


def test_in_a_while_loop_of_the_host():
    """One program for each time around, with the scan in it."""

    def step(p, xs):
        def body(c):
            i, x = c
            return i + 1, x + recurrent(LONG)(p, xs) * 1e-3

        return lax.while_loop(lambda c: (c[0] < 3) & (c[1] < 9.0), body, (0, jnp.float32(0)))

    assert_agrees(step, params, batch(2))


def rollouts(second, outer, inner=LONG):
    """A scan over updates around a scan over steps."""

    def run(p, h):
        def step(h, _):
            return second(p["other"], cell(p["cell"], h, 0.0)), None

        return lax.scan(lambda h, _: lax.scan(step, h, None, inner), h, None, outer)[0]

    return run


def test_very_many_iterations_over_several_submeshes_are_told_of_before_they_are_unrolled():
    """What a training loop with rollouts has: it would take hours without a word."""
    there = mm.task(lambda w, h: jnp.tanh(h @ w), "there", devices=[2])
    args = params, jnp.ones((2, WIDTH))
    with pytest.raises(mm.errors.PlacementError, match=r"unrolled: 4000 iterations.* one submesh.* loop of Python"):
        mm.jit(rollouts(there, 100), strict=True).lower(*args)
    assert len(mm.jit(rollouts(other, 100), strict=True).lower(*args).program.fragments) <= 6  # one submesh, one loop


def test_fewer_iterations_that_compute_much_outside_of_tasks_are_told_of_too():
    """As those of an epoch, each with an update of all parameters."""
    there = mm.task(lambda w, h: jnp.tanh(h @ w), "there", devices=[2])

    def run(p, x, operations):
        @jax.jit
        def change(h):
            for _ in range(operations):
                h = jnp.sin(h)
            return h

        def body(h, _):
            return change(there(p["other"], cell(p["cell"], h, 0.0))), None

        return lax.scan(lambda h, _: lax.scan(body, h, None, 10), x, None, 20)[0]

    args = params, jnp.ones((2, WIDTH))
    with pytest.raises(mm.errors.PlacementError, match=r"unrolled: 200 iterations.* with 20200 operations"):
        mm.jit(lambda p, x: run(p, x, 101), strict=True).lower(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mm.jit(lambda p, x: run(p, x, 1)).lower(*args)


def test_microbatches_are_no_iterations():
    there = mm.task(lambda w, h: jnp.tanh(h @ w), "there", devices=[2])
    step = mm.microbatch(rollouts(there, 1), argnum=1, num_microbatches=32, reduce="concat")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mm.jit(step).lower(params, jnp.ones((32, WIDTH)))
