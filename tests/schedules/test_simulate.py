"""Laws of the simulator, over schedules, placements and times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manymesh.schedules import Order, get, simulate
from schedules.strategies import NAMED, orders, times

pytestmark = pytest.mark.once


def draw_costs(data: st.DataObject, order: Order) -> dict[str, list[float]]:
    """Unequal times; the weight gradient is some part of the backward."""

    def listed(count: int) -> list[float]:
        return data.draw(st.lists(times, min_size=count, max_size=count))

    backward = listed(order.num_stages)
    part = data.draw(st.floats(0.0, 1.0))
    return {
        "forward": listed(order.num_stages),
        "backward": backward,
        "weight": [b * part for b in backward],
        "transfer": listed(order.num_stages - 1),
    }


def _hops(order: Order, costs: dict[str, list[float]], stage: int) -> list[float]:
    """The transfers on the way from the first stage to this one."""
    pairs = zip(costs["transfer"], order.placement[:stage], order.placement[1 : stage + 1], strict=False)
    return [time for time, a, b in pairs if a != b]


@given(orders(), st.data())
def test_never_below_the_physical_bounds(order: Order, data: st.DataObject) -> None:
    """No step is shorter than the work of one submesh, or than the way of one microbatch through all stages."""
    costs = draw_costs(data, order)
    result = simulate(order, **costs)
    work = [0.0] * order.num_submeshes
    for stage, submesh in enumerate(order.placement):
        passes = costs["forward"][stage] + (costs["backward"][stage] if order.backward else 0.0)
        work[submesh] += order.num_microbatches * passes
    assert result.makespan >= max(work) * (1 - 1e-9)
    way = sum(costs["forward"])
    hops = [t for t, a, b in zip(costs["transfer"], order.placement, order.placement[1:], strict=False) if a != b]
    way += sum(hops)
    if order.backward:
        # The first stage's weight gradient follows its input gradient, so its backward counts whole.
        weights = costs["weight"] if order.splits_backward else [0.0] * order.num_stages
        way += sum(hops) + sum(costs["backward"]) - sum(weights[1:])
    assert result.makespan >= way * (1 - 1e-9)
    # Each stage works one action at a time between the way to it and the way back from it.
    for stage, submesh in enumerate(order.placement):
        to = sum(costs["forward"][:stage]) + sum(_hops(order, costs, stage))
        own = order.num_microbatches * costs["forward"][stage]
        if order.backward:
            passes = [b - w for b, w in zip(costs["backward"], costs["weight"], strict=True)]
            inputs = passes if order.splits_backward else costs["backward"]
            own += order.num_microbatches * inputs[stage]
            to += sum(inputs[:stage]) + sum(_hops(order, costs, stage))
            to += costs["weight"][0] if order.splits_backward else 0.0
        assert result.makespan >= (to + own) * (1 - 1e-9), f"stage {stage} on submesh {submesh}"
    assert 0 <= result.bubble_fraction < 1
    assert result.longest_span <= result.makespan * (1 + 1e-9)
    used = sum(bool(row) for row in order.rows)
    assert result.bubble_fraction == pytest.approx(1 - sum(work) / (used * result.makespan), abs=1e-9)


@given(orders(), st.data())
def test_the_timeline_is_a_real_run(order: Order, data: st.DataObject) -> None:
    """Each submesh runs one thing at a time in its order, and nothing starts before its inputs have come."""
    costs = draw_costs(data, order)
    result = simulate(order, **costs)
    rows: list[list] = [[] for _ in order.rows]
    for slot in result.timeline:
        rows[slot.submesh].append(slot)
    assert tuple(tuple(slot.action for slot in row) for row in rows) == order.rows
    for row in rows:
        assert all(a.end <= b.start for a, b in zip(row, row[1:], strict=False))
    at = {slot.action: slot for slot in result.timeline}
    for action, slot in at.items():
        before = {
            "F": [("F", action.stage - 1)] if action.stage else [],
            "B": [("F", action.stage), ("B", action.stage + 1)],
            "W": [("B", action.stage)],
        }[action.kind]
        for kind, stage in before:
            producer = at.get(type(action)(kind, stage, action.microbatch))
            if producer is not None:
                crosses = order.placement[stage] != slot.submesh
                hop = costs["transfer"][min(stage, action.stage)] if crosses else 0.0
                assert slot.start >= producer.end + hop


@given(orders(), st.data(), st.floats(0.1, 10.0))
def test_time_has_no_unit(order: Order, data: st.DataObject, unit: float) -> None:
    costs = draw_costs(data, order)
    scaled = {name: [unit * time for time in listed] for name, listed in costs.items()}
    assert simulate(order, **scaled).makespan == pytest.approx(unit * simulate(order, **costs).makespan)


@given(orders(), st.data())
def test_slower_never_ends_sooner(order: Order, data: st.DataObject) -> None:
    """The order is fixed, so a longer forward of one stage cannot help."""
    costs = draw_costs(data, order)
    stage = data.draw(st.integers(0, order.num_stages - 1))
    slower = {**costs, "forward": [t + (s == stage) for s, t in enumerate(costs["forward"])]}
    assert simulate(order, **slower).makespan >= simulate(order, **costs).makespan


@pytest.mark.parametrize("name", NAMED)
def test_by_name_by_object_and_by_order_agree(name: str) -> None:
    schedule = get(name)
    placement = schedule.default_placement(8)
    by_name = simulate(name, stages=8, num_microbatches=6)
    assert by_name == simulate(schedule, 8, 6)
    assert by_name == simulate(name, num_microbatches=6, placement=placement)
    assert by_name == simulate(schedule.order(placement, 6))


def test_overhead_counts_once_an_action() -> None:
    """A split backward pays it twice."""
    assert simulate("1f1b", 1, 4, overhead=0.5).makespan == 4 * 3 + 8 * 0.5
    assert simulate("zero-bubble-h1", 1, 4, overhead=0.5).makespan == 4 * 3 + 12 * 0.5


def test_weight_is_half_of_the_backward_by_default() -> None:
    assert simulate("zero-bubble-h1", 4, 8) == simulate("zero-bubble-h1", 4, 8, weight=1.0)


def test_nothing_takes_no_time() -> None:
    result = simulate("1f1b", 2, 2, forward=0.0, backward=0.0)
    assert (result.makespan, result.bubble_fraction) == (0.0, 0.0)


def test_a_submesh_without_stages_is_not_a_bubble() -> None:
    assert (
        simulate("1f1b", num_microbatches=4, placement=(0, 2)).bubble_fraction == simulate("1f1b", 2, 4).bubble_fraction
    )


def test_the_repr_is_one_line() -> None:
    assert repr(simulate("gpipe", 2, 4)) == (
        "Simulation(makespan=15, bubble_fraction=0.200, longest_span=15, live_activations=(4, 4), timeline=<16 slots>)"
    )
