"""How a user calls a step: with pytrees of arrays, or with what an adapter makes such pytrees of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")


class Calling:
    """With pytrees of arrays; an adapter for modules has a subclass.

    Attributes:
      place: how to place an ``{argument}`` where the step ``{name}`` reads it; ``{home}`` stands for where it is in
        ``input_shardings``, ``{which}`` for its position or name.
    """

    place = "jax.device_put({argument}, compiled.input_shardings{home}), with compiled = {name}.prepare(...) for these arguments"

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a step of arrays as its user does, and gives back what the user expects."""
        return run(*args, **kwargs)

    def take(self, take: Callable[..., R], args: Any, kwargs: Any) -> R:
        """Calls a function of the arguments of a step of arrays, with the user's, which stay as they are."""
        return take(*args, **kwargs)


PLAIN = Calling()
