"""Find the schedule, the placement and the number of microbatches that finish first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .._errors import ScheduleError
from ._costs import Costs, per_stage
from ._custom import Custom
from ._greedy import Load, greedy
from ._live import peak_memory
from ._order_of import proved
from ._placements import described
from ._registry import get, names
from ._simulate import Simulation, simulate
from ._types import AbstractSchedule, Order
from ._validate import whole_number


@dataclass(frozen=True)
class Choice:
    """What `search` found.

    Attributes:
      schedule: the schedule; a `Custom` one where list scheduling beat all named ones.
      placement: ``int[stage]``, the submesh of each stage.
      num_microbatches: how many pieces to cut the batch into.
      simulation: its times.
      memory: ``float[submesh]``, the most that activations take, in the unit of `Costs.activation`.
    """

    schedule: AbstractSchedule
    placement: tuple[int, ...]
    num_microbatches: int
    simulation: Simulation
    memory: tuple[float, ...]

    def __repr__(self) -> str:
        return f"Choice({self})"

    def _repr_html_(self) -> str:
        return f"{self}{self.simulation._repr_html_()}"

    def __str__(self) -> str:
        return (
            f"{self.schedule.name}, {self.num_microbatches} microbatches, placement {self.placement}: "
            f"makespan {self.simulation.makespan:g}, bubble {self.simulation.bubble_fraction:.1%}, "
            f"memory {max(self.memory):g}"
        )


def search(
    costs: Costs | Callable[[int], Costs],
    stages: int,
    num_microbatches: Sequence[int],
    *,
    submeshes: int | None = None,
    placements: Sequence[Sequence[int]] | None = None,
    memory: float | Sequence[float] | None = None,
    schedules: Sequence[str | AbstractSchedule] | None = None,
) -> Choice:
    """The schedule, placement and number of microbatches with the shortest simulated step.

    Tries every schedule on every placement that it admits, and besides, on each placement,
    orders made by list scheduling from the given times. Nothing that fits the memory and is
    among the named schedules is faster in the simulator than what is returned.

    Args:
      costs: what the stages take for the *whole batch*, which is divided evenly (`Costs.split`);
        or a function that gives, for a number of microbatches, the costs of *one microbatch*,
        for example measured ones.
      stages: the number of stages.
      num_microbatches: the numbers of microbatches to try.
      submeshes: the number of submeshes; as many as stages by default.
      placements: ``int[stage]`` each, the placements to try; by default stages in blocks, dealt
        out in turn, and in a V, where they fit the submeshes.
      memory: ``float`` or ``float[submesh]``, what activations may take on a submesh, in the unit of
        `Costs.activation`; None for no limit.
      schedules: names or schedules to try; all registered ones by default.

    Returns:
      The best; among equals, the one that takes less memory, then a named one.

    Raises:
      ScheduleError: nothing fits the memory or the placements; a schedule is unknown, or gives a wrong order; an argument is of another kind.

    Example:
      >>> print(search(Costs(forward=8, backward=16, activation=8), 4, [4, 8], memory=4))
      zero-bubble-h1, 8 microbatches, placement (0, 1, 2, 3): makespan 27, bubble 11.1%, memory 4
    """
    if not (isinstance(costs, Costs) or callable(costs)):
        raise ScheduleError(
            f"search: costs has to be Costs(forward=..., backward=...) or a function from a number of microbatches to Costs, "
            f"found {type(costs).__name__} {costs!r}."
        )
    whole_number("search: stages", stages)
    if not isinstance(num_microbatches, Iterable) or isinstance(num_microbatches, (str, Mapping)):
        raise ScheduleError(
            f"search: num_microbatches has to be a list of the numbers to try, found {type(num_microbatches).__name__} "
            f"{num_microbatches!r}; write [{num_microbatches!r}]."
        )
    num_microbatches = [whole_number("search: a number of microbatches", count) for count in num_microbatches]
    if isinstance(schedules, str) or not isinstance(schedules, Iterable | None):
        raise ScheduleError(
            f"search: schedules has to be a list of those to try, found {schedules!r}; write [{schedules!r}]."
        )
    schedules = None if schedules is None else [get(schedule) for schedule in schedules]
    whole = costs
    cost_of = whole.split if isinstance(whole, Costs) else whole
    if submeshes is not None:
        whole_number("search: submeshes", submeshes)
    tried = _placements(stages, stages if submeshes is None else submeshes, placements)
    best: tuple[tuple[float, float, bool, int, str], Choice] | None = None
    refused: list[Choice] = []
    failures: list[ScheduleError] = []
    for count in num_microbatches:
        cost = cost_of(count)
        if not isinstance(cost, Costs):
            raise ScheduleError(
                f"search: costs({count}) gives {type(cost).__name__} {cost!r}, expected the Costs of one of {count} microbatches; "
                "return them."
            )
        for placement in tried:
            limits = _limits(memory, max(placement) + 1)
            for schedule, order in _candidates(schedules, placement, count, cost, limits, failures):
                choice = _price(schedule, order, cost)
                if any(peak > limit * (1 + 1e-9) for peak, limit in zip(choice.memory, limits, strict=True)):
                    refused.append(choice)
                    continue
                # Times that differ only in how floats were added are the same.
                makespan = float(f"{choice.simulation.makespan:.12g}")
                rank = (makespan, max(choice.memory), isinstance(schedule, Custom), count, schedule.name)
                if best is None or rank < best[0]:
                    best = rank, choice
    if best is None:
        raise _nothing(refused, failures)
    return best[1]


def _candidates(
    schedules: Sequence[str | AbstractSchedule] | None,
    placement: tuple[int, ...],
    count: int,
    cost: Costs,
    limits: list[float],
    failures: list[ScheduleError],
) -> Iterator[tuple[AbstractSchedule, Order]]:
    backward = cost.backward is not None
    for named in names() if schedules is None else schedules:
        try:
            schedule = get(named)
            order = schedule.order(placement, count, backward=backward)
        except ScheduleError as error:  # needs another placement, or arguments
            failures.append(error)
        else:
            yield schedule, proved(schedule, order, placement, count, backward=backward)
    if not backward:
        return
    activation = cost.activations(len(placement))
    own = [0.0] * len(limits)  # of one microbatch, per submesh
    for submesh, amount in zip(placement, activation, strict=True):
        own[submesh] += amount
    depths = {min(count, factor * len(set(placement))) for factor in (1, 2, 3)} | {count}
    for splits in (False, True):
        durations = cost.durations(len(placement), splits_backward=splits)
        load = Load(durations, cost.transfers(len(placement)), activation)
        for depth in sorted(depths):
            caps = [min(limit, depth * amount) for limit, amount in zip(limits, own, strict=True)]
            try:
                order = greedy(placement, count, load, caps)
            except ScheduleError as error:  # not even one microbatch fits
                failures.append(error)
            else:
                yield Custom(order.rows), order


def _price(schedule: AbstractSchedule, order: Order, cost: Costs) -> Choice:
    simulation = simulate(
        order,
        forward=cost.forward,
        backward=cost.backward,
        weight=cost.weight,
        transfer=cost.transfer,
        overhead=cost.overhead,
    )
    peaks = peak_memory(order, cost.activations(order.num_stages))
    return Choice(schedule, order.placement, order.num_microbatches, simulation, peaks)


def _limits(memory: float | Sequence[float] | None, submeshes: int) -> list[float]:
    return [float("inf")] * submeshes if memory is None else per_stage("memory", memory, submeshes)


def _placements(stages: int, submeshes: int, given: Iterable[Sequence[int]] | None) -> list[tuple[int, ...]]:
    """The placements to try: those that are given, of so many stages, or the usual ones."""
    if given is None:
        return _usual_placements(stages, submeshes)
    given = list(given) if isinstance(given, Iterable) else given
    if not isinstance(given, list) or not all(isinstance(p, Iterable) and not isinstance(p, str) for p in given):
        raise ScheduleError(
            f"search: placements has to be a list of placements, each with the submesh of every stage, found {given!r:.80}; write "
            "[(0, 1, ...)]."
        )
    found = [tuple(placement) for placement in given]
    for placement in found:
        if len(placement) != stages:
            raise ScheduleError(
                f"search: the placement {described(placement)} has {len(placement)} stages, expected {stages}; name the submesh of "
                "each stage."
            )
    return found


def _usual_placements(stages: int, submeshes: int) -> list[tuple[int, ...]]:
    """In blocks, dealt out in turn, and in a V, as far as each makes sense."""
    if not 1 <= submeshes <= stages:
        raise ScheduleError(f"search: {stages} stages on {submeshes} submeshes; give each submesh at least one stage.")
    line = tuple(range(submeshes))
    found = [tuple(stage * submeshes // stages for stage in range(stages))]
    if stages % submeshes == 0:
        found.append(line * (stages // submeshes))
    if stages == 2 * submeshes:
        found.append(line + line[::-1])
    return list(dict.fromkeys(found))


def _nothing(refused: list[Choice], failures: list[ScheduleError]) -> ScheduleError:
    if refused:
        least = min(refused, key=lambda choice: max(choice.memory))
        return ScheduleError(
            f"search: nothing fits the memory; the least that any schedule takes is {max(least.memory):g} ({least}). "
            "Use more microbatches or more memory."
        )
    reason = f" The last one says: {failures[-1]}" if failures else ""
    return ScheduleError(f"search: no schedule admits any of the placements and numbers of microbatches.{reason}")
