"""The executor: issues a plan's instructions from one thread. Nothing is traced or planned here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import jax
from jax.sharding import NamedSharding

from .. import _compat
from .._layout._transfers import Step, plan_transfer
from ._instructions import Run
from ._lower import Lowered


class Executor:
    """Runs a lowered program on flat lists of arrays.

    Args:
      lowered: the program.
      literals: value of each result that is a literal, by position.
    """

    def __init__(self, lowered: Lowered, literals: dict[int, Any]) -> None:
        self.lowered = lowered
        self.literals = literals
        self.relayouts: dict[Any, Any] = {}
        self.calls = 0
        plan = lowered.plan
        num_consts = len(lowered.program.consts)
        self.consts: list[tuple[int, Any]] = []
        self.inputs: list[tuple[int, NamedSharding, int]] = []
        for i, s, slot in plan.inputs:
            sharding = lowered.sharding(lowered.program.invars[i], s)
            if i < num_consts:
                self.consts.append((slot, jax.device_put(lowered.program.consts[i], sharding)))
            else:
                self.inputs.append((i - num_consts, sharding, slot))
        # The very object last seen where a sharding was right: comparing shardings costs more than passing an array.
        self.accepted: list[Any] = [sharding for _, sharding, _ in self.inputs]
        self.code = [self._decode(k, ins) for k, ins in enumerate(plan.instructions)]

    def _decode(self, k: int, ins: Any) -> tuple[Any, ...]:
        """An instruction as the loop of a call wants it: what to call, what it reads, fills and frees."""
        if isinstance(ins, Run):
            call = self.lowered.executables[ins.fragment]
        else:
            call = self._mover(self.lowered.transfers[k])
        return (call, _reader(ins.inputs), _run_or_tuple(ins.outputs), _runs(ins.free))

    def _mover(self, transfers: tuple[tuple[Step, ...], ...]) -> Callable[..., Any]:
        """The call that moves values, as one batch where each is a plain copy."""
        if all(len(steps) == 1 and steps[0].kind == "copy" for steps in transfers):
            shardings = [steps[0].sharding for steps in transfers]
            return lambda *values: jax.device_put(list(values), shardings)
        return lambda *values: [self.follow(x, steps) for x, steps in zip(values, transfers, strict=True)]

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs one step on arrays (or host values) in the order of the program's inputs."""
        slots: list[Any] = [None] * self.lowered.plan.num_slots
        for slot, value in self.consts:
            slots[slot] = value
        accepted = self.accepted
        for n, (i, sharding, slot) in enumerate(self.inputs):
            x = args[i]
            found = getattr(x, "sharding", None)
            if found is not accepted[n]:
                if found == sharding and isinstance(x, jax.Array):
                    accepted[n] = found
                else:
                    x = self.bring(x, sharding)
            slots[slot] = x
        # The hot loop: a task of 300 arrays spends its time in `call`, not in Python statements for each array.
        for call, read, outputs, free in self.code:
            results = call(*read(slots))
            if type(outputs) is slice:
                slots[outputs] = results
            else:
                for k, value in zip(outputs, results, strict=True):
                    slots[k] = value
            for run, nothing in free:
                slots[run] = nothing
        self.calls += 1
        return [slots[k] if k is not None else self.literals[o] for o, k in enumerate(self.lowered.plan.outputs)]

    def bring(self, x: Any, sharding: NamedSharding) -> Any:
        """An argument as the program wants it, asynchronously and without a host copy of device values."""
        if not isinstance(x, jax.Array):
            return jax.device_put(x, sharding)
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return jax.device_put(x, sharding)
        return self.follow(x, plan_transfer(x.shape, x.sharding, sharding))

    def follow(self, x: Any, steps: tuple[Step, ...]) -> Any:
        """Takes the steps of a transfer plan."""
        for step in steps:
            x = jax.device_put(x, step.sharding) if step.kind == "copy" else self._relayout(x, step.sharding)
        return x

    def _relayout(self, x: Any, sharding: NamedSharding) -> Any:
        key = (x.shape, x.dtype, x.sharding, sharding)
        if key not in self.relayouts:
            aval = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            with _compat.without_mesh():
                self.relayouts[key] = jax.jit(lambda a: a, out_shardings=sharding).lower(aval).compile()
        return self.relayouts[key](x)


def _reader(slots: tuple[int, ...]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What reads those slots from the list of all."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda values: tuple(values[k] for k in slots)


def _run_or_tuple(slots: tuple[int, ...]) -> slice | tuple[int, ...]:
    """Consecutive slots as a slice, others as they are."""
    if slots and slots == tuple(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return slots


def _runs(slots: tuple[int, ...]) -> tuple[tuple[slice, tuple[None, ...]], ...]:
    """Slots as consecutive runs, each with as many Nones."""
    runs: list[list[int]] = []
    for k in sorted(slots):
        if runs and runs[-1][1] == k:
            runs[-1][1] += 1
        else:
            runs.append([k, k + 1])
    return tuple((slice(a, b), (None,) * (b - a)) for a, b in runs)
