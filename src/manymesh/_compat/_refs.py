"""References (`jax.new_ref`): a program that only makes and uses them inside is one without them."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import core
from jax._src.state import discharge
from jax._src.state.types import AbstractRef

from ._jaxprs import Eqn, jaxprs_in, open_jaxpr, with_eqns, with_jaxprs

_MAKES = (core.ref_p, core.empty_ref_p)
_discharged = getattr(discharge, "discharge_state2", discharge.discharge_state)  # 0.10.0 and 0.10.1 have both


def is_ref(value: Any) -> bool:
    """Whether a value, or a variable of a jaxpr, is a reference."""
    return isinstance(value, jax.Ref) or isinstance(getattr(value, "aval", None), AbstractRef)


def without_refs(jaxpr: Any) -> Any:
    """A closed jaxpr without the references that are made in it.

    JAX replaces them when it compiles. Here a program is cut before that, and what writes to a reference may come into
    another fragment than what reads it.
    """
    done: dict[int, tuple[Any, Any]] = {}  # one jaxpr that many equations share stays one; kept, so that ids last

    def pure(jaxpr: Any) -> Any:
        if id(jaxpr) not in done:
            eqns, new = open_jaxpr(jaxpr).eqns, jaxpr
            if any(e.primitive in _MAKES for e in eqns) and hasattr(jaxpr, "consts"):
                new = _discharged(jaxpr)
                eqns = open_jaxpr(new).eqns
            inside = [pure_eqn(e) for e in eqns]
            changed = any(a is not b for a, b in zip(inside, eqns, strict=True))
            done[id(jaxpr)] = jaxpr, with_eqns(new, inside) if changed else new
        return done[id(jaxpr)][1]

    def pure_eqn(eqn: Eqn) -> Eqn:
        inner = jaxprs_in(eqn)
        if not inner or any(is_ref(v) for i in inner for v in open_jaxpr(i).invars):
            return eqn  # nothing in it, or a kernel, whose blocks are references
        return with_jaxprs(eqn, pure) if any(pure(i) is not i for i in inner) else eqn

    return pure(jaxpr)
