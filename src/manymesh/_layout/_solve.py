"""Deciding the sharding of every value of a program, by rules in order.

1. What the user said: ``in_shardings``, ``out_shardings``, where an argument already lies, and the constraints on
   arguments (their own, those of their boxes, those of the tasks that read them).
2. One value over time has one sharding: a state and its next value, an accumulator, the pieces of a batch, which lie like
   it where the fragments that read them say nothing.
3. A state that elementwise arithmetic ties to a parameter is laid out like it.
4. A value that crosses arrives as its readers constrain it, else as it left; so does an argument that several
   submeshes read, where it is sharded at its home.
5. The rest is what XLA's partitioner would choose, found fragment by fragment by its propagation pass.
6. What nothing says anything about is replicated.

Then every fragment is compiled with all its shardings given, so that nothing depends on what was compiled first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from .._compat import Jaxpr, Propagated, Var
from .._key import Keys
from .._program import Fragment, Program
from .._program._groups import Groups
from ._constraints import Constraints
from ._layout import Decision, Layout
from ._mirrors import mirrors
from ._transfers import adapt_spec

Specs = tuple[PartitionSpec | None, ...]


def solve(
    program: Program,
    *,
    asked: Mapping[int, NamedSharding],
    arriving: Mapping[int, NamedSharding],
    wanted: Mapping[int, NamedSharding],
    states: Iterable[tuple[int, int]],
    constant: Iterable[int] = (),
    names: Mapping[Var, str],
    look: Callable[[Fragment, Specs, Specs], Propagated] | None = None,
) -> Layout:
    """Decides the sharding of every value of a program on every submesh that it is on.

    Args:
      program: the program.
      asked: input position -> what ``in_shardings`` say.
      arriving: input position -> the sharding that the argument has.
      wanted: result position -> what ``out_shardings`` say, where a fragment can give it that.
      states: (input, result) positions where the result replaces the input.
      constant: input positions of states that only another program replaces.
      names: what users call the values.
      look: finds the specs of a fragment where this jaxlib has no propagation pass.
    """
    return _Solver(program, names, look).run(asked, arriving, wanted, list(states), constant)


class _Solver:
    def __init__(self, program: Program, names: Mapping[Var, str], look: Any) -> None:
        self.program, self.names, self.look = program, names, look
        self.groups: Groups[Var] = Groups()
        self.constraints = Constraints()
        self.keys = Keys()
        self.decided: dict[tuple[Var, int], Decision] = {}  # (representative, submesh)
        self.mirrored: dict[Var, tuple[Var, ...]] = {}  # representative -> states that it mirrors
        self.beside: dict[tuple[Var, int], list[tuple[Var, int]]] = {}  # a block -> all blocks of its value
        self.crossing = {(e.var, e.target): e.source for e in program.edges}
        self.propagated: dict[Any, Propagated] = {}
        self._inputs = set(program.invars)
        for loop in program.loops:
            for inner, out, init, final in loop.carries:
                for v in (out, init, final):
                    if _compat.is_var(v):
                        self.groups.join(v, inner)
            for inner, outer in (*loop.xs, *loop.ys):
                for v in outer:
                    if _compat.is_var(v):
                        self.groups.join(v, inner)

    def run(
        self,
        asked: Mapping[int, NamedSharding],
        arriving: Mapping[int, NamedSharding],
        wanted: Mapping[int, NamedSharding],
        states: Sequence[tuple[int, int]],
        constant: Iterable[int],
    ) -> Layout:
        program = self.program
        replaces: dict[Var, Var] = {}
        for i, o in states:
            v, (out, s) = program.invars[i], program.outputs[o]
            if o not in wanted and _compat.is_var(out) and program.home[v] == s:
                self.groups.join(out, v)
                replaces[out] = v
        self._join_blocks()
        for members in mirrors(program, (*replaces.values(), *(program.invars[i] for i in constant))):
            for v in members:
                self.mirrored[self.groups.find(v)] = members
        for o, sharding in wanted.items():
            out, s = program.outputs[o]
            if _compat.is_var(out):
                self._decide(out, s, sharding.spec, "out_shardings")
        self._place_inputs(asked, "in_shardings")
        self._place_inputs(arriving, "as it arrives")
        self._constrain_inputs()
        self._constrain_results()
        for f in self._order():
            self._propagate(f)
        return Layout(program.submeshes, self._table(), names=self.names, replaces=replaces)

    def _join_blocks(self) -> None:
        """The blocks of one value lie alike, each on its submesh."""
        program = self.program
        inputs = [(v, program.home[v]) for v in program.invars[len(program.consts) :]]
        for stacked, values in ((program.stacked_inputs, inputs), (program.stacked_outputs, program.outputs)):
            for each in stacked:
                blocks = [(self.groups.find(values[i][0]), values[i][1]) for i in each.positions]
                together = list(dict.fromkeys(b for block in blocks for b in self.beside.get(block, [block])))
                self.beside.update(dict.fromkeys(together, together))

    @functools.cached_property
    def _batches(self) -> Mapping[Var, Var]:
        """Representative of the pieces of a batch -> the batch."""
        outer = {v for loop in self.program.loops for _, pieces in loop.xs for v in pieces if _compat.is_var(v)}
        found: dict[Var, Var] = {}
        for f in self.program.fragments:
            if f.layout_follows_loop and not outer.isdisjoint(f.outvars):
                body = _compat.open_jaxpr(f.jaxpr)
                makers = {v: eqn for eqn in body.eqns for v in eqn.outvars}
                given = dict(zip(body.invars, f.invars, strict=True))
                for v, made in zip(f.outvars, body.outvars, strict=True):
                    while made in makers and any(map(_compat.is_var, makers[made].invars[:1])):
                        made = makers[made].invars[0]
                    if v in outer and made in given:
                        found[self.groups.find(v)] = given[made]
        return found

    def _like_batch(self, v: Var, s: int) -> PartitionSpec:
        """What the layout of its batch means for a piece: they differ in the length of one dimension."""
        batch = self._batches.get(self.groups.find(v))
        decision = self.found(batch, s) if batch is not None else None
        if batch is None or decision is None:
            return PartitionSpec()
        shapes = _compat.shape(batch), _compat.shape(v)
        if len(shapes[0]) != len(shapes[1]) or sum(a != b for a, b in zip(*shapes, strict=True)) > 1:
            return PartitionSpec()
        return _fitting(decision.spec, shapes[1], self.program.submeshes[s])

    def _decide(self, v: Var, s: int, spec: PartitionSpec, rule: str) -> None:
        """The first word counts."""
        key = self.groups.find(v), s
        for block in self.beside.get(key, (key,)):
            self.decided.setdefault(block, Decision(_trimmed(spec), rule))

    def _places_of(self, v: Var) -> tuple[int, ...]:
        """The submeshes of an input; of one that nobody reads its home."""
        return self.program.input_submeshes[v] or (self.program.home[v],)

    def _place_inputs(self, shardings: Mapping[int, NamedSharding], rule: str) -> None:
        program = self.program
        for i, sharding in shardings.items():
            v = program.invars[i]
            for s in self._places_of(v):
                mesh = program.submeshes[s]
                if s == program.home[v] or sharding.mesh.axis_names == mesh.axis_names:
                    self._decide(v, s, adapt_spec(sharding.spec, _compat.shape(v), mesh), rule)

    def _constrain_inputs(self) -> None:
        """What comes from outside lies as the first fragment that constrains it wants it.

        So does what is prepared of that before a loop, such as a weight that is scaled for all microbatches.
        """
        program = self.program
        preparing = [f for f in program.fragments if self._prepares(f) and not f.layout_follows_loop]
        roots = {self.groups.find(v) for v in (*program.invars, *(v for f in preparing for v in f.outvars))}
        constrained: set[tuple[Var, int]] = set()
        for f in program.fragments:
            if program.submeshes[f.submesh].size > 1:
                for k in self.constraints.of(f.jaxpr):
                    v = f.invars[k]
                    if self.groups.find(v) in roots and (v, f.submesh) not in self.crossing:
                        self._decide(v, f.submesh, self._constrained(f, k), f"constraint in {f.name!r}")
                        constrained.add((v, f.submesh))
        for f in reversed(preparing):
            if not constrained.isdisjoint((v, f.submesh) for v in f.outvars):
                constrained.update((v, f.submesh) for v in f.invars)
                self._prepare_alike(f)

    def _prepare_alike(self, f: Fragment) -> None:
        """What something is prepared of follows it, where it is sharded."""
        if (found := self._specs(f)) is not None:
            sharded = [(v, spec) for v, spec in zip(f.invars, found.inputs, strict=True) if any(spec)]
            self._decide_open(sharded, f.submesh, f"propagated through {f.name!r}")

    def _constrain_results(self) -> None:
        """What is constrained where it is made lies so, also for those who read it and are propagated through before.

        What is prepared for that, of inputs alone, follows it where it is sharded: a parameter that is scaled, then
        constrained.
        """
        for f in self.program.fragments:
            mesh = self.program.submeshes[f.submesh]
            constrained = self.constraints.of_results(f.jaxpr) if mesh.size > 1 else {}
            for k, spec in constrained.items():
                v = f.outvars[k]
                self._decide(v, f.submesh, _fitting(spec, _compat.shape(v), mesh), f"constraint in {f.name!r}")
            if constrained and self._prepares(f):
                self._prepare_alike(f)

    def _constrained(self, f: Fragment, k: int) -> PartitionSpec:
        """What a fragment constrains its k-th input to.

        JAX pads inside of a computation what its devices do not divide, as a batch of one at a constraint of Flax's; what
        goes in and out they have to divide.
        """
        spec = self.constraints.of(f.jaxpr)[k]
        return _fitting(spec, _compat.shape(f.invars[k]), self.program.submeshes[f.submesh])

    def found(self, v: Var, s: int) -> Decision | None:
        """What is decided of a value on a submesh so far, and what follows from that."""
        key = (self.groups.find(v), s)
        if key in self.decided:
            return self.decided[key]
        decision = self._follows(v, s)
        if decision is not None:
            self._decide(v, s, decision.spec, decision.rule)
        return decision

    def _follows(self, v: Var, s: int) -> Decision | None:
        mesh = self.program.submeshes[s]
        if mesh.size == 1:
            return Decision(PartitionSpec(), "one device")
        if 0 in _compat.shape(v):
            return Decision(PartitionSpec(), "nothing in it")
        for other in self.mirrored.get(self.groups.find(v), ()):
            decision = self.decided.get((self.groups.find(other), s))
            if decision is not None:
                return Decision(decision.spec, f"as {self.names.get(other, 'the state it belongs to')}")
        if (v, s) in self.crossing:
            for f in self._readers.get((v, s), ()):
                if (k := f.invars.index(v)) in self.constraints.of(f.jaxpr):
                    return Decision(self._constrained(f, k), f"constraint in {f.name!r}")
            return self._as_on(self.crossing[v, s], v, mesh)
        if v in self._inputs and (home := self.program.home[v]) != s:
            there = self._as_on(home, v, mesh)
            if there is not None and any(there.spec):  # a whole one says nothing for its readers here
                return there
        return None

    def _as_on(self, s: int, v: Var, mesh: Mesh) -> Decision | None:
        """As a value lies on another submesh, if that is decided."""
        source = self.found(v, s)
        if source is None:
            return None
        return Decision(_trimmed(adapt_spec(source.spec, _compat.shape(v), mesh)), f"as on submesh {s}")

    @functools.cached_property
    def _readers(self) -> Mapping[tuple[Var, int], list[Fragment]]:
        """(value that crosses, submesh) -> the fragments that read it there."""
        readers: dict[tuple[Var, int], list[Fragment]] = {}
        for f in self.program.fragments:
            for v in f.invars:
                if (v, f.submesh) in self.crossing:
                    readers.setdefault((v, f.submesh), []).append(f)
        return readers

    # --- propagation ----------------------------------------------------------------------------------

    def _order(self) -> list[Fragment]:
        """Dataflow order, with what only feeds a loop after that loop, and what only prepares inputs at the end.

        Otherwise the fragment that makes zeros for an accumulator, say, which knows nothing about shardings, would
        decide for the fragment that adds to it, which does.
        """
        ordered: list[Fragment] = []
        late: list[Fragment] = []
        last: list[Fragment] = []
        for item in self.program.order:
            if item >= 0:
                f = self.program.fragments[item]
                (late if f.layout_follows_loop else last if self._prepares(f) else ordered).append(f)
            else:
                ordered += self.program.body(-1 - item)
                loop = self.program.loops[-1 - item]
                fed = {init for _, _, init, _ in loop.carries if _compat.is_var(init)}
                fed |= {v for _, outer in loop.xs for v in outer if _compat.is_var(v)}
                ordered += [f for f in late if not fed.isdisjoint(f.outvars)]
                late = [f for f in late if fed.isdisjoint(f.outvars)]
        return ordered + late + last

    def _prepares(self, f: Fragment) -> bool:
        """Whether a fragment makes something of inputs of the program, and of nothing else, for others to read.

        Also by way of others that do: a penalty adds up what is made of the parameters on each submesh.
        """
        return not f.tasks and bool(f.invars) and self._prepared.issuperset(f.invars)

    @functools.cached_property
    def _prepared(self) -> set[Var]:
        """Inputs of the program, and what is made of these alone outside of loops and tasks."""
        found = set(self._inputs)
        for item in self.program.order:
            if item >= 0:
                f = self.program.fragments[item]
                if not f.tasks and f.invars and found.issuperset(f.invars):
                    found.update(f.outvars)
        return found

    def _propagate(self, f: Fragment) -> None:
        """Decides what is still open of the values that a fragment reads and makes."""
        s, rule = f.submesh, f"propagated through {f.name!r}"
        found = self._specs(f)
        if found is None:
            return
        if self._batches_say(f, found):
            found = self._specs(f) or found
        roots = {self.groups.find(v) for v in f.invars}
        # An accumulator or a state: what the computation makes decides, what it reads follows.
        tied = [v for v in f.outvars if self.groups.find(v) in roots and self.found(v, s) is None]
        if tied:
            specs = dict(zip(f.outvars, found.outputs, strict=True))
            self._decide_open(((v, specs[v]) for v in tied), s, rule)
            found = self._specs(f) or found
        self._decide_open(
            (*zip(f.outvars, found.outputs, strict=True), *zip(f.invars, found.inputs, strict=True)), s, rule
        )

    def _decide_open(self, specs: Iterable[tuple[Var, PartitionSpec]], s: int, rule: str) -> None:
        """Decides each value that is still open when its turn comes: one before it may have settled it.

        What is sharded comes first. XLA lays a number out for each of its readers alone, and replicates it as a result;
        a state whose next value is a number would otherwise decide for the parameter that it mirrors.
        """
        for v, spec in sorted(specs, key=lambda each: not any(each[1])):
            if self.found(v, s) is None:
                self._decide(v, s, spec, rule)

    def _batches_say(self, f: Fragment, found: Propagated) -> bool:
        """Lays out the pieces of batches of which a fragment says nothing as their batches; whether there were any."""
        asked = self.constraints.of(f.jaxpr)
        decided = False
        for k, (v, spec) in enumerate(zip(f.invars, found.inputs, strict=True)):
            if not any(spec) and k not in asked and self.found(v, f.submesh) is None:
                like = self._like_batch(v, f.submesh)
                if any(like):
                    self._decide(v, f.submesh, like, "as its batch")
                    decided = True
        return decided

    def _specs(self, f: Fragment) -> Propagated | None:
        """The specs of all that a fragment reads and makes; None where they are decided already."""
        mesh = self.program.submeshes[f.submesh]
        ins, outs = (
            tuple(None if (d := self.found(v, f.submesh)) is None else d.spec for v in variables)
            for variables in (f.invars, f.outvars)
        )
        if None not in ins and None not in outs:
            return None
        if not any(spec for spec in (*ins, *outs)) and not says_more(f.jaxpr):
            return _replicated(ins, outs)
        key = (self.keys(f.jaxpr), ins, outs, mesh.abstract_mesh)
        if key not in self.propagated:
            with _compat.wide_types(f.jaxpr):
                result = _compat.propagate(functools.partial(trace_fragment, f), mesh.abstract_mesh, ins, outs)
            if result is None:
                result = self.look(f, ins, outs) if self.look is not None else _replicated(ins, outs)
            fit = [
                [_fitting(spec, _compat.shape(v), mesh) for spec, v in zip(specs, variables, strict=True)]
                for specs, variables in zip(result, (f.invars, f.outvars), strict=True)
            ]
            self.propagated[key] = Propagated(*fit)
        return self.propagated[key]

    def _table(self) -> dict[tuple[Var, int], Decision]:
        """Every value on every submesh that it is on."""
        program = self.program
        places: dict[tuple[Var, int], None] = {}
        for v in program.invars:
            places.update(dict.fromkeys((v, s) for s in self._places_of(v)))
        for f in program.fragments:
            places.update(dict.fromkeys((v, f.submesh) for v in (*f.invars, *f.outvars)))
        for e in program.edges:
            places.update(dict.fromkeys(((e.var, e.source), (e.var, e.target))))
        places.update(dict.fromkeys((v, s) for v, s in program.outputs if _compat.is_var(v)))
        nothing = Decision(PartitionSpec(), "nothing says more")
        return {(v, s): self.found(v, s) or nothing for v, s in places}


# Equations that may shard what nobody else says anything of.
SHARDING = frozenset({"shard_map", "custom_partitioning", "reshard", "mesh_cast", "auto_axes", "explicit_axes"})


def says_more(jaxpr: Any) -> bool:
    """Whether a computation shards values by itself; without that, and with whole inputs and results, all in it is whole."""
    if any(_shards(getattr(v.aval, "sharding", None)) for v in jaxpr.invars):
        return True
    return any(
        eqn.primitive.name in SHARDING
        or any(_shards(value) for value in eqn.params.values())
        or any(says_more(_compat.open_jaxpr(inner)) for inner in _compat.jaxprs_in(eqn))
        for eqn in jaxpr.eqns
    )


def _shards(value: Any) -> bool:
    """Whether a parameter of an equation is, or holds, a sharding over devices."""
    if isinstance(value, tuple | list):
        return any(_shards(x) for x in value)
    if isinstance(value, NamedSharding):
        return any(entry is not None for entry in value.spec)
    return isinstance(value, Sharding)


def trace_fragment(f: Fragment, jaxpr: Jaxpr | None = None, **how: Any) -> jax.stages.Traced:
    """A fragment, or another jaxpr for it, as a jitted function of flat arrays that was traced.

    Args:
      f: the fragment, which gives its name.
      jaxpr: what is computed; by default what the fragment says.
      how: arguments of `jax.jit`.
    """
    body = f.jaxpr if jaxpr is None else jaxpr
    avals = [_compat.abstract(v.aval) for v in body.invars]
    if any(_compat.is_typed(v.aval) for v in (*body.invars, *body.outvars)):
        return jax.jit(fragment_function(f, body), **how).trace(*avals)
    return _compat.trace_jaxpr(f.name, body, avals, **how)


def fragment_function(f: Fragment, jaxpr: Jaxpr | None = None) -> Callable[..., Any]:
    """A fragment, or another jaxpr for it, as a function of flat arrays, under its name.

    Values that it hands to another one may have types that say how they lie, on Explicit axes: these hold in it alone.
    """
    body = f.jaxpr if jaxpr is None else jaxpr

    def fragment(*args: jax.Array) -> Any:
        typed = [_compat.typed(x, v.aval) for x, v in zip(args, body.invars, strict=True)]
        return [_compat.untyped(x) for x in jax.core.eval_jaxpr(body, [], *typed)]

    fragment.__name__ = fragment.__qualname__ = f.name
    return fragment


def _replicated(ins: Specs, outs: Specs) -> Propagated:
    return Propagated([s or PartitionSpec() for s in ins], [s or PartitionSpec() for s in outs])


def _trimmed(spec: PartitionSpec) -> PartitionSpec:
    """The spec without the dimensions at its end that it says nothing of: equal layouts have equal specs."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _fitting(spec: PartitionSpec, shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """The spec as far as JAX can give it to an array: pieces of equal size, and no dimension that users do not see."""
    entries: list[Any] = []
    for entry, size in zip(spec, shape, strict=False):
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        entries.append(entry if size % math.prod(mesh.shape[a] for a in axes) == 0 else None)
    return _trimmed(PartitionSpec(*entries))
