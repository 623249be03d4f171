"""What Hypothesis draws for schedules: placements, times, legal orders; and a simple way to run an order."""

from __future__ import annotations

from hypothesis import strategies as st

from manymesh.schedules import AbstractSchedule, Action, Interleaved1F1B, Order, get

# Schedules that take any placement, and those that need their own.
ANYWHERE = ("gpipe", "1f1b", "eager-1f1b", "wavefront", "zero-bubble-h1", "zero-bubble-h2")
SHAPED = ("interleaved", "zbv", "dualpipev")
NAMED = ANYWHERE + SHAPED

times = st.floats(0.01, 10.0, allow_nan=False)


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, ...]:
    """Any map from stages to submeshes; submeshes may hold none, one or many stages, in any pattern."""
    return tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=9)))


@st.composite
def fitting(draw: st.DrawFn) -> tuple[AbstractSchedule, tuple[int, ...], int]:
    """A schedule, a placement that it admits, and a number of microbatches."""
    name = draw(st.sampled_from(NAMED))
    count = draw(st.integers(1, 20))
    if name in ANYWHERE:
        return get(name), draw(placements()), count
    submeshes = tuple(draw(st.permutations(range(draw(st.integers(1, 5))))))
    if name == "interleaved":
        virtual = draw(st.integers(1, 4))
        return draw(st.sampled_from([get(name), Interleaved1F1B(virtual)])), submeshes * virtual, count
    return get(name), submeshes + submeshes[::-1], count


@st.composite
def orders(draw: st.DrawFn, backward: bool | None = None) -> Order:
    """A legal order of any registered kind."""
    schedule, placement, count = draw(fitting())
    backward = draw(st.booleans()) if backward is None else backward
    return schedule.order(placement, count, backward=backward)


def reference_run(order: Order) -> list[Action]:
    """Run the rows in the most simple way: whatever is next and has its producers, over and over."""
    done: list[Action] = []
    ready: set[Action] = set()
    queues = [list(row) for row in order.rows]

    def can_run(a: Action) -> bool:
        needs = {
            "F": [Action("F", a.stage - 1, a.microbatch)] if a.stage else [],
            "B": [Action("F", a.stage, a.microbatch)]
            + ([Action("B", a.stage + 1, a.microbatch)] if a.stage + 1 < order.num_stages else []),
            "W": [Action("B", a.stage, a.microbatch)],
        }
        return all(need in ready for need in needs[a.kind])

    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and can_run(queue[0]):
                done.append(queue[0])
                ready.add(queue.pop(0))
                moved = True
    return done
