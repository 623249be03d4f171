"""Trees of boxes as specs and shardings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manymesh import meta
from manymesh.errors import AxisError, MetadataError

RULES = [("hidden", "model"), ("embed", None), ("layers", None)]


def mesh_of() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def shaped(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class Plain(meta.AxisMetadata[Any]):
    """A box that says nothing about sharding."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> Plain:
        return Plain(val)

    def add_axis(self, index: int, params: Any) -> Plain:
        return self

    def remove_axis(self, index: int, params: Any) -> Plain:
        return self


def test_specs_of_every_kind_of_leaf() -> None:
    tree = {
        "p": meta.Partitioned(shaped(4, 8), ("data", None)),
        "l": meta.LogicallyPartitioned(shaped(4, 8), ("embed", "hidden")),
        "short": meta.Partitioned(shaped(4, 8), ("data",)),
        "tree": meta.Partitioned({"x": shaped(8), "y": [shaped(8)]}, ("data",)),
        "own": Plain(shaped(4)),
        "outer": Plain(meta.Partitioned(shaped(8), ("data",))),
        "nested": meta.Partitioned(meta.Partitioned(shaped(8), ("data",)), ("model",)),
        "array": jnp.ones(3),
        "none": None,
        "text": "text",
        "number": 3,
    }
    expected = {
        "p": P("data", None),
        "l": P("embed", "hidden"),
        "short": P("data"),
        "tree": P("data"),
        "own": P(),
        "outer": P("data"),
        "nested": P("model"),
        "array": P(),
        "none": None,
        "text": None,
        "number": None,
    }
    assert meta.get_partition_spec(tree) == expected
    mesh = mesh_of()
    shardings = meta.get_sharding(tree, mesh, RULES)
    expected["l"] = P(None, "model")
    assert shardings == {k: None if s is None else NamedSharding(mesh, s) for k, s in expected.items()}


def test_shardings_are_prefixes_that_jit_accepts() -> None:
    mesh = mesh_of()

    def init() -> Any:
        return {
            "w": meta.LogicallyPartitioned(jnp.ones((8, 4)), ("hidden", "embed")),
            "t": meta.Partitioned({"x": jnp.ones(4), "y": jnp.ones((4, 2))}, ("data",)),
            "b": jnp.zeros(3),
        }

    state = jax.jit(init, out_shardings=meta.get_sharding(jax.eval_shape(init), mesh, RULES))()
    assert state["w"].value.sharding.spec == P("model", None)
    assert state["t"].value["y"].sharding.spec == P("data")
    assert state["b"].sharding.is_fully_replicated


def test_rules_of_a_box_come_before_given_ones_and_those_before_the_surroundings() -> None:
    mesh = mesh_of()
    own = meta.LogicallyPartitioned(shaped(8), ("a",), rules=[("a", "model")])
    free = meta.LogicallyPartitioned(shaped(8), ("a",))
    with meta.logical_axis_rules([("a", "data")]):
        for function in (meta.get_sharding, meta.logical_to_mesh_sharding):
            assert function([own, free], mesh) == [NamedSharding(mesh, P(x)) for x in ("model", "data")]
            assert function([own, free], mesh, []) == [NamedSharding(mesh, P(x)) for x in ("model", None)]
        assert free.get_sharding(mesh).spec == P("data") and own.get_sharding(mesh).spec == P("model")
        assert meta.logical_to_mesh([own, free, P("a"), jnp.ones(2), None]) == [
            P("model"),
            P("data"),
            P("data"),
            P(),
            None,
        ]
    assert free.get_sharding(mesh).spec == P(None)


def test_an_abstract_mesh_will_do() -> None:
    mesh = mesh_of().abstract_mesh
    assert meta.get_sharding(meta.Partitioned(shaped(4), ("model",)), mesh) == NamedSharding(mesh, P("model"))


def test_equal_specs_share_one_sharding() -> None:
    mesh = mesh_of()
    a, b = meta.logical_to_mesh_sharding([P("hidden"), P("hidden")], mesh, RULES)
    assert a is b
    a, b, c = meta.get_sharding([meta.Partitioned(shaped(n), ("model",)) for n in (4, 4, 8)], mesh)
    assert a is b and a == c


