"""``jax.shard_map`` on a mesh that the user names: it runs there, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import Mesh

from .. import _compat
from .._compat import Eqn
from .._errors import PlacementError
from .._program._flat import FlatProgram
from .._program._nodes import Node
from .._shown import joined, numbers
from .._task import mesh_devices
from .._topology import auto_mesh


def place_by_hand(flat: FlatProgram) -> FlatProgram:
    """Puts each unmarked equation with a ``jax.shard_map`` in it on the submesh whose devices that one names.

    Where no task says what runs where there is one set of devices, and it is what it is in `jax.jit`.

    Raises:
      PlacementError: it names devices that are no submesh, or others than those of the task, or of the loop, that it is in.
    """
    submeshes = _submeshes(flat)
    if not submeshes:
        return flat
    nodes = tuple(_placed(flat, n, submeshes) for n in flat.nodes)
    return flat if nodes == flat.nodes else replace(flat, nodes=nodes, placement=None)


def _submeshes(flat: FlatProgram) -> dict[frozenset[object], str]:
    """The submeshes of a step with tasks: their devices -> what they are called."""
    found: dict[frozenset[object], str] = {}
    for task in flat.tasks.values():
        for mesh in task.meshes or ((task.mesh,) if task.mesh is not None else ()):
            found.setdefault(frozenset(mesh_devices(mesh)), f"{_described(mesh)} of task {task.name!r}")
    for mesh in (*flat.pins.inputs.values(), *flat.pins.outputs.values()) if found else ():
        found.setdefault(frozenset(mesh_devices(mesh)), f"{_described(mesh)} of in_shardings or out_shardings")
    return found


def _placed(flat: FlatProgram, node: Node, submeshes: dict[frozenset[object], str]) -> Node:
    said = flat.submesh_of(node)
    at = said
    for eqn, mesh in _compat.meshes_by_hand(node.eqn):
        devices = frozenset(mesh_devices(mesh))
        if at is not None and frozenset(mesh_devices(at)) != devices:
            around = (
                f"the {node.primitive} that it is in" if node.task is None else f"task {flat.tasks[node.task].name!r}"
            )
            raise PlacementError(
                f"{_found(eqn, mesh)}, and {around} is on {_described(at)}; name that mesh, or take it out of there"
            )
        if devices not in submeshes:
            raise PlacementError(
                f"{_found(eqn, mesh)}, outside of tasks, where it has to be on a submesh of the step: {joined(list(submeshes.values()))}. "
                "Write jax.shard_map on one of these, or in a task on the mesh that it needs, mm.task(fun, name, mesh=mesh): "
                "submeshes may share devices, and one may have all of them. jax.vmap needs no mesh"
            )
        at = at or auto_mesh(mesh)
    return node if at is said else replace(node, mesh=at)


def _found(eqn: Eqn, mesh: Mesh) -> str:
    """What is on which mesh, and the user's line."""
    line = _compat.line_within(eqn)
    what = "jax.pmap, which makes a mesh of its own," if _compat.is_pmap(eqn) else "jax.shard_map"
    return f"{what}{f' at {line}' if line else ''} is on {_described(mesh)}"


def _described(mesh: Mesh) -> str:
    return f"devices {numbers(d.id for d in mesh_devices(mesh))} with axes {dict(mesh.shape)}"
