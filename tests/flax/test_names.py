"""Wrapping a module never renames its parameters, and never changes what it computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from linen_models import MODELS, on_device_0, plain, rows
from stages import assert_same

pytestmark = pytest.mark.once

each_model = pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)


def init(model):
    return model.init(jax.random.key(0), rows())


def described(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), x.dtype), tree)


@each_model
def test_the_parameters_are_those_of_the_plain_model(build):
    """The same names in the same order with the same bits: a checkpoint fits with and without tasks."""
    expected = init(build(plain))
    found = init(build(on_device_0))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@each_model
def test_also_where_they_are_created_in_a_step(build):
    """Under ``mm.jit`` modules are lifted, which must not show in the names."""
    expected = jax.eval_shape(lambda: init(build(plain)))
    found = mm.jit(lambda: init(build(on_device_0))).eval_shape()
    assert described(found) == described(expected)


@each_model
def test_values_and_gradients_are_those_of_the_plain_model(build):
    """In a compiled step, where the parameters enter each task as its arguments; also the gradient of the input."""

    def loss_of(model):
        return lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)

    variables = init(build(plain))
    expected = jax.jit(jax.value_and_grad(loss_of(build(plain)), argnums=(0, 1)))(variables, rows())
    compiled = (
        mm.jit(jax.value_and_grad(loss_of(build(on_device_0)), argnums=(0, 1))).lower(variables, rows()).compile()
    )
    assert_same(compiled(variables, rows()), expected)
    names = [fragment.name for fragment in compiled.program.fragments]
    assert any(name.endswith("_bwd") for name in names), "without a task the test compares nothing"
