"""Processes that save and restore together."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from .. import _compat
from .._errors import CheckpointError

# Seconds. As long as the slowest process may take to write its part; the watchdog of a run notices a death much earlier.
PATIENCE = 3600.0


@dataclass(frozen=True)
class Processes:
    """All processes of a run, seen from one of them.

    Attributes:
      index: number of this process. That with number 0 makes directories and renames them.
      count: how many there are.
    """

    index: int
    count: int

    @classmethod
    def of_this_run(cls) -> Processes:
        """As JAX knows them."""
        return cls(jax.process_index(), jax.process_count())

    @property
    def first(self) -> bool:
        """Whether this is the process that makes directories and renames them."""
        return self.index == 0

    def meet(self, place: str, error: Exception | None) -> None:
        """Waits until every process is at the same place, and raises in all of them what went wrong in one.

        A barrier of the coordination service and no collective: it runs in a thread of its own, while the main thread
        launches programs whose collectives must not be interleaved with others.

        Args:
          place: a name that is used once, the same in every process.
          error: what went wrong here.

        Raises:
          CheckpointError: something went wrong in another process.
        """
        if self.count > 1:
            client = _compat.coordination_client()
            key = f"manymesh.checkpoint/{place}"
            if error is not None:
                client.key_value_set(f"{key}/{self.index}", f"process {self.index}: {type(error).__name__}: {error}")
            client.wait_at_barrier(key, timeout_in_ms=int(PATIENCE * 1000))
            failed = [text for _, text in client.key_value_dir_get(f"{key}/")]
            if failed and error is None:
                raise CheckpointError(f"nothing was saved, because of {'; '.join(failed)}")
        if error is not None:
            raise error
