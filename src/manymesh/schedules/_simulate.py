"""Run a schedule on a clock, without devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._errors import ScheduleError
from ._check import check
from ._costs import Costs, Times
from ._draw import draw_html
from ._issue import issue_order
from ._order_of import order_of
from ._registry import get
from ._types import AbstractSchedule, Action, Order
from ._validate import validate, whole_number
from ._walk import producers


class Slot(NamedTuple):
    """One action on the clock.

    Attributes:
      submesh: where it runs.
      action: what runs.
      start: when it starts, in the unit of the given times.
      end: when it ends.
    """

    submesh: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs.

    Attributes:
      makespan: time from the start of the first action to the end of the last.
      bubble_fraction: the part of all submeshes' time in which they wait, in [0, 1):
        ``1 - work / (submeshes * makespan)``, over the submeshes that have a stage.
      longest_span: the longest time from a submesh's first start to its own last end. The
        zero-bubble papers measure this one, for steps that do not end in a barrier.
      live_activations: ``int[submesh]``, see `manymesh.schedules.live_activations`.
      timeline: every action with its times, sorted by submesh, then time.
    """

    makespan: float
    bubble_fraction: float
    longest_span: float
    live_activations: tuple[int, ...]
    timeline: tuple[Slot, ...]

    def __repr__(self) -> str:
        return (
            f"Simulation(makespan={self.makespan:g}, bubble_fraction={self.bubble_fraction:.3f}, "
            f"longest_span={self.longest_span:g}, live_activations={self.live_activations}, "
            f"timeline=<{len(self.timeline)} slots>)"
        )

    def _repr_html_(self) -> str:
        return draw_html(self)


def simulate(
    schedule: str | AbstractSchedule | Order,
    stages: int | None = None,
    num_microbatches: int | None = None,
    *,
    forward: Times = 1.0,
    backward: Times | None = 2.0,
    weight: Times | None = None,
    transfer: Times = 0.0,
    overhead: float = 0.0,
    placement: Sequence[int] | None = None,
) -> Simulation:
    """Run a schedule on a clock.

    Every submesh runs its row in order, each action as soon as its inputs are there.
    Transfers overlap with computation and with each other. Times are in any one unit.

    Args:
      schedule: a name, a schedule, or a ready order.
      stages: the number of stages; for a schedule with several stages on a submesh this
        counts all of them. Needless with an order or a placement.
      num_microbatches: the number of microbatches. Needless with an order.
      forward: ``float`` or ``float[stage]``, the time of a forward of one microbatch.
      backward: ``float`` or ``float[stage]``, the time of a whole backward, weight gradient
        included, whether or not the schedule splits it; None for a forward-only program.
      weight: ``float`` or ``float[stage]``, the part of `backward` that is the weight
        gradient; half of it by default. Counts only where the schedule splits the backward.
      transfer: ``float`` or ``float[stage - 1]``, the time that a value takes from a stage to
        the next, or back, when they are on different submeshes.
      overhead: time that each action takes besides.
      placement: ``int[stage]``, the submesh of each stage; the schedule's own by default.

    Returns:
      The makespan, the bubble, the live activations and the timeline.

    Raises:
      ScheduleError: the schedule is unknown or illegal, an argument is missing, or the times
        do not fit the stages.

    Example:
      >>> simulate("1f1b", stages=2, num_microbatches=4)
      Simulation(makespan=15, bubble_fraction=0.200, longest_span=15, live_activations=(2, 1), timeline=<16 slots>)
    """
    order = _resolve(schedule, stages, num_microbatches, placement, backward=backward is not None)
    live = check(order)
    costs = Costs(forward, backward, weight, transfer, overhead=overhead)
    durations = costs.durations(order.num_stages, splits_backward=order.splits_backward, backward=order.backward)
    hops = costs.transfers(order.num_stages)
    ends: dict[Action, float] = {}
    clocks = [0.0] * order.num_submeshes
    rows: list[list[Slot]] = [[] for _ in order.rows]
    for action in issue_order(order):
        submesh = order.placement[action.stage]
        start = clocks[submesh]
        for producer in producers(order, action):
            arrival = ends[producer]
            if order.placement[producer.stage] != submesh:
                arrival += hops[min(producer.stage, action.stage)]
            start = max(start, arrival)
        ends[action] = clocks[submesh] = start + durations[action.kind][action.stage]
        rows[submesh].append(Slot(submesh, action, start, clocks[submesh]))
    makespan = max(clocks)
    work = sum(order.num_microbatches * sum(times) for times in durations.values())
    used = sum(1 for row in rows if row)
    return Simulation(
        makespan=makespan,
        bubble_fraction=max(0.0, 1 - work / (used * makespan)) if makespan else 0.0,
        longest_span=max(row[-1].end - row[0].start for row in rows if row),
        live_activations=live,
        timeline=tuple(slot for row in rows for slot in row),
    )


def _resolve(
    schedule: str | AbstractSchedule | Order,
    stages: int | None,
    num_microbatches: int | None,
    placement: Sequence[int] | None,
    *,
    backward: bool,
) -> Order:
    for name, number in (("stages", stages), ("num_microbatches", num_microbatches)):
        if number is not None:
            whole_number(f"simulate: {name}", number)
    if isinstance(schedule, Order):
        given = {
            "stages": (stages, schedule.num_stages),
            "num_microbatches": (num_microbatches, schedule.num_microbatches),
        }
        for name, (said, has) in given.items():
            if said is not None and said != has:
                raise ScheduleError(f"simulate: {name}={said}, but the order has {has}; leave {name} out.")
        return schedule
    if num_microbatches is None:
        raise ScheduleError("simulate: a schedule by name or object needs num_microbatches=.")
    schedule = get(schedule)
    if placement is None:
        if stages is None:
            raise ScheduleError("simulate: a schedule by name or object needs stages= or placement=.")
        placement = schedule.default_placement(stages)
    placement = validate(getattr(schedule, "name", type(schedule).__name__), placement, num_microbatches)
    if stages is not None and stages != len(placement):
        raise ScheduleError(
            f"simulate: stages={stages}, but the placement {tuple(placement)} has {len(placement)}; leave stages out."
        )
    return order_of(schedule, placement, num_microbatches, backward=backward)
