"""State that goes from one microbatch to the next: `microbatch(..., state_argnum=)`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm


def front(w: Any, mean: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    return h, 0.9 * mean + 0.1 * h.mean(0)


def back(w: Any, mean: Any, h: Any) -> Any:
    return jnp.mean(((h - mean) @ w) ** 2), 0.9 * mean + 0.1 * h.mean(0)


def loss_of(ws: Any, means: Any, x: Any) -> Any:
    first, second = mm.task(front, "front", devices=[0]), mm.task(back, "back", devices=[1])
    h, new = first(ws[0], means["front"], x)
    loss, newer = second(ws[1], means["back"], h)
    return loss, {"front": new, "back": newer, "kept": means["kept"]}


def step_of(schedule: str) -> Any:
    def grad(ws: Any, means: Any, x: Any) -> Any:
        (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(ws, means, x)
        return (loss, grads), new

    loop = mm.microbatch(grad, argnum=2, num_microbatches=4, schedule=schedule, state_argnum=1)
    return mm.jit(lambda ws, means, x: loop(ws, means, x))


KEYS = jax.random.split(jax.random.key(0), 3)
WS = (jax.random.normal(KEYS[0], (4, 4)), jax.random.normal(KEYS[1], (4, 4)))
MEANS = {"front": jnp.ones(4), "back": jnp.zeros(4), "kept": jnp.ones(2)}
X = jax.random.normal(KEYS[2], (8, 4))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
def test_each_microbatch_gets_what_the_one_before_left(schedule: str) -> None:
    step = step_of(schedule)
    got = step(WS, MEANS, X)
    with mm.ignore_transforms():
        wanted = step(WS, MEANS, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    state = got[1]
    assert [d.id for d in state["front"].devices()] == [0] and [d.id for d in state["back"].devices()] == [1]
    # By hand: four updates in a row, none of the first state alone.
    mean = MEANS["front"]
    for piece in X.reshape(4, 2, 4):
        mean = front(WS[0], mean, piece)[1]
    np.testing.assert_allclose(np.asarray(state["front"]), np.asarray(mean), rtol=1e-5)


def test_a_state_is_collected_as_each_microbatch_found_it() -> None:
    """Also where nothing else in the loop reads it: here it is what the microbatch before made."""
    task = mm.task(lambda w, x: jnp.tanh(x @ w), "front", devices=[0])

    def fun(w: Any, last: Any, x: Any) -> Any:
        h = task(w, x)
        return (jnp.sum(h), last, last), h

    loop = mm.microbatch(fun, argnum=2, num_microbatches=4, reduce=("sum", "stack", "concat"), state_argnum=1)
    step = mm.jit(lambda w, last, x: loop(w, last, x))
    got = step(WS[0], X[:2], X)
    with mm.ignore_transforms():
        wanted = step(WS[0], X[:2], X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def test_what_the_function_returns_is_checked() -> None:
    for wrong, found in (
        (lambda s, x: s + jnp.sum(x), "no pair"),
        (lambda s, x: (jnp.sum(x), (s, s)), r"a state of PyTreeDef\(\(\*, \*\)\)"),
    ):
        loop = mm.microbatch(wrong, argnum=1, num_microbatches=2, state_argnum=0)
        for run in (loop, mm.jit(loop)):
            message = rf"microbatch\(.*\): .* a pair \(result, next state\), .* in which it came, PyTreeDef\(\*\); it returned {found}"
            with pytest.raises(mm.errors.MicrobatchError, match=message):
                run(jnp.zeros(()), X)
    far = mm.microbatch(lambda x: x, num_microbatches=2, state_argnum=3)
    with pytest.raises(mm.errors.MicrobatchError, match="state_argnum 3 names the state, but the call has 1"):
        far(X)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble-h2"])
def test_a_state_that_waits_for_the_backward_pass_runs_in_order(schedule: str) -> None:
    """Weights that each microbatch changes by its gradient: the next one has to wait, and a finding says so."""

    def descend(ws: Any, x: Any) -> Any:
        first, second = mm.task(front, "front", devices=[0]), mm.task(back, "back", devices=[1])
        loss, grads = jax.value_and_grad(lambda ws: second(ws[1], 0.0, first(ws[0], 0.0, x)[0])[0])(ws)
        return loss, jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)

    step = mm.jit(mm.microbatch(descend, argnum=1, num_microbatches=4, schedule=schedule, state_argnum=0))
    with pytest.warns(
        UserWarning,
        match=f"in no order that schedule '{schedule}' could run: the .*pass of task 'front' makes .* reads in the next",
    ):
        lowered = step.lower(WS, X)
    assert not lowered.program.loops[0].in_order
    got = step(WS, X)
    with mm.ignore_transforms():
        wanted = step(WS, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def far_states(schedule: str, begin: str) -> Any:
    """A step whose states are made and read on different submeshes, outside of tasks and in them."""
    first = mm.task(lambda w, c, x: jnp.tanh(x @ w) * (1 + 0.01 * c), "first", devices=[0])
    last = mm.task(lambda w, c, h: (h @ w) * (1 + 0.1 * c), "last", devices=[1])

    def grad(ws: Any, state: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            h = first(ws[0], state["both"], x)
            y = last(ws[1], state["seen"], h) + state["both"] * state["earlier"]
            return jnp.mean((y * state["outside"]) ** 2), (jnp.mean(h), jnp.max(jnp.abs(y)))

        (value, (mean, size)), grads = jax.value_and_grad(loss, has_aux=True)(ws)
        new = {
            "count": state["count"] + 1, "both": state["both"] + 1, "outside": state["outside"] * 0.5,  # made nowhere in particular
            "seen": 0.5 * state["seen"] + mean,  # made on the first submesh, read on the last
            "earlier": state["late"], "late": mean,  # one is what the other was
            "size": jnp.maximum(state["size"], size),
        }  # fmt: skip
        return (value, grads), new

    def step(ws: Any, state: Any, x: Any) -> Any:
        if begin == "made":
            state = {k: v + 0 * x[0, 0].astype(v.dtype) for k, v in state.items()}
        elif begin == "literal":
            state = {k: jnp.full(v.shape, 1, v.dtype) for k, v in state.items()}
        loop = mm.microbatch(grad, argnum=2, num_microbatches=4, schedule=schedule, state_argnum=1, reduce="mean")
        return loop(ws, state, x)

    return step


@pytest.mark.parametrize("begin", ["argument", "made", "literal"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble-h1"])
def test_a_state_is_read_on_another_submesh_than_it_is_made_on(schedule: str, begin: str) -> None:
    """Each microbatch sends it there; the schedule applies, for values only go from earlier stages to later ones."""
    names = ("both", "outside", "seen", "earlier", "late", "size")
    state = {"count": jnp.int32(3), **{k: jnp.float32(0.3 + 0.1 * i) for i, k in enumerate(names)}}
    step = far_states(schedule, begin)
    jitted = mm.jit(step, strict=True)
    with mm.ignore_transforms():
        wanted = jax.jit(step)(WS, state, X)
    got = jitted(WS, state, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    program = jitted.lower(WS, state, X).program
    assert program.loops[0].placement == (0, 1) and program.loops[0].in_order


def test_a_counter_is_no_stage_and_no_launch() -> None:
    """What each microbatch adds one to runs with the task that reads it."""
    first, last = mm.task(jnp.sin, "first", devices=[0]), mm.task(lambda c, x: x * c, "last", devices=[1])
    loop = mm.microbatch(
        lambda c, x: (last(c, first(x)), c + 1), argnum=1, num_microbatches=4, state_argnum=0, reduce="concat"
    )
    program = mm.jit(loop).lower(jnp.float32(2), X).program
    assert [f.name for f in program.fragments if f.loop == 0] == ["first", "last"]
    assert [e for e in program.edges if e.var.aval.shape == ()] == []
    got, wanted = mm.jit(loop)(jnp.float32(2), X), loop(jnp.float32(2), X)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6)
    assert got[1] == wanted[1] == 6


@pytest.mark.parametrize("kind", ["swapped", "backwards", "chain", "kept"])
def test_states_that_only_change_names_or_go_back(kind: str) -> None:
    """Two that swap, one that the last submesh makes and the first reads, three in a row, one that stays.

    After the loop both submeshes read each.
    """
    first, last = (
        mm.task(lambda c, x: jnp.sin(c * x), "first", devices=[0]),
        mm.task(lambda c, x: x * c, "last", devices=[1]),
    )

    def fun(state: Any, x: Any) -> Any:
        a, b, c = state
        if kind == "backwards":
            y = last(1.5, first(a, x))
            return y, (jnp.mean(y) + b, c, b)
        y = last(b, first(2.0, x)) * c
        return y, {"swapped": (b, a, c), "chain": (jnp.max(y), a, b), "kept": (a, b, c + b)}[kind]

    loop = mm.microbatch(fun, argnum=1, num_microbatches=4, state_argnum=0, reduce="concat")
    state = (jnp.float32(2), jnp.float32(3), jnp.float32(5))

    def fun_and_more(state: Any, x: Any) -> Any:
        y, state = loop(state, x)
        return y, state, [(first(2.0, c), last(2.0, c)) for c in state]

    wanted = fun_and_more(state, X)
    step = mm.jit(fun_and_more)
    if kind == "backwards":
        told = r"no order .* '1f1b' could run: task 'last' makes f32\[\] \(.*test_microbatch_state.py.*, which task 'first' reads in the next"
        with pytest.warns(UserWarning, match=told):
            got = step(state, X)
    else:
        got = step(state, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["read by nobody", "from outside"])
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_states_of_a_loop_that_runs_elsewhere(kind: str, wanted: int) -> None:
    """Each becomes another one, where the loop runs on submesh 1 alone; the caller wants the first on any submesh."""
    before, inside, after = (
        mm.task(fun, name, devices=[i])
        for i, (fun, name) in enumerate([(jnp.tanh, "before"), (lambda x: jnp.sum(x**2), "inside"), (jnp.sin, "after")])
    )

    def step(state: Any, other: Any, x: Any) -> Any:
        h = before(x)
        other = other + h[0, 0]

        def body(state: Any, piece: Any) -> Any:
            a, b = state
            return inside(piece), (b, a if kind == "read by nobody" else other)

        value, new = mm.microbatch(body, argnum=1, num_microbatches=3, state_argnum=0, reduce="mean")(state, h)
        return after(value), new

    mesh = jax.sharding.Mesh(jax.devices()[wanted : wanted + 1], ("x",))
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jitted = mm.jit(step, out_shardings=(None, (there, None)))
    # More than is computed wherever it is read.
    state, other, x = (jnp.ones(600), jnp.zeros(600)), jnp.full(600, 3.0), X[:6]
    for _ in range(2):
        with mm.ignore_transforms():
            expected = step(state, other, x)
        got = jitted(state, other, x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
        state = got[1]
        assert state[0].sharding.is_equivalent_to(there, 1)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_state_that_is_the_result_of_more_microbatches_than_there_are(donated: tuple[int, ...]) -> None:
    """The first state is the last result: the same number, in an array of its own, or in the donated one's buffer."""
    task = mm.task(lambda a, x: jnp.sum(x) + a, "task", devices=[0])
    loop = mm.microbatch(
        lambda s, x: (task(s["a"], x), {"a": s["a"] + 1, "b": s["a"], "c": s["b"]}),
        argnum=1, num_microbatches=2, state_argnum=0, reduce="mean",
    )  # fmt: skip
    step = mm.jit(loop, donate_argnums=donated)
    state = {name: jnp.float32(k) for k, name in enumerate("abc")}
    for wanted in ({"a": 2, "b": 1, "c": 0}, {"a": 4, "b": 3, "c": 2}):
        given = state
        _, state = step(given, X)
        assert {name: float(x) for name, x in state.items()} == wanted
        assert {x.is_deleted() for x in given.values()} == {bool(donated)}
        pointers = {x.unsafe_buffer_pointer() for tree in (state, given) for x in tree.values() if not x.is_deleted()}
        assert len(pointers) == (3 if donated else 6)


