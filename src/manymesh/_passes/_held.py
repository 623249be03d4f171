"""The constants that a program closes over, each once however many layers made one of their own."""

from __future__ import annotations

import jax

from .._compat import Var
from .._key import Kept, content_of


class Held:
    """Constants, of which equal ones are one.

    Attributes:
      values: what stands for a constant -> its value.
    """

    def __init__(self) -> None:
        self.values: dict[Var, object] = {}
        self._known: dict[object, Var] = {}  # what a constant is -> what stands for it

    def take(self, v: Var, const: object) -> Var:
        """Takes a constant in. What stands for it: the variable, or that of an equal one. Arrays of JAX are not read."""
        content = Kept(const) if isinstance(const, jax.Array) else content_of(const)
        held = self._known.setdefault((v.aval, content), v)
        if held is v:
            self.values[v] = const
        return held
