"""Making and changing equations of a flat program, structurally: parameters and source information stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import jax

from .. import _compat
from .._compat import Atom, Eqn, Var
from ._flat import FlatProgram
from ._nodes import Loop, Node


class Tags(TypedDict, total=False):
    """What a node says besides its equation."""

    task: str | None
    backward: bool
    loop: int | None
    layout_follows_loop: bool
    unstacks: bool
    mesh: jax.sharding.Mesh | None


def trace_nodes(
    fun: Callable[..., Any], operands: Sequence[Atom], **tags: Unpack[Tags]
) -> tuple[list[Node], list[Any]]:
    """Equations of a small function applied to variables of a flat program, as nodes.

    Returns:
      The nodes, and the variables (or literals) that hold the results.
    """
    eqns, outs = trace_eqns(fun, operands)
    return [Node(e, **tags) for e in eqns], outs


def trace_eqns(fun: Callable[..., Any], operands: Sequence[Atom]) -> tuple[list[Eqn], list[Any]]:
    """As `trace_nodes`, without what a node says besides its equation."""
    avals = [_compat.on_no_mesh(v.aval) for v in operands]
    with _compat.without_mesh(), _compat.wide_values(operands):
        parts = _compat.open_jaxpr(jax.make_jaxpr(fun)(*avals))
    assert not parts.consts, "internal functions close over nothing"
    env: dict[Var, Atom] = dict(zip(parts.invars, operands, strict=True))
    eqns = [substitute(eqn, env) for eqn in parts.eqns]
    return eqns, [env.get(v, v) if _compat.is_var(v) else v for v in parts.outvars]


def of_one_operand(eqn: Eqn) -> Callable[[Any], Any]:
    """An equation of one operand and literals, as a function of another operand."""

    def same(x: Any) -> Any:
        operands = [v.val if isinstance(v, _compat.Literal) else x for v in eqn.invars]
        return eqn.primitive.bind(*operands, **eqn.params)

    return same


def substitute(eqn: Eqn, env: dict[Var, Atom]) -> Eqn:
    """The equation with its operands replaced, and fresh result variables entered into ``env``."""
    outvars: list[Any] = []
    for v in eqn.outvars:
        if _compat.is_var(v):
            env[v] = fresh = _compat.new_var(v.aval)
            outvars.append(fresh)
        else:
            outvars.append(v)
    return with_atoms(eqn, env, outvars)


def with_atoms(eqn: Eqn, env: Mapping[Var, Atom], outvars: Sequence[Var] | None = None) -> Eqn:
    """The equation that reads other variables, and makes others if they are given."""
    invars = [env.get(v, v) if _compat.is_var(v) else v for v in eqn.invars]
    new: Eqn = eqn.replace(invars=invars, outvars=list(eqn.outvars if outvars is None else outvars))
    return new


def reading(node: Node, env: Mapping[Var, Atom]) -> Node:
    """The node that reads other variables; the node itself if it reads none of them."""
    guard = tuple((env.get(v, v) if _compat.is_var(v) else v, number) for v, number in node.guard)
    if not any(v in env for v in node.inputs) and guard == node.guard:
        return node
    return replace(node, eqn=with_atoms(node.eqn, env), guard=guard)


def making(node: Node, outvars: Sequence[Var]) -> Node:
    """The node that makes other variables."""
    return replace(node, eqn=node.eqn.replace(outvars=list(outvars)))


def rename(flat: FlatProgram, alias: Mapping[Var, Atom]) -> FlatProgram:
    """Reads every variable of ``alias`` under its other name, in the whole program."""
    if not alias:
        return flat
    final: dict[Var, Atom] = {}
    for v in alias:
        now: Atom = v
        while _compat.is_var(now) and now in alias:
            now = alias[now]
        final[v] = now

    def atom(v: Any) -> Any:
        return final.get(v, v) if _compat.is_var(v) else v

    return replace(
        flat,
        nodes=tuple(reading(n, final) for n in flat.nodes),
        outvars=tuple(atom(v) for v in flat.outvars),
        stacked={atom(v): tuple(atom(w) for w in column) for v, column in flat.stacked.items()},
        loops=tuple(_renamed(loop, atom) for loop in flat.loops),
        placement=None,
    )


def _renamed(loop: Loop, atom: Callable[[Any], Any]) -> Loop:
    return replace(
        loop,
        carries=tuple(replace(c, out=atom(c.out), init=atom(c.init)) for c in loop.carries),
        xs=tuple(replace(p, outer=tuple(atom(v) for v in p.outer)) for p in loop.xs),
        ys=tuple(replace(p, inner=atom(p.inner)) for p in loop.ys),
    )
