"""Cutting groups of equations so that each can become one equation.

A group is taken together only if nothing else lies on a path from one of its equations to another: a task
runs as a whole. Where there is such a path, the group is cut there. Groups are contracted one after the
other, so that two of them never wait for each other.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import numpy as np

from .. import _compat
from .._compat import Atom, Var
from .._implicit import Path
from .._program._flat import FlatProgram
from .._program._nodes import Loop, Node
from .._task import Task


@dataclass(eq=False, slots=True)
class Item:
    """Equations that run as a whole: one, a part of a group, or a loop.

    Attributes:
      nodes: the equations.
      reads, writes: what they read of others, and what they make.
      after: what they come after though they do not read it: the index of their branch, and the turn of an ordered effect.
      turns: what stands for their own turns.
    """

    nodes: list[Node]
    reads: list[Var]
    writes: list[Var]
    after: list[Var]
    turns: list[Var] = field(default_factory=list)

    @property
    def needs(self) -> list[Var]:
        """All that has to be there before."""
        return [*self.reads, *self.after]

    @property
    def gives(self) -> list[Var]:
        """All that is there afterwards."""
        return [*self.writes, *self.turns]


class Group(NamedTuple):
    """What tells a group of equations from others: they become one task, in one phase of one scope.

    Attributes:
      scope: the scope that carries the name, as it is in each of its equations' name stacks.
      task: the task it becomes.
      backward: whether they belong to the backward pass.
      again: whether they compute again what the forward pass computed.
      loop: the loop whose body they are in.
      guard: the branch that they are in.
    """

    scope: Path
    task: Task
    backward: bool
    again: bool
    loop: int | None
    guard: tuple[tuple[Atom, int], ...] = ()


class Part(NamedTuple):
    """One part of a group.

    Attributes:
      group: the group.
      number: which of its parts.
      of: how many parts the group has.
      item: the equations.
    """

    group: Group
    number: int
    of: int
    item: Item


def cut_convex(flat: FlatProgram, groups: Mapping[Group, list[Node]]) -> tuple[FlatProgram, list[Part]]:
    """Cuts groups into parts that can be contracted, and brings the program into an order that fits.

    Args:
      flat: the program.
      groups: for each its nodes, in order.

    Returns:
      The program in its new order, in which the nodes of a part stand next to each other; and the parts.
    """
    parts: list[Part] = []
    bodies: dict[int | None, list[Node]] = {}
    for loop in [*range(len(flat.loops)), None]:
        items = _items(flat, loop, bodies)
        if loop is None:
            _keep_order(items)
        worker = _Cutter(items)
        for group, members in groups.items():
            if group.loop == loop and members:
                made = worker.cut(members)
                parts += [Part(group, i, len(made), item) for i, item in enumerate(made)]
        bodies[loop] = [n for item in worker.items if item is not None for n in item.nodes]
    return replace(flat, nodes=tuple(bodies[None]), placement=None), parts


def _items(flat: FlatProgram, scope: int | None, bodies: Mapping[int | None, list[Node]]) -> list[Item]:
    """One item for each node of a scope, in order; outside loops, one for each loop, where its last node is."""
    last = {i: body[-1] for i, body in flat.index.bodies.items() if body}
    items = []
    for n in flat.nodes:
        if n.loop == scope:
            items.append(Item([n], list(dict.fromkeys(n.inputs)), list(n.outputs), _branch([n])))
        elif scope is None and n.loop is not None and last[n.loop] is n:
            items.append(_whole(flat.loops[n.loop], bodies[n.loop]))
    return items


def _whole(loop: Loop, body: list[Node]) -> Item:
    reads = [v for n in body for v in n.inputs]
    reads += [v for v in (c.init for c in loop.carries) if _compat.is_var(v)]
    reads += [v for p in loop.xs for v in p.outer if _compat.is_var(v)]
    writes = [c.final for c in loop.carries] + [v for p in loop.ys for v in p.outer if _compat.is_var(v)]
    return Item(body, list(dict.fromkeys(reads)), writes, _branch(body))


def _branch(nodes: Sequence[Node]) -> list[Var]:
    """The indices of branches: a group runs in its branch, whether or not each of its equations does."""
    return list(dict.fromkeys(v for n in nodes for v, _ in n.guard if _compat.is_var(v)))


def _keep_order(items: Sequence[Item]) -> None:
    """Lets each item with an ordered effect come after the one before."""
    turn: Var | None = None
    for item in items:
        if any(_compat.keeps_order(n.eqn) for n in item.nodes):
            item.after += [] if turn is None else [turn]
            turn = _compat.new_var(jax.core.ShapedArray((), np.dtype(bool)))
            item.turns.append(turn)


class _Cutter:
    """The items of one scope. A contracted part leaves gaps (None), so that positions stay what they are."""

    def __init__(self, items: list[Item]) -> None:
        self.items: list[Item | None] = list(items)
        self.position = {n: i for i, item in enumerate(items) for n in item.nodes}

    def cut(self, members: list[Node]) -> list[Item]:
        positions = sorted(self.position[n] for n in members)
        low, high = positions[0], positions[-1]
        window = [item for item in self.items[low : high + 1] if item is not None]
        mine = set(members)
        part = _parts(window, mine)
        count = max(part.values()) + 1
        own: list[list[Item]] = [[] for _ in range(count)]
        for item, number in part.items():
            own[number].append(item)
        made = [_merged(items) for items in own]
        rest = [item for item in window if item not in part]
        ordered = _sorted(rest, made, {n: i for i, n in enumerate(n for item in window for n in item.nodes)})
        self.items[low : high + 1] = [*ordered, *[None] * (high + 1 - low - len(ordered))]
        for i, item in enumerate(ordered, low):
            self.position.update(dict.fromkeys(item.nodes, i))
        return made


def _merged(items: Sequence[Item]) -> Item:
    own = {v for item in items for v in item.gives}

    def of_others(many: Iterable[list[Var]]) -> list[Var]:
        return [v for v in dict.fromkeys(itertools.chain.from_iterable(many)) if v not in own]

    return Item(
        [n for item in items for n in item.nodes],
        of_others(item.reads for item in items),
        list(dict.fromkeys(v for item in items for v in item.writes)),
        of_others(item.after for item in items),
        [v for item in items for v in item.turns],
    )


def _parts(window: list[Item], members: set[Node]) -> dict[Item, int]:
    """The number of the part that each item of a group belongs to: as few parts as can be."""
    own: dict[Var, int] = {}  # variables made in the group -> part
    left: dict[Var, int] = {}  # variables made outside of it -> last part that they depend on
    part: dict[Item, int] = {}
    for item in window:
        if item.nodes[0] in members:
            found = [own[v] for v in item.needs if v in own] + [left[v] + 1 for v in item.needs if v in left]
            part[item] = max(found, default=0)
            own.update(dict.fromkeys(item.gives, part[item]))
        else:
            found = [own[v] for v in item.needs if v in own] + [left[v] for v in item.needs if v in left]
            if found:
                left.update(dict.fromkeys(item.gives, max(found)))
    if any(part.values()):
        _sink(window, part)
    return part


def _sink(window: list[Item], part: dict[Item, int]) -> None:
    """What only a later part reads, such as a weight's cast, goes there."""
    first: dict[Var, int] = {}
    for item in reversed(window):
        if item not in part:
            first.update(dict.fromkeys(item.needs, -1))
            continue
        later = min((first[v] for v in item.gives if v in first), default=-1)
        part[item] = max(part[item], later)
        for v in item.needs:
            first[v] = min(first.get(v, part[item]), part[item])


def _sorted(rest: list[Item], made: list[Item], position: Mapping[Node, int]) -> list[Item]:
    """A topological order, ties by position of the last node."""
    items = sorted([*rest, *made], key=lambda item: position[item.nodes[-1]])
    maker = {v: i for i, item in enumerate(items) for v in item.gives}
    after: list[list[int]] = [[] for _ in items]
    missing = [0] * len(items)
    for i, item in enumerate(items):
        for p in {maker[v] for v in item.needs if v in maker} - {i}:
            after[p].append(i)
            missing[i] += 1
    ready = [i for i in range(len(items)) if not missing[i]]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(items[i])
        for k in after[i]:
            missing[k] -= 1
            if not missing[k]:
                heapq.heappush(ready, k)
    assert len(order) == len(items), "cutting a scope left a cycle; this is a bug in ManyMesh"
    return order
