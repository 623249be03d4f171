"""Each rule of the checker fails where an order breaks it, and says so."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from manymesh.errors import ScheduleError
from manymesh.schedules import Action, Order, check, get, issue_order, simulate
from schedules.strategies import orders, reference_run

pytestmark = pytest.mark.once


def row(text: str) -> tuple[Action, ...]:
    """`F0@1 B0@1` as actions."""
    return tuple(Action(word[0], *map(int, word[1:].split("@"))) for word in text.split())


def order(*rows: str, placement: tuple[int, ...] = (0, 1), count: int = 2, **more: bool) -> Order:
    return Order(placement, count, tuple(map(row, rows)), **more)


FIRST = "F0@0 F0@1 B0@0 B0@1"
SECOND = "F1@0 B1@0 F1@1 B1@1"

BROKEN = {
    "rows": (
        order(FIRST),
        "the schedule has 1 rows, but placement (0, 1) has 2 submeshes; give one row per submesh.",
    ),
    "weight gradient without a split": (
        order(FIRST, SECOND + " W1@0"),
        "submesh 1 lists W1@0, but this program has only F, B actions; remove it.",
    ),
    "backward in a forward-only program": (
        order(FIRST, SECOND, backward=False),
        "submesh 0 lists B0@0, but this program has only F actions; remove it.",
    ),
    "stage": (order(FIRST + " F2@0", SECOND), "submesh 0 lists F2@0, but stages are numbered 0 to 1."),
    "microbatch": (order(FIRST + " F0@2", SECOND), "submesh 0 lists F0@2, but microbatches are numbered 0 to 1."),
    "submesh": (
        order(FIRST + " F1@0", SECOND),
        "submesh 0 lists F1@0, but stage 1 is on submesh 1; move it to row 1.",
    ),
    "twice": (order("F0@0 F0@0 F0@1 B0@0 B0@1", SECOND), "submesh 0 lists F0@0 twice; remove one of them."),
    "microbatch order": (
        order("F0@0 F0@1 B0@1 B0@0", SECOND),
        "submesh 0 lists B0@1 before B0@0; keep the microbatches of a stage in order, because gradients accumulate "
        "in that order.",
    ),
    "first one missing": (
        order("F0@1 B0@0 B0@1", SECOND),
        "submesh 0 never lists F0@0; list each action of its stages for each microbatch once.",
    ),
    "last one missing": (
        order(FIRST, "F1@0 B1@0 F1@1"),
        "submesh 1 never lists B1@1; list each action of its stages for each microbatch once.",
    ),
    "weight gradient missing": (
        order(FIRST + " W0@0 W0@1", SECOND + " W1@0", splits_backward=True),
        "submesh 1 never lists W1@1; list each action of its stages for each microbatch once.",
    ),
    "backward before its forward": (
        order("B0@0 F0@0 F0@1 B0@1", SECOND),
        "the schedule deadlocks: B0@0 waits for F0@0 waits for B0@0. In it submesh 0 lists B0@0, which reads F0@0, "
        "before F0@0; move one of them so that the circle opens.",
    ),
    "last stage backward before its forward": (
        order(FIRST, "B1@0 F1@0 F1@1 B1@1"),
        "the schedule deadlocks: B1@0 waits for F1@0 waits for B1@0. In it submesh 1 lists B1@0, which reads F1@0, "
        "before F1@0; move",
    ),
    "weight gradient before its backward": (
        order("F0@0 W0@0 B0@0", placement=(0,), count=1, splits_backward=True),
        "the schedule deadlocks: W0@0 waits for B0@0 waits for W0@0. In it submesh 0 lists W0@0, which reads B0@0, "
        "before B0@0; move",
    ),
    "two submeshes in a circle": (
        order("F0@0 B0@0 F0@1 B0@1", "F1@0 F1@1 B1@0 B1@1"),
        "the schedule deadlocks: F0@1 waits for B1@0 waits for F0@1. In it submesh 0 lists B0@0, which reads B1@0, "
        "before F0@1, and submesh 1 lists F1@1, which reads F0@1, before B1@0; move",
    ),
    "three submeshes in a circle": (
        order("F0@0 F3@0 B0@0 B3@0", "F1@0 B1@0", "F2@0 B2@0", placement=(0, 1, 2, 0), count=1),
        "the schedule deadlocks: B1@0 waits for B2@0 waits for B3@0 waits for B1@0. In it B1@0 reads B2@0, and B2@0 "
        "reads B3@0, and submesh 0 lists B0@0, which reads B1@0, before B3@0; move one",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_order_is_refused(rule: str) -> None:
    broken, message = BROKEN[rule]
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check(broken)


def test_the_unbroken_order_is_accepted() -> None:
    assert check(order(FIRST, SECOND)) == (2, 1)


def test_labels_name_the_actions() -> None:
    """The caller's names for tasks appear in the circle, in the order in which each waits for the next."""
    tasks = ("front", "back")
    front = "F0@0 F0@1 F0@2 B0@0 B0@1 F0@3 B0@2 B0@3"
    back = "F1@0 B1@0 F1@1 F1@2 F1@3 B1@1 B1@2 B1@3"
    with pytest.raises(ScheduleError) as caught:
        check(order(front, back, count=4), labels=lambda a: f"{tasks[a.stage]}:{a.kind}{a.microbatch}")
    assert "front:F3 waits for back:B1 waits for front:F3. In it submesh 0 lists front:B1, which reads" in str(
        caught.value
    )


