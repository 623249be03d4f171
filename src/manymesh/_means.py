"""Whether a result is a mean, or something given that is updated: to say what a sum of them over microbatches is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

from . import _compat

_LINEAR = frozenset({"neg", "convert_element_type", "copy", "reshape", "squeeze", "name"})
_SAME = frozenset({"convert_element_type", "copy", "name"})
_SUMS = frozenset({"add", "add_any", "sub"})


class _Kind(Enum):
    """What a term of a scalar is."""

    MEAN = "a mean over elements of the batch, up to a factor"
    APART = "nothing of the batch, such as a penalty on weights"
    OTHER = "anything else"


def is_mean(jaxpr: Any, output: int, batch: int) -> bool:
    """Whether a scalar result of a jaxpr is a mean over all elements of an array, or means with factors, added up.

    Follows what made the result through calls and changes of dtype to sums that are divided by the number of what they
    sum. Terms that do not depend on the batch may be among them. Anything else is no mean, as far as this can see.

    Args:
      jaxpr: open or closed.
      output: position of the result.
      batch: how many of its arguments are of the batch, the last ones; what it closes over comes before.
    """
    frame = _Frame(jaxpr, None, (), batch)
    return frame.kind(frame.outvars[output], ()) is _Kind.MEAN


def is_updated(jaxpr: Any, output: int, batch: int) -> bool:
    """Whether a result is what the function closes over plus something of the batch, as parameters are after a step.

    Args:
      jaxpr: open or closed.
      output: position of the result.
      batch: as in `is_mean`.
    """
    frame = _Frame(jaxpr, None, (), batch)
    return frame.is_updated(frame.outvars[output])


class _Frame:
    """A jaxpr as it is called.

    Args:
      jaxpr: open or closed.
      caller: where it is called; None for the outermost one.
      operands: what it is called with there.
      batch: how many arguments of the outermost one are of the batch, the last ones.
    """

    def __init__(self, jaxpr: Any, caller: _Frame | None, operands: Sequence[Any], batch: int = 0) -> None:
        parts = _compat.open_jaxpr(jaxpr)
        self.outvars = parts.outvars
        self._makers = {v: eqn for eqn in parts.eqns for v in eqn.outvars}
        self._caller, self._operands = caller, dict(zip(parts.invars, operands, strict=caller is not None))
        self._called: dict[int, _Frame] = {}
        self._of_batch = {v for v, x in self._operands.items() if caller is not None and caller.is_of_batch(x)}
        self._of_batch |= set(parts.invars[len(parts.invars) - batch :])
        for eqn in parts.eqns:
            if any(map(self.is_of_batch, eqn.invars)):
                self._of_batch.update(eqn.outvars)

    def kind(self, atom: Any, divisors: tuple[float, ...]) -> _Kind:
        """What a scalar is.

        Args:
          atom: the scalar.
          divisors: the numbers by which it is divided one after the other, the last one first.
        """
        while True:
            if not self.is_of_batch(atom):
                return _Kind.APART
            if atom not in self._makers:
                return _Kind.OTHER if self._caller is None else self._caller.kind(self._operands[atom], divisors)
            eqn = self._makers[atom]
            name = eqn.primitive.name
            if _compat.is_jit(eqn):
                inner = self._inside(eqn)
                return inner.kind(inner.outvars[list(eqn.outvars).index(atom)], divisors)
            if name in _SUMS:
                kinds = {self.kind(term, divisors) for term in eqn.invars}
                return _Kind.OTHER if _Kind.OTHER in kinds else _Kind.MEAN
            if name == "reduce_sum":
                summed = math.prod(_compat.shape(eqn.invars[0]))
                whole = not _compat.shape(eqn.outvars[0]) and summed > 1
                by = (math.prod(divisors[k:]) for k in range(len(divisors)))
                return _Kind.MEAN if whole and any(math.isclose(x, summed, rel_tol=1e-5) for x in by) else _Kind.OTHER
            if name in ("div", "mul") and not self.is_of_batch(eqn.invars[1]):
                divisors = (*divisors, _divisor(name, eqn.invars[1]))
            elif name == "mul" and not self.is_of_batch(eqn.invars[0]):
                divisors, atom = (*divisors, _divisor(name, eqn.invars[0])), eqn.invars[1]
                continue
            elif name not in _LINEAR:
                return _Kind.OTHER
            atom = eqn.invars[0]

    def is_updated(self, atom: Any) -> bool:
        """Whether a value is what the outermost jaxpr is given, which is not of the batch, plus something that is."""
        while self.is_of_batch(atom):
            if atom not in self._makers:
                return self._caller is not None and self._caller.is_updated(self._operands[atom])
            eqn = self._makers[atom]
            name = eqn.primitive.name
            if _compat.is_jit(eqn):
                inner = self._inside(eqn)
                return inner.is_updated(inner.outvars[list(eqn.outvars).index(atom)])
            if name in _SUMS:
                terms = eqn.invars[: 1 if name == "sub" else 2]
                alike = [x for x in terms if _compat.is_var(x) and _compat.shape(x) == _compat.shape(atom)]
                return any(self._is_given(x) or self.is_updated(x) for x in alike)
            if name not in _SAME:
                return False
            atom = eqn.invars[0]
        return False

    def _is_given(self, atom: Any) -> bool:
        while _compat.is_var(atom) and not self.is_of_batch(atom):
            if atom not in self._makers:
                return self._caller is None or self._caller._is_given(self._operands[atom])
            eqn = self._makers[atom]
            if eqn.primitive.name not in _SAME:
                return False
            atom = eqn.invars[0]
        return False

    def is_of_batch(self, atom: Any) -> bool:
        """Whether a value depends on the batch."""
        return _compat.is_var(atom) and atom in self._of_batch

    def _inside(self, eqn: Any) -> _Frame:
        if id(eqn) not in self._called:
            self._called[id(eqn)] = _Frame(eqn.params["jaxpr"], self, eqn.invars)
        return self._called[id(eqn)]


def _divisor(name: str, number: Any) -> float:
    """The number that an equation divides by; 0, which no number of elements is, where that is a variable."""
    if _compat.is_var(number):
        return 0.0
    value = float(number.val)
    return value if name == "div" else 1 / value if value else math.inf
