"""How a user calls a step: with pytrees of arrays, or with what an adapter makes such pytrees of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")

_COMPILED = ", with compiled = {name}.prepare(...) for these arguments"


class Calling:
    """With pytrees of arrays; an adapter for modules has a subclass.

    Attributes:
      place: how to place an ``{argument}`` where the step ``{name}`` reads it; ``{home}`` stands for where it is in
        ``input_shardings``, ``{which}`` for its position or name. In one process, and in several, between which
        ``jax.device_put`` moves nothing that was put somewhere.
    """

    place = (
        "jax.device_put({argument}, compiled.input_shardings{home})" + _COMPILED,
        "mm.jit(lambda x: x, out_shardings=compiled.input_shardings{home})({argument})" + _COMPILED,
    )

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a step of arrays as its user does, and gives back what the user expects."""
        return run(*args, **kwargs)

    def take(self, take: Callable[..., R], args: Any, kwargs: Any) -> R:
        """Calls a function of the arguments of a step of arrays, with the user's, which stay as they are."""
        return take(*args, **kwargs)


PLAIN = Calling()
