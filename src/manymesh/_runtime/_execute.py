"""The executor: issues a plan's instructions from one thread. Nothing is traced or planned here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._reshard._plan import Step, plan_transfer
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
            sharding = lowered.arrivals[i, s]
            if i < num_consts:
                self.consts.append((slot, jax.device_put(lowered.program.consts[i], sharding)))
            else:
                self.inputs.append((i - num_consts, sharding, slot))
        self.code = [self._decode(k, ins) for k, ins in enumerate(plan.instructions)]

    def _decode(self, k: int, ins: Any) -> tuple[Any, ...]:
        if isinstance(ins, Run):
            return (self.lowered.executables[ins.fragment], ins.inputs, ins.outputs, ins.free, None)
        steps = self.lowered.transfers[k]
        if all(len(s) == 1 and s[0].kind == "copy" for s in steps):
            return (None, ins.inputs, ins.outputs, ins.free, [s[0].sharding for s in steps])
        return (None, ins.inputs, ins.outputs, ins.free, steps)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs one step on arrays (or host values) in the order of the program's inputs."""
        slots: list[Any] = [None] * self.lowered.plan.num_slots
        for slot, value in self.consts:
            slots[slot] = value
        for i, sharding, slot in self.inputs:
            x = args[i]
            if not isinstance(x, jax.Array) or (x.sharding is not sharding and x.sharding != sharding):
                x = self.bring(x, sharding)
            slots[slot] = x
        for executable, inputs, outputs, free, shardings in self.code:
            if executable is not None:
                results = executable(*[slots[k] for k in inputs])
            elif type(shardings) is list:
                results = jax.device_put([slots[k] for k in inputs], shardings)
            else:
                results = [self.follow(slots[k], steps) for k, steps in zip(inputs, shardings, strict=True)]
            for k, value in zip(outputs, results, strict=True):
                slots[k] = value
            for k in free:
                slots[k] = None
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
            self.relayouts[key] = jax.jit(lambda a: a, out_shardings=sharding).lower(aval).compile()
        return self.relayouts[key](x)
