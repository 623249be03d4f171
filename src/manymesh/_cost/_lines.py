"""The lines of a report."""

from __future__ import annotations

from dataclasses import dataclass, field

from ._clock import Course


@dataclass(frozen=True)
class Figures:
    """What one run of a fragment does on each of its devices.

    Attributes:
      flops: operations.
      nbytes: bytes read and written.
      temporary_bytes: most bytes at once besides what it reads and makes.
    """

    flops: float
    nbytes: float
    temporary_bytes: int


@dataclass(frozen=True)
class FragmentLine:
    """One fragment in a report.

    Attributes:
      name, submesh, kind, stage: as in the program.
      runs: how often it runs in a call.
      executable: a number that fragments with one executable share; None before compiling.
      inputs, outputs: how many values it reads and makes.
      figures: what one run does: XLA's count, or ours before compiling.
      counted: our own count.
      seconds: of one run, predicted; None without a hardware.
      bound: what most of that goes for: ``compute``, ``memory``, ``exchange``, ``launch``, or ``measured``.
    """

    name: str
    submesh: int
    kind: str
    stage: int | None
    runs: int
    executable: int | None
    inputs: int
    outputs: int
    figures: Figures = Figures(0.0, 0.0, 0)
    counted: Figures = Figures(0.0, 0.0, 0)
    seconds: float | None = None
    bound: str = ""


@dataclass(frozen=True)
class EdgeLine:
    """What crosses between two submeshes in one call: values, and arguments that are read away from their home.

    Attributes:
      source, target: submeshes.
      values: how many cross.
      transfers: in how many batches.
      nbytes: bytes of the whole values, all shards together; what is replicated over n devices arrives n times and counts
        once.
    """

    source: int
    target: int
    values: int
    transfers: int
    nbytes: int


@dataclass(frozen=True)
class LoopLine:
    """A microbatch loop.

    Attributes:
      name: of the function that `microbatch` wrapped.
      schedule, placement, microbatches: how it runs; stage -> submesh. Where the stages do not fit the schedule that was
        asked for, microbatches run one after the other, and the schedule says so.
      bubble_fraction: the part of the time of its submeshes in which they wait, in [0, 1).
    """

    name: str
    schedule: str
    placement: tuple[int, ...]
    microbatches: int
    bubble_fraction: float


@dataclass(frozen=True)
class Prediction:
    """The step on a clock.

    Attributes:
      by: what times come from: a hardware's name, ``measured fragments``, or ``FLOPs`` where there is neither; then
        `seconds` is None, and transfers take no time.
      seconds: of one step.
      bubble_fraction: the part of the time of all submeshes that run something in which they wait.
      busy: for each submesh, the part of the time in which it runs something.
      course: when each instruction of the plan starts and ends.
    """

    by: str
    seconds: float | None
    bubble_fraction: float
    busy: tuple[float, ...]
    course: Course = field(repr=False, compare=False)


@dataclass(frozen=True)
class Off:
    """Where our count differs from XLA's.

    Attributes:
      where: a fragment, or a device for its peak.
      what: ``flops``, ``bytes``, ``temporary bytes`` or ``peak bytes``.
      counted: ours.
      found: XLA's.
    """

    where: str
    what: str
    counted: float
    found: float

    @property
    def by(self) -> float:
        """The difference as a part of XLA's figure: 0.1 where ours is a tenth too high."""
        return self.counted / self.found - 1 if self.found else float(self.counted > 0)


@dataclass(frozen=True)
class SharedDevices:
    """Devices that several submeshes have, so that what these run there takes turns.

    Attributes:
      submeshes: the submeshes.
      devices: the devices, in words.
    """

    submeshes: tuple[int, ...]
    devices: tuple[str, ...]
