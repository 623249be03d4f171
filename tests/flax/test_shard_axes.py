"""`shard_axes`: initializers that name the axes of what they make."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh import errors, meta
from manymesh.flax import shard_axes, task
from stages import assert_same

pytestmark = pytest.mark.once

RULES = (("embed", None), ("heads", "model"), ("kv", None), ("batch", "data"))


def mesh():
    return Mesh(np.array(jax.devices()[4:8]).reshape(2, 2), ("data", "model"))


def sequences():
    return jnp.linspace(-1, 1, 2 * 3 * 8).reshape(2, 3, 8)


class Heads(nn.Module):
    """A layer that splits its last dimension into heads, attention, and a layer that joins them again."""

    @nn.compact
    def __call__(self, x):
        into = shard_axes("embed", "heads", "kv")
        y = nn.DenseGeneral((2, 4), kernel_init=into, bias_init=shard_axes("heads", "kv"), name="split")(x)
        out = shard_axes("heads", "kv", "embed")
        z = nn.MultiHeadDotProductAttention(num_heads=2, kernel_init=into, out_kernel_init=out, name="attention")(x, x)
        return z + nn.DenseGeneral(8, axis=(-2, -1), kernel_init=out, name="join")(y)


NAMES = {
    "split": ("embed", "heads", "kv"),
    "attention/query": ("embed", "heads", "kv"),
    "attention/out": ("heads", "kv", "embed"),
    "join": ("heads", "kv", "embed"),
}


def kernel(params, path):
    for key in path.split("/"):
        params = params[key]
    return params["kernel"]


def test_names_speak_of_the_final_shape():
    """``nn.DenseGeneral`` makes a flat kernel and shapes it afterwards; the box comes out around the shaped one."""
    params = Heads().init(jax.random.key(0), sequences())["params"]
    for path, names in NAMES.items():
        box = kernel(params, path)
        assert type(box) is meta.Partitioned
        assert (box.names, box.value.ndim) == (names, 3)
    assert params["split"]["bias"].names == ("heads", "kv")


def test_values_are_those_of_the_default_initializers():
    """Naming axes changes no bit."""

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.DenseGeneral((2, 4), name="split")(x)
            z = nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(x, x)
            return z + nn.DenseGeneral(8, axis=(-2, -1), name="join")(y)

    named = Heads().init(jax.random.key(0), sequences())
    jax.tree.map(np.testing.assert_array_equal, nn.unbox(named), Plain().init(jax.random.key(0), sequences()))


def test_heads_are_sharded_in_a_task():
    """Parameters and their gradients lie on the device axis that the rules give to heads, values unchanged."""
    model = task(Heads, "heads", mesh=mesh(), logical_axes=RULES)()
    params = model.init(jax.random.key(0), sequences())

    def grads(model):
        return jax.grad(lambda p, x: jnp.mean(model.apply(p, x) ** 2))

    compiled = mm.jit(grads(model)).lower(params, sequences()).compile()
    assert_same(compiled(params, sequences()), jax.jit(grads(Heads()))(params, sequences()))
    (shardings, _), _ = compiled.input_shardings
    for tree in (shardings, compiled.output_shardings):
        found = {path: kernel(tree["params"], path).value.spec for path in NAMES}
        assert found == {path: P(None, "model") if names[0] == "embed" else P("model") for path, names in NAMES.items()}


def test_parameters_can_be_created_where_they_will_live():
    """Also in a step, where the initializer runs inside the task: each device holds its shard alone."""
    model = task(Heads, "heads", mesh=mesh(), logical_axes=RULES)()
    params = mm.jit(model.init)(jax.random.key(0), sequences())["params"]
    value = kernel(params, "split").value
    assert value.shape == (8, 2, 4)
    assert {s.data.shape for s in value.addressable_shards} == {(8, 1, 4)}
    assert value.sharding.device_set == set(jax.devices()[4:8])
    expected = Heads().init(jax.random.key(0), sequences())["params"]
    assert_same(params, expected, tolerance=1e-6)


def test_scanned_layers_get_an_axis():
    """``nn.scan`` adds the name of the stacked axis to the box."""

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(8, kernel_init=shard_axes("embed", "heads"))(x), None

    layers = nn.scan(
        Body,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.PARTITION_NAME: "kv"},
    )
    model = nn.Sequential([task(layers, "layers", mesh=mesh(), logical_axes=RULES)()])
    params = model.init(jax.random.key(0), sequences(), None)
    box = params["params"]["layers_0"]["Dense_0"]["kernel"]
    assert box.names == ("kv", "embed", "heads")
    compiled = mm.jit(model.apply).lower(params, sequences(), None).compile()
    (shardings, *_), _ = compiled.input_shardings
    assert shardings["params"]["layers_0"]["Dense_0"]["kernel"].value.spec == P(None, None, "model")
    expected = nn.Sequential([layers()]).apply(params, sequences(), None)
    assert_same(compiled(params, sequences(), None), jax.tree.map(jnp.asarray, expected))


@pytest.mark.parametrize(
    "init", [nn.initializers.ones, lambda key, shape, dtype=jnp.bfloat16: jnp.full(shape, 2, dtype)]
)
def test_another_initializer(init):
    """With its own dtype and arguments."""
    made = shard_axes("embed", None, init=init)(jax.random.key(0), (2, 3))
    np.testing.assert_array_equal(made.value, init(jax.random.key(0), (2, 3)))
    assert made.value.dtype == init(jax.random.key(0), (2, 3)).dtype
    assert made.names == ("embed", None)


def test_too_few_names():
    """Said when the parameter is made, with its shape."""
    model = nn.Dense(4, kernel_init=shard_axes("embed"))
    words = "shard_axes('embed',) names 1 dimensions, but the parameter has shape (8, 4); give one name for each"
    with pytest.raises(errors.MetadataError, match=re.escape(words)):
        model.init(jax.random.key(0), sequences())
    assert issubclass(errors.MetadataError, ValueError)


def test_too_many_names():
    """Said as soon as somebody walks over the parameters, and at once by layers that shape them afterwards."""
    words = "shard_axes('embed', 'heads', 'kv') names 3 dimensions, but the parameter has shape (8, 4); give one name"
    layer = nn.Dense(4, kernel_init=shard_axes("embed", "heads", "kv"))
    general = nn.DenseGeneral(4, kernel_init=shard_axes("embed", "heads", "kv"))
    for fun in (lambda: jax.jit(layer.init)(jax.random.key(0), sequences()),
                lambda: jax.tree.leaves(layer.init(jax.random.key(0), sequences())),
                lambda: mm.jit(task(layer, "a", devices=[1]).init)(jax.random.key(0), sequences()),
                lambda: general.init(jax.random.key(0), sequences())):  # fmt: skip
        with pytest.raises(errors.MetadataError, match=re.escape(words)):
            fun()


@pytest.mark.parametrize("names", [(3,), (None, 1.5), ((1,),)])
def test_what_is_no_name(names):
    """Refused where it is written."""
    with pytest.raises(errors.MetadataError, match=re.escape(repr(names[-1]))):
        shard_axes(*names)
