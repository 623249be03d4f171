"""A step around loops of unknown length whose tasks are on several submeshes, in parts that are programs of their own.

Which submesh runs when is then for the host to say: it calls the program of the loop's body until the condition, which is
the body's last result, is false. What is before, between and after such loops are programs too. A scan around such a loop is
one as well, which counts; of a conditional around one the host runs the branch that is taken.

Of ``lax.while_loop(unfinished, body, x)`` the parts are, in names that stand for arrays::

    Straight   reads x          gives carry = x, again = unfinished(x)
    HostLoop   while again:
      Straight   reads carry    gives carry = body(carry), again = unfinished(body(carry))
    Straight   reads carry      gives the results

A name is given anew each time: what the loop carries has one name before it, in it and behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._compat import AbstractJaxpr, Atom, Eqn, Var
from .._mark import MARK
from .._program._calls import call_body
from .._program._rewrite import substitute, trace_eqns

Env = dict[Var, Atom]


@dataclass(frozen=True)
class Straight:
    """Equations that become one program.

    Attributes:
      eqns: in order, each result under a name of its own.
      results: what it hands on, each with the name that it gets; the body of a loop gives names anew.
      reads: what it takes, each once.
      dying: what nobody reads any more once it has run.
    """

    eqns: tuple[Eqn, ...]
    results: tuple[tuple[Var, Atom], ...]
    reads: tuple[Var, ...]
    dying: frozenset[Var] = frozenset()


@dataclass(frozen=True)
class HostLoop:
    """A loop that the host runs.

    Attributes:
      condition: whether the body is to run once more; before the loop, and after each time.
      carry: what the body makes anew.
      body: its parts.
      line: where the user wrote it.
      dying: what nobody reads any more once it has ended.
    """

    condition: Var
    carry: tuple[Var, ...]
    body: tuple[Part, ...]
    line: str
    dying: frozenset[Var] = frozenset()

    @property
    def bodies(self) -> tuple[tuple[Part, ...], ...]:
        """What it runs."""
        return (self.body,)


@dataclass(frozen=True)
class HostBranch:
    """A conditional that the host runs, because a loop that it has to run is in a branch.

    Attributes:
      index: which branch is taken.
      bodies: the parts of each. All give the same names to their results.
      line: where the user wrote it.
      dying: what nobody reads any more once a branch has run, whichever.
    """

    index: Var
    bodies: tuple[tuple[Part, ...], ...]
    line: str
    dying: frozenset[Var] = frozenset()


Part = Straight | HostLoop | HostBranch


@dataclass(frozen=True)
class Parts:
    """A step in parts.

    Attributes:
      parts: in order. The last one makes the results of the step, in theirs.
      consts: constants of the step, which are read like arguments.
      opened: the marks of the loops over microbatches that the host runs, as they hold such a loop, and the line of that.
    """

    parts: tuple[Part, ...]
    consts: dict[Var, object]
    opened: dict[str, str]


def split(closed: AbstractJaxpr, across: Callable[[Eqn, bool], bool], loops: Container[str] = ()) -> Parts | None:
    """Takes a step apart at its loops of unknown length over several submeshes.

    Args:
      closed: the jaxpr of the step.
      across: whether a ``while`` equation is such a loop; it is told whether the equation is in a scan.
      loops: the marks of its loops over microbatches.

    Returns:
      The parts; None where all such loops are inside of something that cannot be opened.
    """
    parts = _compat.open_jaxpr(closed)
    worker = _Splitter(_Shared(across, loops))
    env: Env = {v: worker.shared.constant(v, value) for v, value in zip(parts.constvars, parts.consts, strict=True)}
    worker.walk(parts.eqns, env, None)
    if not worker.parts:
        return None
    worker.close([(_compat.new_var(v.aval), _lookup(env, v)) for v in parts.outvars])
    last, read = worker.parts[-1], read_by(worker.parts)
    assert isinstance(last, Straight), "no loop makes the results"
    unread = tuple(v for v in parts.invars if v not in read)  # somebody has to say where they are
    worker.parts[-1] = replace(last, reads=last.reads + unread)
    shared = worker.shared
    consts = {v: value for v, value in shared.constants.values()}
    return Parts(_lives(worker.parts, set())[0], consts, shared.opened)


@dataclass(frozen=True)
class _Shared:
    """What is known of a whole step.

    Attributes:
      across, loops: as in `split`.
      opened: as in `Parts`.
      constants: identity and kind of a constant -> its name, the constant.
    """

    across: Callable[[Eqn, bool], bool]
    loops: Container[str]
    opened: dict[str, str] = field(default_factory=dict)
    constants: dict[tuple[int, _compat.AbstractValue], tuple[Var, object]] = field(default_factory=dict)

    def constant(self, v: Var, value: object) -> Var:
        """The name of a constant, the same wherever what closes over it is opened."""
        return self.constants.setdefault((id(value), v.aval), (_compat.new_var(v.aval), value))[0]


class _Splitter:
    """Goes through equations in their order, and ends a part wherever the host takes over."""

    def __init__(self, shared: _Shared) -> None:
        self.shared = shared
        self.parts: list[Part] = []
        self.eqns: list[Eqn] = []  # of the part under way

    def walk(self, eqns: Sequence[Eqn], env: Env, outer: Eqn | None) -> None:
        """Adds equations; ``env`` maps their variables to those of the parts."""
        for inner in eqns:
            eqn = _compat.within(inner, outer)
            loop = self._held(eqn)
            if loop is None:
                self.eqns.append(substitute(eqn, env))
                continue
            eqn = _compat.with_line(eqn, outer)
            if (mark := str(eqn.params.get("name"))) in self.shared.loops:
                self.shared.opened[mark] = _compat.source_line(loop)
            operands = [_lookup(env, v) for v in eqn.invars]
            hosted = {"while": self._while, "scan": self._scan, "cond": self._cond}.get(eqn.primitive.name)
            if hosted is not None:
                made: Sequence[Atom] = hosted(eqn, operands)
            elif solver := _compat.solver(eqn):
                made = self._opened(solver[0], [_lookup(env, v) for v in solver[1]], eqn)
            else:
                made = self._opened(call_body(eqn), operands, eqn)
            env.update(zip(eqn.outvars, made, strict=True))

    def close(self, results: Iterable[tuple[Var, Atom]]) -> None:
        """Ends the part under way."""
        made = tuple(results)
        known = {v for eqn in self.eqns for v in eqn.outvars}
        read = [v for eqn in self.eqns for v in eqn.invars] + [atom for _, atom in made]
        reads = dict.fromkeys(v for v in read if _compat.is_var(v) and v not in known)
        self.parts.append(Straight(tuple(self.eqns), made, tuple(reads)))
        self.eqns = []

    def _held(self, eqn: Eqn, in_scan: bool = False) -> Eqn | None:
        """The first such loop in an equation: that itself, or in a call, a scan or a conditional; None where there is none."""
        if eqn.primitive.name == "while":
            return eqn if self.shared.across(eqn, in_scan) else None
        name = str(eqn.params.get("name"))
        if MARK in name and name not in self.shared.loops:  # a task
            return None
        solver = _compat.solver(eqn)
        opened = eqn.primitive.name in ("scan", "cond") or call_body(eqn) is not None
        bodies = [solver[0]] if solver is not None else _compat.jaxprs_in(eqn) if opened else []
        in_scan = in_scan or eqn.primitive.name == "scan"
        held = (self._held(_compat.within(e, eqn), in_scan) for body in bodies for e in _compat.open_jaxpr(body).eqns)
        return next((_compat.with_line(loop, eqn) for loop in held if loop is not None), None)

    def _opened(self, jaxpr: AbstractJaxpr | None, operands: Sequence[Atom], outer: Eqn) -> list[Atom]:
        """Adds what a jaxpr computes of operands; what holds its results."""
        assert jaxpr is not None, "only calls are opened"
        parts = _compat.open_jaxpr(jaxpr)
        inner: Env = dict(zip(parts.invars, operands, strict=True))
        inner.update((v, self.shared.constant(v, x)) for v, x in zip(parts.constvars, parts.consts, strict=True))
        self.walk(parts.eqns, inner, outer)
        return [_lookup(inner, v) for v in parts.outvars]

    def _traced(self, fun: Callable[..., object], operands: Sequence[Atom]) -> list[Atom]:
        """Adds what a function computes of operands; what holds its results."""
        eqns, results = trace_eqns(fun, operands)
        self.eqns += eqns
        return results

    def _while(self, eqn: Eqn, operands: Sequence[Atom]) -> list[Var]:
        loop = _compat.while_parts(eqn)
        of_cond, of_body = operands[: loop.cond_consts], operands[loop.cond_consts :][: loop.body_consts]

        def unfinished(at: _Splitter, carry: Sequence[Atom]) -> Atom:
            return at._opened(loop.cond, [*of_cond, *carry], eqn)[0]

        def following(at: _Splitter, carry: Sequence[Atom]) -> list[Atom]:
            after = at._opened(loop.body, [*of_body, *carry], eqn)
            if not _compat.shape(_compat.open_jaxpr(loop.cond).outvars[0]):
                return after
            each = unfinished(at, carry)  # under vmap: each example goes on for itself
            return [at._traced(_chosen, [each, *pair])[0] for pair in zip(after, carry, strict=True)]

        first = operands[loop.cond_consts + loop.body_consts :]
        return self._loop(eqn, first, [v.aval for v in _compat.open_jaxpr(loop.body).outvars], unfinished, following)

    def _scan(self, eqn: Eqn, operands: Sequence[Atom]) -> Sequence[Atom]:
        scan = _compat.scan_parts(eqn)
        n = scan.num_consts + scan.num_carry
        consts, first, stacked = operands[: scan.num_consts], operands[scan.num_consts : n], operands[n:]
        avals = [v.aval for v in _compat.open_jaxpr(scan.jaxpr).outvars]
        stacks = [_compat.stacked(aval, scan.length) for aval in avals[scan.num_carry :]]

        def begin() -> list[jax.Array]:
            return [jnp.int32(0), *(_compat.with_weak_type(lax.empty(x.shape, x.dtype), x.weak_type) for x in stacks)]

        zero, *empty = self._traced(begin, [])
        if not scan.length:  # a piece of nothing cannot be read, not even where it is not
            return [*first, *empty]

        def place(i: jax.Array) -> jax.Array:
            return scan.length - 1 - i if scan.reverse else i

        def filled(i: jax.Array, ys: jax.Array, y: jax.Array) -> jax.Array:
            after: jax.Array = lax.dynamic_update_index_in_dim(ys, y, place(i), 0)
            after = _compat.with_weak_type(after, ys.weak_type)
            return after

        def unfinished(at: _Splitter, carry: Sequence[Atom]) -> Atom:
            return at._traced(lambda i: i < scan.length, carry[:1])[0]

        def following(at: _Splitter, carry: Sequence[Atom]) -> list[Atom]:
            i, rest, collected = carry[0], carry[1 : 1 + scan.num_carry], carry[1 + scan.num_carry :]
            pieces = at._traced(
                lambda i, *xs: [lax.dynamic_index_in_dim(x, place(i), 0, keepdims=False) for x in xs], [i, *stacked]
            )
            after = at._opened(scan.jaxpr, [*consts, *rest, *pieces], eqn)
            (more,) = at._traced(lambda i: i + 1, [i])
            together = [
                at._traced(filled, [i, ys, y])[0] for ys, y in zip(collected, after[scan.num_carry :], strict=True)
            ]
            return [more, *after[: scan.num_carry], *together]

        avals = [zero.aval, *avals[: scan.num_carry], *stacks]
        return self._loop(eqn, [zero, *first, *empty], avals, unfinished, following)[1:]

    def _cond(self, eqn: Eqn, operands: Sequence[Atom]) -> list[Var]:
        index, *rest = operands
        chosen = _compat.new_var(index.aval)
        self.close([(chosen, index)])
        results = [_compat.new_var(v.aval) for v in eqn.outvars]
        bodies = []
        for jaxpr in eqn.params["branches"]:
            branch = _Splitter(self.shared)
            branch.close(list(zip(results, branch._opened(jaxpr, rest, eqn), strict=True)))
            bodies.append(tuple(branch.parts))
        self.parts.append(HostBranch(chosen, tuple(bodies), _compat.source_line(eqn)))
        return results

    def _loop(
        self, eqn: Eqn, first: Sequence[Atom], avals: Sequence[_compat.AbstractValue], unfinished: _Condition, following: _Body
    ) -> list[Var]:  # fmt: skip
        """Adds a loop that the host runs; what holds what it carries, when it has ended."""
        carry = [_compat.new_var(aval) for aval in avals]
        go_on = self._any(unfinished(self, first))
        again = _compat.new_var(go_on.aval)
        self.close([*zip(carry, first, strict=True), (again, go_on)])
        body = _Splitter(self.shared)
        after = following(body, carry)
        go_on = body._any(unfinished(body, after))
        changed = [(v, made) for v, made in zip(carry, after, strict=True) if made is not v]
        body.close([*changed, (again, go_on)])
        self.parts.append(HostLoop(again, tuple(carry), tuple(body.parts), _compat.source_line(eqn)))
        return carry

    def _any(self, condition: Atom) -> Atom:
        return self._traced(jnp.any, [condition])[0] if _compat.shape(condition) else condition


_Condition = Callable[[_Splitter, Sequence[Atom]], Atom]
_Body = Callable[[_Splitter, Sequence[Atom]], list[Atom]]


def _chosen(unfinished: jax.Array, after: jax.Array, before: jax.Array) -> jax.Array:
    """For each example what the body makes of it, or what it had."""
    return lax.select(lax.broadcast_in_dim(unfinished, after.shape, range(unfinished.ndim)), after, before)


def _lookup(env: Env, atom: Atom) -> Atom:
    return env.get(atom, atom) if _compat.is_var(atom) else atom


def inside(part: Part) -> list[Part]:
    """The parts that a part consists of."""
    return [] if isinstance(part, Straight) else [each for body in part.bodies for each in body]


def read_by(parts: Iterable[Part]) -> set[Var]:
    """All that parts read, also what they made before."""
    found: set[Var] = set()
    for part in parts:
        own = part.reads if isinstance(part, Straight) else (_asked(part),)
        found |= {*own} | read_by(inside(part))
    return found


def made_by(parts: Iterable[Part]) -> set[Var]:
    """All that parts make, and all names that they give."""
    found: set[Var] = set()
    for part in parts:
        if isinstance(part, Straight):
            found |= {v for eqn in part.eqns for v in eqn.outvars} | {v for v, _ in part.results}
        found |= made_by(inside(part))
    return found


def carried_by(parts: Iterable[Part]) -> set[Var]:
    """What the loops among parts carry."""
    found: set[Var] = set()
    for part in parts:
        found |= set(part.carry if isinstance(part, HostLoop) else ()) | carried_by(inside(part))
    return found


def _asked(part: HostLoop | HostBranch) -> Var:
    """What the host reads of a part."""
    return part.condition if isinstance(part, HostLoop) else part.index


def _lives(parts: Sequence[Part], after: set[Var]) -> tuple[tuple[Part, ...], set[Var]]:
    """Parts that know what dies in them and what others read, from what is read after them; and what is alive before them."""
    known: list[Part] = []
    alive = set(after)
    for part in reversed(parts):
        if isinstance(part, Straight):
            more = tuple((v, v) for eqn in part.eqns for v in eqn.outvars if v in alive)
            part = replace(part, results=part.results + more)
            made, reads = {v for v, _ in part.results}, set(part.reads)
            known.append(replace(part, dying=frozenset(reads - (alive - made))))
            alive = (alive - made) | reads
        elif isinstance(part, HostLoop):
            # What the body reads, it may read once more: only behind the loop does it die.
            within = (read_by(part.body) - made_by(part.body)) | {part.condition, *part.carry}
            body, _ = _lives(part.body, alive | within)
            known.append(replace(part, body=body, dying=frozenset(within - alive)))
            alive |= within
        else:
            lived = [_lives(body, alive) for body in part.bodies]
            before = {part.index}.union(*(alive_before for _, alive_before in lived))
            # What only another branch would have needed dies as well.
            known.append(replace(part, bodies=tuple(body for body, _ in lived), dying=frozenset(before - alive)))
            alive = before
    return tuple(reversed(known)), alive
