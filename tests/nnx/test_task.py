"""NNX modules as tasks, in every form, and scopes by which patterns know them."""

from __future__ import annotations

import contextlib
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import manymesh as mm
import manymesh.nnx
from flax import linen as nn
from flax import nnx

X = jax.random.normal(jax.random.key(0), (4, 4))


class Inner(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.dense(x))

    def twice(self, x: Any) -> Any:
        return self(self(x))


class Outer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Inner(rngs), Inner(rngs)])
        self.head = Inner(rngs)

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head.twice(x)


def fragments(step: Any, *args: Any) -> list[tuple[str, int]]:
    return [(f.name, f.submesh) for f in step.lower(*args).program.fragments]


class Tied(nnx.Module):
    """A table at both ends, and a layer between, one or both of which the model keeps as tasks."""

    def __init__(self, kept: str, task: Any = mm.nnx.task) -> None:
        rngs = nnx.Rngs(0)
        self.embed, self.dense = nnx.Embed(8, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.kept = kept
        if kept == "a method of a child":
            self.attend = task(self.embed.attend, "attend", devices=[1])
        if kept == "a method of its own":
            self.middle = task(self.middle, "middle", devices=[1])  # type: ignore[method-assign]

    def middle(self, x: Any) -> Any:
        return self.norm(jnp.tanh(self.dense(x)))

    def __call__(self, tokens: Any) -> Any:
        x = self.middle(self.embed(tokens))
        return self.attend(x) if self.kept == "a method of a child" else self.embed.attend(x)


@pytest.mark.parametrize("kept", ["a method of a child", "a method of its own"])
def test_a_method_that_the_model_keeps_is_of_the_model_in_the_step(kept: str) -> None:
    """Gradients reach it, statistics change, and nothing else does."""

    def loss(model: Tied, tokens: Any) -> Any:
        return jnp.mean(model(tokens) ** 2)

    def step(model: Tied, optimizer: Any, tokens: Any) -> Any:
        value, grads = nnx.value_and_grad(loss)(model, tokens)
        optimizer.update(model, grads)
        return value

    results = []
    for jit, kind in ((mm.nnx.jit(strict=True), kept), (nnx.jit, "none")):
        model = Tied(kind)
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
        run = jit(step)
        losses = [float(run(model, optimizer, jnp.arange(6) % 4)) for _ in range(3)]
        state = {"embed": model.embed.embedding, "kernel": model.dense.kernel, "mean": model.norm.mean}
        results.append((losses, {k: np.asarray(v[...]) for k, v in state.items()}))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)
    assert results[0][0][2] < results[0][0][0]


@pytest.mark.parametrize(
    "attend",
    [
        lambda embed: mm.task(embed.attend, "attend", devices=[1]),
        lambda embed: mm.nnx.task(lambda x: embed.attend(x), "attend", devices=[1]),
    ],
    ids=["a method", "a closure"],
)
def test_a_kept_function_of_a_module_is_told_of(attend: Any) -> None:
    """Its weights would be constants, and its gradients zero."""
    model = Tied("a method of a child", lambda method, *_, **__: attend(method.__self__))
    with pytest.warns(UserWarning, match="'attend' of Tied is a function of a module Embed.*manymesh.nnx.task"):
        mm.nnx.jit(lambda model: model(jnp.arange(4))).lower(model)


def test_a_kept_function_of_a_frozen_module_is_right() -> None:
    """A teacher that is no argument of the step is meant as it is."""
    teacher = nnx.Embed(8, 4, rngs=nnx.Rngs(1))
    task = mm.nnx.task(lambda x: teacher.attend(x), "teacher", devices=[1])
    model = Tied("a method of a child", lambda *_, **__: task)
    y = mm.nnx.jit(lambda model: model(jnp.arange(4)), strict=True)(model)
    np.testing.assert_allclose(
        y, Tied("a method of a child", lambda *_, **__: teacher.attend)(jnp.arange(4)), atol=1e-6
    )


