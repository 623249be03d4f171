"""Plans: what is in them, and that it is data."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import manymesh as mm
from manymesh._plan import _emit
from manymesh._plan._alias import sharing_submeshes
from manymesh._plan._check import check
from manymesh._plan._donation import slots_of_others
from manymesh._plan._instructions import Receive, Run, Send, Tag
from stages import assert_agrees, microbatched, parameters, rows

pytestmark = pytest.mark.once

DEVICES = np.array(jax.devices())


def chain(x):
    """Three tasks on two devices."""
    a, b = mm.task(jnp.sin, "a", devices=[0]), mm.task(jnp.cos, "b", devices=[1])
    return mm.task(jnp.exp, "c", devices=[0])(b(a(x)))


@functools.cache
def trained():
    def step(p, x):
        value, grads = microbatched()(p, x)
        return jax.tree.map(lambda w, g: w - g, p, grads), value

    return mm.jit(step, donate_argnums=0).lower(parameters(), rows())


def test_the_text_of_a_plan():
    """A line for each instruction, its submesh first; of all submeshes or of one."""
    lowered = mm.jit(chain).lower(jnp.ones(4))
    names = [f.name for f in lowered.program.fragments]
    text = """\
0: run a: 0 -> 2, frees 0
0: send a to 1: 2 -> -, frees 2
1: receive a from 0: - -> 3
1: run b: 3 -> 4, frees 3
1: send b to 0: 4 -> -, frees 4
0: receive b from 1: - -> 5
0: run c: 5 -> 1, frees 5"""
    found = lowered.plan.text(names)
    renumbered = {slot: str(k) for k, slot in enumerate(dict.fromkeys(_slots(found)))}
    expected = {slot: str(k) for k, slot in enumerate(dict.fromkeys(_slots(text)))}
    assert _renamed(found, renumbered) == _renamed(text, expected)
    assert lowered.plan.text(names, submesh=1) == "\n".join(x for x in found.splitlines() if x.startswith("1:"))
    assert found in lowered.as_text()


def _slots(text):
    return [w.strip(",") for x in text.splitlines() for w in x.split(": ", 2)[2].split() if w.strip(",").isdigit()]


def _renamed(text, names):
    lines = [x.split(": ", 2) for x in text.splitlines()]
    rename = lambda w: names.get(w.strip(","), w.strip(",")) + ("," if w.endswith(",") else "")  # noqa: E731
    return [(where, what, " ".join(map(rename, slots.split()))) for where, what, slots in lines]


def test_every_send_has_its_receive_behind_it_and_a_tag_of_its_own():
    """The tag says which run made the values and where they go."""
    lowered = trained()
    instructions = lowered.plan.instructions
    tags = [i.tag for i in instructions if isinstance(i, Send)]
    assert len(tags) == len(set(tags)) == 8
    for k, send in enumerate(instructions):
        if isinstance(send, Send):
            receive, maker = instructions[k + 1], lowered.program.fragments[send.tag.maker]
            assert isinstance(receive, Receive) and receive.tag == send.tag
            assert (maker.submesh, send.tag.target) == (send.submesh, send.target) == (receive.source, receive.submesh)
            makes = next(
                r.outputs
                for r in instructions[:k]
                if isinstance(r, Run) and (r.fragment, r.microbatch) == (maker.index, send.tag.microbatch)
            )
            assert set(send.inputs) <= set(makes)


@pytest.mark.parametrize("block", [1, 3])
def test_slots_are_freed_as_one_at_whatever_length_the_instructions_are_looked_at(block, monkeypatch):
    """Block by block, a slot is freed by the last instruction that touches it, also where that is in a later block."""
    expected = trained().plan
    monkeypatch.setattr(_emit, "BLOCK", block)
    assert len(expected.instructions) > 20
    assert _emit.emit(trained().program, _donated(trained())) == expected


def _donated(lowered):
    return frozenset(range(len(lowered.program.consts), len(lowered.program.invars) - 1))


def test_streams_are_those_of_the_submeshes():
    """Each instruction is in the stream of exactly one submesh, in the order of the plan."""
    plan = trained().plan
    streams = [plan.stream(s) for s in (0, 1)]
    assert sum(map(len, streams)) == len(plan.instructions)
    for s, stream in enumerate(streams):
        assert stream == tuple(i for i in plan.instructions if i.submesh == s)


def atoms(x):
    """What a plan is made of, in the end."""
    if dataclasses.is_dataclass(x):
        x = [getattr(x, f.name) for f in dataclasses.fields(x)]
    if isinstance(x, dict):
        x = [*x.keys(), *x.values()]
    return {type(x)} if not isinstance(x, (tuple, list)) else set().union(*map(atoms, x)) if x else set()


def test_a_plan_holds_numbers_and_names():
    """Nothing of the process that made it; and it compares by content."""
    plan = trained().plan
    assert atoms(plan) == {int, str, type(None)}
    again = dataclasses.replace(plan, instructions=tuple(type(i)(*i) for i in plan.instructions))
    assert again == plan and again is not plan
    with pytest.raises(AttributeError):
        plan.instructions[0].submesh = 3


@pytest.mark.filterwarnings("ignore:.*donated, so that the call deletes:UserWarning")
def test_what_may_be_donated():
    """Owned by the call, dead in every run, and shared with nothing; whether a result can use it is asked later."""
    wide = mm.task(lambda w, x: jnp.sum(w) * x, "wide", devices=[0])
    (x, w) = jnp.ones(3), jnp.ones((4, 4))
    positions = {}
    for donated in ((), (0,), (0, 1)):
        lowered = mm.jit(lambda w, x: wide(w, x), donate_argnums=donated).lower(w, x)
        (f,) = lowered.program.fragments
        names = [("w", "x")[lowered.program.invars.index(v)] for v in f.invars]
        positions[donated] = {names[k] for k in lowered.plan.donatable[f.index]}
    assert positions == {(): set(), (0,): {"w"}, (0, 1): {"w", "x"}}


@pytest.mark.filterwarnings("ignore:.*donated, so that the call deletes:UserWarning")
def test_copies_on_shared_devices_are_aliases():
    """Both ends of a transfer between submeshes with a common device, and an argument that arrives on two of them."""
    all_, half, other = (Mesh(DEVICES[list(d)], ("x",)) for d in ((0, 1, 2, 3), (2, 3), (4, 5)))
    assert sharing_submeshes([all_, half, other]) == {(0, 1), (1, 0)}
    first, second, third = (
        mm.task(lambda w, x: w @ x, n, mesh=m) for n, m in zip("abc", (all_, half, other), strict=True)
    )

    def f(w, x):
        return third(w, second(w, first(w, x)))

    w = jnp.ones((32, 32))
    lowered = mm.jit(f, donate_argnums=(0, 1)).lower(w, w)
    plan, where = lowered.plan, [m.devices.size + m.devices.flat[0].id for m in lowered.program.submeshes]
    assert where == [4, 4, 6]
    arrived = {s: slot for i, s, slot in plan.inputs if i == 0}
    groups = {}
    for slot, first_slot in plan.aliases.items():
        groups.setdefault(first_slot, set()).add(slot)
    send, receive = next(
        (a, b) for a, b in zip(plan.instructions, plan.instructions[1:], strict=False) if isinstance(a, Send)
    )
    assert sorted(groups.values(), key=min) == sorted(
        [{arrived[0], arrived[1]}, {send.inputs[0], receive.outputs[0]}], key=min
    )
    makes = {f.name: f for f in lowered.program.fragments}
    donatable = {n: [str(makes[n].invars[k].aval.shape) for k in plan.donatable[makes[n].index]] for n in "abc"}
    # Of the first task only the batch, of the second nothing: its weight and its input are the first one's, too.
    assert donatable == {"a": ["(32, 32)"], "b": [], "c": ["(32, 32)"] * 2}


def test_weight_gradients_of_a_parameter_that_two_stages_share():
    """The first stage's, which zero-bubble runs first, adds to the last one's on the same submesh."""
    layer, transposed = (lambda w, x: jnp.tanh(x @ w)), (lambda w, x: jnp.tanh(x @ w.T))
    layers = [(layer, 0, "tied"), (layer, 1, "one"), (layer, 2, "two"), (transposed, 0, "tied")]
    tasks = [(mm.task(f, f"s{i}", devices=[d]), name) for i, (f, d, name) in enumerate(layers)]

    def loss(p, x):
        for task, name in tasks:
            x = task(p[name], x)
        return jnp.mean(x**2)

    p = {name: parameters(k)["front"] for k, name in enumerate(("tied", "one", "two"))}
    grad = microbatched(jax.value_and_grad(loss), schedule="zero-bubble-h1")
    plan = mm.jit(grad).lower(p, rows()).plan
    check(plan)
    assert_agrees(grad, p, rows())


def test_what_another_process_pulls_is_never_donated():
    """Its slots are left out of what fragments may take over, whoever reads them last."""

    def mesh(*processes):
        devices = np.array([SimpleNamespace(process_index=p, id=k) for k, p in enumerate(processes)], dtype=object)
        return SimpleNamespace(devices=devices)

    sends = [Send(0, 1, Tag(0, 1, None), (0,), (3,)), Send(1, 2, Tag(1, 2, None), (1,), (4,))]
    assert slots_of_others([mesh(0), mesh(0), mesh(0)], sends) == []
    assert slots_of_others([mesh(0), mesh(0), mesh(1)], sends) == [4]
    assert slots_of_others([mesh(0), mesh(0, 1), mesh(1)], sends) == [3, 4]
