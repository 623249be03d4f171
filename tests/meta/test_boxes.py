"""Boxes: what they are as values, as pytree nodes, and in trees."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from manymesh import meta
from manymesh.errors import MetadataError

LAYERS = {meta.PARTITION_NAME: "layers"}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["history", "scale"])
@dataclasses.dataclass(frozen=True)
class History(meta.AxisMetadata[Any]):
    """A user's own box, with fields of its own and no names."""

    value: Any
    history: tuple[Any, ...] = ()
    scale: float = 1.0

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> History:
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: Any) -> History:
        return dataclasses.replace(self, history=(*self.history, (index, params.get("who"))))

    def remove_axis(self, index: int, params: Any) -> History:
        assert self.history[-1] == (index, params.get("who"))
        return dataclasses.replace(self, history=self.history[:-1])


class Noted(meta.Partitioned[Any]):
    """A subclass of `Partitioned` with an attribute of its own."""

    def __init__(self, value: Any, names: Any, mesh: Any = None, note: str = "") -> None:
        super().__init__(value, names, mesh)
        self.note = note


class Slotted(meta.LogicallyPartitioned[Any]):
    __slots__ = ("note",)

    def __init__(self, value: Any, names: Any, note: str = "") -> None:
        super().__init__(value, names)
        self.note = note


def box_types() -> list[Any]:
    return [
        lambda v: meta.Partitioned(v, ("a", None)),
        lambda v: meta.LogicallyPartitioned(v, ("a", None), rules=[("a", "data")]),
        lambda v: History(v),
        lambda v: Noted(v, ("a",), note="n"),
        lambda v: Slotted(v, ("a",), note="n"),
    ]


every_box = pytest.mark.parametrize("box", box_types(), ids=["Partitioned", "Logically", "own", "subclass", "slotted"])


# --- a single box ---------------------------------------------------------------------------------


def test_fields_can_be_read_and_not_set() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    box = meta.LogicallyPartitioned(1.0, ["a", ("b", "c"), P.UNCONSTRAINED, None], mesh, [["a", ["x", "y"]]])
    assert (box.value, box.names, box.mesh) == (1.0, ("a", ("b", "c"), P.UNCONSTRAINED, None), mesh)
    assert box.rules == (("a", ("x", "y")),)
    for field in ("value", "names", "mesh", "rules"):
        with pytest.raises(AttributeError):
            setattr(box, field, None)
    with pytest.raises(AttributeError):
        box.other = 1  # type: ignore[attr-defined]


def test_a_partition_spec_can_be_the_names() -> None:
    assert meta.Partitioned(0.0, P("a", None)).names == ("a", None)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("model", "Partitioned: names must have one entry a dimension, found the string 'model'; write ('model',)"),
        (
            None,
            "Partitioned: names must be a tuple with one entry a dimension, found None; "
            "write () for a value that is replicated",
        ),
        (
            ("a", 3),
            "Partitioned: an entry of names must be a string, a tuple of strings, None or "
            "PartitionSpec.UNCONSTRAINED, found 3",
        ),
        (
            ("a", ("b", None)),
            "Partitioned: an entry of names must be a string, a tuple of strings, None or "
            "PartitionSpec.UNCONSTRAINED, found ('b', None)",
        ),
    ],
)
def test_wrong_names_say_what_is_wrong(names: Any, message: str) -> None:
    with pytest.raises(MetadataError) as error:
        meta.Partitioned(0.0, names)
    assert str(error.value) == message


def test_wrong_names_are_found_when_an_initializer_is_wrapped() -> None:
    with pytest.raises(MetadataError, match=r"^with_partitioning: names must have one entry a dimension"):
        meta.with_partitioning(jax.nn.initializers.ones, "model")
    with pytest.raises(MetadataError, match=r"^with_logical_partitioning: names must have one entry a dimension"):
        meta.with_logical_partitioning(jax.nn.initializers.ones, "model")


