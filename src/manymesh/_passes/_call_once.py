"""Tasks that a step calls several times alike, as where a metric calls the model beside the loss: one call does for all.

XLA would see that within a fragment; but each call of a task is one, and what it reads would cross for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .. import _compat
from .._compat import Atom, Var
from .._program._flat import FlatProgram
from .._program._nodes import Node
from .._program._rewrite import rename
from .._task import Task
from ._numbered import numbers
from ._scopes import is_rematerialised


def call_once(flat: FlatProgram) -> FlatProgram:
    """Calls a task once where others call it in a forward pass with what is alike, and one call makes what all make.

    That one is often the call that is differentiated, which makes more. In a loop two that are differentiated stay two: one
    backward pass for both would wait for the later one, and the stages could be in no order.
    """
    calls: dict[tuple[Task, int | None], list[Node]] = defaultdict(list)
    for n in flat.nodes:
        again = n.backward or is_rematerialised(n.stack)  # on purpose
        if n.task is not None and not (again or n.guard or n.eqn.effects):
            calls[flat.tasks[n.task], n.loop].append(n)
    several = {scope: nodes for scope, nodes in calls.items() if len(nodes) > 1}
    if not several:
        return flat
    loops = {loop for _, loop in several}
    joined = _Joined(flat, numbers([n for n in flat.nodes if n.loop in loops and not n.backward]))
    for nodes in several.values():
        joined.add(nodes)
    if not joined.alias:
        return flat
    kept = tuple(call for n in flat.nodes if (call := joined.instead.get(n, n)) is not None)
    return rename(replace(flat, nodes=kept, placement=None), joined.alias)


class _Joined:
    """Calls that do for others.

    Attributes:
      alias: what a call that is dropped makes -> the same of the one that stays.
      instead: call -> the one that is in its place; None where there is none.
    """

    def __init__(self, flat: FlatProgram, number: Mapping[Var, int]) -> None:
        self._flat, self._number = flat, number
        self._kept = {v for n in flat.nodes if n.backward and n.loop is not None for v in n.inputs}
        self.alias: dict[Var, Atom] = {}
        self.instead: dict[Node, Node | None] = {}

    def add(self, calls: Sequence[Node]) -> None:
        """Drops those of the calls of a task that make nothing besides what another one makes.

        That one takes the place of the first of them. What is kept for backward passes of a loop is not dropped.
        """
        made = {n: {self._number[v]: v for v in reversed(n.outputs)} for n in calls}
        making: dict[int, list[Node]] = defaultdict(list)
        for n in calls:
            for number in made[n]:
                making[number].append(n)
        position = self._flat.index.position
        for n in calls:
            if n in self.instead or not n.outputs or not self._kept.isdisjoint(n.outputs):
                continue
            others = [m for m in making[next(iter(made[n]))] if m is not n and m not in self.instead]
            most = max(
                (m for m in others if made[m].keys() >= made[n].keys()), key=lambda m: len(made[m]), default=None
            )
            earlier = None if most is None or position[most] < position[n] else self._at(most, n)
            if most is None or (earlier is None and position[most] > position[n]):
                continue
            if earlier is not None:
                self.instead[most] = None
            self.instead[n] = earlier
            self.alias.update((v, made[most][self._number[v]]) for v in n.outputs)

    def _at(self, call: Node, before: Node) -> Node | None:
        """A call where an earlier one is, of operands that are there by then; None where one is not."""
        there = {self._number.get(v): v for v in before.inputs if v in self._number}
        index, invars = self._flat.index, list[Atom]()
        for x in call.eqn.invars:
            if _compat.is_var(x):
                x = there.get(self._number.get(x), x)
                # What a loop leaves is there after the last of its body.
                makers = index.bodies[index.made_by_loop[x]] if x in index.made_by_loop else [index.producer.get(x)]
                if any(n is not None and index.position[n] > index.position[before] for n in makers):
                    return None
            invars.append(x)
        return replace(call, eqn=call.eqn.replace(invars=invars))
