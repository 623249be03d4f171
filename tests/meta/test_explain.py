"""What `explain` says: numbers against real shards, findings word by word, the table."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console

from manymesh import meta
from manymesh.errors import AxisError, MetadataError

RULES = [("batch", "data"), ("hidden", "model"), ("heads", "model"), ("embed", None)]


def mesh_of() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def shaped(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def messages(report: meta.Explanation) -> list[str]:
    return [f.message for f in report.findings]


def test_one_leaf_in_full() -> None:
    box = meta.LogicallyPartitioned(shaped(4, 8, 6), ("embed", "hidden"))
    report = meta.explain({"params": {"w": box}}, mesh_of(), RULES)
    (leaf,) = report
    assert leaf == meta.LeafReport(
        path="params['w']",
        shape=(4, 8, 6),
        dtype="float32",
        names=("embed", "hidden"),
        dimensions=(
            meta.Dimension(4, "embed", (), ("embed", None), 3),
            meta.Dimension(8, "hidden", ("model",), ("hidden", "model"), 1),
            meta.Dimension(6, None, (), None, None),
        ),
        spec=P(None, "model"),
        shard_shape=(4, 2, 6),
        bytes_per_device=4 * 2 * 6 * 4,
        bytes_total=4 * 8 * 6 * 4,
    )
    assert report["params['w']"] is leaf
    assert (report.bytes_per_device, report.bytes_total) == (192, 768)
    assert report.mesh_shape == (("data", 2), ("model", 4)) and report.rules == tuple(RULES)
    with pytest.raises(KeyError) as error:
        report["w"]
    assert error.value.args == ("no leaf at 'w'; the leaves are [\"params['w']\"]",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        leaf.path = "x"  # type: ignore[misc]


NAME = st.sampled_from(["batch", "hidden", "heads", "embed", None])
LEAVES = st.lists(NAME, max_size=3, unique_by=lambda n: n or object()).flatmap(
    lambda names: st.tuples(
        st.just(tuple(names)),
        st.tuples(*[st.sampled_from([8, 16])] * len(names)),
        st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_]),
    )
)


@given(st.lists(LEAVES, min_size=1, max_size=4), st.permutations(RULES))
def test_bytes_are_those_of_real_shards(leaves: Any, rules: Any) -> None:
    mesh = mesh_of()
    tree = [meta.LogicallyPartitioned(np.ones(shape, dtype), names) for names, shape, dtype in leaves]
    report = meta.explain(tree, mesh, rules)
    placed = jax.device_put(meta.unbox(tree), meta.get_sharding(tree, mesh, rules))
    for leaf, array in zip(report, placed, strict=True):
        assert array.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, leaf.spec), array.ndim)
        for shard in array.addressable_shards:
            assert shard.data.shape == leaf.shard_shape
            assert shard.data.nbytes == leaf.bytes_per_device
        assert array.nbytes == leaf.bytes_total
    first = jax.devices()[0]
    on_first = sum(s.data.nbytes for a in placed for s in a.addressable_shards if s.device == first)
    assert report.bytes_per_device == on_first
    assert report.bytes_total == sum(a.nbytes for a in placed)


def test_findings_word_by_word() -> None:
    tree = {
        "unknown": meta.LogicallyPartitioned(shaped(8), ("hiden",)),
        "taken": meta.LogicallyPartitioned(shaped(8, 8), ("hidden", "heads")),
        "uneven": meta.LogicallyPartitioned(shaped(8, 6), (None, "hidden")),
        "many": meta.LogicallyPartitioned(shaped(8), ("batch", "hidden")),
        "large": meta.LogicallyPartitioned(shaped(1024, 512), ("embed", None)),
        "twice": meta.LogicallyPartitioned(shaped(8, 8), ("batch", "batch")),
        "axis": meta.Partitioned(shaped(8, 8), ("modle", ("data", "model"))),
        "double": meta.Partitioned(shaped(8, 8), ("model", ("data", "model"))),
    }
    mesh = mesh_of()
    report = meta.explain(tree, mesh, [*RULES, ("vocab", "model")])
    assert {(f.kind, f.path): f.message for f in report.findings} == {
        ("unknown-name", "unknown"): "unknown: no rule knows the name 'hiden' of dimension 0, so it stays replicated; "
        "did you mean 'hidden'?",
        ("taken-axis", "taken"): "taken: name 'heads' of dimension 1 stays replicated, because its rule "
        "('heads', 'model') needs device axis 'model', which another dimension of ('hidden', 'heads') has taken; "
        "reorder the rules, or map 'heads' to None",
        ("does-not-divide", "uneven"): "uneven: dimension 1 of shape (8, 6) does not divide over axis 'model' "
        "(4 devices); use 4 or 8, or map this dimension to None",
        (
            "too-many-names",
            "many",
        ): "many: 2 names ('batch', 'hidden') for shape (8,), which has 1 dimensions; give one "
        "name a dimension, or pass the whole state, parameters included, so that the names of a factored optimizer "
        "state can be found by its parameter; it is left replicated",
        (
            "large-replicated",
            "large",
        ): "large: float32[1024,512] of 2.0 MiB is replicated on all 8 devices; give one of "
        "its dimensions a name that maps to a device axis, or raise large_bytes if this is meant",
        (
            "repeated-name",
            "twice",
        ): "twice: names ('batch', 'batch'): 'batch' stands at more than one dimension; a rule "
        "could not tell them apart, give each dimension a name of its own",
        ("unknown-axis", "axis"): "axis: device axis 'modle' at dimension 0 is not in the mesh with axes "
        "('data', 'model'); did you mean 'model'?",
        ("taken-axis", "double"): "double: device axis 'model' at dimension 1 shards another dimension already",
        (
            "unused-rule",
            None,
        ): "rules: rule 4 ('vocab', 'model') decided no dimension of this tree",  # the last of three
    }
    unused = [f for f in report.findings if f.kind == "unused-rule"]
    assert [str(f).split(" decided")[0] for f in unused] == [
        f"rules: rule {i} {rule!r}" for i, rule in enumerate([*RULES, ("vocab", "model")]) if i in (0, 2, 4)
    ]
    assert [f.fatal for f in report.findings] == [True] * 8 + [False] * 3
    # What cannot be is left out of the spec, so that the rest can be shown.
    assert report["axis"].spec == P(None, ("data", "model")) and report["double"].spec == P("model", ("data",))
    assert report["many"].spec == P() and report["twice"].spec == P(None, None)
    assert report["uneven"].shard_shape is None and report["uneven"].bytes_per_device is None


def test_a_rule_that_names_an_unknown_axis() -> None:
    report = meta.explain([meta.LogicallyPartitioned(shaped(8), ("a",))], mesh_of(), [("a", "stage")])
    assert messages(report) == [
        "tree[0]: device axis 'stage' of the rule ('a', 'stage') at dimension 0 is not in the mesh with axes "
        "('data', 'model'); known names: 'data', 'model'"
    ]
    assert report["tree[0]"].spec == P(None)


def test_without_rules_every_name_is_unknown() -> None:
    report = meta.explain([meta.LogicallyPartitioned(shaped(8), ("a",))], mesh_of())
    assert messages(report) == [
        "tree[0]: no rule knows the name 'a' of dimension 0, so it stays replicated; no names are known"
    ]


def test_falling_through_to_a_later_rule_is_no_finding() -> None:
    rules = [("batch", "data"), ("embed", "data"), ("embed", "model")]
    report = meta.explain([meta.LogicallyPartitioned(shaped(8, 8), ("batch", "embed"))], mesh_of(), rules)
    assert report["tree[0]"].dimensions[1].rule_index == 2
    assert messages(report) == ["rules: rule 1 ('embed', 'data') decided no dimension of this tree"]


def test_large_is_what_the_caller_says() -> None:
    tree = [shaped(64), meta.Partitioned(shaped(64), ("data",)), shaped(8)]
    kinds = [(f.kind, f.path) for f in meta.explain(tree, mesh_of(), large_bytes=256).findings]
    assert kinds == [("large-replicated", "tree[0]")]
    one = Mesh(np.array(jax.devices()[:1]), ("data",))
    assert meta.explain(tree, one, large_bytes=256).findings == ()


def test_strict_raises_every_fatal_finding_in_its_words() -> None:
    mesh = mesh_of()
    tree = {
        "a": meta.LogicallyPartitioned(shaped(8), ("hiden",)),
        "b": meta.LogicallyPartitioned(shaped(6), ("hidden",)),
    }
    with pytest.raises(AxisError) as error:
        meta.explain(tree, mesh, RULES, strict=True)
    fatal = [f.message for f in meta.explain(tree, mesh, RULES).findings if f.fatal]
    assert len(fatal) == 2 and str(error.value) == "\n".join(fatal)
    with pytest.raises(AxisError) as error:
        meta.explain([tree["a"]] * 60, mesh, RULES, strict=True)
    assert str(error.value).splitlines()[20:] == ["and 40 more; strict=False gives all of them"]
    with pytest.raises(MetadataError):
        meta.explain([meta.Partitioned(shaped(8), ("data", "model"))], mesh, strict=True)
    harmless = [meta.LogicallyPartitioned(shaped(8), ("hidden",))]
    assert meta.explain(harmless, mesh, RULES, strict=True).findings  # unused rules are mentioned only


def test_leaves_without_shapes_or_names() -> None:
    tree = {"spec": P("hidden", "hiden"), "none": None, "text": "x", "n": 3, "t": meta.Partitioned({"x": 1}, ("data",))}
    report = meta.explain(tree, mesh_of(), RULES)
    assert {leaf.path: leaf.spec for leaf in report} == {"spec": P("model", None), "t": P("data")}
    assert report["spec"].bytes_total is None and report["spec"].dimensions[0].size is None
    assert report.findings[0].message.startswith("spec: no rule knows the name 'hiden' of dimension 1")


def test_random_keys_have_bytes() -> None:
    (leaf,) = meta.explain([jax.random.split(jax.random.key(0), 4)], mesh_of())
    assert leaf.shape == (4,) and leaf.bytes_total == 4 * jax.random.key(0).dtype.itemsize


def test_the_table() -> None:
    tree = {"w": meta.LogicallyPartitioned(shaped(64, 512), ("embed", "hidden")), "s": P("hidden"), "b": shaped(3)}
    text = str(meta.explain(tree, mesh_of(), [("hidden", "model")]))
    lines = text.splitlines()
    assert lines[0] == "mesh (data: 2, model: 4)"
    for cells in (
        ["w", "float32[64,512]", "embed -> -, hidden -> model (0)", "[64,128]", "32.0 KiB", "128.0 KiB"],
        ["s", "?", "hidden -> model (0)", "?", "?", "?"],
        ["b", "float32[3]", "_", "[3]", "12 B", "12 B"],
        ["total", "", "", "", "32.0 KiB", "128.0 KiB"],
    ):
        assert any([c.strip() for c in line.strip("│┃").split("│")] == cells for line in lines), (cells, text)
    assert "! w: no rule knows the name 'embed' of dimension 0, so it stays replicated; known names: 'hidden'" in lines


def test_the_table_is_as_wide_as_it_needs_to_be_and_folds_for_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"w" * 60: meta.LogicallyPartitioned(shaped(64, 512), ("embed", "hidden"))}
    report = meta.explain(tree, mesh_of(), [("hidden", "model")])
    text = str(report)
    for columns in ("40", "80", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        assert str(report) == text
    assert max(map(len, text.splitlines())) > 120
    out = io.StringIO()
    Console(file=out, width=60).print(report)
    assert max(map(len, out.getvalue().splitlines())) <= 60


@given(st.integers(0, 2**50))
def test_bytes_are_written_with_a_unit(count: int) -> None:
    from manymesh._shown import format_bytes

    number, unit = format_bytes(count).split()
    size = float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert math.isclose(size, count, rel_tol=0.05, abs_tol=0.5)
