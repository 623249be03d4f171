"""What a step may return: arrays and numbers. JAX's own words for anything else point into our files."""

from __future__ import annotations

from typing import Any

import jax

from .._errors import ArgumentError
from ._names import names_of_results


def check_results(name: str, tree: Any, leaves: list[Any]) -> None:
    """Says which result of a step is no array.

    Args:
      name: name of the step.
      tree: structure of what the step returned.
      leaves: its leaves.

    Raises:
      ArgumentError: one of them is a string, a function, an object.
    """
    for k, leaf in enumerate(leaves):
        try:
            jax.typeof(leaf)
        except TypeError:
            what = (
                "a function: call it (mm.microbatch, too, returns a function of the arguments), and return what comes back"
                if callable(leaf)
                else "no array: return arrays and numbers alone, and keep the rest outside of the step"
            )
            raise ArgumentError(
                f"mm.jit({name}): {names_of_results(tree)[k]} is {type(leaf).__name__} {leaf!r:.80}, {what}"
            ) from None
