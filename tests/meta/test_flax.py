"""At home in Flax: the same meaning, in Linen's transformations, in its serialization, in NNX, in checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any

import flax.errors
import flax.linen as nn
import flax.nnx as nnx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import meta as flax_meta
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manymesh import meta
from manymesh._flax._meta import from_flax, to_flax
from manymesh.errors import AxisError, MetadataError
from manymesh.meta._at_home import register_serialization

RULES = [("embed", None), ("hidden", "model"), ("layers", None)]


def mesh_of(kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(kind, kind))


# --- the same meaning -----------------------------------------------------------------------------

DEVICE = st.sampled_from(["data", "model", "stage"])
AXES = st.one_of(st.none(), DEVICE, st.lists(DEVICE, max_size=2, unique=True).map(tuple), st.just(P.UNCONSTRAINED))
NAME = st.sampled_from(["a", "b", "c"])


@given(
    st.lists(NAME | st.none() | st.just(P.UNCONSTRAINED), max_size=4, unique_by=lambda n: n or object()),
    st.lists(st.tuples(NAME, AXES), max_size=6),
)
def test_rules_mean_what_they_mean_in_flax(names: list[Any], rules: list[tuple[str, Any]]) -> None:
    names = tuple(names)
    assert meta.logical_to_mesh_axes(names, rules) == nn.logical_to_mesh_axes(names, rules)
    assert meta.logical_to_mesh({"x": P(*names)}, rules) == nn.logical_to_mesh({"x": P(*names)}, rules)


def boxed(module: Any) -> Any:
    """The same tree in Flax's boxes or in ours."""
    return {
        "p": module.Partitioned(jnp.ones((4, 8)), ("data", None)),
        "l": [module.LogicallyPartitioned(jnp.ones((4, 8)), ("embed", "hidden")), jnp.ones(3)],
        "n": None,
    }


def test_functions_give_what_those_of_flax_give() -> None:
    ours, theirs, mesh = boxed(meta), boxed(nn), mesh_of()
    plain = flax_meta.unbox(theirs)
    jax.tree.map(np.testing.assert_array_equal, meta.unbox(ours), plain)
    specs = nn.get_partition_spec(theirs)
    assert meta.get_partition_spec(ours) == specs
    assert meta.logical_to_mesh_sharding(specs, mesh, RULES) == nn.logical_to_mesh_sharding(specs, mesh, RULES)
    assert meta.get_sharding(ours["p"], mesh) == nn.get_sharding(theirs["p"], mesh)
    params = {meta.PARTITION_NAME: "layers"}
    for index in (0, 1, 2, 4):
        added = flax_meta.add_axis(theirs, index, params)
        assert meta.get_partition_spec(meta.add_axis(ours, index, params)) == nn.get_partition_spec(added)
        assert meta.get_partition_spec(added) == nn.get_partition_spec(added)


def test_flax_boxes_can_be_given_to_every_function() -> None:
    theirs, mesh = boxed(nn), mesh_of()
    assert meta.is_axis_metadata(theirs["p"])
    plain = meta.unbox(theirs)
    jax.tree.map(np.testing.assert_array_equal, plain, flax_meta.unbox(theirs))
    assert meta.get_partition_spec(theirs) == nn.get_partition_spec(theirs)
    shardings = meta.get_sharding(theirs, mesh, RULES)
    assert shardings == meta.get_sharding(boxed(meta), mesh, RULES)
    assert shardings["l"][0].spec == P(None, "model")
    with meta.logical_axis_rules(RULES):
        assert meta.logical_to_mesh_sharding(theirs, mesh) == shardings
        assert meta.logical_to_mesh(theirs)["l"][0] == P(None, "model")
    again = meta.replace_boxed(theirs, plain)
    assert jax.tree.structure(again) == jax.tree.structure(theirs)
    params = {meta.PARTITION_NAME: "layers"}
    added = meta.add_axis(theirs, 0, params)
    assert added["p"].names == ("layers", "data", None)
    assert jax.tree.structure(meta.remove_axis(added, 0, params)) == jax.tree.structure(theirs)
    ours = meta.explain(boxed(meta), mesh, RULES)
    assert meta.explain(theirs, mesh, RULES) == ours and ours["l[0]"].bytes_per_device == 32
    assert meta.map_axis_meta(lambda b: b.names, theirs)["p"] == ("data", None)


