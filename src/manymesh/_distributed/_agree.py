"""Agreement: what one process has derived, all have to have derived."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping

from .._errors import ProcessError
from ._world import SLOW, World, counted

SHOWN_LINES = 4  # of each section that differs
SHOWN_WIDTH = 240  # characters of a line
SHOWN_BEFORE = 80  # of these, before what differs
FIRST = "arguments"  # the section that all others follow from
SETTINGS = "settings"


def agree(
    world: World,
    what: str,
    number: int,
    sections: Mapping[str, str],
    lines: Callable[[str], Iterable[str]],
    settings: Callable[[], Iterable[str]] = tuple,
) -> None:
    """Goes on once all processes have said the same, and refuses to go on otherwise: in every process.

    Args:
      world: the processes.
      what: what it is about, for messages.
      number: of this thing among all that the processes do together.
      sections: name -> digest of what is said.
      lines: gives the text of a section, line by line, to show what differs.
      settings: gives lines that are no reason to refuse anything, and are shown where they may be the cause of what differs.

    Raises:
      ProcessError: a process said something else; the message shows the lines that differ. Or it is somewhere else, or
        has ended.
    """
    own = json.dumps([world.doing.label, dict(sections)])
    key = f"agree/{number}"
    world.write(f"{key}/{world.process}", own)
    said = {world.process: own}
    for p in sorted(world.others):
        said[p] = _read(world, what, number, p, f"{key}/{p}")
    first = said[0]
    different = [p for p in sorted(said) if said[p] != first]
    if not different:
        return
    (label, ours), (other_label, theirs) = json.loads(first), json.loads(said[different[0]])
    if label != other_label:
        raise ProcessError(
            f"{world.name(0)} is in {label}, {world.name(different[0])} in {other_label}; every process has to call the same "
            "steps, and manymesh.fetch, in the same order"
        )
    names = [name for name, digest in ours.items() if theirs.get(name) != digest]
    names = [FIRST] if FIRST in names else names
    if world.process in (0, different[0]):
        own_lines = {SETTINGS: list(settings()), **{name: list(lines(name)) for name in names}}
        world.write(f"{key}/lines/{world.process}", json.dumps(own_lines))
    texts = [json.loads(world.read(f"{key}/lines/{p}")) for p in (0, different[0])]
    names = [SETTINGS, *names]
    found = {name: _difference(name, different[0], *(text[name] for text in texts)) for name in names}
    names = [name for name in names if name != SETTINGS or found[name]]
    # A plan may differ in what its text leaves out; what makes it differ is then shown below another name.
    shown = [line for name in names for line in found[name]] or ["  in nothing that their lines show"]
    raise ProcessError(
        f"{what}: the processes did not derive the same; {_numbers(different)} differ{'s' * (len(different) == 1)} from "
        f"process 0 in: {', '.join(names)}\n"
        + "\n".join(shown)
        + "\nEvery process has to run the same script, under the "
        "same settings, on arguments of the same shapes, put on the same devices; host values, and arrays that were put nowhere, have "
        "to be the same ones: a batch of which each process loads a part is put together first, as by "
        "jax.make_array_from_process_local_data (see docs: processes)"
    )


def _read(world: World, what: str, number: int, p: int, key: str) -> str:
    passed = 0.0

    def check() -> bool:
        nonlocal passed
        other = world.progress[p]
        own = f", where {world.doing.unlike}" if world.doing.unlike else ""
        if other.calls > number or (other.calls == number and other.label != world.doing.label):
            raise ProcessError(
                f"{what}: {world.name(p)} is in {other.label} instead, as number {other.calls} of what all processes do "
                f"together; here it is number {number}{own}. Every process has to call the same steps in the same order, with "
                "arguments of the same shapes and dtypes, with equal static ones, under the same settings of JAX"
            )
        if other.left:
            passed += 0.5
            if passed > world.death_timeout:
                raise ProcessError(f"{what}: the script of {world.name(p)} has ended, after {counted(other.calls)}")
        return not other.busy  # as with what it compiles, which may take long

    try:
        return world.read(key, check=check)
    except TimeoutError:
        raise ProcessError(
            f"{what}: {world.name(p)} did not come to it within stall_timeout={world.stall_timeout:g} s; every process has to "
            f"call the same steps in the same order; {SLOW}"
        ) from None


def _difference(name: str, other: int, first: list[str], second: list[str]) -> list[str]:
    here, there = set(first), set(second)
    alone = [line for line in first if line not in there], [line for line in second if line not in here]
    pairs = itertools.zip_longest(*(alone if any(alone) else (first, second)), fillvalue="(nothing)")
    different = [(a, b) for a, b in pairs if a != b]
    shown = [f"  {name}:"] if different else []
    for a, b in different[:SHOWN_LINES]:
        equal = len(os.path.commonprefix([a, b]))
        shown += [f"    process 0: {_around(a, equal)}", f"    process {other}: {_around(b, equal)}"]
    if len(different) > SHOWN_LINES:
        shown.append(f"    and {len(different) - SHOWN_LINES} more lines")
    return shown


def _around(line: str, place: int) -> str:
    """The part of a line around the place where it differs from another one, with … where something is left out."""
    start = max(min(place - SHOWN_BEFORE, len(line) - SHOWN_WIDTH), 0)
    end = start + SHOWN_WIDTH
    return f"{'…' * (start > 0)}{line[start:end]}{'…' * (end < len(line))}"


def _numbers(processes: list[int]) -> str:
    return f"process {processes[0]}" if len(processes) == 1 else f"processes {', '.join(map(str, processes))}"
