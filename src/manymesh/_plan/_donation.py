"""Which inputs of fragments may be donated to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ._instructions import Instruction, Run


def donatable_inputs(
    instructions: Sequence[Instruction], lent: Iterable[int], aliases: Mapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """Inputs of fragments whose buffers nobody needs after any run.

    Args:
      instructions: those of the plan.
      lent: slots whose buffers belong to somebody else: arguments that were not donated, and constants.
      aliases: slots that may hold one buffer with another.

    Returns:
      fragment -> positions of its inputs that die in every run, that the call owns, and that alias nothing. They may
      be more than the results can take over.
    """
    kept = {*lent, *aliases}
    possible: dict[int, Sequence[int]] = {}
    for ins in instructions:
        if isinstance(ins, Run):
            slots = ins.inputs
            candidates = possible.get(ins.fragment)
            if candidates is None:
                candidates = range(len(slots))
            if candidates:
                dying = set(ins.free)
                once = len(set(slots)) == len(slots)
                candidates = [
                    k
                    for k in candidates
                    if slots[k] in dying and slots[k] not in kept and (once or slots.count(slots[k]) == 1)
                ]
            possible[ins.fragment] = candidates
    return {fragment: tuple(positions) for fragment, positions in possible.items()}
