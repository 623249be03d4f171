"""Which results take over the buffers of which inputs."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import _compat
from .._compat import Var
from .._program import Fragment, Program
from .._program._calls import call_body
from ._layout import Layout

Pair = tuple[int, int]  # positions of an input and of a result


def donation_pairs(
    program: Program, layout: Layout, donatable: Mapping[int, Sequence[int]]
) -> dict[int, tuple[Pair, ...]]:
    """Pairs (position of an input, position of the result that takes over its buffer) of every fragment.

    A buffer is taken over by a result whose pieces on each device have the same shape and dtype; where several would
    do, inputs and results are paired in their order. That is also how JAX pairs what is donated to a computation
    whose shardings are all given, so that no pair is left to XLA. What is left then is paired where the pieces have
    as many elements: the parts of a sum, which have a dimension more than the sum. An input that XLA could not write
    over until the result is complete is not given away at all.

    Args:
      program: the program.
      layout: the sharding of all its values.
      donatable: fragment -> positions of the inputs that die in every run of it and that the call owns.
    """
    pairs = {}
    apart: dict[int, frozenset[Pair]] = {}
    for index, positions in donatable.items():
        f = program.fragments[index]
        chosen = _pairs(f, layout, positions)
        while kept := {k for k, _ in _in_two_buffers(f.jaxpr, apart).intersection(chosen)}:
            positions = [k for k in positions if k not in kept]
            chosen = _pairs(f, layout, positions)
        if chosen:
            pairs[index] = tuple(chosen)
    return pairs


def _pairs(f: Fragment, layout: Layout, positions: Sequence[int]) -> list[Pair]:
    """Inputs of a fragment and results, paired in their order."""
    chosen: list[Pair] = []
    for size in (_shape, _count):
        waiting: dict[Any, deque[int]] = defaultdict(deque)
        paired_inputs, paired_results = {k for k, _ in chosen}, {o for _, o in chosen}
        for k in positions:
            if k not in paired_inputs:
                waiting[size(layout, f.invars[k], f.submesh)].append(k)
        for o, v in enumerate(f.outvars):
            if o not in paired_results and (same := waiting.get(size(layout, v, f.submesh))):
                chosen.append((same.popleft(), o))
    return chosen


def _in_two_buffers(jaxpr: Any, known: dict[int, frozenset[Pair]]) -> frozenset[Pair]:
    """The inputs and results that XLA has both at once: a loop cuts slices off the one, and stacks up the other.

    Were they one buffer, XLA would stack up a third one and copy it at the end.
    """
    if id(jaxpr) not in known:
        parts = _compat.open_jaxpr(jaxpr)
        inputs = {v: k for k, v in enumerate(parts.invars)}
        found: set[Pair] = set()
        for eqn in parts.eqns:
            if eqn.primitive.name == "scan" and _compat.scan_parts(eqn).length > 1:
                scan = _compat.scan_parts(eqn)
                cut, stacked = eqn.invars[scan.num_consts + scan.num_carry :], eqn.outvars[scan.num_carry :]
                found |= _these(inputs, parts.outvars, ((a, b) for a in cut for b in stacked))
            elif (body := call_body(eqn)) is not None:
                inner = _in_two_buffers(body, known)
                found |= _these(inputs, parts.outvars, ((eqn.invars[k], eqn.outvars[o]) for k, o in inner))
        known[id(jaxpr)] = frozenset(found)
    return known[id(jaxpr)]


def _these(inputs: Mapping[Any, int], outputs: Sequence[Any], pairs: Iterable[tuple[Any, Any]]) -> set[Pair]:
    """Those of some pairs of values that are an input and a result, as their positions."""
    places: dict[Any, list[int]] = defaultdict(list)
    for o, v in enumerate(outputs):
        if _compat.is_var(v):
            places[v].append(o)
    return {(inputs[a], o) for a, b in pairs if _compat.is_var(a) and a in inputs for o in places.get(b, ())}


def _shape(layout: Layout, v: Var, submesh: int) -> Any:
    """Shape, dtype and kind of memory of what a device holds of a value."""
    sharding = layout.sharding(v, submesh)
    return sharding.shard_shape(_compat.shape(v)), _compat.dtype(v), _compat.is_in_host_memory(v.aval)


def _count(layout: Layout, v: Var, submesh: int) -> Any:
    """Elements, dtype and kind of memory of what a device holds of a value."""
    piece, dtype, kind = _shape(layout, v, submesh)
    return math.prod(piece), dtype, kind
