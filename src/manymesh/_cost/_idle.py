"""Axes of submeshes that shard nothing: the devices along one all hold and compute the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from .._compat import AbstractJaxpr
from .._layout._layout import Layout
from .._layout._solve import SHARDING
from .._program import Program

_THAT_SAY_OVER_WHAT = ("reshard", "shard_map")


@dataclass(frozen=True)
class IdleAxis:
    """An axis of a submesh that shards nothing in a step.

    Attributes:
      submesh: the submesh.
      axis: name of the axis.
      size: how many devices do the same along it.
    """

    submesh: int
    axis: str
    size: int


def idle_axes(program: Program, layout: Layout) -> tuple[IdleAxis, ...]:
    """The axes that shard no value that fragments read or make, and nothing inside of them."""
    used: defaultdict[int, set[str]] = defaultdict(set)
    for (_, s), decision in layout.decisions.items():
        used[s].update(_axes(decision.spec))
    for f in program.fragments:
        axes = program.submeshes[f.submesh].axis_names
        if not used[f.submesh].issuperset(axes):
            used[f.submesh].update(_inside(f.jaxpr, axes))
    return tuple(
        IdleAxis(s, str(axis), size)
        for s, mesh in enumerate(program.submeshes)
        for axis, size in mesh.shape.items()
        if size > 1 and axis not in used[s]
    )


def _axes(spec: PartitionSpec) -> Iterator[str]:
    for entry in spec:
        yield from (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()


def _inside(jaxpr: AbstractJaxpr, all_axes: tuple[str, ...]) -> Iterator[str]:
    """The axes that a computation names: in constraints, in the specs of a ``shard_map``, in what devices send each other in
    there. All of them where it shards by itself."""
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in SHARDING and eqn.primitive.name not in _THAT_SAY_OVER_WHAT:
            yield from all_axes
        for value in eqn.params.values():
            if isinstance(value, NamedSharding):
                yield from _axes(value.spec)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, PartitionSpec):
                    yield from _axes(part)
                elif isinstance(part, str) and part in all_axes:
                    yield part
        for inner in _compat.jaxprs_in(eqn):
            yield from _inside(inner, all_axes)
