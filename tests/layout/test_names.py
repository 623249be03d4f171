"""Constraints from outside every task mean what the tasks where their values end up say of the names."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh import meta
from stages import assert_agrees, assert_same

pytestmark = pytest.mark.once

RULES = (("batch", "data"), ("hidden", "model"), ("embed", None))


def submeshes():
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    return tuple(Mesh(d, ("data", "model")) for d in devices)


def step(constrain, **loop):
    """A gradient step of two tasks, whose parameters are constrained before the tasks are called."""
    first, second = submeshes()
    a = mm.task(lambda w, x: jnp.tanh(x @ w), "a", mesh=first, logical_axes=RULES)
    b = mm.task(lambda w, h: h @ w, "b", mesh=second, logical_axes=(("wide", "data"), ("hidden", "model")))

    def loss(p, x):
        p = constrain(p)
        return jnp.mean(b(p["b"], a(p["a"], x)) ** 2)

    grad = jax.value_and_grad(loss)
    if loop:
        grad = mm.microbatch(grad, argnum=1, reduce="mean", **loop)

    def update(p, x):
        value, g = grad(p, x)
        return jax.tree.map(lambda w, d: w - 0.1 * d, p, g), value

    return update


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    return {"a": jax.random.normal(keys[0], (8, 8)), "b": jax.random.normal(keys[1], (8, 8))}, jax.random.normal(
        keys[2], (8, 8)
    )


def named(p):
    return mm.with_sharding_constraint(p, {"a": ("embed", "hidden"), "b": ("wide", "hidden")})


@pytest.mark.parametrize("loop", [{}, {"num_microbatches": 2, "schedule": "1f1b"}], ids=["whole", "1f1b"])
def test_names_are_read_by_the_rules_of_the_task_that_the_value_goes_to(loop):
    """`embed` is a name of the one task, `wide` of the other; both are laid out so, and no copy is made of a weight."""
    fun = step(named, **loop)
    p, x = arguments()
    lowered = mm.jit(fun, strict=True).lower(p, x)
    layout = lowered.layout
    specs = {layout.names[v]: d.spec for (v, _), d in layout.decisions.items()}
    assert specs["args[0]['a']"] == P(None, "model") and specs["args[0]['b']"] == P("data", "model")
    weights = [
        v
        for f in lowered.program.fragments
        for v in f.outvars
        if f.kind == "F" and v.aval.shape == (8, 8) and f.loop is not None
    ]
    assert not weights, "a constrained weight is kept for the backward pass of every microbatch"
    with mm.ignore_transforms():
        expected = jax.jit(fun)(p, x)
    assert_same(lowered.compile()(p, x), expected)


def test_a_name_that_nobody_knows_is_a_finding():
    """Also outside tasks: one warning that says what is known there, an error under strict."""
    fun = step(lambda p: mm.with_sharding_constraint(p, {"a": ("embed", "hiden"), "b": None}))
    with pytest.warns(UserWarning, match=r"outside every task: axis name 'hiden' of .* did you mean 'hidden'\?"):
        mm.jit(fun).lower(*arguments())
    with pytest.raises(mm.errors.AxisError, match="axis name 'hiden'"):
        mm.jit(fun, strict=True).lower(*arguments())


def test_a_dimension_that_does_not_divide_is_an_error():
    fun = step(lambda p: mm.with_sharding_constraint(p, {"a": (None, "hidden"), "b": None}))
    p, x = arguments()
    with pytest.raises(mm.errors.AxisError, match="outside every task: dimension 1 .* does not divide"):
        mm.jit(fun).lower({"a": jnp.ones((8, 7)), "b": jnp.ones((7, 8))}, x)


@pytest.mark.parametrize(
    "rules", [None, (("wide", "data"), ("embed", None), ("hidden", "model"))], ids=["of the tasks", "own"]
)
def test_boxes_that_are_opened_outside_tasks(rules):
    """Their names are read like those of constraints; rules of a box come after those of the tasks."""
    fun = step(meta.unbox)
    p, x = arguments()
    names = {"a": ("embed", "hidden"), "b": ("wide", "hidden")}
    boxed = {k: meta.LogicallyPartitioned(w, names[k], rules=rules) for k, w in p.items()}
    lowered = mm.jit(lambda p, x: fun(meta.unbox(p), x)[1]).lower(boxed, x)
    specs = {lowered.layout.names[v]: d.spec for (v, _), d in lowered.layout.decisions.items()}
    assert specs["args[0]['a'].value"] == P(None, "model") and specs["args[0]['b'].value"] == P("data", "model")


def test_one_device_says_nothing():
    """Where a task has no named axes, names mean replication, and nobody is warned."""
    plain = mm.task(lambda w, x: x @ w, devices=[0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = mm.jit(lambda w, x: plain(mm.with_sharding_constraint(w, ("what", "ever")), x))(
            jnp.eye(4), jnp.ones((2, 4))
        )
    assert_same(out, jnp.ones((2, 4)))


@pytest.mark.parametrize("names", [("batch", "batch"), ("data", "data"), (("data", "model"), "model")])
def test_one_name_at_two_dimensions_is_an_error(names):
    """In a task as in metadata: nothing could tell the dimensions apart."""
    first, _ = submeshes()
    task = mm.task(lambda x: mm.with_sharding_constraint(x, names), "t", mesh=first, logical_axes=RULES)
    with pytest.raises(mm.errors.AxisError, match="stands at more than one dimension"):
        mm.jit(task).lower(jnp.ones((4, 4)))


def test_fallbacks_of_flax():
    """Flax's own values are taken for ours, anything else is an error."""
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    from manymesh.meta._rules import as_fallback

    for ours, flaxs in zip(meta.RulesFallback, linen.spmd.RulesFallback, strict=True):
        assert as_fallback(flaxs) is as_fallback(ours) is ours
    mesh = submeshes()[0]
    with pytest.raises(mm.errors.AxisError, match="got no device axis"):
        meta.with_logical_constraint(jnp.ones(4), ("b",), [("c", "data")], mesh, linen.spmd.RulesFallback.RAISE_ERROR)
    with pytest.raises(mm.errors.AxisError, match="fallback 'raise'"):
        meta.with_logical_constraint(jnp.ones(4), ("b",), [("c", "data")], mesh, "raise")


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_constraint_of_flax_that_does_not_divide(rows, micro):
    """As JAX has it, which pads inside of a computation: a batch of one, as in serving."""
    nn = pytest.importorskip("flax.linen", reason="flax is not installed")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data"))

    def layer(w, x):
        x = nn.with_logical_constraint(x, ("batch", None))
        return nn.with_logical_constraint(jnp.tanh(x @ w), ("batch", None))

    tasks = [
        mm.task(layer, f"layer_{k}", mesh=m, logical_axes=[("batch", "data")])
        for k, m in enumerate(mm.submeshes(mesh, "stage"))
    ]

    def loss(w, x):
        return jnp.mean(tasks[1](w, tasks[0](w, x)) ** 2)

    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=micro, reduce="mean")
    for fun, count in ((grad, rows * micro), (lambda w, x: tasks[1](w, tasks[0](w, x)), rows)):
        assert_agrees(fun, jnp.eye(4), jnp.linspace(0, 1, 4 * count).reshape(-1, 4))
