"""Which results take over the buffers of which inputs."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from .. import _compat
from .._compat import Var
from .._program import Program
from ._layout import Layout


def donation_pairs(
    program: Program, layout: Layout, donatable: Mapping[int, Sequence[int]]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Pairs (position of an input, position of the result that takes over its buffer) of every fragment.

    A buffer is taken over by a result whose pieces on each device have the same shape and dtype; where several would
    do, inputs and results are paired in their order. That is also how JAX pairs what is donated to a computation
    whose shardings are all given, so that no pair is left to XLA. What is left then is paired where the pieces have
    as many elements: the parts of a sum, which have a dimension more than the sum.

    Args:
      program: the program.
      layout: the sharding of all its values.
      donatable: fragment -> positions of the inputs that die in every run of it and that the call owns.
    """
    pairs = {}
    for index, positions in donatable.items():
        f = program.fragments[index]
        chosen: list[tuple[int, int]] = []
        for size in (_shape, _count):
            waiting: dict[Any, deque[int]] = defaultdict(deque)
            paired_inputs, paired_results = {k for k, _ in chosen}, {o for _, o in chosen}
            for k in positions:
                if k not in paired_inputs:
                    waiting[size(layout, f.invars[k], f.submesh)].append(k)
            for o, v in enumerate(f.outvars):
                if o not in paired_results and (same := waiting.get(size(layout, v, f.submesh))):
                    chosen.append((same.popleft(), o))
        if chosen:
            pairs[index] = tuple(chosen)
    return pairs


def _shape(layout: Layout, v: Var, submesh: int) -> Any:
    """Shape and dtype of what a device holds of a value."""
    return layout.sharding(v, submesh).shard_shape(_compat.shape(v)), _compat.dtype(v)


def _count(layout: Layout, v: Var, submesh: int) -> Any:
    """Elements and dtype of what a device holds of a value."""
    piece, dtype = _shape(layout, v, submesh)
    return math.prod(piece), dtype
