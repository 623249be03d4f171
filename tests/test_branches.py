"""Conditionals, and loops of unknown length, around tasks: what is not taken does not run, as in the reference mode.

Counted by callbacks, because the values would be right either way.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback

import manymesh as mm
from stages import (
    WIDTH,
    assert_agrees,
    assert_same,
    back,
    dense,
    front,
    loss,
    microbatched,
    on_host,
    parameters,
    reference,
    rows,
)

LOG = []


def note(word, x, how="debug"):
    """Notes in `LOG` that this runs, with a number that it reads."""

    def write(v):
        LOG.append((word, round(float(v), 3)))
        return np.float32(0)

    value = jnp.sum(x)
    if how == "io":
        return io_callback(write, jax.ShapeDtypeStruct((), jnp.float32), value)
    jax.debug.callback(write, value, ordered=how == "ordered")
    return 0.0


def runs_as(fun, *args, tolerance=2e-5):
    """The compiled function has the values of the reference mode, and its callbacks fire as often, with the same numbers.

    Returns:
      What the callbacks said, in order.
    """

    def logged(call):
        LOG.clear()
        result = jax.block_until_ready(call())
        jax.effects_barrier()
        return result, list(LOG)

    expected, should = logged(lambda: reference(jax.jit(fun), *args))
    actual, did = logged(lambda: mm.jit(fun)(*args))
    assert_same(actual, expected, tolerance)
    words = [(w, pytest.approx(v, abs=1e-2)) for w, v in sorted(should)]
    assert sorted(did) == words, f"fired {did}, in the reference mode {should}"
    return did


def names(fun, *args):
    """Names of the fragments of a step."""
    return [f.name for f in mm.jit(fun).lower(*args).program.fragments]


def two_ways(p, x, how="debug"):
    """One branch on the first submesh, the other on both; each notes that it runs, before and after tasks."""

    def one():
        h = front(p["front"], x)
        return h + note("one", h, how)

    def both():
        h = front(p["front"], x)
        h = back(p["back"], h + note("both, between", h, how))
        return h + note("both", h, how)

    return lax.cond(x[0, 0] > 0, one, both)


@pytest.mark.parametrize("how", ["debug", "ordered", "io"])
def test_only_the_branch_that_is_taken_runs(how):
    """On every submesh, and whether callbacks are ordered or not."""
    p, x = parameters(), rows().at[0, 0].set(1.0)
    assert [w for w, _ in runs_as(lambda p, x: two_ways(p, x, how), p, x)] == ["one"]
    did = runs_as(lambda p, x: two_ways(p, x, how), p, x.at[0, 0].set(-1.0))
    assert sorted(w for w, _ in did) == ["both", "both, between"]


def test_a_task_of_a_branch_that_is_not_taken_does_not_run():
    """Callbacks inside the tasks, of which one is on another submesh than the predicate is made."""
    inside = [
        mm.task(lambda w, x, i=i: dense(w, x) + note(f"task {i}", x), f"inside{i}", devices=[i % 2]) for i in range(3)
    ]

    def switch(w, x):
        return lax.switch(jnp.int32(x[0, 0]), [lambda v, t=t: t(w, v) for t in inside], x)

    w, x = parameters()["front"], rows()
    for k, taken in [(0, 0), (1, 1), (2, 2), (5, 2), (-3, 0)]:
        assert [word for word, _ in runs_as(switch, w, x.at[0, 0].set(k))] == [f"task {taken}"]


def test_nested_conditionals():
    """The inner one runs only in its branch of the outer one."""

    def nested(p, x):
        def inner():
            return lax.cond(x[0, 1] > 0, lambda: 2 * two_ways(p, x), lambda: back(p["back"], x) + note("else", x))

        return lax.cond(x[1, 0] > 0, inner, lambda: x + note("outer", x))

    for signs in [(1, 1, 1), (-1, 1, 1), (1, -1, 1), (1, 1, -1), (-1, -1, -1)]:
        x = rows().at[0, 0].set(signs[0]).at[0, 1].set(signs[1]).at[1, 0].set(signs[2])
        assert runs_as(nested, parameters(), x)


def test_gradients_and_loops():
    """The backward pass of a branch runs with its forward pass; in a pipeline each microbatch has a branch of its own."""
    p, x = parameters(), rows().at[:4, 0].set(1.0).at[4:, 0].set(-1.0)

    def value(p, x):
        return jnp.sum(back(p["back"], two_ways(p, x)) ** 2)

    assert len(runs_as(jax.value_and_grad(value), p, x)) == 1
    assert len(runs_as(jax.value_and_grad(value), p, -x)) == 2
    did = runs_as(microbatched(jax.value_and_grad(value), num_microbatches=2, schedule="1f1b"), p, x)
    assert sorted(w for w, _ in did) == ["both", "both, between", "one"]
    runs_as(microbatched(jax.value_and_grad(value), num_microbatches=2, schedule="zero-bubble-h1"), p, x)


def test_vmap_of_a_conditional():
    """Where the predicate is batched JAX makes it a selection, and both branches run; where it is not, one does."""
    p, x = parameters(), rows().at[0, 0].set(1.0)

    def chosen(x, sign):
        return lax.cond(sign > 0, lambda: front(p["front"], x), lambda: back(p["back"], x) + note("else", sign))

    runs_as(jax.vmap(chosen), x[:, None], jnp.arange(8.0) - 4)
    assert not runs_as(jax.vmap(chosen, in_axes=(0, None)), x[:, None], jnp.float32(1))


@pytest.mark.parametrize("taken", [True, False])
def test_a_loop_in_a_branch(taken):
    """What would hardly ever end where its branch is not taken, and can be told by its callback."""

    def f(p, x):
        def loop():
            h = front(p["front"], x)
            start = jnp.where(x[0, 0] > 0, 1.0, 0.0)

            def more(c):
                jax.debug.callback(lambda: LOG.append(("turn", 0.0)))
                return c[0] * 3, c[1] + 1

            count = lax.while_loop(lambda c: (c[0] < 20) & (c[1] < 500), more, (start, 0))[1]
            return back(p["back"], h) + count

        return lax.cond(x[0, 0] > 0, loop, lambda: x)

    did = runs_as(f, parameters(), rows().at[0, 0].set(1.0 if taken else -1.0))
    assert len(did) == (3 if taken else 0)


def test_a_conditional_of_optimizer_states():
    """No task is in it, its values are on two submeshes: a callback in it fires where its branch is taken."""

    def update(p, x):
        grads = jax.grad(lambda p: jnp.mean(back(p["back"], front(p["front"], x)) ** 2))(p)

        def apply():
            note("apply", grads["front"])
            note("apply", grads["back"])
            return jax.tree.map(lambda w, g: w - g @ g, p, grads)

        return lax.cond(x[0, 0] > 0, apply, lambda: p)

    p = {k: jnp.tile(w, (8, 8)) for k, w in parameters().items()}  # too large to be anywhere but where it is
    x = jnp.tile(rows(), (1, 8)) / 8
    assert len(runs_as(update, p, x.at[0, 0].set(1.0), tolerance=1e-4)) == 2
    assert not runs_as(update, p, x.at[0, 0].set(-1.0), tolerance=1e-4)


def test_updates_that_are_applied_only_if_they_are_finite():
    """`optax.apply_if_finite` around Adam: a NaN leaves everything as it was."""
    optimizer = optax.apply_if_finite(optax.adam(1e-2), 3)

    def step(p, state, x):
        grads = jax.grad(lambda p: jnp.mean(back(p["back"], front(p["front"], x)) ** 2))(p)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    p, compiled = parameters(), mm.jit(step)
    for x in (rows(), rows().at[0, 0].set(jnp.nan)):
        expected = reference(jax.jit(step), p, optimizer.init(p), x)
        assert_same(compiled(p, optimizer.init(p), x), expected)


def test_a_conditional_on_one_submesh_stays_one():
    """One fragment a phase, under the names of all tasks in it; in a pipeline still a task of its stage."""
    other = mm.task(dense, "other", devices=[0])

    def chosen(p, x):
        return lax.cond(
            x[0, 0] > 0, lambda: front(p["front"], x) + note("if", x), lambda: other(p["back"], x) + note("else", x)
        )

    p, x = parameters(), rows().at[:4, 0].set(1.0).at[4:, 0].set(-1.0)
    assert names(chosen, p, x) == ["other_front"] or names(chosen, p, x) == ["front_other"]
    assert len(names(jax.grad(lambda p, x: jnp.sum(chosen(p, x))), p, x)) == 2
    for sign in (1, -1):
        assert len(runs_as(chosen, p, sign * x)) == 1
        runs_as(jax.grad(lambda p, x: jnp.sum(chosen(p, x))), p, sign * x)

    def value(p, x):
        h = lax.cond(x[0, 0] > 0, lambda: front(p["front"], x) + note("if", x), lambda: x)
        return jnp.sum(back(p["back"], h) ** 2)

    training = microbatched(jax.value_and_grad(value), num_microbatches=2, schedule="1f1b")
    program = mm.jit(training).lower(p, x).program
    assert [f.name for f in program.fragments if f.loop is not None] == ["front", "back", "back_bwd", "front_bwd"]
    assert len(runs_as(training, p, x)) == 1


def test_a_registered_scope_in_a_branch():
    """As an explicit task; equal scopes of two branches stay two."""

    def scoped(name, w, x):
        with jax.named_scope(name):
            return dense(w, x) + note(name, x)

    def chosen(p, x):
        def both():
            return scoped("two", p["back"], scoped("one", p["front"], x))

        return lax.cond(x[0, 0] > 0, both, lambda: scoped("one", p["back"], x))

    with mm.register_task("one", devices=[0]), mm.register_task("two", devices=[1]):
        for sign, count in [(1, 2), (-1, 1)]:
            assert len(runs_as(chosen, parameters(), rows().at[0, 0].set(float(sign)))) == count
        assert sorted(names(chosen, parameters(), rows())) == ["one", "one_2", "two"]


def test_a_registered_scope_in_a_branch_waits_for_its_index():
    """Also one of cheap equations, where scopes before and after the conditional, which come up again, are brought together."""

    def scoped(name, fun, *args):
        with jax.named_scope(name):
            return fun(*args)

    def chosen(p, x):
        first = scoped("one", dense, p["front"], x)
        twice = lambda x: scoped("two", jnp.sin, scoped("three", jnp.cos, x))  # noqa: E731
        picked = lax.cond(jnp.sum(first) > 0, twice, lambda x: x, x)
        again = scoped("one", dense, p["front"], scoped("four", jnp.tanh, x))
        return first, picked, again, scoped("four", jnp.exp, x)

    with mm.register_task("one|three|four", devices=[0]), mm.register_task("two", devices=[1]):
        runs_as(chosen, parameters(), rows())


def test_a_loop_of_unknown_length_on_one_submesh():
    """It is one fragment there, its tasks inside, beside tasks of other submeshes."""
    other = mm.task(dense, "other", devices=[0])

    def f(p, x, n):
        halved = lambda c: (0.5 * other(p["back"], front(p["front"], c[0])), c[1] * 2)  # noqa: E731
        h, _ = lax.while_loop(lambda c: c[1] < jnp.abs(x[0, 0]) * 4, halved, (x, jnp.abs(x[0, 0])))
        h = lax.fori_loop(0, n, lambda i, h: front(p["front"], h) + note("turn", i), h)
        return back(p["back"], h)

    p, x = parameters(), rows()
    assert len(runs_as(f, p, x, 3)) == 3
    assert names(f, p, x, 3) == ["front_other", "front", "back"]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_of_length_0(reverse):
    """The carry as it came, and stacks of nothing."""

    def f(p, x, xs):
        def body(h, v):
            h = front(p["front"], h + v)
            return h, (back(p["back"], h), jnp.argmax(h, 0))

        h, ys = lax.scan(body, x, xs, reverse=reverse)
        return front(p["front"], h), ys

    assert_same(*(g(parameters(), rows(), jnp.zeros((0, WIDTH))) for g in (mm.jit(f), lambda *a: reference(f, *a))))
    assert on_host(mm.jit(f)(parameters(), rows(), jnp.zeros((0, WIDTH)))[1][0]).shape == (0, 8, WIDTH)


def test_a_branch_that_is_known():
    """Only it is there."""

    def f(p, x):
        return lax.cond(
            True, lambda: back(p["back"], front(p["front"], x)), lambda: front(p["front"], x) + note("no", x)
        )

    assert names(f, parameters(), rows()) == ["front", "back"]
    assert not runs_as(f, parameters(), rows())


@pytest.mark.parametrize("looped", [False, True])
def test_what_a_branch_keeps_for_its_backward_pass_does_not_cross(looped):
    """Between tasks of other submeshes: what goes in and comes out crosses, and its gradient, and nothing else."""
    outer = [mm.task(dense, f"outer{i}", devices=[0]) for i in range(2)]
    branches = [mm.task(dense, f"branch{i}", devices=[1 + i]) for i in range(2)]

    def loss(p, x, flag):
        h = outer[0](p["front"], x)
        h = lax.cond(flag, lambda h: branches[0](p["back"], h) * 2.0, lambda h: branches[1](p["front"], h) + h, h)
        return jnp.mean(outer[1](p["back"], h) ** 2)

    grad = jax.value_and_grad(loss)
    if looped:
        grad = mm.microbatch(grad, argnum=1, num_microbatches=2, reduce="mean")
    x = np.tile(rows(), (64, 1))  # more than a kilobyte, in a microbatch too
    args = (parameters(), x)
    for flag in (True, False):
        assert_same(mm.jit(grad)(*args, flag), reference(jax.jit(grad), *args, flag), 2e-5)
    sent = [e for e in mm.jit(grad).lower(*args, True).program.edges if e.var.aval.size > WIDTH * WIDTH]
    assert len(sent) == 8 and len({e.nbytes for e in sent}) == 1


def test_a_loop_over_microbatches_in_a_branch():
    """The loop stays one, with its stages."""

    def step(p, x):
        return lax.cond(x[0, 0] > 0, lambda: microbatched(jax.grad(loss))(p, x), lambda: p)

    for first in (1.0, -1.0):
        assert_agrees(step, parameters(), rows().at[0, 0].set(first))
    assert len(mm.jit(step).lower(parameters(), rows()).program.loops) == 1


@pytest.mark.parametrize("length", [2, 40])
def test_tasks_without_a_place(length):
    first, second = (mm.task(dense, name) for name in ("first", "second"))

    def step(p, x):
        x = lax.cond(x[0, 0] > 0, lambda x: second(p["back"], first(p["front"], x)), lambda x: x, x)
        return lax.scan(lambda h, _: (first(p["front"], h), None), x, None, length=length)[0]

    for value in (1.0, -1.0):
        assert_agrees(step, parameters(), rows().at[0, 0].set(value))