def test_a_state_keeps_its_shape() -> None:
    task = mm.task(jnp.sum, "task", devices=[0])
    loop = mm.microbatch(
        lambda s, x: (task(x), {"seen": jnp.concatenate([s["seen"], x[0]])}),
        argnum=1,
        num_microbatches=2,
        state_argnum=0,
    )
    message = r"the state args\[0\]\['seen'\] of shape \(4,\) becomes one of shape \(8,\)"
    with pytest.raises(mm.errors.MicrobatchError, match=message):
        mm.jit(loop)({"seen": jnp.ones(4)}, X)


@pytest.mark.parametrize(
    ("start", "following"),
    [
        (jnp.int8(100), lambda s: (s + s).astype(jnp.float32)),  # 100 + 100 is -56 in the first microbatch
        (jnp.float32(1.23), lambda s: s.astype(jnp.bfloat16)),
        (jnp.int32(0), lambda s: s + 1.5),
    ],
)
def test_a_state_keeps_its_dtype(start: Any, following: Any) -> None:
    """In plain JAX the first microbatch alone would have the first dtype."""
    task = mm.task(jnp.sum, "task", devices=[0])
    loop = mm.microbatch(lambda s, x: (task(x) * s, following(s)), argnum=1, num_microbatches=2, state_argnum=0)
    new = jax.eval_shape(following, start).dtype
    message = rf"the state args\[0\] of dtype {start.dtype} becomes one of dtype {new}; .*begin with one of dtype {new}"
    with pytest.raises(mm.errors.MicrobatchError, match=message):
        mm.jit(loop)(start, X)


