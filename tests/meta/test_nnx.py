"""Flax NNX: names in states, rules for them, and modules that cross the bridge in either direction."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manymesh import meta
from manymesh.errors import AxisError
from manymesh.meta._axes import make_axes

RULES = [("hidden", "model"), ("embed", None)]


@pytest.fixture(autouse=True, scope="module")
def no_mesh_yet() -> Iterator[None]:
    with nnx.use_eager_sharding(False):
        yield


def mesh_of() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


class Linear(nnx.Module):
    def __init__(self, names: Any, **metadata: Any) -> None:
        self.w = nnx.Param(jnp.ones((8, 16)), out_sharding=names, **metadata)
        self.b = nnx.Param(jnp.ones(16))


def spec_in(tree: Any) -> Any:
    return tree["w"].get_value().spec


# --- states ---------------------------------------------------------------------------------------


def test_names_are_device_axes_or_logical_as_rules_say() -> None:
    mesh = mesh_of()
    device, logical = nnx.state(Linear((None, "model"))), nnx.state(Linear(("embed", "hidden")))
    own = nnx.state(Linear(("embed", "hidden"), sharding_rules=(("hidden", "model"),)))
    for function in (meta.get_sharding, meta.logical_to_mesh_sharding):
        assert spec_in(function(device, mesh)) == P(None, "model")
        assert spec_in(function(device, mesh, RULES)) == P(None, "model")  # an axis for which there is no rule
        assert spec_in(function(logical, mesh, RULES)) == P(None, "model")
        assert function(logical, mesh, RULES)["b"].get_value() == NamedSharding(mesh, P())
        # Rules of a variable and of the surroundings are joined.
        assert spec_in(function(own, mesh, [("embed", "data")])) == P("data", "model")
        with meta.logical_axis_rules([("embed", None), ("hidden", "data")]):
            assert spec_in(function(logical, mesh)) == P(None, "data")
            assert spec_in(function(own, mesh)) == P(None, "model")
    assert meta.logical_to_mesh(logical, RULES)["w"].get_value() == P(None, "model")


def test_a_name_that_is_neither() -> None:
    state, mesh = nnx.state(Linear(("embed", "hiden"))), mesh_of()
    words = "w: device axis 'hiden' at dimension 1 is not in the mesh with axes ('data', 'model'); known names: 'data', 'model'"
    assert [f.message for f in meta.explain(state, mesh, RULES).findings if f.fatal] == [words]
    with pytest.raises(AxisError) as error:
        meta.get_sharding(state, mesh, RULES, strict=True)
    assert str(error.value) == words
    with pytest.raises(AxisError, match=r"^w: device axis 'hiden' of \(None, 'hiden'\) is not in the mesh"):
        meta.get_sharding(state, mesh, RULES)


def test_explain_names_the_rule_of_each_dimension() -> None:
    state = nnx.state(Linear(("embed", "hidden"), sharding_rules=(("hidden", "model"),)))
    report = meta.explain(state, mesh_of(), [("embed", "data")])
    assert [d.rule for d in report["w"].dimensions] == [("embed", "data"), ("hidden", "model")]
    assert report["w"].bytes_per_device == 8 * 16 * 4 // 8
    assert [f for f in report.findings if f.fatal] == []


def test_rules_that_only_others_use_are_not_unused() -> None:
    """A variable with rules of its own reads them before those that were given, each of which another variable may use."""
    init, own = nnx.initializers.ones_init(), (("hidden", "model"), ("wide", None))
    with nnx.use_eager_sharding(False):
        one = nnx.Linear(
            4, 8, use_bias=False, kernel_init=nnx.with_partitioning(init, (None, "embed")), rngs=nnx.Rngs(0)
        )
        with_own = nnx.with_partitioning(init, ("hidden", None), sharding_rules=own)
        other = nnx.Linear(8, 4, use_bias=False, kernel_init=with_own, rngs=nnx.Rngs(0))
    report = meta.explain(nnx.state((one, other)), mesh_of(), [("embed", "data"), ("rows", None)])
    assert [f.message for f in report.findings] == [
        "rules: rule 1 ('rows', None) decided no dimension of this tree",
        "rules: rule 1 ('wide', None) decided no dimension of this tree",
    ]


def test_a_name_whose_axis_is_taken_is_no_device_axis() -> None:
    state, rules = nnx.state(Linear(("embed", "hidden"))), [("hidden", "model"), ("embed", "model")]
    assert spec_in(meta.get_sharding(state, mesh_of(), rules)) == P(None, "model")
    (finding,) = (f for f in meta.explain(state, mesh_of(), rules).findings if f.fatal)
    assert finding.kind == "taken-axis" and finding.message.startswith(
        "w: name 'embed' of dimension 0 stays replicated"
    )


def test_lenient_names_are_other_metadata() -> None:
    strict, lenient = make_axes(("a",), logical=True), make_axes(("a",), logical=True, lenient=True)
    assert strict != lenient and pickle.loads(pickle.dumps(lenient)) is lenient


NAME = st.sampled_from(["embed", "hidden", "data", "model", None])


@given(
    st.tuples(NAME, NAME).filter(lambda n: n[0] != n[1] or n[0] is None),
    st.lists(
        st.tuples(st.sampled_from(["embed", "hidden"]), st.sampled_from(["x", "y", None])),
        max_size=2,
        unique_by=(lambda r: r[0], lambda r: r[1] or object()),
    ),
)
def test_specs_are_those_of_flax(names: Any, rules: Any) -> None:
    # Without rules that compete: there Flax lets the last one win and we the first, as in Linen.
    state = nnx.state(Linear(names, **({"sharding_rules": tuple(rules)} if rules else {})))
    assert meta.get_partition_spec(state) == nnx.get_partition_spec(state)


def test_a_sharded_state_from_shapes() -> None:
    mesh = mesh_of()
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Linear(("embed", "hidden"))))
    shardings = meta.get_sharding(shapes, mesh, RULES, strict=True)
    state = jax.jit(lambda: nnx.split(Linear(("embed", "hidden")))[1], out_shardings=shardings)()
    model = nnx.merge(graph, state)
    assert model.w.get_value().sharding.spec == P(None, "model")
    # Placed afterwards, it is the same.
    placed = jax.device_put(nnx.state(Linear(("embed", "hidden"))), shardings)
    assert placed["w"].get_value().sharding == model.w.get_value().sharding


def test_variables_are_no_boxes() -> None:
    state = nnx.state(Linear((None, "model")))
    assert not meta.is_axis_metadata(state["w"])
    for same in (meta.unbox(state), meta.add_axis(state, 0, {}), meta.box(state), meta.box(state, ("a",))):
        assert jax.tree.structure(same) == jax.tree.structure(state)


# --- the bridge -----------------------------------------------------------------------------------


class Block(nn.Module):
    kind: Any = meta.with_logical_partitioning

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(16, kernel_init=self.kind(nn.initializers.lecun_normal(), ("embed", "hidden")))(x)


def test_linen_in_nnx_in_linen_keeps_our_boxes() -> None:
    """ToNNX puts what a box says into a variable, ToLinen makes the box of it again."""
    x = jnp.ones((2, 8))

    class Middle(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.block = nnx.bridge.ToNNX(Block(), rngs=rngs).lazy_init(x)

        def __call__(self, x: Any) -> Any:
            return self.block(x)

    model = Middle(nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    assert {leaf.spec for leaf in meta.explain(state, mesh_of(), RULES)} == {P(None, "model"), P()}

    linen = nnx.bridge.to_linen(Middle)
    variables = linen.init(jax.random.key(0), x)
    kernel = variables["params"]["block"]["Dense_0"]["kernel"]
    assert type(kernel) is meta.LogicallyPartitioned and kernel.names == ("embed", "hidden")
    shardings = meta.get_sharding(variables["params"], mesh_of(), RULES, strict=True)
    assert shardings["block"]["Dense_0"]["kernel"].spec == P(None, "model")
    np.testing.assert_allclose(linen.apply(variables, x), linen.apply(meta.unbox(variables), x))


def test_nnx_in_linen_has_names_that_all_functions_read() -> None:
    x, mesh = jnp.ones((2, 8)), mesh_of()
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "hidden"))
    model = nnx.bridge.to_linen(nnx.Linear, 8, 16, kernel_init=init)
    variables = model.init(jax.random.key(0), x)
    kernel = variables["params"]["kernel"]
    assert meta.is_axis_metadata(kernel) and type(kernel).__name__ == "NNXMeta"
    assert meta.get_partition_spec(variables) == nn.get_partition_spec(variables)
    assert meta.get_sharding(variables, mesh, RULES, strict=True)["params"]["kernel"].spec == P(None, "model")
    with meta.logical_axis_rules(RULES):
        assert meta.logical_to_mesh(variables)["params"]["kernel"] == P(None, "model")
    report = meta.explain(variables, mesh, RULES)
    assert report["params['kernel']"].dimensions[1].rule == ("hidden", "model")
    plain = meta.unbox(variables)
    assert isinstance(plain["params"]["kernel"], jax.Array)
    assert type(meta.replace_boxed(variables, plain)["params"]["kernel"]) is type(kernel)
    params = {meta.PARTITION_NAME: "layers"}
    for function in ("add_axis", "remove_axis"):  # its own methods decide
        ours, theirs = (getattr(m, function)(variables, 0, params) for m in (meta, nn.meta))
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
