"""What the watch concludes from what it hears, without processes: it hears some of what others do, and late."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from manymesh._distributed._initialize import _leave
from manymesh._distributed._watch import Watch
from manymesh._distributed._world import Doing, Waiting, World
from manymesh.errors import ProcessError

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
    world.progress = {1: Doing()}
    watch, ends = Watch(world), []
    watch.end = lambda why, *_, **__: ends.append(why)  # type: ignore[method-assign]
    return watch, ends


def told(calls: int, label: str, left: bool = False) -> dict[str, object]:
    """What process 1 says of itself, as it goes on or as its script ends."""
    wires = _Wires()
    other = World(1, 2, wires, "localhost", 1.0, 1.0, doing=Doing(calls, label))  # type: ignore[arg-type]
    other.progress = {0: Doing(left=True)}
    if left:
        _leave(other)
    else:
        Watch(other)._look(0.01)
    return wires.told[-1]


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
                watch._hear(1, told(number, things[number]))
            if left:
                watch._hear(1, told(count, things[count], left=True))
            waits(watch, here, things[here])
            watch._look(0.01)
            assert not ends, (heard, here)


@pytest.mark.parametrize("left", [False, True])
def test_who_does_something_else_at_the_same_place_is_found(left: bool) -> None:
    watch, ends = watch_of_the_first()
    watch._hear(1, told(1, "call 1 of step"))
    watch._hear(1, told(2, "call 2 of step", left))
    waits(watch, 2, "manymesh.fetch")
    watch._look(0.01)
    assert ends == ["process 1 is in call 2 of step, while this one is in manymesh.fetch"]


def test_who_has_left_too_early_is_given_its_time() -> None:
    watch, ends = watch_of_the_first()
    watch._hear(1, told(2, "call 2 of step", left=True))
    waits(watch, 3, "manymesh.fetch")
    watch._look(0.9)
    assert not ends
    watch._look(0.9)
    assert ends == ["the script of process 1 has ended, after 2 calls, compilations and fetches"]
    assert watch._more() == "; the last thing that process 1 did is call 2 of step"


def test_who_compiles_for_other_arguments_is_told_of_with_them() -> None:
    watch, ends = watch_of_the_first()
    other = World(1, 2, _Wires(), "localhost", 1.0, 1.0)  # type: ignore[arg-type]
    other.begin("call 1 of step")
    other.begin("the compilation of step", busy="compiling", unlike="args[1] is float32[4] and was float32[8]")
    watch._hear(1, {"kind": "progress", "origin": 1, **other.doing._asdict()})
    waits(watch, 1, "call 1 of step")
    assert watch._more() == ""
    waits(watch, 2, "call 2 of step")
    watch._look(0.01)
    assert ends == ["process 1 is in the compilation of step, while this one is in call 2 of step"]
    assert watch._more().startswith(
        "; in process 1 args[1] is float32[4] and was float32[8]. Every process has to call"
    )


def test_arguments_that_came_otherwise_are_found_also_where_nobody_waits_for_them() -> None:
    """Of a step whose arguments each process brings where they belong by itself, in this call or one before."""
    for ways, wrong in (((1, 0, 0, 0), False), ((1, 0, 1, 0), True)):
        watch, ends = watch_of_the_first()
        other = World(1, 2, _Wires(), "localhost", 1.0, 1.0)  # type: ignore[arg-type]
        for given in ways:
            other.begin("a call of step", given=given)
        message = {"kind": "progress", "origin": 1, **other.doing._asdict()}
        for given in (1, 0, 0):
            watch.world.begin("a call of step", given=given)
        watch._hear(1, message)
        watch._look(0.01)
        assert not ends  # this process has not come so far
        watch.world.begin("a call of step")
        watch._look(0.01)
        assert bool(ends) is wrong
    assert ends[0].startswith(
        "process 1 called a step with arguments that were put elsewhere than here, in a call of step or before; every process has"
    )


def test_who_is_late_may_only_be_slow() -> None:
    watch, ends = watch_of_the_first()
    watch._hear(1, told(2, "call 2 of step"))
    waits(watch, 3, "call 3 of step")
    for _ in range(4):  # in the first it is seen to have gone on
        assert not ends
        watch._hear(1, {"kind": "alive"})
        watch._look(0.9)
    assert ends == [
        "process 1 has not come to call 3 of step for 1 s; every process has to call the same steps in the same order (it has "
        "done 2 calls, compilations and fetches, the last was call 2 of step; one that is only slow in between needs a larger "
        "stall_timeout= of manymesh.distributed.initialize)"
    ]


def test_who_goes_on_is_not_behind_however_far_this_process_runs_ahead() -> None:
    """Steps of a millisecond: what is heard of another is always older than what was begun here since."""
    watch, ends = watch_of_the_first()
    for number in range(1, 20):
        watch._hear(1, told(number, f"call {number} of step"))
        waits(watch, number + 50, f"call {number + 50} of step")
        watch._look(0.5)
    assert not ends
    for _ in range(5):
        watch._hear(1, {"kind": "alive"})
        watch._look(0.5)
    assert ends[0].startswith("process 1 has not come to call 69 of step for 1 s")


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_an_exception_ended_elsewhere_does_not_finish(goes_on: bool) -> None:
    """The script there may have caught it, and have gone on or left; what was still to come does not come."""
    watch, ends = watch_of_the_first()
    wires = _Wires()
    other = World(1, 2, wires, "localhost", 1.0, 1.0)  # type: ignore[arg-type]
    other.progress = {0: Doing(left=True)}
    other.fails(other.begin("call 1 of step"), "ValueError: no such file")
    if goes_on:
        other.begin("call 2 of step")
        Watch(other)._look(0.01)
    else:
        _leave(other)
    watch._hear(1, wires.told[-1])
    waits(watch, 1, "call 1 of step")
    watch._look(0.9)
    assert not ends
    watch._hear(1, {"kind": "alive"})
    watch._look(0.9)
    assert ends == ["process 1 did not finish call 1 of step, which ended there with ValueError: no such file"]
    ends.clear()
    watch.world.waiting = None  # this process had all that it wanted
    for _ in range(5):
        watch._hear(1, {"kind": "alive"})
        watch._look(0.9)
    assert not ends


def test_what_is_old_is_not_noted_nor_passed_on() -> None:
    watch, _ = watch_of_the_first()
    wires: _Wires = watch.world.wires  # type: ignore[assignment]
    watch._hear(1, told(3, "c"))
    watch._hear(1, told(2, "b"))
    watch._hear(1, told(3, "c", left=True))
    watch._hear(1, told(3, "c"))
    assert [(m["calls"], m["left"]) for m in wires.told] == [(3, False), (3, True)]
    assert watch.world.progress[1] == Doing(3, "c", "", True)


class _Late:
    """A store of a busy machine, which answers late; a text is written after somebody has given up waiting for it."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.looks = 0

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        self.looks += 1
        if key not in self.texts or milliseconds < 100:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.texts[key]

    def key_value_try_get(self, key: str) -> str:
        self.looks += 1
        if key not in self.texts:
            raise RuntimeError("NOT_FOUND")
        return self.texts[key]


