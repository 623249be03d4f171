"""What a schedule of the user's gives is checked as rows of `Custom` are, and the message names the schedule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import ClassVar

import pytest

from manymesh.errors import ScheduleError
from manymesh.schedules import AbstractSchedule, Action, Costs, OneFOneB, Order, ZeroBubbleH1, search, simulate
from manymesh.schedules import _order_of as room

pytestmark = pytest.mark.once

GOOD = OneFOneB().order((0, 1), 2)
F0, F1 = Action("F", 0, 0), Action("F", 1, 0)


def mine(found: object, splits: bool = False) -> AbstractSchedule:
    """A schedule that gives one thing whatever it is asked for."""

    class Mine(AbstractSchedule):
        name: ClassVar[str] = "mine"
        splits_backward: ClassVar[bool] = splits

        def order(self, placement, num_microbatches, *, backward=True):
            return found

    return Mine()


def rows(change: Callable[[list[list[Action]]], object]) -> Order:
    """The good order with other rows."""
    lists = [list(row) for row in GOOD.rows]
    change(lists)
    return dataclasses.replace(GOOD, rows=tuple(map(tuple, lists)))


WRONG: dict[str, tuple[object, str]] = {
    "nothing": (None, "expected an Order, found NoneType; return Order("),
    "rows alone": (GOOD.rows, "expected an Order, found tuple; return Order("),
    "no rows": (Order((0, 1), 2, None), "expected one row of actions per submesh, found NoneType None."),  # type: ignore[arg-type]
    "words": (Order((0, 1), 2, (("a",), ("b",))), "row 0 holds 'a', expected actions such as Action("),  # type: ignore[arg-type]
    "a flat list": (Order((0, 1), 2, (F0, F1)), "row 0 is Action(kind='F', stage=0, microbatch=0), expected a"),  # type: ignore[arg-type]
    "fewer microbatches": (OneFOneB().order((0, 1), 1), "submesh 0 never lists F0@1; list each action"),
    "more microbatches": (OneFOneB().order((0, 1), 3), "submesh 0 lists F0@2, but microbatches are numbered 0 to 1."),
    "other stages": (OneFOneB().order((0, 1, 2), 2), "the schedule has 3 rows, but placement (0, 1) has 2 submeshes"),
    "other submeshes": (OneFOneB().order((1, 0), 2), "submesh 0 lists F1@0, but stage 1 is on submesh 1"),
    "forwards alone": (OneFOneB().order((0, 1), 2, backward=False), "submesh 0 never lists B0@0"),
    "one is missing": (rows(lambda r: r[1].pop()), "submesh 1 never lists B1@1; list each action"),
    "one too much": (rows(lambda r: r[1].append(F1)), "submesh 1 lists F1@0 twice; remove one of them."),
    "rows swapped": (rows(lambda r: r.reverse()), "submesh 0 lists F1@0, but stage 1 is on submesh 1"),
    "backward first": (rows(lambda r: r[1].reverse()), "submesh 1 lists B1@1 before B1@0; keep the microbatches"),
    "a circle": (
        rows(lambda r: r[0].sort(key=lambda a: (a.microbatch, a.kind))),
        "the schedule deadlocks: B0@0 waits for F0@0 waits for B0@0.",
    ),
    "weight gradients of a class without": (
        ZeroBubbleH1().order((0, 1), 2),
        "submesh 0 lists W0@0, but this program has only F, B actions; remove it. A schedule with W actions has the "
        "class attribute splits_backward = True.",
    ),
}


def test_an_exception_of_the_schedule_names_it() -> None:
    """Also where its ``order`` takes other arguments."""

    class Mine(AbstractSchedule):
        name: ClassVar[str] = "mine"

        def order(self, placement, num_microbatches):  # type: ignore[override]  # the mistake
            return GOOD

    with pytest.raises(TypeError, match="backward") as caught:
        room.order_of(Mine(), (0, 1), 2)
    assert caught.value.__notes__ == ["in schedule 'mine', order((0, 1), 2, backward=True)"]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_order_is_refused(case: str) -> None:
    found, words = WRONG[case]
    words = "^" + re.escape(f"schedule 'mine', order((0, 1), 2, backward=True): {words}")
    with pytest.raises(ScheduleError, match=words):
        room.order_of(mine(found), (0, 1), 2)
    with pytest.raises(ScheduleError, match=words):
        simulate(mine(found), 2, 2)
    with pytest.raises(ScheduleError, match=words):
        search(Costs(), 2, [2], schedules=[mine(found)])


def test_weight_gradients_that_the_class_says_are_wanted() -> None:
    with pytest.raises(ScheduleError, match="submesh 0 never lists W0@0"):
        room.order_of(mine(GOOD, splits=True), (0, 1), 2)


def test_backwards_of_a_forward_only_program_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"backward=False\): submesh 0 lists B0@0, but this program has only F"):
        simulate(mine(GOOD), 2, 2, backward=None)


def test_its_rows_say_what_an_order_is() -> None:
    """Rows of any kind, and a mark that was forgotten: what was asked for is known."""
    cut = ZeroBubbleH1().order((0, 1), 2)
    found = Order([0, 1], 2, [list(row) for row in cut.rows])  # type: ignore[arg-type]
    assert room.order_of(mine(found, splits=True), (0, 1), 2) == cut


def test_what_refuses_a_placement_is_left_out_of_a_search() -> None:
    class Picky(AbstractSchedule):
        name: ClassVar[str] = "picky"

        def order(self, placement, num_microbatches, *, backward=True):
            raise ScheduleError("only on Sundays")

    assert search(Costs(), 2, [2], schedules=[Picky(), "1f1b"]).schedule.name in ("1f1b", "custom")


def test_the_schedules_of_the_package_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "check", None)
    assert room.order_of(OneFOneB(), (0, 1), 2) == GOOD
