"""How many iterations the scans of a program have once they are unrolled, told before that is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import _compat
from .._compat import AbstractJaxpr, Eqn
from .._findings import Finding
from .._mark import Recording
from .._program._calls import is_transparent
from ._flatten import AcrossError, Flattener

# More than layers and tokens are. That many take minutes to compile, and the time grows faster than their number.
MANY = 1000
MANY_EQUATIONS = 20_000  # these take some ten seconds


def unrolled(closed: AbstractJaxpr, record: Recording) -> list[Finding]:
    """What to say of scans around tasks of several submeshes that have very many iterations, one after the other.

    Args:
      closed: the closed jaxpr of the whole step.
      record: what its marks mean.
    """
    counter = _Counter(record)
    found = []
    try:
        for count, scan in counter.scans(_compat.open_jaxpr(closed).eqns, "", False):
            equations = counter.equations(scan)
            if count > MANY or equations > MANY_EQUATIONS:
                line = _compat.source_line(scan)
                found.append(Finding(_message(count, equations, f" ({line})" if line else "")))
    except AcrossError:  # the host runs a loop in it, and what is around that
        return []
    return found


def _message(count: int, equations: int, at: str) -> str:
    return (
        f"lax.scan{at} has tasks of several submeshes in it, so that it is unrolled: {count} iterations, with those of the "
        f"scans in it, are programs of their own one after the other, with {equations} operations outside of tasks in all, which "
        "takes long to compile; put all that an iteration "
        "computes on one submesh, where a scan stays a loop, or take this one out of the step, into a loop of Python around it"
    )


class _Counter:
    """Finds the scans that `Flattener` unrolls."""

    def __init__(self, record: Recording) -> None:
        self._flattener = Flattener(record.tasks, record.loops, record.implicit)
        self._tasks, self._loops = record.tasks, record.loops

    def scans(self, eqns: Sequence[Eqn], stack: str, in_loop: bool) -> Iterator[tuple[int, Eqn]]:
        """The outermost ones, each with the number of iterations in all.

        Args:
          eqns: the equations of a body.
          stack: name stack of what encloses them.
          in_loop: whether they are directly those of a loop over microbatches, whose own scan stays one.

        Raises:
          AcrossError: one of them is a loop that no one program can run.
        """
        for eqn in eqns:
            inner_stack = f"{stack}/{_compat.name_stack(eqn)}"
            name = eqn.primitive.name
            mark = str(eqn.params.get("name")) if _compat.is_jit(eqn) else ""
            if mark in self._tasks or not self._flattener.is_opened(eqn, inner_stack):
                continue
            if name == "scan" and not in_loop and self._flattener.whole_scan(eqn, inner_stack, None):
                continue
            if name in ("cond", "while") and self._flattener.whole(eqn, inner_stack, None):
                continue
            if name == "while":
                raise AcrossError
            bodies = [_compat.open_jaxpr(body).eqns for body in _compat.jaxprs_in(eqn)]
            inside = [x for body in bodies for x in self.scans(body, inner_stack, mark in self._loops)]
            if name == "scan" and not in_loop:
                yield _compat.scan_parts(eqn).length * max(1, sum(count for count, _ in inside)), eqn
            else:
                yield from inside

    def equations(self, eqn: Eqn) -> int:
        """How many outside of tasks an equation becomes where all scans in it are unrolled."""
        if _compat.is_jit(eqn) and str(eqn.params.get("name")) in self._tasks:
            return 0
        if not (self._flattener.is_opened(eqn, "") or is_transparent(eqn)):
            return 1
        rounds = _compat.scan_parts(eqn).length if eqn.primitive.name == "scan" else 1
        return rounds * sum(self.equations(e) for body in _compat.jaxprs_in(eqn) for e in _compat.open_jaxpr(body).eqns)