def test_conversion_there_and_back() -> None:
    mesh = mesh_of()
    tree = {
        "p": meta.Partitioned(1, ("data", None), mesh),
        "l": meta.LogicallyPartitioned({"x": meta.Partitioned(2, ())}, ("a",), mesh, RULES),
        "b": 3,
    }
    theirs = to_flax(tree)
    assert type(theirs["p"]) is nn.Partitioned and type(theirs["l"]) is nn.LogicallyPartitioned
    assert type(theirs["l"].value["x"]) is nn.Partitioned
    assert theirs["l"].rules == tuple(RULES) and theirs["l"].mesh is mesh
    assert from_flax(theirs) == tree
    assert from_flax(tree) == tree and to_flax(theirs)["p"] is not tree["p"]


# --- Linen ----------------------------------------------------------------------------------------


class Block(nn.Module):
    logical: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.initializers.lecun_normal()
        if self.logical:
            up = meta.with_logical_partitioning(init, ("embed", "hidden"))
            down = meta.with_logical_partitioning(init, ("hidden", "embed"))
        else:
            up, down = meta.with_partitioning(init, (None, "model")), meta.with_partitioning(init, ("model", None))
        x = nn.relu(nn.Dense(16, kernel_init=up, name="up")(x))
        return nn.Dense(8, kernel_init=down, name="down")(x)


class Step(nn.Module):
    """A block as `nn.scan` wants it."""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        return Block(name="block")(x), None


def batch() -> Any:
    return jnp.ones((4, 8))


@pytest.mark.parametrize("logical", [False, True], ids=["device", "logical"])
def test_init_sharded_train_and_apply(logical: bool) -> None:
    mesh, model = mesh_of(), Block(logical)

    def create(key: Any, x: Any) -> Any:
        params = model.init(key, x)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads), loss

    expected, _ = step(jax.jit(create)(jax.random.key(0), batch()), batch())
    with jax.set_mesh(mesh), meta.logical_axis_rules(RULES):
        shardings = meta.get_sharding(jax.eval_shape(create, jax.random.key(0), batch()), mesh)
        state = jax.jit(create, out_shardings=shardings)(jax.random.key(0), batch())
        assert state.params["up"]["kernel"].value.sharding.spec == P(None, "model")
        assert state.opt_state[0].mu["down"]["kernel"].value.sharding.spec == P("model", None)
        state, _ = step(state, batch())
    assert type(state.params["up"]["kernel"]) is (meta.LogicallyPartitioned if logical else meta.Partitioned)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state.params, expected.params)


def test_explicit_axes_take_part_in_types() -> None:
    # One product whose sharding is clear; where two sharded dimensions meet, JAX asks for an out_sharding.
    mesh = mesh_of(AxisType.Explicit)
    model = nn.Dense(16, kernel_init=meta.with_partitioning(nn.initializers.ones, (None, "model")))
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch())
    with jax.set_mesh(mesh):
        variables = jax.jit(model.init, out_shardings=meta.get_sharding(shapes, mesh))(jax.random.key(0), batch())
        assert jax.typeof(variables["params"]["kernel"].value).sharding.spec == P(None, "model")
        out = jax.jit(model.apply)(variables, batch())
    assert jax.typeof(out).sharding.spec == P(None, "model")
    np.testing.assert_array_equal(out, 8 * np.ones((4, 16)))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize(
    ("params", "name"),
    [({meta.PARTITION_NAME: "layers"}, "layers"), ({meta.PARTITION_NAME: None}, None)],
    ids=["named", "none"],
)
@pytest.mark.parametrize("lift", ["scan", "vmap", "remat"])
def test_lifted_transformations(lift: str, params: dict[str, Any], name: Any, axis: int) -> None:
    common: dict[str, Any] = {"variable_axes": {"params": axis}, "split_rngs": {"params": True}}
    if lift == "vmap":
        model: Any = nn.vmap(Block, in_axes=None, axis_size=3, metadata_params=params, **common)()
    else:
        module = nn.remat(Step) if lift == "remat" else Step
        model = nn.scan(module, length=3, metadata_params=params, **common)()
    variables = jax.eval_shape(model.init, jax.random.key(0), batch())
    up = variables["params"] if lift == "vmap" else variables["params"]["block"]
    kernel = up["up"]["kernel"]
    position = axis % 3
    assert kernel.names == tuple(np.insert(np.array([None, "model"], object), position, name))
    assert kernel.value.shape[position] == 3
    # On the way in the axis comes off again, on the way out of a mutable collection it comes back.
    out, mutated = jax.eval_shape(lambda v: model.apply(v, batch(), mutable=["params"]), variables)
    assert jax.tree.structure(mutated["params"]) == jax.tree.structure(variables["params"])
    plain = jax.eval_shape(lambda v: model.apply(v, batch()), meta.unbox(variables))
    assert jax.tree.leaves(plain)[0].shape == jax.tree.leaves(out)[0].shape


