"""Steps with loops that the host runs: the parts of `manymesh._api._parts`, each lowered and compiled as a step is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from .. import _compat
from .._compat import Atom, Var
from .._compiled import Compiled
from .._distributed._world import world
from .._errors import MeshError
from .._findings import sentences
from .._mark import Recording
from .._program._groups import Groups
from .._runtime._exchange import is_key, put_apart
from .._runtime._execute import Kept
from .._runtime._memories import in_memories, lying
from .._runtime._observe import Observer
from .._types import PyTree
from ._arguments import Arguments
from ._findings import marks_in, note_dropped
from ._floats import ByOperation
from ._lowered import Lowered
from ._parts import HostBranch, HostLoop, Part, Parts, Straight, carried_by, inside, made_by
from ._shardings import check_submeshes, committed
from ._step import Step

Pairs = list[tuple[int, int]]
# A step, the arguments of a call of it, what its marks mean, its jaxpr, the shapes and the structure of its results, it as
# a function of its leaves, where results were put, which result is the next value of which argument, and which arguments are
# states that another part replaces -> the step lowered.
LowerOne = Callable[
    [Step, Arguments, Recording, Any, Any, Any, Callable[..., Any], dict[int, NamedSharding], Pairs, tuple[int, ...]],
    Lowered,
]


@dataclass(eq=False)
class _PartStep(Step):
    """A part of a step, whose findings are those of the whole."""

    whole: Recording = field(default_factory=Recording)

    def report(self, record: Recording, closed: Any) -> None:
        self.whole.findings.update(record.findings)


@dataclass(frozen=True)
class _Program:
    """A part that is a program.

    Attributes:
      operands: what it takes, in the order of its leaves.
      names: what its results are called from then on, in the order of theirs.
    """

    name: str
    part: Straight
    operands: tuple[Var, ...]
    names: tuple[Var, ...]
    lowered: Lowered


@dataclass(frozen=True)
class _Hosted:
    """A part that the host runs, and its parts."""

    part: HostLoop | HostBranch
    bodies: tuple[tuple[_Program | _Hosted, ...], ...]


_Item = _Program | _Hosted


@dataclass(eq=False)
class Whole:
    """A step that is to be lowered in parts: what `Traced` knows of it."""

    step: Step
    given: Arguments
    record: Recording
    jaxpr: Any
    shapes: Any
    out_tree: Any
    moved: dict[int, NamedSharding]
    asked: dict[int, NamedSharding]
    states: Pairs
    donated: frozenset[int]
    memory_in: dict[int, str]
    memory_out: dict[int, str]

    @functools.cached_property
    def invars(self) -> list[Var]:
        """The variables of the arguments."""
        return _compat.open_jaxpr(self.jaxpr).invars


def lower_parts(whole: Whole, parts: Parts, lower_one: LowerOne) -> LoweredParts:
    """Lowers each part of a step, so that what one makes is where the next one wants it."""
    worker = _Lowering(whole, parts, lower_one)
    items = worker.all(parts.parts, "", last=True)
    used = {name for p in _programs(items) for f in p.lowered.program.fragments for name in f.tasks}
    note_dropped(whole.record, used, whole.jaxpr)
    whole.step.report(whole.record, whole.jaxpr)
    return LoweredParts(whole, items, parts.consts, worker.homes)


class _Lowering:
    """Lowers parts one after the other, and keeps where each value is made and wanted.

    Names are those of the parts, in which the body of a loop gives the names of what it carries anew each time.
    """

    def __init__(self, whole: Whole, parts: Parts, lower_one: LowerOne) -> None:
        self.whole, self.parts, self.lower_one = whole, parts, lower_one
        self.invars = whole.invars
        self.position = {v: i for i, v in enumerate(self.invars)}
        self.owned = {self.invars[i] for i in whole.donated} | made_by(parts.parts)
        self.states = {self.invars[i] for i, _ in whole.states}
        self.carried = carried_by(parts.parts)
        self.over_time = _over_time(whole, parts.parts)
        self.last_results = [x for _, x in _last(parts.parts).results]
        # What is said of an argument is said of all that it is over time.
        self.asked = {self._kind(self.invars[i]): s for i, s in reversed(whole.asked.items())}
        put = ((v, committed(x)) for v, x in zip(self.invars, whole.given.leaves, strict=True))
        self.put = {self._kind(v): s for v, s in put if s is not None}
        self.labels: dict[Var, str] = {}
        self.made: dict[Var, Sharding] = {}  # where parts that are lowered already leave what they make
        self.homes: dict[Var, NamedSharding] = {}  # where the first part that reads a value wants it

    def all(self, parts: Sequence[Part], prefix: str, last: bool = False) -> tuple[_Item, ...]:
        """Lowers parts in order, but what the host runs before what leads up to it and makes what it starts from."""
        items: list[_Item] = []
        for k, part in enumerate(parts):
            if not isinstance(part, Straight):
                continue
            following = parts[k + 1] if k + 1 < len(parts) else None
            hosted = None if following is None else self._lower_hosted(following, prefix, k // 2 + 1)
            name = prefix.removesuffix("/") if len(parts) == 1 else f"{prefix}part{k // 2 + 1}"
            items.append(self.straight(part, name, last and following is None))
            items += [] if hosted is None else [hosted]
        return tuple(items)

    def _lower_hosted(self, part: Part, prefix: str, number: int) -> _Hosted:
        assert not isinstance(part, Straight), "between programs there is always something that the host runs"
        if isinstance(part, HostLoop):
            return _Hosted(part, (self.all(part.body, f"{prefix}while{number}/"),))
        names = (f"{prefix}cond{number}/branch{k}/" for k in range(len(part.bodies)))
        return _Hosted(part, tuple(self.all(body, name) for body, name in zip(part.bodies, names, strict=True)))

    def straight(self, part: Straight, name: str, last: bool) -> _Program:
        """Lowers a part that is one program; the last one makes the results of the step."""
        given, whole = self._arguments(part), self.whole
        operands = jax.tree.leaves((given.dyn_args, given.dyn_kwargs))
        if last:
            names = [v for v, _ in part.results]
            shapes, out_tree = whole.shapes, whole.out_tree
        else:
            names, out_tree = jax.tree.flatten({self._label(v): v for v, _ in part.results})
            shapes = [_compat.abstract(v.aval) for v in names]
        held = dict(part.results)
        jaxpr = _compat.new_jaxpr(operands, [held[v] for v in names], part.eqns)
        record = _record_of(whole.record, marks_in(jaxpr))
        wanted_in, _ = jax.tree.unflatten(given.treedef, [self._wanted_in(v, record) for v in operands])
        pairs = self._pairs(operands, names)
        replaced = {i for i, _ in pairs}
        constant = tuple(i for i, v in enumerate(operands) if v in self.states and i not in replaced)
        settings = {f.name: getattr(whole.step, f.name) for f in fields(Step)}
        settings |= {"static_argnums": (), "static_argnames": (), "donate_argnums": (), "donate_argnames": ()}
        settings |= {"name": f"{whole.step.name}/{name}", "in_shardings": wanted_in}
        moved = self._moved([held[v] for v in names], record) if last else {}
        plain = ByOperation(jaxpr, whole.record.tasks)
        first_read = [v not in self.homes for v in operands]

        def lowered(out_shardings: Any) -> Lowered:
            step = _PartStep(**{**settings, "out_shardings": out_shardings}, whole=whole.record)
            closed = _compat.close(jaxpr)
            made = self.lower_one(step, given, record, closed, shapes, out_tree, plain, moved, pairs, constant)
            described = zip(operands, jax.tree.leaves(made.arguments), strict=True)
            self.homes.update({v: x.sharding for (v, x), first in zip(described, first_read, strict=True) if first})
            self.made.update(zip(names, (x.sharding for x in jax.tree.leaves(made.out_info)), strict=True))
            return made

        if last:
            return _Program(name, part, tuple(operands), tuple(names), lowered(whole.step.out_shardings))
        follows = {names[o] for _, o in pairs}  # what an operand becomes lies like it, where it is on its submesh
        while True:
            homes = [None if v in follows else self._home(v, record) for v in names]
            found = lowered(jax.tree.unflatten(out_tree, homes))
            # The next iteration wants these elsewhere, as is known now. One that goes home may take another one with it.
            apart = {v for v in follows if self._is_apart(v) and self._home(v, record) is not None}
            if not apart:
                return _Program(name, part, tuple(operands), tuple(names), found)
            follows -= apart

    def _wanted_in(self, v: Var, record: Recording) -> NamedSharding | None:
        """Where an operand of a part is wanted: where the user says, or where another part takes it."""
        asked = self.asked.get(self._kind(v))
        if v in self.position:
            found = self.whole.asked.get(self.position[v]) or self._fitting(asked, record) or self._home(v, record)
            return found or self._fitting(self._next_made(v), record)
        return self._fitting(asked, record)

    def _next_made(self, v: Var) -> Sharding | None:
        """Where the next value of a state is made by a part that is lowered already: a state that no task reads is there."""
        handed_on = (self.last_results[o] for i, o in self.whole.states if self.invars[i] is v)
        return next((self.made[x] for x in handed_on if _compat.is_var(x) and x in self.made), None)

    def _moved(self, results: Sequence[Atom], record: Recording) -> dict[int, NamedSharding]:
        """Where results of the step are wanted of which the user said nothing.

        The next state where the step takes it, and what the last part only hands through where it was made. Numbers are in
        every process, where there are several.
        """
        through = {o: self._fitting(self.made.get(v), record) for o, v in enumerate(results) if _compat.is_var(v)}
        homes = {o: self._home(self.invars[i], record) for i, o in self.whole.states}
        found = {o: s for each in (through, homes) for o, s in each.items() if s is not None}
        if world() is not None:
            found = {o: s for o, s in found.items() if _compat.shape(results[o]) or is_key(_compat.dtype(results[o]))}
        return {**found, **self.whole.moved}

    def _is_apart(self, v: Var) -> bool:
        """Whether a value is known to be made on other devices than those where the first part that reads it wants it."""
        home, made = self.homes.get(v), self.made.get(v)
        return home is not None and made is not None and home.device_set != made.device_set

    def _pairs(self, operands: Sequence[Var], names: Sequence[Var]) -> Pairs:
        """(operand, result) of a part that are one thing over time: a state and its next value, what a loop carries."""
        number = {v: o for o, v in enumerate(names)}
        found = {i: number[v] for i, v in enumerate(operands) if v in number}

        left: dict[Any, list[int]] = {}
        for o in sorted(set(number.values()) - set(found.values())):
            left.setdefault(self._kind(names[o]), []).append(o)
        for i, v in enumerate(operands):
            if i not in found and left.get(self._kind(v)):
                found[i] = left[self._kind(v)].pop(0)
        return list(found.items())

    def _kind(self, v: Var) -> tuple[Var, jax.ShapeDtypeStruct]:
        """What is equal for values that are one thing over time, of one shape and dtype."""
        return self.over_time.find(v), _compat.abstract(v.aval)

    def _arguments(self, part: Straight) -> Arguments:
        """What a part takes, in the structure of the step's arguments and a dict more.

        Variables stand for leaves in ``dyn_args`` and ``dyn_kwargs``.
        """
        given, reads = self.whole.given, set(part.reads)
        args, kwargs = jax.tree.unflatten(given.treedef, [v if v in reads else None for v in self.invars])
        more = {self._label(v): v for v in part.reads if v not in self.position}
        operands, treedef = jax.tree.flatten(((*args, more), kwargs))
        dying = frozenset(k for k, v in enumerate(operands) if v in part.dying and v in self.owned)
        args, kwargs = jax.tree.unflatten(treedef, operands)
        return Arguments([self._leaf(v) for v in operands], treedef, (), args, kwargs, dying)

    def _leaf(self, v: Var) -> Any:
        if v in self.position:
            return self.whole.given.leaves[self.position[v]]
        if v in self.parts.consts:
            return self.parts.consts[v]
        aval, sharding = _compat.abstract(v.aval), self.made.get(v) or self.put.get(self._kind(v))
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)

    def _home(self, v: Var, record: Recording) -> NamedSharding | None:
        """Where a value is wanted by the part that reads it first, if that is not between the tasks of the one that makes it."""
        return self._fitting(self.homes.get(v), record)

    def _fitting(self, sharding: Sharding | None, record: Recording) -> NamedSharding | None:
        """A sharding, if it is not on devices of one of a part's tasks and others."""
        if not isinstance(sharding, NamedSharding):
            return None
        try:
            check_submeshes("", {0: sharding}, [""], record.tasks.values())
        except MeshError:
            return None
        return sharding

    def _label(self, v: Var) -> str:
        kind = "carried" if v in self.carried else "made"
        return self.labels.setdefault(v, f"{kind}{len(self.labels):05}")