def test_wrapped_initializers_keep_name_and_arguments() -> None:
    def init(key: Any, shape: Any, dtype: Any = jnp.float32) -> Any:
        return jnp.zeros(shape, dtype)

    for wrap, kind in (
        (meta.with_partitioning, meta.Partitioned),
        (meta.with_logical_partitioning, meta.LogicallyPartitioned),
    ):
        wrapped = wrap(init, ("a", "b"))
        assert wrapped.__name__ == "init"
        box = wrapped(None, (2, 3), dtype=jnp.bfloat16)
        assert type(box) is kind and box.names == ("a", "b") and box.value.dtype == jnp.bfloat16


def test_equality_and_hash_see_names_mesh_rules_type_and_value() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x = jnp.arange(3.0)
    make = meta.LogicallyPartitioned
    same = make(x, ("a",), mesh, [("a", "data")])
    assert same == make(jnp.arange(3.0), ("a",), mesh, [("a", "data")])
    assert hash(same) == hash(make(x + 1, ("a",), mesh, [("a", "data")]))  # the hash leaves the value out
    for other in (
        make(x + 1, ("a",), mesh, [("a", "data")]),
        make(x, ("b",), mesh, [("a", "data")]),
        make(x, ("a",), None, [("a", "data")]),
        make(x, ("a",), mesh, [("a", None)]),
        make(x[:2], ("a",), mesh, [("a", "data")]),
        make(np.arange(3), ("a",), mesh, [("a", "data")]),
        meta.Partitioned(x, ("a",), mesh),
        x,
    ):
        assert not (isinstance(other, meta.Partitioned) and same == other)
        if isinstance(other, meta.Partitioned) and other._axes != same._axes:
            assert hash(other) != hash(same)
    assert Noted(1, ("a",), note="x") != Noted(1, ("a",), note="y")
    assert meta.Partitioned({"a": x}, ()) == meta.Partitioned({"a": x + 0}, ())
    assert meta.Partitioned({"a": x}, ()) != meta.Partitioned({"b": x}, ())


def test_equality_of_tracers_is_identity() -> None:
    @jax.jit
    def f(x: Any) -> Any:
        a, b = meta.Partitioned(x, ("a",)), meta.Partitioned(x + 1, ("a",))
        assert a == meta.Partitioned(x, ("a",)) and a != b
        return x

    f(jnp.ones(3))


def test_replace() -> None:
    box = meta.LogicallyPartitioned(1.0, ("a",), rules=[("a", "x")])
    assert box.replace(value=2.0) == meta.LogicallyPartitioned(2.0, ("a",), rules=[("a", "x")])
    assert box.replace(names=("b",), rules=None) == meta.LogicallyPartitioned(1.0, ("b",))
    assert Noted(1, ("a",), note="x").replace(value=2) == Noted(2, ("a",), note="x")
    with pytest.raises(TypeError, match=r"^LogicallyPartitioned.replace: no field is called 'name'$"):
        box.replace(name=("b",))
    with pytest.raises(TypeError, match=r"^Partitioned.replace: no field is called 'rules'$"):
        meta.Partitioned(1.0, ()).replace(rules=())


def test_repr_shows_the_value_shortly() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    box = meta.LogicallyPartitioned(jnp.ones((2, 3)), ("a", None), mesh, [("a", "data")])
    assert repr(box) == (
        "LogicallyPartitioned(float32[2,3], names=('a', None), mesh={'data': 2, 'model': 4}, rules=(('a', 'data'),))"
    )
    assert repr(Noted("v", (), note="n")) == "Noted('v', names=(), note='n')"


@every_box
def test_boxes_survive_pickle_and_copy(box: Any) -> None:
    original = box(np.arange(3.0))
    for other in (pickle.loads(pickle.dumps(original)), copy.copy(original), copy.deepcopy(original)):
        assert type(other) is type(original)
        assert jax.tree.structure(other) == jax.tree.structure(original)
        np.testing.assert_array_equal(other.value, original.value)


def test_vars_are_the_fields() -> None:
    assert vars(meta.Partitioned(1, ("a",))) == {"value": 1, "names": ("a",), "mesh": None}
    assert vars(meta.LogicallyPartitioned(1, ())) == {"value": 1, "names": (), "mesh": None, "rules": None}
    assert vars(Noted(1, (), note="n")) == {"note": "n"}


