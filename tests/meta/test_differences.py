"""Each difference from Flax that docs/metadata.md lists is one: what Flax does, beside what we do."""

from __future__ import annotations

import concurrent.futures
import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.errors import PartitioningUnspecifiedError
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from manymesh import meta
from manymesh.errors import AxisError, MetadataError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metadata.md"
LAYERS = {meta.PARTITION_NAME: "layers"}


def mesh_of(*kinds: AxisType) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=kinds or (AxisType.Auto,) * 2)


def both(**fields: Any) -> tuple[Any, Any]:
    value = jnp.ones((8, 16))
    return nn.Partitioned(value, **fields), meta.Partitioned(value, **fields)


def test_adding_and_removing_axes() -> None:
    theirs, ours = both(names=("a", "b"))
    for box in (theirs, ours):  # no difference, but close to one
        with pytest.raises(PartitioningUnspecifiedError):
            box.add_axis(0, {})
    assert theirs.add_axis(-1, LAYERS).names == ("a", "layers", "b")
    assert ours.add_axis(-1, LAYERS).names == ("a", "b", "layers")
    assert theirs.add_axis(4, LAYERS).remove_axis(4, LAYERS).names == ("a", "b", None, None)
    assert ours.add_axis(4, LAYERS).remove_axis(4, LAYERS).names == ("a", "b")
    with pytest.raises(AssertionError, match="^$"):
        theirs.remove_axis(0, LAYERS)
    with pytest.raises(MetadataError, match="expected axis 'layers' at index 0, found 'a'"):
        ours.remove_axis(0, LAYERS)


def test_boxes_as_values() -> None:
    assert nn.Partitioned(0.0, "model").get_partition_spec() == P(*"model")
    with pytest.raises(MetadataError):
        meta.Partitioned(0.0, "model")
    theirs, ours = both(names=("a", None))
    with pytest.raises(ValueError, match="ambiguous"):
        assert theirs == both(names=("a", None))[0]
    assert ours == both(names=("a", None))[1]
    with pytest.raises(TypeError, match="unhashable"):
        hash(theirs)
    assert hash(ours) == hash(both(names=("a", None))[1])


@pytest.mark.parametrize("kinds", [("Explicit", "Explicit"), ("Explicit", "Auto")], ids="-".join)
def test_unboxing_along_axes_of_other_types(kinds: tuple[str, str]) -> None:
    with jax.set_mesh(mesh_of(*(AxisType[k] for k in kinds))):
        theirs, ours = both(names=("data", "model"))
        with pytest.raises((AssertionError, ValueError)):
            jax.jit(lambda b: b.unbox())(theirs)
        assert jax.jit(lambda b: b.unbox())(ours).sharding.spec == P("data", "model")


def test_unboxing_eagerly() -> None:
    theirs, ours = both(names=("data", "model"))  # values that lie on one device
    with jax.set_mesh(mesh_of()):
        with pytest.raises(TypeError, match="must be a `NamedSharding`"):
            theirs.unbox()
        assert ours.unbox().sharding.spec == P("data", "model")


def test_rules_of_the_surroundings() -> None:
    mesh, x = mesh_of(), jnp.ones((8, 16))
    for module, expected in ((nn, [("data",), ("data",)]), (meta, [("data",), (None, "model")])):
        f = jax.jit(lambda v, m=module: m.with_logical_constraint(v + 1, ("a", "b"), mesh=mesh))
        found = []
        for rules in ([("a", "data")], [("b", "model")]):
            with module.logical_axis_rules(rules):
                found.append(tuple(f(x).sharding.spec))
        assert [spec[: len(e)] for spec, e in zip(found, expected, strict=True)] == expected
    rules = [("a", "data")]
    with nn.logical_axis_rules(rules), meta.logical_axis_rules(rules), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(nn.get_logical_axis_rules).result() == ()
        assert pool.submit(meta.get_logical_axis_rules).result() == tuple(rules)
    with pytest.raises(ValueError, match="Unknown axis rule"):
        nn.logical_to_mesh_axes(("a",), {"a": "data"})
    assert meta.logical_to_mesh_axes(("a",), {"a": "data"}) == P("data")


def test_shardings() -> None:
    mesh = mesh_of()
    with nn.logical_axis_rules([("hidden", "model")]), meta.logical_axis_rules([("hidden", "model")]):
        with pytest.raises(ValueError, match="embed"):
            nn.get_sharding(nn.LogicallyPartitioned(jnp.ones((8, 16)), ("embed", "hidden")), mesh)
        box = meta.LogicallyPartitioned(jnp.ones((8, 16)), ("embed", "hidden"))
        assert meta.get_sharding(box, mesh).spec == P(None, "model")
    uneven = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    assert nn.get_sharding({"w": nn.Partitioned(uneven, ("data",))}, mesh)["w"].spec == P("data")
    with pytest.raises(AxisError, match=r"^w: dimension 0 of shape \(3, 3\) does not divide"):
        meta.get_sharding({"w": meta.Partitioned(uneven, ("data",))}, mesh)


def test_factored_optimizer_states() -> None:
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    for module, expected in ((nn, P("data", "model")), (meta, P("model"))):
        params = {"w": module.Partitioned(jax.ShapeDtypeStruct((8, 16), jnp.float32), ("data", "model"))}
        state = jax.eval_shape(lambda p: {"params": p, "opt_state": optimizer.init(p)}, params)
        assert module.get_partition_spec(state)["opt_state"][0].v_col["w"] == expected


def test_competing_rules_in_nnx() -> None:
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.ones(8), out_sharding=("a",), sharding_rules=(("a", "data"), ("a", "model")))
    assert nnx.get_partition_spec({"w": variable})["w"].get_value() == P("model")
    assert meta.get_partition_spec({"w": variable})["w"].get_value() == P("data")


def test_names_without_a_rule_in_strict_constraints() -> None:
    arguments = (jnp.ones((8, 16)), ("hiden", None), [("hidden", "model")], mesh_of())
    with pytest.raises(ValueError, match="did not match a rule$"):
        nn.with_logical_constraint(*arguments, fallback=nn.spmd.RulesFallback.RAISE_ERROR)
    with pytest.raises(AxisError, match="no rule knows it; did you mean 'hidden'"):
        meta.with_logical_constraint(*arguments, fallback=meta.RulesFallback.RAISE_ERROR)


def test_every_row_of_the_page_has_a_test_here() -> None:
    """Add a test above for a new row, then count it."""
    table = PAGE.read_text("utf-8").partition("## Differences from Flax")[2]
    rows = [line for line in re.findall(r"^\| .+ \|$", table, re.MULTILINE) if not line.startswith("| |")]
    assert len(rows) == 14
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))
