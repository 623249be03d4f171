"""The search, against everything it could have returned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manymesh.errors import ScheduleError
from manymesh.schedules import (
    Choice,
    Costs,
    Custom,
    _search,
    check,
    get,
    live_activations,
    names,
    peak_memory,
    search,
    simulate,
)
from manymesh.schedules._greedy import Load, greedy
from schedules.strategies import ANYWHERE, NAMED, placements, times

pytestmark = pytest.mark.once


@st.composite
def costs(draw: st.DrawFn, stages: int) -> Costs:
    def listed(count: int) -> list[float]:
        return draw(st.lists(times, min_size=count, max_size=count))

    return Costs(
        forward=listed(stages),
        backward=listed(stages),
        transfer=draw(st.one_of(st.just(0.0), times)),
        activation=draw(st.one_of(st.just(1.0), st.just(listed(stages)))),
        overhead=draw(st.sampled_from([0.0, 0.05])),
    )


def check_choice(choice: Choice, cost: Costs) -> None:
    """What it says about itself holds."""
    order = choice.schedule.order(choice.placement, choice.num_microbatches)
    check(order)
    one = cost.split(choice.num_microbatches)
    again = simulate(order, forward=one.forward, backward=one.backward, transfer=one.transfer, overhead=one.overhead)
    assert again == choice.simulation
    assert peak_memory(order, one.activations(len(choice.placement))) == choice.memory


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_never_worse_than_the_best_named_schedule(submeshes: int, virtual: int, data: st.DataObject) -> None:
    stages = submeshes * virtual
    cost = data.draw(costs(stages))
    counts = data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=3))
    memory = data.draw(st.one_of(st.none(), st.floats(0.5, 8.0)))
    line = tuple(range(submeshes))
    shapes = [tuple(s * submeshes // stages for s in range(stages)), line * virtual]
    if virtual == 2:
        shapes.append(line + line[::-1])
    named = []
    for count in counts:
        one = cost.split(count)
        for name in NAMED:
            for placement in shapes:
                try:
                    order = get(name).order(placement, count)
                except ScheduleError:
                    continue
                if memory is None or max(peak_memory(order, one.activations(stages))) <= memory:
                    named.append(
                        simulate(
                            order,
                            forward=one.forward,
                            backward=one.backward,
                            transfer=one.transfer,
                            overhead=one.overhead,
                        ).makespan
                    )
    try:
        choice = search(cost, stages, counts, submeshes=submeshes, memory=memory)
    except ScheduleError:
        assert not named
        return
    check_choice(choice, cost)
    assert memory is None or max(choice.memory) <= memory * (1 + 1e-9)
    assert not named or choice.simulation.makespan <= min(named) * (1 + 1e-9)


def test_it_tries_every_name(monkeypatch) -> None:
    """Those that are registered, and on equal stages the V that none of the list-scheduled orders beats."""
    tried = []
    monkeypatch.setattr(_search, "get", lambda named: tried.append(named) or get(named))
    choice = search(Costs(forward=16.0, backward=32.0), 8, [16], submeshes=4)
    assert set(tried) == set(names())
    assert choice.simulation.makespan == simulate("zbv", 8, 16, forward=1.0, backward=2.0).makespan


def test_it_tries_each_placement_with_each_number() -> None:
    """Also where they can be gone through once alone."""
    costs, found = Costs(forward=8, backward=16), [(0, 1, 2, 3), (0, 1, 1, 0)]
    assert search(costs, 4, [2, 16], placements=iter(found)) == search(costs, 4, [2, 16], placements=found)


def test_it_tries_the_usual_placements() -> None:
    """In blocks, dealt out and in a V: whichever is the best one is found."""
    for placement, name in (((0, 1, 2, 3) * 3, "interleaved"), ((0, 1, 2, 3, 3, 2, 1, 0), "zbv")):
        stages = len(placement)
        named = simulate(name, num_microbatches=8, placement=placement, forward=4 / stages, backward=8 / stages)
        choice = search(Costs(forward=32 / stages, backward=64 / stages), stages, [8], submeshes=4, schedules=[name])
        assert choice.simulation.makespan <= named.makespan
        choice = search(Costs(forward=32 / stages, backward=64 / stages), stages, [8], submeshes=4, schedules=[])
        assert choice.placement != tuple(s * 4 // stages for s in range(stages))
    assert _search._usual_placements(4, 2) == [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)]
    assert _search._usual_placements(5, 2) == [(0, 0, 0, 1, 1)]
    slow = Costs(forward=8.0, backward=16.0, transfer=1e3)
    assert search(slow, 8, [8], submeshes=4).placement == (0, 0, 1, 1, 2, 2, 3, 3)


def test_it_beats_the_named_ones_on_unequal_stages() -> None:
    """List scheduling knows the times; so the result can be a custom schedule, with less of a bubble."""
    cost = Costs(forward=[8.0, 16.0, 8.0, 24.0], backward=[16.0, 32.0, 48.0, 32.0])
    choice = search(cost, 4, [8], submeshes=2, schedules=None)
    best = min(
        simulate(
            name, num_microbatches=8, placement=choice.placement, forward=[1, 2, 1, 3], backward=[2, 4, 6, 4]
        ).makespan
        for name in ANYWHERE
    )
    assert choice.simulation.makespan <= best
    check_choice(choice, cost)


def test_memory_is_traded_for_time() -> None:
    """Less memory never gives a shorter step, and none of the limits is passed."""
    cost = Costs(forward=16.0, backward=32.0, activation=16.0)
    spans = []
    for memory in (1.0, 2.0, 4.0, 8.0, 16.0):
        choice = search(cost, 4, [4, 8, 16], memory=memory)
        assert max(choice.memory) <= memory
        spans.append(choice.simulation.makespan)
    assert spans == sorted(spans, reverse=True)


def test_limits_may_differ_by_submesh() -> None:
    choice = search(Costs(forward=8.0, backward=16.0, activation=8.0), 3, [8], memory=[8.0, 1.0, 2.0])
    assert all(peak <= limit for peak, limit in zip(choice.memory, [8.0, 1.0, 2.0], strict=True))


def test_overhead_limits_the_number_of_microbatches() -> None:
    counts = [1, 2, 4, 8, 16, 32, 64]
    free = search(Costs(forward=8.0, backward=16.0), 4, counts)
    dear = search(Costs(forward=8.0, backward=16.0, overhead=1.0), 4, counts)
    assert free.num_microbatches == 64
    assert dear.num_microbatches < 16


def test_measured_costs() -> None:
    """A function gives the costs of one microbatch for each number of them."""
    measured = {4: Costs(forward=3.0, backward=6.0), 8: Costs(forward=1.0, backward=2.0)}
    choice = search(measured.__getitem__, 4, [4, 8], schedules=["1f1b"], placements=[(0, 1, 2, 3)])
    assert choice.num_microbatches == 8


def test_forward_only() -> None:
    choice = search(Costs(forward=8.0, backward=None), 4, [2, 8])
    assert choice.num_microbatches == 8
    assert choice.simulation.makespan == 8 + 3
    assert choice.memory == (0.0,) * 4


def test_the_text_of_a_choice() -> None:
    choice = search(Costs(forward=8, backward=16, activation=8), 4, [8], schedules=["1f1b"], memory=4)
    assert isinstance(choice.schedule, Custom) or choice.schedule.name == "1f1b"
    assert "8 microbatches, placement (0, 1, 2, 3): makespan" in str(choice)


@given(placements(), st.integers(1, 10), st.booleans(), st.floats(1.0, 4.0), st.data())
def test_list_scheduling_is_legal_within_its_memory(placement, count: int, splits: bool, slack: float, data) -> None:
    """Even with memory for just one microbatch a submesh it reaches the end."""
    stages = len(placement)

    def listed(count: int) -> list[float]:
        return data.draw(st.lists(times, min_size=count, max_size=count))

    durations = {kind: listed(stages) for kind in ("FBW" if splits else "FB")}
    activation = listed(stages)
    own = [sum(a for a, s in zip(activation, placement, strict=True) if s == d) for d in range(max(placement) + 1)]
    caps = [slack * amount for amount in own]
    order = greedy(placement, count, Load(durations, listed(stages - 1), activation), caps)
    check(order)
    peaks = peak_memory(order, activation)
    assert all(peak <= cap * (1 + 1e-6) for peak, cap in zip(peaks, caps, strict=True))
    assert max(live_activations(order)) >= 1


@pytest.mark.parametrize("found", [None, 3.0])
def test_a_function_that_gives_no_costs_is_named(found):
    """As one without a return."""
    with pytest.raises(ScheduleError, match=r"costs\(4\) gives .*expected the Costs of one of 4 microbatches"):
        search(lambda count: found, 2, [4])
