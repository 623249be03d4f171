"""Stacked arguments and results, whole: their shardings outside the program, from those of their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding

from .. import _compat
from .._compat import Var
from .._program._fragments import Program
from .._program._stacked import Joint, Stacked, joint, spec_of_blocks
from ._layout import Layout

Joints = Mapping[tuple[Mesh, ...], Joint]


@dataclass(frozen=True, eq=False)
class StackedValue:
    """An argument or result that lies in blocks on several submeshes, with all its shardings.

    Attributes:
      positions: of its blocks among the arguments or results of the program.
      aval: shape and dtype of the whole, and its sharding.
      blocks: those of each block.
    """

    positions: range
    aval: jax.ShapeDtypeStruct
    blocks: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the whole."""
        found = self.aval.sharding
        assert isinstance(found, NamedSharding), "it was given one"
        return found


def joints_of(values: Iterable[tuple[Stacked, NamedSharding, tuple[int, ...]]]) -> dict[tuple[Mesh, ...], Joint]:
    """The mesh of all submeshes that the user has, for each set of submeshes of which one of the values lies on it.

    Args:
      values: what is stacked, with the sharding and the shape of the whole array.
    """
    found: dict[tuple[Mesh, ...], Joint] = {}
    for stacked, sharding, shape in values:
        fits = spec_of_blocks(sharding, shape, stacked.submeshes, stacked.dim)
        if fits is not None:
            found.setdefault(stacked.submeshes, fits[1])
    return found


def block_shardings(stacked: Stacked, sharding: NamedSharding, shape: tuple[int, ...]) -> list[NamedSharding]:
    """What each block has of an array's sharding: all of it where the array lies in these blocks, else what fits."""
    fits = spec_of_blocks(sharding, shape, stacked.submeshes, stacked.dim)
    if fits is None:
        return [sharding] * len(stacked.submeshes)
    return [NamedSharding(mesh, fits[0]) for mesh in stacked.submeshes]


def stacked_inputs(program: Program, layout: Layout, joints: Joints) -> list[StackedValue]:
    """The stacked arguments of a program."""
    values = []
    for s in program.stacked_inputs:
        blocks = [program.invars[len(program.consts) + i] for i in s.positions]
        shardings = [layout.sharding(v, program.home[v]) for v in blocks]
        values.append(_value(s, blocks, shardings, joints))
    return values


def stacked_outputs(
    program: Program, layout: Layout, joints: Joints, moved: Mapping[int, NamedSharding]
) -> list[StackedValue]:
    """The stacked results of a program; ``moved`` are those that get another sharding when they are finished."""
    values = []
    for s in program.stacked_outputs:
        blocks = [program.outputs[o] for o in s.positions]
        shardings = [moved.get(o, layout.sharding(*b)) for o, b in zip(s.positions, blocks, strict=True)]
        values.append(_value(s, [v for v, _ in blocks], shardings, joints))
    return values


def _value(s: Stacked, blocks: Sequence[Var], shardings: Sequence[NamedSharding], joints: Joints) -> StackedValue:
    shape = list(_compat.shape(blocks[0]))
    shape[s.dim] *= len(blocks)
    assert len({x.spec for x in shardings}) == 1, "the blocks of one value lie alike"
    whole = joints.get(s.submeshes, joint(s.submeshes)).sharding(shardings[0].spec, s.dim)
    dtype = _compat.dtype(blocks[0])
    avals = (jax.ShapeDtypeStruct(_compat.shape(v), dtype, sharding=x) for v, x in zip(blocks, shardings, strict=True))
    return StackedValue(s.positions, jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=whole), tuple(avals))
