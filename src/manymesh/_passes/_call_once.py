"""Tasks that a step calls several times alike, as where a metric calls the model beside the loss: one call does for all.

XLA would see that within a fragment; but each call of a task is one, and what it reads would cross for each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from .. import _compat
from .._compat import Atom, Literal, Var
from .._key import Keys, content_of
from .._program._flat import FlatProgram
from .._program._harmless import is_harmless
from .._program._nodes import Node
from .._program._rewrite import rename
from .._task import Task
from ._scopes import is_rematerialised


def call_once(flat: FlatProgram) -> FlatProgram:
    """Calls a task once where others call it in a forward pass with what is alike, and one call makes what all make.

    That one is often the call that is differentiated, which makes more. In a loop two that are differentiated stay two: one
    backward pass for both would wait for the later one, and the stages could be in no order.
    """
    times = Counter(_scope(flat, n) for n in flat.nodes if _is_call(n))
    again = [scope for scope in times if times[scope] > 1]
    if not again:
        return flat
    numbers = _Numbers()
    calls_of = {scope: _Calls(numbers) for scope in again}
    loops = {loop for _, loop in again}
    for n in flat.nodes:
        if n.task is None:
            if n.loop in loops:
                numbers.learn(n)
        elif _is_call(n) and (scope := _scope(flat, n)) in again:
            calls_of[scope].add(n)
    kept = {v for n in flat.nodes if n.backward and n.loop is not None for v in n.inputs}
    alias: dict[Var, Atom] = {}
    instead: dict[Node, Node | None] = {}
    for calls in calls_of.values():
        calls.join(flat, kept, alias, instead)
    if not alias:
        return flat
    nodes = tuple(call for n in flat.nodes if (call := instead.get(n, n)) is not None)
    return rename(replace(flat, nodes=nodes, placement=None), alias)


def _is_call(n: Node) -> bool:
    again = n.backward or is_rematerialised(n.stack)  # on purpose
    return n.task is not None and not (again or n.guard or n.eqn.effects)


def _scope(flat: FlatProgram, n: Node) -> tuple[Task, int | None]:
    """The task that is called, and the loop in whose body it is."""
    assert n.task is not None, "only tasks are called"
    return flat.tasks[n.task], n.loop


class _Numbers:
    """Numbers of values: two that have the same one are computed alike."""

    def __init__(self) -> None:
        self.keys = Keys()
        self._known: dict[Hashable, int] = {}
        self._next = count()

    def of(self, atoms: Sequence[Atom]) -> tuple[int, ...]:
        """The numbers of values, new ones for those that nothing is known of."""
        return tuple([self._one(a) for a in atoms])

    def give(self, v: Var, number: int) -> None:
        """Gives a value the number of another one."""
        self._known[v] = number

    def learn(self, n: Node) -> None:
        """Gives what an unmarked equation makes the numbers of what an equal one before it made."""
        eqn = n.eqn
        apart = n.guard or n.mesh is not None or n.primitive in ("copy", "copy_p", "optimization_barrier")
        if apart or not is_harmless(eqn) or _compat.jaxprs_in(eqn):
            return
        params = tuple(sorted((k, str(v)) for k, v in eqn.params.items()))
        key = (n.primitive, n.loop, self.of(eqn.invars), params, _compat.eqn_context(eqn))
        for k, v in enumerate(eqn.outvars):
            if _compat.is_var(v):
                self._known[v] = self._number((key, k))

    def _one(self, a: Atom) -> int:
        return self._number((str(a.aval), content_of(a.val)) if isinstance(a, Literal) else a)

    def _number(self, key: Hashable) -> int:
        if key not in self._known:
            self._known[key] = next(self._next)
        return self._known[key]


@dataclass(eq=False)
class _Calls:
    """The calls of a task in one place: in a loop, or outside of all.

    Attributes:
      numbers: of the values of the program.
      calls: the calls, in order, with what each of them makes: what it is -> its variable.
      first: what is made -> the variable of the first call that makes it.
    """

    numbers: _Numbers
    calls: list[tuple[Node, dict[Hashable, Var]]] = field(default_factory=list)
    first: dict[Hashable, Var] = field(default_factory=dict)

    def add(self, n: Node) -> None:
        """Adds a call; what an earlier one makes too gets the same number."""
        made = dict(reversed(self._each(n)))
        self.calls.append((n, made))
        for what, v in made.items():
            self.numbers.give(v, self.numbers.of([self.first.setdefault(what, v)])[0])

    def join(self, flat: FlatProgram, kept: set[Var], alias: dict[Var, Atom], instead: dict[Node, Node | None]) -> None:
        """Drops calls that make nothing besides what another one makes, which takes the place of the first of them.

        Nor anything that is ``kept`` for backward passes.
        """
        position = flat.index.position
        making: dict[Hashable, list[int]] = defaultdict(list)
        for k, (_, made) in enumerate(self.calls):
            for what in made:
                making[what].append(k)
        for k, (n, made) in enumerate(self.calls):
            of = making[next(iter(made))] if made and n not in instead and kept.isdisjoint(n.outputs) else []
            others = [j for j in of if j != k and self.calls[j][0] not in instead]
            others = [j for j in others if self.calls[j][1].keys() >= made.keys()]
            if not others:
                continue
            call, most = self.calls[max(others, key=lambda j: len(self.calls[j][1]))]
            earlier = self._at(flat, call, n) if position[call] > position[n] else None
            if earlier is not None:
                instead[call] = None
            elif position[call] > position[n]:
                continue
            instead[n] = earlier
            alias.update((v, most[what]) for what, v in self._each(n))

    def _at(self, flat: FlatProgram, call: Node, before: Node) -> Node | None:
        """A call where an earlier one is, of operands that are there by then; None where one is not."""
        there = dict(zip(self.numbers.of(before.eqn.invars), before.eqn.invars, strict=True))
        invars: list[Atom] = []
        for x, number in zip(call.eqn.invars, self.numbers.of(call.eqn.invars), strict=True):
            x = there.get(number, x)
            made = flat.index.producer.get(x) if _compat.is_var(x) else None
            if made is not None and flat.index.position[made] > flat.index.position[before]:
                return None
            invars.append(x)
        return replace(call, eqn=call.eqn.replace(invars=invars))

    def _each(self, n: Node) -> list[tuple[Hashable, Var]]:
        """What each result of a call is, with its variable: equal for results that are computed alike."""
        body = _compat.without_consts(n.eqn.params["jaxpr"])
        operands, found = self.numbers.of(n.eqn.invars), list[tuple[Hashable, Var]]()
        for k, v in enumerate(n.eqn.outvars):
            if _compat.is_var(v):
                alone, used = _compat.dce(body, [k == j for j in range(len(body.outvars))])
                reads = tuple([number for number, is_used in zip(operands, used, strict=True) if is_used])
                found.append(((self.numbers.keys(alone), reads), v))
        return found
