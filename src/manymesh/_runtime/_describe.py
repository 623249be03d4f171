"""What an instruction does, in words that users know."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

from jax.sharding import Sharding

from .._layout._layout import Layout
from .._plan._instructions import Instruction, Plan, Receive, Run, Send, Tag
from .._plan._number import arguments_elsewhere, variables_of
from .._program import Program, nbytes
from ._lower import Lowered

Phase = Literal["forward", "backward", "weight", "other", "transfer"]
"""What a time on a submesh is spent on. ``weight`` is the split half of a backward pass that makes weight gradients;
``other`` is what runs outside microbatch loops, an optimizer for example."""

ARROW = " -> submesh "  # between what a transfer carries and the number of where it arrives

_PHASES: dict[str, Phase] = {"F": "forward", "B": "backward", "W": "weight"}


@dataclass(frozen=True)
class Description:
    """An instruction in words.

    Attributes:
      submesh: where it runs; of a transfer where it arrives.
      label: name of the fragment; of a transfer ``maker -> submesh 1``.
      kind: forward, backward, weight, other or transfer.
      stage: the pipeline stage; of a transfer that of the maker. None outside loops.
      microbatch: which, or None outside loops.
      source: of a transfer the submesh it comes from.
      values: of a transfer (what it is called, dtype and shape) of each value.
      nbytes: of a transfer its bytes, all shards together.
    """

    submesh: int
    label: str
    kind: Phase
    stage: int | None
    microbatch: int | None
    source: int | None = None
    values: tuple[tuple[str, str], ...] = ()
    nbytes: int = 0

    def carried(self) -> str:
        """What a transfer carries: ``float32[4,64] from front``, alike values counted."""
        counts = Counter(f"{aval} {name}".strip() for name, aval in self.values)
        words = [text if times == 1 else f"{times} x {text}" for text, times in counts.items()]
        return ", ".join(words[:_SHOWN]) + (f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else "")


_SHOWN = 3
_describers: WeakKeyDictionary[Lowered, Describer] = WeakKeyDictionary()


class Describer:
    """Puts the instructions of one step into words."""

    def __init__(self, program: Program, layout: Layout, plan: Plan) -> None:
        self._fragments, self._names = program.fragments, layout.names
        self._variables = variables_of(program)
        self._known: dict[int, Description] = {}
        self._arguments = {place: (v, home, s) for place, v, home, s in arguments_elsewhere(program, plan)}
        self._step = program, layout, plan

    @classmethod
    def of(cls, lowered: Lowered) -> Describer:
        """That of a step, made once: numbering the variables of a large one takes as long as running it."""
        found = _describers.get(lowered)
        if found is None:
            found = _describers[lowered] = cls(lowered.program, lowered.layout, lowered.plan)
        return found

    def __call__(self, position: int, instruction: Instruction) -> Description:
        """The instruction at a position of the plan, in words."""
        found = self._known.get(position)
        if found is None:
            found = self._known[position] = self._describe(instruction)
        return found

    def argument(self, place: int) -> Description:
        """The transfer of an argument that goes on from its home, by its place among the inputs of the plan."""
        v, home, s = self._arguments[place]
        name = self._names.get(v, "argument")
        return Description(
            s, f"{name}{ARROW}{s}", "transfer", None, None, home, (("", v.aval.str_short()),), nbytes(v.aval)
        )

    def arrives(self, place: int) -> str:
        """What waits for an argument that comes from elsewhere than its home waits for."""
        program, _, plan = self._step
        return f"{self._names.get(program.invars[plan.inputs[place][0]], 'an argument')} to arrive"

    @functools.cached_property
    def _places(self) -> dict[tuple[int, Sharding], int]:
        program, layout, plan = self._step
        constants = len(program.consts)
        return {
            (i - constants, layout.sharding(program.invars[i], s)): place
            for place, (i, s, _) in enumerate(plan.inputs)
            if i >= constants
        }

    def place_of(self, position: int, sharding: Sharding) -> int | None:
        """The place among the inputs of the plan of an argument that an observer is told of."""
        return self._places.get((position, sharding))

    def goes_on(self, place: int) -> bool:
        """Whether an argument goes on from its home in every call; others move where the caller has them elsewhere."""
        return place in self._arguments

    def _describe(self, instruction: Instruction) -> Description:
        if isinstance(instruction, Run):
            f = self._fragments[instruction.fragment]
            kind: Phase = "other" if f.loop is None else _PHASES[f.kind]
            return Description(instruction.submesh, f.name, kind, f.stage, instruction.microbatch)
        values = [self._variables[k] for k in instruction.variables]
        source, target = _ends(instruction)
        maker = self._fragments[instruction.tag.maker]
        return Description(
            target, f"{maker.name}{ARROW}{target}", "transfer", maker.stage, instruction.tag.microbatch, source,
            tuple((self._names.get(v, ""), v.aval.str_short()) for v in values), sum(nbytes(v.aval) for v in values),
        )  # fmt: skip


def _ends(instruction: Send | Receive) -> tuple[int, int]:
    """Where a transfer comes from and where it goes."""
    if isinstance(instruction, Send):
        return instruction.submesh, instruction.target
    return instruction.source, instruction.submesh


Row = tuple[int, str, str, int | None, int | None, float, float]
"""Submesh, label, kind, stage, microbatch, start, end: a prediction, as `manymesh.inspect.Span` has it."""


def rows(
    program: Program,
    layout: Layout,
    plan: Plan,
    starts: Sequence[float],
    ends: Sequence[float],
    arguments: Mapping[int, tuple[float, float]],
) -> list[Row]:
    """A plan on a clock in the form that recordings are compared with.

    Args:
      program, layout, plan: the step.
      starts, ends: ``float[instruction]``, seconds; a transfer is from the start of its `Send` to the end of its `Receive`.
      arguments: start and end of each that goes on from its home, by its place among the inputs of the plan.
    """
    describe = Describer(program, layout, plan)
    sent: dict[Tag, float] = {}
    found: list[Row] = []
    for place, (start, end) in arguments.items():
        what = describe.argument(place)
        found.append((what.submesh, what.label, what.kind, what.stage, what.microbatch, start, end))
    for k, ins in enumerate(plan.instructions):
        if isinstance(ins, Send):
            sent[ins.tag] = starts[k]
            continue
        what = describe(k, ins)
        start = starts[k] if isinstance(ins, Run) else sent.get(ins.tag, starts[k])
        found.append((what.submesh, what.label, what.kind, what.stage, what.microbatch, start, ends[k]))
    return found
