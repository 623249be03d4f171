"""Bringing a loop and its schedule together: stages, statements about them, rows written by the user."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .. import schedules
from .._errors import ScheduleError
from .._microbatch import LoopSpec
from ..schedules._order_of import order_of
from ._cluster import Cluster
from ._stages import number_stages

_KINDS: tuple[schedules.Kind, ...] = ("F", "B", "W")
ENDINGS = ("", "_bwd", "_wgt")


class Called(NamedTuple):
    """What rows of a custom schedule call a cluster.

    Attributes:
      task: its task, to which the ending of its phase is added.
      fragment: its fragment, which has a number where the task is in several stages.
    """

    task: str
    fragment: str


@dataclass(frozen=True)
class Fit:
    """A loop's stages, and the schedule that runs them.

    Attributes:
      stage: stage of each cluster of the body.
      placement: submesh of each stage.
      against: (what makes a value, what reads it) against the order of the stages, so that no schedule applies and
        microbatches run one after the other; None if there are none.
      schedule: the schedule object.
    """

    stage: dict[Cluster, int]
    placement: tuple[int, ...]
    against: tuple[Cluster, Cluster] | None
    schedule: schedules.AbstractSchedule


def fit_schedule(
    spec: LoopSpec,
    order: list[Cluster],
    preds: dict[Cluster, set[Cluster]],
    carried: Sequence[tuple[Cluster, Cluster]],
    called: Mapping[Cluster, Called],
) -> Fit:
    """Numbers the stages of a loop so that its schedule can run them.

    A stage is all that a submesh does between two crossings, what can wait for a later stage of its submesh included.
    Where the schedule, or ``num_stages``, needs more stages than that, every task becomes a stage of its own, or the
    stage in which a V turns becomes two.

    Args:
      spec: what `microbatch` said.
      order: clusters of the body, topological.
      preds: what each depends on.
      carried: (what leaves a carry, what reads it in the next microbatch).
      called: the clusters that a row can name.

    Raises:
      ScheduleError: the schedule cannot run this program, or the program contradicts ``num_stages``,
        ``interleave`` or the rows of a custom schedule.
    """
    if not order:  # what the loop leaves is known without it
        return Fit({}, (0,), None, spec.schedule)
    backward = any(c.backward for c in order) and any(not c.backward for c in order)
    custom = spec.custom_schedule

    def late(stage: Mapping[Cluster, int]) -> tuple[Cluster, Cluster] | None:
        return next(((maker, r) for maker, r in carried if not _comes_after(stage, r, maker, backward)), None)

    coarse = number_stages(order, preds)
    fine = number_stages(order, preds, each_task=True)
    numberings = [coarse, fine]
    if custom is None and not isinstance(spec.schedule, schedules.Custom):  # whose rows name stages, or say their order
        joined = number_stages(order, preds, joined=True)
        if len(joined[1]) < len(coarse[1]) and joined[2] is None and late(joined[0]) is None:
            numberings.insert(0, joined)
        if len(coarse[1]) % 2 and len(coarse[1]) > 1 and coarse[1] == coarse[1][::-1]:
            numberings.append(number_stages(order, preds, turned=True))
    failed: ScheduleError | None = None
    for stage, placement, against in numberings:
        if spec.num_stages is not None and len(placement) != spec.num_stages:
            continue
        against = against or late(stage)
        schedule = spec.schedule
        if custom is not None:
            rows = _translate(spec, custom, stage, called)
            named = {(c.phase, stage[c]) for c in called}
            split = any(action.kind == "W" for row in rows for action in row)
            unnamed = {(phase, s) for phase in range(1 + backward + split) for s in range(len(placement))} - named
            schedule = schedules.Custom(tuple(_completed(rows, unnamed, placement, spec.num_microbatches)))
        labels = _labels(stage, called)
        try:
            if isinstance(schedule, schedules.Custom):
                _check_rows(spec, schedule, placement, backward, labels)
            elif against is None:
                order_of(
                    schedule,
                    placement,
                    spec.num_microbatches,
                    backward=backward,
                    labels=labels,
                    accumulates=spec.accumulates,
                )
        except ScheduleError as error:
            failed = failed or ScheduleError(f"{error}{'' if custom is None else _about_shared(stage, called)}")
            continue
        _check_interleave(spec, placement)
        return Fit(stage, placement, against, schedule)
    if failed is not None:
        raise ScheduleError(f"microbatch({spec.name}): {failed}")
    raise ScheduleError(
        f"microbatch({spec.name}): num_stages={spec.num_stages}, but the program has {len(numberings[0][1])} stages on "
        f"submeshes {numberings[0][1]} ({len(fine[1])} if every task counts); correct num_stages or leave it out"
    )


def _comes_after(stage: Mapping[Cluster, int], reader: Cluster, maker: Cluster, backward: bool) -> bool:
    """Whether a schedule runs the reader in each microbatch after the maker in the one before.

    Of a stage it keeps the microbatches of each phase in order. In one microbatch forward goes up the stages, then
    backward down, and weight gradients after that of their stage.
    """
    before, after = (maker.phase, reader.phase) if backward else (0, 0)
    if after < before:
        return False
    if before == 0:
        return after > 0 or stage[reader] >= stage[maker]
    return (
        before == 2 or stage[reader] <= stage[maker]
    )  # what weight gradients read of each other is put in order later


def _labels(stage: Mapping[Cluster, int], called: Mapping[Cluster, Called]) -> Callable[[schedules.Action], str]:
    """How messages name an action: by its task, or, of a task in several stages, as rows name that one."""
    tasks, shared = {stage[c]: x.task for c, x in called.items()}, _in_several(stage, called)
    own = {(_KINDS[c.phase], stage[c]): x.fragment for c, x in called.items() if x.task in shared}
    return lambda a: f"{own.get((a.kind, a.stage), tasks.get(a.stage, a.stage))}:{a.kind}{a.microbatch}"


def _in_several(stage: Mapping[Cluster, int], called: Mapping[Cluster, Called]) -> dict[str, list[str]]:
    """The tasks that are in several stages, each with the names of its fragments."""
    stages: dict[str, set[int]] = {}
    fragments: dict[str, list[str]] = {}
    for c, x in called.items():
        stages.setdefault(x.task, set()).add(stage[c])
        fragments.setdefault(x.task, []).append(x.fragment)
    return {task: fragments[task] for task, found in stages.items() if len(found) > 1}


def _about_shared(stage: Mapping[Cluster, int], called: Mapping[Cluster, Called]) -> str:
    """Sentences about how rows name tasks that are in several stages."""
    found = _in_several(stage, called)
    return "".join(f" Task {task!r} is in several stages; rows name them {', '.join(found[task])}." for task in found)


def _check_rows(
    spec: LoopSpec,
    custom: schedules.Custom,
    placement: tuple[int, ...],
    backward: bool,
    labels: Callable[[schedules.Action], str],
) -> None:
    """Checks rows that the user wrote."""
    order = schedules.Order(placement, spec.num_microbatches, custom.rows, custom.splits_backward, backward)
    schedules.check(order, labels=labels, accumulates=spec.accumulates)


def _check_interleave(spec: LoopSpec, placement: tuple[int, ...]) -> None:
    if spec.interleave is None:
        return
    counts = Counter(placement)
    if any(c != spec.interleave for c in counts.values()):
        found = ", ".join(f"submesh {s}: {c}" for s, c in sorted(counts.items()))
        raise ScheduleError(
            f"microbatch({spec.name}): interleave={spec.interleave} says how many stages each submesh has, but the "
            f"program has {found}; correct interleave or leave it out"
        )


def _completed(
    rows: Sequence[tuple[schedules.Action, ...]], units: set[tuple[int, int]], placement: Sequence[int], count: int
) -> list[tuple[schedules.Action, ...]]:
    """The rows, and in them what no row can name, as it holds no task: right before what needs it.

    Args:
      rows: as the user wrote them.
      units: (phase, stage) of what holds no task, or nothing at all.
      placement: submesh of each stage.
      count: number of microbatches.
    """
    whole = [list(row) for row in rows]
    # What another one of them needs comes first: forward goes up the stages, backward down.
    for phase, number in sorted(units, key=lambda unit: (unit[0], unit[1] if unit[0] == 0 else -unit[1])):
        if placement[number] >= len(whole):
            continue
        row = whole[placement[number]]
        for m in range(count):
            needing = (i for i, a in enumerate(row) if a.microbatch == m and _needs(a, phase, number))
            row.insert(next(needing, len(row)), schedules.Action(_KINDS[phase], number, m))
    return [tuple(row) for row in whole]


def _needs(action: schedules.Action, phase: int, stage: int) -> bool:
    """Whether an action has to wait for a phase of a stage in the same microbatch."""
    own = _KINDS.index(action.kind)
    if phase == 0:
        return own > 0 or action.stage > stage
    return phase == 1 and own > 0 and (action.stage < stage or (own == 2 and action.stage == stage))


def _translate(
    spec: LoopSpec,
    rows: Sequence[Sequence[str | tuple[int, str]]],
    stage: Mapping[Cluster, int],
    called: Mapping[Cluster, Called],
) -> list[tuple[schedules.Action, ...]]:
    """Rows of names of tasks and fragments, or (microbatch, name), as rows of actions."""
    known: dict[str, tuple[schedules.Kind, int]] = {}
    for c, x in called.items():  # of a task in several stages the first one has its name
        known.setdefault(f"{x.task}{ENDINGS[c.phase]}", (_KINDS[c.phase], stage[c]))
    for c, x in called.items():
        known.setdefault(x.fragment, (_KINDS[c.phase], stage[c]))
    out = []
    for r, row in enumerate(rows):
        seen: Counter[str] = Counter()
        actions: list[schedules.Action] = []
        for entry in row:
            microbatch, label = entry if isinstance(entry, tuple) else (seen[entry], entry)
            seen[label] += 1
            if label not in known:
                near = difflib.get_close_matches(str(label), known, 1)
                hint = f"did you mean {near[0]!r}? The" if near else "the"
                raise ScheduleError(
                    f"microbatch({spec.name}): row {r} of custom_schedule names {label!r}; {hint} tasks are {sorted(known)}"
                )
            kind, number = known[label]
            action = schedules.Action(kind, number, microbatch)
            if action not in actions:  # tasks of one stage run together, where the first of them is named
                actions.append(action)
        out.append(tuple(actions))
    return out