def test_every_form_of_a_model() -> None:
    place = functools.partial(mm.nnx.task, name="there", devices=[1])
    plain = Inner(nnx.Rngs(0))
    wanted = plain(X)
    step = mm.nnx.jit(lambda f, x: f(x), static_argnums=0)
    for made in (
        place(Inner)(nnx.Rngs(0)),
        place(functools.partial(Inner, nnx.Rngs(0)))(),
        place(plain),
        place(plain.__call__),
        functools.partial(place(lambda m, x: m(x)), plain),
    ):
        call = (lambda x, made=made: made(x)) if isinstance(made, nnx.Module) else made
        out = step(call, X)
        np.testing.assert_allclose(out, wanted, rtol=1e-6)
        assert sorted(d.id for d in out.devices()) == [1]
    wrapped = place(plain)
    assert type(wrapped) is not type(plain) and wrapped.dense is plain.dense
    np.testing.assert_allclose(wrapped(X), wanted)  # outside a step it is the plain one
    assert jax.tree.structure(nnx.state(wrapped)) == jax.tree.structure(nnx.state(plain))
    again = pickle.loads(pickle.dumps(mm.nnx.task(nnx.Dict, devices=[1])(a=1)))
    assert type(again) is mm.nnx.task(nnx.Dict, devices=[1])


class Counted(Inner):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return super().__call__(x)


def test_a_variable_that_is_only_read_is_no_result() -> None:
    """Two tasks of one module: its count goes from one to the other, its parameters do not, though both constrain them."""
    with nnx.use_eager_sharding(False):
        shared = Counted(nnx.Rngs(0))
        shared.dense.kernel = nnx.Param(shared.dense.kernel[...], out_sharding=(None, "model"))
    meshes = [jax.make_mesh((2,), ("model",), devices=jax.devices()[i : i + 2]) for i in (0, 2)]
    models = [mm.nnx.task(shared, name, mesh=mesh) for name, mesh in zip(("front", "back"), meshes, strict=True)]
    step = mm.nnx.jit(lambda models, x: models[1](models[0](x[:2])))
    program = step.lower(models, X).program
    assert {e.var.aval.shape for e in program.edges} == {(2, 4), ()}
    outs = {f.name: sorted(v.aval.shape for v in f.outvars) for f in program.fragments}
    assert outs == {"front": [(), (2, 4)], "back": [(), (2, 4)]}
    np.testing.assert_allclose(step(models, X), Inner(nnx.Rngs(0)).twice(X[:2]), rtol=1e-5)
    assert int(shared.calls[...]) == 2


def test_a_step_may_read_a_module_that_it_closes_over() -> None:
    """As under `nnx.jit`; it cannot change one."""
    model = mm.nnx.task(Inner(nnx.Rngs(0)), devices=[1])
    np.testing.assert_allclose(mm.jit(lambda x: model(x))(X), Inner(nnx.Rngs(0))(X), rtol=1e-6)
    counted = mm.nnx.task(Counted(nnx.Rngs(0)), devices=[1])
    with pytest.raises(Exception, match="Cannot mutate"):
        mm.jit(lambda x: counted(x))(X)


def test_an_ensemble_in_a_task_under_vmap() -> None:
    cls = mm.nnx.task(Counted, "ensemble", devices=[1])
    ensemble = nnx.vmap(lambda rngs: cls(rngs))(nnx.Rngs(0).split(3))
    step = mm.nnx.jit(lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(m, x))
    out = step(ensemble, X)
    assert out.shape == (3, 4, 4) and sorted(d.id for d in out.devices()) == [1]
    np.testing.assert_allclose(out[2], jnp.tanh(X @ ensemble.dense.kernel[2] + ensemble.dense.bias[2]), rtol=1e-5)
    assert ensemble.calls[...].tolist() == [1, 1, 1]