def test_abstract_boxes_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        meta.AxisMetadata()  # type: ignore[abstract]


# --- boxes as pytree nodes ------------------------------------------------------------------------


@every_box
def test_the_value_is_the_only_child(box: Any) -> None:
    ((path, leaf),) = jax.tree_util.tree_leaves_with_path({"w": box(2.0)})
    assert jax.tree_util.keystr(path) == "['w'].value" and leaf == 2.0


@every_box
def test_boxes_go_through_transformations(box: Any) -> None:
    tree = {"w": box(jnp.arange(4.0).reshape(2, 2)), "b": jnp.ones(2)}

    def loss(t: Any) -> Any:
        return jnp.sum(meta.unbox(t)["w"] ** 2) + jnp.sum(t["b"])

    expected = jax.tree.map(lambda x: 2 * x, tree["w"])
    for grads in (jax.grad(loss)(tree), jax.jit(jax.grad(loss))(tree)):
        assert type(grads["w"]) is type(tree["w"])
        np.testing.assert_array_equal(grads["w"].value, expected.value)
    shapes = jax.eval_shape(lambda t: t, tree)
    assert shapes["w"].value.shape == (2, 2)
    assert jax.tree.structure(shapes) == jax.tree.structure(tree)
    stacked = jax.vmap(lambda i: jax.tree.map(lambda x: x * i, tree))(jnp.arange(3.0))
    assert stacked["w"].value.shape == (3, 2, 2)
    doubled = jax.tree.map(jnp.add, tree, tree)
    np.testing.assert_array_equal(doubled["w"].value, 2 * tree["w"].value)
    out = jax.lax.scan(lambda carry, _: (jax.tree.map(jnp.sin, carry), None), tree, None, length=2)[0]
    assert jax.tree.structure(out) == jax.tree.structure(tree)


def test_metadata_are_part_of_the_structure() -> None:
    traces = 0

    @jax.jit
    def f(box: Any) -> Any:
        nonlocal traces
        traces += 1
        return box

    for names in (("a",), ("a",), ("b",), ("a",)):
        f(meta.Partitioned(jnp.ones(2), names))
    assert traces == 2
    with pytest.raises(ValueError):
        jax.tree.map(jnp.add, meta.Partitioned(1.0, ("a",)), meta.Partitioned(1.0, ("b",)))


def test_generic_and_static_type_arguments() -> None:
    kind = meta.Partitioned[jax.Array]
    assert kind(1.0, ()).value == 1.0  # type: ignore[arg-type]


# --- trees ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["name"])
@dataclasses.dataclass
class State:
    params: Any
    name: str


def a_tree(box: Any) -> Any:
    return {
        "b": [box(1.0), (box(2.0), 3), None],
        "a": Pair(box(4.0), {}),
        "o": OrderedDict(z=box(5.0), y=6),
        "s": State({"w": box(7.0)}, "name"),
        "e": (),
    }


@every_box
def test_trees_of_every_kind_of_node(box: Any) -> None:
    tree, plain = a_tree(box), a_tree(lambda v: v)
    assert meta.unbox(tree) == plain
    assert meta.unbox(tree, apply_constraint=False) == plain
    again = meta.replace_boxed(tree, plain)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert jax.tree.leaves(again) == jax.tree.leaves(tree)
    assert type(again["a"]) is Pair and type(again["o"]) is OrderedDict and again["s"].name == "name"
    counted = meta.map_axis_meta(lambda b: "box", tree)
    assert counted["b"] == ["box", ("box", 3), None] and counted["s"].params == {"w": "box"}
    assert meta.is_axis_metadata(tree["b"][0]) and not meta.is_axis_metadata(tree["b"])


