"""What several submeshes count from one microbatch to the next is counted beside their tasks, so that no stage waits for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flat import lines, looped, run, switch_off, text

BODY = """
    tasks: front 0, back {back}
    inputs: x f32[4,4], n i32[]
    loop 0: 2 microbatches, gpipe
    xs b f32[2,4] = p, q
    carry c i32[] = n, then {then}, at last last
    carry a f32[2,4] = p, then t, at last total
    p = x[0:2]
    q = x[2:4]
    {{}}
    results: total, last
"""
STAGES = ("h, d = front: (lax.tanh(b * c), c + 2)", "y, e = back: (lax.exp(h * d), d * 3)", "t = a + y")


def body(*equations, back=1, then="e"):
    return looped(BODY.format(back=back, then=then), *equations)


def test_a_count_that_goes_through_all_stages_is_made_beside_them():
    """Each of them reads it as before."""
    assert lines(run("remove_dead", run("count_beside", body(*STAGES)))) == text("""
        inputs: a f32[4,4], b i32[]
        loop 0 step: 2 microbatches
          xs c f32[2,4] = d, e
          carry f i32[] = b, then g, at last h
          carry i f32[2,4] = d, then j, at last k
        d f32[2,4] = slice(a) start_indices=(0, 0) limit_indices=(2, 4)
        e f32[2,4] = slice(a) start_indices=(2, 0) limit_indices=(4, 4)
        0: l f32[2,4] = task front(c, f)
        0: m i32[] = add(f, 2) [on {'unnamed_0': 1}]
        0: n f32[2,4] = task back(l, m)
        0: g i32[] = mul(m, 3) [on {'unnamed_0': 1}]
        0: j f32[2,4] = add(i, n)
        results: k, h
    """)


@pytest.mark.parametrize(
    "equations, more",
    [
        (STAGES, {"back": 0}),  # on one submesh: it is there
        (("h, d = front: (lax.tanh(b), c + 2)", "y = back: lax.exp(h * d)", "t = a + y"), {"then": "d"}),
        (("h = front: lax.tanh(b * c)", "y = back: lax.exp(h)", "t = a + y", "d = c + 1"), {"then": "d"}),
        (("h, d = front: (b * c, c + 2)", "y, e = back: (h * d, d + jnp.int32(jnp.sum(h)))", "t = a + y"), {}),
        (("h, d = front: (b * c, jnp.argmax(b))", "y, e = back: (h * d, d + c)", "t = a + y"), {}),
    ],
    ids=["one submesh", "its own stage", "outside", "of the data", "of the data before"],
)
def test_what_waits_for_nothing_or_for_the_data_stays(equations, more):
    """Where nothing would wait less, the task keeps what it makes."""
    flat = body(*equations, **more)
    assert run("count_beside", flat) is flat


def test_what_takes_turns_with_a_value_of_the_data_stays():
    """It would wait for that one all the same."""
    flat = looped(
        """
        tasks: front 0, back 1
        inputs: x f32[4,4], n i32[]
        loop 0: 2 microbatches, gpipe
        xs b f32[2,4] = p, q
        carry c i32[] = n, then e, at last last
        carry s i32[] = n, then u, at last seen
        carry a f32[2,4] = p, then t, at last total
        p = x[0:2]
        q = x[2:4]
        {}
        results: total, last, seen
        """,
        "h, d = front: (lax.tanh(b * c), c + 2)", "y, e, u = back: (lax.exp(h * d), d * s, jnp.int32(jnp.sum(h)))", "t = a + y",
    )  # fmt: skip
    assert run("count_beside", flat) is flat


def test_a_number_that_a_task_hands_on_is_the_one_that_it_got():
    """No equation makes it."""
    flat = body("h, d = front: (lax.tanh(b * c), c)", "y, e = back: (lax.exp(h * d), d + 1)", "t = a + y")
    after = lines(run("remove_dead", run("count_beside", flat)))
    assert "0: g i32[] = add(f, 1)" in after and "task back(l, f)" in after


def drawn(rng):
    """A model of several stages on drawn submeshes, which count, and draw of keys, in all ways that a user may write."""
    count = int(rng.integers(2, 5))
    at = [int(k) for k in rng.integers(0, 3, count)]
    if len(set(at)) == 1:
        at[-1] = (at[0] + 1) % 3
    ways = [int(k) for k in rng.integers(0, 6, count)]
    factors = rng.integers(1, 5, count)

    inside = [bool(b) for b in rng.integers(0, 3, count)]

    def stage(i):
        def counted(state):
            """What it draws of, and the next state."""
            key, n, old = state["key"], state["n"], state["old"]
            sub = key
            if ways[i] == 0:
                n = n + int(factors[i])
            elif ways[i] == 1:
                n, old = n * int(factors[i]) + 1, n
            elif ways[i] == 2:
                key, sub = jax.random.split(key)
            elif ways[i] == 3:
                n = jnp.where(n > 20, 0, n + 3)
            elif ways[i] == 4:
                old, n = n, old
            else:
                sub = jax.random.fold_in(key, n)
                n = jax.jit(lambda n: jnp.bitwise_xor(n, int(factors[i])))(n)
            return sub, {"key": key, "n": n, "old": old}

        def layer(w, x, state, sub=None):
            if inside[i]:
                sub, state = counted(state)
            x = x * jax.random.bernoulli(sub, 0.8, x.shape)
            return jnp.tanh(x @ w) * (1 + 0.01 * state["n"]) + 0.01 * state["old"], state

        task = mm.task(layer, f"stage{i}", devices=[at[i]])
        return task if inside[i] else lambda w, x, state: (task(w, x, state, counted(state)[0])[0], counted(state)[1])

    stages = [stage(i) for i in range(count)]

    def loss(ws, x, state):
        for layer, w in zip(stages, ws, strict=True):
            x, state = layer(w, x, state)
        return jnp.mean(x**2), state

    def grad(ws, x, state):
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(ws, x, state)
        return (value, grads), state

    schedule = str(rng.choice(["gpipe", "1f1b"]))
    loop = mm.microbatch(grad, argnum=1, num_microbatches=4, schedule=schedule, state_argnum=2, reduce="mean")
    ws = [jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for _ in range(count)]
    state = {"key": jax.random.key(int(rng.integers(100))), "n": jnp.int32(rng.integers(5)), "old": jnp.int32(1)}
    return loop, (ws, jnp.asarray(rng.normal(size=(8, 4)), jnp.float32), state), at == sorted(at)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.filterwarnings("ignore:.*in no order that schedule")  # where stages go back to a submesh
def test_drawn_counts_are_those_of_plain_jax(seed):
    """And stages in order are a pipeline, whatever they count."""
    loop, args, in_order = drawn(np.random.default_rng(seed))
    step = mm.jit(lambda *args: loop(*args))
    got = step(*args)
    with mm.ignore_transforms():
        wanted = step(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
    assert step.lower(*args).program.loops[0].in_order or not in_order


def test_without_it_stages_that_count_are_no_pipeline(monkeypatch):
    """The last stage's count is what the first one of the next microbatch reads."""
    loop, args, _ = next(d for d in map(drawn, map(np.random.default_rng, range(12))) if d[2])
    assert mm.jit(lambda *args: loop(*args)).lower(*args).program.loops[0].in_order
    switch_off(monkeypatch, "count_beside")
    with pytest.warns(UserWarning, match="in no order that schedule"):
        assert not mm.jit(lambda *args: loop(*args)).lower(*args).program.loops[0].in_order


def test_what_a_checkpoint_counts_again_is_no_way_from_stage_to_stage():
    """Each submesh computes again from what came to it in the forward pass, counts among it."""

    def layer(w, x, n):
        return jnp.tanh(x @ w) * (1 + 0.01 * n), n * 2 + 1

    stages = [mm.task(layer, f"stage{i}", devices=[i]) for i in range(3)]

    @jax.checkpoint
    def loss(ws, x, n):
        for stage, w in zip(stages, ws, strict=True):
            x, n = stage(w, x, n)
        return jnp.mean(x**2), n

    def grad(ws, x, n):
        (value, n), grads = jax.value_and_grad(loss, has_aux=True)(ws, x, n)
        return (value, grads), n

    loop = mm.microbatch(grad, argnum=1, num_microbatches=4, schedule="1f1b", state_argnum=2, reduce="mean")
    step, args = mm.jit(lambda *args: loop(*args)), ([jnp.ones((4, 4)) / 4] * 3, jnp.ones((8, 4)), jnp.int32(1))
    assert step.lower(*args).program.loops[0].in_order
    got = step(*args)
    with mm.ignore_transforms():
        wanted = step(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5)
