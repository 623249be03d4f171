"""What flattening refuses, in words."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _compat
from .._compat import Eqn
from .._task import Task


def control_flow_message(eqn: Eqn, tasks: Sequence[Task]) -> str:
    """What is wrong with control flow around tasks of several submeshes, and what to do."""
    name, why, remedy = {
        "while": (
            "lax.while_loop (or fori_loop with a traced bound)",
            "which submesh runs when depends on data, so that the host has to run it, and what it is in cannot be opened",
            "take it out of there, use a loop of fixed length (lax.scan, a Python loop), or put all its tasks on one submesh",
        ),
        "shard_map": (
            "jax.shard_map (or jax.pmap, which is one)",
            "it is one operation, which runs on one submesh",
            "leave it out, for in a step values are whole and cross by themselves, or put all of it into one task",
        ),
    }.get(
        eqn.primitive.name,
        (eqn.primitive.name, "it is one operation, which runs on one submesh", "put all its tasks on one, or all of it into one task"),
    )  # fmt: skip
    line = _compat.source_line(eqn)
    at = f" ({line})" if line else ""
    where = ", ".join(sorted({f"{t.name!r}{_devices(t)}" for t in tasks}))
    return f"{name}{at} holds the tasks {where}: {why}; {remedy}"


def _devices(task: Task) -> str:
    meshes = task.meshes or (() if task.mesh is None else (task.mesh,))
    return f" on devices {[d.id for m in meshes for d in m.devices.flat]}" if meshes else ""
