"""Unmarked equations between tasks, put where least crosses.

Votes are taken one after the other, each before it is known what others bring where. A norm between two tasks may then
stand half on one submesh and half on the other, and its backward pass likewise: several values cross, forward and
backward, where one would do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from .._compat import Var
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes
from ._cut import FIRST, SECOND, Net, cost, least_cut

# Equations that are looked at together; so many between two tasks are a part of the model that nobody has marked.
MOST = 300


class Together:
    """What is known of a program whose equations have places.

    Args:
      flat: the program.
      at: node -> its submesh; nodes that run wherever they are read are not in it. Changed.
      free: the nodes that may move.
      place_of: the submesh where a value is made, or an input lies; None where it lies nowhere yet.
      places_of_readers: the submeshes where a value is read, also under another name, and wanted.
      stages: the submeshes in the order of their tasks in loops; empty where there is none.
    """

    def __init__(
        self,
        flat: FlatProgram,
        at: dict[Node, int],
        free: Iterable[Node],
        place_of: Callable[[Var], int | None],
        places_of_readers: Callable[[Var], Iterable[int]],
        stages: Sequence[int],
    ) -> None:
        self.flat, self.at, self.free = flat, at, dict.fromkeys(free)
        self.place_of, self.places_of_readers = place_of, places_of_readers
        self.order = {k: i for i, k in enumerate(stages)}
        self.index = flat.index
        self.rank = self._first_tasks()
        self.sums = self._sums()
        self.feeds, self.needs = self._tasks_around()
        self.on: defaultdict[int, set[Node]] = defaultdict(set)
        for n in self.free:
            self.on[at[n]].add(n)

    def _first_tasks(self) -> dict[int, int]:
        """Submesh -> its stage, or where in the program its first task is, of a forward pass if there is one."""
        rank: dict[int, int] = {}
        for backward in (False, True):
            for i, n in enumerate(self.flat.nodes):
                if n.task is not None and n.backward == backward and n in self.at:
                    rank.setdefault(self.at[n], len(self.order) + i)
        return {**rank, **self.order}

    def _tasks_around(self) -> tuple[dict[Node, int], dict[Node, int]]:
        """For each node the submeshes whose tasks need what comes of it, and those whose tasks it needs, as bits.

        Of the same loop and the same pass, forward or backward.
        """
        feeds: dict[Node, int] = {}
        needs: dict[Node, int] = {}
        for found, nodes in ((needs, self.flat.nodes), (feeds, reversed(self.flat.nodes))):
            for n in nodes:
                bits = 0
                for other in self._before(n) if found is needs else self._after(n):
                    if self._same_way(n, other):
                        bits |= found[other]
                        if other.task is not None and other in self.at:
                            bits |= 1 << self.at[other]
                found[n] = bits
        return feeds, needs

    def _before(self, n: Node) -> Iterator[Node]:
        return (self.index.producer[v] for v in n.inputs if v in self.index.producer)

    def _after(self, n: Node) -> Iterator[Node]:
        return (r for v in n.outputs for r in self.index.readers.get(v, ()))

    def run(self) -> set[Node]:
        """Moves what should be elsewhere; the nodes that were moved."""
        moved: set[Node] = set()
        for _ in range(3):
            now = set()
            for pair, crossing in self._pairs():
                for region in self._regions(pair, crossing):
                    now |= self._settle(region, pair)
            moved |= now
            if not now:
                break
        return moved

    def _pairs(self) -> list[tuple[tuple[int, int], list[Node]]]:
        """Submeshes between which something crosses, the earlier stage first, and the free nodes that make or read it."""
        found: defaultdict[frozenset[int], list[Node]] = defaultdict(list)
        for n in self.free:
            others = {k for v in n.outputs for k in self.places_of_readers(v)}
            others |= {k for v in n.inputs if (k := self.place_of(v)) is not None}
            for k in others - {self.at[n]}:
                found[frozenset((self.at[n], k))].append(n)
        last = len(self.order) + len(self.flat.nodes)
        pairs = []
        for both, nodes in found.items():
            first, second = sorted(both, key=lambda k: (self.rank.get(k, last), k))
            pairs.append(((first, second), nodes))
        return sorted(pairs, key=lambda p: p[0])

    def _may_move(self, n: Node, pair: tuple[int, int]) -> bool:
        """Whether a node is not among the tasks of its own side: nothing there needs it, or it needs nothing there."""
        at = self.at[n]
        from_here = (at == pair[0]) != n.backward
        return not (self.feeds[n] if from_here else self.needs[n]) >> at & 1

    def _regions(self, pair: tuple[int, int], crossing: Iterable[Node]) -> Iterator[list[Node]]:
        """Free nodes on two submeshes that read each other's results, forward and backward together.

        Around those of which something crosses: of a region without such a node as much crosses on either submesh.
        """
        left = {n for k in pair for n in self.on[k] if self._may_move(n, pair)}
        for start in sorted(crossing, key=self.index.position.__getitem__):
            if start not in left:
                continue
            left.discard(start)
            region, todo = [start], [start]
            while todo:
                n = todo.pop()
                siblings = (r for v in n.inputs for r in self.index.readers.get(v, ()))
                for other in (*self._before(n), *self._after(n), *siblings):
                    if other in left:
                        left.discard(other)
                        region.append(other)
                        todo.append(other)
            if len(region) <= MOST:
                yield sorted(region, key=self.index.position.__getitem__)

    def _settle(self, region: list[Node], pair: tuple[int, int]) -> set[Node]:
        """Places a region where least crosses, if that is less than now; the nodes that were moved."""
        before = {n: self.at.pop(n) for n in region}  # so that what is asked below is about the others
        number = {n: i for i, n in enumerate(region)}
        nets = list(self._nets(region, number, pair))
        follows = self._follows(region, number, pair)
        sides = None if follows is None else least_cut(len(region), nets, follows)
        now = [before[n] == pair[1] for n in region]
        if sides is not None and cost(nets, sides) < cost(nets, now):
            self.at.update({n: pair[side] for n, side in zip(region, sides, strict=True)})
        else:
            self.at.update(before)
        moved = {n for n in region if self.at[n] != before[n]}
        for n in moved:
            self.on[before[n]].discard(n)
            self.on[self.at[n]].add(n)
        return moved

    def _nets(self, region: list[Node], number: Mapping[Node, int], pair: tuple[int, int]) -> Iterator[Net]:
        """What it costs where the values that a region makes and reads are made on one submesh and read on the other."""
        ends = dict(zip(pair, (FIRST, SECOND), strict=True))
        moving: defaultdict[Var, set[int]] = defaultdict(set)
        for n in region:
            for v in n.outputs:
                moving[v].add(number[n])
            for v in n.inputs:
                for root in self._roots(v, number):
                    moving[root].add(number[n])
        for v, things in moving.items():
            sent = nbytes(v.aval) * self._times(v)
            there = set()
            for k in self.places_of_readers(v):
                if k in ends:
                    there.add(ends[k])
                    if len(there) == 2:
                        break
            made = self.place_of(v)
            if made is None or made in ends:
                yield Net(sent, tuple({*things, *there, *([] if made is None else [ends[made]])}))
            else:  # it comes from elsewhere, to each of the two that reads it
                for end, other in ((FIRST, SECOND), (SECOND, FIRST)):
                    if end not in there:
                        yield Net(sent, tuple({*things, other}))

    def _roots(self, v: Var, moving: Mapping[Node, int]) -> set[Var]:
        """What a value is made from wherever it is read; itself, where it is made in one place."""
        found, seen, todo = set(), {v}, [v]
        while todo:
            v = todo.pop()
            producer = self.index.producer.get(v)
            if producer is None or producer in moving or producer in self.at:
                found.add(v)
                continue
            todo += [read for read in producer.inputs if read not in seen]
            seen.update(producer.inputs)
        return found

    def _times(self, v: Var) -> int:
        """How often a value is sent where it is read elsewhere: what an accumulator has become leaves its loop once."""
        loop = self.index.scope.get(v)
        return 1 if loop is None or v in self.sums else self.flat.loops[loop].spec.num_microbatches

    def _sums(self) -> set[Var]:
        """What leaves accumulators, of which a loop reads nothing but to add to them."""
        carries = [c for loop in self.flat.loops for c in loop.carries if not self.index.readers.get(c.out)]
        return {c.out for c in carries if {*self.index.readers.get(c.inner, ())} <= {self.index.producer.get(c.out)}}

    def _follows(
        self, region: list[Node], number: Mapping[Node, int], pair: tuple[int, int]
    ) -> list[tuple[int, int]] | None:
        """What keeps forward passes going to later stages and backward passes to earlier ones; None if nothing can."""
        order = self.order
        if not all(k in order for k in pair):
            return []
        first, second = (order[k] for k in pair)
        found: list[tuple[int, int]] = []
        for n in region:
            if n.loop is None:
                continue
            # In a forward pass what comes after a node is not before it; in a backward pass the other way round.
            after = [r for r in self._after(n) if self._same_way(n, r)]
            made = [p for p in self._before(n) if self._same_way(n, p)]
            late, early = (made, after) if not n.backward else (after, made)
            for other in early:
                if other in number:
                    found.append((number[other], number[n]))
                elif (k := order.get(self.at.get(other, -1))) is not None and k < second:
                    if k < first:
                        return None
                    found.append((FIRST, number[n]))
            for other in late:
                if other not in number and (k := order.get(self.at.get(other, -1))) is not None and k > first:
                    if k > second:
                        return None
                    found.append((number[n], SECOND))
        return found

    @staticmethod
    def _same_way(n: Node, other: Node) -> bool:
        return other.loop == n.loop and other.backward == n.backward
