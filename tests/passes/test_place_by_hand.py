"""`jax.shard_map` on a mesh that the user names runs there."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import manymesh as mm
from flat import lines, program, run

FRONT, BACK, BOTH = (Mesh(np.array(jax.devices()[at]), ("data",)) for at in (slice(2), slice(2, 4), slice(4)))
TASKS = {"front": mm.Task("front", mesh=FRONT), "back": mm.Task("back", mesh=BACK)}
BY_HAND = """
    inputs: x f32[4]
    h = front: lax.sin(x)
    m = {}
    y = back: lax.cos(m)
    results: y
"""


def by_hand(mesh, of="h"):
    """The text of a `jax.shard_map` on some of the devices."""
    devices = [d.id for d in mesh.devices.flat]
    mesh = f"jax.sharding.Mesh(jax.devices()[{devices[0]} : {devices[-1] + 1}], ('data',))"
    p = "jax.sharding.PartitionSpec('data')"
    return f"jax.shard_map(lambda q: q - lax.pmean(q, 'data'), mesh={mesh}, in_specs={p}, out_specs={p})({of})"


@pytest.mark.parametrize(
    "around", ["{}", "jax.checkpoint(lambda h: {})(h)", "lax.scan(lambda h, _: ({}, None), h, None, 2)[0]"]
)
@pytest.mark.parametrize("mesh", [FRONT, BACK])
def test_it_is_on_the_submesh_that_it_names(mesh, around):
    """Itself, and what holds it."""
    after = run("place_by_hand", program(BY_HAND.format(around.format(by_hand(mesh))), tasks=TASKS))
    (node,) = [n for n in after.nodes if n.task is None]
    assert node.mesh == mesh
    placement = run("place", after).placement
    assert [placement.submeshes[s] for s in placement.node[node]] == [mesh]
    assert placement.reason[node] == "its submesh"


def test_a_task_that_says_nothing_of_its_place_goes_there():
    """Its place is otherwise inferred."""
    tasks = {**TASKS, "mixed": mm.Task("mixed")}
    after = run("place_by_hand", program(BY_HAND.format(f"mixed: {by_hand(BACK)}"), tasks=tasks))
    assert [after.submesh_of(n) for n in after.nodes] == [FRONT, BACK, BACK]


def test_without_tasks_nothing_is_said():
    """There is one set of devices, as in `jax.jit`."""
    flat = program(f"""
        inputs: x f32[4]
        y = {by_hand(BOTH, "x")}
        results: y
    """)
    assert run("place_by_hand", flat) is flat


def test_devices_that_are_no_submesh():
    """In words: where, on what, and what to do."""
    flat = program(BY_HAND.format(by_hand(BOTH)), tasks=TASKS)
    with pytest.raises(mm.errors.PlacementError) as caught:
        run("place_by_hand", flat)
    for words in (
        "jax.shard_map at ", "is on devices 0-3 with axes {'data': 4}", "outside of tasks",
        "devices 0-1 with axes {'data': 2} of task 'front'", "in a task on the mesh that it needs",
    ):  # fmt: skip
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (f"front: {by_hand(BACK)}", "task 'front' is on devices 0-1"),
        (
            f"lax.cond(True, lambda h: {by_hand(BACK)}, lambda h: {by_hand(FRONT)}, h)",
            "the cond that it is in is on devices 0-1",
        ),
    ],
)
def test_two_submeshes_in_one_operation(expression, words):
    """It runs on one."""
    with pytest.raises(mm.errors.PlacementError) as caught:
        run("place_by_hand", program(BY_HAND.format(expression), tasks=TASKS))
    assert words in str(caught.value) and "is on devices 2-3" in str(caught.value)


def test_the_rest_of_a_program_stays():
    """The text says the submesh."""
    after = run("place_by_hand", program(BY_HAND.format(by_hand(BACK)), tasks=TASKS))
    assert "[on {'data': 2}]" in lines(after)
    assert lines(after).replace(" [on {'data': 2}]", "") == lines(program(BY_HAND.format(by_hand(BACK)), tasks=TASKS))
