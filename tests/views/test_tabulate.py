"""One table for every framework."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import manymesh as mm
from manymesh import inspect
from manymesh.errors import ArgumentError, AxisError
from manymesh.flax import shard_axes

WIDTH = 4


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, use_bias=False, kernel_init=shard_axes("embed", "hidden"))(x)


def linen():
    return jax.eval_shape(Linen().init, jax.random.key(0), jnp.ones((1, WIDTH)))


def train_state():
    params = Linen().init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=Linen().apply, params=params, tx=optax.sgd(0.1, momentum=0.9))


def nnx_module():
    with nnx.use_eager_sharding(False):
        kernel = nnx.with_partitioning(nnx.initializers.ones_init(), ("embed", "hidden"))
        return nnx.Linear(WIDTH, 8, use_bias=False, kernel_init=kernel, rngs=nnx.Rngs(0))


MODELS = {
    "Linen variables": (linen, {"params/Dense_0/kernel": ("embed", "hidden")}),
    "Linen train state": (
        train_state,
        {"params/Dense_0/kernel": ("embed", "hidden"), "opt_state/0/trace/Dense_0/kernel": ("embed", "hidden")},
    ),
    "NNX module": (nnx_module, {"kernel": ("embed", "hidden")}),
    "NNX modules in a tree": (lambda: {"up": nnx_module()}, {"up/kernel": ("embed", "hidden")}),
    "Equinox module": (lambda: eqx.nn.Linear(WIDTH, 8, use_bias=False, key=jax.random.key(0)), {"weight": None}),
    "plain tree": (lambda: {"w": jnp.ones((WIDTH, 8))}, {"w": None}),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_listed_with_their_names(name):
    """Path, names of axes, size; in text and in HTML."""
    make, expected = MODELS[name]
    table = inspect.tabulate(make(), title="what it has")
    assert {row.path: row.names for row in table.rows} == expected
    assert all(row.bytes_per_device == WIDTH * 8 * 4 for row in table.rows)
    assert "what it has" in str(table) and "float32" in table._repr_html_()


def test_a_linen_module_has_no_parameters():
    """The error says what to give."""
    with pytest.raises(ArgumentError, match=r"Linen is a module of Linen, .* tabulate\(jax.eval_shape\(model.init"):
        inspect.tabulate(Linen())


def test_boxes_and_tasks_give_names_and_devices():
    """For arrays that have lost them."""
    params = {"w": jnp.ones((4, 8))}
    boxed = {"w": mm.meta.LogicallyPartitioned(jnp.ones((4, 8)), ("embed", "hidden"))}
    (row,) = inspect.tabulate(params, boxed).rows
    assert row.names == ("embed", "hidden")


def test_what_has_no_array_cannot_be_visualized():
    """In one line, with what would do."""
    with pytest.raises(ArgumentError, match=r"found no array with a sharding on devices in dict; give a jax.Array"):
        inspect.visualize({"a": 1})


def test_an_abstract_mesh_has_no_devices():
    """As that of what `jax.eval_shape` gives where axes are explicit."""
    mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    tree = {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=sharding)}
    (row,) = inspect.tabulate(tree).rows
    assert row.spec == sharding.spec and row.devices == () and row.bytes_per_device == 64
    with pytest.raises(ArgumentError, match="no array with a sharding on devices"):
        inspect.visualize(tree)
    assert len(inspect.visualize([tree, jnp.ones(3)]).arrays) == 1


def test_a_sharding_that_does_not_divide_is_named():
    """As of a description of what is to be."""
    sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("model",), devices=jax.devices()[:2]), jax.P("model"))
    tree = {"w": jax.ShapeDtypeStruct((3, 8), jnp.float32, sharding=sharding)}
    for show in (inspect.tabulate, inspect.visualize):
        with pytest.raises(AxisError, match=r"^w: dimension 0 of shape \(3, 8\) does not divide over axis 'model'"):
            show(tree)