# --- errors ---------------------------------------------------------------------------------------


def test_a_dimension_that_does_not_divide() -> None:
    tree = {"params": {"front": {"kernel": meta.Partitioned(shaped(512, 130), (None, "model"))}}}
    with pytest.raises(AxisError) as error:
        meta.get_sharding(tree, mesh_of())
    assert str(error.value) == (
        "params['front']['kernel']: dimension 1 of shape (512, 130) does not divide over axis 'model' (4 devices); "
        "use 128 or 132, or map this dimension to None"
    )
    # The same names on a shape that divides are remembered apart.
    meta.get_sharding([meta.Partitioned(shaped(512, 128), (None, "model"))], mesh_of())
    with pytest.raises(AxisError, match=r"^tree\[1\]: dimension 1 of shape \(512, 130\)"):
        meta.get_sharding([meta.Partitioned(shaped(512, n), (None, "model")) for n in (128, 130)], mesh_of())


def test_check_divides() -> None:
    mesh = mesh_of()
    meta.check_divides("w", (2, 4, 16), P("data", None, P.UNCONSTRAINED), mesh)
    meta.check_divides("w", (0, 4), P("data"), mesh)
    meta.check_divides("w", (8,), P(("data", "model")), mesh.abstract_mesh)
    for shape, spec, message in (
        (
            (3, 12),
            P(None, ("data", "model")),
            "w: dimension 1 of shape (3, 12) does not divide over axes ('data', 'model') (8 devices); "
            "use 8 or 16, or map this dimension to None",
        ),
        (
            (3, 12),
            P("model"),
            "w: dimension 0 of shape (3, 12) does not divide over axis 'model' (4 devices); "
            "use 4, or map this dimension to None",
        ),
        (
            (3, 12),
            P("modl"),
            "w: device axis 'modl' of ('modl',) is not in the mesh with axes ('data', 'model'); did you mean 'model'?",
        ),
        (
            (3, 12),
            P("stage"),
            "w: device axis 'stage' of ('stage',) is not in the mesh with axes ('data', 'model'); "
            "known names: 'data', 'model'",
        ),
    ):
        with pytest.raises(AxisError) as error:
            meta.check_divides("w", shape, spec, mesh)
        assert str(error.value) == message
    with pytest.raises(MetadataError) as caught:
        meta.check_divides("w", (4,), P("data", "model"), mesh)
    assert str(caught.value) == (
        "w: 2 names ('data', 'model') for shape (4,), which has 1 dimensions; give one name a dimension, or pass the "
        "whole state, parameters included, so that the names of a factored optimizer state can be found by its parameter"
    )


def test_axes_that_the_mesh_does_not_have() -> None:
    mesh = mesh_of()
    for function, tree, place in (
        (lambda t: meta.get_sharding(t, mesh), {"w": meta.Partitioned(shaped(4), ("modle",))}, "w"),
        (lambda t: meta.logical_to_mesh_sharding(t, mesh, [("a", "modle")]), {"w": [P("a")]}, "w[0]"),
    ):
        with pytest.raises(AxisError) as error:
            function(tree)
        assert str(error.value) == (
            f"{place}: device axis 'modle' of ('modle',) is not in the mesh with axes ('data', 'model'); "
            "did you mean 'model'?"
        )
    with pytest.raises(AxisError, match=r"^Partitioned\(float32\[4\], names=\('modle',\)\): device axis 'modle'"):
        meta.Partitioned(jnp.ones(4), ("modle",)).get_sharding(mesh)
    with pytest.raises(AxisError, match=r"^LogicallyPartitioned.*device axis 'modle' of"):
        meta.LogicallyPartitioned(jnp.ones(4), ("a",), rules=[("a", "modle")]).get_sharding(mesh)


def test_leaves_that_are_no_specs() -> None:
    for name, function in (
        ("logical_to_mesh", lambda t: meta.logical_to_mesh(t, RULES)),
        ("logical_to_mesh_sharding", lambda t: meta.logical_to_mesh_sharding(t, mesh_of(), RULES)),
    ):
        with pytest.raises(MetadataError) as error:
            function({"a": P("hidden"), "b": ("embed", "hidden")})
        assert str(error.value) == f"{name}: b[0] is 'embed'; expected a PartitionSpec, a box or an array"


