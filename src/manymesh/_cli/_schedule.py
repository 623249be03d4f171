"""``schedule``: the picture, the bubble and the memory of a schedule."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rich.table import Table

from .. import schedules
from .._errors import ScheduleError
from .._views._spans import spans_of
from .._views._timeline import Timeline
from ._parser import add_json, console, drawn, print_json, whole

NAME = "schedule"
HELP = "draw a pipeline schedule, with its bubble and its memory"

_DESCRIPTION = """Draws a pipeline schedule and says what it costs.

A stage's forward pass of one microbatch takes 1 and its backward pass 2, unless you say otherwise: one number for all
stages, or one for each, separated by commas, in any unit. The bubble is the part of their time in which submeshes wait.
Memory is the most activations that a submesh keeps at a time, in activations of one microbatch."""

_EPILOG = """
examples:
  python -m manymesh schedule 1f1b --stages 4 --num-microbatches 8
  python -m manymesh schedule zero-bubble-h1 --stages 4 --num-microbatches 8 --transfer 0.2
  python -m manymesh schedule gpipe --stages 3 --num-microbatches 6 --forward 1,2,1 --backward 2,4,2
  python -m manymesh schedule --compare --stages 4 --num-microbatches 8        all of them, the fastest first
  python -m manymesh schedule interleaved --stages 8 --num-microbatches 8 --out interleaved.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `COMMANDS`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("name", nargs="?", default=None, metavar="NAME", help=f"1f1b by default; one of {_names()}")
    parser.add_argument("--stages", type=whole, default=4, help="stages of the pipeline (default: 4)")
    parser.add_argument(
        "--num-microbatches", dest="microbatches", type=whole, default=8, help="pieces of the batch (default: 8)"
    )
    parser.add_argument("--forward", type=_times, default=1.0, metavar="TIME", help="of one microbatch (default: 1)")
    parser.add_argument(
        "--backward",
        type=_times,
        default=2.0,
        metavar="TIME",
        help="weight gradients included (default: 2); 0: forward only",
    )
    parser.add_argument(
        "--weight",
        type=_times,
        metavar="TIME",
        help="the part of --backward that makes weight gradients (default: half)",
    )
    parser.add_argument(
        "--transfer", type=_times, default=0.0, metavar="TIME", help="of a value to the next stage (default: 0)"
    )
    parser.add_argument(
        "--compare", action="store_true",
        help="all schedules on as many submeshes as there are stages; where a schedule puts several stages on a submesh, "
        "each stage is cut into that many",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FILE", help="also save the picture: .svg, .png, .pdf, .html or .json (Perfetto)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """See `COMMANDS`."""
    if args.compare:
        if args.name or args.out:
            raise ScheduleError("--compare shows all schedules; leave the name and --out away")
        return _compare(args)
    simulation, memory = _simulate(args.name or "1f1b", args, args.stages)
    if args.out:
        spans = spans_of(simulation)
        title = f"{args.name or '1f1b'}, {args.stages} stages, {args.microbatches} microbatches,"
        _check_out(args.out)
        Timeline(spans, (), tuple("" for _ in memory), (title,), unit="").save(args.out)
    if args.json:
        print_json({"schedule": args.name or "1f1b", **_cost(simulation, memory), "timeline": _rows(simulation)})
        return 0
    out = console()
    out.print(schedules.picture(simulation), soft_wrap=True)
    per = ", ".join(f"{m:g}" for m in memory)
    out.print(
        f"\n{args.name or '1f1b'}: {args.stages} stages on {len(memory)} submeshes, {args.microbatches} microbatches\n"
        f"a step takes {simulation.makespan:g}, of which submeshes wait {simulation.bubble_fraction:.1%}\n"
        f"activations kept at a time: {per} (of one stage and one microbatch, submesh by submesh)"
    )
    if args.out:
        out.print(f"saved {args.out}", soft_wrap=True)
    return 0


def _names() -> str:
    return ", ".join(name for name in schedules.names() if name != "custom")


def _times(word: str) -> float | tuple[float, ...]:
    """One number, or one for each stage."""
    try:
        values = tuple(float(part) for part in word.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a number, or one for each stage as in 1,2,1; found {word!r}"
        ) from None
    return values[0] if len(values) == 1 else values


def _check_out(path: str) -> None:
    if path.endswith(".txt"):
        raise ScheduleError("--out saves pictures; the text is what is printed")


@dataclass(frozen=True)
class _Compared:
    """One schedule of a comparison."""

    name: str
    stages_per_submesh: int
    makespan: float
    bubble_fraction: float
    activations: float


def _simulate(
    name: str, args: argparse.Namespace, stages: int, cut: int = 1
) -> tuple[schedules.Simulation, tuple[float, ...]]:
    """A schedule on the clock, each of the given stages cut into some; and its peak memory, submesh by submesh."""
    schedule = schedules.get(name)
    backward = None if args.backward == 0 else args.backward
    order = schedule.order(schedule.default_placement(stages * cut), args.microbatches, backward=backward is not None)
    times = {
        word: _divided(f"--{word}", value, args.stages, cut)
        for word, value in (("forward", args.forward), ("backward", backward), ("weight", args.weight))
    }
    transfer = args.transfer
    if cut > 1 and isinstance(transfer, tuple):
        raise ScheduleError("--compare takes one --transfer for all, as some schedules cut stages into more")
    simulation = schedules.simulate(order, transfer=transfer, **times)  # type: ignore[arg-type]  # forward is given
    return simulation, schedules.peak_memory(order, [1.0 / cut] * order.num_stages)


def _divided(
    option: str, value: float | tuple[float, ...] | None, stages: int, cut: int
) -> float | tuple[float, ...] | None:
    if isinstance(value, tuple):
        if len(value) != stages:
            raise ScheduleError(
                f"{option} has {len(value)} numbers for {stages} stages; give one, or one for each stage"
            )
        return tuple(v / cut for v in value for _ in range(cut))
    return None if value is None else value / cut


def _compare(args: argparse.Namespace) -> int:
    found, refused = [], {}
    for name in schedules.names():
        try:
            cut = _stages_per_submesh(name, args.stages)
            simulation, memory = _simulate(name, args, args.stages, cut)
        except ScheduleError as error:
            if name != "custom":
                refused[name] = " ".join(str(error).split())
            continue
        found.append(_Compared(name, cut, simulation.makespan, simulation.bubble_fraction, max(memory)))
    if not found:
        raise ScheduleError(next(iter(refused.values())))
    found.sort(key=lambda c: (round(c.makespan, 9), c.activations))
    if args.json:
        print_json({"schedules": found, "refused": refused})
        return 0
    table = Table(
        title=f"{args.stages} submesh{'es' * (args.stages != 1)}, {args.microbatches} microbatch{'es' * (args.microbatches != 1)}",
        title_justify="left",
    )
    for head, justify in (
        ("schedule", "left"), ("stages a submesh", "right"), ("step", "right"), ("bubble", "right"),
        ("activations kept", "right"), ("", "left"),
    ):  # fmt: skip
        table.add_column(head, justify=justify)  # type: ignore[arg-type]  # one of its words
    longest = max(c.makespan for c in found) or 1.0  # where all takes no time
    works, waits = tuple(drawn("█░", "#."))
    for c in found:
        bar = works * round(24 * c.makespan * (1 - c.bubble_fraction) / longest)
        wait = waits * (round(24 * c.makespan / longest) - len(bar))
        table.add_row(
            c.name, str(c.stages_per_submesh), f"{c.makespan:g}", f"{c.bubble_fraction:.1%}", f"{c.activations:g}",
            f"{bar}[dim]{wait}[/]",
        )  # fmt: skip
    out = console()
    out.print(table)
    for name, why in refused.items():
        out.print(f"{name}: {why}", soft_wrap=True)
    out.print(
        "Activations are those of one microbatch on the whole submesh, where a submesh keeps most. Next: "
        f"python -m manymesh schedule {found[0].name} --stages {args.stages * found[0].stages_per_submesh} "
        f"--num-microbatches {args.microbatches}",
        soft_wrap=True,
    )
    return 0


def _stages_per_submesh(name: str, submeshes: int) -> int:
    """How many stages a schedule puts on each submesh, by its own placement."""
    schedule = schedules.get(name)
    error = None
    for cut in (1, 2, 3, 4):
        try:
            if max(schedule.default_placement(submeshes * cut)) + 1 == submeshes:
                return cut
        except ScheduleError as found:
            error = error or found
    raise error or ScheduleError(f"has no placement of its own for {submeshes} submeshes")


def _cost(simulation: schedules.Simulation, memory: tuple[float, ...]) -> dict[str, object]:
    return {
        "makespan": simulation.makespan, "bubble_fraction": simulation.bubble_fraction, "activations": memory,
    }  # fmt: skip


def _rows(simulation: schedules.Simulation) -> list[list[object]]:
    """``[submesh, kind, stage, microbatch, start, end]`` of every action."""
    return [
        [slot.submesh, slot.action.kind, slot.action.stage, slot.action.microbatch, slot.start, slot.end]
        for slot in simulation.timeline
    ]
