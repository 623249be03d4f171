"""What a forward pass keeps for its backward pass, in the fewest bytes.

Differentiation keeps whatever the backward pass reads: for one activation function five arrays of the size of the
activation, where one would do, from which the others are a multiplication away. Inside one executable XLA sorts this
out; between two executables nobody does, and a pipeline holds it all for every microbatch in flight.

So each task keeps the smallest set of values from which the backward pass can have the rest by cheap arithmetic, which
XLA fuses into whatever reads it. The set is a minimum cut: sources are what is expensive to compute (a matrix product,
an exponential, a sum), the sink is what the backward pass reads, and to keep a value costs its bytes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import _compat
from .._jaxpr._nodes import Flat, Loop, Node, inlined, nbytes, substitute
from .._mark import Recording, constraint_p

# Elementwise, without a function that takes more than a few instructions; and what only moves or names elements.
_CHEAP = {
    "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "eq", "expand_dims",
    "ge", "gt", "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "reshape", "reshard",
    "select_n", "sharding_constraint", "sign", "square", "squeeze", "sub", "transpose", "xor", constraint_p.name,
}  # fmt: skip
_SMALL_POWER = 4

_BEYOND = float("inf")


def keep_fewer_bytes(flat: Flat, record: Recording) -> None:
    """Lets, in place, every task keep the fewest bytes for its backward pass.

    Args:
      flat: the program, its backward tasks split where the schedule wants it.
      record: what its marks mean. Tasks without a submesh stay as they are.
    """
    readers: dict[Any, list[Node]] = defaultdict(list)
    for n in flat.nodes:
        for v in dict.fromkeys(n.inputs):
            readers[v].append(n)
    leaving = {v for v in flat.outvars if _compat.is_var(v)}
    varying: dict[Loop | None, set[Any]] = {loop: set() for loop in (None, *flat.loops)}
    for loop in flat.loops:
        leaving |= {v for c in loop.carries for v in (c.out, c.init) if _compat.is_var(v)}
        leaving |= {v for p in loop.cut for v in p.outer if _compat.is_var(v)}
        leaving |= {p.inner for p in loop.collected}
        varying[loop] = {c.inner for c in loop.carries} | {p.inner for p in loop.cut}
    for n in flat.nodes:
        varying[n.loop].update(n.outputs)
    rewritten: dict[Any, _Rewrite] = {}
    for n in flat.nodes:
        if n.task is not None and record.tasks[n.task].mesh is not None:
            _thin(n, readers, leaving, varying[n.loop], rewritten)


@dataclass(eq=False)
class _Consumer:
    """How a backward task changes: its jaxpr, and where its operands come from.

    An operand is ``("own", k)``, one it had, ``("kept", k)``, a result of the forward task, or ``("read", k)``, an
    operand of the forward task.
    """

    jaxpr: Any
    operands: list[tuple[str, int]]


@dataclass(eq=False)
class _Rewrite:
    """How a task and those that read what it keeps change; the same for all equal layers.

    ``results`` are positions among the results that the task had; a None is a value that it did not keep before,
    whose abstract value is in ``new``. ``used`` are the positions of the operands that it still needs.
    """

    jaxpr: Any
    used: list[int]
    results: list[int | None]
    new: list[Any]
    consumers: list[_Consumer]
    alive: tuple[Any, ...]  # the jaxprs whose ids are the key


def _thin(
    n: Node, readers: dict[Any, list[Node]], leaving: set[Any], varying: set[Any], rewritten: dict[Any, _Rewrite]
) -> None:
    outs = n.eqn.outvars
    kept = [
        k
        for k, v in enumerate(outs)
        if _compat.is_var(v)
        and v not in leaving
        and readers[v]
        and all(r.task == n.task and r.loop is n.loop and r.phase > n.phase for r in readers[v])
    ]
    if not kept:
        return
    consumers = list(dict.fromkeys(r for k in kept for r in readers[outs[k]]))
    read = {v for c in consumers for v in c.inputs}
    # What the consumers hold anyway, and what outlives the microbatch anyway, costs nothing.
    free_in = tuple(not _compat.is_var(v) or v in read or v not in varying for v in n.eqn.invars)
    free_out = tuple(k not in kept and _compat.is_var(v) and v in read for k, v in enumerate(outs))
    wiring = tuple(tuple(_positions(c.eqn.invars, outs, n.eqn.invars)) for c in consumers)
    jaxprs = (n.eqn.params["jaxpr"], *(c.eqn.params["jaxpr"] for c in consumers))
    dropped = tuple(not _compat.is_var(v) for v in outs)
    key = (tuple(map(id, jaxprs)), tuple(kept), free_in, free_out, wiring, dropped)
    if key not in rewritten:
        rewritten[key] = _rewrite(n, kept, free_in, free_out, consumers, jaxprs)
    how = rewritten[key]
    if not how.consumers:
        return
    before = list(n.eqn.invars)
    new = iter(_compat.new_var(aval) for aval in how.new)
    results = [next(new) if k is None else outs[k] for k in how.results]
    n.eqn = _with_body(n.eqn, how.jaxpr, [before[k] for k in how.used], results)
    for c, change in zip(consumers, how.consumers, strict=True):
        sources = {"own": c.eqn.invars, "kept": results, "read": before}
        for v in dict.fromkeys(c.inputs):
            readers[v].remove(c)
        c.eqn = _with_body(c.eqn, change.jaxpr, [sources[kind][k] for kind, k in change.operands], c.eqn.outvars)
        for v in dict.fromkeys(c.inputs):
            readers[v].append(c)


def _with_body(eqn: Any, jaxpr: Any, invars: list[Any], outvars: list[Any]) -> Any:
    new = _compat.call_eqn(eqn.params["name"], jaxpr, invars, outvars)
    return new.replace(source_info=eqn.source_info)


def _positions(atoms: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any]) -> list[Any]:
    """Where each operand of a consumer is among the results and operands of the producer."""
    where: dict[Any, Any] = {v: ("in", k) for k, v in enumerate(ins) if _compat.is_var(v)}
    where |= {v: ("out", k) for k, v in enumerate(outs) if _compat.is_var(v)}
    return [where.get(v) if _compat.is_var(v) else "literal" for v in atoms]


def _rewrite(
    n: Node,
    kept: list[int],
    free_in: tuple[bool, ...],
    free_out: tuple[bool, ...],
    consumers: list[Node],
    jaxprs: tuple[Any, ...],
) -> _Rewrite:
    same = _Rewrite(None, [], [], [], [], jaxprs)
    parts = _compat.open_jaxpr(jaxprs[0])
    if parts.consts or any(_compat.open_jaxpr(j).consts for j in jaxprs[1:]):
        return same
    eqns, env = inlined(parts.eqns)
    outs = [env.get(v, v) if _compat.is_var(v) else v for v in parts.outvars]
    producer = {v: e for e in eqns for v in e.outvars if _compat.is_var(v)}
    wanted = list(dict.fromkeys(outs[k] for k in kept if _compat.is_var(outs[k]) and outs[k] in producer))
    cost: dict[Any, float] = {v: 0 for v, free in zip(parts.invars, free_in, strict=True) if free}
    cost |= {v: 0 for v, free in zip(outs, free_out, strict=True) if free and _compat.is_var(v)}
    saved = _cheapest(wanted, producer, cost)
    if saved.issuperset(wanted):
        return same
    return _Assembly(n, kept, consumers, parts, eqns, outs, producer, saved, jaxprs).result()


def _is_cheap(eqn: Any) -> bool:
    if eqn.primitive.name == "integer_pow":
        return bool(abs(eqn.params["y"]) <= _SMALL_POWER and eqn.params["y"] > 0)
    constant = not any(_compat.is_var(v) for v in eqn.invars)
    return (constant or eqn.primitive.name in _CHEAP) and not eqn.effects


def _cheapest(wanted: list[Any], producer: dict[Any, Any], cost: dict[Any, float]) -> set[Any]:
    """The values to keep: the minimum cut between what is expensive to compute and what is wanted.

    Among cuts of equal cost the one closest to what is wanted, which computes least again.
    """
    network = _Network()
    source, sink = object(), object()
    stack, seen = list(wanted), set(wanted)
    while stack:
        v = stack.pop()
        network.add((v, "in"), (v, "out"), cost.get(v, nbytes(v.aval)))
        eqn = producer.get(v)
        if eqn is None or not _is_cheap(eqn):
            network.add(source, (v, "in"), _BEYOND)
            continue
        for operand in eqn.invars:
            if _compat.is_var(operand):
                network.add((operand, "out"), (v, "in"), _BEYOND)
                if operand not in seen:
                    seen.add(operand)
                    stack.append(operand)
    for v in wanted:
        network.add((v, "out"), sink, _BEYOND)
    behind = network.behind_minimum_cut(source, sink)
    return {v for v in seen if (v, "out") in behind and (v, "in") not in behind}


class _Network:
    """A flow network, for its minimum cut (Dinic's algorithm)."""

    def __init__(self) -> None:
        self.edges: dict[Any, dict[Any, float]] = defaultdict(dict)  # node -> neighbour -> what can still flow there

    def add(self, a: Any, b: Any, capacity: float) -> None:
        self.edges[a][b] = capacity
        self.edges[b].setdefault(a, 0)

    def behind_minimum_cut(self, source: Any, sink: Any) -> set[Any]:
        """The nodes from which the sink can be reached once the flow is maximal."""
        while (level := self._levels(source, sink)) is not None:
            untried = {node: list(neighbours) for node, neighbours in self.edges.items()}
            while self._augment(source, sink, level, untried):
                pass
        behind, queue = {sink}, deque([sink])
        while queue:
            node = queue.popleft()
            for other in self.edges[node]:
                if other not in behind and self.edges[other][node] > 0:
                    behind.add(other)
                    queue.append(other)
        return behind

    def _levels(self, source: Any, sink: Any) -> dict[Any, int] | None:
        level, queue = {source: 0}, deque([source])
        while queue:
            node = queue.popleft()
            for other, left in self.edges[node].items():
                if left > 0 and other not in level:
                    level[other] = level[node] + 1
                    queue.append(other)
        return level if sink in level else None

    def _augment(self, source: Any, sink: Any, level: dict[Any, int], untried: dict[Any, list[Any]]) -> bool:
        """Sends flow along one path that goes up a level with each edge; whether there was one."""
        path = [source]
        while path[-1] is not sink:
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


class _Assembly:
    """Builds the jaxprs of a task and its consumers from the values to keep."""

    def __init__(
        self,
        n: Node,
        kept: list[int],
        consumers: list[Node],
        parts: Any,
        eqns: list[Any],
        outs: list[Any],
        producer: dict[Any, Any],
        saved: set[Any],
        jaxprs: tuple[Any, ...],
    ) -> None:
        self.n, self.kept, self.consumers = n, kept, consumers
        self.parts, self.eqns, self.outs, self.producer = parts, eqns, outs, producer
        self.saved, self.jaxprs = saved, jaxprs
        self.input = {v: k for k, v in enumerate(parts.invars)}

    def result(self) -> _Rewrite:
        stay = [k for k, v in enumerate(self.n.eqn.outvars) if _compat.is_var(v) and k not in self.kept]
        named = [(v, k) for k, v in enumerate(self.outs) if _compat.is_var(self.n.eqn.outvars[k]) and _compat.is_var(v)]
        first = dict(reversed(named))
        # What a consumer reads and cannot compute (it is handed through, or a literal) stays as it is.
        stay += [k for k in self.kept if not (_compat.is_var(self.outs[k]) and self.outs[k] in self.producer)]
        values = [v for v in dict.fromkeys(v for e in self.eqns for v in e.outvars) if v in self.saved]
        results: list[int | None] = list(stay)
        place: dict[Any, int] = {}  # saved value -> its position among the new results
        new = []
        for v in values:
            known = first.get(v)
            if known in stay:
                place[v] = results.index(known)
                continue
            place[v] = len(results)
            results.append(known)
            if known is None:
                new.append(v.aval)
        atoms = [self.outs[k] for k in stay]
        atoms += [v for v in values if first.get(v) not in stay]
        trimmed, used = _compat.dce(_compat.new_jaxpr(self.parts.invars, atoms, self.eqns), [True] * len(atoms))
        changes = [self._consumer(c, results, place) for c in self.consumers]
        return _Rewrite(
            _compat.close(trimmed), [k for k, u in enumerate(used) if u], results, new, changes, self.jaxprs
        )

    def _consumer(self, c: Node, results: list[int | None], place: dict[Any, int]) -> _Consumer:
        inner = _compat.open_jaxpr(c.eqn.params["jaxpr"])
        at = {v: k for k, v in enumerate(self.n.eqn.outvars) if _compat.is_var(v)}
        operands: list[tuple[str, int]] = []
        invars: list[Any] = []
        env: dict[Any, Any] = {}  # variable of the producer -> variable here
        again: list[Any] = []  # equations computed again
        alias: dict[Any, Any] = {}

        def take(kind: str, k: int, aval: Any) -> Any:
            invars.append(_compat.new_var(aval))
            operands.append((kind, k))
            return invars[-1]

        def value(result: Any) -> Any:
            """A variable of the producer, made available here."""
            stack = [result]  # no recursion: a chain of cheap equations may be as long as the task
            while stack:
                v = stack[-1]
                if not _compat.is_var(v) or v in env:
                    stack.pop()
                elif v in place:
                    env[v] = take("kept", place[v], v.aval)
                elif v in self.input:
                    env[v] = take("read", self.input[v], v.aval)
                else:
                    eqn = self.producer[v]
                    missing = [o for o in eqn.invars if _compat.is_var(o) and o not in env]
                    stack += missing
                    if not missing:
                        again.append(substitute(eqn, env))
            return env.get(result, result) if _compat.is_var(result) else result

        for k, (outer, v) in enumerate(zip(c.eqn.invars, inner.invars, strict=True)):
            position = at.get(outer) if _compat.is_var(outer) else None
            if position is None or position not in self.kept or position in results:
                invars.append(v)
                operands.append(("own", k))
            else:
                alias[v] = value(self.outs[position])
        eqns = [e.replace(invars=[alias.get(o, o) if _compat.is_var(o) else o for o in e.invars]) for e in inner.eqns]
        outs = [alias.get(o, o) if _compat.is_var(o) else o for o in inner.outvars]
        return _Consumer(_compat.close(_compat.new_jaxpr(invars, outs, again + eqns)), operands)
