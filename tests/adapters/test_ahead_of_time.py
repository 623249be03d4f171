"""Steps of adapters that were compiled ahead of time: called with modules, as the function that they were made of."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import manymesh as mm
import manymesh.equinox
import manymesh.nnx
from flax import nnx

X = jax.random.normal(jax.random.key(0), (8, 4))


def of_nnx() -> tuple[Any, Any, Any]:
    net = nnx.Sequential(
        mm.nnx.task(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "front", devices=[0]),
        mm.nnx.task(nnx.Linear(4, 1, rngs=nnx.Rngs(1)), "back", devices=[1]),
    )
    return net, nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param), nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


@mm.nnx.jit(donate_argnums=(0, 1), static_argnames="power")
def train(net: Any, optimizer: Any, metrics: Any, x: Any, *, power: int) -> Any:
    loss, grads = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** power))(net)
    optimizer.update(net, grads)
    metrics.update(loss=loss)
    return {"loss": loss}


def test_modules_of_nnx_are_updated_in_place() -> None:
    ours, theirs = of_nnx(), of_nnx()
    compiled = train.lower(*ours, X, power=2).compile()
    for _ in range(3):
        found, expected = compiled(*ours, X)["loss"], train(*theirs, X, power=2)["loss"]
        np.testing.assert_array_equal(found, expected)
    assert float(ours[2].compute()["loss"]) == float(theirs[2].compute()["loss"])
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours[:2]), nnx.state(theirs[:2]))


def test_what_is_only_looked_at_stays_as_it_is() -> None:
    ours = of_nnx()
    compiled = train.prepare(*ours, X, power=2)
    before = jax.tree.map(np.asarray, nnx.state(ours))
    assert compiled.durations(*ours, X, repeats=1)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), before)


def test_preparing_is_compiling() -> None:
    ours = of_nnx()
    train.clear_cache()
    compiled = train.prepare(*ours, X, power=2)
    train(*ours, X, power=2)
    assert list(train._jitted._compiled.values()) == [compiled]


class Net(eqx.Module):
    front: Any
    back: Any
    activation: Any

    def __init__(self, activation: Any = jnp.tanh) -> None:
        self.front = mm.equinox.task(eqx.nn.Linear(4, 4, key=jax.random.key(0)), "front", devices=[0])
        self.back = mm.equinox.task(eqx.nn.Linear(4, 1, key=jax.random.key(1)), "back", devices=[1])
        self.activation = activation

    def __call__(self, x: Any) -> Any:
        return self.back(self.activation(self.front(x)))


@mm.equinox.jit(donate="none")
def descend(net: Any, x: Any, rate: float = 0.1) -> Any:
    loss, grads = eqx.filter_value_and_grad(lambda net: jnp.mean(jax.vmap(net)(x) ** 2))(net)
    return loss, eqx.apply_updates(net, jax.tree.map(lambda g: -rate * g, grads))


def test_modules_of_equinox_go_in_and_come_out() -> None:
    ours = theirs = Net()
    compiled = descend.lower(ours, X).compile()
    for _ in range(3):
        (found, ours), (expected, theirs) = compiled(ours, X), descend(theirs, X)
        np.testing.assert_array_equal(found, expected)
    assert isinstance(ours, Net) and ours.activation is jnp.tanh
    jax.tree.map(np.testing.assert_array_equal, eqx.filter(ours, eqx.is_array), eqx.filter(theirs, eqx.is_array))
    assert compiled.durations(ours, X, repeats=1) and descend.prepare(ours, X)(ours, X)[0].shape == ()


def test_another_module_is_told_by_what_differs() -> None:
    compiled = descend.lower(Net(), X).compile()
    with pytest.raises(mm.errors.ArgumentError, match="tanh") as error:
        compiled(Net(jnp.sin), X)
    assert "sin" in str(error.value)
    net = eqx.tree_at(lambda net: net.front.bias, Net(), None)
    with pytest.raises(
        mm.errors.ArgumentError, match=r"compiled with args\[0\].front.bias, which the call does not have"
    ):
        compiled(net, X)


def test_a_module_of_the_same_leaves_is_told_in_a_few_words() -> None:
    """Where its structure begins to differ, of pages that it has."""
    net, plain = (nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), last) for last in (jnp.tanh, jnp.sin))
    compiled = mm.nnx.jit(lambda net, x: net(x)).lower(net, X).compile()
    with pytest.raises(mm.errors.ArgumentError, match=r"compiled with args\[0\] of structure \.\.\..*tanh") as error:
        compiled(plain, X)
    assert "sin" in str(error.value) and len(str(error.value)) < 900


@pytest.mark.parametrize("static", [0, 1, -1])
def test_static_arguments_are_left_out_as_for_jax(static: int) -> None:
    """Or None in their place; an argument that is missing besides is told."""
    task = mm.task(lambda x, power: x**power, "power", devices=[1])
    args: list[Any] = [X, X + 1]
    args.insert(static if static >= 0 else 2, 3)

    def fun(*args: Any) -> Any:
        power = args[static]
        return sum(task(x, power) for x in args if x is not power)

    compiled = mm.jit(fun, static_argnums=static).lower(*args).compile()
    expected = X**3 + (X + 1) ** 3
    np.testing.assert_allclose(compiled(X, X + 1), expected, rtol=1e-6)
    np.testing.assert_allclose(compiled(*(None if isinstance(x, int) else x for x in args)), expected, rtol=1e-6)
    with pytest.raises(mm.errors.ArgumentError, match="which the call does not have"):
        compiled(X)
