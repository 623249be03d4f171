"""The executor: issues the instructions of a bound plan from one thread. Nothing is traced, planned or compiled here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from .._layout._transfers import plan_transfer
from .._plan._instructions import Instruction, Receive, Send
from ._observe import Observer
from ._relayout import Relayouts


@dataclass(frozen=True, eq=False)
class Issue:
    """An instruction as the loop of a call wants it, or a `Send` with its `Receive` where one copy does both.

    Attributes:
      call: takes the arrays that are read, gives those that are made.
      read: takes all slots, gives the arrays that are read.
      outputs: slots filled; a slice where they follow each other.
      free: runs of slots that nobody reads any more, each with as many Nones.
      told: the instructions, each with its position in the plan; none where it belongs to other processes.
    """

    call: Callable[..., Sequence[jax.Array]]
    read: Callable[[list[Any]], tuple[jax.Array, ...]]
    outputs: slice | tuple[int, ...]
    free: tuple[tuple[slice, tuple[None, ...]], ...]
    told: tuple[tuple[int, Instruction], ...]


@dataclass(frozen=True)
class Input:
    """A place where an argument has to arrive.

    Attributes:
      position: which leaf of the arguments.
      sharding: what it has to have there.
      slot: where it goes.
    """

    position: int
    sharding: NamedSharding
    slot: int


class Executor:
    """Runs a bound plan on flat lists of arrays.

    Args:
      num_slots: how many slots a call uses.
      consts: slot -> constant that fills it.
      inputs: where arguments go.
      issues: what a call does, in its order.
      outputs: slot of each result; None for one that is a literal, or that another process has.
      literals: position of a result -> its value, where that is a literal.
      relayouts: what changes layouts.
    """

    def __init__(
        self,
        num_slots: int,
        consts: Mapping[int, jax.Array],
        inputs: Sequence[Input],
        issues: Sequence[Issue],
        outputs: Sequence[int | None],
        literals: Mapping[int, jax.Array],
        relayouts: Relayouts,
    ) -> None:
        self.literals = literals
        self._num_slots, self._outputs, self._relayouts = num_slots, tuple(outputs), relayouts
        self._consts = tuple(consts.items())
        self._inputs = tuple((x.position, x.sharding, x.slot) for x in inputs)
        # The very object last seen where a sharding was right: comparing shardings costs more than passing an array.
        self._accepted: list[Any] = [x.sharding for x in inputs]
        self._issues = tuple(issues)
        self._code = [(x.call, x.read, x.outputs, x.free) for x in issues]

    def __call__(self, args: Sequence[Any], observer: Observer | None = None) -> list[Any]:
        """Runs one step.

        Args:
          args: arrays or host values in the order of the program's inputs, without its constants.
          observer: is told what is done.

        Returns:
          The results; None for what another process has.
        """
        slots = self._filled(args, observer)
        if observer is not None:
            self._observed(slots, observer)
        else:
            # The hot loop: a task of 300 arrays spends its time in `call`, not in Python statements for each array.
            for call, read, outputs, free in self._code:
                results = call(*read(slots))
                if type(outputs) is slice:
                    slots[outputs] = results
                else:
                    for k, value in zip(outputs, results, strict=True):
                        slots[k] = value
                for run, nothing in free:
                    slots[run] = nothing
        literals = self.literals
        return [slots[k] if k is not None else literals.get(o) for o, k in enumerate(self._outputs)]

    def copied(self, x: jax.Array) -> jax.Array:
        """A copy of a result, which nobody else holds."""
        copy: jax.Array = jax.device_put(x, x.sharding, may_alias=False)
        return copy

    def finish(self, results: list[Any]) -> None:
        """Completes results, of which those are None that other processes made."""

    def bring(self, x: Any, sharding: NamedSharding) -> jax.Array:
        """An array, or a host value, with a sharding of this step: asynchronously, from any devices."""
        return self._relayouts.bring(x, sharding)

    def prepare(self, aval: jax.ShapeDtypeStruct, source: Sharding, target: NamedSharding) -> None:
        """Compiles what `bring` needs for a value that comes with a sharding."""
        given = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=source)
        self._relayouts.prepare_steps(given, plan_transfer(aval.shape, source, target))

    def _filled(self, args: Sequence[Any], observer: Observer | None) -> list[Any]:
        """The slots with constants and arguments in them; whatever an argument needs is compiled here."""
        slots: list[Any] = [None] * self._num_slots
        for slot, value in self._consts:
            slots[slot] = value
        accepted = self._accepted
        for n, (i, sharding, slot) in enumerate(self._inputs):
            x = args[i]
            given = getattr(x, "sharding", None)
            if given is not accepted[n]:
                if given == sharding and isinstance(x, jax.Array):
                    accepted[n] = given
                else:
                    if observer is not None:
                        observer.moves_argument(i, x, sharding)
                    x = self._relayouts.bring(x, sharding)
            slots[slot] = x
        return slots

    def _observed(self, slots: list[Any], observer: Observer) -> None:
        """The loop of a call, with somebody looking on."""
        for issue in self._issues:
            if not issue.told:
                issue.call()
                continue
            inputs = issue.read(slots)
            (k, instruction), *rest = issue.told
            observer.begin(k, instruction, inputs)
            if rest:  # a Send and its Receive
                observer.end(k, instruction, ())
                ((k, instruction),) = rest
                observer.begin(k, instruction, ())
            results = issue.call(*inputs)
            if type(issue.outputs) is slice:
                slots[issue.outputs] = results
            else:
                for slot, value in zip(issue.outputs, results, strict=True):
                    slots[slot] = value
            observer.end(k, instruction, results)
            del inputs, results
            for run, nothing in issue.free:
                slots[run] = nothing


def issue_of(call: Callable[..., Any], *told: tuple[int, Instruction]) -> Issue:
    """One instruction, or a `Send` and its `Receive`, for the loop of a call.

    Args:
      call: does it.
      told: position in the plan, and the instruction.
    """
    first, last = told[0][1], told[-1][1]
    reads = () if isinstance(first, Receive) else first.inputs
    fills = () if isinstance(last, Send) else last.outputs
    free = tuple(slot for _, instruction in told for slot in instruction.free)
    return Issue(call, _reader(reads), _run_or_tuple(fills), _runs(free), told)


def untold(call: Callable[[], Any]) -> Issue:
    """What this process does for an instruction of others, on no slots and told to nobody."""
    return Issue(call, _reader(()), (), (), ())


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
