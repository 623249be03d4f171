"""Which submeshes a process runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from .._errors import ProcessError
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


def not_joined() -> str:
    """What is wrong where JAX runs several processes and this one knows of no other, and what to do."""
    return (
        f"this is process {jax.process_index()}, which has not joined the others: JAX runs {jax.process_count()} processes, but "
        "manymesh.distributed.initialize() was not called after jax.distributed.initialize(...); add it on the line below, before "
        "anything makes an array or asks for jax.devices(): it takes over what JAX has begun"
    )


def check_joined(name: str, submeshes: Sequence[Mesh]) -> None:
    """Refuses what a process that has not joined the others cannot run.

    Alone it can run what is on its own devices, and, together with all others, what is on one set of devices: that is JAX's
    own way of running one program in several processes.

    Args:
      name: of the step, for the message.
      submeshes: those of its program.

    Raises:
      ProcessError: something would have to come from, or go to, another process.
    """
    own, places = jax.process_index(), {frozenset(mesh_devices(mesh)) for mesh in submeshes}
    for s, mesh in enumerate(submeshes):
        owners = processes_of_mesh(mesh)
        if owners != {own} and (own not in owners or len(places) > 1):
            ids = ", ".join(str(d.id) for d in mesh_devices(mesh))
            whose = f"process{'es' * (len(owners) > 1)} {', '.join(map(str, sorted(owners)))}"
            raise ProcessError(f"mm.jit({name}): submesh {s} is on devices {ids} of {whose}; {not_joined()}")
