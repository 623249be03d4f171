"""States of every framework, arrays of every dtype, boxes or none; files of Orbax in both directions."""

from __future__ import annotations

import enum
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from bits import assert_same_bits, blank
from flax import nnx

FIRST, SECOND = (Mesh(np.array(jax.devices()[i : i + 2]), ("x",)) for i in (0, 2))


def spread(tree):
    """Arrays in turns on two submeshes, sharded where they can be."""
    leaves, structure = jax.tree.flatten(tree)

    def put(i, x):
        if not isinstance(x, jax.Array):
            return x
        spec = P("x") if x.ndim and x.shape[0] % 2 == 0 else P()
        return jax.device_put(x, NamedSharding((FIRST, SECOND)[i % 2], spec))

    return jax.tree.unflatten(structure, [put(i, x) for i, x in enumerate(leaves)])


def optimizer():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 0.0, 10)))


def train_state():
    model = nn.Dense(4)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer())


def nnx_state():
    model = nnx.Sequential(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.1, rngs=nnx.Rngs(1)))
    return nnx.state((model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param)))


def numbers():
    return {
        "int": 2**40, "float": 0.1, "complex": 1j, "bool": True, "numpy": np.float16(2), "array": np.arange(3), "none": None,
        "weak": jnp.asarray(1.5), "weak and placed": jax.device_put(3, NamedSharding(FIRST, P())), "empty": ({}, [], ()),
        "keys": jax.random.split(jax.random.key(0), 4), "other keys": jax.random.key(1, impl="rbg"),
        "old key": jax.random.PRNGKey(3), "no elements": jnp.zeros((0, 3)), "two/words": {"a.b": jnp.ones(2)},
    }  # fmt: skip


STATES = {
    "optax and Linen": train_state,
    "NNX": nnx_state,
    "Equinox": lambda: eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)),
    "an array": lambda: jnp.arange(4.0),
    "nothing": dict,
    "numbers": numbers,
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_as_it_was(name, tmp_path) -> None:
    """Structure, classes, functions inside, dtypes, weak types, shardings and bits."""
    state = STATES[name]()
    if name != "numbers":
        state = spread(state)
    mm.checkpoint.save(tmp_path / "state", state)
    found = mm.checkpoint.restore(tmp_path / "state", state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    arrays, others = ([x for x in jax.tree.leaves(state) if callable(x) is kind] for kind in (False, True))
    assert_same_bits([x for x in jax.tree.leaves(found) if not callable(x)], arrays)
    assert [x for x in jax.tree.leaves(found) if callable(x)] == others


DTYPES = [
    "bool",
    "int2",
    "int4",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint2",
    "uint4",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3b11fnuz",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex64",
    "complex128",
]


def test_every_dtype(tmp_path) -> None:
    """On the host, and those that a device has without 64 bits on two devices; saved on one side, restored on the other."""
    dtypes = [np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPES]
    host = {dtype.name: np.asarray(np.arange(8) % 2, dtype).reshape(4, 2) for dtype in dtypes}
    placed = {
        name: jax.device_put(x, NamedSharding(FIRST, P("x")))
        for name, x in host.items()
        if name not in ("int64", "uint64", "float64", "complex128")
    }
    mm.checkpoint.save(tmp_path / "host", host)
    mm.checkpoint.save(tmp_path / "placed", placed)
    assert_same_bits(mm.checkpoint.restore(tmp_path / "host", host), host)
    assert_same_bits(mm.checkpoint.restore(tmp_path / "host", placed), placed)
    assert_same_bits(mm.checkpoint.restore(tmp_path / "placed", placed), placed)
    assert_same_bits(mm.checkpoint.restore(tmp_path / "placed"), {name: host[name] for name in placed})


def test_numbers_in_another_order_of_bytes(tmp_path) -> None:
    """As files of other machines have them: what was saved of them fits them, and an array of JAX."""
    state = {"w": np.arange(3, dtype=">f4"), "n": np.array(7, ">i4")}
    mm.checkpoint.save(tmp_path / "state", state)
    assert_same_bits(mm.checkpoint.restore(tmp_path / "state", state), state)
    found = mm.checkpoint.restore(
        tmp_path / "state", jax.tree.map(jnp.zeros_like, {"w": np.ones(3, "f4"), "n": np.int32(0)})
    )
    assert found["w"].tolist() == [0, 1, 2] and int(found["n"]) == 7


def test_boxes_on_one_side_only(tmp_path) -> None:
    """Boxes of ours, of Linen and of NNX are the same to a checkpoint, and so is none."""
    value = jnp.arange(8.0)
    kinds = {
        "plain": value,
        "ours": mm.meta.Partitioned(value, ("x",)),
        "Linen": nn.LogicallyPartitioned(value, ("x",)),
        "NNX": nnx.Param(value),
    }
    for name, kind in kinds.items():
        mm.checkpoint.save(tmp_path / name, {"w": kind, "value": jnp.ones(2)})
    for name in kinds:
        for kind in kinds.values():
            found = mm.checkpoint.restore(tmp_path / name, {"w": kind, "value": jnp.zeros(2)})
            assert type(found["w"]) is type(kind)
            np.testing.assert_array_equal(jax.tree.leaves(found["w"])[0], value)
            assert found["value"].tolist() == [1, 1]


def test_a_part_and_everything_as_arrays_of_numpy(tmp_path) -> None:
    state = {"params": {"w": jnp.ones(3, jnp.bfloat16)}, "opt": [jnp.zeros(2), 3], "key": jax.random.key(1)}
    mm.checkpoint.save(tmp_path / "state", state)
    part = mm.checkpoint.restore(tmp_path / "state", {"params": blank(state["params"])})
    assert_same_bits(part, {"params": state["params"]})
    whole = mm.checkpoint.restore(tmp_path / "state")
    assert_same_bits(whole.pop("key"), state.pop("key"))
    assert_same_bits(whole, jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, state))


