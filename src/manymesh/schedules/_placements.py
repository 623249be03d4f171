"""Schedules that need one certain way to lay stages on submeshes."""

from __future__ import annotations

from collections.abc import Sequence

from .._errors import ScheduleError


def distinct(placement: Sequence[int]) -> tuple[int, ...]:
    """The submeshes of a placement, in the order in which the dataflow reaches them first."""
    return tuple(dict.fromkeys(placement))


def described(placement: Sequence[int]) -> str:
    """A placement for a message: as a tuple, and a long one by its runs, such as ``(0..31, 31..0)``."""
    if len(placement) <= 16:
        return str(tuple(placement))
    runs: list[list[int]] = []
    for submesh in placement:
        run = runs[-1] if runs else []
        step = run[1] - run[0] if len(run) > 1 else 1 if run and submesh > run[0] else -1
        if run and step in (1, -1) and submesh == run[-1] + step:
            run.append(submesh)
        else:
            runs.append([submesh])
    return f"({', '.join(str(r[0]) if len(r) == 1 else f'{r[0]}..{r[-1]}' for r in runs)})"


def require(name: str, placement: tuple[int, ...], needed: Sequence[int], shape: str) -> None:
    """Refuse a placement other than the one that a schedule needs.

    Args:
      name: the schedule's name.
      placement: ``int[stage]``, what was found.
      needed: ``int[stage]``, what the schedule needs on these submeshes.
      shape: what the needed placement is called.

    Raises:
      ScheduleError: they differ.
    """
    if placement != tuple(needed):
        raise ScheduleError(
            f"schedule '{name}' needs {shape}, for these submeshes {described(needed)}, but found {described(placement)}; "
            "place the stages so or choose a schedule that takes any placement, such as '1f1b'."
        )


def require_v(name: str, placement: tuple[int, ...]) -> tuple[int, ...]:
    """The submeshes of a V-shaped placement: down all of them, then back up.

    Args:
      name: the schedule's name.
      placement: ``int[stage]``.

    Returns:
      The submeshes from the one with the first and last stage to the one with the middle two.

    Raises:
      ScheduleError: the placement is not V-shaped.
    """
    submeshes = distinct(placement)
    require(name, placement, submeshes + submeshes[::-1], "two stages on each submesh in a V")
    return submeshes


def v_placement(name: str, num_stages: int) -> tuple[int, ...]:
    """The V-shaped placement of a number of stages.

    Raises:
      ScheduleError: the number of stages is odd.
    """
    if num_stages % 2:
        raise ScheduleError(f"schedule '{name}' needs an even number of stages, two a submesh, but found {num_stages}.")
    half = tuple(range(num_stages // 2))
    return half + half[::-1]