@pytest.mark.parametrize("box", [meta.with_partitioning, nn.with_partitioning], ids=["ours", "theirs"])
@pytest.mark.parametrize("lift", ["scan", "vmap", "remat_scan"])
def test_a_lifted_transformation_without_a_name(lift: str, box: Any) -> None:
    """The same error for our boxes and Flax's own, so that code that catches Flax's keeps working."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            y = nn.Dense(8, kernel_init=box(nn.initializers.ones, (None, "model")))(x)
            return (y, None) if lift == "scan" else y

    common: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    model: Any = {
        "scan": lambda: nn.scan(Layer, length=3, **common)(),
        "vmap": lambda: nn.vmap(Layer, in_axes=None, axis_size=3, **common)(),
        "remat_scan": lambda: nn.remat_scan(Layer, lengths=(2, 3))(),
    }[lift]()
    with pytest.raises(flax.errors.PartitioningUnspecifiedError) as error:
        jax.eval_shape(model.init, jax.random.key(0), jnp.ones((4, 8)))
    if box is meta.with_partitioning:
        assert isinstance(error.value, MetadataError)
        assert "metadata_params={PARTITION_NAME: name}" in str(error.value)


def test_a_wrong_name_in_a_transformation_says_so() -> None:
    def scanned(name: str) -> Any:
        params = {meta.PARTITION_NAME: name}
        return nn.scan(
            Step, length=3, variable_axes={"params": 0}, split_rngs={"params": True}, metadata_params=params
        )()

    variables = scanned("layers").init(jax.random.key(0), batch())
    with pytest.raises(MetadataError, match=r"remove_axis expected axis 'stages' at index 0, found 'layers'"):
        scanned("stages").apply(variables, batch())


def test_tabulate_prints_the_spec() -> None:
    text = Block().tabulate(jax.random.key(0), batch(), console_kwargs={"width": 200, "force_terminal": False})
    assert "float32[8,16] P(None, model)" in " ".join(text.replace("│", " ").split())


def test_apply_constrains_under_a_mesh() -> None:
    mesh, model = mesh_of(), Block()
    variables = model.init(jax.random.key(0), batch())
    with jax.set_mesh(mesh):
        text = jax.jit(model.apply).lower(variables, batch()).as_text()
    assert text.count("sharding_constraint") >= 2
    assert "sharding_constraint" not in jax.jit(model.apply).lower(variables, batch()).as_text()


def test_flax_sees_our_boxes() -> None:
    variables = Block(logical=True).init(jax.random.key(0), batch())
    assert nn.get_partition_spec(variables)["params"]["up"]["kernel"] == P("embed", "hidden")
    plain = nn.unbox(variables)
    assert isinstance(plain["params"]["up"]["kernel"], jax.Array)
    again = flax_meta.replace_boxed(variables, plain)
    assert jax.tree.structure(again) == jax.tree.structure(variables)
    with meta.logical_axis_rules(RULES):
        assert nn.get_sharding(variables, mesh_of())["params"]["up"]["kernel"].spec == P(None, "model")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["decay", "axes", "history"])
@dataclasses.dataclass(frozen=True)
class Decayed(meta.AxisMetadata[Any]):
    """A user's own box: whether a parameter decays, the names of its axes, and what transformations did to it."""

    value: Any
    decay: float
    axes: tuple[Any, ...] = ()
    history: tuple[Any, ...] = ()

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> Decayed:
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: Any) -> Decayed:
        axes = (*self.axes[:index], params.get("name"), *self.axes[index:])
        return dataclasses.replace(self, axes=axes, history=(*self.history, index))

    def remove_axis(self, index: int, params: Any) -> Decayed:
        assert self.axes[index] == params.get("name"), "the axis that add_axis put there"
        axes = (*self.axes[:index], *self.axes[index + 1 :])
        return dataclasses.replace(self, axes=axes, history=self.history[:-1])

    def get_partition_spec(self) -> P:
        return P(*self.axes)