@pytest.mark.parametrize("use", [issue_order, simulate])
def test_a_deadlock_is_named_wherever_it_is_met(use: Callable[[Order], object]) -> None:
    with pytest.raises(ScheduleError, match="the schedule deadlocks: F0@1 waits for B1@0 waits for F0@1"):
        use(order("F0@0 B0@0 F0@1 B0@1", "F1@0 F1@1 B1@0 B1@1"))


@given(orders(), st.data())
def test_leaving_one_out_is_refused(legal: Order, data: st.DataObject) -> None:
    submesh = data.draw(st.sampled_from([s for s, r in enumerate(legal.rows) if r]))
    position = data.draw(st.integers(0, len(legal.rows[submesh]) - 1))
    kept = legal.rows[submesh]
    rows = [*legal.rows]
    rows[submesh] = kept[:position] + kept[position + 1 :]
    with pytest.raises(ScheduleError, match=f"never lists {kept[position]}"):
        check(dataclasses.replace(legal, rows=tuple(rows)))


@given(orders(), st.data())
def test_repeating_one_is_refused(legal: Order, data: st.DataObject) -> None:
    submesh = data.draw(st.sampled_from([s for s, r in enumerate(legal.rows) if r]))
    again = data.draw(st.sampled_from(legal.rows[submesh]))
    rows = [*legal.rows]
    rows[submesh] = (*rows[submesh], again)
    with pytest.raises(ScheduleError, match=f"lists {again} twice"):
        check(dataclasses.replace(legal, rows=tuple(rows)))


@given(orders(), st.data())
def test_moving_one_is_refused_exactly_if_it_cannot_run(legal: Order, data: st.DataObject) -> None:
    """The checker and a simpler run agree on every order that has all actions in microbatch order."""
    submesh = data.draw(st.sampled_from([s for s, r in enumerate(legal.rows) if r]))
    moved = [*legal.rows[submesh]]
    source = data.draw(st.integers(0, len(moved) - 1))
    action = moved.pop(source)
    # Between the microbatches before and after it, so that no other rule is broken.
    same = [p for p, a in enumerate(moved) if (a.kind, a.stage) == (action.kind, action.stage)]
    least = max((p + 1 for p in same if p < source), default=0)
    most = min((p for p in same if p >= source), default=len(moved))
    moved.insert(data.draw(st.integers(least, most)), action)
    rows = [*legal.rows]
    rows[submesh] = tuple(moved)
    changed = dataclasses.replace(legal, rows=tuple(rows))
    if len(reference_run(changed)) == sum(map(len, rows)):
        check(changed)
    else:
        with pytest.raises(ScheduleError, match="deadlocks") as caught:
            check(changed)
        _verify_circle(changed, str(caught.value))


def _verify_circle(broken: Order, message: str) -> None:
    """Each in the circle waits for the next: it reads it, or its submesh lists before it something that does."""
    text, _, reasons = message.removeprefix("the schedule deadlocks: ").partition(". In it ")
    circle = [row(word)[0] for word in text.split(" waits for ")]
    assert circle[0] == circle[-1]
    assert len(circle) > 2
    reads = {
        "F": lambda a: [Action("F", a.stage - 1, a.microbatch)] if a.stage else [],
        "B": lambda a: [Action("F", a.stage, a.microbatch), Action("B", a.stage + 1, a.microbatch)],
        "W": lambda a: [Action("B", a.stage, a.microbatch)],
    }
    for waits, awaited in zip(circle, circle[1:], strict=False):
        home = broken.rows[broken.placement[waits.stage]]
        before = home[: home.index(waits) + 1]
        because = [a for a in before if awaited in reads[a.kind](a)]
        behind = awaited in home and home.index(awaited) < home.index(waits)
        assert because or behind, f"{waits} does not wait for {awaited}"
        said = [f"{a}{which} reads {awaited}" for a in because for which in ("", ", which")]
        assert behind or any(words in reasons for words in said)


@given(orders(backward=True), st.data())
def test_swapping_two_microbatches_is_refused(legal: Order, data: st.DataObject) -> None:
    assume(legal.num_microbatches > 1)
    submesh = data.draw(st.sampled_from([s for s, r in enumerate(legal.rows) if r]))
    first = data.draw(st.sampled_from([a for a in legal.rows[submesh] if a.microbatch + 1 < legal.num_microbatches]))
    second = dataclasses.replace(first, microbatch=first.microbatch + 1)
    swap = {first: second, second: first}
    rows = [*legal.rows]
    rows[submesh] = tuple(swap.get(a, a) for a in rows[submesh])
    with pytest.raises(ScheduleError, match=f"lists {second} before {first}; keep the microbatches"):
        check(dataclasses.replace(legal, rows=tuple(rows)))


def test_a_misplaced_row_is_refused() -> None:
    legal = get("1f1b").order((0, 1), 3)
    with pytest.raises(ScheduleError, match="submesh 0 lists F1@0, but stage 1 is on submesh 1; move it to row 1"):
        check(dataclasses.replace(legal, rows=legal.rows[::-1]))
