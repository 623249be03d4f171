"""Grouping equations into fragments without making a cycle.

Every task equation seeds a cluster and never merges with another task, so that equal layers stay
equal. Unmarked equations join the cluster that alone reads them, else the task that alone feeds them,
else each other.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from .. import _compat
from .._compat import Var
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes
from ._scopes import is_rematerialised

WORK = 1 << 20  # bytes; making them takes about as long as a launch


@dataclass(eq=False)
class Cluster:
    """Equations that become one fragment.

    Attributes:
      submesh: where it runs; None for a loop seen from outside.
      phase: 0 forward, 1 backward, 2 weight gradients.
      task: mark of the task it was seeded by, or None.
      position: of the equation that seeded it, in the program.
      layout_follows_loop: only prepares what a loop takes in, in the layout that the loop wants.
      unstacks: only takes stacked values apart.
      nodes: its equations, unordered until the fragment is made.
      loop: for a loop seen from outside, its index.
    """

    submesh: int | None
    phase: int = 0
    task: str | None = None
    position: int = -1
    layout_follows_loop: bool = False
    unstacks: bool = False
    nodes: list[Node] = field(default_factory=list)
    loop: int | None = None

    @property
    def backward(self) -> bool:
        """Whether it belongs to a backward pass, split or not."""
        return self.phase > 0


def cluster(flat: FlatProgram, scope: int | None) -> tuple[list[Cluster], dict[Cluster, set[Cluster]]]:
    """Clusters of one scope in topological order, and what each depends on.

    Args:
      flat: the program, placed.
      scope: the loop whose body is clustered; None for everything outside loops.
    """
    return _Clusterer(flat, scope).run()


class _Clusterer:
    def __init__(self, flat: FlatProgram, scope: int | None) -> None:
        assert flat.placement is not None, "only what is placed is clustered"
        self.flat, self.placement, self.index, self.scope = flat, flat.placement, flat.index, scope
        self.of: dict[tuple[Node, int], Cluster] = {}
        self.position = flat.index.position
        self.nodes = flat.index.bodies[scope]
        self.producer = {v: n for n in self.nodes for v in n.outputs}
        self.loop_of_result: dict[Var, Cluster] = {}
        self.loop_clusters: list[Cluster] = []
        self.preds: dict[Cluster, set[Cluster]] = defaultdict(set)
        self.succs: dict[Cluster, set[Cluster]] = defaultdict(set)

    def run(self) -> tuple[list[Cluster], dict[Cluster, set[Cluster]]]:
        self._seed()
        self._join_readers()
        self._build_edges()
        self._join_recomputed()
        self._join_feeders()
        self._join_levels()
        self._join_followers()
        self._join_tasks()
        self._join_beside()
        self._join_next()
        order = self._sorted()
        return order, {c: set(self.preds[c]) for c in order}

    def _seed(self) -> None:
        if self.scope is None:
            self.loop_clusters = [Cluster(None, loop=i) for i in range(len(self.flat.loops))]
            self.loop_of_result = {v: self.loop_clusters[i] for v, i in self.index.made_by_loop.items()}
        read = {v for n in self.nodes for v in n.inputs}
        phases = self._phases()
        starts: dict[tuple[int, int], Cluster] = {}
        target = self.index.enters_loop
        for n in self.nodes:
            goes_to = {target.get(v) for v in n.outputs}
            only_loop = (
                n.layout_follows_loop
                and len(goes_to) == 1
                and None not in goes_to
                and not any(v in read for v in n.outputs)
            )
            for s in self.placement.node[n]:
                if only_loop:
                    key = (s, next(iter(goes_to)) or 0)
                    c = starts.setdefault(key, Cluster(s, layout_follows_loop=True))
                else:
                    c = Cluster(
                        s, phases[n], n.task, self.position[n], unstacks=n.unstacks and not n.layout_follows_loop
                    )
                c.nodes.append(n)
                self.of[n, s] = c

    def _phases(self) -> dict[Node, int]:
        """The phase of each equation: its own, or a later one of what it reads.

        What only handles an accumulator belongs to the phase that adds to it: in an earlier one it would run, in the
        next microbatch, before the sum is there.
        """
        carries = self.flat.loops[self.scope].carries if self.scope is not None else ()
        read_by_tasks: set[Var] = set()
        for n in reversed(self.nodes):
            if n.task is not None or any(v in read_by_tasks for v in n.outputs):
                read_by_tasks.update(n.inputs)
        carried: dict[Var, int] = {}
        while True:
            phases: dict[Node, int] = {}
            of = dict(carried)
            for n in self.nodes:
                early = n.task is not None or any(v in read_by_tasks for v in n.outputs)
                read = (of.get(v, 0) for v in n.inputs if not (early and v in carried))
                phases[n] = max(n.phase, *read, 0)
                of.update(dict.fromkeys(n.outputs, phases[n]))
            found = {c.inner: of[c.out] for c in carries if of.get(c.out)}
            if found == carried:
                break
            carried = found
        if self.scope is None:
            self._prepare_late(phases)
        return phases

    def _prepare_late(self, phases: dict[Node, int]) -> None:
        """What only prepares arguments for a later phase belongs to it, so that nothing is kept until then.

        An optimizer multiplies its moments by a constant before it adds a gradient: in the forward pass, that would be
        a copy of all of them. What has an effect keeps its turn.
        """
        follows = set(self.loop_of_result)  # values that a task or a loop had a part in
        for n in self.nodes:
            if n.task is not None or not follows.isdisjoint(n.inputs):
                follows.update(n.outputs)
        readers: dict[Var, list[Node]] = defaultdict(list)
        early = self._read_by_loops()
        for n in reversed(self.nodes):
            of = [r for v in n.outputs for r in readers[v]]
            here = set(self.placement.node[n])
            if (
                of
                and follows.isdisjoint(n.outputs)
                and early.isdisjoint(n.outputs)
                and not (n.layout_follows_loop or n.unstacks or n.eqn.effects)
                and all(here.issuperset(self.placement.node[r]) for r in of)
            ):
                phases[n] = max(phases[n], min(phases[r] for r in of))
            for v in n.inputs:
                readers[v].append(n)

    def _join_readers(self) -> None:
        """An unmarked equation that one cluster alone reads becomes part of it; never a cycle."""
        readers: dict[tuple[Var, int], set[Cluster]] = defaultdict(set)
        read_at: dict[Var, set[int]] = defaultdict(set)
        elsewhere = self._read_by_loops() if self.scope is None else set()
        for n in reversed(self.nodes):
            for s in self.placement.node[n]:
                c = self.of[n, s]
                if (
                    c.task is None
                    and not c.layout_follows_loop
                    and not c.unstacks
                    and not (n.eqn.effects and self.scope is None)  # it keeps its turn
                    and not any(v in elsewhere for v in n.outputs)
                ):
                    found = set().union(*(readers[v, s] for v in n.outputs))
                    if len(found) == 1 and not any(self._goes_elsewhere(v, s, read_at[v]) for v in n.outputs):
                        (r,) = found
                        if (
                            r.submesh == s
                            and r.phase == c.phase
                            and not r.layout_follows_loop
                            and not r.unstacks
                            and not self._would_hold(n, s, r)
                            or r.layout_follows_loop
                            and len(self.placement.node[n]) == 1
                        ):
                            r.nodes += c.nodes
                            c = r
                            self.of[n, s] = r
                for v in n.inputs:
                    readers[v, s].add(c)
                    read_at[v].add(s)

    def _would_hold(self, n: Node, s: int, r: Cluster) -> bool:
        """Whether an equation outside of loops, computed with its reader, would hold more than it makes over the tasks between.

        Such as the mean of what each iteration of a scan over tasks makes: the stack of them is the last of all.
        """
        if self.scope is not None or not self._has_task_between(self.position[n], r.position, s):
            return False
        held = 0
        for v in set(n.inputs):
            made = self.producer.get(v)
            here = made is not None and (made, s) in self.of and v not in self.index.leaving
            if here and all(self.position[q] < r.position for q in self.index.readers.get(v, ())):
                held += nbytes(v.aval)
        return held > sum(nbytes(v.aval) for v in n.outputs)

    def _has_task_between(self, first: int, last: int, s: int) -> bool:
        at = self._positions_of_tasks[s]
        return bisect.bisect_left(at, last) > bisect.bisect_right(at, first)

    @functools.cached_property
    def _positions_of_tasks(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for n in self.nodes:
            if n.task is not None:
                for s in self.placement.node[n]:
                    found[s].append(self.position[n])
        return found

    def _goes_elsewhere(self, v: Var, s: int, read_at: set[int]) -> bool:
        """Whether another submesh gets the value from here.

        Args:
          v: the value.
          s: where it is.
          read_at: submeshes on which something reads it.
        """
        return self.placement.home.get(v) == s and not read_at <= {s, *self.placement.node[self.producer[v]]}

    def _read_by_loops(self) -> set[Var]:
        return {v for n in self.flat.nodes if n.loop is not None for v in n.inputs} | self.index.enters_loop.keys()

    def _source(self, v: Var, s: int) -> Cluster | None:
        """The cluster of this scope from which submesh ``s`` gets a value."""
        n = self.producer.get(v)
        if n is None:
            return self.loop_of_result.get(v)
        return self.of.get((n, s)) or self.of[n, self.placement.home[v]]

    def _build_edges(self) -> None:
        for n in self.nodes:
            for s in self.placement.node[n]:
                c = self.of[n, s]
                for v in n.inputs:
                    self._edge(self._source(v, s), c)
        for c in self.loop_clusters:
            assert c.loop is not None, "a loop cluster stands for a loop"
            for n in self.index.bodies[c.loop]:
                for s in self.placement.node[n]:
                    for v in n.inputs:
                        self._edge(self._source(v, s), c)
            loop = self.flat.loops[c.loop]
            for k in loop.carries:
                maker = self.producer.get(k.init) if _compat.is_var(k.init) else None
                for s in self.placement.node[maker] if maker is not None else (self.placement.home[k.inner],):
                    self._edge(self._source(k.init, s) if _compat.is_var(k.init) else None, c)
            for v in (v for p in loop.xs for v in p.outer if _compat.is_var(v)):
                maker = self.producer.get(v)
                for s in self.placement.node[maker] if maker is not None else ():
                    self._edge(self._source(v, s), c)
                if maker is None and v in self.loop_of_result:
                    self._edge(self.loop_of_result[v], c)
        if self.scope is None:
            self._keep_order()

    def _keep_order(self) -> None:
        """Ordered effects outside of loops happen in the order of the program; in loops the schedule says when."""
        turns = [(self.position[n], self.of[n, s]) for n in self.nodes if _compat.keeps_order(n.eqn)
                 for s in self.placement.node[n]]  # fmt: skip
        for c in self.loop_clusters:
            body = self.index.bodies[c.loop]
            if any(_compat.keeps_order(n.eqn) for n in body):
                turns.append((self.position[body[0]], c))
        turns.sort(key=lambda turn: turn[0])
        for (_, a), (_, b) in itertools.pairwise(turns):
            if not self._lead_to(
                {b}, a
            ):  # as from what stands in the middle of a loop's body to the loop that reads it
                self._edge(a, b)

    def _edge(self, a: Cluster | None, b: Cluster) -> None:
        if a is not None and a is not b:
            self.preds[b].add(a)
            self.succs[a].add(b)

    def _clusters(self) -> list[Cluster]:
        return list(dict.fromkeys([*self.of.values(), *self.loop_clusters]))

    def _merge(self, into: Cluster, c: Cluster) -> None:
        into.nodes += c.nodes
        for n in c.nodes:
            assert c.submesh is not None, "loops never merge"
            self.of[n, c.submesh] = into
        for p in self.preds.pop(c, set()):
            self.succs[p].discard(c)
            self._edge(p, into)
        for q in self.succs.pop(c, set()):
            self.preds[q].discard(c)
            self._edge(into, q)

    def _join_recomputed(self) -> None:
        """What a task computes again for its backward pass alone is computed there: what goes between is never kept."""
        for c in self._clusters():
            back = [b for b in self.succs[c] if b.phase == c.phase]
            if c.task is None or c.phase != 1 or len(back) != 1 or not all(is_rematerialised(n.stack) for n in c.nodes):
                continue
            if all(b.task == c.task and b.submesh == c.submesh for b in self.succs[c]):
                self._merge(back[0], c)

    def _join_feeders(self) -> None:
        """An unmarked cluster that one task alone feeds joins it (a loss, a gradient's accumulator)."""
        for c in self._sorted():
            if c.task is not None or c.layout_follows_loop or c.unstacks or c.loop is not None:
                continue
            feeders = self.preds[c]
            if len(feeders) == 1:
                (f,) = feeders
                if f.task is not None and f.submesh == c.submesh and f.phase == c.phase:
                    self._merge(f, c)

    def _join_levels(self) -> None:
        """Unmarked clusters of one submesh and phase merge where no value leaves and comes back between.

        Two clusters of one level are never on both ends of a path through a third of another kind,
        because each step to another kind raises the level.
        """
        level: dict[Cluster, int] = {}
        groups: dict[Hashable, list[Cluster]] = defaultdict(list)
        order = self._sorted()
        for c in order:
            level[c] = max((level[p] + (0 if _alike(p, c) else 1) for p in self.preds[c]), default=0)
        if self.scope is None:
            self._make_late(order, level)
        for c in order:
            if c.task is None and c.loop is None and not c.layout_follows_loop:
                groups[c.submesh, c.phase, c.unstacks, level[c]].append(c)
        awaited = self._awaited(order)
        for group in groups.values():
            # What others wait for does not wait for the rest, such as the update of this submesh's own parameters.
            rest = [c for c in group if c not in awaited]
            for part in ([c for c in group if c in awaited], rest) if _is_work(rest) else (group,):
                for c in part[1:]:
                    self._merge(part[0], c)

    def _make_late(self, order: Sequence[Cluster], level: dict[Cluster, int]) -> None:
        """What depends on no task is made with the first that reads it, or that this one waits for, if that is unmarked too.

        A scan over tasks that draws noise in each iteration would else draw that of all iterations first, in one program; one
        of updates the rows of all their batches, where each can be drawn with the update before. It comes after a task. What
        has to do with nothing, such as a count, goes with it.
        """
        first: dict[int | None, int] = {}
        for t in order:
            if t.task is not None:
                first[t.submesh] = min(level[t], first.get(t.submesh, level[t]))
        early: set[Cluster] = set()  # what depends on no task and no loop
        for c in order:
            if c.task is None and c.loop is None and early.issuperset(self.preds[c]):
                early.add(c)
        late: dict[tuple[int | None, int], int] = {}
        for c in reversed(order):
            readers = [q for q in self.succs[c] if level[q] or self.succs[q] or not _alike(c, q)]  # the others follow
            if c not in early or not readers or c.submesh not in first or any(n.eqn.effects for n in c.nodes):
                continue
            due = min(level[q] - (0 if _alike(c, q) else 1) for q in readers)
            here = all(q.submesh == c.submesh for q in readers)
            beside = (p for q in readers for p in (q, *self.preds[q]))
            if due > first[c.submesh] and here and any(_alike(c, p) and level[p] == due for p in beside):
                level[c] = due
                for q in self.succs[c]:
                    level[q] = max(level[q], due)
                late[c.submesh, c.phase] = max(due, late.get((c.submesh, c.phase), 0))
        for c in order:
            if not (self.preds[c] or self.succs[c] or c.task or c.loop is not None):
                level[c] = late.get((c.submesh, c.phase), level[c])

    def _awaited(self, order: Sequence[Cluster]) -> set[Cluster]:
        """The clusters outside of loops that another submesh, or a loop, waits for; all of those in a loop."""
        if self.scope is not None:
            return set(order)
        found: set[Cluster] = set()
        for c in reversed(order):
            if any(q.submesh != c.submesh or q in found for q in self.succs[c]):
                found.add(c)
        return found

    def _join_followers(self) -> None:
        """An unmarked cluster joins one alike that waits for it, and that all others wait for: it is launched, and compiled, with it.

        One with an effect has it before what is launched between the two.
        """
        for c in reversed(self._sorted()):
            alike = [f for f in self.succs[c] if _alike(c, f)]
            if not alike or any(n.eqn.effects for n in c.nodes):
                continue
            follower = min(alike, key=lambda f: min(self.position[n] for n in f.nodes))
            if all(q is follower or self._lead_to({follower}, q) for q in self.succs[c]) and not (
                _is_work([c]) and self._waits_longer(follower, c)
            ):
                self._merge(follower, c)

    def _waits_longer(self, follower: Cluster, c: Cluster) -> bool:
        """Whether a cluster outside of loops waits for another submesh, for which one before it need not wait."""
        return self.scope is None and any(
            p.submesh != c.submesh and not self._lead_to({p}, c) for p in self.preds[follower]
        )

    def _join_tasks(self) -> None:
        """What is still unmarked joins a neighbouring task of its submesh and phase, if no cycle comes of it.

        Again until nothing changes: what prepares labels is next to a task only once the loss is part of it.
        """
        changed = True
        while changed:
            changed = False
            order = {c: i for i, c in enumerate(self._sorted())}
            stage: dict[str, int] | None = None
            for c in order:
                if c.backward and stage is None:  # all is part of a forward pass that can be
                    stage = self._stages_of_tasks()
                if c.task is None and not c.layout_follows_loop and not c.unstacks and c.loop is None:
                    t = self._neighbouring_task(c, order, stage or {})
                    if t is not None:
                        self._merge(t, c)
                        changed = True

    def _join_beside(self) -> None:
        """What in a loop nobody waits for joins a task of its submesh and phase that waits for the same.

        The gradient, say, of a scale by which the loss multiplies what a task gives: it reads what came from the next submesh,
        as the backward pass of the task does, and what the forward pass kept.
        """
        if self.scope is None:
            return
        clusters = self._clusters()
        tasks = [t for t in clusters if t.task is not None]
        for c in clusters:
            awaited = {p for p in self.preds[c] if p.phase == c.phase}
            if c.task is not None or self.succs[c] or not awaited or any(n.eqn.effects for n in c.nodes):
                continue
            beside = [t for t in tasks if t.submesh == c.submesh and t.phase == c.phase and awaited <= self.preds[t]]
            if beside:
                self._merge(beside[0], c)

    def _join_next(self) -> None:
        """What in a loop nothing but the next microbatch has to do with joins the task that reads it there, or any.

        By itself it would be a stage: a counter, say, that each microbatch adds one to.
        """
        carries = self.flat.loops[self.scope].carries if self.scope is not None else ()
        clusters = self._clusters()
        for c in clusters if carries else ():
            if c.task is not None or self.preds[c] or self.succs[c]:
                continue
            made = {v for n in c.nodes for v in n.outputs}
            read = {k.inner for k in carries if k.out in made}
            tasks = [t for t in clusters if t.task is not None and t.submesh == c.submesh and t.phase == c.phase]
            readers = [t for t in tasks if any(not read.isdisjoint(n.inputs) for n in t.nodes)]
            if readers or tasks:
                self._merge((readers or tasks)[0], c)

    def _stages_of_tasks(self) -> dict[str, int]:
        """How often the way to a task of a loop goes from one submesh to another, in the forward pass."""
        hops: dict[Cluster, int] = {}
        stage: dict[str, int] = {}
        for c in self._sorted() if self.scope is not None else ():
            if not c.backward:
                hops[c] = max((hops[p] + (p.submesh != c.submesh) for p in self.preds[c] if p in hops), default=0)
                if c.task is not None:
                    stage[c.task] = max(hops[c], stage.get(c.task, 0))
        return stage

    def _turn(self, t: Cluster, makes: bool, stage: Mapping[str, int]) -> int:
        """Of backward passes that make a value that of the earliest stage comes first, of those that read it of the latest.

        Else one of a later stage would wait for one of an earlier stage.
        """
        number = stage.get(t.task or "", 0)
        return number if makes else -number

    def _neighbouring_task(self, c: Cluster, order: dict[Cluster, int], stage: Mapping[str, int]) -> Cluster | None:
        near = [t for t in (*self.preds[c], *self.succs[c]) if t.task is not None]
        near = [t for t in near if t.submesh == c.submesh and t.phase == c.phase]
        near.sort(key=lambda t: (t not in self.preds[c], self._turn(t, t in self.preds[c], stage), -order[t]))
        return next((t for t in near if not self._path_around(t, c) and not self._would_wait(t, c)), None)

    def _would_wait(self, t: Cluster, c: Cluster) -> bool:
        """Whether one submesh would wait for another for nothing, if what is unmarked ran with a task.

        A contrastive loss, say, needs two towers: the second is not to wait for the first, nor is the backward pass of the
        first for that of the second. In loops there are other microbatches for that time, and each fragment is a stage.
        """
        if self.scope is not None:
            return False
        others = [p for p in self.preds[c] if p.submesh != t.submesh and not _exclude_each_other(p, t)]
        if not all(self._lead_to({p}, t) for p in others):
            return True
        return any(q.submesh != t.submesh and not self._lead_to({t}, q) for q in self.succs[c])

    def _path_around(self, a: Cluster, b: Cluster) -> bool:
        """Whether a third cluster lies on a path between the two."""
        return any(self._lead_to(self.succs[start] - {end}, end) for start, end in ((a, b), (b, a)))

    def _lead_to(self, starts: set[Cluster], end: Cluster) -> bool:
        """Whether a cluster is one of some others, or a path goes from them to it."""
        todo, seen = list(starts), set(starts)
        while todo:
            c = todo.pop()
            if c is end:
                return True
            more = self.succs[c] - seen
            seen |= more
            todo += more
        return False

    def _sorted(self) -> list[Cluster]:
        """Topological order, ties by position of the first equation."""
        clusters = self._clusters()
        first = {c: min((self.position[n] for n in c.nodes), default=-1) for c in clusters}
        for c in self.loop_clusters:
            body = self.index.bodies[c.loop]
            first[c] = self.position[body[0]] if body else 0
        missing = {c: len(self.preds[c]) for c in clusters}
        ready = [(first[c], i, c) for i, c in enumerate(clusters) if not missing[c]]
        heapq.heapify(ready)
        number = {c: i for i, c in enumerate(clusters)}
        out = []
        while ready:
            _, _, c = heapq.heappop(ready)
            out.append(c)
            for q in self.succs[c]:
                missing[q] -= 1
                if not missing[q]:
                    heapq.heappush(ready, (first[q], number[q], q))
        assert len(out) == len(clusters), "merging fragments made a cycle; this is a bug in ManyMesh"
        return out


def _is_work(clusters: Sequence[Cluster]) -> bool:
    """Whether they make so much that it is worth a launch of its own."""
    return sum(nbytes(v.aval) for c in clusters for n in c.nodes for v in n.outputs) > WORK


def _exclude_each_other(a: Cluster, b: Cluster) -> bool:
    """Whether they are in two branches of one conditional, of which only one runs."""
    taken = dict(g for n in a.nodes for g in n.guard)
    return any(taken.get(index, number) != number for n in b.nodes for index, number in n.guard)


def _alike(a: Cluster, b: Cluster) -> bool:
    return (
        a.task is None and b.task is None and a.loop is None and b.loop is None and a.submesh == b.submesh
        and a.phase == b.phase and not a.layout_follows_loop and not b.layout_follows_loop and a.unstacks == b.unstacks
    )  # fmt: skip