class Own(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        init = lambda *a: Decayed(nn.initializers.ones(*a), 0.1, ("data", "model"))  # noqa: E731 - as users write it
        inside = meta.with_partitioning(init, ())
        x = nn.Dense(8, kernel_init=init, bias_init=nn.initializers.zeros, name="own")(x)
        return nn.Dense(8, kernel_init=inside, name="nested")(x), None


@pytest.mark.parametrize("lift", ["scan", "vmap"])
def test_a_box_of_ones_own_lives_in_linen(lift: str) -> None:
    common: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    common["metadata_params"] = {"name": None, meta.PARTITION_NAME: None}
    lifted: Any = (
        nn.scan(Own, length=3, **common) if lift == "scan" else nn.vmap(Own, in_axes=None, axis_size=3, **common)
    )
    model, mesh, x = lifted(), mesh_of(), batch()

    def create(key: Any) -> Any:
        return TrainState.create(apply_fn=model.apply, params=model.init(key, x)["params"], tx=optax.adam(1e-2))

    shapes = jax.eval_shape(create, jax.random.key(0))
    box = shapes.params["own"]["kernel"]
    assert (type(box), box.decay, box.axes, box.history) == (Decayed, 0.1, (None, "data", "model"), (0,))
    shardings = meta.get_sharding(shapes, mesh, strict=True)
    assert shardings.opt_state[0].mu["own"]["kernel"].spec == P(None, "data", "model")
    state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
    out = jax.jit(model.apply)({"params": state.params}, x)[0]
    np.testing.assert_allclose(out, model.apply({"params": meta.unbox(state.params)}, x)[0])
    report = meta.explain(shapes, mesh)
    assert report["params['own']['kernel']"].shard_shape == (3, 4, 2)
    decays = meta.map_axis_meta(lambda b: getattr(b, "decay", None), state.params)
    assert decays["own"]["kernel"] == 0.1 and decays["nested"]["kernel"] is None  # the outermost box is asked
    again = meta.replace_boxed(state.params, meta.unbox(state.params))
    assert jax.tree.structure(again) == jax.tree.structure(state.params)


def test_flax_boxes_are_held_to_the_same_strictness() -> None:
    mesh = mesh_of()
    for module in (meta, nn):
        tree = {"w": module.LogicallyPartitioned(jnp.ones((4, 8)), ("embed", "hiden"))}
        with pytest.raises(AxisError) as error:
            meta.get_sharding(tree, mesh, RULES, strict=True)
        assert str(error.value) == (
            "w: no rule knows the name 'hiden' of dimension 1, so it stays replicated; did you mean 'hidden'?"
        )
        with pytest.raises(AxisError, match=r"^w: dimension 1 of shape \(4, 6\) does not divide over axis 'model'"):
            meta.get_sharding({"w": module.Partitioned(jnp.ones((4, 6)), (None, "model"))}, mesh)
        assert meta.box(tree, {"w": ("a", "b")})["w"] is tree["w"]


@pytest.mark.parametrize("kinds", [("Auto", "Auto"), ("Explicit", "Explicit"), ("Explicit", "Auto")], ids="-".join)
def test_flax_boxes_are_constrained_as_ours_are(kinds: tuple[str, str]) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=tuple(AxisType[k] for k in kinds))
    x = jnp.ones((8, 16))
    makers = (
        lambda v: nn.Partitioned(v, ("data", "model")),
        lambda v: nn.LogicallyPartitioned(v, ("batch", "hidden"), rules=(("batch", "data"), ("hidden", "model"))),
        lambda v: nn.LogicallyPartitioned(v, ("batch", "hidden")),
    )
    rules = [("batch", "data"), ("hidden", "model")]
    with jax.set_mesh(mesh), meta.logical_axis_rules(rules):
        for maker in makers:
            for wrap in (jax.jit, lambda f: f):
                y = wrap(lambda v, maker=maker: meta.unbox({"w": maker(v)})["w"])(x)
                assert y.sharding.spec == P("data", "model")
            inside = jax.shard_map(
                lambda v, maker=maker: meta.unbox(maker(v)), in_specs=P("data", "model"), out_specs=P("data", "model")
            )
            assert jax.jit(inside)(y).sharding.spec == P("data", "model")
            assert meta.unbox(maker(x), apply_constraint=False) is x
        with pytest.raises(
            MetadataError, match=r"^Partitioned: names \('data', None, None\) are 3 for float32\[8,16\]"
        ):
            meta.unbox(nn.Partitioned(x, ("data", None, None)))
    assert meta.unbox(nn.Partitioned(x, ("data", "model"), mesh)).sharding.spec == P("data", "model")
    assert meta.unbox(makers[1](x)) is x and meta.unbox(makers[2](x)) is x


