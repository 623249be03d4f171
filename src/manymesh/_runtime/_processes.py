"""A step of several processes: its arguments, its results, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from .. import _compat
from .._distributed._agree import agree
from .._distributed._world import Waiting
from .._layout._transfers import Step, plan_transfer
from .._plan._digest import describe
from .._plan._instructions import Plan, Receive
from .._program import Program
from ._carrier import Carrier
from ._exchange import Exchange, assembled, everywhere, is_key, processes_of, put
from ._launches import Launches
from ._relayout import Relayouts, lies_as


class Crossing:
    """One value on its way from a sharding to another, through whichever processes have parts of either.

    Args:
      number: what tells it from all others of a call.
      aval: shape and dtype.
      source, target: shardings.
      relayouts: what changes layouts inside a submesh.
      carrier: carries what crosses between processes.
      lent: whether somebody outside the call may donate or delete the value.
    """

    def __init__(
        self,
        number: int,
        aval: jax.ShapeDtypeStruct,
        source: Sharding,
        target: NamedSharding,
        relayouts: Relayouts,
        carrier: Carrier,
        lent: bool,
    ) -> None:
        self.aval, self.source, self.target, self.relayouts = aval, source, target, relayouts
        me = jax.process_index()
        self.here, self.there = me in processes_of(source), me in processes_of(target)
        self.steps: list[Step | Exchange] = []
        at = source
        for step in plan_transfer(aval.shape, source, target):
            if step.kind == "relayout":
                self.steps.append(step)
            else:
                given, wanted = (
                    jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=s, weak_type=aval.weak_type)
                    for s in (at, step.sharding)
                )
                # A change of layout makes an array that nobody else has.
                self.steps.append(Exchange(number, [given], [wanted], carrier, [lent and at is source]))
            at = step.sharding

    def prepare(self) -> None:
        """Compiles what changes layouts here."""
        at = self.source
        for step in self.steps:
            if isinstance(step, Step):
                if jax.process_index() in processes_of(at):
                    given = jax.ShapeDtypeStruct(self.aval.shape, self.aval.dtype, sharding=at)
                    self.relayouts.prepare([(given, step.sharding)])
                at = step.sharding
            else:
                at = step.arriving

    def __call__(self, x: Any) -> Any:
        """The value as it arrives; None where it arrives in other processes only."""
        if not self.here:
            x = None  # a ghost, of which nothing can be made
        for step in self.steps:
            if isinstance(step, Exchange):
                arrived = () if step.idle else step(*([x] if step.gives else ()))
                x = arrived[0] if arrived else None
            elif x is not None:
                x = self.relayouts.follow(x, (step,))
        return x if self.there else None


@dataclass(frozen=True, eq=False)
class Place:
    """A place where an argument has to arrive, in this process or in another.

    Attributes:
      position: which leaf of the arguments.
      aval: its shape and dtype.
      sharding: what it has to have there.
      slot: where it goes; None if that is in other processes.
      results: positions of the results that it is, where nothing else comes of it: it may stay where somebody put it.
    """

    position: int
    aval: jax.ShapeDtypeStruct
    sharding: NamedSharding
    slot: int | None
    results: tuple[int, ...] = ()


class Arrivals:
    """Brings arguments where the step wants them.

    Host values and arrays that were put nowhere are the same in every process, which each takes its own pieces of. Arrays
    that were put somewhere are moved, by the same plan in every process; what is only handed on stays.
    """

    def __init__(
        self,
        places: Sequence[Place],
        first_number: int,
        relayouts: Relayouts,
        carrier: Carrier,
        names: Callable[[], Sequence[str]],
    ) -> None:
        self.places, self.first, self.relayouts, self.carrier = places, first_number, relayouts, carrier
        self._names = names
        self.accepted: list[Any] = [p.sharding for p in places]
        self.handing = tuple(n for n, p in enumerate(places) if p.results)
        self.crossings: dict[tuple[int, Sharding], Crossing] = {}
        self.agreed: dict[tuple[Any, ...], int] = {}  # in which ways arguments have come -> which it was, from 1

    def fill(self, slots: list[Any], args: Sequence[Any], begin: Callable[[int], None], name: str) -> None:
        """Puts the arguments of a call into its slots.

        Args:
          slots: those of the call.
          args: arrays or host values.
          begin: starts the call, told in which of the ways that were agreed on they come; 0 where all are in their places.
          name: what the step is called, for messages.
        """
        accepted, strange = self.accepted, False
        for n, p in enumerate(self.places):
            x = args[p.position]
            given = getattr(x, "sharding", None)
            if given is not accepted[n]:
                if lies_as(x, p.sharding) or (isinstance(x, jax.Array) and p.results and given == accepted[n]):
                    accepted[n] = given
                else:
                    strange = True
        begin(self._agree([committed_sharding(x) for x in args], name) if strange else 0)
        for n, p in enumerate(self.places):
            x = args[p.position]
            if getattr(x, "sharding", None) is not accepted[n]:
                if p.results and isinstance(given := committed_sharding(x), NamedSharding):
                    accepted[n] = given
                else:
                    x = self._bring(n, p, x)
                    if p.results:
                        accepted[n] = p.sharding
            if p.slot is not None:
                slots[p.slot] = x

    def handed_on(self, args: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Of arguments of the last call that stayed elsewhere than at home, which result each is, and the argument."""
        for n in self.handing:
            p = self.places[n]
            if self.accepted[n] != p.sharding:
                for o in p.results:
                    yield o, args[p.position]

    def _agree(self, shardings: list[Sharding | None], name: str) -> int:
        """The first time that arguments come so, all processes have to say the same: they move what the others expect."""
        key = tuple(shardings)
        if key not in self.agreed:
            world = self.carrier.world
            said = [f"{argument}: {describe(s)}" for argument, s in zip(self._names(), shardings, strict=True)]
            number = world.begin(f"the arguments of {name}")
            agree(world, f"the arguments of {name}", number, {"arguments": "\n".join(said)}, lambda _: said)
            self.agreed[key] = len(self.agreed) + 1
        return self.agreed[key]

    def crossing(self, n: int, given: Sharding) -> Crossing:
        """How an argument gets to the n-th place from where it was put."""
        key = n, given
        if key not in self.crossings:
            p = self.places[n]
            made = Crossing(self.first + n, p.aval, given, p.sharding, self.relayouts, self.carrier, lent=True)
            made.prepare()
            self.crossings[key] = made
        return self.crossings[key]

    def _bring(self, n: int, p: Place, x: Any) -> Any:
        given = committed_sharding(x)
        if given is None:
            return put(x, p.sharding) if p.slot is not None else None
        if given == everywhere() and p.sharding.is_fully_replicated and not p.aval.shape:
            if p.slot is None:
                return None
            (own,) = _compat.pieces(_compat.key_words(x))
            order = [d for d in _compat.device_order(p.sharding) if d.process_index == jax.process_index()]
            # Not the same buffer: what the call donates is not the caller's copy.
            return assembled(
                with_weak(p.aval, p.sharding), [jax.device_put(own, d, may_alias=False) for d in order]
            )  # fmt: skip
        return self.crossing(n, given)(x)


