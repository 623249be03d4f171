"""A report as a page of text. What is alike is one line, with a count."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._hardware import Hardware
from .._program import Reduction
from .._shown import format_bytes, joined, numbers, page_width
from ._crossings import ValueLine
from ._idle import IdleAxis
from ._lines import EdgeLine, FragmentLine, LoopLine, Off, Prediction, SharedDevices
from ._memory import Memory
from ._tasks import TaskLine

if TYPE_CHECKING:
    from rich.console import RenderableType

ROWS = 24  # a longer list is folded
LITTLE = 1e-3  # of a peak; a kind of values that is less everywhere is not told


def as_text(parts: Iterable[RenderableType]) -> str:
    """A page as plain text, its other lines as long as they are; its tables are at most 140 characters wide, on a terminal as wide as that."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=page_width(140), color_system=None)
    for part in parts:
        console.print(part, crop=False, soft_wrap=isinstance(part, str), markup=False, highlight=False)
    return out.getvalue().rstrip("\n")


def schedule(loops: Sequence[LoopLine], p: Prediction | None) -> Iterator[str]:
    """The schedules, and the step on a clock."""
    lines = Counter(
        f"schedule {loop.schedule}: {loop.microbatches} microbatches, stages on submeshes {_some(loop.placement)}, bubble "
        f"{loop.bubble_fraction:.1%}"
        for loop in loops
    )
    yield from (f"{count} x {line}" if count > 1 else line for line, count in lines.items())
    if p is not None and p.seconds is not None:
        busy = _some([f"{b:.0%}" for b in p.busy])
        yield f"a step takes {_seconds(p.seconds)} by {p.by}: bubble {p.bubble_fraction:.1%}, busy {busy}"
    elif p is not None:
        yield f"bubble of the whole step {p.bubble_fraction:.1%}, by FLOPs alone: report(hardware) tells seconds"


def sums(reductions: Sequence[Reduction]) -> Iterator[str]:
    """The sums over a batch that has devices of its own, and why some are taken in every microbatch."""
    if reductions:
        once = sum(bool(r.axes) for r in reductions)
        yield f"{once} of {len(reductions)} sums over a sharded batch are taken once a call"
    alike: dict[str, list[Reduction]] = {}
    for r in reductions:
        if not r.axes:
            alike.setdefault(r.why, []).append(r)
    for why, those in alike.items():
        at = sorted({r.submesh for r in those})
        where = f"submesh {at[0]}" if len(at) == 1 else f"submeshes {_some(at)}"
        values = [f"{n} x {v}" if n > 1 else v for v, n in Counter(r.value for r in those).items()]
        tasks = list(dict.fromkeys(r.task for r in those))
        yield f"  {joined(tasks)}: {joined(values)} on {where}, in every microbatch: {why}"


def idle(axes: Sequence[IdleAxis]) -> Iterator[str]:
    """The axes that shard nothing."""
    alike: dict[tuple[str, int], list[int]] = {}
    for a in axes:
        alike.setdefault((a.axis, a.size), []).append(a.submesh)
    for (axis, size), submeshes in alike.items():
        where = f"submesh {submeshes[0]}" if len(submeshes) == 1 else f"submeshes {_some(submeshes)}"
        yield f"nothing is sharded over axis {axis!r} of {where}: {size} devices compute the same"


def shared(groups: Sequence[SharedDevices]) -> Iterator[str]:
    """The devices that several submeshes have."""
    for g in groups:
        yield f"submeshes {_some(g.submeshes)} share {len(g.devices)} devices, {_some(g.devices)}: what they run there takes turns"


def too_small(memory: Mapping[Any, Memory], hardware: Hardware | None) -> Iterator[str]:
    """That the step does not fit, where it does not: what else a report says then counts for little."""
    if hardware is None or hardware.memory_bytes is None:
        return
    room = hardware.memory_bytes
    over = [m.peak_bytes for m in memory.values() if m.peak_bytes > room]
    if over:
        where = f"{len(over)} of {len(memory)} devices need more, up to {format_bytes(max(over))}"
        yield f"DOES NOT FIT the {format_bytes(room)} of {hardware.name}: {where}"


