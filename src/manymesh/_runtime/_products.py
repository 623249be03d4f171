"""Products over several dimensions that lie side by side, as products over one.

The gradient of a kernel is a product over sequences and positions. For each such product XLA on CPU first writes a factor
anew, those dimensions last: of a layer of 256 by 1024 that is a quarter of the time. Seen as one dimension, which moves
nothing, they are read where they are. On submeshes of several devices one of them may be sharded, and then they are not one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding

from .. import _compat
from .._compat import Eqn, Var
from .._program._rewrite import substitute

Run = tuple[tuple[int, int], ...]  # dimensions of the first factor and of the second one, side by side in both


class Products:
    """Rewrites jaxprs; the same object for the same object, so that JAX lowers equal layers once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # by id, with the jaxpr so that the id stays its own

    def joined(self, jaxpr: Any) -> Any:
        """The jaxpr, open or closed, with its products over one dimension; itself where there is nothing to join."""
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = jaxpr, self._rewritten(jaxpr)
        return self._known[id(jaxpr)][1]

    def _rewritten(self, jaxpr: Any) -> Any:
        before = _compat.open_jaxpr(jaxpr).eqns
        after = [e for eqn in before for e in self._equations(eqn)]
        same = len(after) == len(before) and all(a is b for a, b in zip(after, before, strict=True))
        return jaxpr if same else _compat.with_eqns(jaxpr, after)

    def _equations(self, eqn: Eqn) -> Sequence[Eqn]:
        if eqn.primitive is lax.dot_general_p:
            return _product(eqn)
        inner = _compat.jaxprs_in(eqn)
        if all(self.joined(jaxpr) is jaxpr for jaxpr in inner):
            return [eqn]
        return [_compat.with_jaxprs(eqn, self.joined)]


def _product(eqn: Eqn) -> Sequence[Eqn]:
    """A product as the equations that compute it over fewer dimensions; itself where that cannot be."""
    (a, b), batch = eqn.params["dimension_numbers"]
    if len(a) < 2 or any(map(len, batch)) or _is_explicit(eqn.params["out_sharding"]):
        return [eqn]
    runs = _side_by_side(tuple(zip(a, b, strict=True)))
    if len(runs) == len(a):
        return [eqn]
    x, y = (_compat.abstract(v.aval) for v in eqn.invars)
    equations, inputs = _template(x, y, runs)
    env: dict[Var, Any] = dict(zip(inputs, eqn.invars, strict=True))
    *reshapes, product = (substitute(e, env).replace(source_info=eqn.source_info) for e in equations)
    params = eqn.params | {"dimension_numbers": product.params["dimension_numbers"]}
    return [*reshapes, product.replace(params=params, outvars=eqn.outvars)]


def _is_explicit(sharding: Any) -> bool:
    """Whether the types of values say how they lie."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def _side_by_side(pairs: Sequence[tuple[int, int]]) -> tuple[Run, ...]:
    """Pairs of dimensions in groups, each of dimensions that follow each other in both factors."""
    runs: list[list[tuple[int, int]]] = []
    for a, b in sorted(pairs):
        if runs and runs[-1][-1] == (a - 1, b - 1):
            runs[-1].append((a, b))
        else:
            runs.append([(a, b)])
    return tuple(map(tuple, runs))


@functools.lru_cache(256)
def _template(x: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct, runs: tuple[Run, ...]) -> tuple[list[Eqn], list[Var]]:
    """The equations of a product over one dimension for each run, and the variables of its factors."""

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        (x, a), (y, b) = (_merged(z, [[pair[k] for pair in run] for run in runs]) for k, z in enumerate((x, y)))
        return lax.dot_general(x, y, ((a, b), ((), ())))

    with _compat.without_mesh():
        parts = _compat.open_jaxpr(jax.make_jaxpr(product)(x, y))
    return parts.eqns, parts.invars


def _merged(x: jax.Array, runs: Sequence[Sequence[int]]) -> tuple[jax.Array, list[int]]:
    """An array with each run of its dimensions as one, and where these are then."""
    begins = {run[0]: len(run) for run in runs}
    shape: list[int] = []
    places: dict[int, int] = {}
    dim = 0
    while dim < x.ndim:
        places[dim] = len(shape)
        length = begins.get(dim, 1)
        shape.append(math.prod(x.shape[dim : dim + length]))
        dim += length
    return x.reshape(shape), [places[run[0]] for run in runs]
