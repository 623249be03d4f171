"""The instructions of one call, as data: numbered slots, and what reads, fills and frees them.

A plan holds numbers and names only. Two processes that trace the same step make equal plans, whatever the seeds of
their hashes, and each runs the instructions of the submeshes that it owns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._shown import Shown


class Value(NamedTuple):
    """Shape and dtype of a variable.

    Attributes:
      shape: its shape, all shards together.
      dtype: name of its dtype.
    """

    shape: tuple[int, ...]
    dtype: str


class Tag(NamedTuple):
    """What a `Send` and its `Receive` have in common and no other pair of a call has.

    Attributes:
      maker: fragment whose run made the values.
      target: submesh they go to.
      microbatch: which microbatch, or None outside loops.
    """

    maker: int
    target: int
    microbatch: int | None


class Run(NamedTuple):
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


class Send(NamedTuple):
    """Hands values of a submesh to another one, as one batch.

    Attributes:
      submesh: where they are.
      target: submesh they go to.
      tag: that of the `Receive` on the target.
      variables: numbers of the variables they are values of (`Plan.variables`), one each.
      inputs: slots read.
      free: slots that nobody reads any more.
    """

    submesh: int
    target: int
    tag: Tag
    variables: tuple[int, ...]
    inputs: tuple[int, ...]
    free: tuple[int, ...] = ()


class Receive(NamedTuple):
    """Takes what another submesh sent.

    Attributes:
      submesh: where the values arrive.
      source: submesh they come from.
      tag: that of the `Send` on the source.
      variables: numbers of the variables they are values of, as in the `Send`.
      outputs: slots filled.
      free: slots that nobody reads.
    """

    submesh: int
    source: int
    tag: Tag
    variables: tuple[int, ...]
    outputs: tuple[int, ...]
    free: tuple[int, ...] = ()


Instruction = Run | Send | Receive


class Ports(NamedTuple):
    """What a fragment reads and makes.

    Attributes:
      reads: numbers of the variables it reads.
      makes: numbers of the variables it makes.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True)
class Plan(Shown):
    """One call of the step.

    Attributes:
      instructions: in the order of issue; on each submesh, and on each device, the order of execution.
      num_slots: how many slots a call uses.
      inputs: (input position, submesh, slot) for each place an input has to arrive at.
      outputs: the slot of each result, or None where the result is a literal.
      variables: shape and dtype of each variable of the program, by its number.
      ports: what each fragment reads and makes.
      aliases: for slots that may hold one buffer, as they are a value's copies on submeshes that share devices: slot ->
        the first slot of its group.
      donatable: fragment -> positions of its inputs that die in every run, that the call owns, and that alias nothing.
    """

    instructions: tuple[Instruction, ...]
    num_slots: int
    inputs: tuple[tuple[int, int, int], ...]
    outputs: tuple[int | None, ...]
    variables: tuple[Value, ...]
    ports: tuple[Ports, ...]
    aliases: Mapping[int, int]
    donatable: Mapping[int, tuple[int, ...]]

    def buffer(self, slot: int) -> int:
        """The slot that stands for all that may hold one buffer with a slot."""
        return self.aliases.get(slot, slot)

    def stream(self, submesh: int) -> tuple[Instruction, ...]:
        """The instructions of one submesh, in its order."""
        return tuple(i for i in self.instructions if i.submesh == submesh)

    def __repr__(self) -> str:
        counts = Counter(type(i).__name__ for i in self.instructions)
        what = ", ".join(f"{count} {name}" for name, count in counts.items()) or "no instructions"
        return f"Plan({what} on {self.num_slots} slots, {len(self.inputs)} inputs, {len(self.outputs)} results)"

    def text(self, names: Sequence[str], submesh: int | None = None) -> str:
        """One line for each instruction: ``submesh: what: slots read -> slots filled``.

        Args:
          names: names of the fragments.
          submesh: shows the instructions of that one only.
        """
        shown = self.instructions if submesh is None else self.stream(submesh)
        return "\n".join(line(i, names) for i in shown)


def line(instruction: Instruction, names: Sequence[str]) -> str:
    """An instruction as one line of text; ``names`` are those of the fragments."""
    i = instruction
    reads: Sequence[int] = () if isinstance(i, Receive) else i.inputs
    fills: Sequence[int] = () if isinstance(i, Send) else i.outputs
    if isinstance(i, Run):
        what, m = f"run {names[i.fragment]}", i.microbatch
    else:
        what, m = f"{'send' if isinstance(i, Send) else 'receive'} {names[i.tag.maker]}", i.tag.microbatch
    if m is not None:
        what += f" [{m}]"
    if isinstance(i, Send):
        what += f" to {i.target}"
    elif isinstance(i, Receive):
        what += f" from {i.source}"
    text = f"{i.submesh}: {what}: {_slots(reads)} -> {_slots(fills)}"
    return f"{text}, frees {_slots(i.free)}" if i.free else text


def _slots(slots: Sequence[int]) -> str:
    return " ".join(map(str, slots)) or "-"