def test_names_of_variables_become_constraints_by_the_rules_of_the_task() -> None:
    mesh = jax.make_mesh((1, 2), ("data", "model"), devices=jax.devices()[2:4])
    with nnx.use_eager_sharding(False):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "hidden"))
        boxed = nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0))
        rules = nnx.Param(jnp.ones((8, 4)), out_sharding=("wide", None), sharding_rules=(("wide", "model"),))
    place = {"mesh": mesh, "logical_axes": [("hidden", "model"), ("embed", None)]}
    model = mm.nnx.task(boxed, **place)
    step = mm.nnx.jit(lambda model, rules, x: model(x) @ mm.nnx.task(lambda r: r[...], **place)(rules))
    step(model, rules, X)
    assert tuple(model.kernel.get_value().sharding.spec) == (None, "model")
    assert tuple(rules.get_value().sharding.spec) == ("model",)
    wrong = mm.nnx.task(boxed, "wrong", mesh=mesh, logical_axes=[("hiden", "model")])
    with pytest.raises(mm.errors.AxisError, match="task 'wrong': axis name 'embed' .* is in no rule"):
        mm.nnx.jit(lambda model, x: model(x), strict=True)(wrong, X)


def test_patterns_know_modules_by_their_paths() -> None:
    model = Outer(nnx.Rngs(0))
    wanted = model(X)
    step = mm.nnx.jit(lambda model, x: jnp.sum(model(x)))
    grad = mm.nnx.jit(lambda model, x: nnx.value_and_grad(lambda m, x: jnp.sum(m(x)))(model, x))
    place = lambda match, backward: mm.Task(f"block_{match[0]}", devices=[int(match[0])])  # noqa: E731
    with mm.register_task("[01]", callback=place), mm.register_task(r"head\.twice", devices=[2], name="head"):
        assert [name for name, _ in fragments(step, model, X)] == ["block_0", "block_1", "head"]
        loss, grads = grad(model, X)
        plain = mm.jit(lambda model, x: model(x))  # a module is a pytree, so this sees it too
        assert [name for name, _ in fragments(plain, model, X)] == ["block_0", "block_1", "head"]
    np.testing.assert_allclose(loss, jnp.sum(wanted), rtol=1e-5)
    homes = [sorted(d.id for d in block.dense.kernel.devices()) for block in (*model.blocks, model.head)]
    assert homes == [[0], [1], [2]]


