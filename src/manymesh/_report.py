"""What a step consists of and what it costs, before it is compiled and after: data that prints itself."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._cost import _view
from ._cost._clock import Durations, device_groups, run_clock
from ._cost._crossings import ValueLine, batches, crossings
from ._cost._estimate import Estimate, durations, roofline
from ._cost._idle import IdleAxis, idle_axes
from ._cost._lines import EdgeLine, Figures, FragmentLine, LoopLine, Off, Prediction, SharedDevices
from ._cost._memory import Memory as Memory
from ._cost._memory import memory
from ._cost._room import Room
from ._cost._tasks import TaskLine, tasks_of
from ._errors import ArgumentError
from ._hardware import Hardware
from ._plan._instructions import Plan, Run
from ._plan._number import arguments_elsewhere, variables_of
from ._program import Program, Reduction, nbytes
from ._runtime._describe import Row, rows
from ._shown import Shown, as_written, rich_html
from ._types import PyTree

if TYPE_CHECKING:  # imported when a report is printed
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """What a step consists of and what it costs. Printed, it is a page; ``repr`` is one line, ``to_dict`` plain data.

    Attributes:
      fragments: its fragments and how often each runs in a call.
      edges: what crosses, summed over a call.
      compiled: executables compiled for this step; None before compiling.
      reused: fragments that share an executable with another; None before compiling.
      memory: device -> `Memory`.
      unmarked: (primitive, submesh, why it is there, count) of the equations outside tasks.
      schedules: for each microbatch loop, its schedule's name, its stages' submeshes and microbatches.
      reductions: for each sum over microbatches whose batch is sharded, whether the devices' parts are added up once
        a call, and if not, why.
      tasks: what each task costs in a call.
      values: what crosses, by name.
      loops: the microbatch loops with their bubbles.
      prediction: the step on a clock.
      off: after compiling, where our own count was off, the worst first.
      findings: what looks like a mistake: losses that are added up though each is a mean, with the number that this
        multiplies them by; tasks of which nothing is used; and the like.
      hardware: what times are predicted for.
      idle: the axes of submeshes that shard nothing, so that the devices along them all compute the same.
      shared: devices that several submeshes have, so that what these run there takes turns; the clock knows that.
      elsewhere: of a compiled step the fragments that other processes run; their figures are our own count.
    """

    fragments: tuple[FragmentLine, ...]
    edges: tuple[EdgeLine, ...]
    compiled: int | None
    reused: int | None
    memory: dict[Any, Memory]
    unmarked: tuple[tuple[str, int, str, int], ...]
    schedules: tuple[tuple[str, tuple[int, ...], int], ...]
    reductions: tuple[Reduction, ...] = ()
    tasks: tuple[TaskLine, ...] = ()
    values: tuple[ValueLine, ...] = ()
    loops: tuple[LoopLine, ...] = ()
    prediction: Prediction | None = None
    off: tuple[Off, ...] = ()
    findings: tuple[str, ...] = ()
    hardware: Hardware | None = None
    idle: tuple[IdleAxis, ...] = ()
    shared: tuple[SharedDevices, ...] = ()
    elsewhere: tuple[str, ...] = ()
    _rows: Callable[[], list[Row]] = field(default=list, repr=False, compare=False)

    @property
    def spans(self) -> list[Row]:
        """The prediction in the form that recordings are compared with: (submesh, label, kind, stage, microbatch, start,
        end), seconds; ``recording.compare(report)`` reads them.

        Raises:
          ArgumentError: the report knows no seconds.
        """
        if self.prediction is not None and self.prediction.seconds is None:
            raise ArgumentError(
                "the report counts FLOPs, not seconds; write report(hardware), with one of manymesh.inspect.Hardware, or "
                "report(times=compiled.durations(...))"
            )
        return self._rows()

    @property
    def peak_bytes(self) -> int:
        """The peak of the device that needs most."""
        return max((m.peak_bytes for m in self.memory.values()), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, strings and numbers, for JSON; devices are strings. The clock's times of each
        instruction are left out."""
        plain = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "_rows"}
        if self.prediction is not None:
            del plain["prediction"]["course"]
        for line, value in zip(plain["values"], self.values, strict=True):
            line["total_bytes"] = value.total_bytes
        for line, off in zip(plain["off"], self.off, strict=True):
            line["by"] = off.by
        return plain

    def __repr__(self) -> str:
        crossing = sum(e.nbytes for e in self.edges)
        time = ""
        if self.prediction is not None and self.prediction.seconds is not None:
            time = f", {self.prediction.seconds:.3g} s a step by {self.prediction.by}"
        how = "planned" if self.compiled is None else f"{self.compiled} compiled"
        return (
            f"Report({len(self.fragments)} fragments, {how}, on {len(self.memory)} devices; at most {self.peak_bytes} bytes "
            f"on one, {crossing} bytes cross{time})"
        )

    def __str__(self) -> str:
        return _view.as_text(self._parts())

    def _repr_html_(self) -> str:
        return rich_html(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from as_written(console, options, self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        """The parts of the page, in order; strings are lines."""
        count = f"{len(self.fragments)} fragments"
        if self.compiled is None:
            yield f"{count}, planned, not compiled; figures are our own count"
        else:
            others = f", of {len(self.elsewhere)} that other processes run our own count" if self.elsewhere else ""
            yield f"{count}, {self.compiled} compiled, {self.reused} reused; figures are XLA's{others}"
        yield from _view.too_small(self.memory, self.hardware)
        yield from (f"finding: {finding}" for finding in self.findings)
        yield from _view.schedule(self.loops, self.prediction)
        yield from _view.sums(self.reductions)
        yield from _view.shared(self.shared)
        yield from _view.idle(self.idle)
        yield _view.tasks(self.tasks)
        yield from _view.fragments(self.fragments)
        yield from _view.values(self.values, self.edges)
        yield from _view.unmarked(self.unmarked)
        yield _view.devices(self.memory)
        yield from _view.peaks(self.memory, self.hardware)
        yield from _view.off(self.off)


def _plain(value: PyTree) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def make_report(
    found: Estimate,
    *,
    executables: Sequence[Any] | None = None,
    compilations: tuple[int, int] | None = None,
    hardware: Hardware | None = None,
    times: Durations | None = None,
) -> Report:
    """Builds the report of a step; reads plans and what XLA says of its executables, runs nothing.

    Args:
      found: the step, and our own count of what it costs.
      executables: one for each fragment, once it is compiled.
      compilations: how many executables were compiled for it, and how many reused.
      hardware: what to predict times for; that of the step's devices, if it is known, by default.
      times: measured durations, to predict from instead.
    """
    program, plan = found.program, found.plan
    _check_asked(program, hardware, times)
    if hardware is None:
        devices = [d for mesh in program.submeshes for d in mesh.devices.flat[:1]]
        hardware = next((h for d in devices if (h := Hardware.of(d)) is not None), None)
    counted = [Figures(w.flops, w.bytes_read + w.bytes_written, w.temporary_bytes) for w in found.works]
    figures = (
        counted
        if executables is None
        else [counted[k] if e is None else _xla(found, k, e) for k, e in enumerate(executables)]
    )
    flops = [f.flops for f in figures]
    # XLA does not know what the kernels of libraries do, such as those of cuDNN, and counts little for them.
    most = [(max(n.flops, own.flops), max(n.nbytes, own.nbytes)) for n, own in zip(figures, counted, strict=True)]
    taken = times or durations(found, hardware, [n for n, _ in most], [n for _, n in most])
    course = run_clock(program, plan, taken)
    by = "measured fragments" if times is not None else "FLOPs" if hardware is None else hardware.name
    runs = Counter(ins.fragment for ins in plan.instructions if isinstance(ins, Run))
    numbers: dict[int, int] = {}
    lines = []
    for f, n, own in zip(program.fragments, figures, counted, strict=True):
        seconds, bound = (None, "") if by == "FLOPs" else (taken.runs[f.index], "measured")
        if times is not None and times.issues:
            seconds = taken.runs[f.index] + times.issues[f.index]
        if times is None and hardware is not None:
            bound = roofline(found.works[f.index], hardware, *most[f.index]).bound
        number = None if executables is None else _number(executables[f.index], f.index, numbers)
        lines.append(
            FragmentLine(
                f.name, f.submesh, f.kind, f.stage, runs[f.index], number, len(f.invars), len(f.outvars), n, own,
                seconds, bound,
            )
        )  # fmt: skip
    rooms = [Room(f.temporary_bytes, w.largest) for f, w in zip(figures, found.works, strict=True)]
    held = memory(program, plan, found.layout, found.kinds, rooms, found.late)
    off: tuple[Off, ...] = ()
    if executables is not None:
        off = _off(
            lines,
            held,
            memory(program, plan, found.layout, found.kinds, [Room(f.temporary_bytes) for f in counted], found.late),
        )
    made, reused = compilations or (None, None)
    schedules = tuple(
        (_schedule_name(x.schedule) if x.in_order else "none, one after the other", x.placement, x.num_microbatches)
        for x in program.loops
    )
    shared = tuple(
        SharedDevices(at, tuple(map(str, devices))) for at, devices in device_groups(program).items() if len(at) > 1
    )
    named = zip(program.loops, schedules, course.loop_bubbles, strict=True)
    return Report(
        tuple(lines), _edges(program, plan), made, reused, held, program.unmarked, schedules,
        program.reductions, tasks_of(found, flops), crossings(program, plan, found.layout),
        tuple(LoopLine(x.name, *how, bubble) for x, how, bubble in named),
        Prediction(
            by, None if by == "FLOPs" else course.seconds, course.bubble_fraction,
            tuple(b / course.seconds if course.seconds else 0.0 for b in course.busy), course,
        ),
        off, found.findings, hardware, idle_axes(program, found.layout), shared,
        tuple(f.name for f, e in zip(program.fragments, executables or (), strict=False) if e is None),
        functools.partial(rows, program, found.layout, plan, course.starts, course.ends, course.arguments),
    )  # fmt: skip


def _check_asked(program: Program, hardware: object, times: object) -> None:
    """Refuses hardware that is none, and durations that are none of this program."""
    if not isinstance(hardware, Hardware | None):
        raise ArgumentError(
            f"report: hardware has to be a manymesh.inspect.Hardware, found {type(hardware).__name__} {hardware!r}; "
            f"{', '.join(f'Hardware.{name}()' for name in Hardware.ready())} are ready, and Hardware.measure() is this machine"
        )
    if not isinstance(times, Durations | None):
        raise ArgumentError(
            f"report: times has to be what compiled.durations(*args) gives, the seconds of every fragment and transfer, found "
            f"{type(times).__name__} {times!r:.80}; compiled.measure(*args) gives costs of stages, for mm.schedules.simulate"
        )
    if times is not None and len(times.runs) != len(program.fragments):
        raise ArgumentError(
            f"report: times has {len(times.runs)} fragments and the step {len(program.fragments)}, so that they are of another "
            "step; take those of this one, compiled.durations(*args)"
        )


def _number(executable: Any, index: int, numbers: dict[int, int]) -> int:
    """The number of an executable; those of other processes are each taken for one of its own."""
    return numbers.setdefault(-1 - index if executable is None else id(executable), len(numbers))


def _schedule_name(schedule: Any) -> str:
    return str(getattr(schedule, "name", schedule))


def _xla(found: Estimate, index: int, executable: Any) -> Figures:
    """XLA's figures of a fragment, with the later rounds of its loops, which XLA does not count, as we count them."""
    cost = executable.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, list) else cost
    ours, stats = found.works[index], executable.memory_analysis()
    return Figures(
        float(cost.get("flops", 0.0)) + float(cost.get("transcendentals", 0.0)) + ours.repeated_flops,
        float(cost.get("bytes accessed", 0.0)) + ours.repeated_bytes,
        int(getattr(stats, "temp_size_in_bytes", 0) or 0),
    )


def _off(lines: Sequence[FragmentLine], held: Mapping[Any, Memory], counted: Mapping[Any, Memory]) -> tuple[Off, ...]:
    """Where our count and XLA's differ; fragments that are alike once, what would be printed as 0.0% not at all."""
    found: dict[tuple[str, float, float], Off] = {}
    for f in lines:
        pairs = {
            "flops": (f.counted.flops, f.figures.flops),
            "bytes": (f.counted.nbytes, f.figures.nbytes),
            "temporary bytes": (f.counted.temporary_bytes, f.figures.temporary_bytes),
        }
        for what, (ours, xla) in pairs.items():
            if abs(ours - xla) > 1024:
                found.setdefault((what, ours, xla), Off(f.name, what, ours, xla))
    for (d, m), own in zip(held.items(), counted.values(), strict=True):
        if m.peak_bytes != own.peak_bytes:
            found.setdefault(
                ("peak bytes", own.peak_bytes, m.peak_bytes), Off(str(d), "peak bytes", own.peak_bytes, m.peak_bytes)
            )
    told = [o for o in found.values() if abs(o.by) >= 0.0005]
    return tuple(sorted(told, key=lambda o: (o.what != "peak bytes", -abs(o.by))))


def _edges(program: Program, plan: Plan) -> tuple[EdgeLine, ...]:
    """What crosses, summed over a call."""
    sizes = [nbytes(v.aval) for v in variables_of(program)]
    crossing: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for (source, target, numbers), count in batches(plan).items():
        line = crossing[source, target]
        line[0] += count * len(numbers)
        line[1] += count
        line[2] += count * sum([sizes[k] for k in numbers])
    for _, v, source, target in arguments_elsewhere(program, plan):
        line = crossing[source, target]
        line[0] += 1
        line[1] += 1
        line[2] += nbytes(v.aval)
    return tuple(EdgeLine(a, b, *line) for (a, b), line in sorted(crossing.items()))
