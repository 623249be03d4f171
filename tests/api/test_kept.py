"""`jit` again on the same function finds its programs compiled, as `jax.jit` does; nothing outlives the function."""

from __future__ import annotations

import functools
import gc
import pickle
import types
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
import manymesh.equinox
import manymesh.nnx
from flax import nnx
from manymesh._api import _kept

X = jnp.arange(4.0)


@pytest.fixture(autouse=True)
def as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """In other tests nothing is kept."""
    monkeypatch.setattr(_kept, "KEEPING", (types.FunctionType,))


def made() -> tuple[Any, list[int]]:
    """A function with a task, and a list that grows when it is traced."""
    task, traces = mm.task(jnp.sin, "task", devices=[1]), []

    def fun(x: Any, *more: Any) -> Any:
        traces.append(1)
        return task(x) + sum(more)

    return fun, traces


def replicated() -> jax.NamedSharding:
    return jax.NamedSharding(jax.sharding.Mesh(jax.devices()[1:2], ("x",)), jax.P())


def test_the_same_settings_are_the_same_programs() -> None:
    fun, traces = made()
    for _ in range(3):
        np.testing.assert_allclose(mm.jit(fun)(X), jnp.sin(X), rtol=1e-6)
    for _ in range(2):  # made anew, and equal
        mm.jit(fun, in_shardings=(replicated(),))(X)
    assert len(traces) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"donate_argnums": 0},
        {"static_argnums": 1},
        {"strict": True},
        {"compiler_options": {"xla_embed_ir_in_executable": True}},
        {"out_shardings": replicated()},
    ],
    ids=str,
)
def test_other_settings_are_other_programs(settings: dict[str, Any]) -> None:
    fun, traces = made()
    expected = jnp.sin(X) + 2
    for chosen in ({}, settings, {}, settings):
        np.testing.assert_allclose(mm.jit(fun, **chosen)(jnp.copy(X), 2), expected, rtol=1e-6)
    assert len(traces) == 2


def test_a_function_that_wraps_another_one_has_its_own() -> None:
    fun, _ = made()
    mm.jit(fun)(X)

    @functools.wraps(fun)
    def doubled(x: Any) -> Any:
        return fun(x) * 2

    np.testing.assert_allclose(mm.jit(doubled)(X), 2 * jnp.sin(X), rtol=1e-6)
    np.testing.assert_allclose(mm.jit(fun)(X), jnp.sin(X), rtol=1e-6)


def test_nothing_outlives_the_function() -> None:
    fun, _ = made()
    mm.jit(fun)(X)
    gone = weakref.ref(fun)
    del fun
    gc.collect()
    assert gone() is None


def module_level(x: Any) -> Any:
    return x


def test_what_is_kept_is_not_pickled_with_a_function() -> None:
    """As those do it that pickle a function by its attributes."""
    mm.jit(module_level)(X)
    assert pickle.loads(pickle.dumps(vars(module_level))) == {"_manymesh_programs": {}}


def test_clearing_forgets_for_all() -> None:
    fun, traces = made()
    mm.jit(fun)(X)
    mm.jit(fun).clear_cache()
    mm.jit(fun)(X)
    assert len(traces) == 2


def test_steps_of_adapters() -> None:
    linear, traces = mm.equinox.task(eqx.nn.Linear(4, 4, key=jax.random.key(0)), "e", devices=[1]), []
    module = mm.nnx.task(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "n", devices=[1])

    def step(model: Any, x: Any) -> Any:
        traces.append(1)
        return model(x)

    for _ in range(2):
        mm.equinox.jit(step)(linear, X)
        mm.equinox.jit(step, donate="all-except-first")(linear, jnp.copy(X))
        mm.nnx.jit(step)(module, X)
        mm.nnx.jit(step, donate_argnums=1)(module, jnp.copy(X))
    assert len(traces) == 4


def test_arguments_elsewhere_are_another_program() -> None:
    """Its layouts may follow them; and the state that a step returned is where that step wants it."""
    task, traces = mm.task(lambda w, x: jnp.tanh(x @ w), "task", devices=[1, 2], device_axes="x"), []

    def step(w: Any, x: Any) -> Any:
        traces.append(1)
        return w + 0.1 * jax.grad(lambda w: jnp.sum(task(w, x)))(w)

    w, x, mesh = np.eye(4, dtype="f4"), np.ones((4, 4), "f4"), jax.sharding.Mesh(jax.devices()[1:3], "x")
    for _ in range(2):  # epochs
        for _ in range(2):
            w = mm.jit(step)(w, x)
    assert len(traces) == 1 and w.sharding.spec == jax.P()  # of NumPy first, then what the first step returned
    for spec in (jax.P("x"), jax.P(None, "x")):
        for _ in range(2):
            given = jax.device_put(np.eye(4, dtype="f4"), jax.NamedSharding(mesh, spec))
            assert mm.jit(step)(given, x).sharding.spec == spec
    assert len(traces) == 3
