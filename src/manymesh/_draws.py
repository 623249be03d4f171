"""Whether random numbers are drawn for the rows of a piece of the batch, and are the same in each piece."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from . import _compat
from ._batch import in_words

_DRAWS = frozenset({"random_bits", "random_gamma"})
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def about_draws(name: str, count: int, line: str, keys: Sequence[int]) -> str:
    """A sentence about random numbers that are the same in each microbatch.

    Args:
      name: name of the function.
      count: number of microbatches.
      line: where they are drawn; may be empty.
      keys: the arguments that ``rng_argnum`` could name.
    """
    which = in_words([f"rng_argnum={k}" for k in keys], "or")
    remedy = f"write {which}" if keys else "give one key by position and name that in rng_argnum"
    return (
        f"microbatch({name}): each of {count} microbatches draws the same random numbers for its rows, so that dropout drops the "
        f"same units in each{f', at {line}' if line else ''}; {remedy} for keys that differ, or draw what is meant to be the same "
        "outside of the loop"
    )


@dataclass(frozen=True)
class _Facts:
    """What is known of a value.

    Attributes:
      batch: it depends on the piece.
      given: it depends on what the function closes over.
      row: the dimension along which it holds numbers drawn for each row, the same ones in each piece; None if it holds none.
    """

    batch: bool = False
    given: bool = False
    row: int | None = None

    def __or__(self, other: _Facts) -> _Facts:
        row = other.row if self.row is None else self.row  # what a loop carries may be turned in each round
        return _Facts(self.batch or other.batch, self.given or other.given, row)


_NOTHING = _Facts()


def same_in_each(closed: Any, batch: int, dim: int, length: int) -> str | None:
    """The line that draws numbers which differ from row to row and not from piece to piece; None if there is none.

    Such numbers come from a key that is given to the function and is no part of the batch, have the length of a piece, and
    meet a value of the batch of the same shape: a mask of dropout, the noise of a sample. One for weights, or one that all
    rows share, is the same without microbatches.

    Args:
      closed: the jaxpr of a piece.
      batch: how many of its arguments are of the batch, the last ones; what it closes over comes before.
      dim: the dimension along which the batch is cut.
      length: of a piece.
    """
    if not _draws(closed, set()):
        return None
    parts = _compat.open_jaxpr(closed)
    walk = _Walk(dim, length)
    given = [_Facts(given=isinstance(x, jax.core.Tracer)) for x in parts.consts]
    closed_over = len(parts.invars) - batch
    walk.results(closed, [_Facts(given=True)] * closed_over + [_Facts(batch=True)] * batch, given)
    return walk.found


def _draws(jaxpr: Any, seen: set[int]) -> bool:
    """Whether a jaxpr draws random numbers; of those that were seen already nothing is said."""
    eqns = _compat.open_jaxpr(jaxpr).eqns
    inner = [j for e in eqns for j in _compat.jaxprs_in(e) if id(j) not in seen]
    seen.update(map(id, inner))
    return any(e.primitive.name in _DRAWS for e in eqns) or any(_draws(j, seen) for j in inner)


@dataclass
class _Walk:
    dim: int
    length: int
    found: str | None = None  # the line that drew, once its numbers have met the batch
    drew: str = ""  # the last one that drew such numbers
    around: list[Any] = field(default_factory=list)  # the equations around the one that is read, that one the last

    def results(self, jaxpr: Any, operands: Sequence[_Facts], consts: Sequence[_Facts] = ()) -> list[_Facts]:
        """What is known of the results of a jaxpr, given what is known of its arguments."""
        parts = _compat.open_jaxpr(jaxpr)
        known = dict(zip(parts.invars, operands, strict=True)) | dict(zip(parts.constvars, consts, strict=False))
        for eqn in parts.eqns:
            facts = [known.get(x, _NOTHING) if _compat.is_var(x) else _NOTHING for x in eqn.invars]
            self.around.append(eqn)
            known.update(zip(eqn.outvars, self._made(eqn, facts), strict=True))
            self.around.pop()
        return [known.get(x, _NOTHING) if _compat.is_var(x) else _NOTHING for x in parts.outvars]

    def _made(self, eqn: Any, facts: list[_Facts]) -> list[_Facts]:
        name = eqn.primitive.name
        if (body := _compat.called_jaxpr(eqn)) is not None:
            return self.results(body, facts)
        if name == "scan":
            return self._scanned(_compat.scan_parts(eqn), facts)
        if name == "while":
            loop = _compat.while_parts(eqn)
            return self._repeated(loop.body, facts[loop.cond_consts :], loop.body_consts, len(eqn.outvars))
        if name == "cond":
            branches = [self.results(branch, facts[1:]) for branch in eqn.params["branches"]]
            return [_union([facts[0], *found]) for found in zip(*branches, strict=True)]
        return [self._simple(eqn, facts, _compat.shape(v)) for v in eqn.outvars]

    def _simple(self, eqn: Any, facts: list[_Facts], shape: tuple[int, ...]) -> _Facts:
        name, known = eqn.primitive.name, _union(facts)
        rows = [d for d in range(len(shape)) if self._is_row(shape, d)]
        if name in _DRAWS and known.given and not known.batch and rows:
            lines = map(_compat.source_line, reversed(self.around))  # those of JAX's own functions have none
            self.drew = next(filter(None, lines), "")
            return replace(known, row=self.dim if self.dim in rows else rows[0])
        if name not in _PRODUCTS and known.batch:
            shapes = [_compat.shape(x) for x in eqn.invars]
            drawn = any(
                f.row is not None and not f.batch and self._is_row(s, f.row) and len(s) == len(shape)
                for s, f in zip(shapes, facts, strict=True)
            )
            if drawn and any(f.batch and s == shape for s, f in zip(shapes, facts, strict=True)):
                self.found = self.drew if self.found is None else self.found
        row = None if known.batch else known.row
        if row is not None and name == "broadcast_in_dim":
            row = eqn.params["broadcast_dimensions"][row]
        elif row is not None and name == "transpose":
            row = eqn.params["permutation"].index(row)
        return replace(known, row=row if row is not None and self._is_row(shape, row) else None)

    def _is_row(self, shape: tuple[int, ...], row: int) -> bool:
        return row < len(shape) and shape[row] == self.length

    def _scanned(self, scan: Any, facts: list[_Facts]) -> list[_Facts]:
        """Of a loop over a dimension in front, which its body does not see."""
        start = scan.num_consts + scan.num_carry
        xs = [replace(f, row=f.row - 1 if f.row else None) for f in facts[start:]]
        out = self._repeated(scan.jaxpr, [*facts[:start], *xs], scan.num_consts, scan.num_carry)
        ys = [replace(f, row=None if f.row is None else f.row + 1) for f in out[scan.num_carry :]]
        return [*out[: scan.num_carry], *ys]

    def _repeated(self, body: Any, facts: list[_Facts], consts: int, carried: int) -> list[_Facts]:
        """Of a loop whose body is given what it returned, until nothing more becomes known."""
        while True:
            out = self.results(body, facts)
            stop = consts + carried
            merged = [old | new for old, new in zip(facts[consts:stop], out[:carried], strict=True)]
            if merged == facts[consts:stop]:
                return [*merged, *out[carried:]]
            facts = [*facts[:consts], *merged, *facts[stop:]]


def _union(facts: Iterable[_Facts]) -> _Facts:
    return functools.reduce(operator.or_, facts, _NOTHING)
