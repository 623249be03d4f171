"""The cheapest way to put things on two sides."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

FIRST, SECOND = -1, -2  # the sides themselves, as things that never move


class Net(NamedTuple):
    """Things that cost something unless all of them are on one side."""

    cost: int
    things: tuple[int, ...]


def cost(nets: Sequence[Net], sides: Sequence[bool]) -> int:
    """What the nets cost that are on both sides; for each thing whether it is on the second one."""
    ends = {FIRST: False, SECOND: True}
    return sum(net.cost for net in nets if len({ends[i] if i < 0 else sides[i] for i in net.things}) > 1)


def least_cut(count: int, nets: Sequence[Net], follows: Iterable[tuple[int, int]] = ()) -> list[bool]:
    """Puts things on two sides so that the nets that are on both cost as little as possible.

    Args:
      count: the things are the numbers below it; nets may name `FIRST` and `SECOND` besides.
      nets: what costs something.
      follows: pairs (a, b): where a is on the first side, b is too.

    Returns:
      For each thing whether it is on the second side.
    """
    first, second = count, count + 1
    ends = {FIRST: first, SECOND: second}
    room: list[dict[int, int]] = [{} for _ in range(count + 2 + 2 * len(nets))]

    def connect(a: int, b: int, cost: int) -> None:
        room[a][b] = room[a].get(b, 0) + cost
        room[b].setdefault(a, 0)

    endless = 1 + sum(net.cost for net in nets)
    for k, net in enumerate(nets):
        into, out = count + 2 + 2 * k, count + 3 + 2 * k
        connect(into, out, net.cost)
        for thing in net.things:
            connect(ends.get(thing, thing), into, endless)
            connect(out, ends.get(thing, thing), endless)
    for a, b in follows:
        connect(ends.get(a, a), ends.get(b, b), endless)
    while True:  # as much as flows from the first side to the second has to be cut: Edmonds and Karp
        came_from = _reached(room, first)
        if second not in came_from:
            return [thing not in came_from for thing in range(count)]
        path, at = [], second
        while at != first:
            path.append((came_from[at], at))
            at = came_from[at]
        flow = min(room[a][b] for a, b in path)
        for a, b in path:
            room[a][b] -= flow
            room[b][a] += flow


def _reached(room: Sequence[dict[int, int]], start: int) -> dict[int, int]:
    """What can be reached by steps that have room -> where the shortest way there comes from."""
    came_from, todo = {start: start}, deque([start])
    while todo:
        at = todo.popleft()
        for there, left in room[at].items():
            if left and there not in came_from:
                came_from[there] = at
                todo.append(there)
    return came_from
