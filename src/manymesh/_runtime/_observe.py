"""Looking on while a step runs."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from .._plan._instructions import Instruction


class Observer:
    """Is told what the executor does, in its order, on the thread that runs the step.

    Every method does nothing here, so that an observer writes out only those it needs. A `Send` and its `Receive` that
    are run as one copy inside this process are told as two, with the copy in the `Receive`.
    """

    def moves_argument(self, position: int, value: object, sharding: jax.sharding.NamedSharding) -> None:
        """An argument is not yet where the program wants it.

        Args:
          position: among the program's inputs without its constants; the first block's where it is stacked.
          value: array or host value.
          sharding: what it is given.
        """

    def moved_argument(self, position: int, moved: jax.Array) -> None:
        """An argument was moved.

        Args:
          position: as in `moves_argument`.
          moved: what was made of it; it may not be there yet.
        """

    def begin(self, position: int, instruction: Instruction, inputs: Sequence[jax.Array]) -> None:
        """An instruction starts.

        Args:
          position: where it stands in the plan.
          instruction: what it is.
          inputs: the arrays it reads; donated ones are gone at its end.
        """

    def end(self, position: int, instruction: Instruction, outputs: Sequence[jax.Array]) -> None:
        """An instruction was issued; what it frees is still there.

        Args:
          position: where it stands in the plan.
          instruction: what it is.
          outputs: the arrays it fills slots with. They may not be computed yet.
        """

    def failed(self) -> None:
        """What began last raised: it has no `end`, and nothing comes after it."""