class Transformed(nnx.Module):
    """Calls what is below it in functions that NNX transforms, which get new modules."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Inner(rngs), Inner(rngs)])
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))(rngs.split(2))

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return nnx.scan(lambda x, one: one(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)


def test_patterns_know_modules_by_their_paths_in_functions_that_are_transformed() -> None:
    model = Transformed(nnx.Rngs(0))
    before, step = nnx.graphdef(model), mm.nnx.jit(nnx.value_and_grad(lambda model, x: jnp.sum(model(x))))
    with mm.ignore_transforms():
        loss, _ = step(model, X)
    places = {"blocks/0": 0, "blocks/1/dense": 1, "stack": 2}
    with contextlib.ExitStack() as stack:
        for pattern, device in places.items():
            stack.enter_context(mm.register_task(pattern, devices=[device]))
        assert {name for f in step.lower(model, X).program.fragments for name in f.tasks} == set(places)
        np.testing.assert_allclose(step(model, X)[0], loss, rtol=1e-5)
    homes = [next(iter(k.devices())).id for k in (model.blocks[0].dense.kernel, model.blocks[1].dense.kernel)]
    assert [*homes, next(iter(model.stack.kernel.devices())).id] == [0, 1, 2]
    assert nnx.graphdef(model) == before  # nothing of it stays in the module, which would make steps compile again


def test_patterns_know_modules_that_a_step_calls_by_their_paths_in_its_arguments() -> None:
    step = mm.nnx.jit(lambda model, x: model.head(model.blocks[1](x)))
    with mm.register_task("blocks/1", devices=[1]), mm.register_task("head", devices=[2]):
        assert fragments(step, Outer(nnx.Rngs(0)), X) == [("blocks/1", 0), ("head", 1)]


def test_names_of_variables_travel_to_tasks_of_patterns() -> None:
    """And a variable that the step leaves alone is no result of any task."""
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[2:4])
    with nnx.use_eager_sharding(False):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "hidden"))
        model = nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0))
    step = mm.nnx.jit(lambda model, x: model(x))
    with mm.register_task("Linear", mesh=mesh, logical_axes=[("hidden", "model")]):
        (fragment,) = step.lower(model, X).program.fragments
        assert [v.aval.shape for v in fragment.outvars] == [(4, 8)]
        step(model, X)
        jaxpr = step.trace(model, X).jaxpr.jaxpr
        assert [v in jaxpr.invars for v in jaxpr.outvars] == [
            True,
            True,
            False,
        ]  # bias and kernel come out as they came
    assert tuple(model.kernel.get_value().sharding.spec) == (None, "model")


@pytest.mark.parametrize("optimizer", [optax.novograd, optax.contrib.muon])
def test_a_variable_with_names_may_hold_what_has_other_dimensions(optimizer: Any) -> None:
    """NovoGrad keeps a number for each parameter in a variable like it, Muon nothing for a bias: the names are not for that."""

    def trained(jit: Any) -> Any:
        with nnx.use_eager_sharding(False):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "hidden"))
            model = nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0))
            state = nnx.Optimizer(model, optimizer(1e-2), wrt=nnx.Param)

        @jit
        def step(model, state, x):
            value, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
            state.update(model, grads)
            return value

        return [float(step(model, state, X)) for _ in range(3)]

    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[2:4])
    with mm.register_task("Linear", mesh=mesh, logical_axes=[("hidden", "model"), ("embed", None)]):
        np.testing.assert_allclose(trained(mm.nnx.jit), trained(nnx.jit), rtol=1e-5)


class Held(nnx.Module):
    def __init__(self, layers: Any) -> None:
        self.layers = layers

    def total(self) -> Any:
        return jnp.sum(self.layers.kernel[...])


def test_a_stack_whose_new_dimension_has_no_name_says_how_to_name_it() -> None:
    """NNX counts the names of a variable from its first dimension, which is that of the layers."""
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "hidden"))

    def stack(**options: Any) -> Any:
        with nnx.use_eager_sharding(False):
            layers = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs, kernel_init=init), **options)(
                nnx.Rngs(0).split(3)
            )
        return mm.nnx.task(
            Held(layers), mesh=mesh, logical_axes=[("embed", "model"), ("hidden", None)], methods=["total"]
        )

    read = mm.nnx.jit(lambda stack: stack.total())
    assert read.eval_shape(stack(transform_metadata={nnx.PARTITION_NAME: None})).shape == ()
    with pytest.raises(mm.errors.AxisError, match=r"dimension 0 \('embed'\)") as caught:
        read(stack())
    assert any("transform_metadata={nnx.PARTITION_NAME: 'layers'}" in note for note in caught.value.__notes__)


def test_a_method_that_calls_the_one_it_overrides_opens_one_scope() -> None:
    model = nnx.Dict(head=Counted(nnx.Rngs(0)))

    class Root(nnx.Module):
        def __init__(self) -> None:
            self.head = model.head

        def __call__(self, x: Any) -> Any:
            return self.head(x)

    with (
        mm.register_task("Counted", devices=[1]),
        mm.register_task("head", devices=[0]),
        pytest.warns(UserWarning, match="'Counted'.* matches no scope"),
    ):
        assert [f.name for f in mm.nnx.jit(lambda m, x: m(x)).lower(Root(), X).program.fragments if f.tasks] == ["head"]


def test_a_task_of_functions_refuses_to_lose_what_changes() -> None:
    """`mm.task` gives the function a module of its own. What is returned is not lost, and nothing is of what is only read."""
    norm, x = nnx.BatchNorm(4, rngs=nnx.Rngs(0)), jnp.arange(12.0).reshape(3, 4)
    changing = mm.task(lambda norm, x: norm(x), "norm", devices=[0])
    with pytest.raises(
        mm.errors.TaskError, match=r"task 'norm': the function changes args\[0\].* 1 more in place.*nnx\.task"
    ):
        mm.nnx.jit(lambda norm, x: changing(norm, x))(norm, x)
    returning = mm.task(lambda norm, x: (norm(x), norm), "norm", devices=[0])
    y, after = mm.nnx.jit(lambda norm, x: returning(norm, x))(norm, x)
    expected = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(y, expected(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after.mean[...], expected.mean[...], rtol=1e-6)
    reading = mm.task(lambda norm, x: norm(x, use_running_average=True), "norm", devices=[0])
    np.testing.assert_allclose(mm.nnx.jit(lambda norm, x: reading(norm, x))(norm, x), x / jnp.sqrt(1 + 1e-5), rtol=1e-5)


def test_what_cannot_be_a_task() -> None:
    import flax.linen as nn

    with pytest.raises(mm.errors.TaskError, match=r"a Linen module takes manymesh\.flax\.task"):
        mm.nnx.task(nn.Dense, devices=[0])
    for several in ({"a": Inner(nnx.Rngs(0))}, [Inner(nnx.Rngs(0))]):
        with pytest.raises(mm.errors.TaskError, match="found (dict|list); make a task of each module in it"):
            mm.nnx.task(several, devices=[0])


def test_a_module_of_linen_behind_a_bridge() -> None:
    """Its scopes are known by name; the bridge takes what it holds for variables, but not the path that it carries."""

    class Halves(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(2, name="back")(jnp.tanh(nn.Dense(4, name="front")(x)))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.halves = nnx.bridge.lazy_init(nnx.bridge.ToNNX(Halves(), rngs=rngs), X)

        def __call__(self, x: Any) -> Any:
            return self.halves(x)

    model = Model(nnx.Rngs(0))
    step = mm.nnx.jit(nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2)))
    expected = jax.device_get(step(model, X))
    with mm.register_task("front", devices=[1]), mm.register_task("back", devices=[2]):
        tasks = [f.name for f in step.lower(model, X).program.fragments if f.tasks]
        assert tasks == ["front", "back", "back_bwd", "front_bwd"]
        jax.tree.map(np.testing.assert_array_almost_equal, jax.device_get(step(model, X)), expected)
    assert set(vars(model.halves)) == set(vars(Model(nnx.Rngs(0)).halves))


class Stacked(nnx.Module):
    """Layers in one stack, each a task, computed again for the backward pass."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.vmap(lambda rngs: mm.nnx.task(Inner(rngs), "layer", devices=[1]))(rngs.split(4))

    def __call__(self, x: Any) -> Any:
        one = nnx.remat(lambda x, layer: layer(x))
        return nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def test_weights_that_remat_hands_on_in_a_scan_are_taken_apart_once() -> None:
    """Not in each microbatch, which would hold a copy of all of them, and know no parameters in the task."""

    def step(model: Stacked, x: Any) -> None:
        grad = nnx.grad(lambda model, x: jnp.mean(model(x) ** 2))
        grads = mm.nnx.microbatch(grad, argnum=1, num_microbatches=2, schedule="gpipe", reduce="mean")(model, x)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))

    ours, theirs = Stacked(nnx.Rngs(0)), Stacked(nnx.Rngs(0))
    jitted = mm.nnx.jit(step)
    lowered = jitted.lower(ours, X)
    assert {f.name[:5] for f in lowered.program.fragments if f.loop is not None} == {"layer"}
    (line,) = (line for line in lowered.report().tasks if line.name == "layer")
    assert line.parameters == 4 * (4 * 4 + 4)
    jitted(ours, X)
    with mm.ignore_transforms():
        nnx.jit(step)(theirs, X)
    for found, wanted in zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(theirs)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
