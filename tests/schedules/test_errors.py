"""The text of every error outside the checker."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from manymesh.errors import ManyMeshError, ScheduleError
from manymesh.schedules import (
    AbstractSchedule,
    Action,
    Costs,
    Custom,
    GPipe,
    Interleaved1F1B,
    OneFOneB,
    Order,
    _registry,
    get,
    register,
    search,
    simulate,
)
from manymesh.schedules._greedy import Load, greedy

pytestmark = pytest.mark.once

KNOWN = (
    "Known: 1f1b, custom, dualpipev, eager-1f1b, gpipe, interleaved, wavefront, zbv, zero-bubble-h1, zero-bubble-h2."
)
UNITS = [1.0, 1.0]


class Ordered:
    """A schedule in all but its base class."""

    def order(self, placement: tuple[int, ...], num_microbatches: int) -> Order:
        return GPipe().order(placement, num_microbatches)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    # schedules
    "empty placement": (
        lambda: GPipe().order((), 4),
        "schedule 'gpipe': placement is empty; name the submesh of at least one stage.",
    ),
    "negative submesh": (
        lambda: OneFOneB().order((0, -1), 4),
        "schedule '1f1b': stage 1 is placed on submesh -1 in (0, -1); number submeshes from 0.",
    ),
    "no microbatch": (
        lambda: get("zbv").order((0, 0), 0),
        "schedule 'zbv': num_microbatches has to be a positive int, found int 0.",
    ),
    "half a microbatch": (
        lambda: OneFOneB().order((0, 1), 2.5),  # type: ignore[arg-type]
        "schedule '1f1b': num_microbatches has to be a positive int, found float 2.5.",
    ),
    "interleaved on a chain": (
        lambda: Interleaved1F1B(2).order((0, 1, 2), 4),
        "schedule 'interleaved' needs 2 stages on each submesh, dealt out in turn, for these submeshes "
        "(0, 1, 2, 0, 1, 2), but found (0, 1, 2); place the stages so or choose a schedule that takes any placement, "
        "such as '1f1b'.",
    ),
    "interleaved on a V": (
        lambda: get("interleaved").order((0, 1, 1, 0), 4),
        "schedule 'interleaved' needs 2 stages on each submesh, dealt out in turn, for these submeshes (0, 1, 0, 1), "
        "but found (0, 1, 1, 0); place the stages so",
    ),
    "no virtual stage": (
        lambda: Interleaved1F1B(0),
        "schedule 'interleaved': virtual_stages has to be a positive int, found int 0.",
    ),
    "virtual stages in words": (
        lambda: Interleaved1F1B("2"),  # type: ignore[arg-type]
        "schedule 'interleaved': virtual_stages has to be a positive int, found str '2'.",
    ),
    "interleaved stages": (
        lambda: Interleaved1F1B(3).default_placement(8),
        "schedule 'interleaved' with virtual_stages=3 needs a multiple of 3 stages, but found 8.",
    ),
    "zbv dealt out": (
        lambda: get("zbv").order((0, 1, 0, 1), 4),
        "schedule 'zbv' needs two stages on each submesh in a V, for these submeshes (0, 1, 1, 0), but found "
        "(0, 1, 0, 1); place the stages so",
    ),
    "dualpipev on a chain": (
        lambda: get("dualpipev").order((0, 1, 2), 4),
        "schedule 'dualpipev' needs two stages on each submesh in a V, for these submeshes (0, 1, 2, 2, 1, 0), but "
        "found (0, 1, 2); place",
    ),
    "many stages": (
        lambda: get("zbv").order((*range(32), *range(32)), 4),
        "for these submeshes (0..31, 31..0), but found (0..31, 0..31); place",
    ),
    "odd V": (
        lambda: get("zbv").default_placement(5),
        "schedule 'zbv' needs an even number of stages, two a submesh, but found 5.",
    ),
    "custom rows of text": (
        lambda: Custom((("F0@0",),)),  # type: ignore[arg-type]
        "schedule 'custom': row 0 holds 'F0@0', expected actions such as Action('F', stage, microbatch).",
    ),
    "custom without a stage": (
        lambda: Custom(((Action("F", 0, 0),),)).default_placement(2),
        "schedule 'custom': no row lists stage 1 of 2.",
    ),
    "custom for other microbatches": (
        lambda: Custom(GPipe().order((0, 1), 4).rows).order((0, 1), 5),
        "submesh 0 never lists F0@4; list each action",
    ),
    "forward only, twice": (
        lambda: Custom(((Action("F", 0, 0),) * 2,)).order((0,), 1, backward=False),
        "submesh 0 lists F0@0 twice; remove one of them.",
    ),
    "forward only, without a microbatch": (
        lambda: Custom(((Action("F", 0, 0),),)).order((0,), 2, backward=False),
        "submesh 0 never lists F0@1; list each action of its stages for each microbatch once.",
    ),
    "overhead in words": (lambda: Costs(overhead="1"), "overhead is '1'; give a number."),  # type: ignore[arg-type]
    # actions
    "another kind": (
        lambda: Action("X", 0, 0),  # type: ignore[arg-type]
        "Action: kind has to be one of 'F', 'B' and 'W', found 'X'.",
    ),
    "negative stage": (lambda: Action("F", -1, 0), "Action: stage has to be a whole number from 0, found -1."),
    "negative microbatch": (
        lambda: Action("B", 0, -2),
        "Action: microbatch has to be a whole number from 0, found -2.",
    ),
    "half a stage": (
        lambda: Action("F", 0.5, 0),  # type: ignore[arg-type]
        "Action: stage has to be a whole number from 0, found 0.5.",
    ),
    # costs
    "costs of no microbatch": (lambda: Costs().split(0), "split: num_microbatches is 0; give a positive number."),
    "negative costs": (lambda: Costs(forward=-1), "forward[0] is -1; give a finite number that is not negative."),
    "a negative cost": (
        lambda: Costs(activation=[1.0, -1.0]),
        "activation[1] is -1; give a finite number that is not negative.",
    ),
    "negative overhead": (
        lambda: Costs(overhead=-0.5),
        "overhead[0] is -0.5; give a finite number that is not negative.",
    ),
    "costs as text": (
        lambda: Costs(backward="12"),  # type: ignore[arg-type]
        "backward is '12'; give a number, or a list with one for each.",
    ),
    "no forward": (
        lambda: Costs(forward=None),  # type: ignore[arg-type]
        "forward is None; give a number, or a list with one for each.",
    ),
    # registry
    "unknown name": (
        lambda: get("zero-buble-h1"),
        f"unknown schedule 'zero-buble-h1'; did you mean 'zero-bubble-h1'? {KNOWN}",
    ),
    "an order": (
        lambda: get(GPipe().order((0, 1), 2)),  # type: ignore[arg-type]
        "write Custom(order.rows), which has this order.",
    ),
    "no schedule, though it has an order": (
        lambda: get(Ordered()),  # type: ignore[arg-type]
        "expected a schedule, found Ordered, which has an order and is none; write class Ordered(AbstractSchedule), of "
        "manymesh.schedules.",
    ),
    "other case": (lambda: get("GPipe"), f"unknown schedule 'GPipe'; did you mean 'gpipe'? {KNOWN}"),
    "nothing near": (lambda: get("xyz"), f"unknown schedule 'xyz'. {KNOWN}"),
    "no name": (
        lambda: get(3),  # type: ignore[arg-type]
        "expected the name of a schedule or a schedule, found 3; names: 1f1b, custom,",
    ),
    "a class": (
        lambda: get(GPipe),  # type: ignore[arg-type]
        "expected a schedule, found the class GPipe; write GPipe(...).",
    ),
    "needs rows": (
        lambda: get("custom"),
        "schedule 'custom' needs rows; give a schedule, such as Custom(rows), in place of its name, or custom_schedule= beside it.",
    ),
    "name taken": (
        lambda: register(OneFOneB, "gpipe"),
        "register: the name 'gpipe' is taken by <class 'manymesh.schedules.GPipe'>; choose another.",
    ),
    "nameless": (
        lambda: register(lambda: GPipe()),
        "has no name; give one as register(schedule, name).",
    ),
    # simulator
    "no microbatches": (
        lambda: simulate("gpipe", 4),
        "simulate: a schedule by name or object needs num_microbatches=.",
    ),
    "no stages": (
        lambda: simulate("gpipe", num_microbatches=4),
        "simulate: a schedule by name or object needs stages= or placement=.",
    ),
    "stages against placement": (
        lambda: simulate("gpipe", 3, 4, placement=(0, 1)),
        "simulate: stages=3, but the placement (0, 1) has 2; leave stages out.",
    ),
    "stages against order": (
        lambda: simulate(GPipe().order((0, 1), 2), stages=3),
        "simulate: stages=3, but the order has 2; leave stages out.",
    ),
    "microbatches against order": (
        lambda: simulate(GPipe().order((0, 1), 2), num_microbatches=3),
        "simulate: num_microbatches=3, but the order has 2; leave num_microbatches out.",
    ),
    "number of times": (
        lambda: simulate("gpipe", 2, 2, forward=[1.0]),
        "forward has 1 numbers, expected 2; give that many, or one for all.",
    ),
    "number of transfers": (
        lambda: simulate("gpipe", 3, 2, transfer=[1.0, 1.0, 1.0]),
        "transfer has 3 numbers, expected 2; give that many, or one for all.",
    ),
    "negative time": (
        lambda: simulate("gpipe", 2, 2, backward=[1.0, -1.0]),
        "backward[1] is -1; give a finite number that is not negative.",
    ),
    "endless time": (
        lambda: simulate("gpipe", 2, 2, forward=float("nan")),
        "forward[0] is nan; give a finite number that is not negative.",
    ),
    "weight beyond backward": (
        lambda: simulate("zero-bubble-h1", 2, 2, backward=1.0, weight=1.5),
        "weight=1.5 of stage 0 is more than its backward=1, which includes it.",
    ),
    # search
    "more submeshes than stages": (
        lambda: search(Costs(), 2, [4], submeshes=3),
        "search: 2 stages on 3 submeshes; give each submesh at least one stage.",
    ),
    "too little memory": (
        lambda: search(Costs(activation=8.0), 2, [2, 4], memory=1.0),
        "search: nothing fits the memory; the least that any schedule takes is 4 (1f1b, 4 microbatches, placement "
        "(0, 1): makespan 3.75, bubble 20.0%, memory 4). Use more microbatches or more memory.",
    ),
    "no placement fits": (
        lambda: search(Costs(), 2, [2], placements=[(0, 1)], schedules=["zbv"], memory=0.1),
        "search: no schedule admits any of the placements and numbers of microbatches. The last one says: submesh 0 "
        "needs 0.5 for one microbatch's activations, but may use 0.1; use more microbatches or more memory.",
    ),
    "placement of other stages": (
        lambda: search(Costs(), 3, [2], placements=[(0, 1)]),
        "search: the placement (0, 1) has 2 stages, expected 3; name the submesh of each stage.",
    ),
    "nothing to try": (
        lambda: search(Costs(), 2, []),
        "search: no schedule admits any of the placements and numbers of microbatches.",
    ),
    "list scheduling": (
        lambda: greedy((0, 0), 2, Load({"F": UNITS, "B": UNITS}, [0.0], UNITS), [1.5]),
        "submesh 0 needs 2 for one microbatch's activations, but may use 1.5; use more microbatches or more memory.",
    ),
}


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the published names, whatever other tests or examples have registered."""
    own = {
        name: factory for name, factory in _registry._factories.items() if f" {name}," in KNOWN or f" {name}." in KNOWN
    }
    monkeypatch.setattr(_registry, "_factories", own)