def with_weak(aval: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """The same shape, dtype and weak type with a sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def committed_sharding(x: Any) -> Sharding | None:
    """Where a value was put; None for a host value, and for an array that JAX put where it liked."""
    if not isinstance(x, jax.Array) or not getattr(x, "committed", True):
        return None
    return x.sharding


class Departures:
    """Gives a process what it is to have of the results of a call: arrays, scalars of others, and ghosts."""

    def __init__(
        self,
        program: Program,
        final: Sequence[NamedSharding | None],
        moved: Mapping[int, NamedSharding],
        kept: frozenset[int],
        first_number: int,
        relayouts: Relayouts,
        carrier: Carrier,
        made: Sequence[NamedSharding | None],
        through: Sequence[int],
    ) -> None:
        self.through = through  # those that are arguments as they came
        self.moves: list[tuple[int, Crossing]] = []
        self.ghosts: list[tuple[int, jax.ShapeDtypeStruct]] = []
        scalars: dict[int, list[int]] = {}
        me = jax.process_index()
        self.shardings = list(final)
        avals: list[Any] = [
            _compat.abstract(v.aval) if _compat.is_var(v) else None for v, _ in program.outputs
        ]  # fmt: skip
        for o, (_, s) in enumerate(program.outputs):
            aval, source, sharding = avals[o], made[o], final[o]
            if aval is None or source is None or sharding is None or aval.dtype == jax.dtypes.float0:
                continue
            if o in moved and not source.is_equivalent_to(sharding, len(aval.shape)):
                number = first_number + len(program.submeshes) + o
                crossing = Crossing(number, aval, source, sharding, relayouts, carrier, lent=True)
                crossing.prepare()
                self.moves.append((o, crossing))
            elif o not in kept and aval.shape == () and not is_key(aval.dtype):
                scalars.setdefault(s, []).append(o)
                self.shardings[o] = everywhere()
                continue
            if me not in processes_of(sharding):
                self.ghosts.append((o, with_weak(aval, sharding)))
        self.scalars = []
        for s, outputs in sorted(scalars.items()):
            sent = [with_weak(avals[o], source) for o in outputs if (source := made[o]) is not None]
            arriving = [with_weak(avals[o], everywhere()) for o in outputs]
            exchange = Exchange(first_number + s, sent, arriving, carrier, [True] * len(outputs))
            self.scalars.append((outputs, exchange))

    def finish(self, results: list[Any], launches: Launches, elsewhere: Mapping[int, jax.ShapeDtypeStruct]) -> None:
        """Completes the results of a call, of which those are None that are made in other processes.

        Args:
          results: those that this process has a part of, and None for others.
          launches: those of the call.
          elsewhere: results that are not where they are by the plan -> shape, dtype and sharding.
        """
        for o, crossing in self.moves:
            results[o] = crossing(results[o])
        for outputs, exchange in self.scalars:
            arrived = exchange(*([results[o] for o in outputs] if exchange.gives else ()))
            for o, x in zip(outputs, arrived, strict=True):
                results[o] = x
            launches.watch(arrived[0])
        for o, aval in (*self.ghosts, *elsewhere.items()):
            if results[o] is None:
                results[o] = assembled(elsewhere.get(o, aval), [])
        for o in self.through:
            sharding = self.shardings[o]
            if o not in elsewhere and sharding is not None and results[o].sharding != sharding:
                results[o] = _called(results[o], sharding)


def _called(x: jax.Array, sharding: Sharding) -> jax.Array:
    """The array with an equivalent sharding: where it lies the same on a mesh of other names, as others know it by the plan."""
    if not x.sharding.is_equivalent_to(sharding, x.ndim) or x.sharding.memory_kind != sharding.memory_kind:
        return x
    return assembled(with_weak(_compat.abstract(jax.typeof(x)), sharding), _compat.pieces(_compat.key_words(x)))


def waiting_for(
    number: int, label: str, others: frozenset[int], launches: Launches, program: Program, plan: Plan, given: int
) -> Waiting:
    """What a call waits for, to be asked when somebody is missed."""

    def finished() -> bool:
        return not launches.dispatching and not launches.unfinished()

    def text() -> str:
        missing = launches.missing()
        run = next((r for r in missing if r is not None), None)
        if run is None:
            return "a value of another process is waited for" if missing else ""
        f = program.fragments[run.fragment]
        microbatch = "" if run.microbatch is None else f", microbatch {run.microbatch},"
        inputs = set(run.inputs)
        sources = {
            i.source for i in plan.instructions if isinstance(i, Receive) and not inputs.isdisjoint(i.outputs)
        }  # fmt: skip
        of = f" with values of submesh {', '.join(map(str, sorted(sources)))}" if sources else ""
        return f"task {f.name!r}{microbatch} on submesh {f.submesh} is not finished{of}"

    return Waiting(number, label, others, finished, text, given)
