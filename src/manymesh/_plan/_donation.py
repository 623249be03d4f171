"""Which inputs of fragments may be donated to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from .._program import Program
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
                dying = set(ins.free) - kept
                once = len(set(slots)) == len(slots)
                candidates = [k for k in candidates if slots[k] in dying and (once or slots.count(slots[k]) == 1)]
            possible[ins.fragment] = candidates
    return {fragment: tuple(positions) for fragment, positions in possible.items()}


def match_results(program: Program, donatable: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Of the inputs that may be donated, those whose buffer a result of the same global shape can take over.

    Args:
      program: the program.
      donatable: as in `Plan`.
    """
    finals = {final for loop in program.loops for *_, final in loop.carries}
    chosen = {}
    for index, positions in donatable.items():
        f = program.fragments[index]
        room: dict[tuple[tuple[int, ...], object], int] = defaultdict(int)
        for v in f.outvars:
            room[v.aval.shape, v.aval.dtype] += 1
        reads = f.invars
        keep = []
        for k in positions:
            aval = reads[k].aval
            # The parts of a sum have a dimension more than the sum, and on each device the same size.
            for shape in (aval.shape, aval.shape[1:]) if reads[k] in finals else (aval.shape,):
                if room[shape, aval.dtype] > 0:
                    room[shape, aval.dtype] -= 1
                    keep.append(k)
                    break
        chosen[index] = tuple(keep)
    return chosen
