"""Jaxprs that JAX differentiates as fast as the functions they were traced from."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import numpy as np
from jax._src import api, source_info_util
from jax._src.interpreters import ad
from jax.interpreters.ad import Zero

from ._jaxprs import (
    Eqn,
    Literal,
    Var,
    call_params,
    call_template,
    close,
    is_jit,
    is_var,
    jaxprs_in,
    new_jaxpr,
    new_var,
    open_jaxpr,
    with_eqns,
)


def is_differentiated(values: Sequence[Any]) -> bool:
    """Whether what is computed from these values is being linearized, for `jax.grad` or `jax.vjp`."""
    return any(isinstance(x, ad.LinearizeTracer) and not isinstance(x.tangent, Zero) for x in values)


class Apart:
    """Makes jaxprs in which each equation that JAX would linearize anew is a call of a jaxpr shared by all like it.

    JAX linearizes a jaxpr once for all its calls, so that a function of `jax.numpy` costs that once; but an equation each
    time, with a trace of its own, a third of a millisecond. And a jitted function is traced to equations before it is
    differentiated. Its calls are like those of `jax.numpy`: JAX puts their equations in their place wherever it traces
    the call, so that none is in what linearizing leaves.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, dict[str, Any]] = {}

    def __call__(self, jaxpr: Any) -> Any:
        """The jaxpr, open or closed, with calls."""
        return with_eqns(jaxpr, [self._call(e) for e in open_jaxpr(jaxpr).eqns])

    def clear(self) -> None:
        """Lets go of the jaxprs."""
        self._calls.clear()

    def _call(self, eqn: Eqn) -> Eqn:
        primitive = eqn.primitive
        if (
            eqn.effects
            or primitive in ad.primitive_linearizations
            or primitive not in ad.primitive_jvps
            or jaxprs_in(eqn)
        ):
            return eqn
        reads: dict[Var, int] = {}
        try:
            atoms = tuple(
                _literal(a) if isinstance(a, Literal) else reads.setdefault(a, len(reads)) for a in eqn.invars
            )
            avals = tuple(v.aval for v in (*reads, *eqn.outvars))
            key = primitive, tuple(eqn.params.items()), atoms, avals, eqn.ctx
            params = self._calls.get(key)
        except TypeError:  # a parameter without a hash, a literal that is no number
            return eqn
        if params is None:
            inner = {v: new_var(v.aval) for v in reads}
            results = [new_var(v.aval) for v in eqn.outvars]
            invars = [inner[a] if is_var(a) else a for a in eqn.invars]
            source = source_info_util.new_source_info()
            body = new_jaxpr(
                list(inner.values()), results, [eqn.replace(invars=invars, outvars=results, source_info=source)]
            )
            params = call_params(primitive.name, close(body), len(inner), len(results)) | {"inline": _at_once()}
            self._calls[key] = params
        call: Eqn = eqn.replace(primitive=call_template().primitive, invars=list(reads), params=params)
        return call


def is_put_in_place(eqn: Eqn) -> bool:
    """Whether an equation is a call whose equations JAX puts in its place when it traces it, as `Apart` makes them."""
    return is_jit(eqn) and eqn.params["inline"] == _at_once()


def _literal(atom: Literal) -> Hashable:
    value = np.asarray(atom.val)
    return atom.aval, type(atom.val), value.tobytes()


@cache
def _at_once() -> Any:
    """What a call says whose equations JAX puts in its place when it traces it; 0.12 has several such words."""
    return api.Inline.JAX_EARLY if hasattr(api, "Inline") else True
