"""What the stages of a program take, in time and in memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from numbers import Real

from .._errors import ScheduleError
from ._types import Kind

Times = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """What each stage takes, in any one unit of time and any one unit of memory.

    Attributes:
      forward: ``float`` or ``float[stage]``, time of a forward.
      backward: ``float`` or ``float[stage]``, time of a whole backward, weight gradient
        included, whether or not a schedule splits it; None for a forward-only program.
      weight: ``float`` or ``float[stage]``, the part of `backward` that is the weight
        gradient; half of it by default. Counts only where a schedule splits the backward.
      transfer: ``float`` or ``float[stage - 1]``, time from a stage to the next, or back,
        where they are on different submeshes.
      activation: ``float`` or ``float[stage]``, memory that a stage keeps of a microbatch
        from its forward to its backward.
      overhead: time that each action takes besides, however small its microbatch; a
        backward that is split pays it twice.

    Raises:
      ScheduleError: something is no number, not finite or negative.
    """

    forward: Times = 1.0
    backward: Times | None = 2.0
    weight: Times | None = None
    transfer: Times = 0.0
    activation: Times = 1.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight", "transfer", "activation"):
            values = getattr(self, name)
            if values is not None or name not in ("backward", "weight"):
                _check(name, _listed(name, values))
        if not isinstance(self.overhead, Real):
            raise ScheduleError(f"overhead is {self.overhead!r}; give a number.")
        _check("overhead", [float(self.overhead)])

    def split(self, num_microbatches: float) -> Costs:
        """The costs of one of several equal microbatches of a batch that has these costs.

        Args:
          num_microbatches: how many pieces the batch is cut into; costs of one of 8 pieces become those of one of 16
            by ``split(16 / 8)``.

        Returns:
          Every cost divided by `num_microbatches`, except the overhead.

        Raises:
          ScheduleError: `num_microbatches` is no positive number.

        Example:
          >>> Costs(forward=8.0, backward=16.0, activation=4.0, overhead=0.1).split(8)
          Costs(forward=1.0, backward=2.0, weight=None, transfer=0.0, activation=0.5, overhead=0.1)
        """
        if not isinstance(num_microbatches, Real) or not 0 < num_microbatches < math.inf:
            raise ScheduleError(f"split: num_microbatches is {num_microbatches!r}; give a positive number.")

        def piece(times: Times) -> Times:
            if isinstance(times, (float, Real)):
                return float(times) / num_microbatches
            return tuple(time / num_microbatches for time in times)

        return Costs(
            forward=piece(self.forward),
            backward=None if self.backward is None else piece(self.backward),
            weight=None if self.weight is None else piece(self.weight),
            transfer=piece(self.transfer),
            activation=piece(self.activation),
            overhead=self.overhead,
        )

    def durations(self, num_stages: int, *, splits_backward: bool, backward: bool = True) -> dict[Kind, list[float]]:
        """How long each kind of action takes on each stage, overhead included.

        Args:
          num_stages: the number of stages.
          splits_backward: whether backwards are cut into ``B`` and ``W``.
          backward: False for a forward-only program.

        Returns:
          kind -> ``float[stage]``, for the kinds that there are.

        Raises:
          ScheduleError: the times do not fit the stages.
        """
        whole = per_stage("backward", 2.0 if self.backward is None else self.backward, num_stages)
        times: dict[Kind, list[float]] = {"F": per_stage("forward", self.forward, num_stages)}
        if backward and splits_backward:
            part = [b / 2 for b in whole] if self.weight is None else per_stage("weight", self.weight, num_stages)
            for stage, (b, w) in enumerate(zip(whole, part, strict=True)):
                if w > b:
                    raise ScheduleError(
                        f"weight={w:g} of stage {stage} is more than its backward={b:g}, which includes it."
                    )
            times["B"] = [b - w for b, w in zip(whole, part, strict=True)]
            times["W"] = part
        elif backward:
            times["B"] = whole
        return {kind: [time + self.overhead for time in listed] for kind, listed in times.items()}

    def transfers(self, num_stages: int) -> list[float]:
        """``float[stage - 1]``, the time from each stage to the next."""
        return per_stage("transfer", self.transfer, num_stages - 1)

    def activations(self, num_stages: int) -> list[float]:
        """``float[stage]``, the memory that each stage keeps of a microbatch."""
        return per_stage("activation", self.activation, num_stages)


def per_stage(name: str, values: Times, count: int) -> list[float]:
    """One number for all, or a number for each, as a list.

    Args:
      name: what the numbers are, for messages.
      values: ``float``, or ``float[count]``.
      count: how many are needed.

    Returns:
      ``float[count]``.

    Raises:
      ScheduleError: there are more or fewer, or one is none or negative.
    """
    listed = _listed(name, values)
    if isinstance(values, Real):
        listed *= count
    if len(listed) != count:
        raise ScheduleError(f"{name} has {len(listed)} numbers, expected {count}; give that many, or one for all.")
    _check(name, listed)
    return listed


def _listed(name: str, values: Times) -> list[float]:
    """The numbers that are given; one where it is for all."""
    if isinstance(values, Real):
        return [float(values)]
    if isinstance(values, Sized) and not isinstance(values, str):
        with contextlib.suppress(TypeError, ValueError):
            return [float(value) for value in values]
    raise ScheduleError(f"{name} is {values!r}; give a number, or a list with one for each.")


def _check(name: str, listed: Sequence[float]) -> None:
    for position, value in enumerate(listed):
        if not 0 <= value < float("inf"):
            raise ScheduleError(f"{name}[{position}] is {value:g}; give a finite number that is not negative.")
