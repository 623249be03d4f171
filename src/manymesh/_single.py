"""What `microbatch` was told about its schedule, checked where there is one microbatch and so no loop to schedule."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ._errors import ScheduleError
from ._task import Task
from .schedules._placements import described


def check_single(
    name: str, tasks: Sequence[Task], schedule: Any, rows: Any, num_stages: int | None, interleave: int | None
) -> None:
    """Refuses statements that the tasks of one microbatch contradict, so that they do not fail with the second one.

    Args:
      name: name of the function that `microbatch` wraps.
      tasks: its tasks, in the order of their calls. Where one of them is placed by inference, nothing is known.
      schedule: the schedule object.
      rows: rows of the custom schedule, or None.
      num_stages, interleave: what `microbatch` said.

    Raises:
      ScheduleError: no numbering of the tasks as stages fits.
    """
    if not tasks or any(task.mesh is None or task.meshes for task in tasks):
        return
    meshes = list(dict.fromkeys(task.mesh for task in tasks))
    fine = tuple(meshes.index(task.mesh) for task in tasks)
    coarse = tuple(s for i, s in enumerate(fine) if i == 0 or s != fine[i - 1])
    if num_stages not in (None, len(coarse), len(fine)):
        raise ScheduleError(
            f"microbatch({name}): num_stages={num_stages}, but the program has {len(coarse)} stages on submeshes {described(coarse)} "
            f"({len(fine)} if every task counts); correct num_stages or leave it out"
        )
    if interleave is not None and all(set(Counter(p).values()) != {interleave} for p in (coarse, fine)):
        raise ScheduleError(
            f"microbatch({name}): interleave={interleave} says how many stages each submesh has, but the stages are on "
            f"submeshes {described(coarse)}; correct interleave or leave it out"
        )
    if rows is not None:
        _check_rows(name, rows, {f"{task.name}{phase}" for task in tasks for phase in ("", "_bwd", "_wgt")})
        return
    try:
        schedule.order(coarse, 1)
    except ScheduleError as error:
        try:
            schedule.order(fine, 1)
        except ScheduleError:
            raise ScheduleError(f"microbatch({name}): {error}") from None


def _check_rows(name: str, rows: Any, known: set[str]) -> None:
    for r, row in enumerate(rows):
        for entry in row:
            microbatch, label = entry if isinstance(entry, tuple) else (0, entry)
            if (
                re.sub(r"_\d+$", "", str(label)) not in known and label not in known
            ):  # a task in several stages has numbers
                near = difflib.get_close_matches(str(label), known, 1)
                hint = f"did you mean {near[0]!r}? The" if near else "the"
                raise ScheduleError(
                    f"microbatch({name}): row {r} of custom_schedule names {label!r}; {hint} tasks are {sorted(known)}"
                )
            if microbatch != 0:
                raise ScheduleError(
                    f"microbatch({name}): row {r} of custom_schedule lists microbatch {microbatch} of {label!r}, but there is "
                    "one microbatch, number 0"
                )
