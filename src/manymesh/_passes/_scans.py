"""What each round of a scan inside of a task keeps for the backward pass, in the fewest bytes.

A task that scans over layers keeps for every layer what the backward pass of one layer reads, and so does the scan of plain
JAX: nothing is computed again across a scan. Here the bodies of both scans are looked at as a task and its backward pass are:
the forward scan hands out what a minimum cut says, and the backward scan begins each round with what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from .. import _compat
from .._compat import AbstractJaxpr, Atom, Eqn, Var
from .._program._calls import inlined_jaxpr
from .._program._flat import FlatProgram
from .._program._rewrite import trace_eqns, with_atoms
from ._cheap import cheapest, compute_again
from ._residuals import Consumer, Given, Minimiser, Place, Rewrite


def minimise_scans(flat: FlatProgram) -> FlatProgram:
    """Lets scans in tasks keep the fewest bytes for their backward pass; one scan of each task at a time."""
    return _Minimiser(flat).run()


class _Minimiser(Minimiser):
    def rewrite(self, given: Given) -> Rewrite:
        """How the first scan of a task changes that may keep less."""
        jaxprs = given.jaxprs
        if not any(_compat.open_jaxpr(j).consts for j in jaxprs):
            producer = _Opened(jaxprs[0], all_calls=True)
            scans = [e for e in producer.eqns if e.primitive.name == "scan" and not e.effects]
            backward = [_Opened(j) for j in jaxprs[1:]] if scans else []
            for eqn in scans:
                found = _Scan(eqn, given, producer, backward).rewritten()
                if found is not None:
                    return found
        return Rewrite(jaxprs[0], [], [], [], [], jaxprs)


class _Opened:
    """A jaxpr with calls opened, and who reads its variables."""

    def __init__(self, jaxpr: AbstractJaxpr, *, all_calls: bool = False) -> None:
        self.invars = _compat.open_jaxpr(jaxpr).invars
        self.eqns, self.outs = inlined_jaxpr(jaxpr, all_calls=all_calls)

    def readers(self, v: Var) -> list[Eqn]:
        """The equations that read a variable."""
        return [e for e in self.eqns if any(o is v for o in e.invars)]

    def returns(self, v: Var) -> bool:
        """Whether it is a result."""
        return any(o is v for o in self.outs)


@dataclass
class _Reader:
    """The one scan of a backward task that reads what rounds of the forward scan keep.

    Attributes:
      eqn: the scan; None where the task reads nothing of that kind.
      at: position of a result of the forward scan -> position of the operand that is it.
    """

    eqn: Eqn | None = None
    at: dict[int, int] = field(default_factory=dict)


class _Scan:
    """One scan of a forward task."""

    def __init__(self, eqn: Eqn, given: Given, producer: _Opened, backward: Sequence[_Opened]) -> None:
        self.eqn, self.given, self.producer, self.backward = eqn, given, producer, backward
        self.scan = _compat.scan_parts(eqn)
        self.body = _compat.open_jaxpr(self.scan.jaxpr)
        self.body_eqns, self.body_outs = inlined_jaxpr(self.body)

    def rewritten(self) -> Rewrite | None:
        """How the tasks change; None if they do not."""
        if self.body.consts:
            return None
        residuals = self._residuals()
        readers = [self._reader(c, b, residuals) for c, b in zip(self.given.consumers, self.backward, strict=True)]
        for r in readers:  # what one of them took out, the others do not read that way either
            r.at = {k: at for k, at in r.at.items() if k in residuals}
        made = {v: e for e in self.body_eqns for v in e.outvars if _compat.is_var(v)}
        wanted = list(dict.fromkeys(v for k in residuals if _compat.is_var(v := self.body_outs[k])))
        if not any(v in made for v in wanted):
            return None
        free = self._free()
        lasting = [v for v, at in free.items() if self.given.lasting_in[at]]
        saved = cheapest(wanted, free, self.body.invars, self.body_eqns, self.given.cheap, lasting)
        if saved.issuperset(wanted):
            return None
        order = [v for v in (*self.body.invars, *made) if v in saved and v not in free]
        return _Assembly(self, residuals, readers, made, order, free).result()

    def _residuals(self) -> dict[int, int]:
        """Result of the scan that only the backward tasks read -> the result of the task that it is."""
        found = {}
        for k, v in enumerate(self.eqn.outvars):
            at = [o for o, x in enumerate(self.producer.outs) if x is v]
            is_kept = len(at) == 1 and at[0] in self.given.kept and not self.producer.readers(v)
            if k >= self.scan.num_carry and _compat.is_var(v) and is_kept:
                found[k] = at[0]
        return found

    def _reader(self, consumer: Eqn, body: _Opened, residuals: dict[int, int]) -> _Reader:
        """The scan of a backward task that reads residuals; those that anything else reads are taken out of them."""
        found = _Reader()
        for k, o in list(residuals.items()):
            operands = [body.invars[i] for i, v in enumerate(consumer.invars) if v is self.given.task.outvars[o]]
            readers = [e for v in operands for e in body.readers(v)]
            places = [i for v in operands for e in readers for i, x in enumerate(e.invars) if x is v]
            if not operands:
                continue
            alone = len(operands) == len(places) == 1 and not body.returns(operands[0])
            if alone and self._fits(readers[0], places[0]) and (found.eqn is None or found.eqn is readers[0]):
                found.eqn = readers[0]
                found.at[k] = places[0]
            else:
                del residuals[k]
        return found

    def _fits(self, eqn: Eqn, position: int) -> bool:
        """Whether an operand of an equation is taken apart by a scan of as many rounds."""
        if eqn.primitive.name != "scan" or eqn.effects:
            return False
        scan = _compat.scan_parts(eqn)
        rounds = scan.length == self.scan.length and not _compat.open_jaxpr(scan.jaxpr).consts
        return rounds and position >= scan.num_consts + scan.num_carry

    def _free(self) -> dict[Var, int]:
        """Operand of the body that the backward pass can have anyway -> the operand of the task that it is, or is a part of."""
        position = {v: k for k, v in enumerate(self.producer.invars)}
        first, last = self.scan.num_consts, self.scan.num_consts + self.scan.num_carry
        found = {}
        for k, (v, operand) in enumerate(zip(self.body.invars, self.eqn.invars, strict=True)):
            at = position.get(operand) if _compat.is_var(operand) else None
            if not first <= k < last and at is not None and self.given.free_in[at]:
                found[v] = at
        return found


class _Assembly:
    """Builds the tasks with their new scans."""

    def __init__(
        self,
        scan: _Scan,
        residuals: Mapping[int, int],
        readers: Sequence[_Reader],
        made: Mapping[Var, Eqn],
        order: Sequence[Var],
        free: Mapping[Var, int],
    ) -> None:
        self.s, self.residuals, self.readers, self.made = scan, residuals, readers, made
        self.order, self.free = {v: k for k, v in enumerate(order)}, free

    def result(self) -> Rewrite:
        """The change."""
        s = self.s
        dropped = set(self.residuals.values())
        results: list[int | None] = [
            k for k, v in enumerate(s.given.task.outvars) if _compat.is_var(v) and k not in dropped
        ]
        first = len(results)
        forward, saved = self._forward(results)
        consumers = [
            self._consumer(c, b, r, results, first)
            for c, b, r in zip(s.given.consumers, s.backward, self.readers, strict=True)
        ]
        new = [v.aval for v in saved]
        used = list(range(len(s.producer.invars)))
        return Rewrite(forward, used, [*results, *[None] * len(saved)], new, consumers, s.given.jaxprs)

    def _forward(self, results: Sequence[int | None]) -> tuple[AbstractJaxpr, list[Var]]:
        """The forward task, and what it keeps of the scan."""
        s, scan = self.s, self.s.scan
        stay = [k for k in range(scan.num_carry, len(s.eqn.outvars)) if k not in self.residuals]
        outs = [*s.body_outs[: scan.num_carry], *(s.body_outs[k] for k in stay), *self.order]
        eqns, made = scan_like(s.body.invars, outs, s.body_eqns, s.eqn, s.eqn.invars, scan.num_consts)
        old = [*s.eqn.outvars[: scan.num_carry], *(s.eqn.outvars[k] for k in stay)]
        env: dict[Var, Atom] = {v: new for v, new in zip(old, made, strict=False) if _compat.is_var(v)}
        saved = made[len(old) :]
        whole: list[Eqn] = []
        for e in s.producer.eqns:
            whole += eqns if e is s.eqn else [with_atoms(e, env)]
        kept = [s.producer.outs[k] for k in results if k is not None]
        atoms = [env.get(v, v) if _compat.is_var(v) else v for v in kept]
        return _compat.close(_compat.new_jaxpr(s.producer.invars, [*atoms, *saved], whole)), saved

    def _consumer(
        self, consumer: Eqn, body: _Opened, reader: _Reader, results: Sequence[int | None], first: int
    ) -> Consumer:
        """A backward task."""
        position = {k: n for n, k in enumerate(results)}
        number = {v: k for k, v in enumerate(self.s.given.task.outvars) if _compat.is_var(v)}
        operands: list[Place] = []
        invars: list[Var] = []
        gone = {self.s.given.task.outvars[self.residuals[k]] for k in reader.at}
        for k, (outer, v) in enumerate(zip(consumer.invars, body.invars, strict=True)):
            if _compat.is_var(outer) and outer in gone:
                continue
            at = position.get(number.get(outer, -1)) if _compat.is_var(outer) else None
            invars.append(v)
            operands.append(("own", k) if at is None else ("kept", at))
        if not reader.at:
            return Consumer(_compat.close(_compat.new_jaxpr(invars, body.outs, body.eqns)), operands)
        assert reader.eqn is not None, "it reads what a scan kept"
        eqns, env = self._backward_scan(reader.eqn, reader.at, invars, operands, first)
        whole = [new for e in body.eqns for new in (eqns if e is reader.eqn else [with_atoms(e, env)])]
        outs = [env.get(v, v) if _compat.is_var(v) else v for v in body.outs]
        return Consumer(_compat.close(_compat.new_jaxpr(invars, outs, whole)), operands)

    def _backward_scan(
        self, eqn: Eqn, at: Mapping[int, int], invars: list[Var], operands: list[Place], first: int
    ) -> tuple[list[Eqn], dict[Var, Atom]]:
        """The equations of the new scan, and what stands for the results of the old one. Adds the operands it needs."""
        scan = _compat.scan_parts(eqn)
        inner = _compat.open_jaxpr(scan.jaxpr)
        env: dict[Var, Atom] = {}
        again: list[Eqn] = []
        read: dict[Var, Var] = {}  # variable of the forward body -> operand of the new body

        def here(v: Var) -> Var | None:
            if v in self.free or v in self.order:
                read[v] = _compat.new_var(v.aval)
                return read[v]
            return None

        def value(result: Atom) -> Atom:
            compute_again(result, self.made, env, here, again)
            return env[result] if _compat.is_var(result) else result

        alias: dict[Var, Atom] = {inner.invars[p]: value(self.s.body_outs[k]) for k, p in at.items()}
        consts: list[tuple[Var, Atom]] = []  # (operand of the body, operand of the scan)
        rest: list[tuple[Var, Atom]] = []
        xs: list[tuple[Var, Atom]] = []
        for k, (v, operand) in enumerate(zip(inner.invars, eqn.invars, strict=True)):
            if v not in alias:
                (consts if k < scan.num_consts else rest).append((v, operand))
        for source, v in read.items():
            outer = _compat.new_var(self._whole(source))
            invars.append(outer)
            operands.append(
                ("read", self.free[source]) if source in self.free else ("kept", first + self.order[source])
            )
            is_const = source in self.s.body.invars[: self.s.scan.num_consts] and source in self.free
            (consts if is_const else xs).append((v, outer))
        pairs = [*consts, *rest, *xs]
        eqns, made = scan_like(
            [v for v, _ in pairs], [alias.get(v, v) if _compat.is_var(v) else v for v in inner.outvars],
            [*again, *(with_atoms(e, alias) for e in inner.eqns)], eqn, [o for _, o in pairs], len(consts),
        )  # fmt: skip
        old = {v: new for v, new in zip(eqn.outvars, made, strict=True) if _compat.is_var(v)}
        return eqns, dict(old)

    def _whole(self, v: Var) -> Any:
        """The abstract value of all rounds of a variable of the forward body, or of what does not change from round to round."""
        if v in self.free:
            return self.s.producer.invars[self.free[v]].aval
        return _compat.stacked(v.aval, self.s.scan.length)


def scan_like(
    invars: Sequence[Var],
    outs: Sequence[Atom],
    eqns: Sequence[Eqn],
    like: Eqn,
    operands: Sequence[Atom],
    num_consts: int,
) -> tuple[list[Eqn], list[Var]]:
    """A scan with another body, and else like one that there was: its equations and results."""
    scan = _compat.scan_parts(like)
    open_body = _compat.new_jaxpr(invars, outs, eqns)
    trimmed, _ = _compat.dce(open_body, [True] * len(outs))
    body = _compat.new_jaxpr(invars, trimmed.outvars, trimmed.eqns)
    last = num_consts + scan.num_carry

    def run(*values: Any) -> list[Any]:
        consts, init, xs = values[:num_consts], values[num_consts:last], values[last:]

        def round_(carry: Any, x: Any) -> tuple[Any, Any]:
            made = jax.core.eval_jaxpr(body, (), *consts, *carry, *x)
            return tuple(made[: scan.num_carry]), tuple(made[scan.num_carry :])

        carry, ys = jax.lax.scan(round_, tuple(init), tuple(xs), scan.length, scan.reverse, like.params["unroll"])
        return [*carry, *ys]

    new, results = trace_eqns(run, operands)
    return [e.replace(source_info=like.source_info) for e in new], results
