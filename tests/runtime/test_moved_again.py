"""Arguments that are moved in each call, and those that nobody reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import manymesh as mm
from manymesh._runtime._relayout import Relayouts

WIDTH = 512  # a weight is 1 MiB


def weights() -> dict[str, jax.Array]:
    return {name: jax.random.normal(jax.random.key(k), (WIDTH, WIDTH)) / 32 for k, name in enumerate("ab")}


def forward(tasks: Any, params: Any, x: Any) -> Any:
    first, second = tasks
    return second(params["b"], first(params["a"], x))


@pytest.fixture
def tasks() -> Any:
    meshes = mm.submeshes(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage")
    return [mm.task(lambda w, x: jnp.tanh(x @ w), f"half_{k}", mesh=mesh) for k, mesh in enumerate(meshes)]


@contextmanager
def brought() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of arguments that calls move."""
    shapes: list[tuple[int, ...]] = []
    bring = Relayouts.bring

    def noted(self: Relayouts, x: Any, sharding: Any) -> Any:
        shapes.append(np.shape(x))
        return bring(self, x, sharding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Relayouts, "bring", noted)
        yield shapes


def calls(step: Any, *args: Any, count: int = 6) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(count):
            step(*args)
    return [str(w.message) for w in found]


def test_what_is_moved_in_each_call_is_told_once_and_the_remedy_works(tasks: Any) -> None:
    @mm.jit
    def evaluate(params: Any, x: Any) -> Any:
        return forward(tasks, params, x).sum()

    params, x = weights(), jnp.ones((4, WIDTH))
    (text,) = calls(evaluate, params, x)
    assert text.startswith(
        "evaluate: each of 3 calls moved args[0] (2 arrays, 2.0 MiB), args[1] (1 array, 8.0 KiB) to where"
    )
    assert "jax.device_put(args[0], compiled.input_shardings[0][0]), with compiled = evaluate.prepare(...)" in text

    args, compiled = (params, x), evaluate.prepare(params, x)
    placed = jax.device_put(args[0], compiled.input_shardings[0][0])
    evaluate.clear_cache()
    with brought() as shapes:
        assert not calls(evaluate, placed, x)
    assert set(shapes) == {x.shape}


def test_other_arrays_each_time_and_small_ones_are_no_accident(tasks: Any) -> None:
    @mm.jit
    def evaluate(params: Any, x: Any) -> Any:
        return forward(tasks, params, x).sum()

    params = {name: np.asarray(w) for name, w in weights().items()}  # as they are read from a file, anew
    for _ in range(4):
        assert not calls(evaluate, params, jnp.ones((4, WIDTH)), count=1)
    small = {name: jnp.ones((8, 8)) for name in "ab"}
    assert not calls(evaluate, small, jnp.ones((4, 8)))


