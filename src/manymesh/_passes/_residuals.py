"""What a forward pass keeps for its backward pass, in the fewest bytes.

Differentiation keeps whatever the backward pass reads: for one activation function five arrays of the size of the
activation, where one would do, from which the others are a multiplication away. Inside one executable XLA sorts this
out; between two executables nobody does, and a pipeline holds it all for every microbatch in flight.

So each task keeps the smallest set of values from which the backward pass can have the rest by cheap arithmetic, which
XLA fuses into whatever reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from .. import _compat
from .._compat import AbstractJaxpr, AbstractValue, Atom, Eqn, OpenJaxpr, Var
from .._program._calls import inlined_jaxpr
from .._program._flat import FlatProgram
from .._program._nodes import Node
from .._program._rewrite import with_atoms
from ._cheap import cheap_on, cheapest, compute_again
from ._hoist import invariants


def minimise_residuals(flat: FlatProgram) -> FlatProgram:
    """Lets every task keep the fewest bytes for its backward pass. Tasks without a submesh stay as they are."""
    return Minimiser(flat).run()


Place = tuple[str, int]  # where an operand comes from, and its position there


@dataclass(eq=False)
class Consumer:
    """How a backward task changes: its jaxpr, and where its operands come from.

    An operand is ``("own", k)``, one it had, ``("kept", k)``, a result of the forward task, or ``("read", k)``, an
    operand of the forward task.
    """

    jaxpr: AbstractJaxpr
    operands: list[Place]


@dataclass(eq=False)
class Rewrite:
    """How a task and those that read what it keeps change; the same for all equal layers.

    ``results`` are positions among the results that the task had; a None is a value that it did not keep before,
    whose abstract value is in ``new``. ``used`` are the positions of the operands that it still needs.
    """

    jaxpr: AbstractJaxpr
    used: list[int]
    results: list[int | None]
    new: list[AbstractValue]
    consumers: list[Consumer]
    alive: tuple[AbstractJaxpr, ...]  # the jaxprs whose ids are the key


@dataclass(frozen=True, eq=False)
class Given:
    """A task that keeps something for its backward pass.

    Attributes:
      task: the task.
      kept: positions of results that are kept for the consumers alone.
      free_in, free_out: whether keeping an operand, or a result, costs nothing.
      lasting_in: whether an operand outlives the microbatch.
      consumers: the equations of later phases that read what is kept.
      jaxprs: those of all of them.
      cheap: names of the primitives whose results may be computed again.
    """

    task: Eqn
    kept: list[int]
    free_in: tuple[bool, ...]
    free_out: tuple[bool, ...]
    lasting_in: tuple[bool, ...]
    consumers: list[Eqn]
    jaxprs: tuple[AbstractJaxpr, ...]
    cheap: frozenset[str]


class Minimiser:
    """Goes through the tasks of a program; ``now`` has the nodes that changed.

    A task may keep values for a node that changed before, so that every node is looked at as it is now.
    """

    def __init__(self, flat: FlatProgram) -> None:
        self.flat, self.index = flat, flat.index
        self.now: dict[Node, Node] = {}
        # What every microbatch makes alike is made once: `hoist_loop_invariants`.
        self.invariant = {v for i in range(len(flat.loops)) for v, n in invariants(flat, i).items() if not n.guard}
        self.readers = {v: list(nodes) for v, nodes in flat.index.readers.items()}  # the nodes as they were
        self.rewritten: dict[Hashable, Rewrite] = {}

    def run(self) -> FlatProgram:
        """The program whose tasks keep less; the same where none does."""
        for n in self.flat.nodes:
            if n.task is not None and self.flat.tasks[n.task].mesh is not None:
                self.task(n)
        if not self.now:
            return self.flat
        return replace(self.flat, nodes=tuple(self.now.get(n, n) for n in self.flat.nodes), placement=None)

    def task(self, n: Node) -> None:
        """Lets one task keep less, if it keeps something that is cheap to have again."""
        eqn = self.now.get(n, n).eqn
        outs = eqn.outvars
        kept = [k for k, v in enumerate(outs) if _compat.is_var(v) and self._is_residual(v, n)]
        if not kept:
            return
        consumers = list(dict.fromkeys(r for k in kept for r in self.readers[outs[k]]))
        eqns = [self.now.get(c, c).eqn for c in consumers]
        read = {v for e in eqns for v in e.invars if _compat.is_var(v)}
        # What the consumers hold anyway, and what outlives the microbatch anyway, costs nothing.
        lasting_in = tuple(not _compat.is_var(v) or not self._is_in_scope(v, n) for v in eqn.invars)
        free_in = tuple(lasts or v in read for v, lasts in zip(eqn.invars, lasting_in, strict=True))
        residual = set(kept)
        free_out = tuple(k not in residual and _compat.is_var(v) and v in read for k, v in enumerate(outs))
        wiring = tuple(tuple(_positions(e.invars, outs, eqn.invars)) for e in eqns)
        jaxprs = (eqn.params["jaxpr"], *(e.params["jaxpr"] for e in eqns))
        dropped = tuple(not _compat.is_var(v) for v in outs)
        cheap = self._cheap(n)
        key = (tuple(map(id, jaxprs)), tuple(kept), free_in, free_out, lasting_in, wiring, dropped, cheap)
        if key not in self.rewritten:
            self.rewritten[key] = self.rewrite(Given(eqn, kept, free_in, free_out, lasting_in, eqns, jaxprs, cheap))
        how = self.rewritten[key]
        if not how.consumers:
            return
        new = iter([_compat.new_var(aval) for aval in how.new])
        results = [next(new) if k is None else outs[k] for k in how.results]
        self._change(n, _with_body(eqn, how.jaxpr, [eqn.invars[k] for k in how.used], results))
        for c, e, change in zip(consumers, eqns, how.consumers, strict=True):
            sources: dict[str, Sequence[Atom]] = {"own": e.invars, "kept": results, "read": eqn.invars}
            self._change(c, _with_body(e, change.jaxpr, [sources[kind][k] for kind, k in change.operands], e.outvars))

    def rewrite(self, given: Given) -> Rewrite:
        """How a task and its consumers change."""
        jaxprs = given.jaxprs
        same = Rewrite(jaxprs[0], [], [], [], [], jaxprs)
        parts = _compat.open_jaxpr(jaxprs[0])
        if parts.consts or any(_compat.open_jaxpr(j).consts for j in jaxprs[1:]):
            return same
        eqns, outs = inlined_jaxpr(parts)
        producer = {v: e for e in eqns for v in e.outvars if _compat.is_var(v)}
        wanted = list(dict.fromkeys(v for k in given.kept if _compat.is_var(v := outs[k]) and v in producer))
        known = zip([*parts.invars, *outs], [*given.free_in, *given.free_out], strict=True)
        free = {v for v, is_free in known if is_free and _compat.is_var(v)}
        lasting = [v for v, lasts in zip(parts.invars, given.lasting_in, strict=True) if lasts]
        saved = cheapest(wanted, free, parts.invars, eqns, given.cheap, lasting)
        if saved.issuperset(wanted) and all(_compat.is_var(outs[k]) for k in given.kept):
            return same
        return _Assembly(given.task, given.kept, given.consumers, parts, eqns, outs, producer, saved, jaxprs).result()

    def _cheap(self, n: Node) -> frozenset[str]:
        """The primitives that cost little where a task runs."""
        return cheap_on(self.flat.tasks[n.task].mesh if n.task is not None else None)

    def _is_residual(self, v: Var, n: Node) -> bool:
        """Whether only the later phases of the task itself read one of its results."""
        readers = self.readers.get(v)
        return (
            bool(readers)
            and v not in self.index.leaving
            and all(r.task == n.task and r.loop == n.loop and r.phase > n.phase for r in readers or ())
        )

    def _is_in_scope(self, v: Var, n: Node) -> bool:
        """Whether a value is made anew in every run of the scope that a node is in."""
        if n.loop is None:
            return v in self.index.producer and v not in self.index.scope
        return self.index.scope.get(v) == n.loop and v not in self.invariant

    def _change(self, n: Node, eqn: Eqn) -> None:
        before = self.now.get(n, n)
        self.now[n] = after = replace(before, eqn=eqn)
        for v in dict.fromkeys(before.inputs):
            self.readers[v].remove(n)
        for v in dict.fromkeys(after.inputs):
            self.readers.setdefault(v, []).append(n)


def _with_body(eqn: Eqn, jaxpr: AbstractJaxpr, invars: Sequence[Atom], outvars: Sequence[Var]) -> Eqn:
    new = _compat.call_eqn(eqn.params["name"], jaxpr, invars, outvars)
    changed: Eqn = new.replace(source_info=eqn.source_info)
    return changed


def _positions(atoms: Sequence[Atom], outs: Sequence[Atom], ins: Sequence[Atom]) -> list[Place | str | None]:
    """Where each operand of a consumer is among the results and operands of the producer."""
    found: dict[Var, Place] = {v: ("in", k) for k, v in enumerate(ins) if _compat.is_var(v)}
    found |= {v: ("out", k) for k, v in enumerate(outs) if _compat.is_var(v)}
    return [found.get(v) if _compat.is_var(v) else "literal" for v in atoms]


class _Assembly:
    """Builds the jaxprs of a task and its consumers from the values to keep."""

    def __init__(
        self,
        task: Eqn,
        kept: list[int],
        consumers: list[Eqn],
        parts: OpenJaxpr,
        eqns: list[Eqn],
        outs: list[Atom],
        producer: Mapping[Var, Eqn],
        saved: Collection[Var],
        jaxprs: tuple[AbstractJaxpr, ...],
    ) -> None:
        self.task, self.kept, self.consumers = task, kept, consumers
        self.parts, self.eqns, self.outs, self.producer = parts, eqns, outs, producer
        self.saved, self.jaxprs = saved, jaxprs
        self.input = {v: k for k, v in enumerate(parts.invars)}

    def result(self) -> Rewrite:
        kept = set(self.kept)
        stay = [k for k, v in enumerate(self.task.outvars) if _compat.is_var(v) and k not in kept]
        named = [(v, k) for k, v in enumerate(self.outs) if _compat.is_var(self.task.outvars[k]) and _compat.is_var(v)]
        first = dict(reversed(named))
        # What a consumer reads and cannot compute, for it is handed through, stays as it is. A number it has itself.
        stay += [k for k in self.kept if _compat.is_var(v := self.outs[k]) and v not in self.producer]
        values = [v for v in dict.fromkeys(v for e in self.eqns for v in e.outvars) if v in self.saved]
        results: list[int | None] = list(stay)
        place: dict[Var, int] = {}  # saved value -> its position among the new results
        staying = {k: i for i, k in reversed(list(enumerate(stay)))}
        new: list[AbstractValue] = []
        for v in values:
            known = first.get(v)
            if known is not None and known in staying:
                place[v] = staying[known]
                continue
            place[v] = len(results)
            results.append(known)
            if known is None:
                new.append(v.aval)
        atoms = [self.outs[k] for k in stay]
        atoms += [v for v in values if first.get(v) not in staying]
        trimmed, used = _compat.dce(_compat.new_jaxpr(self.parts.invars, atoms, self.eqns), [True] * len(atoms))
        changes = [self._consumer(c, results, place) for c in self.consumers]
        return Rewrite(_compat.close(trimmed), [k for k, u in enumerate(used) if u], results, new, changes, self.jaxprs)

    def _consumer(self, c: Eqn, results: list[int | None], place: Mapping[Var, int]) -> Consumer:
        inner = _compat.open_jaxpr(c.params["jaxpr"])
        at = {v: k for k, v in enumerate(self.task.outvars) if _compat.is_var(v)}
        operands: list[Place] = []
        invars: list[Var] = []
        env: dict[Var, Atom] = {}  # variable of the producer -> variable here
        again: list[Eqn] = []  # equations computed again
        alias: dict[Var, Atom] = {}
        gone = set(self.kept).difference(k for k in results if k is not None)

        def take(kind: str, k: int, aval: AbstractValue) -> Var:
            invars.append(_compat.new_var(aval))
            operands.append((kind, k))
            return invars[-1]

        def value(result: Atom) -> Atom:
            """A variable of the producer, made available here."""

            def here(v: Var) -> Var | None:
                if v in place:
                    return take("kept", place[v], v.aval)
                return take("read", self.input[v], v.aval) if v in self.input else None

            compute_again(result, self.producer, env, here, again)
            return env.get(result, result) if _compat.is_var(result) else result

        for k, (outer, v) in enumerate(zip(c.invars, inner.invars, strict=True)):
            position = at.get(outer) if _compat.is_var(outer) else None
            if position is None or position not in gone:
                invars.append(v)
                operands.append(("own", k))
            else:
                alias[v] = value(self.outs[position])
        eqns = [with_atoms(e, alias) for e in inner.eqns]
        outs = [alias.get(o, o) if _compat.is_var(o) else o for o in inner.outvars]
        return Consumer(_compat.close(_compat.new_jaxpr(invars, outs, again + eqns)), operands)
