"""What every schedule promises, over any placement that it admits and any number of microbatches."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manymesh.schedules import Action, Order, check, get, issue_order, live_activations, names
from schedules.strategies import ANYWHERE, NAMED, fitting, orders, placements, reference_run

pytestmark = pytest.mark.once


def test_the_published_names_are_registered() -> None:
    assert {*NAMED, "custom"} <= set(names())


@given(orders())
def test_each_order_is_legal(order: Order) -> None:
    """The checker accepts it, and so does a simpler one."""
    check(order)
    assert len(reference_run(order)) == sum(map(len, order.rows))


@given(fitting(), st.booleans())
def test_each_action_once_on_its_submesh(case, backward: bool) -> None:
    schedule, placement, count = case
    order = schedule.order(placement, count, backward=backward)
    kinds = "F" if not backward else "FBW" if schedule.splits_backward else "FB"
    expected = {Action(kind, s, m) for kind in kinds for s in range(len(placement)) for m in range(count)}
    found = [action for row in order.rows for action in row]
    assert len(found) == len(expected)
    assert set(found) == expected
    assert all(order.placement[a.stage] == submesh for submesh, row in enumerate(order.rows) for a in row)
    assert order.placement == tuple(placement)
    assert order.num_microbatches == count
    assert order.num_submeshes == max(placement) + 1
    assert order.backward is backward
    assert order.splits_backward is (backward and schedule.splits_backward)


@given(orders())
def test_microbatches_increase_on_each_stage(order: Order) -> None:
    """Gradients accumulate in microbatch order whatever the schedule."""
    for row in order.rows:
        seen: dict[tuple[str, int], list[int]] = {}
        for action in row:
            seen.setdefault((action.kind, action.stage), []).append(action.microbatch)
        assert all(found == list(range(order.num_microbatches)) for found in seen.values())


@given(orders())
def test_issue_order_interleaves_the_rows(order: Order) -> None:
    """It holds each row in its order, and every action behind its producers."""
    issued = issue_order(order)
    for submesh, row in enumerate(order.rows):
        assert tuple(a for a in issued if order.placement[a.stage] == submesh) == row
    one_thread = dataclasses.replace(order, placement=(0,) * order.num_stages, rows=(issued,))
    assert reference_run(one_thread) == list(issued)


@pytest.mark.parametrize("name", NAMED)
def test_issue_order_feeds_all_submeshes_early(name: str) -> None:
    """While the pipeline fills, no submesh gets a second action before its successor got what it can run."""
    schedule = get(name)
    order = schedule.order(schedule.default_placement(8), 16)
    issued = issue_order(order)
    first = {submesh: None for submesh in range(order.num_submeshes)}
    for position, action in enumerate(issued):
        submesh = order.placement[action.stage]
        if first[submesh] is None:
            first[submesh] = position
    # Submesh d waits for d hops; in the meantime each submesh before it has at most one turn a hop.
    assert all(first[d] <= d * (d + 1) for d in first)


@given(orders())
def test_live_activations_are_the_open_intervals(order: Order) -> None:
    frees = "W" if order.splits_backward else "B"
    expected = []
    for row in order.rows:
        at = {action: position for position, action in enumerate(row)}
        opened = [(at[a], at[Action(frees, a.stage, a.microbatch)]) for a in row if a.kind == "F" and order.backward]
        expected.append(max((sum(f <= p <= b for f, b in opened) for p in range(len(row))), default=0))
    assert live_activations(order) == tuple(expected) == check(order)


@given(placements(), st.integers(1, 12))
def test_stages_that_share_a_submesh_keep_their_published_order(placement: tuple[int, ...], count: int) -> None:
    """Merging stages on a submesh changes no stage's own order."""
    hops = [sum(a != b for a, b in zip(placement[s:], placement[s + 1 :], strict=False)) for s in range(len(placement))]
    order = get("1f1b").order(placement, count)
    for stage, hop in enumerate(hops):
        own = [a for a in order.rows[placement[stage]] if a.stage == stage]
        assert [a.kind for a in own[: min(hop, count)]] == ["F"] * min(hop, count)
        pairs = own[min(hop, count) : len(own) - min(hop, count)]
        assert [a.kind for a in pairs] == ["F", "B"] * (len(pairs) // 2)


def test_a_shared_submesh_serves_backwards_and_later_stages_first() -> None:
    """So that what has entered the pipeline leaves it."""
    order = get("1f1b").order((0, 1, 1, 0), 4)
    assert str(order).splitlines() == [
        "submesh 0: F0@0 F0@1 F0@2 F3@0 B3@0 F3@1 B3@1 B0@0 F3@2 B3@2 F0@3 B0@1 F3@3 B3@3 B0@2 B0@3",
        "submesh 1: F1@0 F2@0 F1@1 F2@1 B2@0 B1@0 F1@2 F2@2 B2@1 B1@1 F1@3 F2@3 B2@2 B1@2 B2@3 B1@3",
    ]


@given(placements(), st.integers(1, 12), st.sampled_from(ANYWHERE))
def test_a_forward_only_program_keeps_no_activations(placement: tuple[int, ...], count: int, name: str) -> None:
    order = get(name).order(placement, count, backward=False)
    assert check(order) == (0,) * order.num_submeshes
    assert all(action.kind == "F" for row in order.rows for action in row)


@pytest.mark.parametrize(("stages", "count"), [(1, 4), (2, 4), (3, 5), (4, 8), (8, 16), (8, 3), (5, 1)])
@pytest.mark.parametrize("name", NAMED)
def test_the_table_of_sizes(name: str, stages: int, count: int) -> None:
    """`stages` submeshes, with two stages on each where the schedule wants that; fewer microbatches too."""
    schedule = get(name)
    total = stages if name in ANYWHERE else 2 * stages
    check(schedule.order(schedule.default_placement(total), count))


@pytest.mark.parametrize("name", NAMED)
def test_planning_is_fast(name: str) -> None:
    """64 stages and 512 microbatches; linear algorithms take well under a second, others minutes."""
    schedule = get(name)
    start = time.process_time()
    order = schedule.order(schedule.default_placement(64), 512)
    check(order)
    issue_order(order)
    assert time.process_time() - start < 20


@pytest.mark.parametrize("placement", [(0,) * 64, tuple(range(8)) * 8, tuple(range(64))], ids=["one", "dealt", "chain"])
def test_planning_is_fast_on_any_placement(placement: tuple[int, ...]) -> None:
    start = time.process_time()
    order = get("zero-bubble-h1").order(placement, 512)
    check(order)
    issue_order(order)
    assert time.process_time() - start < 20


def test_48_stages_on_8_submeshes() -> None:
    placement = tuple(range(8)) * 6
    for name in ("1f1b", "interleaved", "zero-bubble-h1", "gpipe"):
        check(get(name).order(placement, 64))
