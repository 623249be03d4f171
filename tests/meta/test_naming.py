"""Names for trees without boxes: beside plain containers, and in the fields of Equinox modules and dataclasses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manymesh import meta
from manymesh.errors import AxisError, MetadataError

RULES = [("embed", None), ("hidden", "model"), ("layers", None)]


def mesh_of() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def names_in(tree: Any) -> Any:
    return [(jax.tree_util.keystr(path), box.names) for path, box in boxes_in(tree)]


def boxes_in(tree: Any) -> Any:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=meta.is_axis_metadata)
    return [(path, node) for path, node in leaves if meta.is_axis_metadata(node)]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["none", "wrong"], meta_fields=[])
@dataclasses.dataclass
class Odd:
    none: Any = dataclasses.field(metadata={"names": None})
    wrong: Any = dataclasses.field(default=None, metadata={"names": "hidden"})


# --- a tree of names beside -----------------------------------------------------------------------


def params() -> Any:
    return {"up": {"w": jnp.ones((4, 8)), "b": jnp.ones(8)}, "down": [jnp.ones((8, 4)), jnp.ones(4)], "step": 3}


def test_a_parallel_tree_of_names() -> None:
    names = {
        "up": {"w": ("embed", "hidden"), "b": ("hidden",)},
        "down": [P("hidden", "embed"), None],
        "step": None,
    }
    boxed = meta.box(params(), names)
    assert names_in(boxed) == [
        ("['down'][0]", ("hidden", "embed")),
        ("['up']['b']", ("hidden",)),
        ("['up']['w']", ("embed", "hidden")),
    ]
    assert all(type(box) is meta.LogicallyPartitioned for _, box in boxes_in(boxed))
    jax.tree.map(np.testing.assert_array_equal, meta.unbox(boxed), params())
    mesh = mesh_of()
    shardings = meta.get_sharding(boxed, mesh, RULES)
    assert shardings == {
        "up": {"w": NamedSharding(mesh, P(None, "model")), "b": NamedSharding(mesh, P("model"))},
        "down": [NamedSharding(mesh, P("model", None)), NamedSharding(mesh, P())],
        "step": None,
    }
    # They fit the tree without boxes.
    plain = {k: params()[k] for k in ("up", "down")}
    placed = jax.device_put(plain, {k: shardings[k] for k in plain})
    assert placed["up"]["w"].sharding.spec == P(None, "model")
    report = meta.explain(boxed, mesh, RULES, strict=True)
    assert report["up['w']"].bytes_per_device == 32


def test_names_count_for_all_that_is_below_and_may_be_left_out() -> None:
    assert names_in(meta.box(params(), {"down": ("hidden",)})) == [
        ("['down'][0]", ("hidden",)),
        ("['down'][1]", ("hidden",)),
    ]
    assert names_in(meta.box(params(), {})) == [] and names_in(meta.box(jnp.ones(2), ("a",))) == [("", ("a",))]
    assert meta.box({"a": None, "b": jax.nn.relu}, {"a": ("x",), "b": ("x",)}) == {"a": None, "b": jax.nn.relu}


def test_device_axes() -> None:
    boxed = meta.box(params(), {"up": {"w": P(None, ("data", "model"))}}, logical=False)
    assert type(boxed["up"]["w"]) is meta.Partitioned
    assert meta.get_sharding(boxed, mesh_of())["up"]["w"].spec == P(None, ("data", "model"))


class Pair(NamedTuple):
    left: Any
    right: Any


def test_sequences_objects_and_trees_of_their_own_type() -> None:
    tree = {"p": Pair(jnp.ones(2), [jnp.ones(3)]), "t": (jnp.ones(2), jnp.ones(2))}
    expected = [("['p'].left", ("a",)), ("['p'].right[0]", ("b",)), ("['t'][1]", ("c",))]
    for pair in (Pair(("a",), [("b",)]), {"left": ("a",), "right": [("b",)]}, [("a",), ("b",)]):
        assert names_in(meta.box(tree, {"p": pair, "t": [None, ("c",)]})) == expected
    module = Layer(jnp.ones((4, 8)), jnp.ones(8))
    assert names_in(meta.box(module, Layer(("a", "b"), ("c",)))) == [(".weight", ("a", "b")), (".bias", ("c",))]


def test_boxes_stay_in_either_way() -> None:
    inside = meta.Partitioned(jnp.ones(2), ("data",))
    assert meta.box({"w": inside}, {"w": ("a",)})["w"] is inside
    assert meta.box({"w": inside})["w"] is inside


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"upp": None}, "box: there are names for 'upp', which is not in tree; did you mean 'up'?"),
        (
            {"up": {"v": ("a",)}},
            "box: there are names for 'v', which is not in up; known names: 'b', 'w'",
        ),
        (
            {"down": [("a",)]},
            "box: the names do not fit the tree at down: found [('a',)] beside list with [0, 1]; expected a tuple with "
            "one name a dimension, None, or names for what is in it",
        ),
        (
            {"up": {"w": "embed"}},
            "box: the names do not fit the tree at up['w']: found 'embed' beside a leaf of type ArrayImpl; expected a "
            "tuple with one name a dimension, None, or names for what is in it",
        ),
        (
            {"up": [("a",), None]},
            "box: the names do not fit the tree at up: found [('a',), None] beside dict with ['b', 'w']; expected a "
            "tuple with one name a dimension, None, or names for what is in it",
        ),
        (
            {"up": Odd(("a",), None)},
            "box: the names do not fit the tree at up: found Odd(none=('a',), wrong=None) beside dict with ['b', 'w']; "
            "expected a tuple with one name a dimension, None, or names for what is in it",
        ),
        (
            {"up": 3},
            "box: the names do not fit the tree at up: found 3 beside dict with ['b', 'w']; expected a tuple with one "
            "name a dimension, None, or names for what is in it",
        ),
    ],
)
def test_names_that_do_not_fit_say_where(names: Any, message: str) -> None:
    with pytest.raises(MetadataError) as error:
        meta.box(params(), names)
    assert str(error.value) == message


ARRAYS = st.recursive(
    st.lists(st.sampled_from([2, 4]), max_size=2).map(lambda s: np.zeros(s)) | st.none() | st.integers(),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.sampled_from("abc"), c, max_size=3) | st.tuples(c, c),
    max_leaves=8,
)


@given(ARRAYS)
def test_unbox_takes_off_what_box_puts_on(tree: Any) -> None:
    names = jax.tree.map(lambda x: P(*"xy"[: np.ndim(x)]), tree)
    for beside in (names, jax.tree.map(lambda x: None, tree), ("x",)):
        boxed = meta.box(tree, beside)
        plain = meta.unbox(boxed)
        assert jax.tree.structure(plain) == jax.tree.structure(tree)
        assert all(a is b for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(tree), strict=True))
    boxed = meta.box(tree, names)
    assert [box.value.ndim for _, box in boxes_in(boxed)] == [len(box.names) for _, box in boxes_in(boxed)]
    assert len(boxes_in(boxed)) == sum(isinstance(x, np.ndarray) for x in jax.tree.leaves(tree))


# --- fields of dataclasses ------------------------------------------------------------------------


class Layer(eqx.Module):
    """An Equinox module that says what its dimensions are."""

    weight: Any = eqx.field(metadata={"names": ("embed", "hidden")})
    bias: Any = eqx.field(metadata={"names": ("hidden",)})
    activation: Any = jax.nn.relu

    def __call__(self, x: Any) -> Any:
        return self.activation(x @ self.weight + self.bias)


class Model(eqx.Module):
    layers: list[Layer]
    scale: Any
    extra: Any = eqx.field(metadata={"names": ("embed",)})
    kind: str = eqx.field(static=True, default="kind")

    @classmethod
    def make(cls, key: Any) -> Model:
        keys = jax.random.split(key, 2)
        layers = [Layer(jax.random.normal(k, (8, 8)), jnp.zeros(8)) for k in keys]
        return cls(layers, jnp.ones(()), {"a": jnp.ones(8), "inner": Layer(jnp.ones((8, 8)), jnp.ones(8))})

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def test_names_in_the_fields_of_equinox_modules() -> None:
    mesh = mesh_of()
    shapes = eqx.filter_eval_shape(Model.make, jax.random.key(0))
    boxed = meta.box(shapes)
    assert names_in(boxed) == [
        (".layers[0].weight", ("embed", "hidden")),
        (".layers[0].bias", ("hidden",)),
        (".layers[1].weight", ("embed", "hidden")),
        (".layers[1].bias", ("hidden",)),
        (".extra['a']", ("embed",)),
        (".extra['inner'].weight", ("embed", "hidden")),  # the inner field counts
        (".extra['inner'].bias", ("hidden",)),
    ]
    assert boxed.layers[0].activation is jax.nn.relu and boxed.kind == "kind"
    shardings = meta.get_sharding(boxed, mesh, RULES, strict=True)
    assert type(shardings) is Model

    @functools.partial(jax.jit, out_shardings=eqx.filter(shardings, lambda s: isinstance(s, NamedSharding)))
    def create(key: Any) -> Any:
        return eqx.filter(Model.make(key), eqx.is_array)

    model = eqx.combine(create(jax.random.key(0)), shapes, is_leaf=lambda x: x is None)
    assert model.layers[0].weight.sharding.spec == P(None, "model")
    assert model.layers[1].bias.sharding.spec == P("model")
    x = jnp.ones((2, 8))
    np.testing.assert_allclose(model(x), Model.make(jax.random.key(0))(x), rtol=1e-5)
    report = meta.explain(boxed, mesh, RULES)
    assert report["layers[0].weight"].dimensions[1].rule == ("hidden", "model")


def test_boxes_as_fields_of_equinox_modules() -> None:
    mesh = mesh_of()
    layer = Layer(
        meta.LogicallyPartitioned(jnp.ones((8, 8)), ("embed", "hidden")), meta.Partitioned(jnp.ones(8), ("model",))
    )
    assert meta.box(layer) is not layer and meta.box(layer).weight is layer.weight
    assert meta.get_sharding(layer, mesh, RULES).weight.spec == P(None, "model")
    assert meta.get_partition_spec(layer).bias == P("model")

    @eqx.filter_jit
    @eqx.filter_grad
    def grad(module: Any, x: Any) -> Any:
        return jnp.sum(meta.unbox(module)(x))

    with jax.set_mesh(mesh), meta.logical_axis_rules(RULES):
        grads = grad(layer, jnp.ones((2, 8)))
        assert grads.weight.names == ("embed", "hidden") and grads.bias.names == ("model",)
        assert meta.unbox(layer).weight.sharding.spec == P(None, "model")
    again = meta.replace_boxed(layer, meta.unbox(layer))
    assert jax.tree.structure(again) == jax.tree.structure(layer)
    added = meta.add_axis(layer, 0, {meta.PARTITION_NAME: "layers"})
    assert added.weight.names == ("layers", "embed", "hidden")
    assert jax.tree.structure(meta.remove_axis(added, 0, {meta.PARTITION_NAME: "layers"})) == jax.tree.structure(layer)


def test_an_ensemble_of_equinox_modules() -> None:
    make = eqx.filter_vmap(lambda key: Layer(jax.random.normal(key, (8, 8)), jnp.zeros(8)))
    stacked = make(jax.random.split(jax.random.key(0), 3))
    boxed = meta.add_axis(meta.box(stacked), 0, {meta.PARTITION_NAME: "layers"})
    assert boxed.weight.names == ("layers", "embed", "hidden") and boxed.weight.value.shape == (3, 8, 8)
    assert meta.get_sharding(boxed, mesh_of(), RULES, strict=True).weight.spec == P(None, None, "model")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=[])
@dataclasses.dataclass
class Plain:
    w: Any = dataclasses.field(metadata={"names": ("hidden", None)})


def test_any_dataclass_will_do() -> None:
    assert names_in(meta.box({"a": [Plain(jnp.ones((4, 2)))]})) == [("['a'][0].w", ("hidden", None))]
    assert names_in(meta.box(Odd(jnp.ones(2)))) == []
    with pytest.raises(MetadataError) as error:
        meta.box({"params": Odd(None, jnp.ones(2))})
    assert str(error.value) == (
        "params.wrong: names must have one entry a dimension, found the string 'hidden'; write ('hidden',)"
    )


def test_a_typo_in_a_field_is_a_finding() -> None:
    boxed = meta.box(Plain(jnp.ones((4, 2))))
    with pytest.raises(
        AxisError, match=r"^w: no rule knows the name 'hidden' of dimension 0.*did you mean 'hiden'\?(\n|$)"
    ):
        meta.get_sharding(boxed, mesh_of(), [("hiden", "model")], strict=True)