def _over_time(whole: Whole, parts: Sequence[Part]) -> Groups[Var]:
    """Which values are one thing over time."""
    groups: Groups[Var] = Groups()

    def handed_on(parts: Sequence[Part]) -> None:
        for part in parts:
            for v, atom in part.results if isinstance(part, Straight) else ():
                if _compat.is_var(atom):
                    groups.join(v, atom)
            handed_on(inside(part))

    handed_on(parts)
    for i, o in whole.states:
        groups.join(whole.invars[i], _last(parts).results[o][0])
    return groups


def _last(parts: Sequence[Part]) -> Straight:
    """The part that makes the results of the step."""
    last = parts[-1]
    assert isinstance(last, Straight), "a step ends with a program"
    return last


def _record_of(record: Recording, marks: set[str]) -> Recording:
    """What some of the marks mean."""
    tasks = {mark: task for mark, task in record.tasks.items() if mark in marks}
    loops = {mark: loop for mark, loop in record.loops.items() if mark in marks}
    return replace(record, tasks=tasks, loops=loops, findings={})


class _InParts:
    """What is asked of a step as a whole, and only its parts can say."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or not (name.startswith("_") or name in ("program", "plan", "layout", "estimate")):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; it has the parts of a step, .parts")
        step, parts, lines = (self.__dict__.get(k, "") for k in ("_title", "parts", "_lines"))
        at = f" ({lines})" if lines else ""
        raise AttributeError(
            f"mm.jit({step}) has a lax.while_loop over several submeshes{at}, which the host runs, so that it is not one "
            f"program but several: ask one of its parts ({', '.join(map(repr, parts))}), as in .parts['while1'].report()"
        )


class LoweredParts(_InParts, Lowered):
    """A step that the host runs in parts, laid out, not yet compiled: it has loops whose length the data says.

    Attributes:
      parts: what the step consists of, by name, in the order in which it runs: each is lowered as a step is.
    """

    follows_arguments = False

    def __init__(
        self, whole: Whole, items: tuple[_Item, ...], consts: dict[Var, object], homes: Mapping[Var, Sharding]
    ) -> None:
        self._title, self._whole, self._items, self._consts = whole.step.name, whole, items, consts
        lines = filter(None, (x.part.line for x in _all_hosted(items)))
        self._homes, self._lines = homes, ", ".join(dict.fromkeys(lines))
        self._in_tree, self._out_tree, self._donated = whole.given.treedef, whole.out_tree, whole.donated
        self.findings = tuple(sentences(whole.record.findings))
        programs = _programs(items)
        self.parts: dict[str, Lowered] = {p.name: p.lowered for p in programs}

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the result, in its structure, each with its sharding."""
        found = _programs(self._items)[-1].lowered.out_info
        return jax.tree.unflatten(self._out_tree, in_memories(jax.tree.leaves(found), self._whole.memory_out))

    @functools.cached_property
    def arguments(self) -> PyTree:
        """Shape, dtype and sharding of each argument at its home, in the structure ``(args, kwargs)``."""
        leaves = []
        for v in self._whole.invars:
            aval = _compat.abstract(v.aval)
            home = self._homes.get(v)
            leaves.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=home, weak_type=aval.weak_type))
        return jax.tree.unflatten(self._in_tree, in_memories(leaves, self._whole.memory_in))

    def as_text(self) -> str:
        """The program and the instructions of each part, readable."""
        return "\n\n".join(f"// {name}\n{part.as_text()}" for name, part in self.parts.items())

    def __repr__(self) -> str:
        return f"LoweredParts({self._title}: {', '.join(self.parts)}; the host runs its loops; compile() makes it ready to run)"

    @_compat.boundary
    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Compiles every part."""
        compiled = {p.name: p.lowered.compile(compiler_options) for p in _programs(self._items)}
        return CompiledParts(self, compiled)


class CompiledParts(_InParts, Compiled):
    """A compiled step that the host runs in parts.

    Attributes:
      parts: the compiled parts, by name, in the order in which they run.
    """

    def __init__(self, lowered: LoweredParts, parts: dict[str, Compiled]) -> None:
        whole = lowered._whole
        self._title = self.name = whole.step.name
        self.calling = whole.step.calling
        self.static_argnums = whole.step.static_positions(len(lowered.in_tree.children()[0].children()))
        self._items, self._invars, self.parts = lowered._items, whole.invars, parts
        self._lines = lowered._lines
        self._in_tree, self._out_tree = lowered._in_tree, lowered._out_tree
        self.results = lambda: lowered.out_info
        self._avals = [v.aval for v in whole.invars]
        self._dies = self._donated = tuple(sorted(whole.donated))
        self.homes = [x.sharding for x in jax.tree.leaves(lowered.arguments)]
        self._leaving = lying(list(parts.values())[-1]._leaving, whole.memory_out)
        self._comes_first, self._memory_out = list(whole.memory_in), tuple(whole.memory_out.items())
        self._read_in = {
            id(x): self._reads(x.bodies[0], made_by(x.part.body))
            for x in _all_hosted(self._items)
            if isinstance(x.part, HostLoop)
        }
        consts = lowered._consts
        read = self._reads(self._items, ())
        # What only dead code reads stays where it is.
        self._consts = {**consts, **{v: put_apart(consts[v], home, self.bring) for v, home, _ in read if v in consts}}

    def __repr__(self) -> str:
        return f"CompiledParts({self.name}: {', '.join(self.parts)}; the host runs its loops)"

    def bring(self, x: Any, sharding: NamedSharding) -> jax.Array:
        """An array, or a host value, with a sharding of this step: asynchronously, from any devices."""
        return next(iter(self.parts.values())).bring(x, sharding)

    def runs_on(self) -> list[tuple[str, Mesh]]:
        """What each fragment of each part is called, and the submesh on which it runs."""
        return [each for part in self.parts.values() for each in part.runs_on()]

    def call_flat(self, leaves: list[Any], observer: Observer | None = None) -> PyTree:
        """Runs the step on the flat list of its arguments' leaves; an observer is told what is done."""
        self._check_usable(leaves)
        given = self._on_devices(leaves)
        env: dict[Var, Any] = {**self._consts, **dict(zip(self._invars, given, strict=True))}
        result = self._run(self._items, env, observer)
        if self._memory_out:
            result = jax.tree.unflatten(self._out_tree, self._into_memories(jax.tree.leaves(result)))
        for i in self._dies:
            x = leaves[i]
            if isinstance(x, jax.Array) and not x.is_deleted():
                x.delete()
        return result

    def _homes_read(self) -> list[Sharding | None]:
        read = {v: home for v, home, _ in self._reads(self._items, ())}
        return [read.get(v) for v in self._invars]

    def _run(self, items: Sequence[_Item], env: dict[Var, Any], observer: Observer | None) -> PyTree:
        """Runs parts on the values of ``env``, which is kept up to date; the result of the last one."""
        result: PyTree = None
        for item in items:
            if isinstance(item, _Program):
                operands = [env[v] for v in item.operands]
                for v in item.part.dying:
                    del env[v]
                result = self.parts[item.name].call_flat(operands, observer)
                env.update(zip(item.names, jax.tree.leaves(result), strict=True))
                continue
            if isinstance(item.part, HostLoop):
                kept = self._bring_once(item, env)
                while bool(np.asarray(env[item.part.condition])):
                    self._run(item.bodies[0], env, observer)
                for v in kept:
                    env[v] = env[v].value
            else:
                self._run(item.bodies[int(np.asarray(env[item.part.index]))], env, observer)
            for v in item.part.dying:
                env.pop(v, None)
        return result

    def _bring_once(self, item: _Hosted, env: dict[Var, Any]) -> list[Var]:
        """Puts what a loop reads and does not make where its body wants it, and not again each time.

        Returns what is `Kept` from here on.
        """
        one_process, kept = world() is None, []
        for v, home, elsewhere in self._read_in[id(item)]:
            if isinstance(env[v], Kept):  # by a loop around this one
                continue
            env[v] = self.bring(env[v], home)
            if elsewhere and one_process and not _compat.checks_floats():
                env[v] = Kept(env[v])
                kept.append(v)
        return kept

    def _reads(self, items: Sequence[_Item], made: Container[Var]) -> tuple[tuple[Var, NamedSharding, bool], ...]:
        """What programs read and do not make, each with where the first that reads it wants it, and whether anybody
        wants it elsewhere."""
        homes: dict[Var, NamedSharding] = {}
        places: dict[Var, set[NamedSharding]] = {}
        for program in _programs(items):
            compiled = self.parts[program.name]
            found = zip(program.operands, compiled.homes, compiled.places(), strict=True)
            for v, home, taken in found:
                if taken and v not in made:
                    homes.setdefault(v, home)
                    places.setdefault(v, set()).update(taken)
        return tuple((v, home, bool(places[v] - {home})) for v, home in homes.items())

    def as_text(self) -> str:
        """The optimized program of every fragment that this process runs, part by part."""
        return "\n\n".join(f"// {name}\n{part.as_text()}" for name, part in self.parts.items())


def _all_hosted(items: Sequence[_Item]) -> list[_Hosted]:
    """What the host runs among parts, also in what it runs."""
    found = [item for item in items if isinstance(item, _Hosted)]
    return [each for item in found for each in (item, *(x for body in item.bodies for x in _all_hosted(body)))]


def _programs(items: Sequence[_Item]) -> list[_Program]:
    """The programs of parts, in order, those in what the host runs among them."""
    found: list[_Program] = []
    for item in items:
        found += [item] if isinstance(item, _Program) else [p for body in item.bodies for p in _programs(body)]
    return found
