"""`bind`: a plan, its layout and its executables become something that runs, for the submeshes that this process owns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .. import _compat
from .._layout._transfers import Step, plan_transfer
from .._plan._donation import held_outside
from .._plan._instructions import Plan, Receive, Run, Send
from .._plan._number import variables_of
from .._program import Program
from ._exchange import put, put_apart
from ._execute import Executor, Input, Issue, issue_of, untold
from ._launches import ALONE, EVERY, CountedRelayouts, Handle, Launches
from ._ownership import Ownership
from ._positions import Positions
from ._relayout import Relayouts, with_sharding
from ._transport import Batch, Transport
from ._witness import witness_of


class Layout(Protocol):
    """The sharding of every value on every submesh it is on."""

    def sharding(self, variable: _compat.Var, submesh: int, /) -> NamedSharding:
        """The sharding of a variable on a submesh."""


Donation = Mapping[int, Sequence[tuple[int, int]]]


def bind(
    program: Program,
    plan: Plan,
    layout: Layout,
    executables: Sequence[Callable[..., Sequence[jax.Array]] | None],
    owner: Ownership,
    transport: Transport,
    *,
    starts: Mapping[int, Sequence[int]] | None = None,
    literals: Mapping[int, jax.Array] | None = None,
    arriving: Mapping[int, Sharding] | None = None,
    leaving: Mapping[int, NamedSharding] | None = None,
    donation: Donation | None = None,
    stays: Container[int] = (),
) -> Executor:
    """Makes a plan ready to run. All that a call may need is compiled here.

    Args:
      program: what the plan computes.
      plan: the instructions of all submeshes.
      layout: the shardings of its values.
      executables: one for each fragment; None for those of other owners' submeshes.
      owner: which submeshes are run here. The instructions of the others are left out.
      transport: moves what crosses.
      starts: fragment -> where pieces begin, for the executables that are handed it (`Cuts`).
      literals: position of a result -> its value, where that is a literal.
      arriving: position of an argument -> the sharding it is known to come with.
      leaving: position of a result -> the sharding it is given at last, where that is another one.
      donation: fragment -> pairs (input, result) where the result takes the array of the input.
      stays: inputs of the program that may stay where somebody put them.

    Returns:
      The executor of the plan.
    """
    launches = _counted(program)
    binder = Binder(program, plan, layout, executables, owner, transport, starts, launches, donation)
    issues = binder.issues()
    consts, inputs = binder.inputs(stays)
    for x in inputs:
        # As it comes now, and as it comes when the results of one call are the arguments of the next.
        for sharding in ((arriving or {}).get(x.position), binder.home(x)):
            if sharding is not None:
                binder.prepare_argument(x, sharding)
    for o, sharding in (leaving or {}).items():
        binder.prepare_result(o, sharding)
    binder.relayouts.prepare(binder.wanted)
    outputs = binder.outputs()
    names = [f.name for f in program.fragments]
    return Executor(len(binder.positions), consts, inputs, issues, outputs, literals or {}, binder.relayouts, names)


def _counted(program: Program) -> Launches | None:
    """What counts the launches of a program, where running far ahead could stop it for ever.

    JAX on CPU launches no more than 32 unfinished computations on a device, and launches and runs all devices on threads
    of one pool. Where a device has fallen behind so far, a launch may have begun on the others of its submesh; they wait for
    that one in a collective, and what would make room there finds no thread: there are as many as devices.
    """
    apart: list[frozenset[int]] = []
    for mesh in program.submeshes:
        ids = frozenset(d.id for d in mesh.devices.flat)
        apart = [x for x in apart if not x & ids] + [ids.union(*(x for x in apart if x & ids))]
    may_wait = sum(len(ids) for ids in apart if len(ids) > 1)
    if may_wait < jax.local_device_count() or program.submeshes[0].devices.flat[0].platform != "cpu":
        return None
    return Launches(ordered=False, most=ALONE, every=EVERY, apart=tuple(apart))


def put_constant(program: Program, i: int, sharding: NamedSharding) -> jax.Array:
    """The i-th constant of a program as an array that it alone has."""
    with _compat.wide_values([program.invars[i]]):
        return put_apart(program.consts[i], sharding)


@dataclass(frozen=True)
class _Way:
    """How one value crosses: a change of layout where it is, a copy, a change of layout where it goes."""

    before: NamedSharding | None
    copied: NamedSharding | None
    after: NamedSharding | None

    @classmethod
    def of(cls, steps: Sequence[Step]) -> _Way:
        kinds = [s.kind for s in steps]
        at = kinds.index("copy") if "copy" in kinds else -1
        before = [s.sharding for s in steps[: max(at, 0)]]
        after = [s.sharding for s in steps[at + 1 :]]
        assert len(before) <= 1 and len(after) <= 1, f"a transfer of {kinds}"
        return cls(before[0] if before else None, steps[at].sharding if at >= 0 else None, after[0] if after else None)


@dataclass(frozen=True)
class _Crossing:
    """What a `Send` and its `Receive` do in every microbatch."""

    sent: tuple[jax.ShapeDtypeStruct, ...]
    arriving: tuple[jax.ShapeDtypeStruct, ...]
    before: tuple[tuple[jax.ShapeDtypeStruct, NamedSharding] | None, ...]
    after: tuple[tuple[jax.ShapeDtypeStruct, NamedSharding] | None, ...]
    copies: bool


class Binder:
    """Makes what a plan needs to run."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        layout: Layout,
        executables: Sequence[Callable[..., Sequence[jax.Array]] | None],
        owner: Ownership,
        transport: Transport,
        starts: Mapping[int, Sequence[int]] | None = None,
        launches: Launches | None = None,
        donation: Donation | None = None,
    ) -> None:
        self.program, self.plan, self.layout = program, plan, layout
        self.executables, self.owner, self.transport = executables, owner, transport
        self.starts = starts or {}
        self.calls: dict[int, Callable[..., Sequence[jax.Array]]] = {}
        self.variables = variables_of(program)
        self.results = frozenset(plan.outputs)
        self._held_outside = held_outside(plan, len(program.consts))
        self.positions = Positions()
        self.relayouts = Relayouts() if launches is None else CountedRelayouts(launches)
        self._launches, self._donation = launches, donation or {}
        self._witnesses: dict[int, Handle] = {}
        self.wanted: list[tuple[jax.ShapeDtypeStruct, NamedSharding]] = []
        self.crossings: dict[tuple[int, int, tuple[int, ...]], _Crossing] = {}

    def outputs(self) -> list[int | None]:
        """Where each result is at last; None for a literal, and for what is another owner's."""
        homes = [s for _, s in self.program.outputs]
        found = zip(self.plan.outputs, homes, strict=True)
        return [self.positions[k] if k is not None and self.owner.owns(s) else None for k, s in found]

    def inputs(self, stays: Container[int] = ()) -> tuple[dict[int, jax.Array], list[Input]]:
        """Where constants are, with their values, and where arguments go."""
        consts, inputs = {}, []
        num_consts = len(self.program.consts)
        for i, s, slot in self.plan.inputs:
            if self.owner.owns(s):
                sharding = self.layout.sharding(self.program.invars[i], s)
                if i < num_consts:
                    consts[self.positions[slot]] = put_constant(self.program, i, sharding)
                else:
                    inputs.append(Input(i - num_consts, sharding, self.positions[slot], i in stays))
        return consts, inputs

    def issues(self) -> list[Issue]:
        """What is done here, in the order of the plan."""
        crossings, at = self._prepared(), self.positions
        issues: list[Issue] = []
        sent: tuple[int, Send] | None = None
        sender: tuple[int, Send] | None = None
        for k, ins in enumerate(self.plan.instructions):
            if isinstance(ins, Run):
                if self.owner.owns(ins.submesh):
                    issues.append(issue_of(self.launch(self._call(ins), ins), at, (k, ins)))
            elif isinstance(ins, Send):
                sender = k, ins
                if self.owner.owns(ins.submesh) and self.owner.owns(ins.target):
                    sent = sender  # the Receive stands right behind it
                elif self.owner.owns(ins.submesh):
                    issues.append(issue_of(self._send(self.batch(sender, crossings[k]), crossings[k]), at, sender))
                elif not self.owner.owns(ins.target) and (call := self.pass_by(sender)) is not None:
                    issues.append(untold(call))
            elif self.owner.owns(ins.submesh):
                assert sender is not None, "a Receive stands behind its Send"
                batch = self.batch(sender, crossings[k])
                if sent is not None:
                    issues.append(issue_of(self._move(batch, crossings[k]), at, sent, (k, ins)))
                    sent = None
                else:
                    issues.append(issue_of(self._receive(batch, crossings[k]), at, (k, ins)))
        return issues

    def _call(self, run: Run) -> Callable[..., Sequence[jax.Array]]:
        """What a run calls; the same for every microbatch."""
        if run.fragment not in self.calls:
            self.calls[run.fragment] = self._new_call(run.fragment, self.program.submeshes[run.submesh])
        return self.calls[run.fragment]

    def _new_call(self, fragment: int, mesh: Any) -> Callable[..., Sequence[jax.Array]]:
        executable = self.executables[fragment]
        assert executable is not None, f"fragment {fragment} was not compiled for its owner"
        call = _compat.call_of(executable, [v.aval for v in self.program.fragments[fragment].invars])
        given = [put(np.int32(start), NamedSharding(mesh, PartitionSpec())) for start in self.starts.get(fragment, ())]
        return (lambda *args: call(*args, *given)) if given else call

    @functools.cached_property
    def _donated(self) -> frozenset[int]:
        """The slots of which some run takes the arrays away."""
        return frozenset(slot for i in self.plan.instructions if isinstance(i, Run) for slot in self._uses_up(i))

    def _uses_up(self, run: Run) -> list[int]:
        """The slots of which a run takes the arrays away."""
        return [run.inputs[k] for k, _ in self._donation.get(run.fragment, ())]

    def launch(self, call: Callable[..., Sequence[jax.Array]], run: Run) -> Callable[..., Sequence[jax.Array]]:
        """What a run calls; where launches are counted, one that waits for its turn. Asked for in the order of the plan."""
        if self._launches is None:
            return call
        witness = witness_of(self.program, run, self._donated, self.results)
        taken = [h for slot in self._uses_up(run) if (h := self._witnesses.pop(slot, None)) is not None]
        for slot in run.outputs:
            self._witnesses.pop(slot, None)
        if witness is None:
            return call
        handle = self._witnesses[run.outputs[witness]] = Handle()
        mesh = self.program.submeshes[run.submesh]
        return self._launches.counted(call, run, itemgetter(witness), mesh, handle, taken)

    def pass_by(self, sender: tuple[int, Send]) -> Callable[[], Sequence[jax.Array]] | None:
        """What is called where values go from one submesh of others to another; None where that is nothing."""
        return None

    def _prepared(self) -> dict[int, _Crossing]:
        """Position of each `Send` and `Receive` of ours -> how its values cross; changes of layout are compiled."""
        crossings = {}
        for k, ins in enumerate(self.plan.instructions):
            if isinstance(ins, Send) and self.owner.owns(ins.submesh):
                crossings[k] = self.crossing(ins.submesh, ins.target, ins.variables)
            elif isinstance(ins, Receive) and self.owner.owns(ins.submesh):
                crossings[k] = self.crossing(ins.source, ins.submesh, ins.variables)
        self.relayouts.prepare(self.wanted)
        return crossings

    def crossing(self, source: int, target: int, variables: tuple[int, ...]) -> _Crossing:
        """How values get from one submesh to another."""
        key = source, target, variables
        if key not in self.crossings:
            self.crossings[key] = self._new_crossing(source, target, variables)
        return self.crossings[key]

    def _new_crossing(self, source: int, target: int, variables: tuple[int, ...]) -> _Crossing:
        sent, arriving, before, after, copied = [], [], [], [], []
        for number in variables:
            v = self.variables[number]
            start, goal = self.layout.sharding(v, source), self.layout.sharding(v, target)
            aval = with_sharding(_compat.abstract(v.aval), start)
            way = _Way.of(plan_transfer(aval.shape, start, goal))
            before.append(None if way.before is None else (aval, way.before))
            left = with_sharding(aval, way.before or start)
            there = with_sharding(aval, way.copied) if way.copied is not None else left
            same_devices = way.copied is not None and left.sharding.device_set == way.copied.device_set
            if way.copied is not None and same_devices and self.owner.alone(source):
                self.relayouts.prepare_steps(left, [Step("copy", way.copied)])
            after.append(None if way.after is None else (there, way.after))
            sent.append(left)
            arriving.append(there)
            copied.append(way.copied is not None)
        ours = (before if self.owner.owns(source) else []) + (after if self.owner.owns(target) else [])
        self.wanted += [x for x in ours if x is not None]
        assert len(set(copied)) <= 1, "values between two submeshes are all copied, or none of them is"
        return _Crossing(tuple(sent), tuple(arriving), tuple(before), tuple(after), any(copied))

    def batch(self, sender: tuple[int, Send], crossing: _Crossing) -> Batch:
        """What a `Send` sends."""
        number, send = sender
        # What is changed before it leaves is a copy that nobody else has.
        lent = tuple(
            slot in self._held_outside and b is None for slot, b in zip(send.inputs, crossing.before, strict=True)
        )  # fmt: skip
        return Batch(send.tag, send.submesh, send.target, crossing.sent, crossing.arriving, number, lent)

    def _move(self, batch: Batch, crossing: _Crossing) -> Callable[..., Sequence[jax.Array]]:
        """The call for values of which both ends are here."""
        before, after = self._changes(crossing.before), self._changes(crossing.after)
        if not crossing.copies:
            return lambda *values: after(before(values))
        move = self.transport.move(batch)
        if before is _same and after is _same:
            return move
        return lambda *values: after(move(*before(values)))

    def _send(self, batch: Batch, crossing: _Crossing) -> Callable[..., Sequence[jax.Array]]:
        assert crossing.copies, "submeshes over the same devices have one owner"
        send, before = self.transport.send(batch), self._changes(crossing.before)

        def call(*values: jax.Array) -> Sequence[jax.Array]:
            send(*before(values))
            return ()

        return call

    def _receive(self, batch: Batch, crossing: _Crossing) -> Callable[[], Sequence[jax.Array]]:
        assert crossing.copies, "submeshes over the same devices have one owner"
        receive, after = self.transport.receive(batch), self._changes(crossing.after)
        return receive if after is _same else lambda: after(receive())

    def _changes(
        self, changes: Sequence[tuple[jax.ShapeDtypeStruct, NamedSharding] | None]
    ) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
        """What changes the layouts of a batch, with what was compiled for it."""
        calls = [None if x is None else self.relayouts.get(*x) for x in changes]
        if not any(calls):
            return _same
        return lambda values: [x if call is None else call(x) for x, call in zip(values, calls, strict=True)]

    def home(self, place: Input) -> NamedSharding | None:
        """The sharding that an argument has at its home; None if it is not on its home."""
        v = self.program.invars[len(self.program.consts) + place.position]
        s = self.program.home[v]
        return self.layout.sharding(v, s) if s in self.program.input_submeshes[v] else None

    def prepare_argument(self, place: Input, sharding: Sharding) -> None:
        """Compiles what an argument needs that arrives with a sharding."""
        aval = self.program.invars[len(self.program.consts) + place.position].aval
        self._prepare(aval, sharding, place.sharding)

    def prepare_result(self, position: int, sharding: NamedSharding) -> None:
        """Compiles what a result needs to get a sharding."""
        v, s = self.program.outputs[position]
        if _compat.is_var(v) and self.owner.owns(s):
            self._prepare(v.aval, self.layout.sharding(v, s), sharding)

    def _prepare(self, aval: Any, source: Sharding, target: NamedSharding) -> None:
        given = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=source)
        self.relayouts.prepare_steps(given, plan_transfer(aval.shape, source, target))


def _same(values: Sequence[jax.Array]) -> Sequence[jax.Array]:
    return values