@pytest.mark.parametrize("leaf", [3, "text", jnp.ones(2), None, jax.ShapeDtypeStruct((2,), jnp.float32)])
def test_a_lone_leaf_is_a_tree(leaf: Any) -> None:
    for function in (meta.unbox, lambda t: meta.add_axis(t, 0, LAYERS), lambda t: meta.remove_axis(t, 0, LAYERS)):
        assert function(leaf) is leaf
    assert meta.replace_boxed(leaf, leaf) is leaf
    assert meta.unbox(meta.Partitioned(leaf, ())) is leaf


def test_boxes_in_boxes_and_boxes_around_trees() -> None:
    inner = meta.Partitioned(jnp.ones(2), ("a",))
    outer = meta.LogicallyPartitioned({"x": inner, "y": History(5)}, ("b",))
    plain = meta.unbox({"t": outer})
    assert plain["t"]["x"] is inner.value and plain["t"]["y"] == 5
    assert outer.unbox()["x"] is inner  # one level only
    new = meta.replace_boxed(outer, {"x": 1, "y": 2})
    assert new == meta.LogicallyPartitioned({"x": meta.Partitioned(1, ("a",)), "y": History(2)}, ("b",))
    added = meta.add_axis(outer, 0, LAYERS)  # the outermost box has the say
    assert added.names == ("layers", "b") and added.value["x"] is inner


def test_replaced_values_may_be_trees() -> None:
    tree = {"w": meta.Partitioned(1.0, ("a",)), "b": 2.0}
    new = meta.replace_boxed(tree, {"w": {"low": 1, "high": 2}, "b": [3, 4]})
    assert new["w"].value == {"low": 1, "high": 2} and new["b"] == [3, 4]


@pytest.mark.parametrize(
    ("updates", "place", "expected", "found"),
    [
        ({"a": {"w": 1}}, "tree", "the keys ['a', 'b']", "the keys ['a']"),
        ({"a": {"v": 1}, "b": (1, None)}, "tree['a']", "the keys ['w']", "the keys ['v']"),
        ({"a": {"w": 1}, "b": (1,)}, "tree['b']", "tuple with 2 children", "tuple with 1 children"),
        ({"a": {"w": 1}, "b": [1, 2]}, "tree['b']", "tuple with 2 children", "list with 2 children"),
        ({"a": {"w": 1}, "b": (1, None), "c": 1}, "tree", "the keys ['a', 'b']", "the keys ['a', 'b', 'c']"),
        ({"a": [1], "b": (1, None)}, "tree['a']", "dict with 1 children", "list with 1 children"),
        ({"a": {"w": 1}, "b": 5}, "tree['b']", "tuple with 2 children", "a leaf of type int"),
        ({"a": {"w": 1}, "b": (1, 5)}, "tree['b'][1]", "None", "int"),
    ],
)
def test_replace_boxed_says_where_structures_differ(updates: Any, place: str, expected: str, found: str) -> None:
    tree = {"a": {"w": meta.Partitioned(1.0, ())}, "b": (meta.Partitioned(2.0, ()), None)}
    with pytest.raises(MetadataError) as error:
        meta.replace_boxed(tree, updates)
    assert str(error.value) == (
        f"replace_boxed: the trees differ at {place}: expected {expected}, found {found}; "
        "give updates with the structure of the boxed tree"
    )


json = st.recursive(
    st.one_of(st.none(), st.integers(), st.builds(lambda v: meta.Partitioned(v, ("a",)), st.integers())),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(st.sampled_from("abc"), children, max_size=3),
        st.tuples(children, children),
        st.builds(Pair, children, children),
        st.builds(lambda v: meta.LogicallyPartitioned(v, ("b",)), children),
        st.builds(History, children),
    ),
    max_leaves=12,
)


@given(json)
def test_replace_boxed_undoes_unbox(tree: Any) -> None:
    plain = meta.unbox(tree)
    assert not any(meta.is_axis_metadata(n) for n in jax.tree.leaves(plain, is_leaf=meta.is_axis_metadata))
    assert jax.tree.leaves(plain) == jax.tree.leaves(tree)
    again = meta.replace_boxed(tree, plain)
    assert jax.tree.structure(again) == jax.tree.structure(tree) and jax.tree.leaves(again) == jax.tree.leaves(tree)
