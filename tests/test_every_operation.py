"""Every operation that generated programs draw, between tasks and behind them, planned once: few of them are drawn here.

Programs are not compiled; what they compute is checked by those that are drawn (`test_laws.py`, `make fuzz`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from generated import operations_large  # noqa: F401  # registers its operations
from generated.operations import OPERATIONS, WIDTH, Surroundings, apply

TOGETHER = 24
GROUPS = [list(OPERATIONS)[i : i + TOGETHER] for i in range(0, len(OPERATIONS), TOGETHER)]

front, back = (mm.task(lambda w, x: jnp.tanh(x @ w), name, devices=[i]) for i, name in enumerate(("front", "back")))


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_every_operation_outside_of_tasks_is_planned(names):
    """Half of them between two tasks, all of them after the last one."""

    def loss(w, x, ids, key):
        around = Surroundings(w["own"], ids, key)
        h = front(w["front"], x)
        for name in names[::2]:
            h = h + apply(name, h, around)
        y = back(w["back"], h)
        return jnp.mean(sum(apply(name, y, around) for name in names))

    step = mm.microbatch(jax.value_and_grad(loss), argnum=(1, 2), num_microbatches=2, schedule="1f1b", reduce="mean")
    w = {k: jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32) for k in ("front", "back", "own")}
    x, ids = jax.ShapeDtypeStruct((8, WIDTH), np.float32), jax.ShapeDtypeStruct((8,), np.int32)
    assert mm.jit(step).lower(w, x, ids, jax.random.key(0)).program.loops
