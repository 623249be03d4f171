"""Live activations: what the executor keeps is what the simulator says."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from manymesh import schedules
from manymesh._plan._instructions import Run
from manymesh._runtime._observe import Observer

WIDTH = 4
MEASURED = ["gpipe", "1f1b", "zero-bubble-h1"]
SHAPES = [(2, 4), (3, 5), (4, 8), (8, 16), (4, 2)]


def block(w, x):
    """Keeps the inner activation for its backward pass."""
    return x + jnp.tanh(x @ w[0]) @ w[1]


def step_of(stages):
    """A step of one block a device, and its parameters."""
    tasks = [mm.task(block, f"s{i}", devices=[i]) for i in range(stages)]

    def loss(params, x):
        for run, p in zip(tasks, params, strict=True):
            x = run(p, x)
        return jnp.mean(x**2)

    def step(params, x, schedule, microbatches):
        grad = mm.microbatch(
            jax.value_and_grad(loss), argnum=1, num_microbatches=microbatches, schedule=schedule, reduce="mean"
        )
        return grad(params, x)

    rng = np.random.default_rng(0)
    weight = lambda: jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32)  # noqa: E731
    return mm.jit(step, static_argnums=(2, 3)), [(weight(), weight()) for _ in range(stages)]


def kept_slots(program, plan):
    """(stage, microbatch) -> the slots that its forward fills and its backward or weight gradient reads."""
    made, read = {}, {}
    for ins in plan.instructions:
        if isinstance(ins, Run) and (f := program.fragments[ins.fragment]).loop is not None and f.tasks:
            where = made if f.kind == "F" else read
            where.setdefault((f.stage, ins.microbatch), set()).update(ins.outputs if f.kind == "F" else ins.inputs)
    return {activation: slots & read[activation] for activation, slots in made.items()}


def peaks_of_the_plan(program, plan):
    """The most activations of which a slot is filled, on each submesh, at any of its instructions."""
    owner = {slot: activation for activation, slots in kept_slots(program, plan).items() for slot in slots}
    live = [{} for _ in program.submeshes]  # submesh -> activation -> how many of its slots are filled
    peaks = [0] * len(live)
    for ins in plan.instructions:
        if not isinstance(ins, Run):
            assert owner.keys().isdisjoint(ins.free), "what a backward pass needs is not freed by sending it"
            continue
        here = live[ins.submesh]
        for slot in ins.outputs:
            if slot in owner:
                here[owner[slot]] = here.get(owner[slot], 0) + 1
        peaks[ins.submesh] = max(peaks[ins.submesh], len(here))
        for slot in ins.free:
            if slot in owner:
                here[owner[slot]] -= 1
                if not here[owner[slot]]:
                    del here[owner[slot]]
    assert not any(live), "every activation is freed"
    return tuple(peaks)


@pytest.mark.parametrize("stages,microbatches", SHAPES)
@pytest.mark.parametrize("schedule", [*MEASURED, "eager-1f1b", "wavefront", "zero-bubble-h2"])
def test_the_plan_keeps_what_the_simulator_says(schedule, stages, microbatches):
    """On each submesh, from the forward that makes an activation to the last that reads it."""
    step, params = step_of(stages)
    lowered = step.lower(params, jnp.ones((microbatches, WIDTH)), schedule, microbatches)
    found = peaks_of_the_plan(lowered.program, lowered.plan)
    assert found == schedules.simulate(schedule, stages, microbatches).live_activations


class Watch(Observer):
    """Counts the activations whose arrays are alive after each run."""

    def __init__(self, program, plan):
        self.program, self.kept = program, kept_slots(program, plan)
        self.arrays = {}  # activation -> weak references to its arrays
        self.peaks = [0] * len(program.submeshes)

    def begin(self, position, instruction, inputs):
        # Donated arrays are gone at the end, but they were there when it started.
        self.inputs = inputs

    def end(self, position, instruction, outputs):
        inputs, self.inputs = self.inputs, ()
        if not isinstance(instruction, Run):
            return
        f = self.program.fragments[instruction.fragment]
        (loop,) = self.program.loops
        if f.kind == "F" and (f.stage, instruction.microbatch) in self.kept:
            slots = self.kept[f.stage, instruction.microbatch]
            self.arrays[f.stage, instruction.microbatch] = [
                weakref.ref(x) for x, slot in zip(outputs, instruction.outputs, strict=True) if slot in slots
            ]
        alive = {id(x) for x in (*jax.live_arrays(), *inputs)}
        here = [
            (stage, m)
            for (stage, m), refs in self.arrays.items()
            if loop.placement[stage] == instruction.submesh
            and any(id(x) in alive for r in refs if (x := r()) is not None)
        ]
        self.peaks[instruction.submesh] = max(self.peaks[instruction.submesh], len(here))


def peaks_of_a_call(compiled, *args):
    """As `peaks_of_the_plan`, from the arrays that are alive while a call goes on."""
    watch = Watch(compiled.program, compiled._lowered.plan)
    jax.block_until_ready(compiled.call_flat(jax.tree.leaves(args), watch))
    return tuple(watch.peaks)


@pytest.mark.parametrize("schedule", MEASURED)
def test_the_arrays_that_are_alive_are_those(schedule):
    """Real arrays on four devices, counted at every instruction of a step with six microbatches."""
    step, params = step_of(4)
    x = jnp.ones((6, WIDTH))
    found = peaks_of_a_call(step.lower(params, x, schedule, 6).compile(), params, x)
    assert found == schedules.simulate(schedule, 4, 6).live_activations


def test_more_microbatches_take_no_more_with_1f1b():
    """The memory of a device stays the same from 8 to 32 microbatches of one size, and grows under GPipe."""
    step, params = step_of(2)
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        for count in (8, 32):
            lowered = step.lower(params, jnp.ones((count, WIDTH)), schedule, count)
            peaks[schedule, count] = peaks_of_the_plan(lowered.program, lowered.plan)
    assert peaks["1f1b", 8] == peaks["1f1b", 32] == (2, 1)
    assert peaks["gpipe", 8] == (8, 8) and peaks["gpipe", 32] == (32, 32)
