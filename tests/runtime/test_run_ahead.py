"""How far a call runs ahead of the devices where submeshes share some of theirs, on CPU.

JAX blocks a launch while 32 on one of its devices are unfinished. A launch on eight devices that had begun on four of them
then kept their threads from what the other four waited for, for ever: about one call in five of a program with 40 launches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import manymesh as mm
from manymesh._runtime._launches import LAUNCHES, Launches
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

    def noted(self, wide):
        make_room(self, wide)
        found.append(len(self._window))

    monkeypatch.setattr(Launches, "_make_room", noted)
    return found


def call_twice(step):
    weights = [jnp.eye(4) * (1 + i / 4) for i in range(3)]
    x = rows(8 * MICROBATCHES)
    jitted = mm.jit(step)
    for _ in range(2):
        result = jitted(weights, x)
    assert_same(result, reference(jax.jit(step), weights, x))


def test_submeshes_that_share_some_devices_do_not_run_far_ahead(ahead):
    """Every launch waits until fewer than so many are unfinished, so that none on a device ever reaches JAX's limit."""
    call_twice(step_over(range(8), range(4), range(4, 8)))
    assert len(ahead) >= 2 * 2 * 3 * MICROBATCHES  # two calls, forward and backward, three layers
    assert max(ahead) < LAUNCHES


def test_others_are_not_counted(ahead):
    """Where no launch can have begun on some of its devices alone, nothing is asked about any."""
    call_twice(step_over(range(4), range(4, 8), range(4, 8)))
    assert ahead == []
