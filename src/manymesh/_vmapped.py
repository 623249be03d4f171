"""Constraints of values that `jax.vmap` has taken an axis from.

A task that constrains the batch is written for a whole batch. Under ``jax.vmap`` it gets single examples, without the
axis or with one of length one, and the name of the axis has nothing to stand for: the new axis is vmap's.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from ._task import AxisRule, Task, check_divides
from .meta._rules import parts_of

LeftOut: TypeAlias = list[tuple[Any, Any]]


def resolve_vmapped(
    described: Task,
    names: tuple[Any, ...],
    shape: tuple[int, ...],
    vmapped: tuple[tuple[str, ...], ...],
    others: tuple[AxisRule, ...] = (),
) -> tuple[PartitionSpec, tuple[str, ...], LeftOut]:
    """What per-dimension names mean on a task's mesh, but for those of axes that vmap took away.

    These are the first of too many, and those of dimensions of length one that do not divide, or whose device axes
    have gone to the new axis. They keep their device axes from other names.

    Args:
      described, names, shape, others: as for `Task.resolve`.
      vmapped: of each vmap, the device axes that its ``spmd_axis_name`` gives to the new axis.

    Returns:
      The `PartitionSpec`, the names that nothing knows, and pairs of a name and its device axes, which stand for no
      dimension any more and are not those of any vmap.

    Raises:
      AxisError: as `Task.resolve`.
    """
    surplus = max(0, len(names) - len(shape))
    if surplus > len(vmapped) or described.mesh is None or not described.has_named_axes:
        return *described.resolve(names, shape, others), []
    spec, unknown = described.resolve(names, (0,) * len(names), others)  # a length of zero divides over all axes
    entries = [*spec, *(None,) * (len(names) - len(spec))]
    gone = {i: entries[i] for i in range(surplus) if names[i] is not None}
    for i, length in enumerate(shape[: len(names) - surplus], surplus):
        axes = set(parts_of(entries[i]))
        whole = all(described.mesh.shape[a] == 1 for a in axes)
        if length == 1 and axes and len(gone) < len(vmapped) and (not whole or any(map(axes.issubset, vmapped))):
            gone[i] = entries[i]
    kept = [None if i in gone else e for i, e in enumerate(entries)][surplus:]
    check_divides(f"task {described.name!r}", names[surplus:], kept, shape, dict(described.mesh.shape))
    while kept and kept[-1] is None:
        kept.pop()
    left_out = [
        (names[i], axes)
        for i, axes in gone.items()
        if parts_of(axes) and not any(map(set(parts_of(axes)).issubset, vmapped))
    ]
    return PartitionSpec(*kept), unknown, left_out
