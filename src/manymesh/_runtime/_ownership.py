"""Which submeshes a process runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from .._task import mesh_devices


@dataclass(frozen=True)
class Ownership:
    """The submeshes of which a process has devices.

    Attributes:
      submeshes: their numbers. One with devices of several processes is in the ownership of each of them.
    """

    submeshes: frozenset[int]

    def owns(self, submesh: int) -> bool:
        """Whether the process runs what is on a submesh."""
        return submesh in self.submeshes


def ownership(submeshes: Sequence[Mesh], process: int) -> Ownership:
    """What one process owns; in a single process that is everything.

    Args:
      submeshes: those of the program.
      process: number of the process, as ``jax.process_index()`` gives it.
    """
    return Ownership(
        frozenset(s for s, m in enumerate(submeshes) if any(d.process_index == process for d in mesh_devices(m)))
    )
