"""Arguments of `manymesh.equinox.jit`: called what users call them, donated as they say, static where they are no arrays."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import manymesh as mm
import manymesh.equinox
from manymesh._api._names import names_of_arguments, names_of_results


class Net(eqx.Module):
    front: eqx.nn.Linear
    back: eqx.nn.Linear

    def __init__(self, key):
        task = mm.equinox.task
        self.front = task(eqx.nn.Linear(4, 4, key=key), "front", devices=[0])
        self.back = task(eqx.nn.Linear(4, 1, key=key), "back", devices=[1])

    def __call__(self, x):
        return self.back(jnp.tanh(self.front(x)))


def step(model, rate, batch, *, scale, power=2):
    loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(batch["x"]) ** power) * scale)(model)
    return {"loss": loss}, eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, grads))


def arguments():
    net = Net(jax.random.key(0))
    return (net, jnp.float32(0.1), {"x": jnp.ones((4, 4))}), {"scale": jnp.float32(2.0)}


LEAVES = [
    *(f"args[0].{part}.{leaf}" for part in ("front", "back") for leaf in ("weight", "bias")),
    "args[1]", "args[2]['x']", "kwargs['scale']",
]  # fmt: skip


def test_values_are_called_what_they_are_in_the_users_call():
    args, kwargs = arguments()
    lowered = mm.equinox.jit(step).lower(*args, **kwargs)
    assert names_of_arguments(lowered._in_tree) == LEAVES
    assert names_of_results(lowered._out_tree) == [
        "result[0]['loss']",
        *(name.replace("args[0]", "result[1]") for name in LEAVES[:4]),
    ]


def test_what_a_step_returns_is_the_next_value_of_what_it_took():
    """Each weight, and what Adam keeps of it, by its path: whatever is in the step with it stays where it is."""
    adam = optax.adam(1e-2)

    def train(model, state, batch):
        grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(batch["x"]) ** 2))(model)
        updates, state = adam.update(grads, state)
        return eqx.apply_updates(model, updates), state

    (net, _, batch), _ = arguments()
    state = adam.init(eqx.filter(net, eqx.is_array))
    traced = mm.equinox.jit(train).trace(net, state, batch)
    lowered = traced.lower()
    names, results = names_of_arguments(lowered._in_tree), names_of_results(lowered._out_tree)
    pairs = {names[i]: results[o] for i, o in traced._states(frozenset())}
    assert pairs == {name: f"result[{name[5]}]{name[7:]}" for name in names if not name.startswith("args[2]")}


@pytest.mark.parametrize("count", [3, 1, 0])
def test_the_first_argument_is_kept_also_by_its_name(count):
    """As `eqx.filter_jit` keeps it."""
    (model, rate, batch), kwargs = arguments()
    given = {"model": model, "rate": rate, "batch": batch}
    named = dict(reversed(list(given.items())[count:]))
    mm.equinox.jit(step, donate="all-except-first")(*list(given.values())[:count], **named, **kwargs)
    assert not any(x.is_deleted() for x in jax.tree.leaves(model))
    assert all(x.is_deleted() for x in jax.tree.leaves((rate, batch, kwargs)))


@pytest.mark.parametrize(
    ("donate", "gone"), [("none", []), ("all", LEAVES), ("all-except-first", LEAVES[4:])], ids=["none", "all", "others"]
)
def test_what_may_be_reused_is_gone_after_the_call(donate, gone):
    """Nothing of the step may be alive twice; keywords are donated too."""
    args, kwargs = arguments()
    jitted = mm.equinox.jit(step, donate=donate)
    jitted(*args, **kwargs)
    leaves = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, jax.Array))
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    assert [name for name, x in zip(LEAVES, arrays, strict=True) if x.is_deleted()] == gone
    if gone:
        with pytest.raises(RuntimeError, match="deleted") as raised:
            jitted(*args, **kwargs)
        assert f"{gone[0]} " in str(raised.value)


def test_an_array_given_twice_is_told_by_its_names():
    (net, rate, batch), kwargs = arguments()
    with pytest.raises(
        ValueError, match=r"kwargs\['scale'\] and args\[1\] are one array|args\[1\] and kwargs\['scale'\]"
    ):
        mm.equinox.jit(step, donate="all")(net, rate, batch, scale=rate)


def test_what_is_no_array_is_part_of_the_program_wherever_it_is():
    args, kwargs = arguments()
    jitted = mm.equinox.jit(step)
    found = [jitted(*args, **kwargs, power=power)[0]["loss"] for power in (2, 2, 4)]
    wanted = [eqx.filter_jit(step)(*args, **kwargs, power=power)[0]["loss"] for power in (2, 2, 4)]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert repr(jitted) == "equinox.jit(step): 2 programs compiled"


def test_a_state_that_would_be_concatenated():
    """What is meant is state_argnum; where the words say something else of the state, they hold."""

    class Counting(eqx.Module):
        calls: eqx.nn.StateIndex

        def __call__(self, x, state):
            return x, state.set(self.calls, state.get(self.calls) + 1), jnp.sum(x)

    index = eqx.nn.StateIndex(jnp.zeros(()))
    model, state = eqx.nn.make_with_state(lambda: Counting(index))()
    loop = functools.partial(mm.microbatch, mm.task(model, "counting", devices=[1]), num_microbatches=2)
    x = jnp.ones((4, 2))
    text = r"result\[1\] is an equinox.nn.State, .* by state_argnum="
    for reduce in ("concat", ("concat", "concat", "sum")):
        with pytest.raises(mm.errors.MicrobatchError, match=text):
            mm.equinox.jit(loop(reduce=reduce))(x, state)
    rows, last, total = mm.equinox.jit(loop(reduce=("concat", "last", "sum")))(x, state)
    assert rows.shape == (4, 2) and last.get(model.calls) == 1 and total == 8


def test_a_module_that_is_moved_in_each_call_is_placed_as_the_warning_says():
    width = 512
    devices = jax.devices()[:2]
    first, second = (jax.sharding.Mesh(np.array([d]), ("x",)) for d in devices)
    keys = jax.random.split(jax.random.key(0))
    layers = [eqx.nn.Linear(width, width, key=k) for k in keys]
    model = eqx.nn.Sequential([layers[0], eqx.nn.Lambda(jnp.tanh), layers[1]])

    @mm.equinox.jit
    def evaluate(model, x):
        x = mm.task(lambda layer, x: layer(x), "front", mesh=first)(model[0], x)
        return mm.task(lambda layer, x: layer(x), "back", mesh=second)(model[2], model[1](x)).sum()

    x = jnp.ones(width)
    expected = None
    with pytest.warns(
        UserWarning, match=r"evaluate: each of 3 calls moved args\[0\] \(2 arrays, 1.0 MiB\) to where"
    ) as found:
        for _ in range(3):
            expected = evaluate(model, x)
    advice = str(found[0].message).split("and pass that: ")[1].removesuffix(" for these arguments")
    assert "evaluate.lower(...), 0)" in advice
    placed = eval(
        advice.replace("(...)", "(model, x)"),
        globals(),
        {"args": (model, x), "evaluate": evaluate, "model": model, "x": x},
    )
    assert placed[2].weight.devices() == {devices[1]} and placed[1].fn is jnp.tanh
    evaluate.clear_cache()
    for _ in range(4):
        assert evaluate(placed, x) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda described: described(functools.partial(eqx.nn.Linear, 4, use_bias=False))(4, key=jax.random.key(0)),
        lambda described: described(eqx.nn.Linear(4, 4, key=jax.random.key(0)).__call__),
        lambda described: described(jax.nn.relu),
    ],
    ids=["a class with arguments", "a method", "a function"],
)
def test_what_else_becomes_a_task(make):
    """Whatever is called like a layer."""
    layer = make(lambda layer: mm.equinox.task(layer, "layer", devices=[1]))
    assert mm.equinox.jit(lambda layer, x: layer(x))(layer, jnp.ones(4)).devices() == {jax.devices()[1]}


def test_another_word_for_what_is_donated():
    with pytest.raises(mm.errors.ArgumentError, match="one of all, all-except-first, none, found 'first'"):
        mm.equinox.jit(step, donate="first")


def test_an_argument_that_cannot_be_hashed():
    """Nothing that is no array can be told from others then."""

    class Unhashable:
        __hash__ = None

    with pytest.raises(
        mm.errors.ArgumentError, match="no array and cannot be hashed.*make it an array, or close over it"
    ):
        mm.equinox.jit(lambda other, x: x)(Unhashable(), jnp.ones(4))


class Keeps(eqx.Module):
    front: eqx.nn.Linear
    back: object

    def __call__(self, x):
        return self.back(jnp.tanh(self.front(x)))


KEPT = {
    "mm.task of a module": lambda layer: mm.task(layer, "back", devices=[1]),
    "mm.task of a method": lambda layer: mm.task(layer.__call__, "back", devices=[1]),
    "mm.task that closes over a module": lambda layer: mm.task(lambda x: layer(x), "back", devices=[1]),
    "equinox.task that closes over a module": lambda layer: mm.equinox.task(lambda x: layer(x), "back", devices=[1]),
    "equinox.task of a module": lambda layer: mm.equinox.task(layer, "back", devices=[1]),
    "equinox.task of a method": lambda layer: mm.equinox.task(layer.__call__, "back", devices=[1]),
}


# Equinox tells of one of them itself, where the module is made.
@pytest.mark.filterwarnings("ignore:(?s).*Possibly assigning a JAX-transformed callable:UserWarning")
@pytest.mark.parametrize("how", KEPT)
def test_a_task_that_a_module_keeps(how):
    """Its arrays get gradients, as those of a layer do, or the step says why not."""
    front, layer = (eqx.nn.Linear(4, 4, key=key) for key in jax.random.split(jax.random.key(0)))
    model = Keeps(mm.equinox.task(front, "front", devices=[0]), KEPT[how](layer))
    grad = eqx.filter_grad(lambda model, x: jnp.sum(jax.vmap(model)(x) ** 2))
    x = jnp.arange(8.0).reshape(2, 4)
    if how in ("equinox.task of a module", "equinox.task of a method"):
        plain = eqx.filter_jit(grad)(Keeps(front, layer), x)
        found = mm.equinox.jit(grad, strict=True)(model, x)
        for a, b in zip(*map(jax.tree.leaves, (found, plain)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
        return
    with pytest.warns(
        UserWarning, match=r"args\[0\].back is a function of a Linear .* no gradient and no update"
    ) as said:
        mm.equinox.jit(grad).lower(model, x)
    assert len(said) == 1
    with pytest.raises(mm.errors.TaskError, match="make it with manymesh.equinox.task"):
        mm.equinox.jit(lambda *, model, x: grad(model, x), strict=True).lower(model=model, x=x)


def test_a_task_that_a_module_keeps_without_arrays():
    """An activation function, or a closure over a layer that has none."""
    pool = eqx.nn.Dropout(0.5, inference=True)
    layer = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    for function in (jax.nn.relu, lambda x: pool(x)):
        model = Keeps(layer, mm.task(function, "back", devices=[1]))
        mm.equinox.jit(lambda model, x: model(x), strict=True)(model, jnp.ones(4))
