"""Numbers for values: two of them have one number if they are computed alike, of the same values."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _compat
from .._compat import Atom, Eqn, Var
from .._key import Keys
from .._program._calls import call_body
from .._program._nodes import Node

# What makes no other value, however it is compiled.
_SAME = frozenset(
    ["optimization_barrier", "copy", "name", "sharding_constraint", "manymesh_constraint", "manymesh_box"]
)


def numbers(nodes: Sequence[Node]) -> dict[Var, int]:
    """The number of each value that equations make, calls among them seen through.

    What differentiation keeps of a call besides its results, as where it is computed again, makes it no other call.

    Args:
      nodes: equations in order; of those with an effect nothing is equal to anything.
    """
    worker = ints()
    env: dict[Var, int] = {}
    for n in nodes:
        worker.eqn(n.eqn, env)
    return {v: env[v] for n in nodes for v in n.outputs}


class ints:
    def __init__(self) -> None:
        self._keys = Keys()
        self._known: dict[object, int] = {}

    def _of(self, what: object) -> int:
        return self._known.setdefault(what, len(self._known))

    def _read(self, atom: Atom, env: dict[Var, int]) -> int:
        if not _compat.is_var(atom):
            return self._of(self._keys(_compat.new_jaxpr((), (atom,), ())))
        if atom not in env:
            env[atom] = self._of(atom)
        return env[atom]

    def eqn(self, eqn: Eqn, env: dict[Var, int]) -> None:
        """Numbers what an equation makes; ``env`` has the numbers of what it reads."""
        operands = [self._read(v, env) for v in eqn.invars]
        made = [v for v in eqn.outvars if _compat.is_var(v)]
        body = call_body(eqn)
        if eqn.effects:
            env.update((v, self._of(v)) for v in made)
        elif eqn.primitive.name in _SAME and len(operands) == len(eqn.outvars):
            env.update((v, k) for v, k in zip(eqn.outvars, operands, strict=True) if _compat.is_var(v))
        elif body is not None:
            results = self._call(body, operands)
            env.update((v, k) for v, k in zip(eqn.outvars, results, strict=True) if _compat.is_var(v))
        else:
            reads = tuple(dict.fromkeys(v for v in eqn.invars if _compat.is_var(v)))
            one = self._keys(_compat.new_jaxpr(reads, made, [eqn]))
            of = tuple([env[v] for v in reads])
            env.update((v, self._of((one, of, i))) for i, v in enumerate(made))

    def _call(self, body: object, operands: Sequence[int]) -> list[int]:
        parts = _compat.open_jaxpr(body)
        inner: dict[Var, int] = dict(zip(parts.invars, operands, strict=True))
        inner.update((v, self._of(("const", id(c)))) for v, c in zip(parts.constvars, parts.consts, strict=True))
        for eqn in parts.eqns:
            self.eqn(eqn, inner)
        return [self._read(v, inner) for v in parts.outvars]
