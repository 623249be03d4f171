"""What the watch concludes from what it hears, without processes: it hears some of what others do, and late."""

from __future__ import annotations

import itertools

import pytest

from manymesh._distributed._watch import Watch
from manymesh._distributed._world import Doing, Progress, Waiting, World

pytestmark = pytest.mark.once


class _Wires:
    """Notes what would be told to neighbours."""

    def __init__(self) -> None:
        self.told: list[dict[str, object]] = []

    def flood(self, message: dict[str, object], besides: int | None = None) -> None:
        self.told.append(message)

    def post(self, peer: int, message: dict[str, object]) -> None:
        pass


def watch_of_the_first() -> tuple[Watch, list[str]]:
    """The watch of process 0 of two, and why it would have ended the process."""
    world = World(0, 2, _Wires(), "localhost", 1.0, 1.0)  # type: ignore[arg-type]
    world.progress = {1: Progress()}
    watch, ends = Watch(world), []
    watch.end = lambda why, *_, **__: ends.append(why)  # type: ignore[method-assign]
    return watch, ends


def told(kind: str, calls: int, label: str, busy: str = "") -> dict[str, object]:
    return {"kind": kind, "origin": 1, "calls": calls, "label": label, "busy": busy}


def waits(watch: Watch, calls: int, label: str) -> None:
    """Process 0 is in something that is not finished."""
    watch.world.doing = Doing(calls, label, "")
    watch.world.waiting = Waiting(calls, label, frozenset({1}), lambda: False, lambda: "")


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_who_does_the_same_is_left_alone_however_little_was_heard_of_the_other(count: int, left: bool) -> None:
    things = {number: f"thing {number}" for number in range(1, count + 1)}
    for heard in itertools.chain.from_iterable(itertools.combinations(things, n) for n in range(count + 1)):
        for here in things:
            watch, ends = watch_of_the_first()
            for number in heard:
                watch._hear(1, told("progress", number, things[number]))
            if left:
                watch._hear(1, told("left", count, things[count]))
            waits(watch, here, things[here])
            watch._look(0.01)
            assert not ends, (heard, here)


@pytest.mark.parametrize("kind", ["progress", "left"])
def test_who_does_something_else_at_the_same_place_is_found(kind: str) -> None:
    watch, ends = watch_of_the_first()
    watch._hear(1, told("progress", 1, "call 1 of step"))
    watch._hear(1, told(kind, 2, "call 2 of step"))
    waits(watch, 2, "manymesh.fetch")
    watch._look(0.01)
    assert ends == ["process 1 is in call 2 of step, while this one is in manymesh.fetch"]


def test_who_has_left_too_early_is_given_its_time() -> None:
    watch, ends = watch_of_the_first()
    watch._hear(1, told("left", 2, "call 2 of step"))
    waits(watch, 3, "manymesh.fetch")
    watch._look(0.9)
    assert not ends
    watch._look(0.9)
    assert ends == ["the script of process 1 has ended, after 2 calls"]


def test_what_is_old_is_not_noted_nor_passed_on() -> None:
    watch, _ = watch_of_the_first()
    wires: _Wires = watch.world.wires  # type: ignore[assignment]
    watch._hear(1, told("progress", 3, "c"))
    watch._hear(1, told("progress", 2, "b"))
    watch._hear(1, told("left", 3, "c"))
    watch._hear(1, told("progress", 3, "c"))
    assert [(m["kind"], m["calls"]) for m in wires.told] == [("progress", 3), ("left", 3)]
    known = watch.world.progress[1]
    assert (known.calls, known.label, known.left) == (3, "c", True)
