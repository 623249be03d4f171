"""The constants that a program closes over, each once however many layers made one of their own."""

from __future__ import annotations

import hashlib

import jax
import numpy as np

from .._compat import Var


class Held:
    """Constants, of which equal ones are one.

    Attributes:
      values: what stands for a constant -> its value.
    """

    def __init__(self) -> None:
        self.values: dict[Var, object] = {}
        self._known: dict[object, Var] = {}  # what a constant is -> what stands for it

    def take(self, v: Var, const: object) -> Var:
        """Takes a constant in. What stands for it: the variable, or that of an equal one."""
        held = self._known.setdefault(_content(v, const), v)
        if held is v:
            self.values[v] = const
        return held


def _content(v: Var, const: object) -> object:
    """What equal constants have in common. Arrays of JAX are not read; each is itself."""
    values = None if isinstance(const, jax.Array) else np.asarray(const)
    if values is None or values.dtype.hasobject:
        return id(const)
    return v.aval, hashlib.sha256(values.tobytes()).digest()
