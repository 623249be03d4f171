"""Sums over submeshes: add up on each submesh first, cross once.

A parameter used by several stages gets one gradient from each; inside a microbatch loop each stage
keeps its own accumulator and the total is taken once after the loop. A global norm adds per-parameter
scalars: one partial sum a submesh, not one transfer a parameter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._jaxpr._nodes import Carry, Flat, Loop, Node, trace_nodes
from ._place import Placement

_ADDS = ("add", "add_any")


def regroup_sums(flat: Flat, where: Placement) -> bool:
    """Rewrites, in place, every chain of additions whose terms lie on several submeshes.

    Returns:
      Whether anything changed; placement is then taken anew.
    """
    changed = False
    for loop in flat.loops:
        changed |= _split_accumulators(flat, loop, where)
    return changed | _regroup_chains(flat, where)


def _is_add(node: Node | None) -> bool:
    if node is None or node.task is not None or node.eqn.primitive.name not in _ADDS:
        return False
    out = node.eqn.outvars[0].aval
    return all(_compat.is_var(v) and v.aval.shape == out.shape and v.aval.dtype == out.dtype for v in node.eqn.invars)


def _uses(flat: Flat) -> Counter[Any]:
    uses: Counter[Any] = Counter()
    for n in flat.nodes:
        uses.update(v for v in n.eqn.invars if _compat.is_var(v))
    uses.update(v for v in flat.outvars if _compat.is_var(v))
    for loop in flat.loops:
        uses.update(v for c in loop.carries for v in (c.out, c.init) if _compat.is_var(v))
        uses.update(v for p in loop.cut for v in p.outer if _compat.is_var(v))
        uses.update(v for p in loop.collected for v in (p.inner,) if _compat.is_var(v))
    return uses


def _terms(root: Any, producer: dict[Any, Node], uses: Counter[Any], loop: Any) -> tuple[list[Any], list[Node]]:
    """The terms of a sum, left to right, and the additions that make it up."""
    node = producer.get(root)
    if not _is_add(node) or node is None or node.loop is not loop:
        return [root], []
    terms: list[Any] = []
    nodes: list[Node] = []
    stack = [(v, False) for v in reversed(node.eqn.invars)]
    nodes.append(node)
    while stack:
        v, _ = stack.pop()
        inner = producer.get(v)
        if inner is not None and _is_add(inner) and uses[v] == 1 and inner.loop is loop:
            nodes.append(inner)
            stack += [(w, False) for w in reversed(inner.eqn.invars)]
        else:
            terms.append(v)
    return terms, nodes


def _split_accumulators(flat: Flat, loop: Loop, where: Placement) -> bool:
    producer = {v: n for n in flat.nodes for v in n.outputs}
    uses = _uses(flat)
    changed = False
    for carry in list(loop.carries):
        if uses[carry.inner] != 1 or uses[carry.out] != 1:
            continue
        terms, nodes = _terms(carry.out, producer, uses, loop)
        if carry.inner not in terms:
            continue
        groups = _by_submesh([t for t in terms if t is not carry.inner], producer, where)
        if len(groups) < 2:
            continue
        new_nodes: list[Node] = []
        finals = []
        for i, group in enumerate(groups):
            inner = carry.inner if i == 0 else _compat.new_var(carry.inner.aval)
            made, (out,) = trace_nodes(lambda *xs: _sum(xs), [inner, *group], loop=loop, backward=nodes[0].backward)
            new_nodes += made
            init = carry.init if i == 0 else _zeros(flat, carry.inner.aval)
            finals.append(_compat.new_var(carry.final.aval))
            loop.carries.append(Carry(inner, out, init, finals[-1]))
        loop.carries.remove(carry)
        at = max(flat.nodes.index(n) for n in nodes)
        flat.nodes[at:at] = new_nodes
        total, (out,) = trace_nodes(lambda *xs: _sum(xs), finals)
        _rename_result(total, out, carry.final)
        last_body = max(i for i, n in enumerate(flat.nodes) if n.loop is loop)
        flat.nodes[last_body + 1 : last_body + 1] = total
        dropped = set(nodes)
        flat.nodes = [n for n in flat.nodes if n not in dropped]
        changed = True
    return changed


def _zeros(flat: Flat, aval: Any) -> Any:
    nodes, (out,) = trace_nodes(lambda: lax.optimization_barrier(jnp.zeros(aval.shape, aval.dtype)), [], deferred=True)
    flat.nodes[0:0] = nodes
    return out


def _regroup_chains(flat: Flat, where: Placement) -> bool:
    producer = {v: n for n in flat.nodes for v in n.outputs}
    uses = _uses(flat)
    done: set[Node] = set()
    replaced: dict[Node, list[Node]] = {}
    dropped: set[Node] = set()
    for root in reversed(flat.nodes):
        if root in done or not _is_add(root):
            continue
        terms, nodes = _terms(root.outputs[0], producer, uses, root.loop) if root.outputs else ([], [])
        done.update(nodes)
        groups = _by_submesh(terms, producer, where)
        if len(nodes) < 2 or len(groups) < 2 or all(len(g) == 1 for g in groups) or _is_grouped(nodes, where):
            continue
        made: list[Node] = []
        partial = []
        for group in groups:
            new, (out,) = trace_nodes(lambda *xs: _sum(xs), group, loop=root.loop, backward=root.backward)
            made += new
            partial.append(out)
        new, (out,) = trace_nodes(lambda *xs: _sum(xs), partial, loop=root.loop, backward=root.backward)
        _rename_result(new, out, root.outputs[0])
        replaced[root] = made + new
        dropped.update(nodes)
    if not replaced:
        return False
    flat.nodes = [m for n in flat.nodes for m in replaced.get(n, [] if n in dropped else [n])]
    return True


def _is_grouped(nodes: list[Node], where: Placement) -> bool:
    """Whether the sum already adds up locally: at most (submeshes - 1) additions read from elsewhere."""
    crossing = sum(
        any(where.home.get(v) is not None and where.home[v] not in where.node.get(n, ()) for v in n.inputs)
        for n in nodes
    )
    places = {p for n in nodes for v in n.inputs for p in (where.home.get(v),) if p is not None}
    return crossing <= max(len(places) - 1, 0)


def _sum(xs: Any) -> Any:
    total = xs[0]
    for x in xs[1:]:
        total = lax.add(total, x)
    return total


def _by_submesh(terms: list[Any], producer: dict[Any, Node], where: Placement) -> list[list[Any]]:
    groups: dict[Any, list[Any]] = defaultdict(list)
    for t in terms:
        groups[where.home.get(t)].append(t)
    return [groups[k] for k in sorted(groups, key=lambda k: -1 if k is None else k)]


def _rename_result(nodes: list[Node], old: Any, new: Any) -> None:
    last = nodes[-1]
    assert last.eqn.outvars[0] is old, "a sum ends in its last addition"
    last.eqn = last.eqn.replace(outvars=[new])
