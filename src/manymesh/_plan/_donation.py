"""Which inputs of fragments may be donated to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
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
    runs: dict[int, list[int]] = defaultdict(list)  # fragment -> positions of its runs
    for n, instruction in enumerate(instructions):
        if isinstance(instruction, Run):
            runs[instruction.fragment].append(n)
    freed_by = np.full(num_slots, -1, np.int32)
    for positions in runs.values():
        free = [instructions[n].free for n in positions]
        freed_by[list(chain.from_iterable(free))] = np.repeat(positions, [len(slots) for slots in free])
    freed_by[[*lent, *aliases]] = -1
    return {fragment: _dying(instructions, positions, freed_by) for fragment, positions in runs.items()}


def _dying(
    instructions: Sequence[Instruction], positions: list[int], freed_by: np.ndarray[Any, Any]
) -> tuple[int, ...]:
    """Which inputs of a fragment lie in slots that each of its runs frees, and reads once.

    Args:
      instructions: those of the plan.
      positions: of the fragment's runs in it.
      freed_by: for each slot, the position of the run that frees it; -1 where none may have it.
    """
    runs = (instructions[n] for n in positions)
    slots = np.array([run.inputs for run in runs if isinstance(run, Run)], np.int32).reshape(len(positions), -1)
    dying = (freed_by[slots] == np.array(positions)[:, None]).all(axis=0)
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
