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
        """Takes a constant in. What stands for it: the variable, or that of an equal one. Arrays of JAX are not read.

        Raises:
          RuntimeError: it is an array that has been deleted.
        """
        if isinstance(const, jax.Array) and not isinstance(const, jax.core.Tracer) and const.is_deleted():
            raise RuntimeError(
                f"the step, or a task in it, closes over an array {v.aval.str_short()} that has been deleted, as by a call that "
                "it was donated to; close over the array that took its place, or pass it as an argument"
            )
        content = Kept(const) if isinstance(const, jax.Array) else content_of(const)
        held = self._known.setdefault((v.aval, content), v)
        if held is v:
            self.values[v] = _here(const)
        return held


def _here(const: object) -> object:
    """The constant; of a copy in each of several processes, the one of this process."""
    if not isinstance(const, jax.Array) or isinstance(const, jax.core.Tracer) or const.is_fully_addressable:
        return const
    return const.addressable_data(0) if const.is_fully_replicated and const.sharding.addressable_devices else const