def test_a_state_is_of_arrays() -> None:
    """What is none is called by its place."""
    task = mm.task(jnp.sin, "task", devices=[0])
    loop = mm.microbatch(lambda s, x: (task(x), s), argnum=1, num_microbatches=2, state_argnum=0)
    with pytest.raises(
        mm.errors.MicrobatchError, match=r"the state args\[0\]\['n'\] is str 'a', no array; .* close over"
    ):
        mm.jit(lambda x: loop({"n": "a"}, x))(X)


def test_a_number_of_python_that_gets_a_dtype_and_stays_as_it_is() -> None:
    """The second microbatch finds the dtype there, and hands on what it got."""
    task = mm.task(jnp.sum, "task", devices=[0])
    loop = mm.microbatch(
        lambda s, x: (task(x) + s, s.astype(jnp.float32)), argnum=1, num_microbatches=2, state_argnum=0
    )
    with mm.ignore_transforms():
        expected = jax.jit(loop)(2, X)
    for got, wanted in zip(mm.jit(loop)(2, X), expected, strict=True):
        assert (got.dtype, got.weak_type) == (wanted.dtype, wanted.weak_type)
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("start", [0, 0.0])
def test_a_number_of_python_becomes_what_it_meets(start: Any, written: bool) -> None:
    """And has no dtype of its own afterwards either: what it scales keeps its own."""
    task = mm.task(jnp.sum, "task", devices=[0])

    def step(s: Any, x: Any) -> Any:
        s = start if written else s  # in the step, or an argument of it
        value, s = mm.microbatch(lambda s, x: (task(x), s + 1.5), argnum=1, num_microbatches=2, state_argnum=0)(s, x)
        return value, s, s * jnp.bfloat16(2)

    with mm.ignore_transforms():
        expected = jax.jit(step)(start, X)
    for got, wanted in zip(mm.jit(step)(start, X), expected, strict=True):
        assert (got.dtype, got.weak_type) == (wanted.dtype, wanted.weak_type)
        np.testing.assert_allclose(np.float32(got), np.float32(wanted), rtol=1e-6)
