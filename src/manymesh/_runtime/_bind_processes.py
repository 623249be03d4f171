"""`bind_processes`: as `bind`, for a step whose submeshes belong to several processes."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from .. import _compat
from .._distributed._words import in_a_line
from .._distributed._world import Waiting, World
from .._errors import ProcessError
from .._plan._instructions import Plan, Send
from .._program import Program
from ._bind import Binder, put_constant
from ._carrier import Carrier
from ._carriers import carrier
from ._exchange import ProcessesTransport, assembled, processes_of, put
from ._execute import Executor, Late
from ._launches import Launches
from ._lower import Lowered
from ._observe import Observer
from ._ownership import Ownership, processes_of_mesh
from ._processes import (
    Arrivals,
    Crossing,
    Departures,
    Place,
    committed_sharding,
    waiting_for,
    with_weak,
)
from ._relayout import Relayouts


@dataclass(frozen=True, eq=False)
class Results:
    """What is known of the results of a step.

    Attributes:
      made: the sharding with which each is made; None for a literal.
      moved: position -> the sharding it is given at last, where that is another one.
      kept: positions of those that stay as they are, also where they are scalars.
      literals: position -> its value, where that is a literal.
    """

    made: Sequence[NamedSharding | None]
    moved: Mapping[int, NamedSharding]
    kept: frozenset[int]
    literals: Mapping[int, jax.Array]


def bind_processes(
    lowered: Lowered, owner: Ownership, results: Results, world: World, name: str, names: Callable[[], Sequence[str]],
    stays: Container[int] = (),
) -> ProcessesExecutor:  # fmt: skip
    """Makes a plan ready to run together with other processes.

    Args:
      lowered: the program with its plan, its layout and the executables of this process.
      owner: what this process runs.
      results: its results.
      world: the processes.
      name: what the step is called, for messages.
      names: gives what its arguments are called, likewise.
      stays: inputs of the program that may stay where somebody put them.

    Returns:
      The executor of this process.
    """
    program, plan = lowered.program, lowered.plan
    launches = Launches(ordered=jax.local_devices()[0].platform == "cpu")
    carries = carrier().beside(launches)
    binder = _ProcessesBinder(lowered, owner, ProcessesTransport(carries), launches)
    issues = binder.issues()
    consts = {
        binder.positions[slot]: put_constant(program, i, lowered.sharding(program.invars[i], s))
        for i, s, slot in plan.inputs
        if i < len(program.consts) and owner.owns(s)
    }
    places = []
    for i, s, slot in plan.inputs:
        if i >= len(program.consts):
            v = program.invars[i]
            own = binder.positions[slot] if owner.owns(s) else None
            handed = tuple(o for o, made in enumerate(plan.outputs) if made == slot) if i in stays else ()
            places.append(Place(i - len(program.consts), _compat.abstract(v.aval), lowered.sharding(v, s), own, handed))
    first = len(plan.instructions)
    arrivals = Arrivals(places, first, binder.relayouts, carries, names)
    for n, p in enumerate(places):
        # As it comes when the results of one call are the arguments of the next.
        v = program.invars[len(program.consts) + p.position]
        if program.home[v] in program.input_submeshes[v]:
            home = lowered.sharding(v, program.home[v])
            if not home.is_equivalent_to(p.sharding, len(p.aval.shape)):
                arrivals.crossing(n, home)
    final = [results.moved.get(o, s) for o, s in enumerate(results.made)]
    given = {slot for _, _, slot in plan.inputs}
    departures = Departures(
        program, final, results.moved, results.kept, first + len(places), binder.relayouts, carries, results.made,
        [o for o, slot in enumerate(plan.outputs) if slot in given],
    )  # fmt: skip
    outputs = binder.outputs()
    _describe_submeshes(program, world)
    return ProcessesExecutor(
        len(binder.positions), consts, (), issues, outputs, results.literals, binder.relayouts,
        arrivals, departures, launches, carries, name, program, plan,
    )  # fmt: skip


def _describe_submeshes(program: Program, world: World) -> None:
    """Notes who has what, for messages."""
    owners = [processes_of_mesh(m) for m in program.submeshes]
    for p in range(world.count):
        own = [s for s, processes in enumerate(owners) if p in processes]
        if own:
            world.submeshes[p] = f"submesh{'es' * (len(own) > 1)} {', '.join(map(str, own))}"


class _ProcessesBinder(Binder):
    def __init__(self, lowered: Lowered, owner: Ownership, transport: ProcessesTransport, launches: Launches) -> None:
        super().__init__(
            lowered.program, lowered.plan, lowered, lowered.executables, owner, transport, lowered.starts, launches,
            lowered.layout.donation,
        )  # fmt: skip
        self._processes = transport

    def pass_by(self, sender: tuple[int, Send]) -> Callable[[], Sequence[jax.Array]] | None:
        """See `Binder`."""
        if not self._processes.in_order:
            return None
        _, send = sender
        crossing = self.crossing(send.submesh, send.target, send.variables)
        return self._processes.passes_by(self.batch(sender, crossing)) if crossing.copies else None


class ProcessesExecutor(Executor):
    """Runs the part of a bound plan that belongs to this process."""

    def __init__(
        self, length: int, consts: Any, inputs: Any, issues: Any, outputs: Any, literals: Any, relayouts: Relayouts,
        arrivals: Arrivals, departures: Departures, launches: Launches, carries: Carrier, name: str, program: Program,
        plan: Plan,
    ) -> None:  # fmt: skip
        names = [f.name for f in program.fragments]
        super().__init__(length, consts, inputs, issues, outputs, literals, relayouts, names)
        self._arrivals, self._departures, self._launches, self._carrier = arrivals, departures, launches, carries
        self._world, self._program, self._plan = carries.world, program, plan
        # Two programs of one step are different things to be in.
        self._name, self._calls, self._number = f"{name} (program {self._world.doing.calls})", 0, 0
        self._label = f"a call of {self._name}"
        # Results of the call that are not where the plan has them.
        self._elsewhere: dict[int, jax.ShapeDtypeStruct] = {}
        self._others = frozenset().union(*(processes_of_mesh(m) for m in program.submeshes)) & self._world.others

    @property
    def result_shardings(self) -> list[NamedSharding | None]:
        """The sharding that each result has at last; None for a literal."""
        return self._departures.shardings

    def __call__(self, args: Sequence[Any], observer: Observer | None = None) -> list[Any]:
        """Runs one step; see `Executor`."""
        try:
            results = super().__call__(args, observer)
        except BaseException as error:
            self._fails(error)
            raise
        self._elsewhere = {}
        for o, x in self._arrivals.handed_on(args):
            self._elsewhere[o] = with_weak(_compat.abstract(jax.typeof(x)), x.sharding)
            results[o] = x if self._world.process in processes_of(x.sharding) else None
        return results

    def _filled(self, args: Sequence[Any], observer: Observer | None) -> tuple[list[Any], Late]:
        slots: list[Any] = [None] * self._length
        for slot, value in self._consts:
            slots[slot] = value
        self._arrivals.fill(slots, args, self._begin, self._name)
        return slots, {}

    def _begin(self, given: int) -> None:
        self._calls += 1
        self._label = f"call {self._calls} of {self._name}"
        self._number = self._world.begin(self._label, given=given)
        self._carrier.begin(self._number)
        self._launches.dispatching = True
        self._world.waiting = self._waiting(self._number, given)

    def _waiting(self, number: int, given: int) -> Waiting:
        return waiting_for(number, self._label, self._others, self._launches, self._program, self._plan, given)

    def finish(self, results: list[Any]) -> None:
        """Completes results, of which those are None that other processes made."""
        try:
            self._departures.finish(results, self._launches, self._elsewhere)
            self._launches.settle()
        except BaseException as error:
            self._fails(error)
            raise
        self._launches.dispatching = False

    def _fails(self, error: BaseException) -> None:
        """An exception ends a call here. The others are told: the script may catch it, and they wait for what was to come.

        What is about processes comes of what is known to the others.
        """
        if self._launches.dispatching and not isinstance(error, ProcessError):
            floats = isinstance(error, _compat.InternalFloatingPointError)  # whoever catches it says the line
            why = f"FloatingPointError: a NaN or an infinity in {error.args[0]!r}" if floats else in_a_line(error)
            self._world.fails(self._number, why)
        self._launches.dispatching = False

    def bring(self, x: Any, sharding: NamedSharding) -> jax.Array:
        """An array, or a host value, with a sharding of this step. All processes have to ask for it."""
        given = committed_sharding(x)
        if given is None:
            return put(x, sharding)
        aval = _compat.abstract(jax.typeof(x))
        if given.is_equivalent_to(sharding, len(aval.shape)):
            return assembled(with_weak(aval, sharding), _compat.pieces(_compat.key_words(x)))
        if processes_of(given) == processes_of(sharding) and len(processes_of(given)) == 1:
            if self._world.process in processes_of(given):
                return super().bring(x, sharding)
            return assembled(with_weak(aval, sharding), [])
        self._carrier.begin(self._world.begin(f"moving an argument of {self._name}"))
        moved = Crossing(0, aval, given, sharding, self._relayouts, self._carrier, lent=True)(x)
        return assembled(with_weak(aval, sharding), []) if moved is None else moved

    def prepare(self, aval: jax.ShapeDtypeStruct, source: Sharding, target: NamedSharding) -> None:
        """Nothing: what is needed is compiled when it is first met."""
