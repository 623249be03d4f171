"""Minimum cuts: the cheapest way to put things on two sides."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
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
    network = Network()
    endless = 1 + sum(net.cost for net in nets)
    for k, net in enumerate(nets):
        into, out = count + 2 + 2 * k, count + 3 + 2 * k
        network.add(into, out, net.cost)
        for thing in net.things:
            network.add(ends.get(thing, thing), into, endless)
            network.add(out, ends.get(thing, thing), endless)
    for a, b in follows:
        network.add(ends.get(a, a), ends.get(b, b), endless)
    network.fill(first, second)
    before = network.before(first)
    return [thing not in before for thing in range(count)]


class Network:
    """A flow network, for its minimum cuts (Dinic's algorithm)."""

    def __init__(self) -> None:
        # node -> neighbour -> what can still flow there
        self.edges: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)

    def add(self, a: Hashable, b: Hashable, capacity: float) -> None:
        """An edge, or more room on the one that there is."""
        self.edges[a][b] = self.edges[a].get(b, 0) + capacity
        self.edges[b].setdefault(a, 0)

    def fill(self, source: Hashable, sink: Hashable) -> None:
        """Lets flow from one to the other as much as can: so much has to be cut."""
        while (level := self._levels(source, sink)) is not None:
            untried = {node: list(neighbours) for node, neighbours in self.edges.items()}
            while self._augment(source, sink, level, untried):
                pass

    def before(self, source: Hashable) -> set[Hashable]:
        """Once it is full: the nodes before the cut that is closest to the source."""
        return self._around(source, lambda node, other: self.edges[node][other])

    def behind(self, sink: Hashable) -> set[Hashable]:
        """Once it is full: the nodes behind the cut that is closest to the sink."""
        return self._around(sink, lambda node, other: self.edges[other][node])

    def _around(self, start: Hashable, room: Callable[[Hashable, Hashable], float]) -> set[Hashable]:
        found, queue = {start}, deque([start])
        while queue:
            node = queue.popleft()
            new = [other for other in self.edges[node] if other not in found and room(node, other) > 0]
            found.update(new)
            queue.extend(new)
        return found

    def _levels(self, source: Hashable, sink: Hashable) -> dict[Hashable, int] | None:
        level, queue = {source: 0}, deque([source])
        while queue:
            node = queue.popleft()
            for other, left in self.edges[node].items():
                if left > 0 and other not in level:
                    level[other] = level[node] + 1
                    queue.append(other)
        return level if sink in level else None

    def _augment(
        self, source: Hashable, sink: Hashable, level: dict[Hashable, int], untried: dict[Hashable, list[Hashable]]
    ) -> bool:
        """Sends flow along one path that goes up a level with each edge; whether there was one."""
        path = [source]
        while path[-1] != sink:
            node, others = path[-1], untried[path[-1]]
            while others and not (self.edges[node][others[-1]] > 0 and level.get(others[-1]) == level[node] + 1):
                others.pop()
            if others:
                path.append(others[-1])
                continue
            path.pop()
            if not path:
                return False
            untried[path[-1]].pop()  # it leads nowhere
        flow = min(self.edges[a][b] for a, b in zip(path, path[1:], strict=False))
        for a, b in zip(path, path[1:], strict=False):
            self.edges[a][b] -= flow
            self.edges[b][a] += flow
        return True
