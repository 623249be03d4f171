"""How far a call runs ahead of the devices, on CPU.

JAX blocks a launch while 32 on one of its devices are unfinished. A launch that had begun on the others, and waited for that
one in a collective, then kept the threads from what would have made room there, for ever: where submeshes share some of
their devices about one call in five of a program with 40 launches, and less often on eight devices alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh._runtime._launches import ALONE, EVERY, Launches
from stages import assert_same, dense, reference, rows

MICROBATCHES = 32


def step_over(*groups):
    """Loss and gradients of a dense layer on each group of devices, under GPipe."""
    devices = np.array(jax.devices())
    meshes = [Mesh(devices[list(g)].reshape(-1, 2), ("data", "model")) for g in groups]

    def layer(w, x):
        return dense(mm.with_sharding_constraint(w, (None, "model")), mm.with_sharding_constraint(x, ("data", None)))

    tasks = [mm.task(layer, f"layer_{i}", mesh=m) for i, m in enumerate(meshes)]

    def loss(weights, x):
        for task, w in zip(tasks, weights, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    return mm.microbatch(
        jax.value_and_grad(loss), argnum=1, num_microbatches=MICROBATCHES, schedule="gpipe", reduce="mean"
    )


@pytest.fixture
def ahead(monkeypatch):
    """How many launches were counted as unfinished, at each launch that is counted."""
    found = []
    make_room = Launches._make_room

    def noted(self, window, wide):
        make_room(self, window, wide)
        found.append((id(window), len(window)))

    monkeypatch.setattr(Launches, "_make_room", noted)
    return found


def call_twice(step):
    weights = [jnp.eye(4) * (1 + i / 4) for i in range(3)]
    x = rows(8 * MICROBATCHES)
    jitted = mm.jit(step)
    for _ in range(2):
        result = jitted(weights, x)
    assert_same(result, reference(jax.jit(step), weights, x))


@pytest.mark.parametrize(
    ("groups", "windows"),
    [
        pytest.param([range(8), range(4), range(4, 8)], 1, id="some devices shared"),
        pytest.param([range(8), range(8), range(8)], 1, id="all on the same"),
        pytest.param([range(4), range(4, 8), range(4, 8)], 2, id="two groups"),
    ],
)
def test_submeshes_of_several_devices_do_not_run_far_ahead(ahead, groups, windows):
    """Every launch waits until fewer than so many are unfinished on its devices, so that none ever reaches JAX's limit."""
    call_twice(step_over(*groups))
    assert len(ahead) >= 2 * 2 * 3 * MICROBATCHES // EVERY  # two calls, forward and backward, three layers
    assert max(count for _, count in ahead) < ALONE
    assert len({window for window, _ in ahead}) == windows


def test_single_devices_are_not_counted(ahead):
    """Nothing waits in a collective there, so nothing is asked about any."""
    tasks = [mm.task(dense, f"layer_{i}", devices=[i]) for i in range(3)]
    call_twice(
        mm.microbatch(
            jax.value_and_grad(
                lambda weights, x: jnp.mean(
                    functools.reduce(lambda x, tw: tw[0](tw[1], x), zip(tasks, weights, strict=True), x) ** 2
                )
            ),
            argnum=1,
            num_microbatches=MICROBATCHES,
            schedule="gpipe",
            reduce="mean",
        )  # fmt: skip
    )
    assert ahead == []


def test_what_went_wrong_in_one_call_is_not_told_to_the_next():
    """The results that nobody can read are those of that call; a launch waited for them, and raised for ever."""
    data = [Mesh(np.array(jax.devices()).reshape(2, 4)[k], ("data",)) for k in (0, 1)]

    def positive(x):
        if (np.asarray(x) < 0).any():
            raise ValueError("a negative batch")
        return x

    def checked(x):
        each = functools.partial(jax.pure_callback, positive, jax.ShapeDtypeStruct((1,), x.dtype))
        return jax.shard_map(each, mesh=data[1], in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)

    front, back = mm.task(lambda x: 2 * x, "front", mesh=data[0]), mm.task(checked, "back", mesh=data[1])
    step = mm.jit(lambda x: back(front(x)))
    x = np.ones(4, np.float32)
    assert_same(step(x), 2 * x)
    for _ in range(ALONE * EVERY):
        with pytest.raises(jax.errors.JaxRuntimeError, match="a negative batch"):
            jax.block_until_ready(step(-x))
    for _ in range(ALONE * EVERY):
        assert_same(step(x), 2 * x)
