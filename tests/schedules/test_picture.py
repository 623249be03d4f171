"""Pictures of timelines."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manymesh.schedules import Order, get, picture, simulate
from schedules.strategies import NAMED, orders, times

pytestmark = pytest.mark.once


@given(orders(), st.data())
def test_it_fits(order: Order, data: st.DataObject) -> None:
    """One row per submesh of at most 100 columns, whatever the times."""
    forward = data.draw(st.lists(times, min_size=order.num_stages, max_size=order.num_stages))
    lines = picture(simulate(order, forward=forward)).splitlines()
    assert len(lines) == order.num_submeshes + 1
    assert max(map(len, lines[:-1])) <= 100
    assert len({len(line) for line in lines[:-1]}) == 1
    assert all(re.fullmatch(r" *\d+ \| [0-9a-z<>.~ ]+", line) for line in lines[:-1])


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("count", [1, 8, 64, 1000])
def test_every_schedule_fits(name: str, count: int) -> None:
    schedule = get(name)
    lines = picture(schedule.order(schedule.default_placement(16), count)).splitlines()
    assert max(map(len, lines)) <= 120
    assert max(map(len, lines[:-1])) <= 100


def test_zero_bubble_h1() -> None:
    """F, B and W differ without colour, and each says its microbatch."""
    assert picture(get("zero-bubble-h1").order((0, 1, 2), 4)).splitlines() == [
        "0 | 0>1>2>....0<0w3>1<1w2<2w3<3w",
        "1 | ..0>1>..0<2>1<0w3>2<1w3<2w3w",
        "2 | ....0>0<1>1<2>2<0w3>3<1w2w3w",
        "> forward  < backward  w weight gradient  . waiting; makespan 14, bubble 14.3%",
    ]


def test_letters_tell_stages_of_one_submesh_apart() -> None:
    lines = picture(get("interleaved").order((0, 1, 0, 1), 2)).splitlines()
    assert lines[0].startswith("0 | a0>a1>b0>b1>")
    assert lines[1].startswith("1 | ...a0>a1>b0>b0<<<<b1>b1<<<<a0<<<<")


def test_the_middle_of_a_long_one_is_left_out() -> None:
    lines = picture(get("1f1b").order((0, 1), 64)).splitlines()
    assert all(" ~ " in line for line in lines)
    assert lines[0].startswith("0 | 0>>1>>......0<<<<<2>>1<<<<<3>>")
    assert lines[0].endswith("63<<<<")
    assert "~ left out" in lines[-1]


def test_nothing_to_show() -> None:
    assert picture(simulate("gpipe", 1, 1, forward=0.0, backward=0.0)).splitlines()[0] == "0 | <"
