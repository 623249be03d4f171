"""Adding and removing axes: exact inverses, and errors that say which box and which axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from manymesh import meta
from manymesh.errors import MetadataError

NAMES = st.one_of(
    st.none(), st.sampled_from(["a", "b", "c"]), st.just(P.UNCONSTRAINED), st.just(("x", "y")), st.just("layers")
)
BOXES = st.sampled_from([meta.Partitioned, meta.LogicallyPartitioned])


def named(name: Any) -> dict[str, Any]:
    return {meta.PARTITION_NAME: name}


@given(BOXES, st.lists(NAMES, max_size=4), st.integers(-5, 9), NAMES, st.integers(0, 3))
@example(meta.Partitioned, ["a", None], 7, "layers", 0)
@example(meta.Partitioned, ["a"], -2, None, 3)
def test_remove_axis_undoes_add_axis(kind: Any, names: list[Any], index: int, name: Any, surplus_rank: int) -> None:
    box = kind(jax.ShapeDtypeStruct((2,) * (len(names) + surplus_rank), jnp.float32), names)
    total = max(len(names) + 1, len(names) + surplus_rank)
    if index < -total:
        with pytest.raises(MetadataError, match="add_axis at index"):
            box.add_axis(index, named(name))
        return
    added = box.add_axis(index, named(name))
    assert added.names[index + total if index < 0 else index] == (None if name is Ellipsis else name)
    assert added.remove_axis(index, named(name)) == box
    assert added.remove_axis(index, named(name)).names == box.names
    tree = {"l": [box], "d": {"x": box}}
    there = meta.add_axis(tree, index, named(name))
    assert there == {"l": [added], "d": {"x": added}}
    assert meta.remove_axis(there, index, named(name)) == tree


@given(st.lists(NAMES, min_size=1, max_size=4), st.data())
def test_add_axis_undoes_remove_axis(names: list[Any], data: st.DataObject) -> None:
    box = meta.Partitioned(0.0, names)
    index = data.draw(st.integers(-len(names), len(names) - 1))
    name = box.names[index]
    assert box.remove_axis(index, named(name)).add_axis(index, named(name)) == box


@given(st.lists(NAMES, max_size=3), st.lists(st.tuples(st.integers(0, 6), NAMES), max_size=4))
def test_many_axes_come_off_in_reverse(names: list[Any], axes: list[tuple[int, Any]]) -> None:
    box = start = meta.Partitioned(0.0, names)
    for index, name in axes:
        box = box.add_axis(index, named(name))
    # The structure survives transformations, and with it what the inverse needs.
    box = jax.tree.map(lambda x: x, box)
    for index, name in reversed(axes):
        box = box.remove_axis(index, named(name))
    assert box.names == start.names


def test_axes_may_come_off_in_another_order() -> None:
    box = meta.Partitioned(0.0, ("a",)).add_axis(3, named("l")).add_axis(0, named("m"))
    assert box.names == ("m", "a", None, None, "l")
    box = box.remove_axis(4, named("l"))
    assert box.names == ("m", "a")
    assert box.remove_axis(0, named("m")).names == ("a",)


def test_filled_gaps_are_no_part_of_equality() -> None:
    filled = meta.Partitioned(0.0, ("a",)).add_axis(2, named("l"))
    written = meta.Partitioned(0.0, ("a", None, "l"))
    assert filled == written and hash(filled) == hash(written)
    assert jax.tree.structure(filled) == jax.tree.structure(written)


def test_negative_indices_count_from_the_end_of_the_result() -> None:
    box = meta.Partitioned(0.0, ("a", "b"))
    assert box.add_axis(-1, named("l")).names == ("a", "b", "l")
    assert box.add_axis(-3, named("l")).names == ("l", "a", "b")


def test_a_stacked_value_says_where_its_end_is() -> None:
    # As in a scan over layers with axis -1: the value has its new axis before the metadata have.
    box = meta.Partitioned(jnp.ones((2, 3, 4, 5)), ("a",))
    assert box.add_axis(-1, named("l")).names == ("a", None, None, "l")


def test_without_a_name_the_axis_is_unnamed() -> None:
    box = meta.Partitioned(0.0, ("a",))
    params = {meta.PARTITION_NAME: None}
    assert box.add_axis(0, params).names == (None, "a")
    assert box.add_axis(0, params).remove_axis(0, params) == box
    assert meta.add_axis({"w": box}, 0, params)["w"].names == (None, "a")


def test_an_axis_of_which_nothing_is_said() -> None:
    """Most often a forgotten metadata_params; it would be an axis that is never sharded, in silence."""
    box = meta.Partitioned(0.0, ("a",))
    for params in ({}, {"other": 1}, None):
        for act in (box.add_axis, box.remove_axis):
            with pytest.raises(
                MetadataError, match=r"^Partitioned\(.*metadata_params=\{PARTITION_NAME: name\}.*or None"
            ):
                act(0, params)
        for walk in (meta.add_axis, meta.remove_axis):
            with pytest.raises(MetadataError, match=r"^\['w'\]: Partitioned|^w: Partitioned"):
                walk({"w": box}, 0, params)
            assert walk({"w": 1.0}, 0, params) == {"w": 1.0}


def test_what_has_no_name_may_lie_past_the_last() -> None:
    box = meta.Partitioned(jnp.ones((2, 2, 2)), ("a",))
    assert box.remove_axis(2, named(None)) == box


TREE = {"params": {"front": [0, meta.Partitioned(jnp.ones((4, 2, 8)), ("layers", "embed", "hidden"))]}}
BOX = "params['front'][1]: Partitioned(float32[4,2,8], names=('layers', 'embed', 'hidden'))"


@pytest.mark.parametrize(
    ("index", "name", "message"),
    [
        (
            0,
            "stages",
            "remove_axis expected axis 'stages' at index 0, found 'layers' in names ('layers', 'embed', 'hidden'); "
            "pass the partition_name and the index that add_axis got",
        ),
        (
            1,
            "layers",
            "remove_axis expected axis 'layers' at index 1, found 'embed' in names ('layers', 'embed', 'hidden'); "
            "pass the partition_name and the index that add_axis got",
        ),
        (
            0,
            None,
            "remove_axis expected an unnamed axis (partition_name is None) at index 0, found 'layers' in names "
            "('layers', 'embed', 'hidden'); pass the partition_name and the index that add_axis got",
        ),
        (
            3,
            "layers",
            "remove_axis expected axis 'layers' at index 3, but names ('layers', 'embed', 'hidden') end before it; "
            "pass the partition_name and the index that add_axis got",
        ),
        (-4, "layers", "remove_axis at index -4, but there are only 3 dimensions"),
        (
            -1,
            "layers",
            "remove_axis expected axis 'layers' at index -1, found 'hidden' in names ('layers', 'embed', 'hidden'); "
            "pass the partition_name and the index that add_axis got",
        ),
    ],
)
def test_a_wrong_axis_says_which_box_and_what_was_there(index: int, name: Any, message: str) -> None:
    with pytest.raises(MetadataError) as error:
        meta.remove_axis(TREE, index, named(name))
    assert str(error.value) == f"{BOX}: {message}"


def test_an_index_before_the_first_dimension() -> None:
    with pytest.raises(MetadataError) as error:
        meta.add_axis(TREE, -5, named("x"))
    assert str(error.value) == (
        f"{BOX}: add_axis at index -5, but the result has 4 dimensions; use an index from -4 on, "
        "the position of the new axis among the dimensions of the result"
    )


def test_a_name_of_the_wrong_kind() -> None:
    with pytest.raises(MetadataError) as error:
        meta.add_axis(TREE, 0, named(7))
    assert str(error.value) == (
        f"{BOX}: an entry of names must be a string, a tuple of strings, None or PartitionSpec.UNCONSTRAINED, found 7"
    )
