"""Which inputs of fragments may be donated to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from .._task import mesh_devices
from ._instructions import Instruction, Run, Send


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


def slots_of_others(submeshes: Sequence[Mesh], instructions: Sequence[Instruction]) -> list[int]:
    """Slots that another process pulls, whenever it gets there: their buffers are not the call's to give away.

    Args:
      submeshes: those of the program.
      instructions: those of the plan.
    """
    processes = [frozenset(d.process_index for d in mesh_devices(m)) for m in submeshes]
    if len(frozenset().union(*processes)) <= 1:
        return []
    return [
        slot
        for i in instructions
        if isinstance(i, Send) and len(processes[i.submesh] | processes[i.target]) > 1
        for slot in i.inputs
    ]
