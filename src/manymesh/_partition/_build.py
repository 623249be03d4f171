"""`build`: from a traced step to a `Program`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from .. import _compat
from .._jaxpr._dead import remove_dead
from .._jaxpr._flatten import flatten
from .._jaxpr._implicit import mark_scopes
from .._jaxpr._invariant import settle_constants
from .._jaxpr._nodes import Flat, Loop, nbytes
from .._jaxpr._stacks import sum_layers_apart
from .._mark import Recording
from .._program import Edge, Fragment, Kind, LoopPlan, Program
from ._cluster import Cluster, cluster
from ._defer import defer_sums
from ._place import Placement, place
from ._residuals import keep_fewer_bytes
from ._schedule import fit_schedule
from ._split import split_weights
from ._spread import spread_conditionals
from ._sums import regroup_sums


def build(
    closed: Any,
    record: Recording,
    pinned_in: dict[int, Mesh],
    pinned_out: dict[int, Mesh],
    states: Sequence[tuple[int, int]] = (),
) -> Program | None:
    """Splits a traced step.

    Args:
      closed: closed jaxpr of the step, traced under ``record``.
      record: what its marks mean.
      pinned_in: position among the step's inputs -> the submesh it is on.
      pinned_out: position among the results -> the submesh it has to be on.
      states: (position of an input, position of the result that replaces it).

    Returns:
      The program, or None if nothing in the step says where anything runs.

    Raises:
      PlacementError: a task inside control flow that cannot be opened.
      MeshError: submeshes of several backends.
    """
    flat = flatten(closed, record)
    remove_dead(flat)
    mark_scopes(flat, record)
    if sum_layers_apart(flat):
        remove_dead(flat)
    split_weights(flat)
    keep_fewer_bytes(flat, record)
    settle_constants(flat)
    inputs = flat.invars[len(flat.consts) :]
    pins = {inputs[i]: mesh for i, mesh in pinned_in.items()}
    if not any(n.task and record.tasks[n.task].mesh is not None for n in flat.nodes) and not pins and not pinned_out:
        return None
    kept = [(inputs[i], o) for i, o in states if o not in pinned_out]
    where = place(flat, record, pins, pinned_out, kept)
    while spread_conditionals(flat, where, record):
        remove_dead(flat)
        where = place(flat, record, pins, pinned_out, kept)
    if regroup_sums(flat, where):
        remove_dead(flat)
        where = place(flat, record, pins, pinned_out, kept)
    reductions = defer_sums(flat, where, record)
    if any(r.axes for r in reductions):
        remove_dead(flat)
        where = place(flat, record, pins, pinned_out, kept)
    program = replace(_Builder(flat, where, record).run(), reductions=reductions)
    check(program)
    return program


_KINDS: tuple[Kind, ...] = ("F", "B", "W")


class _Builder:
    def __init__(self, flat: Flat, where: Placement, record: Recording) -> None:
        self.flat, self.where, self.record = flat, where, record
        self.producer = {v: n for n in flat.nodes for v in n.outputs}
        self.fragments: list[Fragment] = []
        self.made_at: dict[Any, set[int]] = defaultdict(set)
        self.position = {n: i for i, n in enumerate(flat.nodes)}
        for n in flat.nodes:
            for v in n.outputs:
                self.made_at[v].update(where.node[n])
        self.names: Counter[str] = Counter()

    def run(self) -> Program:
        scopes: list[Loop | None] = [None, *self.flat.loops]
        clustered = {s: cluster(self.flat, self.where, s) for s in scopes}
        of = {(n, c.submesh): c for order, _ in clustered.values() for c in order for n in c.nodes}
        self.read_by = self._readers(of)
        order: list[int] = []
        plans: dict[int, LoopPlan] = {}
        outer, _ = clustered[None]
        seen_loop = False
        for c in outer:
            if c.loop is not None:
                index = self.flat.loops.index(c.loop)
                plans[index] = self._loop(c.loop, index, *clustered[c.loop])
                order.append(-1 - index)
                seen_loop = True
            else:
                order.append(self._fragment(c, None, None, "after" if seen_loop else "before").index)
        outputs = tuple((v, self.where.home.get(v, 0) if _compat.is_var(v) else 0) for v in self.flat.outvars)
        return Program(
            tuple(self.where.submeshes),
            tuple(self.fragments),
            tuple(order),
            tuple(plans[i] for i in range(len(plans))),
            tuple(self._edges()),
            tuple(self.flat.invars),
            outputs,
            self.where.home,
            self._arrivals(outputs),
            tuple(self.flat.consts.values()),
            self._unmarked(),
        )

    def _readers(self, of: dict[Any, Cluster]) -> dict[Any, set[tuple[Cluster, int]]]:
        """variable -> the clusters that read it, and on which submesh."""
        read: dict[Any, set[tuple[Cluster, int]]] = defaultdict(set)
        for n in self.flat.nodes:
            for s in self.where.node[n]:
                for v in n.inputs:
                    read[v].add((of[n, s], s))
        return read

    def _loop(self, loop: Loop, index: int, order: list[Cluster], preds: dict[Cluster, set[Cluster]]) -> LoopPlan:
        fit = fit_schedule(loop.spec, order, preds, lambda c: self.record.tasks[c.task].name if c.task else None)
        stage, placement, in_order = fit.stage, fit.placement, fit.in_order
        for c in order:
            self._fragment(c, index, stage[c], "body")
        return LoopPlan(
            loop.spec.name,
            loop.spec.num_microbatches,
            fit.schedule,
            placement,
            tuple((c.inner, c.out, c.init, c.final) for c in loop.carries),
            tuple((p.inner, p.outer) for p in loop.cut),
            tuple((p.inner, p.outer) for p in loop.collected),
            in_order,
        )

    def _fragment(self, c: Cluster, loop: int | None, stage: int | None, fallback: str) -> Fragment:
        assert c.submesh is not None, "loops are no fragments"
        nodes = sorted(c.nodes, key=self.position.__getitem__)
        made = {v for n in nodes for v in n.outputs}
        invars = [v for v in dict.fromkeys(v for n in nodes for v in n.inputs) if v not in made]
        outvars = [v for n in nodes for v in n.outputs if self._leaves(v, c)]
        tasks = tuple(self.record.tasks[n.task].name or "task" for n in nodes if n.task is not None)
        name = "_".join(tasks) + ("", "_bwd", "_wgt")[c.phase] if tasks else f"{fallback}_{c.submesh}"
        self.names[name] += 1
        if self.names[name] > 1:
            name = f"{name}_{self.names[name]}"
        fragment = Fragment(
            len(self.fragments), name, c.submesh, loop, _KINDS[c.phase], stage,
            _compat.new_jaxpr(invars, outvars, [n.eqn for n in nodes]), tasks, c.deferred,
        )  # fmt: skip
        self.fragments.append(fragment)
        return fragment

    def _leaves(self, v: Any, c: Cluster) -> bool:
        """Whether somebody outside the cluster reads this copy of the value."""
        record_copy = self.where.home.get(v) == c.submesh
        if record_copy and v in self._kept:
            return True
        for reader, s in self.read_by.get(v, ()):
            if reader is not c and (s == c.submesh or (record_copy and s not in self.made_at[v])):
                return True
        return any(s == c.submesh for s in self._linked.get(v, ())) or (
            record_copy and any(s not in self.made_at[v] for s in self._linked.get(v, ()))
        )

    @property
    def _kept(self) -> set[Any]:
        """Variables that leave the program or their loop."""
        if not hasattr(self, "_kept_cache"):
            kept = {v for v in self.flat.outvars if _compat.is_var(v)}
            for loop in self.flat.loops:
                kept |= {c.out for c in loop.carries} | {p.inner for p in loop.collected}
            self._kept_cache = kept
        return self._kept_cache

    @property
    def _linked(self) -> dict[Any, set[int]]:
        """Variables that enter a loop under another name -> submeshes on which the loop reads them."""
        if not hasattr(self, "_linked_cache"):
            linked: dict[Any, set[int]] = defaultdict(set)
            for loop in self.flat.loops:
                for c in loop.carries:
                    if _compat.is_var(c.init):
                        linked[c.init] |= {s for _, s in self.read_by.get(c.inner, ())}
                for p in loop.cut:
                    for v in p.outer:
                        if _compat.is_var(v):
                            linked[v] |= {s for _, s in self.read_by.get(p.inner, ())}
            self._linked_cache = linked
        return self._linked_cache

    def _needed_at(self, v: Any) -> set[int]:
        return {s for _, s in self.read_by.get(v, ())} | self._linked.get(v, set())

    def _edges(self) -> list[Edge]:
        edges = []
        loop_of = {v: n.loop for n in self.flat.nodes for v in n.outputs}
        finals = [c.final for loop in self.flat.loops for c in loop.carries]
        finals += [v for loop in self.flat.loops for p in loop.collected for v in p.outer]
        for v in dict.fromkeys([*self.made_at, *finals]):
            source = self.where.home[v]
            for target in sorted(self._needed_at(v) - self.made_at.get(v, {source})):
                loop = loop_of.get(v)
                index = self.flat.loops.index(loop) if loop is not None else None
                edges.append(Edge(v, source, target, index, nbytes(v.aval)))
        return edges

    def _arrivals(self, outputs: tuple[tuple[Any, int], ...]) -> dict[Any, tuple[int, ...]]:
        """Where each input has to be; a result that is an input unchanged stays at its home."""
        passed = {v for v, _ in outputs if _compat.is_var(v)}
        arrivals = {}
        for v in self.flat.invars:
            needed = self._needed_at(v)
            if v in passed or not needed:
                needed = needed | {self.where.home[v]}
            arrivals[v] = tuple(sorted(needed))
        return arrivals

    def _unmarked(self) -> tuple[tuple[str, int, str, int], ...]:
        counts: Counter[tuple[str, int, str]] = Counter()
        for n in self.flat.nodes:
            if n.task is None:
                for s in self.where.node[n]:
                    counts[n.eqn.primitive.name, s, self.where.reason.get(n, "loop input")] += 1
        return tuple((*k, c) for k, c in counts.items())


def check(program: Program) -> None:
    """Asserts what every program promises; a failure is a bug in ManyMesh."""
    made: set[tuple[Any, int]] = {(v, s) for v, places in program.arrivals.items() for s in places}
    crossing = {(e.var, e.target): e.source for e in program.edges}

    def has(v: Any, s: int) -> bool:
        return (v, s) in made or ((v, s) in crossing and (v, crossing[v, s]) in made)

    def run(f: Fragment) -> None:
        for v in f.invars:
            assert has(v, f.submesh), (
                f"fragment {f.name!r} reads a value of {v.aval.str_short()} that is not on its submesh"
            )
        made.update((v, f.submesh) for v in f.outvars)

    for item in program.order:
        if item >= 0:
            run(program.fragments[item])
            continue
        loop = program.loops[-1 - item]
        everywhere = range(len(program.submeshes))
        made.update((inner, s) for inner, *_ in loop.carries for s in everywhere)
        made.update((inner, s) for inner, _ in loop.cut for s in everywhere)
        for f in program.body(-1 - item):
            run(f)
        made.update((final, program.home[final]) for *_, final in loop.carries)
        made.update((v, program.home[v]) for _, outer in loop.collected for v in outer)