def test_arguments_that_nobody_reads_stay_where_they_are(tasks: Any) -> None:
    @mm.jit
    def train(params: Any, moments: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean(forward(tasks, p, x) ** 2))(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments

    @mm.jit
    def evaluate(state: Any, x: Any) -> Any:
        params, _ = state
        return forward(tasks, params, x).sum()

    x = jnp.ones((4, WIDTH))
    state = train(weights(), jax.tree.map(jnp.zeros_like, weights()), x)
    with brought() as shapes:
        value = evaluate(state, x)
    assert shapes == [x.shape]
    lowered = evaluate.lower(state, x)
    memory = lowered.report().memory
    assert max(m.argument_bytes for m in memory.values()) < 1.1 * 4 * WIDTH**2  # a weight, and no moment
    assert [s.sharding.spec for s in jax.tree.leaves(lowered.arguments[0][0][1])] == [jax.P()] * 2
    with mm.ignore_transforms():
        np.testing.assert_allclose(value, evaluate(state, x), rtol=1e-5)


def test_arguments_that_a_loop_on_the_host_does_not_read_are_not_told(tasks: Any) -> None:
    @mm.jit
    def settle(state: Any, x: Any) -> Any:
        def unfinished(carry: Any) -> Any:
            return carry[0].sum() < 4 * WIDTH * carry[1]

        return jax.lax.while_loop(
            unfinished, lambda carry: (forward(tasks, state["read"], carry[0]), carry[1] - 0.3), (x, jnp.float32(0.5))
        )

    elsewhere = jax.device_put(jnp.ones((WIDTH, WIDTH)), jax.devices()[7])
    small = {name: jnp.ones((8, 8)) / 32 for name in "ab"}
    assert not calls(settle, {"read": small, "unread": elsewhere}, jnp.ones((4, 8)))
    (text,) = calls(settle, {"read": weights(), "unread": elsewhere}, jnp.ones((4, WIDTH)))
    assert "args[0] (2 arrays, 2.0 MiB)" in text


@pytest.mark.parametrize("donated", [(), (0,)])
def test_steps_that_take_turns_leave_the_part_of_the_state_of_the_other_where_it_is(tasks: Any, donated: Any) -> None:
    first, second = tasks

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(second(params["b"], first(params["a"], x)) ** 2)

    def update(name: str, state: Any, x: Any) -> Any:
        params, moments = state
        grad = jax.grad(lambda w: loss({**params, name: w}, x))(params[name])
        moment = 0.9 * moments[name] + grad
        return {**params, name: params[name] - 0.1 * moment}, {**moments, name: moment}

    def fresh() -> Any:
        return weights(), jax.tree.map(jnp.zeros_like, weights())

    def steps() -> list[Any]:
        def update_a(state: Any, x: Any) -> Any:
            return update("a", state, x)

        def update_b(state: Any, x: Any) -> Any:
            return update("b", state, x)

        return [mm.jit(f, donate_argnums=donated) for f in (update_a, update_b)]

    x, turns = jnp.ones((4, WIDTH)), steps()
    state = turns[1](turns[0](fresh(), x), x)
    with brought() as shapes:
        for step in turns * 2:
            state = step(state, x)
    assert set(shapes) == {x.shape}
    params, moments = state
    assert {n: m.sharding.device_set for n, m in moments.items()} == {
        n: p.sharding.device_set for n, p in params.items()
    }

    with mm.ignore_transforms():
        expected = fresh()
        for step in steps() * 3:
            expected = step(expected, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, expected)


def test_what_is_handed_on_goes_where_it_is_asked_for(tasks: Any) -> None:
    mesh = mm.submeshes(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage")[0]
    wanted = jax.NamedSharding(mesh, jax.P("data"))
    there = jax.device_put(jnp.ones((4, 4)), jax.NamedSharding(Mesh(np.array(jax.devices()[2:4]), ("data",)), jax.P()))

    def step(handed_on: Any, params: Any, x: Any) -> Any:
        return handed_on, forward(tasks, params, x).sum()

    x, params = jnp.ones((4, WIDTH)), weights()
    assert mm.jit(step)(there, params, x)[0].sharding == there.sharding
    assert mm.jit(step, out_shardings=(wanted, None))(there, params, x)[0].sharding == wanted
    assert mm.jit(step, in_shardings=(wanted, None, None))(there, params, x)[0].sharding == wanted
    nowhere, _ = mm.jit(step)(jnp.ones((4, 4)), params, x)
    assert nowhere.sharding.device_set == set(mesh.devices.flat)


def test_stacked_layers_and_constants_beside_what_is_handed_on() -> None:
    meshes = mm.submeshes(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage")
    halves = [
        mm.task(lambda ws, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0], f"half_{k}", mesh=mesh)
        for k, mesh in enumerate(meshes)
    ]
    shift = jnp.arange(8.0)

    @mm.jit
    def step(state: Any, x: Any) -> Any:
        y = halves[1](state["layers"][2:], halves[0](state["layers"][:2], x + shift))
        return state, y.sum()

    other = {k: jax.device_put(jnp.ones((3, k)), jax.NamedSharding(meshes[1], jax.P())) for k in range(1, 4)}
    state, x = {"a": other, "layers": jnp.ones((4, 8, 8)) / 8}, jnp.ones((4, 8))
    assert len(step.lower(state, x).program.consts) == 1
    with brought() as shapes:
        for _ in range(2):
            state, _ = step(state, x)
    assert not {w.shape for w in other.values()}.intersection(shapes)
    assert {w.sharding for w in state["a"].values()} == {w.sharding for w in other.values()}


def test_what_is_handed_on_and_read_elsewhere_comes_to_who_reads_it() -> None:
    first, second = (Mesh(np.array(jax.devices()[k : k + 2]), ("data",)) for k in (0, 2))

    def follow(state: Any) -> Any:
        return {**state, "average": 0.9 * state["average"] + 0.1 * state["weight"]}

    state = {
        "average": jax.device_put(jnp.zeros(3), jax.NamedSharding(first, jax.P())),
        "weight": jax.device_put(jnp.ones(3), jax.NamedSharding(second, jax.P())),
    }
    step = mm.jit(follow)
    program = step.lower(state).program
    assert [len(program.input_submeshes[v]) for v in program.invars] == [1, 2]
    followed = step(step(state))
    np.testing.assert_allclose(followed["average"], 0.19, rtol=1e-6)
    assert {k: x.sharding for k, x in followed.items()} == {k: x.sharding for k, x in state.items()}