def test_strict_raises_what_explain_finds() -> None:
    mesh, tree = mesh_of(), {"w": meta.LogicallyPartitioned(shaped(4, 8), ("embed", "hiden"))}
    words = "w: no rule knows the name 'hiden' of dimension 1, so it stays replicated; did you mean 'hidden'?"
    assert meta.get_sharding(tree, mesh, RULES)["w"].spec == P(None, None)
    for function in (meta.get_sharding, meta.logical_to_mesh_sharding, meta.explain):
        with pytest.raises(AxisError) as error:
            function(tree, mesh, RULES, strict=True)
        assert str(error.value) == words
    with pytest.raises(AxisError) as error:
        meta.logical_to_mesh_sharding({"w": P("embed", "hiden")}, mesh, RULES, strict=True)
    assert str(error.value) == words
    good = {"w": meta.LogicallyPartitioned(shaped(4, 8), ("embed", "hidden"))}
    assert meta.get_sharding(good, mesh, RULES, strict=True) == meta.get_sharding(good, mesh, RULES)


# --- optimizer states -----------------------------------------------------------------------------


def trained(optimizer: Any, **shapes: tuple[int, ...]) -> Any:
    params = {
        "front": {
            k: meta.LogicallyPartitioned(shaped(*s), ("layers", "embed", "hidden")[-len(s) :])
            for k, s in shapes.items()
        }
    }

    def create(params: Any) -> Any:
        return {"params": params, "opt_state": optimizer.init(params)}

    return jax.eval_shape(create, params)


def run(state: Any, shardings: Any) -> Any:
    """Creates the state with these shardings: jit accepts them or this fails."""
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state)
    return jax.jit(lambda: zeros, out_shardings=shardings)()


def test_states_of_the_rank_of_their_parameters() -> None:
    mesh, state = mesh_of(), trained(optax.adamw(1e-3), kernel=(128, 256), bias=(256,))
    shardings = meta.get_sharding(state, mesh, RULES)
    assert shardings["opt_state"][0].mu["front"]["kernel"].spec == P(None, "model")
    assert shardings["opt_state"][0].count.spec == P()
    run(state, shardings)


def test_factored_states_get_the_names_of_what_is_left() -> None:
    mesh, state = mesh_of(), trained(optax.adafactor(1e-3), kernel=(128, 256), stack=(3, 256, 128), bias=(256,))
    specs = meta.get_partition_spec(state)["opt_state"][0]
    assert specs.v_row["front"] == {"kernel": P("embed"), "stack": P("layers", "hidden"), "bias": P()}
    assert specs.v_col["front"] == {"kernel": P("hidden"), "stack": P("layers", "embed"), "bias": P()}
    assert specs.v["front"] == {"kernel": P(), "stack": P(), "bias": P("hidden")}
    shardings = meta.get_sharding(state, mesh, RULES)
    assert shardings["opt_state"][0].v_col["front"]["kernel"].spec == P("model")
    run(state, shardings)
    fitted = [str(f) for f in meta.explain(state, mesh, RULES).findings if "v_col['front']['kernel']" in str(f)]
    assert fitted == [
        "opt_state[0].v_col['front']['kernel']: 2 names ('embed', 'hidden') for shape (256,); its parameter in this "
        "tree shows that its dimensions are ('hidden',)"
    ]


def test_a_placeholder_beside_a_vector() -> None:
    tree = {
        "params": {"b": meta.Partitioned(shaped(8), ("data",))},
        "v_row": {"b": meta.Partitioned(shaped(1), ("data",))},
    }
    assert meta.get_partition_spec(tree) == {"params": {"b": P("data")}, "v_row": {"b": P()}}
    assert meta.get_sharding(tree, mesh_of())["v_row"]["b"].spec == P()


def test_names_may_be_fewer_than_dimensions_on_purpose() -> None:
    short, whole = meta.Partitioned(shaped(4, 8), ("data",)), meta.Partitioned(shaped(8), ("data",))
    for tree in (
        {"a": {"w": whole}, "b": {"w": short}},
        {"a": whole, "b": {"w": short}},
        {"w": whole, "b": {"v": short}},
    ):
        assert P(None, "data") not in jax.tree.leaves(meta.get_partition_spec(tree))