def tasks(lines: Sequence[TaskLine]) -> RenderableType:
    """What each task costs."""
    from rich.table import Table

    table = Table(title="tasks, in a call, on each device", title_justify="left")
    for column in ("task", "submesh", "stage", "runs", "forward", "backward", "reads", "parameters"):
        table.add_column(column, justify="left" if column == "task" else "right", overflow="fold")

    def cells(line: Any) -> tuple[str, ...]:
        stage = "" if line.stage is None else str(line.stage)
        size = f"{line.parameters:,} ({format_bytes(line.parameter_bytes)})" if line.parameters else ""
        return (
            line.name, str(line.submesh), stage, str(line.runs), _flops(line.forward_flops), _flops(line.backward_flops),
            format_bytes(line.bytes_read), size,
        )  # fmt: skip

    for row in _folded([cells(line) for line in lines], named=(0, 1, 2)):
        table.add_row(*row)
    return table


def fragments(lines: Sequence[FragmentLine]) -> Iterator[str]:
    """What each fragment is and does."""
    rows = []
    for f in lines:
        stage = "" if f.stage is None else f" stage {f.stage}"
        executable = "" if f.executable is None else f"executable {f.executable}"
        seconds = "" if f.seconds is None else f"{_seconds(f.seconds)} ({f.bound})"
        rows.append(
            (
                f.name, f"submesh {f.submesh}", f"{f.kind}{stage}", f"x{f.runs}", executable, f"{f.inputs} -> {f.outputs}",
                _flops(f.figures.flops), format_bytes(f.figures.nbytes), f"+{format_bytes(f.figures.temporary_bytes)}", seconds,
            )
        )  # fmt: skip
    shown = list(_folded(rows, named=(0, 1, 2, 4)))
    widths = [max((len(row[k]) for row in shown), default=0) for k in range(10)]
    yield "fragments: runs, inputs and results, and of one run FLOPs, bytes, room inside"
    for row in shown:
        yield ("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True) if w)).rstrip()


def values(lines: Sequence[ValueLine], edges: Sequence[EdgeLine]) -> Iterator[RenderableType]:
    """What crosses, by name, and what that comes to between submeshes."""
    from rich.table import Table

    if not lines:
        return
    table = Table(title="what crosses", title_justify="left")
    for column in ("value", "from", "to", "type", "layout", "bytes", "times", "in a call"):
        table.add_column(column, justify="left" if column in ("value", "type", "layout") else "right", overflow="fold")
    rows = [
        (
            v.name if v.values == 1 else f"{v.values} x {v.name}", str(v.source), str(v.target), v.type, v.layout,
            format_bytes(v.nbytes), str(v.times), format_bytes(v.total_bytes),
        )
        for v in lines
    ]  # fmt: skip
    for row in _folded(rows, named=(0, 1, 2)):
        table.add_row(*row)
    yield table
    folded = _folded(
        [
            (f"{e.source} -> {e.target}", f"{e.values} values in {e.transfers} transfers, {e.nbytes} bytes")
            for e in edges
        ],
        named=(0,),
    )
    yield from (f"  {edge}: {what}" for edge, what in folded)


def unmarked(equations: Sequence[tuple[str, int, str, int]]) -> Iterator[str]:
    """Where equations outside tasks are, and why; submeshes with the same ones as one."""
    groups: dict[tuple[int, str], list[str]] = {}
    for primitive, submesh, why, count in sorted(equations, key=lambda u: (u[1], u[2], -u[3], u[0])):
        groups.setdefault((submesh, why), []).append(primitive if count == 1 else f"{count} {primitive}")
    alike: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for (submesh, why), names in groups.items():
        alike.setdefault((why, tuple(names)), []).append(submesh)
    shown = sorted(alike.items(), key=lambda item: item[1][0])
    for (why, primitives), at in shown[:ROWS]:
        yield f"  unmarked on submesh{'es' * (len(at) > 1)} {numbers(at)}, {why}: {', '.join(primitives)}"
    if len(shown) > ROWS:
        yield f"  ... and on {len(shown) - ROWS} more"


def devices(memory: Mapping[Any, Memory]) -> RenderableType:
    """The memory of each device."""
    from rich.table import Table

    # Many columns: what is next to nothing everywhere is left out, and cells stand closer.
    table = Table(title="memory of each device", title_justify="left", padding=(0, 0, 0, 1))
    told = (kind for m in memory.values() for kind, count in m.made_of.items() if count > LITTLE * m.peak_bytes)
    kinds = list(dict.fromkeys(told))
    for column in ("devices", "arriving", "peak", "at", *kinds):
        table.add_column(column, justify="left" if column in ("devices", "at") else "right", overflow="fold")
    for devices, m in _alike(memory.items()):
        made = [format_bytes(m.made_of.get(kind, 0)) for kind in kinds]
        table.add_row(devices, format_bytes(m.argument_bytes), format_bytes(m.peak_bytes), m.at, *made)
    return table


def peaks(memory: Mapping[Any, Memory], hardware: Hardware | None) -> Iterator[str]:
    """What the largest peak consists of."""
    most = max(memory.items(), key=lambda item: item[1].peak_bytes, default=None)
    if most is not None and most[1].holds:
        device, m = most
        yield f"the peak of {device}, {m.peak_bytes} bytes at {m.at}, holds most of"
        for h in m.holds:
            yield f"  {h.values} x {h.name} ({h.kind}), {format_bytes(h.nbytes)}"
        if hardware is not None and hardware.memory_bytes is not None:
            room = hardware.memory_bytes
            fits = "fits in" if m.peak_bytes <= room else "DOES NOT FIT in"
            yield f"it {fits} the {format_bytes(room)} of {hardware.name}"


def off(differences: Sequence[Off]) -> Iterator[str]:
    """Where our own count was off."""
    if differences:
        yield "our own count was off (ours, XLA's)"
    for o in differences[:ROWS]:
        yield f"  {o.where}: {o.what} {o.counted:.6g}, {o.found:.6g} ({o.by:+.1%})"
    if len(differences) > ROWS:
        yield f"  ... and at {len(differences) - ROWS} more places"


# --- folding ----------------------------------------------------------------------------------------------


def _folded(rows: Sequence[tuple[str, ...]], named: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Rows of a table. Where there are many, those that differ in their names alone become one, with a count.

    Args:
      rows: the cells of each row.
      named: the columns in which rows that are alike may differ.
    """
    if len(rows) <= ROWS:
        yield from rows
        return
    alike: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        alike.setdefault(tuple(cell for k, cell in enumerate(row) if k not in named), []).append(row)
    for same in alike.values():
        first, last = same[0], same[-1]
        cells = [
            a if a == b or k not in named else f"{a} ... {b}" for k, (a, b) in enumerate(zip(first, last, strict=True))
        ]
        if len(same) > 1:
            cells[0] = f"{len(same)} x {cells[0]}"
        yield tuple(cells)


def _alike(memory: Iterable[tuple[Any, Memory]]) -> Iterator[tuple[str, Memory]]:
    """Devices with equal memory as one, then at most as many rows as a list has."""
    groups: dict[tuple[Any, ...], tuple[list[int], Memory]] = {}
    for device, m in memory:
        key = (m.argument_bytes, m.peak_bytes, tuple(m.made_of.items()))
        groups.setdefault(key, ([], m))[0].append(device.id)
    shown = list(groups.values())
    if len(shown) > ROWS:
        shown = sorted(shown, key=lambda item: -item[1].peak_bytes)
    for ids, m in shown[:ROWS]:
        yield numbers(ids), m


def _some(items: Sequence[object]) -> str:
    """The items, or, if there are many, the first of them and the last."""
    shown = [str(item) for item in items]
    return f"({', '.join(shown if len(shown) <= ROWS else [*shown[:8], '...', shown[-1]])})"


# --- units ------------------------------------------------------------------------------------------------


def _flops(count: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if count < 999.5 or unit == "E":
            break
        count /= 1000
    return f"{_three(count)} {unit}FLOP"


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 0.9995 or unit == "us":
            break
    return f"{_three(seconds * factor)} {unit}"


def _three(value: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
