"""Which operands of a conditional each of its results is made of, as far as the values are of its shape."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _compat
from .._compat import Atom, Eqn, Jaxpr, Var
from .._program._calls import inlined_jaxpr


@dataclass(frozen=True, eq=False)
class _Branch:
    """A branch: what its results are called inside, the equation that makes each value, and the positions of its inputs."""

    outs: list[Atom]
    producer: dict[Var, Eqn]
    position: dict[Var, int]


class Branches:
    """Looks into conditionals, each of whose branches is indexed once."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[dict[Atom, int], list[_Branch]]
        ] = {}  # by id of the equation, which the caller keeps

    def operands(self, eqn: Eqn, result: Var) -> list[Atom]:
        """The operands that a result of a conditional is made of in one of its branches, by way of values of its shape."""
        if id(eqn) not in self._known:
            number: dict[Atom, int] = {v: k for k, v in enumerate(eqn.outvars)}
            self._known[id(eqn)] = number, [_indexed(branch) for branch in eqn.params["branches"]]
        number, branches = self._known[id(eqn)]
        shape = _compat.shape(result)
        found: set[int] = set()
        for branch in branches:
            todo, seen = [branch.outs[number[result]]], set[Var]()
            while todo:
                v = todo.pop()
                if _compat.is_var(v) and v not in seen and _compat.shape(v) == shape:
                    seen.add(v)
                    if v in branch.position:
                        found.add(branch.position[v])
                    elif v in branch.producer:
                        todo += branch.producer[v].invars
        return [eqn.invars[1 + k] for k in sorted(found)]  # behind the index of the branch


def _indexed(branch: Jaxpr) -> _Branch:
    eqns, outs = inlined_jaxpr(branch)
    producer = {v: e for e in eqns for v in e.outvars if _compat.is_var(v)}
    return _Branch(outs, producer, {v: k for k, v in enumerate(_compat.open_jaxpr(branch).invars)})