def test_a_small_parameter_is_no_placeholder() -> None:
    tree = {"params": {"w": meta.Partitioned(shaped(1), ("data",)), "v": meta.Partitioned(shaped(8), ("data",))}}
    assert meta.get_partition_spec(tree)["params"] == {"w": P("data"), "v": P("data")}


def test_a_square_parameter_does_not_say_which_dimension_is_left() -> None:
    mesh, state = mesh_of(), trained(optax.adafactor(1e-3), kernel=(128, 128))
    shardings = meta.get_sharding(state, mesh, RULES, strict=True)
    assert shardings["opt_state"][0].v_row["front"]["kernel"].spec == P()
    run(state, shardings)
    (finding, _) = (f for f in meta.explain(state, mesh, RULES).findings if f.kind == "fitted-names")
    assert not finding.fatal
    assert str(finding) == (
        "opt_state[0].v_row['front']['kernel']: 2 names ('embed', 'hidden') for shape (128,); its parameter in this "
        "tree does not show which dimensions they name, so it stays replicated"
    )


def test_factored_states_alone_are_replicated_with_a_warning() -> None:
    mesh, state = mesh_of(), trained(optax.adafactor(1e-3), kernel=(128, 256))["opt_state"]
    words = (
        "{}: 2 names ('embed', 'hidden') for shape (128,), which has 1 dimensions; give one name a dimension, or pass "
        "the whole state, parameters included, so that the names of a factored optimizer state can be found by its "
        "parameter"
    )
    for function in (meta.get_sharding, meta.logical_to_mesh_sharding):
        with pytest.warns(UserWarning) as caught:
            found = function(state, mesh, RULES)
        assert str(caught[0].message) == words.format("tree[0].v_row['front']['kernel']") + "; it is left replicated"
        assert caught[0].filename == __file__
        assert found[0].v_row["front"]["kernel"].spec == P()
    # Specs are the names, as they stand, wherever the tree does not say better.
    assert meta.get_partition_spec(state)[0].v_row["front"]["kernel"] == P("embed", "hidden")
    with pytest.raises(MetadataError) as error:
        meta.get_sharding(state, mesh, RULES, strict=True)
    assert str(error.value).startswith(words.format("tree[0].v_row['front']['kernel']"))


def test_two_parameters_side_by_side_do_not_explain_each_other() -> None:
    good, wrong = meta.Partitioned(shaped(8, 4), ("data", "model")), meta.Partitioned(shaped(8), ("data", "model"))
    with pytest.raises(MetadataError, match=r"^params\['b'\]\['w'\]: 2 names"):
        meta.get_sharding({"params": {"a": {"w": good}, "b": {"w": wrong}}}, mesh_of(), strict=True)


def test_preconditioners_of_the_rank_but_not_the_shape_of_a_parameter() -> None:
    box = meta.LogicallyPartitioned(shaped(6, 128), ("embed", "hidden"))
    state = {"params": {"w": box}, "left": {"w": box.replace(value=shaped(6, 6))}}
    with pytest.raises(AxisError, match=r"^left\['w'\]: dimension 1 of shape \(6, 6\) does not divide"):
        meta.get_sharding(state, mesh_of(), RULES)


