"""Which primitives are calls: the one table.

A call has a jaxpr whose operands and results are those of the equation. Control flow (``scan``, ``while``, ``cond``)
and ``shard_map``, whose body sees other shapes, are none.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import _compat
from .._compat import AbstractJaxpr, Atom, Eqn, OpenJaxpr, Var
from ._rewrite import substitute


@dataclass(frozen=True)
class Call:
    """What may be done with a call.

    Attributes:
      body: names of the parameter that holds its jaxpr; the first that is there counts.
      transparent: whether it means no more than its body once everything is traced. A jitted update of all parameters,
        such as Optax has, would otherwise pull them all to one submesh. Not so rematerialisation, which keeps XLA from
        undoing it.
      rewritable: whether its body can be replaced by another one. A call that carries rules for its derivatives
        would then no longer fit them.
    """

    body: tuple[str, ...]
    transparent: bool = True
    rewritable: bool = True


CALLS = {
    "jit": Call(("jaxpr",)),
    "pjit": Call(("jaxpr",)),
    "closed_call": Call(("call_jaxpr",)),
    "core_call": Call(("call_jaxpr",)),
    "eval_jaxpr": Call(("call_jaxpr",)),  # JAX 0.12: what a function that was traced before leaves
    # What `custom_vjp` with ``optimize_remat`` leaves where nobody differentiates: its forward pass.
    "remat_opt": Call(("fwd_jaxpr",), rewritable=False),
    "checkpoint": Call(("jaxpr",), transparent=False),
    "remat": Call(("jaxpr",), transparent=False),
    "remat2": Call(("jaxpr",), transparent=False),
    "custom_vmap_call": Call(("call",), rewritable=False),
    "linear_call": Call(("callee",), rewritable=False),
    "custom_jvp_call": Call(("call_jaxpr",), rewritable=False),
    "custom_vjp_call": Call(("call_jaxpr", "fun_jaxpr"), rewritable=False),
}


def call_body(eqn: Eqn) -> AbstractJaxpr | None:
    """The jaxpr of a call; None for an equation that is no call."""
    call = CALLS.get(eqn.primitive.name)
    if call is None:
        return None
    return next((eqn.params[k] for k in call.body if _compat.is_jaxpr(eqn.params.get(k))), None)


def is_transparent(eqn: Eqn) -> bool:
    """Whether an equation is a call that means no more than its body."""
    call = CALLS.get(eqn.primitive.name)
    # Rematerialisation that nobody differentiated has nothing to compute again.
    return call is not None and (call.transparent or eqn.params.get("differentiated") is False)


def leaf_by_leaf(eqn: Eqn) -> list[Eqn]:
    """What an equation does to each leaf of a tree alone, where it does no more; else the equation.

    ``jax.device_put(grads)``, as solvers of ``jax.scipy`` have it too, would pull all of them to one submesh.
    """
    if eqn.primitive.name not in ("device_put", "optimization_barrier") or len(eqn.outvars) < 2:
        return [eqn]
    leaves = range(len(eqn.outvars))
    # Each parameter has an entry for each leaf.
    params = [{name: value[k : k + 1] for name, value in eqn.params.items()} for k in leaves]
    return [eqn.replace(invars=[eqn.invars[k]], outvars=[eqn.outvars[k]], params=params[k]) for k in leaves]


def is_rewritable(eqn: Eqn) -> bool:
    """Whether an equation is a call whose body can be replaced by another one."""
    call = CALLS.get(eqn.primitive.name)
    return call is not None and call.rewritable


def calls_back(eqn: Eqn) -> bool:
    """Whether the host computes something for an equation, who may say something else, or pay again, each time."""
    return eqn.primitive.name == "pure_callback" or any(
        calls_back(e) for jaxpr in _compat.jaxprs_in(eqn) for e in _compat.open_jaxpr(jaxpr).eqns
    )


def inlined(eqns: list[Eqn], *, all_calls: bool = True) -> tuple[list[Eqn], dict[Var, Atom]]:
    """Equations with all calls opened, so that what is inside can be told apart. Derivatives have to be taken already.

    They keep the names around them: a profile says which layer an operation belongs to.

    Args:
      eqns: the equations.
      all_calls: whether those are opened, too, that mean more than their body.

    Returns:
      The equations, and for each variable that is now called otherwise the one that stands for it.
    """
    env: dict[Var, Atom] = {}
    out: list[Eqn] = []

    def walk(inner: list[Eqn], sub: dict[Var, Atom], around: Eqn | None) -> None:
        for e in (_compat.within(e, around) for e in inner):
            body = call_body(e) if all_calls or is_transparent(e) else None
            parts = _compat.open_jaxpr(body) if body is not None else None
            if parts is None or parts.consts:
                out.append(substitute(e, sub))
                continue
            operands = [sub.get(v, v) if _compat.is_var(v) else v for v in e.invars]
            deeper: dict[Var, Atom] = dict(zip(parts.invars, operands, strict=True))
            walk(parts.eqns, deeper, e)
            for outer, result in zip(e.outvars, parts.outvars, strict=True):
                if _compat.is_var(outer):
                    sub[outer] = deeper.get(result, result) if _compat.is_var(result) else result

    walk(eqns, env, None)
    return out, env


def inlined_jaxpr(jaxpr: AbstractJaxpr | OpenJaxpr, *, all_calls: bool = True) -> tuple[list[Eqn], list[Atom]]:
    """The equations of a jaxpr as `inlined` gives them, and what its results are then called."""
    parts = _compat.open_jaxpr(jaxpr)
    eqns, env = inlined(parts.eqns, all_calls=all_calls)
    return eqns, [env.get(v, v) if _compat.is_var(v) else v for v in parts.outvars]
