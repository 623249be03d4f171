"""A value that is cut into many equal pieces: one kernel for all of them.

Where a slice begins is part of its code, so that XLA compiles a kernel for each piece of a batch: 256 microbatches took 12
seconds. Here the executable is handed where each piece begins, and all pieces share one kernel.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from .. import _compat
from .._compat import Atom, Eqn, Jaxpr, Var
from .._program import Fragment

MANY = 4  # pieces; fewer are not worth arguments

# What a piece may be cut from: an input of the fragment in another form.
_FORMS = frozenset({"reshape", "squeeze", "transpose", "convert_element_type"})


@dataclass(frozen=True, eq=False)
class Cuts:
    """The pieces of a fragment that share a kernel.

    Attributes:
      begins: position of an equation that cuts a piece -> the dimension that it cuts along, and where the piece begins.
      starts: where pieces begin, each number once: what the executable is handed.
    """

    begins: Mapping[int, tuple[int, int]]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, f: Fragment, spec: Callable[[Var], PartitionSpec]) -> Cuts:
        """Finds them: where there are many of one value, and no device has only some of them.

        Args:
          f: the fragment.
          spec: the layout of its inputs.
        """
        begins = dict(_shared(f.jaxpr, spec))
        return cls(begins, tuple(sorted({start for _, start in begins.values()})))

    def jaxpr(self, f: Fragment) -> Jaxpr:
        """The fragment; after its inputs come as many int32 scalars as there are ``starts``."""
        if not self.begins:
            whole: Jaxpr = f.jaxpr
            return whole
        given = {start: _compat.new_var(jax.core.ShapedArray((), np.dtype(np.int32))) for start in self.starts}
        dynamic = functools.cache(_dynamic)
        eqns = list(f.jaxpr.eqns)
        for k, (dim, start) in self.begins.items():
            x, (piece,) = eqns[k].invars[0], eqns[k].outvars
            eqn = dynamic(_compat.abstract(x.aval), _compat.shape(piece), dim)
            invars = [x, *(given[start] if _compat.is_var(v) else v for v in eqn.invars[1:])]
            eqns[k] = eqn.replace(invars=invars, outvars=[piece], source_info=eqns[k].source_info)
        return _compat.new_jaxpr([*f.jaxpr.invars, *given.values()], f.jaxpr.outvars, eqns)


def _shared(jaxpr: Jaxpr, spec: Callable[[Var], PartitionSpec]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Which equations cut pieces that are to share a kernel, each with its dimension and where its piece begins."""
    groups: dict[Hashable, list[tuple[int, tuple[int, int]]]] = defaultdict(list)
    for k, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == "slice" and (found := _one_dimension(eqn)) is not None:
            groups[eqn.invars[0], _compat.shape(eqn.outvars[0]), found[0]].append((k, found))
    many = [pieces for pieces in groups.values() if len(pieces) >= MANY]
    if not many:
        return
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars if _compat.is_var(v)}
    for pieces in many:
        k, (dim, _) = pieces[0]
        if _is_whole(jaxpr.eqns[k].invars[0], dim, made, spec):
            yield from pieces


def _one_dimension(eqn: Eqn) -> tuple[int, int] | None:
    """The only dimension that a slice does not take whole, and where it begins there."""
    starts, limits, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    shape = _compat.shape(eqn.invars[0])
    dims = [d for d, size in enumerate(shape) if (starts[d], limits[d]) != (0, size)]
    if len(dims) != 1 or not _compat.is_var(eqn.invars[0]) or any(s != 1 for s in strides or ()):
        return None
    return dims[0], starts[dims[0]]


def _is_whole(x: Atom, dim: int, made: Mapping[Var, Eqn], spec: Callable[[Var], PartitionSpec]) -> bool:
    """Whether each device has all of a dimension. XLA would bring it there for a slice whose beginning it does not know."""
    changed = False
    while _compat.is_var(x) and x in made:
        if made[x].primitive.name not in _FORMS:
            return False
        changed, x = True, made[x].invars[0]
    if not _compat.is_var(x):
        return False
    entries = spec(x) if changed else spec(x)[dim : dim + 1]
    return all(entry is None for entry in entries)


def _dynamic(x: jax.ShapeDtypeStruct, sizes: tuple[int, ...], dim: int) -> Eqn:
    """The equation that cuts a piece whose beginning is an argument."""

    def piece(x: jax.Array, start: jax.Array) -> jax.Array:
        starts = [start if d == dim else np.int32(0) for d in range(len(sizes))]
        return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)

    eqn: Eqn
    (eqn,) = jax.make_jaxpr(piece)(x, jax.ShapeDtypeStruct((), np.int32)).eqns
    return eqn
