"""Which inputs of fragments may be donated to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from .._task import mesh_devices
from ._instructions import Instruction, Run, Send


def donatable_inputs(
    instructions: Sequence[Instruction], num_slots: int, lent: Iterable[int], aliases: Mapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """Inputs of fragments whose buffers nobody needs after any run.

    Args:
      instructions: those of the plan.
      num_slots: how many slots they use.
      lent: slots whose buffers belong to somebody else: arguments that were not donated, and constants.
      aliases: slots that may hold one buffer with another.

    Returns:
      fragment -> positions of its inputs that die in every run, that the call owns, and that alias nothing. They may
      be more than the results can take over.
    """
    runs: dict[int, list[tuple[int, Run]]] = defaultdict(list)  # fragment -> its runs, with their positions
    freed_by = np.full(num_slots, -1)
    for n, instruction in enumerate(instructions):
        if isinstance(instruction, Run):
            runs[instruction.fragment].append((n, instruction))
            freed_by[list(instruction.free)] = n
    freed_by[[*lent, *aliases]] = -1
    return {fragment: _dying(numbered, freed_by) for fragment, numbered in runs.items()}


def _dying(numbered: list[tuple[int, Run]], freed_by: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """The positions whose slot each of the runs frees, and reads once.

    Args:
      numbered: the runs of a fragment, with their positions in the plan.
      freed_by: for each slot, the position of the run that frees it; -1 where none may have it.
    """
    slots = np.array([run.inputs for _, run in numbered], int).reshape(len(numbered), -1)
    dying = (freed_by[slots] == [[n] for n, _ in numbered]).all(axis=0)
    ordered = np.sort(slots, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        for k in np.flatnonzero(dying):
            dying[k] = ((slots == slots[:, k : k + 1]).sum(axis=1) == 1).all()
    return tuple(np.flatnonzero(dying).tolist())


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
