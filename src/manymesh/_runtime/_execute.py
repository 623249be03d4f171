"""The executor: issues the instructions of a bound plan from one thread. Nothing is traced, planned or compiled here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter, length_hint
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from .. import _compat
from .._errors import ManyMeshError
from .._layout._transfers import plan_transfer
from .._plan._instructions import Instruction, Receive, Run, Send
from ._memories import is_in_host_memory
from ._observe import Observer
from ._positions import Positions
from ._relayout import Relayouts, lies_as

# Position of an issue -> arguments to be brought from the memory of the host before it: position in the list, sharding.
Late = dict[int, list[tuple[int, NamedSharding]]]

# What the loop of a call wants of an issue: call, read, outputs, free.
_Code = tuple[
    Callable[..., Sequence[jax.Array]],
    Callable[[list[Any]], Sequence[jax.Array]],
    slice | tuple[int, ...],
    tuple[tuple[slice, tuple[None, ...]], ...],
]


@dataclass(frozen=True, eq=False)
class Issue:
    """An instruction as the loop of a call wants it, or a `Send` with its `Receive` where one copy does both.

    Attributes:
      call: takes the arrays that are read, gives those that are made.
      read: takes the list of a call (`Positions`), gives the arrays that are read.
      outputs: positions filled; a slice where they follow each other.
      free: runs of positions that nobody reads any more and nothing was put in, each with as many Nones.
      told: the instructions, each with its position in the plan; none where it belongs to other processes.
      reads: the positions that ``read`` takes.
    """

    call: Callable[..., Sequence[jax.Array]]
    read: Callable[[list[Any]], Sequence[jax.Array]]
    outputs: slice | tuple[int, ...]
    free: tuple[tuple[slice, tuple[None, ...]], ...]
    told: tuple[tuple[int, Instruction], ...]
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Input:
    """A place where an argument has to arrive.

    Attributes:
      position: which leaf of the arguments.
      sharding: what it has to have there.
      at: where in the list of a call it goes.
      stays: whether it may stay where somebody put it, for nothing but a result comes of it.
    """

    position: int
    sharding: NamedSharding
    at: int
    stays: bool = False


class Kept:
    """An argument of many calls that several submeshes read: there is a copy on each, made by the first call that reads it.

    Attributes:
      value: the array.
    """

    def __init__(self, value: jax.Array) -> None:
        self.value = value
        self._copies: dict[NamedSharding, jax.Array] = {}

    def at(self, sharding: NamedSharding, bring: Callable[[Any, NamedSharding], jax.Array]) -> jax.Array:
        """The array with a sharding; ``bring`` makes a copy that has it."""
        if self.value.sharding == sharding:
            return self.value
        if sharding not in self._copies:
            self._copies[sharding] = bring(self.value, sharding)
        return self._copies[sharding]


class Executor:
    """Runs a bound plan on flat lists of arrays.

    Args:
      length: that of the list in which a call keeps its arrays.
      consts: position in the list -> constant that is there.
      inputs: where arguments go.
      issues: what a call does, in its order.
      outputs: position in the list of each result; None for one that is a literal, or that another process has.
      literals: position of a result -> its value, where that is a literal.
      relayouts: what changes layouts.
      names: that of each fragment, for errors.
    """

    def __init__(
        self,
        length: int,
        consts: Mapping[int, jax.Array],
        inputs: Sequence[Input],
        issues: Sequence[Issue],
        outputs: Sequence[int | None],
        literals: Mapping[int, jax.Array],
        relayouts: Relayouts,
        names: Sequence[str],
    ) -> None:
        self.literals, self._names = literals, names
        self._length, self._outputs, self._relayouts = length, tuple(outputs), relayouts
        self._consts = tuple(consts.items())
        self._inputs = tuple(inputs)
        # The very object last seen where a sharding was right: comparing shardings costs more than passing an array.
        self._accepted: list[Any] = [x.sharding for x in inputs]
        self._given = _reader(tuple(x.position for x in inputs))
        self._at = _run_or_tuple(tuple(x.at for x in inputs))
        self._results = _reader(tuple(k for k in outputs if k is not None)) if None not in outputs else None
        self._issues = tuple(issues)
        self._code: list[_Code] = [(x.call, x.read, x.outputs, x.free) for x in issues]

    def __call__(self, args: Sequence[Any], observer: Observer | None = None) -> list[Any]:
        """Runs one step.

        Args:
          args: arrays, host values or, in one process, what is `Kept`, in the order of the program's inputs, without its
            constants.
          observer: is told what is done.

        Returns:
          The results; None for what another process has.
        """
        slots, late = self._filled(args, observer)
        issues = iter(self._code)
        try:
            if observer is not None:
                self._observed(slots, late, observer, issues)
            elif late:
                self._with_late(slots, late, issues)
            else:
                # The hot loop: a task of 300 arrays spends its time in `call`, not in Python statements for each array.
                for call, read, outputs, free in issues:
                    if type(outputs) is slice:
                        slots[outputs] = call(*read(slots))
                    else:
                        for k, value in zip(outputs, call(*read(slots)), strict=True):
                            slots[k] = value
                    for run, nothing in free:
                        slots[run] = nothing
        except Exception as error:
            if not isinstance(error, ManyMeshError):
                self._say_where(error, len(self._code) - length_hint(issues) - 1, slots)
            raise
        if self._results is not None:
            return list(self._results(slots))
        literals = self.literals
        return [slots[k] if k is not None else literals.get(o) for o, k in enumerate(self._outputs)]

    def finish(self, results: list[Any]) -> None:
        """Completes results, of which those are None that other processes made."""

    def bring(self, x: Any, sharding: NamedSharding) -> jax.Array:
        """An array, or a host value, with a sharding of this step: asynchronously, from any devices."""
        return self._relayouts.bring(x, sharding)

    def prepare(self, aval: jax.ShapeDtypeStruct, source: Sharding, target: NamedSharding) -> None:
        """Compiles what `bring` needs for a value that comes with a sharding."""
        given = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=source)
        self._relayouts.prepare_steps(given, plan_transfer(aval.shape, source, target))

    def _filled(self, args: Sequence[Any], observer: Observer | None) -> tuple[list[Any], Late]:
        """The slots with constants and arguments in them, and what is still in the memory of the host.

        Whatever an argument needs is compiled here.
        """
        slots: list[Any] = [None] * self._length
        for slot, value in self._consts:
            slots[slot] = value
        values, accepted = list(self._given(args)), self._accepted
        late: Late = {}
        moved = [n for n, x in enumerate(values) if getattr(x, "sharding", None) is not accepted[n]]
        for n in moved:  # mostly none: all are where the last call found them
            if isinstance(values[n], jax.Array):
                values[n] = _compat.in_default_order(values[n])
            x, sharding = values[n], self._inputs[n].sharding
            given = getattr(x, "sharding", None)
            if lies_as(x, sharding):
                accepted[n] = given
            elif self._inputs[n].stays and isinstance(given, NamedSharding):
                pass  # on the submeshes of another step, mostly, which would move it back
            elif isinstance(x, Kept):
                values[n] = x.at(sharding, self._relayouts.bring)
            elif is_in_host_memory(x) and (first := self._first_reader.get(self._inputs[n].at)) is not None:
                late.setdefault(first, []).append((self._inputs[n].at, sharding))
            else:
                if observer is not None:
                    observer.moves_argument(self._inputs[n].position, x, sharding)
                values[n] = self._relayouts.bring(x, sharding)
                if observer is not None:
                    observer.moved_argument(self._inputs[n].position, values[n])
        _put(slots, self._at, values)
        if late:  # what the last call made is still on its devices while it goes to the host
            jax.block_until_ready([slots[at] for due in late.values() for at, _ in due])
        return slots, late

    @functools.cached_property
    def _first_reader(self) -> dict[int, int]:
        """Position in the list of a call where an argument arrives -> the first issue that reads it."""
        wanted, found = {x.at for x in self._inputs}, dict[int, int]()
        for k, issue in enumerate(self._issues):
            for at in wanted.intersection(issue.reads):
                found[at] = k
                wanted.discard(at)
        return found

    def _bring(self, slots: list[Any], due: Sequence[tuple[int, NamedSharding]]) -> None:
        """Brings arguments from the memory of the host to the devices that are about to read them."""
        for at, sharding in due:
            slots[at] = self._relayouts.bring(slots[at], sharding)

    def _say_where(self, error: Exception, at: int, slots: list[Any]) -> None:
        """Notes in an exception which issue it comes from; in one about a NaN, which fragment, and what that has read."""
        told = self._issues[at].told
        if not told:
            return
        _, ins = told[-1]
        microbatch = ins.microbatch if isinstance(ins, Run) else ins.tag.microbatch
        of = "" if microbatch is None else f", microbatch {microbatch},"
        if isinstance(ins, Run):
            if isinstance(error, _compat.InternalFloatingPointError):  # whose name is `jit` for what has run before
                error.args = (self._names[ins.fragment], error.args[1], self._issues[at].read(slots))
            where = f"while {self._names[ins.fragment]!r}{of} runs on submesh {ins.submesh}"
        else:
            ends = (ins.submesh, ins.target) if isinstance(ins, Send) else (ins.source, ins.submesh)
            where = (
                f"while what {self._names[ins.tag.maker]!r}{of} made goes from submesh {ends[0]} to submesh {ends[1]}"
            )
        error.add_note(where)
        if "RESOURCE_EXHAUSTED" in str(error):
            error.add_note("`lower(...).report()` of this step says what each device holds, and when it holds most")

    def _with_late(self, slots: list[Any], late: Late, issues: Iterator[_Code]) -> None:
        """The loop of a call that has arguments in the memory of the host: no device holds them before it needs them."""
        for k, (call, read, outputs, free) in enumerate(issues):
            self._bring(slots, late.get(k, ()))
            _put(slots, outputs, call(*read(slots)))
            for run, nothing in free:
                slots[run] = nothing

    def _observed(self, slots: list[Any], late: Late, observer: Observer, issues: Iterator[_Code]) -> None:
        """The loop of a call, with somebody looking on."""
        for number, (issue, _) in enumerate(zip(self._issues, issues, strict=True)):
            self._bring(slots, late.get(number, ()))
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
            try:
                results = issue.call(*inputs)
            except BaseException:
                observer.failed()
                raise
            _put(slots, issue.outputs, results)
            observer.end(k, instruction, results)
            del inputs, results
            for run, nothing in issue.free:
                slots[run] = nothing


def issue_of(call: Callable[..., Any], at: Positions, *told: tuple[int, Instruction]) -> Issue:
    """One instruction, or a `Send` and its `Receive`, for the loop of a call. Asked for in the order of issue.

    Args:
      call: does it.
      at: where the arrays of a call are.
      told: position in the plan, and the instruction.
    """
    first, last = told[0][1], told[-1][1]
    reads = () if isinstance(first, Receive) else first.inputs
    fills = () if isinstance(last, Send) else last.outputs
    free = [slot for _, instruction in told for slot in instruction.free]
    read, filled, empty = at.issue(reads, fills, free)
    return Issue(
        call, _reader(read), _run_or_tuple(filled), tuple([(slice(r.start, r.stop), (None,) * len(r)) for r in empty]), told,
        read,
    )  # fmt: skip


def untold(call: Callable[[], Any]) -> Issue:
    """What this process does for an instruction of others, on no slots and told to nobody."""
    return Issue(call, _reader(()), (), (), (), ())


def _reader(positions: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What reads those positions from the list of a call, or of its arguments."""
    run = _run_or_tuple(positions)
    if type(run) is slice:
        return itemgetter(run)  # at once, where a number for each position takes as long as all else that is done here
    return itemgetter(*positions) if positions else lambda values: ()


def _put(slots: list[Any], positions: slice | tuple[int, ...], values: Sequence[Any]) -> None:
    """Puts values into a list, in positions as `_run_or_tuple` gives them."""
    if type(positions) is slice:
        slots[positions] = values
    else:
        for slot, value in zip(positions, values, strict=True):
            slots[slot] = value


def _run_or_tuple(positions: tuple[int, ...]) -> slice | tuple[int, ...]:
    """Consecutive positions as a slice, others as they are."""
    if positions and positions == tuple(range(positions[0], positions[0] + len(positions))):
        return slice(positions[0], positions[0] + len(positions))
    return positions
