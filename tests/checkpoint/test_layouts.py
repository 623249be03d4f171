"""Every layout is restored from every other one, bit by bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from bits import assert_same_bits, blank

LAYERS = 4
STACKED = {"layers": "layer_{}"}
DEVICES = jax.devices()


def bits(*shape, seed):
    """Floats of all kinds, NaN with every payload among them."""
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32).view(np.float32)


def single(layer):
    return {"w": bits(4, 8, seed=layer), "b": bits(8, seed=layer + 10)}


def unrolled():
    """A state with a tree for each layer: parameters, moments in two dtypes, a typed key, a number."""
    layers = {f"layer_{i}": single(i) for i in range(LAYERS)}
    halves = jax.tree.map(lambda x: (x.view(np.uint32) >> 16).astype(np.uint16).view(jnp.bfloat16), layers)
    return {"params": layers, "mu": halves, "head": bits(8, 8, seed=99), "key": jax.random.key(7), "step": 12}


def stacked():
    """The same with the layers stacked."""
    state = unrolled()
    for name in ("params", "mu"):
        state[name] = {"layers": jax.tree.map(lambda *x: np.stack(x), *state[name].values())}
    return state


def mesh(devices, shape, *axes):
    return Mesh(np.array([DEVICES[d] for d in devices]).reshape(shape), axes)


def stage_of(path):
    """The number of a layer; the head and all else belong to the last one."""
    words = [str(getattr(key, "key", "")) for key in path]
    return next((int(w.removeprefix("layer_")) for w in words if w.startswith("layer_")), LAYERS - 1)


def put(tree, sharding_of):
    """Every array where a function of its path and shape says; numbers stay numbers."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if isinstance(x, int) else jax.device_put(x, sharding_of(path, x)), tree
    )


def on_stages(meshes, *spec):
    per_stage = LAYERS // len(meshes)
    return put(
        unrolled(),
        lambda path, x: NamedSharding(meshes[stage_of(path) // per_stage], P(*spec) if x.ndim == 2 else P()),
    )


def on_joint(shape, axes, spec):
    """Stacked layers on the mesh of all submeshes."""
    whole = mesh(range(int(np.prod(shape))), shape, *axes)
    return put(stacked(), lambda path, x: NamedSharding(whole, P(*spec[: x.ndim]) if x.ndim > 1 else P()))


def boxed():
    state = on_stages([mesh([0, 1], 2, "model"), mesh([2, 3], 2, "model")], None, "model")
    state["params"] = jax.tree.map(lambda x: mm.meta.Partitioned(x, (None,) * x.ndim), state["params"])
    return state


MAKERS = {
    "host": unrolled,
    "one device": lambda: put(unrolled(), lambda path, x: jax.sharding.SingleDeviceSharding(DEVICES[5])),
    "SPMD": lambda: put(
        unrolled(),
        lambda path, x: NamedSharding(mesh(range(8), (4, 2), "data", "model"), P(*("data", "model")[2 - x.ndim :])),
    ),
    "2 stages": lambda: on_stages([mesh([0, 1], 2, "model"), mesh([2, 3], 2, "model")], None, "model"),
    "2 stages, another axis": lambda: on_stages([mesh([4, 5], 2, "model"), mesh([6, 7], 2, "model")], "model"),
    "4 stages": lambda: on_stages([mesh([2 * i, 2 * i + 1], 2, "data") for i in range(4)], "data"),
    "unequal stages": lambda: on_stages([mesh([0], 1, "model"), mesh([1, 2, 3, 4], 4, "model")], None, "model"),
    "overlapping stages": lambda: on_stages([mesh([0, 1], 2, "model"), mesh([1, 2], 2, "model")]),
    "boxed, 2 stages": boxed,
    "stacked, host": stacked,
    "stacked, 2 stages": lambda: on_joint((2, 2), ("stage", "model"), ("stage", None, "model")),
    "stacked, 4 stages": lambda: on_joint((4, 2), ("stage", "data"), ("stage", "data")),
    "stacked, SPMD": lambda: on_joint((8,), ("model",), (None, None, "model")),
}


@pytest.fixture(scope="module")
def layouts():
    return {name: make() for name, make in MAKERS.items()}


@pytest.mark.parametrize("source", MAKERS)
def test_a_layout_is_restored_onto_every_other_one(source, layouts, tmp_path) -> None:
    """What comes back has the bits, and the shardings that were asked for."""
    mm.checkpoint.save(tmp_path / "state", layouts[source])
    for expected in layouts.values():
        assert_same_bits(mm.checkpoint.restore(tmp_path / "state", blank(expected), stacked=STACKED), expected)