def test_rules_of_flax_are_left_to_flax() -> None:
    with jax.set_mesh(mesh_of()), nn.logical_axis_rules([("hidden", "model")]):
        y = jax.jit(lambda v: meta.unbox(nn.LogicallyPartitioned(v, (None, "hidden"))))(jnp.ones((8, 16)))
    assert y.sharding.spec == P(None, "model")


# --- serialization --------------------------------------------------------------------------------


class Noted(meta.Partitioned[Any]):
    """A subclass, defined before registration."""


def test_bytes_of_flax_boxes_and_of_ours_are_the_same() -> None:
    ours = Block(logical=True).init(jax.random.key(0), batch())
    theirs = to_flax(ours)
    assert flax.serialization.to_bytes(ours) == flax.serialization.to_bytes(theirs)
    zeros = jax.tree.map(jnp.zeros_like, ours)
    for source, target in ((theirs, zeros), (ours, to_flax(zeros)), (ours, zeros)):
        loaded = flax.serialization.from_bytes(target, flax.serialization.to_bytes(source))
        assert jax.tree.structure(loaded) == jax.tree.structure(target)
        jax.tree.map(np.testing.assert_array_equal, meta.unbox(loaded), meta.unbox(ours))


@given(st.recursive(st.integers(0, 9), lambda c: st.dictionaries(st.sampled_from("ab"), c, max_size=2), max_leaves=4))
def test_states_go_there_and_back(value: Any) -> None:
    class Late(meta.LogicallyPartitioned[Any]):
        """A subclass, defined after registration."""

    for kind in (meta.Partitioned, meta.LogicallyPartitioned, Noted, Late):
        tree = {"w": kind(value, ("a",))}
        state = flax.serialization.to_state_dict(tree)
        assert set(state["w"]) == {"value"}
        target = jax.tree.map(lambda x: -1, tree)
        assert flax.serialization.from_state_dict(target, state) == tree
        assert flax.serialization.msgpack_restore(flax.serialization.to_bytes(tree)) == state


def test_a_state_without_boxes_says_how_to_load_it() -> None:
    target = {"w": meta.Partitioned(jnp.ones(2), ("a",))}
    for state, found in (({"w": np.ones(2)}, "ndarray"), ({"w": {"v": 1}}, "['v']")):
        with pytest.raises(MetadataError) as error:
            flax.serialization.from_state_dict(target, state)
        assert str(error.value) == (
            f"Partitioned(float32[2], names=('a',)) expects a state with the single key 'value', found {found}; load a "
            "state without boxes into meta.unbox(target), then use meta.replace_boxed"
        )


def test_a_box_of_ones_own_can_be_registered() -> None:
    class Own(meta.AxisMetadata[Any]):
        def __init__(self, inside: Any) -> None:
            self.inside = inside

        def unbox(self) -> Any:
            return self.inside

        def replace_boxed(self, val: Any) -> Own:
            return Own(val)

        def add_axis(self, index: int, params: Any) -> Own:
            return self

        def remove_axis(self, index: int, params: Any) -> Own:
            return self

    register_serialization(flax.serialization, Own)
    state = flax.serialization.to_state_dict({"w": Own(np.arange(2))})
    assert flax.serialization.from_state_dict({"w": Own(np.zeros(2))}, state)["w"].inside[1] == 1
    assert isinstance(Own(1), flax_meta.AxisMetadata)


# --- checkpoints ----------------------------------------------------------------------------------


def test_orbax_saves_boxed_trees_and_restores_them_boxed_or_not(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, at import and in use
        import orbax.checkpoint as ocp

        mesh = mesh_of()
        values = {"w": meta.Partitioned(jnp.arange(32.0).reshape(4, 8), (None, "model")), "b": jnp.ones(3)}
        tree = jax.device_put(values, meta.get_sharding(values, mesh))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "boxed", tree)
            checkpointer.save(tmp_path / "plain", meta.unbox(tree))
            checkpointer.wait_until_finished()
            shapes = jax.eval_shape(lambda: values)
            shardings = meta.get_sharding(shapes, mesh)
            described = jax.tree.map(
                lambda s, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                jax.tree.leaves(shardings),
                jax.tree.leaves(shapes),
            )
            target = jax.tree.unflatten(jax.tree.structure(shapes), described)
            boxed_again = checkpointer.restore(tmp_path / "boxed", target)
            plain_again = checkpointer.restore(tmp_path / "plain", meta.unbox(target))
            # In the file a box is a node with the key 'value', so what was saved boxed can be read without boxes.
            opened = {"w": {"value": target["w"].value}, "b": target["b"]}
            unboxed_again = checkpointer.restore(tmp_path / "boxed", opened)
    assert boxed_again["w"].names == (None, "model")
    assert boxed_again["w"].value.sharding.spec == P(None, "model")
    for restored in (meta.unbox(boxed_again), plain_again, {**unboxed_again, "w": unboxed_again["w"]["value"]}):
        jax.tree.map(np.testing.assert_array_equal, restored, meta.unbox(values))


