"""The checker of plans: accepts what `emit` makes, and refuses a plan broken in any one rule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import manymesh as mm
from manymesh._plan._check import check
from manymesh._plan._instructions import Receive, Run, Send, Value
from stages import loss, microbatched, parameters, rows

pytestmark = pytest.mark.once


def train(p, x, grad):
    value, grads = grad(p, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value


@functools.cache
def plan_of(schedule="1f1b"):
    """The plan of a training step on two submeshes, parameters donated."""
    grad = microbatched(schedule=schedule) if schedule else jax.value_and_grad(loss)
    step = mm.jit(functools.partial(train, grad=grad), donate_argnums=0)
    return step.lower(parameters(), rows()).plan


@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b", "zero-bubble-h1"])
def test_plans_pass(schedule):
    """With and without a loop."""
    plan = plan_of(schedule)
    assert {type(i) for i in plan.instructions} == {Run, Send, Receive}
    check(plan)


def at(kind, n=0, when=lambda i: True):
    """Position of the n-th instruction of a kind."""
    return [k for k, i in enumerate(plan_of().instructions) if isinstance(i, kind) and when(i)][n]


def changed(k, **fields):
    """The plan with other fields in one instruction, and nothing to be donated."""
    plan = plan_of()
    instructions = list(plan.instructions)
    instructions[k] = instructions[k]._replace(**fields)
    return dataclasses.replace(plan, instructions=tuple(instructions), donatable={})


def without(*positions):
    plan = plan_of()
    left = tuple(i for k, i in enumerate(plan.instructions) if k not in positions)
    return dataclasses.replace(plan, instructions=left)


def swapped(a, b):
    plan = plan_of()
    instructions = list(plan.instructions)
    instructions[a], instructions[b] = instructions[b], instructions[a]
    return dataclasses.replace(plan, instructions=tuple(instructions))


def get(k):
    return plan_of().instructions[k]


LOOSE = at(Run, when=lambda i: len(i.free) > 1)
FIRST, SECOND = at(Send), at(Send, 1)
BROKEN = {
    "read before it is filled": (lambda: swapped(FIRST - 1, FIRST + 2), "which is empty|stands between"),
    "a run without what it reads": (lambda: without(FIRST - 1), "reads slot .*, which is empty"),
    "freed twice": (lambda: changed(LOOSE, free=(*get(LOOSE).free, get(LOOSE).free[0])), "frees slot .* is freed"),
    "never freed": (lambda: changed(LOOSE, free=get(LOOSE).free[1:]), "slot .* is never freed"),
    "used after it is freed": (
        lambda: changed(FIRST - 1, free=(*get(FIRST - 1).free, get(FIRST).inputs[0])),
        "reads slot .*, which is freed",
    ),
    "filled twice": (
        lambda: changed(FIRST + 1, outputs=(get(FIRST - 1).outputs[0],)),
        "fills slot .*, which is full|fills slot .*, which is freed",
    ),
    "a slot of another submesh": (
        lambda: changed(LOOSE, free=(*get(LOOSE).free[1:], foreign_slot(LOOSE))),
        "frees slot .* of submesh",
    ),
    "a fragment on two submeshes": (lambda: elsewhere(), "ran on submesh 0 before|reads slot .* of submesh"),
    "a Send that nobody receives": (lambda: without(FIRST + 1), "stands between"),
    "a Receive of what nobody sends": (lambda: without(FIRST), "which nobody sends"),
    "another tag": (
        lambda: changed(FIRST + 1, tag=get(FIRST).tag._replace(microbatch=3)),
        "receives Tag.* but Tag.* was sent",
    ),
    "a tag that was there": (
        lambda: both(SECOND, tag=get(FIRST).tag) if get(SECOND).target == get(FIRST).target else both(at(Send, 2), tag=get(FIRST).tag),
        "was sent before|ends",
    ),
    "other ends": (lambda: changed(FIRST, target=0), "ends"),
    "other variables": (lambda: changed(FIRST + 1, variables=(0,)), "variables|reads|fills"),
    "another shape": (lambda: reshaped(), "reads Value.* in slot .* of Value"),
    "a result that is missing": (
        lambda: dataclasses.replace(plan_of(), outputs=(plan_of().num_slots - 1, get(LOOSE).free[0])),
        "result 1: slot .* is freed",
    ),
    "donated and read again": (
        lambda: dataclasses.replace(plan_of(), donatable={get(FIRST - 1).fragment: tuple(range(len(get(FIRST - 1).inputs)))}),
        "does not die here",
    ),
    "donated though shared": (
        lambda: dataclasses.replace(plan_of(), aliases={slot: slot for slot in range(plan_of().num_slots)}),
        "may be donated, but slot .* is shared",
    ),
}  # fmt: skip


def foreign_slot(k):
    """A full slot of another submesh than that of an instruction."""
    return next(slot for _, s, slot in plan_of().inputs if s != get(k).submesh)


def both(k, **fields):
    """The plan with other fields in a Send and its Receive."""
    plan = plan_of()
    instructions = list(plan.instructions)
    for n in (k, k + 1):
        instructions[n] = instructions[n]._replace(**fields)
    return dataclasses.replace(plan, instructions=tuple(instructions))


def elsewhere():
    """The plan with the second run of some fragment on another submesh."""
    first = get(FIRST - 1)
    k = next(
        k
        for k, i in enumerate(plan_of().instructions)
        if isinstance(i, Run) and i.fragment == first.fragment and i != first
    )
    return changed(k, submesh=1 - first.submesh)


def reshaped():
    """The plan in which what a fragment makes is not what the next one reads."""
    plan, crossing = plan_of(), get(FIRST).variables[0]
    variables = list(plan.variables)
    variables[crossing] = Value((7, 7), "float32")
    ports = list(plan.ports)
    makes = ports[get(FIRST - 1).fragment].makes
    ports[get(FIRST - 1).fragment] = ports[get(FIRST - 1).fragment]._replace(
        makes=tuple(plan.ports[0].reads[0] if v == crossing else v for v in makes)
    )
    return dataclasses.replace(plan, variables=tuple(variables), ports=tuple(ports))


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_plan_is_refused(rule):
    """Each rule by a plan that breaks it."""
    broken, words = BROKEN[rule]
    with pytest.raises(AssertionError, match=words):
        check(broken())


def test_a_fragment_that_reads_a_donated_slot_twice_is_refused():
    """Both positions would be one buffer, donated and read."""
    plan = plan_of()
    k = at(Run, when=lambda i: len(i.inputs) > 1 and plan.donatable.get(i.fragment))
    run = plan.instructions[k]
    position = plan.donatable[run.fragment][0]
    other = (position + 1) % len(run.inputs)
    inputs = list(run.inputs)
    inputs[other] = inputs[position]
    variables = [Value((), "float32")] * len(plan.variables)
    twice = dataclasses.replace(changed(k, inputs=tuple(inputs)), variables=tuple(variables), donatable=plan.donatable)
    with pytest.raises(AssertionError, match="is read twice"):
        check(twice)


def test_an_input_that_is_a_result_or_unused_passes():
    """A step whose result is an input unchanged, and one that nobody reads, makes a plan that holds too."""
    front = mm.task(jnp.sin, "front", devices=[0])
    check(mm.jit(lambda x, unused: (front(x), x)).lower(jnp.ones(4), jnp.ones(3)).plan)
