"""Whether a result is a mean, or something given that is updated: to say what a sum of them over microbatches is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from . import _compat

_LINEAR = frozenset({"neg", "convert_element_type", "copy", "reshape", "squeeze", "name"})
_SAME = frozenset({"convert_element_type", "copy", "name"})
_SUMS = frozenset({"add", "add_any", "sub"})


def is_mean(jaxpr: Any, output: int, batch: int) -> bool:
    """Whether a scalar result of a jaxpr is a mean over all elements of an array, or means with factors, added up.

    Follows what made the result through calls and changes of dtype to sums that are divided by the number of what they
    sum. Terms that do not depend on the batch, such as a penalty on weights, may be among them. Anything else is no mean, as far
    as this can see.

    Args:
      jaxpr: open or closed.
      output: position of the result.
      batch: how many of its arguments are of the batch, the last ones; what it closes over comes before.
    """
    frame = _Frame(jaxpr, None, (), batch)
    # Terms, and the numbers by which they are divided one after the other, the last one first.
    todo: list[tuple[_Frame, Any, tuple[float, ...]]] = [(frame, frame.outvars[output], ())]
    seen = set()
    while todo:
        frame, atom, divisors = todo.pop()
        if not frame.is_of_batch(atom):
            continue
        frame, atom, eqn = frame.made(atom)
        if (frame, atom, divisors) in seen:
            continue
        seen.add((frame, atom, divisors))
        name = "" if eqn is None else eqn.primitive.name
        if name in _SUMS:
            todo += ((frame, term, divisors) for term in eqn.invars)
        elif name == "reduce_sum":
            summed = math.prod(_compat.shape(eqn.invars[0]))
            whole = not _compat.shape(eqn.outvars[0]) and summed > 1
            if not (
                whole and any(math.isclose(math.prod(divisors[k:]), summed, rel_tol=1e-5) for k in range(len(divisors)))
            ):
                return False
        elif name in ("div", "mul") and not frame.is_of_batch(eqn.invars[1]):
            todo.append((frame, eqn.invars[0], (*divisors, _divisor(name, eqn.invars[1]))))
        elif name == "mul" and not frame.is_of_batch(eqn.invars[0]):
            todo.append((frame, eqn.invars[1], (*divisors, _divisor(name, eqn.invars[0]))))
        elif name in _LINEAR:
            todo.append((frame, eqn.invars[0], divisors))
        else:
            return False
    return bool(seen)


def updated(jaxpr: Any, outputs: Iterable[int], batch: int) -> list[int]:
    """Which results of a jaxpr are what it closes over plus something of the batch, as parameters are after a step.

    Args:
      jaxpr: open or closed.
      outputs: positions of results.
      batch: as in `is_mean`.
    """
    frame = _Frame(jaxpr, None, (), batch)
    return [i for i in outputs if frame.is_of_batch(frame.outvars[i]) and _adds_to_given(frame, frame.outvars[i])]


def _adds_to_given(frame: _Frame, atom: Any) -> bool:
    """Whether one of the terms of a value is given, and as large."""
    todo, seen, shape = [(frame, atom)], set(), _compat.shape(atom)
    while todo:
        frame, atom = todo.pop()
        if not _compat.is_var(atom) or _compat.shape(atom) != shape:
            continue
        frame, atom, eqn = frame.made(atom)
        if (frame, atom) in seen:
            continue
        seen.add((frame, atom))
        name = "" if eqn is None else eqn.primitive.name
        if eqn is None and _compat.is_var(atom) and not frame.is_of_batch(atom):
            return True
        if name in _SUMS or name in _SAME:
            todo += ((frame, term) for term in (eqn.invars[:1] if name == "sub" else eqn.invars))
    return False


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

    def made(self, atom: Any) -> tuple[_Frame, Any, Any]:
        """A value where an equation makes it, in a call or around one, and the equation; None for one that nothing makes."""
        frame = self
        while _compat.is_var(atom):
            eqn = frame._makers.get(atom)
            if eqn is not None and _compat.is_jit(eqn):
                frame = frame._inside(eqn)
                atom = frame.outvars[list(eqn.outvars).index(atom)]
            elif eqn is None and frame._caller is not None:
                frame, atom = frame._caller, frame._operands.get(atom)  # a constant of the call is no operand
            else:
                return frame, atom, eqn
        return frame, None, None

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