def test_cast_converts_and_a_number_becomes_an_array(tmp_path) -> None:
    mm.checkpoint.save(tmp_path / "state", {"w": jnp.arange(4.0), "step": 7})
    found = mm.checkpoint.restore(
        tmp_path / "state", {"w": jnp.zeros(4, jnp.bfloat16), "step": jnp.asarray(0)}, cast=True
    )
    assert found["w"].dtype == jnp.bfloat16 and found["w"].tolist() == [0, 1, 2, 3]
    assert found["step"].weak_type and int(found["step"]) == 7
    mm.checkpoint.save(
        tmp_path / "later", {"step": found["step"]}
    )  # as in a fresh `TrainState`, whose step is a number
    assert_same_bits(mm.checkpoint.restore(tmp_path / "later", {"step": 0}), {"step": 7})
    with pytest.raises(mm.errors.CheckpointError, match="step was saved as int32, but like= has float64"):
        mm.checkpoint.restore(tmp_path / "later", {"step": 0.0})


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "int8", "uint8", "int32", "uint32", "bool", "float8_e4m3fn", "float32"]
)
def test_cast_converts_as_jax_does(dtype, tmp_path) -> None:
    floats = jnp.array([300, -300, 1e30, -1e30, np.nan, np.inf, -np.inf, 2.5, -2.5, 7.9])
    saved = {"floats": floats, "half": floats.astype(jnp.bfloat16), "ints": jnp.array([300, -300, 7, 8, -8, -9, 2**30])}
    saved |= {"small": saved["ints"].astype(jnp.int4), "complex": floats + 2j}
    mm.checkpoint.save(tmp_path / "state", saved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the imaginary part is dropped
        expected = {name: x.astype(dtype) for name, x in saved.items()}
    assert_same_bits(mm.checkpoint.restore(tmp_path / "state", expected, cast=True), expected)


def test_everything_is_where_it_was(tmp_path) -> None:
    """Elements of lists and tuples at their positions, also beside what holds nothing, as states of Optax do, and functions."""
    moments = optax.chain(optax.identity(), optax.trace(0.9), optax.identity()).init({"w": jnp.ones(2)})
    state = {"moments": moments, "list": [None, 1, (), jnp.sin, {}, 2, [{}, None]], "none": None, "dict": {}}
    mm.checkpoint.save(tmp_path / "state", state)
    assert_same_bits(
        mm.checkpoint.restore(tmp_path / "state"),
        {
            "moments": [{}, {"trace": {"w": np.zeros(2, np.float32)}}, {}],
            "list": [None, 1, [], None, {}, 2, [{}, None]],
            "none": None,
            "dict": {},
        },
    )
    mm.checkpoint.save(tmp_path / "nothing", ())
    assert mm.checkpoint.restore(tmp_path / "nothing") == []


@pytest.mark.parametrize("like", [jnp.zeros((), jnp.int32), np.int32(0), jax.ShapeDtypeStruct((), jnp.int16)])
def test_a_number_that_is_too_large_for_an_array_is_refused(like, tmp_path) -> None:
    """As a count of tokens is after some days; it came back as what its lower bits say."""
    mm.checkpoint.save(tmp_path / "state", {"tokens": 5_000_000_000, "few": 7})
    assert int(mm.checkpoint.restore(tmp_path / "state", {"few": like})["few"]) == 7
    words = rf"tokens was saved as int64 5000000000, which is no {like.dtype} as in like=; restore it like a number of Python"
    with pytest.raises(mm.errors.CheckpointError, match=words):
        mm.checkpoint.restore(tmp_path / "state", {"tokens": like})


@pytest.mark.parametrize(
    ("saved", "like"), [(2**63 + 5, 0), (5, 2**63 + 9), (np.uint32(7), 0), (2**63 + 5, np.uint64(0))]
)
def test_whole_numbers_of_any_size_come_back(saved, like, tmp_path) -> None:
    """As a seed of 64 bits: which dtype NumPy takes for such a number depends on its value."""
    mm.checkpoint.save(tmp_path / "state", {"seed": saved})
    assert mm.checkpoint.restore(tmp_path / "state", {"seed": like}) == {"seed": saved}


@pytest.fixture
def ocp():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, at import and in use
        import orbax.checkpoint

        yield orbax.checkpoint


def plain_state():
    state = spread(
        {"w": jnp.arange(8.0).reshape(4, 2), "layers": [{"b": jnp.ones(4, jnp.bfloat16)}], "n": None, "e": {}}
    )
    return {**state, "key": jax.random.key(3), "step": 5}


@pytest.mark.parametrize("options", [{}, {"use_zarr3": True}, {"use_ocdbt": False}], ids=["usual", "zarr3", "files"])
def test_what_orbax_saved_is_read(options, ocp, tmp_path) -> None:
    """On other submeshes, from a checkpointer and from a manager."""
    state = plain_state()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(tmp_path / "one", ocp.args.PyTreeSave(state))
    with ocp.CheckpointManager(tmp_path / "many") as manager:
        manager.save(3, args=ocp.args.StandardSave(state), custom_metadata={"batch": 12})
    moved = jax.device_put(state["w"], NamedSharding(SECOND, P(None, "x")))
    like = {**state, "w": moved}
    manager = mm.checkpoint.Manager(tmp_path / "many")
    assert manager.latest_step() == 3 and manager.metadata() == {"batch": 12}
    assert_same_bits(manager.restore(like=blank(like)), like)
    assert_same_bits(mm.checkpoint.restore(tmp_path / "one", blank(like)), like)


def test_orbax_reads_what_we_saved(ocp, tmp_path) -> None:
    state = plain_state()
    with mm.checkpoint.Manager(tmp_path / "many") as manager:
        manager.save(3, state, metadata={"batch": 12})
    mm.checkpoint.save(tmp_path / "one", state)
    with ocp.CheckpointManager(tmp_path / "many") as theirs:
        assert theirs.all_steps() == [3] and theirs.metadata(3).custom_metadata == {"batch": 12}
        assert_same_bits(theirs.restore(3, args=ocp.args.StandardRestore(state)), state)
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same_bits(checkpointer.restore(tmp_path / "one", state), state)


class Everything(eqx.Module):
    """A module with every kind of leaf that belongs to a program."""

    conv: eqx.nn.Conv1d
    mlp: eqx.nn.MLP
    norm: eqx.nn.BatchNorm
    kinds: dict[str, object]
    name: str
    generator: object = None


def test_leaves_of_the_program(tmp_path) -> None:
    """Modules of Equinox are saved as they are; what may be a state nevertheless is named once for each place of a call."""
    one, two = jax.random.split(jax.random.key(0))

    def make(generator=None):
        norm = eqx.nn.BatchNorm(4, "batch", mode="ema")
        kinds = {"kind": "mlp", "mode": enum.Enum("Mode", "A B").A, "dtype": np.dtype("f4"), "of": jnp.bfloat16}
        return Everything(
            eqx.nn.Conv1d(1, 1, 3, padding_mode="REFLECT", key=one), eqx.nn.MLP(2, 2, 4, 1, key=two), norm, kinds, "net",
            generator,
        )  # fmt: skip

    model, state = eqx.nn.make_with_state(make)()
    whole = {"model": model, "state": state, "init": jax.nn.relu, "where": NamedSharding(FIRST, P())}
    mm.checkpoint.save(tmp_path / "silent", whole)
    assert_same_bits(
        eqx.filter(mm.checkpoint.restore(tmp_path / "silent", whole), eqx.is_array), eqx.filter(whole, eqx.is_array)
    )
    model, _ = eqx.nn.make_with_state(make)(np.random.default_rng(0))
    with pytest.warns(UserWarning, match=r"(?s)takes it from like=:.*model/generator is numpy.*metadata=") as seen:
        mm.checkpoint.save(tmp_path / "named", {"model": model})
    assert len(seen) == 1 and seen[0].filename == __file__
    assert mm.checkpoint.restore(tmp_path / "named", {"model": model})["model"].generator is model.generator


def test_arrays_of_64_bits_come_back_where_these_are_switched_off(tmp_path) -> None:
    with jax.enable_x64(True):
        numbers = jnp.array([2**40 + 1, 5])
        state = {
            "anywhere": numbers,
            "there": jax.device_put(numbers, NamedSharding(FIRST, P("x"))),
            "weak": jnp.asarray(1e-300),
        }
    mm.checkpoint.save(tmp_path / "wide", state)
    for like in (state, {"there": jax.ShapeDtypeStruct((2,), "int64", sharding=NamedSharding(SECOND, P()))}):
        found = mm.checkpoint.restore(tmp_path / "wide", like)
        assert all(x.addressable_shards[0].data.dtype == x.dtype for x in jax.tree.leaves(found))
        assert np.asarray(found["there"]).tolist() == [2**40 + 1, 5]
    assert_same_bits(mm.checkpoint.restore(tmp_path / "wide", state), state)
