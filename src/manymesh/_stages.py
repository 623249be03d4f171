"""What every stage of a step tells of its arguments and results, as those of ``jax.jit`` do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import jax

from . import _compat
from ._shown import Shown
from ._types import PyTree


class Stage(Shown, ABC):
    """A step that is traced, lowered or compiled."""

    _in_tree: Any
    _out_tree: Any
    _donated: Collection[int]

    @abstractmethod
    def _argument_types(self) -> Sequence[Any]:
        """The abstract value of each leaf of the arguments."""

    @property
    def in_tree(self) -> Any:
        """The structure of ``(args, kwargs)``; static arguments are None in it."""
        return self._in_tree

    @property
    def out_tree(self) -> Any:
        """The structure of the result."""
        return self._out_tree

    @property
    def in_avals(self) -> PyTree:
        """Shape and dtype of each argument, as a `jax.core.ShapedArray`, in the structure ``(args, kwargs)``."""
        return jax.tree.unflatten(self._in_tree, self._argument_types())

    @property
    def args_info(self) -> PyTree:
        """Shape and dtype of each argument and whether it is donated, as a `jax.stages.ArgInfo`, likewise."""
        described = [_compat.arg_info(aval, i in self._donated) for i, aval in enumerate(self._argument_types())]
        return jax.tree.unflatten(self._in_tree, described)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Which of the arguments' leaves are donated, as ``jax.tree.leaves((args, kwargs))`` counts them."""
        return tuple(sorted(self._donated))
