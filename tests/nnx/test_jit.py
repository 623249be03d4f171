"""Steps over NNX modules: what changes is changed in the caller's modules."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import manymesh as mm
import manymesh.nnx
from flax import nnx

X = jax.random.normal(jax.random.key(0), (8, 4))


class Count(nnx.Variable):
    """A number of calls."""


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.calls = Count(jnp.array(0))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.dense(x)

    @mm.nnx.jit
    def as_a_method(self, x: Any) -> Any:
        return self(x)


def placed() -> Any:
    return mm.nnx.task(Model(nnx.Rngs(0)), "model", devices=[3])


def test_statics_keywords_methods_and_the_cache() -> None:
    model, traces = placed(), []

    @mm.nnx.jit(static_argnames="power")
    def step(model: Any, x: Any, *, power: int) -> Any:
        traces.append(power)
        return {"y": model(x) ** power}

    for power in (1, 2, 1):
        np.testing.assert_allclose(step(model, x=X, power=power)["y"], model.dense(X) ** power, rtol=1e-5)
    assert traces == [1, 2] and int(model.calls[...]) == 3
    assert sorted(d.id for d in model.dense.kernel.devices()) == [3]
    model.as_a_method(X)
    assert int(model.calls[...]) == 4 and step.__name__ == "step"


def test_asking_changes_nothing() -> None:
    model = placed()
    step = mm.nnx.jit(lambda model, x: model(x))
    assert step.eval_shape(model, X).shape == (8, 4)
    assert "model" in str(step.lower(model, X).program) and step.trace(model, X).jaxpr.in_avals
    assert step.lower(model, X).compile().report()
    assert int(model.calls[...]) == 0 and sorted(d.id for d in model.dense.kernel.devices()) == [0]
    with mm.ignore_transforms():
        np.testing.assert_allclose(step(model, X), model.dense(X), rtol=1e-6)
    assert int(model.calls[...]) == 1


def test_what_a_step_adds_to_a_module_is_there_afterwards() -> None:
    """And what it returns: new modules, and modules that are its arguments."""
    model = placed()

    def step(model: Any, x: Any) -> Any:
        model.last = Count(model(x))
        return model, nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    same, new = mm.nnx.jit(step)(model, X)
    assert same is model and isinstance(new, nnx.Linear)
    np.testing.assert_allclose(model.last[...], model.dense(X), rtol=1e-6)
    np.testing.assert_allclose(new.kernel[...], nnx.Linear(4, 2, rngs=nnx.Rngs(1)).kernel[...], rtol=1e-6)


def test_donation_takes_the_old_buffers_and_leaves_the_module_whole() -> None:
    model = placed()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @mm.nnx.jit(donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    step(model, optimizer, X)
    old = model.dense.kernel.get_value()
    first = float(step(model, optimizer, X))
    assert old.is_deleted() and not model.dense.kernel.get_value().is_deleted()
    assert float(step(model, optimizer, X)) < first and int(optimizer.step[...]) == 3


def test_variables_that_stand_at_two_places_stay_one() -> None:
    first, second = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    second.dense.kernel = first.dense.kernel
    models = nnx.List([mm.nnx.task(first, "a", devices=[0]), mm.nnx.task(second, "b", devices=[1])])

    @mm.nnx.jit
    def step(models: Any, x: Any) -> Any:
        grads = nnx.grad(lambda models: jnp.sum(models[1](models[0](x))))(models)
        kernel = models[0].dense.kernel
        kernel[...] = kernel[...] - 0.1 * jax.tree.leaves(grads[0]["dense"]["kernel"])[0]

    step(models, X)
    assert first.dense.kernel is second.dense.kernel and int(first.calls[...]) == 1
    plain = Model(nnx.Rngs(0))
    slope = jax.grad(lambda k: jnp.sum((X @ k) @ k))(plain.dense.kernel[...])
    np.testing.assert_allclose(first.dense.kernel[...], plain.dense.kernel[...] - 0.1 * slope, rtol=1e-5)


def test_a_loop_that_adds_variables_says_so() -> None:
    model = placed()

    def adds(model: Any, x: Any) -> Any:
        model.last = Count(model(x))
        return jnp.sum(model.last[...])

    step = mm.nnx.jit(mm.nnx.microbatch(adds, argnum=1, num_microbatches=2))
    text = r"the modules got 4 arrays, before they had 3 \(args\[0\]\.last\); .*make caches"
    with pytest.raises(mm.errors.MicrobatchError, match=text):
        step(model, X)
    swapped = mm.nnx.jit(mm.nnx.microbatch(lambda x, model: jnp.sum(model(x)), argnum=1, num_microbatches=2))
    with pytest.raises(mm.errors.MicrobatchError, match="argnum 1 is the batch, but there is a module in it"):
        swapped(X, model)


def loss_of(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


GRADIENTS = {
    "grad": nnx.grad(loss_of),
    "value_and_grad": nnx.value_and_grad(loss_of),
    "of some variables": nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.Param)),
    "of trees": nnx.grad(loss_of, graph=False),
    "of a partial application": nnx.grad(functools.partial(loss_of)),
    "in a partial application": functools.partial(nnx.grad(loss_of)),
}


@pytest.mark.parametrize("how", GRADIENTS)
def test_gradients_are_called_like_the_loss(how: str) -> None:
    grads = GRADIENTS[how]
    for loop in (mm.microbatch, mm.nnx.microbatch):
        step = mm.nnx.jit(loop(grads, argnum=1, num_microbatches=3))
        with pytest.raises(mm.errors.MicrobatchError, match=r"^microbatch\(loss_of\): args\[1\] of shape \(8, 4\)"):
            step(placed(), X)
    assert repr(mm.nnx.jit(grads)).startswith("nnx.jit(loss_of)")


def test_a_sum_of_means_is_told() -> None:
    """As of the gradients that JAX makes."""
    step = mm.nnx.jit(mm.nnx.microbatch(GRADIENTS["value_and_grad"], argnum=1, num_microbatches=2))
    with pytest.warns(UserWarning, match="adds up 2 losses each of which is a mean"):
        step.lower(placed(), X)


def test_values_have_the_names_that_they_have_in_the_modules() -> None:
    class Stack(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([mm.nnx.task(nnx.Linear(4, 4, rngs=nnx.Rngs(i)), devices=[i]) for i in range(2)])
            self.scales = nnx.data({"a b": nnx.Param(jnp.ones(()))})

        def __call__(self, x: Any) -> Any:
            return self.layers[1](self.layers[0](x)) * self.scales["a b"][...]

    model = Stack()
    optimizer = nnx.Optimizer(model, optax.adam(1e-1), wrt=nnx.Param)

    @mm.nnx.jit(donate_argnums=0)
    def step(model: Any, x: Any, optimizer: Any) -> Any:
        train(model, optimizer, x["rows"])
        return nnx.grad(loss_of)(model, x["rows"])

    text = str(step.lower(model, {"rows": X}, optimizer=optimizer).layout)
    assert "states[0]" not in text and ".value " not in text
    for name in (
        "args[0].layers[1].kernel",
        "args[0].scales['a b']",
        "args[1]['rows']",
        "kwargs['optimizer'].opt_state[0].mu.layers[0].bias",
        "kwargs['optimizer'].step",
        "result[1]['layers'][0]['kernel']",
    ):
        assert f" {name} " in text, name
    model.layers[0].bias = nnx.Param(np.array(["text"]))
    with pytest.raises(
        mm.errors.ArgumentError, match=r"argument args\[0\]\.layers\[0\]\.bias is an array of dtype <U4"
    ):
        step.lower(model, {"rows": X}, optimizer=optimizer)


@pytest.mark.parametrize(
    "change", [lambda x: jnp.stack([x, x]), lambda x: x.astype(jnp.float32)], ids=["shape", "dtype"]
)
def test_a_variable_that_becomes_another_in_a_loop_is_named(change: Any) -> None:
    def changes(model: Any, x: Any) -> Any:
        model.calls.set_value(change(model.calls.get_value()))
        return jnp.sum(model.dense(x))

    model = Model(nnx.Rngs(0))
    model.calls.set_value(jnp.zeros((), jnp.int32))
    step = mm.nnx.jit(mm.nnx.microbatch(changes, argnum=1, num_microbatches=2))
    with pytest.raises(
        mm.errors.MicrobatchError, match=r"^microbatch\(changes\): args\[0\]\.calls of .* becomes one of"
    ):
        step(model, X)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_the_plain_microbatch_refuses_what_it_would_lose(by_keyword: bool) -> None:
    """A module that the function changes; one that it reads alone is a tree as any other."""
    loss = nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))

    def step(model: Any, x: Any) -> Any:
        if by_keyword:
            return mm.microbatch(lambda x, model: loss(model, x), num_microbatches=2)(x, model=model)
        return mm.microbatch(loss, argnum=1, num_microbatches=2)(model, x)

    called = "model" if by_keyword else r"args\[0\]"
    text = rf"changes {called}\.calls\.value in place, which would be lost, .* use manymesh.nnx.microbatch"
    with pytest.raises(mm.errors.MicrobatchError, match=text):
        mm.nnx.jit(step)(placed(), X)
    reads = mm.nnx.task(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "reads", devices=[3])
    with mm.ignore_transforms():
        expected = mm.nnx.jit(step)(reads, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mm.nnx.jit(step)(reads, X), expected)


def train(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def test_the_plain_jit_says_what_it_loses() -> None:
    """As jax.jit, it gives the function modules of its own; of what comes back as a result nothing is lost."""
    model = mm.nnx.task(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "model", devices=[3])
    optimizer = nnx.Optimizer(model, optax.adam(1e-1), wrt=nnx.Param)
    with pytest.warns(
        UserWarning, match=r"changes args\[0\]\.bias and 7 more in place, which is lost.*manymesh\.nnx\.jit"
    ):
        mm.jit(train).lower(model, optimizer, X)
    with pytest.raises(mm.errors.ArgumentError, match=r"changes args\[0\]\.bias and"):
        mm.jit(train, strict=True)(model, optimizer, X)
    mm.jit(lambda *args: (train(*args), args), strict=True).lower(model, optimizer, X)
    with pytest.warns(UserWarning, match=r"changes kwargs\['rngs'\]\.dropout\.count in place"):
        mm.jit(lambda x, rngs: model(x) + jax.random.normal(rngs.dropout(), x.shape)).lower(X, rngs=nnx.Rngs(dropout=0))
    with pytest.warns(UserWarning, match=r"changes args\[0\]\.calls in place"):
        mm.jit(lambda model, x: nnx.jit(nnx.remat(lambda model, x: model(x)))(model, x)).lower(placed(), X)


READING = {
    "called": lambda model, x: model(x),
    "jit": nnx.jit(lambda model, x: nnx.jit(lambda model, x: model(x))(model, x)),
    "remat": nnx.remat(lambda model, x: model(x)),
    "grad": lambda model, x: jax.tree.leaves(nnx.grad(lambda model: jnp.sum(model(x)))(model))[0],
    "merged": lambda model, x: nnx.merge(*nnx.split(model))(x),
}


@pytest.mark.parametrize("how", READING)
@pytest.mark.parametrize("outside", [True, False], ids=["around the task", "in the task"])
def test_the_plain_jit_says_nothing_of_modules_that_are_read(how: str, outside: bool) -> None:
    """Nor does the plain microbatch, also where a transformation of Flax gives all variables back as they were."""

    class Within(nnx.Module):
        def __init__(self) -> None:
            self.dense, self.rate = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return self.rate(self.dense(x) if outside else READING[how](self.dense, x), deterministic=True)

    plain = Within()
    model = mm.nnx.task(plain, "model", devices=[3])

    def read(model: Any, x: Any) -> Any:
        return jnp.sum(READING[how](model, x) if outside else model(x))

    expected = read(plain, X)
    np.testing.assert_allclose(mm.jit(read, strict=True)(model, X), expected, rtol=1e-5)
    pieces = mm.jit(mm.microbatch(read, argnum=1, num_microbatches=2), strict=True)(model, X)
    np.testing.assert_allclose(pieces, expected, rtol=1e-5)


@pytest.mark.parametrize("argnum", [1, -2])
def test_a_state_of_its_own_goes_on_beside_those_of_modules(argnum: int) -> None:
    """From each microbatch to the next; it was added up as a part of the result."""

    def moving(model: Any, mean: Any, x: Any) -> Any:
        mean = {"of": 0.5 * mean["of"] + jnp.mean(x), "count": mean["count"] + 1}
        return jnp.sum(model(x) - mean["of"]), mean

    loop = mm.nnx.microbatch(moving, argnum=2, num_microbatches=4, state_argnum=argnum)
    plain, model, state = Model(nnx.Rngs(0)), placed(), {"of": jnp.ones(()), "count": 0}
    expected, found = loop(plain, state, X), mm.nnx.jit(loop)(model, state, X)
    assert jax.tree.structure(found) == jax.tree.structure(expected) and int(found[1]["count"]) == 4
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected)
    assert int(model.calls[...]) == int(plain.calls[...]) == 4


STATES = [
    (lambda model, state, x: jnp.sum(x), 1, r"with state_argnum=1, the function has to return a pair \(result, next state\)"),
    (lambda model, state, x: (jnp.sum(x), jnp.stack([state, state])), 1, r"the state args\[1\] of shape \(\) becomes one of"),
    (lambda model, state, x: (jnp.sum(x), state), 2, r"argnum and state_argnum both name args\[2\]"),
    (lambda model, state, x: (jnp.sum(x), model), 0, r"state_argnum 0 is a state of arrays, but there is a module in it"),
]  # fmt: skip


@pytest.mark.parametrize(("fun", "argnum", "text"), STATES, ids=range(len(STATES)))
def test_a_state_that_cannot_go_on_is_named(fun: Any, argnum: int, text: str) -> None:
    step = mm.nnx.jit(mm.nnx.microbatch(fun, argnum=2, num_microbatches=2, state_argnum=argnum))
    with pytest.raises(mm.errors.MicrobatchError, match=text):
        step(placed(), jnp.ones(()), X)


def test_one_microbatch_is_the_plain_call() -> None:
    model = placed()
    step = mm.nnx.jit(mm.nnx.microbatch(lambda model, x: jnp.sum(model(x)), argnum=-1, num_microbatches=1))
    np.testing.assert_allclose(step(model, X), jnp.sum(model.dense(X)), rtol=1e-5)
    assert int(model.calls[...]) == 1


def test_one_decorator_makes_several_steps() -> None:
    jit = mm.nnx.jit(out_shardings=None)
    steps = jit(lambda model, x: model(x)), jit(lambda model, x: 2 * model(x))
    one, other = (step(placed(), X) for step in steps)
    np.testing.assert_allclose(other, 2 * one, rtol=1e-6)


@pytest.mark.parametrize("count", [2, 8])
def test_microbatches_in_the_reference_change_modules_as_in_a_loop(count: int) -> None:
    """Under `nnx.jit` of Flax, where many of them are a scan, and under `ignore_transforms`."""

    def step(model: Any, x: Any) -> Any:
        def loss(model: Any, x: Any) -> Any:
            return jnp.mean(model(x) ** 2) * model.calls[...]

        return mm.nnx.microbatch(nnx.value_and_grad(loss), argnum=1, num_microbatches=count)(model, x)

    models = [placed() for _ in range(4)]
    with mm.ignore_transforms():
        ignoring = mm.nnx.jit(step)(models[1], X)
    results = [step(models[0], X), ignoring, nnx.jit(step)(models[2], X), mm.nnx.jit(step)(models[3], X)]
    assert [int(model.calls[...]) for model in models] == [count] * 4
    for found in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, results[0])


def test_one_stream_of_random_numbers_for_all_stages_is_a_pipeline() -> None:
    """Each layer's count goes on from the one before, through all stages, and on to the next microbatch."""

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5)

        def __call__(self, x: Any, rngs: nnx.Rngs) -> Any:
            return x + self.dropout(jnp.tanh(self.dense(x)), rngs=rngs)

    class Layers(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([mm.nnx.task(Layer(rngs), f"layer{i}", devices=[i]) for i in range(3)])

        def __call__(self, x: Any, rngs: nnx.Rngs) -> Any:
            for layer in self.layers:
                x = layer(x, rngs)
            return x

    def loss_of(model: Layers, rngs: nnx.Rngs, x: Any) -> Any:
        return jnp.mean((model(x, rngs) - 1) ** 2)

    def step(model: Layers, rngs: nnx.Rngs, x: Any) -> Any:
        grad = mm.nnx.microbatch(
            nnx.value_and_grad(loss_of), argnum=2, num_microbatches=4, schedule="1f1b", reduce="mean"
        )
        return grad(model, rngs, x)

    model, rngs, plain = Layers(nnx.Rngs(0)), nnx.Rngs(dropout=3), nnx.Rngs(dropout=3)
    x = jax.random.normal(jax.random.key(1), (8, 4))
    jitted = mm.nnx.jit(step, strict=True)
    assert jitted.lower(model, rngs, x).program.loops[0].in_order
    for _ in range(2):
        got = jitted(model, rngs, x)
        with mm.ignore_transforms():
            wanted = jitted(model, plain, x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
        assert int(rngs.dropout.count[...]) == int(plain.dropout.count[...])
    assert int(rngs.dropout.count[...]) == 2 * 4 * 3
