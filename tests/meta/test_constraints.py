"""Constraints from boxes and from logical names: under every type of axis, with a mesh, in a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manymesh import meta
from manymesh._scope import Scope, enter_scope
from manymesh.errors import AxisError, MetadataError
from manymesh.meta._rules import resolve, rules_in_task

RULES = [("batch", "data"), ("hidden", "model"), ("embed", None)]


def mesh_of(data: AxisType = AxisType.Auto, model: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(data, model))


AUTO = mesh_of()
EXPLICIT = mesh_of(AxisType.Explicit, AxisType.Explicit)
MIXED = mesh_of(AxisType.Explicit, AxisType.Auto)


def spec_of(x: Any) -> tuple[Any, ...]:
    spec = tuple(x.sharding.spec) if isinstance(x.sharding, NamedSharding) else ()
    return spec + (None,) * (x.ndim - len(spec))


def ones() -> Any:
    return jnp.ones((8, 16))


CONSTRAINTS: dict[str, Callable[..., Any]] = {
    "Partitioned": lambda x, mesh=None: meta.unbox(meta.Partitioned(x, ("data", "model"), mesh)),
    "Logically": lambda x, mesh=None: meta.unbox(meta.LogicallyPartitioned(x, ("batch", "hidden"), mesh, RULES)),
    "constraint": lambda x, mesh=None: meta.with_logical_constraint(x, ("batch", "hidden"), RULES, mesh),
}
every_way = pytest.mark.parametrize("constrain", CONSTRAINTS.values(), ids=CONSTRAINTS.keys())
every_mesh = pytest.mark.parametrize("mesh", [AUTO, EXPLICIT, MIXED], ids=["auto", "explicit", "mixed"])
eager_and_jit = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


@every_way
@every_mesh
@eager_and_jit
def test_under_set_mesh(constrain: Any, mesh: Mesh, wrap: Any) -> None:
    with jax.set_mesh(mesh):
        y = wrap(lambda x: constrain(x) * 2)(ones())
    assert spec_of(y) == ("data", "model")
    np.testing.assert_array_equal(y, 2 * np.ones((8, 16)))


@every_way
@every_mesh
@eager_and_jit
def test_with_a_mesh_of_its_own(constrain: Any, mesh: Mesh, wrap: Any) -> None:
    y = wrap(lambda x: constrain(x, mesh))(ones())
    assert spec_of(y) == ("data", "model")
    with jax.set_mesh(mesh):
        assert spec_of(wrap(lambda x: constrain(x, mesh))(ones())) == ("data", "model")


@every_way
@eager_and_jit
def test_without_any_mesh_nothing_happens(constrain: Any, wrap: Any) -> None:
    x = ones()
    assert wrap(constrain)(x).sharding == x.sharding
    if wrap is not jax.jit:
        assert constrain(x) is x


@every_way
@every_mesh
def test_in_a_full_shard_map_every_name_is_manual(constrain: Any, mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        x = jax.device_put(ones(), NamedSharding(mesh, P("data", "model")))
        f = jax.shard_map(
            lambda s: constrain(s) + s.shape[0], in_specs=P("data", "model"), out_specs=P("data", "model")
        )
        np.testing.assert_array_equal(jax.jit(f)(x), np.ones((8, 16)) + 4)


@every_way
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("own", [False, True], ids=["ambient", "own"])
def test_in_a_partial_shard_map_the_other_axes_are_constrained(constrain: Any, mesh: Mesh, own: bool) -> None:
    with jax.set_mesh(mesh):
        x = jax.device_put(ones(), NamedSharding(mesh, P("data")))
        f = jax.shard_map(
            lambda s: constrain(s, mesh if own else None), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )
        assert spec_of(jax.jit(f)(x)) == ("data", "model")


@every_way
@every_mesh
def test_constraints_have_gradients(constrain: Any, mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(constrain(x) ** 2)))(ones())
    np.testing.assert_array_equal(gradient, 2 * np.ones((8, 16)))


@every_way
@eager_and_jit
def test_under_set_mesh_of_a_value_that_lies_there_already(constrain: Any, wrap: Any) -> None:
    with jax.set_mesh(AUTO):
        x = jax.device_put(ones(), NamedSharding(AUTO, P("model", None)))
        assert spec_of(wrap(constrain)(x)) == ("data", "model")


def test_a_constant_inside_a_trace() -> None:
    x = ones()
    with jax.set_mesh(AUTO):
        assert spec_of(jax.jit(lambda: meta.unbox(meta.Partitioned(x, ("data", None))) * 1)()) == ("data", None)


def test_an_abstract_mesh_without_devices_leaves_concrete_values_alone() -> None:
    x = ones()
    with jax.sharding.use_abstract_mesh(AUTO.abstract_mesh):
        lowered = jax.jit(lambda v: meta.unbox(meta.Partitioned(v, ("data", None)))).lower(x).as_text()
    assert "sharding_constraint" in lowered or "Sharding" in lowered


def test_numpy_values_and_descriptions() -> None:
    with jax.set_mesh(AUTO):
        assert spec_of(meta.unbox(meta.Partitioned(np.ones((8, 4)), ("data", None)))) == ("data", None)
        shape = jax.ShapeDtypeStruct((8,), jnp.float32)
        assert meta.unbox({"w": meta.Partitioned(shape, ("data",))})["w"] is shape
        assert meta.unbox(meta.Partitioned(None, ("data",))) is None
        assert meta.unbox(meta.Partitioned("text", ("data",))) == "text"


def test_a_box_around_a_tree_constrains_every_array_in_it() -> None:
    tree = meta.Partitioned({"a": ones(), "b": [ones()]}, ("data",))
    with jax.set_mesh(AUTO):
        plain = jax.jit(meta.unbox)(tree)
    assert spec_of(plain["a"]) == spec_of(plain["b"][0]) == ("data", None)


def test_nested_boxes_are_constrained_one_after_the_other() -> None:
    box = meta.Partitioned(meta.Partitioned(ones(), (None, "model")), ("data",))
    with jax.set_mesh(AUTO):
        assert spec_of(jax.jit(meta.unbox)(box)) == (None, "model")


def test_apply_constraint_false() -> None:
    x = ones()
    with jax.set_mesh(AUTO):
        assert meta.Partitioned(x, ("data",)).unbox(apply_constraint=False) is x
        assert meta.unbox({"w": meta.Partitioned(x, ("wrong",))}, apply_constraint=False)["w"] is x


@every_mesh
@eager_and_jit
def test_unconstrained_dimensions_keep_what_they_have(mesh: Mesh, wrap: Any) -> None:
    with jax.set_mesh(mesh):
        x = jax.device_put(ones(), NamedSharding(mesh, P("data", None)))
        y = wrap(lambda v: meta.unbox(meta.Partitioned(v, (P.UNCONSTRAINED, "model"))))(x)
        assert spec_of(y)[1] == "model"
        if mesh is not AUTO:  # with Auto axes the compiler is free
            assert spec_of(y)[0] == "data"


@eager_and_jit
@pytest.mark.parametrize("mesh", [EXPLICIT, MIXED], ids=["explicit", "mixed"])
def test_an_unconstrained_dimension_gives_up_what_another_one_wants(mesh: Mesh, wrap: Any) -> None:
    with jax.set_mesh(mesh):
        x = jax.device_put(ones(), NamedSharding(mesh, P("data", None)))
        y = wrap(lambda v: meta.unbox(meta.Partitioned(v, (P.UNCONSTRAINED, "data"))))(x)
        assert spec_of(y) == (None, "data")


@eager_and_jit
def test_an_unnamed_dimension_is_replicated_along_axes_of_every_type(wrap: Any) -> None:
    with jax.set_mesh(MIXED):
        x = jax.device_put(ones(), NamedSharding(MIXED, P("model", None)))
        y = wrap(lambda v: meta.unbox(meta.Partitioned(v, (None, "data"))))(x)
        assert spec_of(y) == (None, "data")
        y = wrap(lambda v: meta.unbox(meta.Partitioned(v, (("data", "model"), None))))(x)
        assert spec_of(y) == (("data", "model"), None)
        y = wrap(lambda v: meta.unbox(meta.Partitioned(v, (None, None))))(x)
        assert spec_of(y) == (None, None)


@eager_and_jit
def test_tuples_of_axes_of_two_types(wrap: Any) -> None:
    with jax.set_mesh(MIXED):
        y = wrap(lambda v: meta.unbox(meta.Partitioned(v, (None, ("data",)))))(ones())
        assert spec_of(y)[1] in ("data", ("data",))


def test_a_tree_of_constraints_is_a_prefix() -> None:
    tree = {"x": (ones(), ones()), "y": ones(), "z": ones()}
    with jax.set_mesh(AUTO), meta.logical_axis_rules(RULES):
        out = jax.jit(
            lambda t: meta.with_logical_constraint(t, {"x": ("batch", None), "y": P(None, "hidden"), "z": None})
        )(tree)
    assert [spec_of(x) for x in jax.tree.leaves(out)] == [("data", None)] * 2 + [(None, "model"), (None, None)]


# --- fallbacks ------------------------------------------------------------------------------------


def test_fallbacks() -> None:
    names = ("batch", "unknown")
    with jax.set_mesh(AUTO), meta.logical_axis_rules(RULES):
        x = jax.device_put(ones(), NamedSharding(AUTO, P(None, "model")))
        assert spec_of(meta.with_logical_constraint(x, names)) == ("data", None)
        assert meta.with_logical_constraint(x, names, fallback=meta.RulesFallback.NO_CONSTRAINT) is x
        with pytest.raises(AxisError) as error:
            meta.with_logical_constraint(x, ("batch", "hiden"), fallback=meta.RulesFallback.RAISE_ERROR)
        assert str(error.value) == (
            "with_logical_constraint: name 'hiden' of ('batch', 'hiden') got no device axis, no rule knows it; "
            "did you mean 'hidden'?"
        )
        taken = meta.RulesFallback.RAISE_ERROR
        with pytest.raises(AxisError) as error:
            meta.with_logical_constraint(x, ("b", "a"), [("a", "data"), ("b", "data")], fallback=taken)
        assert str(error.value) == (
            "with_logical_constraint: name 'b' of ('b', 'a') got no device axis, every rule for it maps to device axes "
            "that are taken: ('b', 'data')"
        )
        # None in a rule and None as a name are answers, not gaps.
        meta.with_logical_constraint(x, ("embed", None), fallback=taken)


def test_fallbacks_have_the_values_of_flax() -> None:
    assert {f.name: f.value for f in meta.RulesFallback} == {
        "AXIS_IS_UNSHARDED": "axis_is_unsharded",
        "RAISE_ERROR": "raise_error",
        "NO_CONSTRAINT": "no_constraint",
    }


# --- errors ---------------------------------------------------------------------------------------


@eager_and_jit
def test_errors_of_constraints(wrap: Any) -> None:
    x = ones()
    with jax.set_mesh(AUTO):
        with pytest.raises(AxisError) as error:
            wrap(meta.unbox)(meta.Partitioned(x, ("modle", None)))
        assert str(error.value) == (
            "Partitioned(float32[8,16], names=('modle', None)): device axis 'modle' of ('modle', None) is not in the "
            "mesh with axes ('data', 'model'); did you mean 'model'?"
        )
        with pytest.raises(AxisError) as error:
            wrap(meta.unbox)(meta.Partitioned(x, ("model", ("data", "model"))))
        assert str(error.value) == (
            "Partitioned(float32[8,16], names=('model', ('data', 'model'))): device axis 'model' stands twice in "
            "('model', ('data', 'model')); an axis can shard one dimension"
        )
        with pytest.raises(MetadataError) as caught:
            wrap(meta.unbox)(meta.Partitioned(x, ("data", None, None)))
        assert str(caught.value) == (
            "Partitioned(float32[8,16], names=('data', None, None)): names ('data', None, None) are 3 for "
            "float32[8,16], which has 2 dimensions; remove the surplus names, or use unbox(apply_constraint=False)"
        )
        with pytest.raises(AxisError, match=r"^with_logical_constraint: device axis 'stage' of \('stage',\) is not"):
            wrap(lambda v: meta.with_logical_constraint(v, ("batch",), [("batch", "stage")]))(x)


# --- in a task ------------------------------------------------------------------------------------


def in_task(function: Any, mesh: Mesh | None = AUTO, **logical_axes: Any) -> tuple[Any, list[Any]]:
    """Runs a function in a scope whose names are device axes or given; also returns what it was asked to resolve."""
    asked = []

    def asked_for(names: tuple[Any, ...], shape: tuple[int, ...], rules: Any) -> P:
        asked.append((names, shape))
        axes = () if mesh is None else tuple(mesh.axis_names)
        return resolve(names, rules_in_task(tuple(logical_axes.items()), rules, axes), axes).spec

    abstract = None if mesh is None else mesh.abstract_mesh

    def body(x: Any) -> Any:
        with enter_scope(Scope("t", abstract, asked_for)):
            return function(x)

    with jax.set_mesh(mesh or AUTO):
        return jax.jit(body)(ones()), asked


def test_a_task_resolves_the_names_of_boxes() -> None:
    y, asked = in_task(lambda x: meta.unbox(meta.Partitioned(x, ("batch", "model"))), batch="data")
    assert spec_of(y) == ("data", "model") and asked == [(("batch", "model"), (8, 16))]


def test_a_task_without_named_axes_constrains_nothing() -> None:
    for function in (
        lambda x: meta.unbox(meta.Partitioned(x, ("nowhere",))),
        lambda x: meta.with_logical_constraint(x, ("nowhere",), RULES),
    ):
        y, asked = in_task(function, None)
        assert asked == [] and spec_of(y) == (None, None)


def test_a_task_resolves_logical_names_without_any_rules() -> None:
    for function in (
        lambda x: meta.unbox(meta.LogicallyPartitioned(x, ("batch", "hidden"))),
        lambda x: meta.with_logical_constraint(x, ("batch", "hidden")),
    ):
        y, _ = in_task(function, batch="data", hidden="model")
        assert spec_of(y) == ("data", "model")


def test_names_of_a_task_come_before_rules() -> None:
    def function(x: Any) -> Any:
        return meta.with_logical_constraint(x, ("batch", "hidden"), RULES)

    y, asked = in_task(function, batch=None)
    assert spec_of(y) == (None, "model") and asked == [(("batch", "hidden"), (8, 16))]


def test_rules_for_axes_that_a_submesh_lacks_mean_replication_there() -> None:
    small = Mesh(np.array(jax.devices()[:4]), ("model",))
    y, _ = in_task(lambda x: meta.with_logical_constraint(x, ("batch", "hidden"), RULES), small)
    assert spec_of(y) == (None, "model")
    rules = [("batch", ("data", "model"))]
    y, _ = in_task(lambda x: meta.with_logical_constraint(x, ("batch", "other"), rules), small)
    assert spec_of(y) == ("model", None)
    rules = (("a", ("data", "stage")), ("a", "stage"), ("b", P.UNCONSTRAINED), ("c", "data"))
    known = (("a", ("data",)), ("a", None), ("b", P.UNCONSTRAINED), ("c", "model"))
    assert rules_in_task((("c", "model"),), rules, ("data", "model")) == (known[-1], *known[:-1])


def test_a_box_with_a_mesh_of_its_own_follows_the_task() -> None:
    y, asked = in_task(lambda x: meta.unbox(meta.Partitioned(x, ("data", None), EXPLICIT)))
    assert spec_of(y) == ("data", None) and len(asked) == 1


def test_too_many_names_in_a_task() -> None:
    with pytest.raises(MetadataError, match="are 3 for float32"):
        in_task(lambda x: meta.unbox(meta.Partitioned(x, ("data", None, None))))
