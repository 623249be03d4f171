"""Cutting a placed program into fragments, one for each cluster of equations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from .. import _compat
from .._compat import Atom, Var
from .._program._flat import FlatProgram
from .._program._fragments import Edge, Fragment, Kind, LoopPlan, Program, called
from .._program._nodes import Loop, nbytes
from .._program._text import short
from ._beside import of_literals
from ._cluster import Cluster, cluster
from ._guard import guarded
from ._schedule import ENDINGS, Called, fit_schedule
from ._scopes import is_rematerialised

_KINDS: tuple[Kind, ...] = ("F", "B", "W")


def cut(flat: FlatProgram) -> Program:
    """Cuts a placed program into fragments."""
    return _Builder(flat).run()


class _Builder:
    def __init__(self, flat: FlatProgram) -> None:
        assert flat.placement is not None, "only what is placed can be cut"
        self.flat, self.placement, self.index = flat, flat.placement, flat.index
        self.fragments: list[Fragment] = []
        self.made_at = {v: set(self.placement.node[n]) for n in flat.nodes for v in n.outputs}
        self.names: Counter[str] = Counter()
        # A state, or what a loop carries -> its next value.
        self.next = {v: out for v, o in flat.pins.states if _compat.is_var(out := flat.outvars[o])}
        self.next |= {c.inner: c.out for loop in flat.loops for c in loop.carries if _compat.is_var(c.out)}
        self.read_by: dict[
            Var, dict[tuple[Cluster, int], None]
        ] = {}  # variable -> the clusters that read it, and where
        self.read_in_loops: dict[Var, set[int]] = {}  # variable -> submeshes that read it in a loop by another name
        # Variables that leave the program or their loop.
        self.kept = self.index.results.union(
            *({c.out for c in loop.carries} | {p.inner for p in loop.ys} for loop in flat.loops)
        )

    def run(self) -> Program:
        scopes: list[int | None] = [None, *range(len(self.flat.loops))]
        clustered = {s: cluster(self.flat, s) for s in scopes}
        self.cluster_of = {(n, c.submesh): c for order, _ in clustered.values() for c in order for n in c.nodes}
        self._find_readers()
        self.sent_to = self._sent_results()
        order: list[int] = []
        plans: dict[int, LoopPlan] = {}
        for c in clustered[None][0]:
            if c.loop is not None:
                plans[c.loop] = self._loop(c.loop, *clustered[c.loop])
                order.append(-1 - c.loop)
            else:
                order.append(self._fragment(c, None, None, "after" if plans else "before").index)
        home = self.placement.home
        # A literal that replaces a state, say a flag that falls after the first step, is where the state is.
        literals = {**of_literals(self.flat, self.placement), **{o: home[v] for v, o in self.flat.pins.states}}
        outputs = tuple(
            (v, self.sent_to.get(o, home.get(v, 0)) if _compat.is_var(v) else literals.get(o, 0))
            for o, v in enumerate(self.flat.outvars)
        )
        return Program(
            self.placement.submeshes,
            tuple(self.fragments),
            tuple(order),
            tuple(plans[i] for i in range(len(plans))),
            tuple(self._edges()),
            self.flat.invars,
            outputs,
            dict(self.placement.home),
            self._input_submeshes(),
            tuple(self.flat.consts.values()),
            self._unmarked(),
            self.flat.reductions,
            self.flat.stacked_inputs,
            self.flat.stacked_outputs,
            self.flat.tasks,
        )

    def _find_readers(self) -> None:
        for n in self.flat.nodes:
            for s in self.placement.node[n]:
                reader = self.cluster_of[n, s], s
                for v in n.inputs:
                    self.read_by.setdefault(v, {})[reader] = None
        for v in self.index.enters_loop:
            names = self.index.continues_as[v]
            self.read_in_loops[v] = {s for inner in names for _, s in self.read_by.get(inner, ())}
        for loop in self.flat.loops:
            self._find_carried(loop)

    def _find_carried(self, loop: Loop) -> None:
        """What a microbatch leaves to the next one goes wherever that reads it, and so does what the first one begins with."""
        needed = {c.inner: {s for _, s in self.read_by.get(c.inner, ())} for c in loop.carries}
        for c in loop.carries:
            if c.out in needed:
                needed[c.out].add(self.placement.home[c.final])
        grown = True
        while grown:  # what one carry was, another one may be next
            grown = False
            for c in loop.carries:
                if c.out in needed and not needed[c.inner] <= needed[c.out]:
                    needed[c.out] |= needed[c.inner]
                    grown = True
        for c in loop.carries:
            for v in (c.out, c.init):
                if _compat.is_var(v):
                    self.read_in_loops[v] = self.read_in_loops.get(v, set()) | needed[c.inner]

    def _loop(self, index: int, order: list[Cluster], preds: dict[Cluster, set[Cluster]]) -> LoopPlan:
        loop = self.flat.loops[index]
        fit = fit_schedule(loop.spec, order, preds, self._carried(loop), self._called_in_rows(order))
        for c in order:
            self._fragment(c, index, fit.stage[c], "body")
        return LoopPlan(
            loop.spec.name,
            loop.spec.num_microbatches,
            fit.schedule,
            fit.placement,
            tuple((c.inner, c.out, c.init, c.final) for c in loop.carries),
            tuple((p.inner, p.outer) for p in loop.xs),
            tuple((p.inner, p.outer) for p in loop.ys),
            fit.against is None,
            "" if fit.against is None else self._told(loop, *fit.against),
            loop.spec.of_losses,
        )

    def _called_in_rows(self, order: list[Cluster]) -> dict[Cluster, Called]:
        """What a custom schedule calls the clusters of a loop that have a task with a name."""
        given = Counter(self.names)
        printed = [_numbered(_name(self._tasks(c), c, c.phase, "body"), given) for c in order]
        named = ((c, self.flat.tasks[c.task].name if c.task else None) for c in order)
        return {c: Called(name, own) for (c, name), own in zip(named, printed, strict=True) if name is not None}

    def _told(self, loop: Loop, maker: Cluster, reader: Cluster) -> str:
        """What one cluster makes and the other reads, in this microbatch or in the next one, and where it is written."""
        read = {v for n in reader.nodes for v in n.inputs}
        kept = {c.out for c in loop.carries if c.inner in read}
        made = [(v, n) for n in sorted(maker.nodes, key=self.index.position.__getitem__) for v in n.outputs]
        value, when = next((pair for pair in made if pair[0] in read), None), ""
        if value is None:
            value, when = next((pair for pair in made if pair[0] in kept), made[-1]), " in the next microbatch"
        line = _compat.source_line(value[1].eqn)
        at = f" ({line})" if line else ""
        again = all(is_rematerialised(n.stack) for n in maker.nodes)
        why = " (jax.checkpoint around both computes it again: put it around each task instead)" if again else ""
        return f"{self._called(maker)} makes {short(value[0])}{at}, which {self._called(reader)} reads{when}{why}"

    def _called(self, c: Cluster) -> str:
        names = dict.fromkeys(self.flat.tasks[n.task].name or "task" for n in c.nodes if n.task is not None)
        return called(names, c.phase, c.submesh)

    def _carried(self, loop: Loop) -> list[tuple[Cluster, Cluster]]:
        """(What leaves a carry, what reads it in the next microbatch), for each carry of a loop."""
        leaves = {c.inner: c.out for c in loop.carries}
        found: dict[tuple[Cluster, Cluster], None] = {}
        for v, out in leaves.items():
            seen: set[Atom] = set()
            while out in leaves and out not in seen:  # one that another carry was before
                seen.add(out)
                out = leaves[out]
            for reader, s in self.read_by.get(v, ()) if out in self.made_at else ():
                node = self.index.producer[out]
                found[self.cluster_of.get((node, s)) or self.cluster_of[node, self.placement.home[out]], reader] = None
        return list(found)

    def _fragment(self, c: Cluster, loop: int | None, stage: int | None, fallback: str) -> Fragment:
        assert c.submesh is not None, "loops are no fragments"
        nodes = sorted(c.nodes, key=self.index.position.__getitem__)
        made = {v for n in nodes for v in n.outputs}
        invars = [v for v in dict.fromkeys(v for n in nodes for v in n.inputs) if v not in made]
        outvars = [v for n in nodes for v in n.outputs if self._leaves(v, c)]
        invars, outvars = self._states_first(invars, outvars)
        tasks = self._tasks(c)
        # Outside of loops, what comes after a backward pass may be another forward pass.
        phase = max(n.phase for n in nodes if n.task is not None) if tasks and loop is None else c.phase
        name = _numbered(_name(tasks, c, phase, fallback), self.names)
        # What the user's own rules of differentiation name their mesh in, too, is the same on all submeshes.
        body = _compat.on_abstract_mesh(
            _compat.new_jaxpr(invars, outvars, guarded(nodes)), self.placement.submeshes[c.submesh]
        )
        fragment = Fragment(
            len(self.fragments), name, c.submesh, loop, _KINDS[phase], stage, body, tasks, c.layout_follows_loop
        )
        self.fragments.append(fragment)
        return fragment

    def _tasks(self, c: Cluster) -> tuple[str, ...]:
        """What the tasks of a cluster are called, in order; what is computed again is no other task."""
        calls = sorted((n for n in c.nodes if n.task is not None), key=self.index.position.__getitem__)
        return tuple(self.flat.tasks[mark].name or "task" for mark in dict.fromkeys(n.task for n in calls if n.task))

    def _states_first(self, invars: list[Var], outvars: list[Var]) -> tuple[list[Var], list[Var]]:
        """The operands and results of a fragment, the states in front, and in their order their next values.

        JAX gives donated buffers to results of one shape in order. A moment whose buffer goes to another moment is copied
        first: the next value of the one is written over what the next value of the other reads, and the other way round.
        """
        made = set(outvars)
        before = {out: v for v in reversed(invars) if (out := self.next.get(v)) in made}
        follows = {v: out for out, v in reversed(before.items())}
        new = set(follows.values())
        return [*follows, *(v for v in invars if v not in follows)], [
            *follows.values(),
            *(v for v in outvars if v not in new),
        ]

    def _leaves(self, v: Var, c: Cluster) -> bool:
        """Whether somebody outside the cluster reads this copy of the value."""
        of_record = self.placement.home.get(v) == c.submesh
        if of_record and v in self.kept:
            return True
        for reader, s in self.read_by.get(v, ()):
            if reader is not c and (s == c.submesh or (of_record and s not in self.made_at[v])):
                return True
        inside = self.read_in_loops.get(v, set())
        return c.submesh in inside or (of_record and not inside <= self.made_at[v])

    def _sent_results(self) -> dict[int, int]:
        """Results that are wanted on another submesh than they are made on, by the caller or as the next value of a state.

        Returns:
          Position of a result -> that submesh.
        """
        pins, home = self.flat.pins, self.placement.home
        number = {mesh: s for s, mesh in enumerate(self.placement.submeshes)}
        made = {v: {home[v]} for v in self.index.made_by_loop} | self.made_at
        wanted = {o: number.get(mesh) for o, mesh in pins.outputs.items()} | {o: home[v] for v, o in pins.states}
        found = {}
        for o, s in wanted.items():
            v = self.flat.outvars[o]
            if _compat.is_var(v) and v in made and s is not None and s not in made[v]:
                found[o] = s
        return found

    def _needed_at(self, v: Var) -> set[int]:
        return {s for _, s in self.read_by.get(v, ())} | self.read_in_loops.get(v, set())

    def _edges(self) -> list[Edge]:
        edges = []
        wanted: dict[Atom, set[int]] = defaultdict(set)
        for o, s in self.sent_to.items():
            wanted[self.flat.outvars[o]].add(s)
        for v in dict.fromkeys([*self.made_at, *self.index.made_by_loop]):
            source = self.placement.home[v]
            there = self.made_at.get(v) or {source}
            inner = self.index.comes_from[v] if v in self.index.made_by_loop else None
            if inner in self.made_at:
                # What the body sends somewhere is there after the loop, too, and not sent again.
                there = there | (self._needed_at(inner) - self.made_at[inner])
            for target in sorted((self._needed_at(v) | wanted[v]) - there):
                edges.append(Edge(v, source, target, self.index.scope.get(v), nbytes(v.aval)))
        return edges

    def _input_submeshes(self) -> dict[Var, tuple[int, ...]]:
        """Where each input has to be: nowhere, if nobody reads it; a result that is an input unchanged stays at its home."""
        read_at = {}
        for v in self.flat.invars:
            needed = self._needed_at(v)
            if v in self.index.results:
                needed = needed | {self.placement.home[v]}
            read_at[v] = tuple(sorted(needed))
        return read_at

    def _unmarked(self) -> tuple[tuple[str, int, str, int], ...]:
        counts: Counter[tuple[str, int, str]] = Counter()
        for n in self.flat.nodes:
            if n.task is None:
                for s in self.placement.node[n]:
                    counts[n.primitive, s, self.placement.reason.get(n, "loop input")] += 1
        return tuple((*k, c) for k, c in counts.items())


def _name(tasks: Sequence[str], c: Cluster, phase: int, fallback: str) -> str:
    """The name of a cluster's fragment, which others may have too."""
    return f"{'_'.join(tasks)}{ENDINGS[phase]}" if tasks else f"{fallback}_{c.submesh}"


def _numbered(name: str, given: Counter[str]) -> str:
    """The name, with a number behind it if it is given already; counts it as given."""
    given[name] += 1
    return f"{name}_{given[name]}" if given[name] > 1 else name
