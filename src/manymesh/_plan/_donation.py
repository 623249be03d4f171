"""Whose a buffer is: which inputs of fragments may be donated to them, and how each result gets a buffer of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from jax.sharding import Mesh

from .._task import mesh_devices
from ._instructions import Instruction, Plan, Run, Send


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


@dataclass(frozen=True)
class Handover:
    """How results leave a call, so that no two arrays outside of it hold one buffer.

    Attributes:
      copied: positions of results that are handed out as copies, before anything is taken.
      taken: positions of results that take over the buffers of donated arguments.
    """

    copied: tuple[int, ...]
    taken: tuple[int, ...]


def hand_over(plan: Plan, donated: frozenset[int]) -> Handover:
    """Gives each result a buffer that nobody else has: no other result, no argument that stays, no constant.

    Whoever gets two results may donate both, in the next step say; one donated under another name is a deleted array,
    or a read of freed memory. Slots do not tell: a value's copies on submeshes that share devices are several slots and
    one buffer. So the first result of each buffer has it, and the others, and what somebody outside holds, are copied.

    Args:
      plan: the plan.
      donated: positions of inputs whose buffers are given away.
    """
    given = {plan.buffer(slot) for i, _, slot in plan.inputs if i in donated}
    held = {plan.buffer(slot) for i, _, slot in plan.inputs if i not in donated}
    copied, taken = [], []
    for o, slot in enumerate(plan.outputs):
        if slot is None or (buffer := plan.buffer(slot)) in held:  # a literal is there for the next call too
            copied.append(o)
            continue
        held.add(buffer)
        if buffer in given:
            taken.append(o)
    return Handover(tuple(copied), tuple(taken))


def held_outside(plan: Plan, num_consts: int) -> frozenset[int]:
    """Slots whose buffers somebody outside of the call may donate or delete when it has returned: arguments and results.

    Args:
      plan: the plan.
      num_consts: how many of its first inputs are constants, which stay as long as the step.
    """
    ends = [slot for i, _, slot in plan.inputs if i >= num_consts] + [s for s in plan.outputs if s is not None]
    buffers = {plan.buffer(slot) for slot in ends}
    return frozenset(buffers) | {slot for slot, buffer in plan.aliases.items() if buffer in buffers}


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