def test_checkpoints_of_flax_boxes_and_of_ours_are_the_same(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, at import and in use
        import orbax.checkpoint as ocp

        ours = {"w": meta.Partitioned(jnp.arange(8.0), ("model",)), "own": Decayed(jnp.arange(4.0), 0.1)}
        theirs = to_flax(ours)
        with ocp.StandardCheckpointer() as checkpointer:
            for name, tree in (("ours", ours), ("theirs", theirs)):
                checkpointer.save(tmp_path / name, tree)
            checkpointer.wait_until_finished()
            for name, like in (("theirs", ours), ("ours", theirs), ("ours", ours)):
                loaded = checkpointer.restore(tmp_path / name, jax.tree.map(jnp.zeros_like, like))
                assert jax.tree.structure(loaded) == jax.tree.structure(like)
                jax.tree.map(np.testing.assert_array_equal, meta.unbox(loaded), meta.unbox(ours))
            # Without a target, the values lie under the keys of the boxes, which can be put on again.
            bare = checkpointer.restore(tmp_path / "ours")
    values = {k: v["value"] for k, v in bare.items()}
    again = meta.replace_boxed(ours, values)
    assert jax.tree.structure(again) == jax.tree.structure(ours)
    jax.tree.map(np.testing.assert_array_equal, again, ours)


# --- NNX ------------------------------------------------------------------------------------------


def test_the_bridge_keeps_boxes_both_ways() -> None:
    mesh = mesh_of()
    with jax.set_mesh(mesh), meta.logical_axis_rules(RULES), nnx.use_eager_sharding(False):
        for logical in (False, True):
            linen = Block(logical)
            variables = linen.init(jax.random.key(0), batch())
            model = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(batch())
            kernel = model.up["kernel"] if isinstance(model.up, dict) else model.up.kernel
            metadata = kernel.get_metadata()
            assert metadata["out_sharding"] == variables["params"]["up"]["kernel"].names
            assert metadata["linen_meta_type"] is type(variables["params"]["up"]["kernel"])
            assert model(batch()).shape == (4, 8)


def test_a_box_as_metadata_of_a_variable_and_back() -> None:
    mesh = mesh_of()
    for box in (
        meta.Partitioned(jnp.ones(4), ("data",), mesh),
        meta.LogicallyPartitioned(jnp.ones(4), ("a",), mesh, [("a", "data")]),
    ):
        assert type(box).from_nnx_metadata({**box.to_nnx_metadata(), "more": 1}) == box
        with nnx.use_eager_sharding(False):
            variable = nnx.bridge.variables.to_nnx_var("params", box)
            back = nnx.bridge.variables.to_linen_var(variable)
        assert back == box


class Linear(nnx.Module):
    def __init__(self, names: tuple[Any, ...], **metadata: Any) -> None:
        self.w = nnx.Param(jnp.ones((8, 16)), out_sharding=names, **metadata)
        self.b = nnx.Param(jnp.ones(16))


def test_names_are_read_from_nnx_states() -> None:
    mesh = mesh_of()
    with nnx.use_eager_sharding(False):
        device = nnx.state(Linear((None, "model")))
        logical = nnx.state(Linear(("embed", "hidden"), sharding_rules=(("hidden", "model"), ("embed", None))))
        free = nnx.state(Linear(("embed", "hidden")))
        for state in (device, logical):
            assert meta.get_sharding(state, mesh)["w"].get_value() == NamedSharding(mesh, P(None, "model"))
            assert meta.get_sharding(state, mesh)["b"].get_value() == NamedSharding(mesh, P())
        assert meta.get_partition_spec(device) == nnx.get_partition_spec(device)
        with meta.logical_axis_rules(RULES):
            assert meta.get_sharding(free, mesh)["w"].get_value().spec == P(None, "model")
        report = meta.explain(device, mesh)
        (leaf,) = (leaf for leaf in report if leaf.shape == (8, 16))
        assert leaf.spec == P(None, "model") and leaf.bytes_per_device == 128
        assert not meta.is_axis_metadata(device["w"])
