"""From a compiled step to measured task times, and on to a schedule."""

import jax
import jax.numpy as jnp
import pytest

import manymesh as mm
from manymesh import schedules
from manymesh._measure import loop_costs
from manymesh._plan._instructions import Send

WIDTH = 8


def block(w, x):
    return x + jnp.tanh(x @ w[0]) @ w[1]


def compiled(schedule, microbatches=4, backward=True):
    """Three blocks on submeshes of 2, 2 and 4 devices; parameters are donated."""
    meshes = [{"devices": d, "device_axes": ("x",)} for d in ([0, 1], [2, 3], [4, 5, 6, 7])]
    tasks = [mm.task(block, f"s{i}", **mesh) for i, mesh in enumerate(meshes)]

    def loss(params, x):
        for run, p in zip(tasks, params, strict=True):
            x = run(p, x)
        return jnp.mean(x**2)

    def step(params, x):
        fun = jax.grad(loss) if backward else loss
        out = mm.microbatch(fun, argnum=1, num_microbatches=microbatches, schedule=schedule)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, out) if backward else (params, out)

    params = [(jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH))) for _ in tasks]
    x = jnp.ones((4 * microbatches, WIDTH))
    return mm.jit(step, donate_argnums=0).lower(params, x).compile(), (params, x)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
def test_measured_costs_go_into_the_search(schedule):
    """One positive number a stage and a hop; the weight gradient where the schedule splits it; arguments live on."""
    step, args = compiled(schedule)
    costs = step.measure(*args)
    splits = schedules.get(schedule).splits_backward
    assert len(costs.forward) == len(costs.backward) == 3 and len(costs.transfer) == 2
    assert min(*costs.forward, *costs.backward, *costs.transfer) > 0
    assert (costs.weight is not None) == splits
    if splits:
        assert all(0 < w < b for w, b in zip(costs.weight, costs.backward, strict=True))
    step(*args)  # they were not donated to the measurement
    choice = schedules.search(lambda m: costs.split(m / 4), stages=3, num_microbatches=[4, 8])
    assert choice.simulation.makespan > 0


def test_costs_are_medians_by_stage_and_hop():
    """From times that are known: instruction k of the plan is said to take what its fragment and stage say."""
    step, _ = compiled("zero-bubble-h1")
    lowered = step._lowered
    base = {"F": 1.0, "B": 10.0, "W": 100.0}
    seconds = []
    for ins in lowered.plan.instructions:
        if hasattr(ins, "fragment"):
            f = lowered.program.fragments[ins.fragment]
            took = 7.0 if f.loop is None else base[f.kind] + f.stage
            took += 1000.0 * (ins.microbatch == 0)  # the first run of a program is slow
        elif isinstance(ins, Send):
            took = 0.375 if {ins.submesh, ins.target} == {0, 1} else 0.125
        else:
            took = 0.125
        seconds.append(took)
    costs = loop_costs(lowered, seconds, 0)
    assert costs.forward == (1.0, 2.0, 3.0)
    assert costs.weight == (100.0, 101.0, 102.0)
    assert costs.backward == (110.0, 112.0, 114.0)
    assert costs.transfer == (0.5, 0.25)
    # Bytes a device of what is kept: the input and tanh, and in the last stage the output to square.
    value = 4 * WIDTH * 4
    assert costs.activation == (2 * value / 2, 2 * value / 2, 3 * value / 4)


def test_forward_only():
    """Nothing goes back."""
    step, args = compiled("gpipe", backward=False)
    costs = step.measure(*args)
    assert costs.backward is None and costs.weight is None
    assert costs.activation == (0.0, 0.0, 0.0)


def test_what_cannot_be_measured():
    """A loop that the step does not have, and arguments it was not compiled for."""
    step, (params, x) = compiled("gpipe", backward=False)
    with pytest.raises(mm.errors.ArgumentError, match=r"step: measure\(loop=1\), but the step has 1 microbatch loops"):
        step.measure(params, x, loop=1)
    with pytest.raises(mm.errors.ArgumentError, match="was compiled as"):
        step.measure(params, x[:8])
