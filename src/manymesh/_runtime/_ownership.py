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
      shared: those of them that have devices of other processes too.
    """

    submeshes: frozenset[int]
    shared: frozenset[int] = frozenset()

    def owns(self, submesh: int) -> bool:
        """Whether the process runs what is on a submesh."""
        return submesh in self.submeshes

    def alone(self, submesh: int) -> bool:
        """Whether nobody else does."""
        return submesh in self.submeshes and submesh not in self.shared


def ownership(submeshes: Sequence[Mesh], process: int) -> Ownership:
    """What one process owns; in a single process that is everything.

    Args:
      submeshes: those of the program.
      process: number of the process, as ``jax.process_index()`` gives it.
    """
    owners = [processes_of_mesh(m) for m in submeshes]
    own = frozenset(s for s, processes in enumerate(owners) if process in processes)
    return Ownership(own, frozenset(s for s in own if len(owners[s]) > 1))


def processes_of_mesh(mesh: Mesh) -> frozenset[int]:
    """The processes that have devices of a mesh."""
    return frozenset(d.process_index for d in mesh_devices(mesh))