def test_every_optimizer_gets_a_state_that_can_be_placed() -> None:
    mesh = mesh_of()
    optimizers = {
        "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
        "adafactor_momentum": optax.adafactor(1e-3, min_dim_size_to_factor=4, momentum=0.9),
        "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 10))),
        "lion": optax.lion(1e-3),
        "sm3": optax.sm3(1e-3),
        "lbfgs": optax.scale_by_lbfgs(memory_size=3),
        "multi_steps": optax.MultiSteps(optax.adam(1e-3), 2),
        "masked": optax.masked(optax.adam(1e-3), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        "parts": optax.partition({"a": optax.sgd(1e-3, 0.9), "b": optax.adam(1e-3)}, lambda p: {"front": "b"}),
        "empty": optax.sgd(1e-3),
    }
    shapes = {"kernel": (8, 16), "stack": (3, 8, 16), "bias": (16,), "scalar": ()}
    states = {}
    for name, optimizer in optimizers.items():
        boxes = {
            k: meta.LogicallyPartitioned(shaped(*s), ("layers", "embed", "hidden")[3 - len(s) :])
            for k, s in shapes.items()
        }
        params = {"front": boxes}
        states[name] = jax.eval_shape(lambda p, o=optimizer: {"params": p, "opt_state": o.init(p)}, params)
    shardings = {name: meta.get_sharding(state, mesh, RULES) for name, state in states.items()}
    placed = run(states, shardings)
    for name, state in states.items():
        report = meta.explain(state, mesh, RULES)
        assert {f.kind for f in report.findings} <= {"fitted-names"}, name
        assert report.bytes_per_device == sum(
            x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed[name])
        )
    lbfgs = shardings["lbfgs"]["opt_state"].diff_params_memory["front"]
    specs = meta.get_partition_spec(states["lbfgs"])["opt_state"].diff_params_memory["front"]
    assert specs["bias"] == P(None, "hidden")
    assert lbfgs["bias"].spec == P(None, "model") and lbfgs["kernel"].spec == P(None, None, "model")
    assert shardings["sm3"]["opt_state"][0].mu["front"]["kernel"].value[1].spec == P("model")


def shampoo() -> Any:
    """Statistics of each dimension of each parameter, beside a momentum of its shape."""

    def init(params: Any) -> Any:
        return {
            "sides": jax.tree.map(lambda p: tuple(jnp.eye(n) for n in p.shape), params),
            "last": jax.tree.map(lambda p: (jnp.zeros_like(p), jnp.zeros(())), params),
            "momentum": jax.tree.map(jnp.zeros_like, params),
        }

    return optax.GradientTransformation(init, lambda u, s, p=None: (u, s))


def test_states_with_several_arrays_for_a_parameter() -> None:
    mesh, state = mesh_of(), trained(shampoo(), kernel=(12, 16), bias=(16,))
    shardings = meta.get_sharding(state, mesh, RULES)
    front = shardings["opt_state"]["sides"]["front"]
    assert front["kernel"].spec == P(None, "model")  # a prefix: both sides divide
    assert front["bias"].spec == P()  # of two dimensions of one size either may be meant
    last = shardings["opt_state"]["last"]["front"]["kernel"]
    assert [s.spec for s in jax.tree.leaves(last)] == [P(None, "model"), P()]
    run(state, shardings)
    report = meta.explain(state, mesh, RULES)
    assert report["opt_state['sides']['front']['kernel'][1]"].shard_shape == (16, 4)
    placed = run(state, shardings)
    assert report.bytes_per_device == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
    assert report.bytes_total == sum(x.nbytes for x in jax.tree.leaves(placed))


def test_an_array_in_a_box_of_several_that_does_not_fit() -> None:
    mesh = mesh_of()
    for name, inside, error, message in (
        ("uneven", [shaped(8, 8), shaped(8, 6)], AxisError, "uneven[1]: dimension 1 of shape (8, 6) does not divide"),
        ("many", {"x": shaped(8, 8), "y": shaped(8)}, MetadataError, "many['y']: 2 names (None, 'model') for shape"),
    ):
        tree = {name: meta.Partitioned(inside, (None, "model"))}
        with pytest.raises(error) as caught:
            meta.get_sharding(tree, mesh, strict=True)
        assert str(caught.value).startswith(message)
    with pytest.warns(UserWarning, match=r"^many\['y'\]: 2 names .* it is left replicated$"):
        found = meta.get_sharding(tree, mesh)["many"]
    assert (found.value["x"].spec, found.value["y"].spec) == (P(None, "model"), P())
    assert meta.get_partition_spec(tree)["many"] == P(None, "model")
    nested = Plain(meta.Partitioned({"x": shaped(8, 8), "y": shaped(), "n": 3}, (None, "model")))
    inner = meta.get_sharding(nested, mesh).value.value
    assert (inner["x"].spec, inner["y"].spec, inner["n"].spec) == (P(None, "model"), P(), P())
