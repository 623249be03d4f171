"""What the executor does, as data: numbered slots, and instructions that read and fill them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """Runs a fragment once.

    Attributes:
      fragment: its index in the program.
      submesh: where.
      microbatch: which microbatch, or None outside loops.
      inputs: slots read, in the order of the fragment's variables.
      outputs: slots filled.
      free: slots that nobody reads any more.
    """

    fragment: int
    submesh: int
    microbatch: int | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    free: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Transfer:
    """Moves values from one submesh to another, as one batch.

    Attributes:
      source: submesh they are on.
      target: submesh they go to.
      variables: what they are, one each.
      microbatch: which microbatch, or None outside loops.
      inputs: slots read.
      outputs: slots filled.
      free: slots that nobody reads any more.
    """

    source: int
    target: int
    variables: tuple[Any, ...]
    microbatch: int | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    free: tuple[int, ...] = ()


Instruction = Run | Transfer


@dataclass(frozen=True, eq=False)
class Plan:
    """One call of the step.

    Attributes:
      instructions: in the order of issue; on each submesh, the order of execution.
      num_slots: how many slots a call uses.
      inputs: (input position, submesh, slot) for each place an input has to arrive at.
      outputs: the slot of each result, or None where the result is a literal.
      donated: fragment -> positions of its inputs whose buffers its results may reuse.
    """

    instructions: tuple[Instruction, ...]
    num_slots: int
    inputs: tuple[tuple[int, int, int], ...]
    outputs: tuple[int | None, ...]
    donated: dict[int, tuple[int, ...]]

    def stream(self, submesh: int) -> tuple[Instruction, ...]:
        """The instructions that concern one submesh, in its order."""
        return tuple(
            i
            for i in self.instructions
            if (i.submesh == submesh if isinstance(i, Run) else submesh in (i.source, i.target))
        )

    def text(self, names: Sequence[str]) -> str:
        """One line for each instruction; ``names`` are those of the fragments."""
        lines = []
        for i in self.instructions:
            what = f"run {names[i.fragment]}" if isinstance(i, Run) else f"send {i.source} -> {i.target}"
            if i.microbatch is not None:
                what += f" [{i.microbatch}]"
            line = f"{what}: {' '.join(map(str, i.inputs)) or '-'} -> {' '.join(map(str, i.outputs)) or '-'}"
            lines.append(line + (f", frees {' '.join(map(str, i.free))}" if i.free else ""))
        return "\n".join(lines)
