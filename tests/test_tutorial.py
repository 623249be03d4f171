"""The programs by which one learns to place a model: the same network, placed in each of the ways there are.

Every program equals plain JAX in values and gradients, and however its tasks were made, it is one program:
the same fragments, the same values that cross, the same bytes.
"""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import manymesh as mm
from stages import assert_same, reference

pytestmark = pytest.mark.once

WIDTH, ROWS, LAYERS = 16, 24, 6


@pytest.fixture(autouse=True)
def no_tasks_left():
    """What one test registers does not place another's program."""
    yield
    mm.clear_tasks()


def submesh(layer, layers=LAYERS, size=2):
    """The first half of the layers on devices 0 and 1, the second half on 2 and 3."""
    start = size * (2 * layer // layers)
    return Mesh(np.array(jax.devices()[start : start + size]), ("model",))


def parameters():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 4, jnp.float32) for _ in range(LAYERS)]


def batch():
    return jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), jnp.float32)


def dense(w, x):
    """A residual layer that says how it wants its hidden values to lie."""
    h = mm.with_sharding_constraint(jnp.tanh(x @ w), (None, "hidden"))
    return h + x


RULES = [("hidden", "model")]


def explicit(i, w, x):
    return mm.task(dense, f"layer_{i}", mesh=submesh(i), logical_axes=RULES)(w, x)


def plain(i, w, x):
    """Plain JAX: the scope has a name, and that is all."""
    with jax.named_scope(f"layer_{i}"):
        return dense(w, x)


def loss(layer, remat=0):
    """The mean square of all layers, of which each group of ``remat`` is rematerialised."""

    def group(first, ws, x):
        for i, w in enumerate(ws, first):
            x = layer(i, w, x)
        return x

    def f(ws, x):
        step = remat or len(ws)
        run = jax.checkpoint(group, static_argnums=0) if remat else group
        for first in range(0, len(ws), step):
            x = run(first, ws[first : first + step], x)
        return jnp.mean(x**2)

    return f


def by_name(stack):
    """One registration for each layer."""
    for i in range(LAYERS):
        stack.enter_context(mm.register_task(f"layer_{i}", mesh=submesh(i), logical_axes=RULES))


def by_expression(stack):
    """One expression for all; the callback places each match, its backward pass where its forward pass is."""
    seen = []

    def place(match, is_backward):
        seen.append(is_backward)
        return mm.Task(mesh=submesh(int(match[1])))

    stack.enter_context(mm.register_task(r"layer_(\d+)", callback=place, logical_axes=RULES))
    return seen


def program(fun, *args):
    return repr(mm.jit(fun).lower(*args).program)


def assert_one_program(make, *args, register=by_expression):
    """The program with tasks registered is that with tasks written down, and it computes what plain JAX does."""
    written = program(make(explicit), *args)
    with contextlib.ExitStack() as stack:
        register(stack)
        step = mm.jit(make(plain))
        assert repr(step.lower(*args).program) == written
        actual = step(*args)
        assert_same(actual, reference(step, *args))
    return actual


def test_explicit_tasks():
    """Written into the model."""
    step = mm.jit(jax.value_and_grad(loss(explicit)))
    found = step.lower(parameters(), batch()).program
    assert [f.name for f in found.fragments][:LAYERS] == [f"layer_{i}" for i in range(LAYERS)]
    assert [f.submesh for f in found.fragments][:LAYERS] == [0, 0, 0, 1, 1, 1]
    assert_same(step(parameters(), batch()), reference(step, parameters(), batch()))


def test_implicit_tasks_by_name():
    """The model stays as it is."""
    assert_one_program(lambda layer: jax.value_and_grad(loss(layer)), parameters(), batch(), register=by_name)


def test_implicit_tasks_by_expression():
    """The callback is asked about both passes."""
    assert_one_program(lambda layer: jax.value_and_grad(loss(layer)), parameters(), batch())
    with contextlib.ExitStack() as stack:
        seen = by_expression(stack)
        program(jax.value_and_grad(loss(plain)), parameters(), batch())
        assert sorted(seen) == [False] * LAYERS + [True] * LAYERS


@pytest.mark.parametrize("remat", [1, 3])
def test_rematerialised_layers(remat):
    """`jax.checkpoint` around each layer, and around groups of three: fewer values wait for the backward pass."""
    make = lambda layer: jax.value_and_grad(loss(layer, remat))  # noqa: E731
    assert_one_program(make, parameters(), batch())
    with contextlib.ExitStack() as stack:
        by_expression(stack)
        names = re.findall(r"^  (\S+): submesh \d, (.*)$", program(make(plain), parameters(), batch()), re.M)
    forward = dict(names)["layer_0"]
    assert forward.endswith("-> 1")  # nothing but its result
    # Computed again and differentiated: in one where nothing is in between, the other layers of the group.
    assert ("layer_0_bwd_2" in dict(names)) == (remat > 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_microbatches_with_work_before_and_after(schedule):
    """The batch is prepared before the loop; after it the gradients are clipped and applied."""

    def make(layer):
        grad = mm.microbatch(
            jax.value_and_grad(loss(layer)), argnum=1, num_microbatches=4, schedule=schedule, reduce="mean"
        )

        def step(ws, x):
            x = (x - jnp.mean(x, axis=0)) / (jnp.std(x, axis=0) + 1e-3)
            value, grads = grad(ws, x)
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
            grads = [g * jnp.minimum(1.0, 0.1 / norm) for g in grads]
            return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

        return step

    ws, value = assert_one_program(make, parameters(), batch())
    assert [{d.id for d in w.devices()} for w in ws] == [{0, 1}] * 3 + [{2, 3}] * 3


def test_rematerialised_layers_in_microbatches():
    """All of it at once."""
    make = lambda layer: mm.microbatch(  # noqa: E731
        jax.value_and_grad(loss(layer, 3)), argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean"
    )
    assert_one_program(make, parameters(), batch())