def test_what_another_process_wrote_before_it_went_on_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes between two looks, and goes on; that it is somewhere else by then is no reason to give up."""
    store = _Late()
    world = World(0, 2, _Wires(), "localhost", 1.0, 1.0)  # type: ignore[arg-type]
    monkeypatch.setattr(World, "store", store)

    def gone_on() -> None:
        store.texts["manymesh/agree/7/1"] = "said"
        raise ProcessError("process 1 is in call 8")

    assert world.read("agree/7/1", check=gone_on) == "said"
    assert store.looks == 2
    store.texts.clear()

    def elsewhere() -> None:
        raise ProcessError("process 1 is in call 8")

    with pytest.raises(ProcessError, match="call 8"):
        world.read("agree/7/1", check=elsewhere)


def test_threads_do_not_call_side_by_side():
    """They keep no order between processes; a call within a call of the same thread is part of it."""

    def calls():
        with world.in_turn("eval"):
            return "done"

    world = World(0, 2, _Wires(), "localhost", 1.0, 1.0)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        with world.in_turn("train"), world.in_turn("fetch"):
            world.begin("call 3 of train")
            with pytest.raises(ProcessError, match="eval is called by a thread while another .* in call 3 of train"):
                pool.submit(calls).result()
        assert pool.submit(calls).result() == "done"