@pytest.mark.parametrize("case", CASES)
def test_the_text(case: str) -> None:
    act, message = CASES[case]
    with pytest.raises(ScheduleError, match=re.escape(message)):
        act()


def test_numbers_of_numpy_are_numbers() -> None:
    """As a placement that was computed has them."""
    assert OneFOneB().order(np.array([0, 1]), np.int64(4)).rows == OneFOneB().order((0, 1), 4).rows  # type: ignore[arg-type]


def test_a_schedule_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="unknown schedule"):
        get("nope")
    assert issubclass(ScheduleError, ManyMeshError)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("Schedule1F1B", "1f1b"),
        ("ScheduleGPipe", "gpipe"),
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("ScheduleZBVZeroBubble", "zbv"),
        ("Eager1F1B", "eager-1f1b"),
        ("ZeroBubble", "zero-bubble-h1"),
    ],
)
def test_names_of_other_systems_are_understood(theirs: str, ours: str) -> None:
    """Which say more around the same."""
    with pytest.raises(ScheduleError, match=f"did you mean '{ours}'"):
        get(theirs)


def test_users_register_their_own() -> None:
    """A registered class and a registered function are found by name; registering again changes nothing."""

    @dataclass(frozen=True)
    class OneByOne(AbstractSchedule):
        name: ClassVar[str] = "one-by-one"

        def order(self, placement, num_microbatches: int, *, backward: bool = True) -> Order:
            return GPipe().order(placement, num_microbatches, backward=backward)

    assert register(OneByOne) is OneByOne
    register(OneByOne)
    register(lambda: Interleaved1F1B(3), "interleaved-3")
    register(lambda *_, **options: Interleaved1F1B(**options), "any-options")
    assert get("any-options") == Interleaved1F1B()
    register(lambda: "1f1b", "a-name")
    with pytest.raises(ScheduleError, match=r"schedule 'a-name': <lambda>\(\) gives '1f1b', expected a schedule."):
        get("a-name")
    assert get("one-by-one") == OneByOne()
    assert get("interleaved-3") == Interleaved1F1B(3)
    assert simulate("one-by-one", 2, 4).makespan == simulate("gpipe", 2, 4).makespan


def test_a_schedule_is_its_own_name() -> None:
    schedule = Interleaved1F1B(3)
    assert get(schedule) is schedule
