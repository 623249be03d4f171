"""Sums over submeshes: add up on each submesh first, cross once.

A parameter used by several stages gets one gradient from each; inside a microbatch loop each stage
keeps its own accumulator and the total is taken once after the loop. A global norm adds per-parameter
scalars: one partial sum a submesh, not one transfer a parameter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._compat import Var
from .._program._edit import Editor
from .._program._flat import FlatProgram
from .._program._nodes import Carry, Node, nodes_where, shape_and_dtype
from .._program._placement import Placement
from .._program._rewrite import making, trace_nodes

_ADDS = ("add", "add_any")


def regroup_sums(flat: FlatProgram) -> FlatProgram:
    """Rewrites every chain of additions whose terms lie on several submeshes. Needs the placement."""
    assert flat.placement is not None, "sums are regrouped by where their terms are"
    placement = flat.placement
    edit = Editor(flat)
    for i in range(len(flat.loops)):
        _split_accumulators(flat, edit, i, placement)
    return _regroup_chains(edit.result(), placement)


def is_addition(node: Node | None) -> bool:
    """Whether a node adds up variables of one shape and dtype."""
    if node is None or node.task is not None or node.primitive not in _ADDS:
        return False
    result = shape_and_dtype(node.eqn.outvars[0])
    return all(_compat.is_var(v) and shape_and_dtype(v) == result for v in node.eqn.invars)


def terms_of_sum(
    root: Var, producer: Mapping[Var, Node], uses: Counter[Var], loop: int | None
) -> tuple[list[Var], list[Node]]:
    """The terms of a sum, left to right, and the additions that make it up."""
    node = producer.get(root)
    if node is None or not is_addition(node) or node.loop != loop:
        return [root], []
    terms: list[Var] = []
    nodes = [node]
    stack = list(node.inputs[::-1])
    while stack:
        v = stack.pop()
        inner = producer.get(v)
        if inner is not None and is_addition(inner) and uses[v] == 1 and inner.loop == loop:
            nodes.append(inner)
            stack += inner.inputs[::-1]
        else:
            terms.append(v)
    return terms, nodes


def _split_accumulators(flat: FlatProgram, edit: Editor, loop: int, placement: Placement) -> None:
    """Gives every submesh that adds to an accumulator one of its own; their sum is taken after the loop."""
    index = flat.index
    for carry in flat.loops[loop].carries:
        if index.uses[carry.inner] != 1 or index.uses[carry.out] != 1:
            continue
        terms, nodes = terms_of_sum(carry.out, index.producer, index.uses, loop)
        if carry.inner not in terms:
            continue
        groups = _by_submesh([t for t in terms if t is not carry.inner], placement)
        if len(groups) < 2:
            continue
        inside: list[Node] = []
        carries: list[Carry] = []
        for i, group in enumerate(groups):
            inner = carry.inner if i == 0 else _compat.new_var(carry.inner.aval)
            made, (out,) = trace_nodes(lambda *xs: _sum(xs), [inner, *group], loop=loop, backward=nodes[0].backward)
            inside += made
            init = carry.init if i == 0 else _zeros(edit, carry.inner)
            carries.append(Carry(inner, out, init, _compat.new_var(carry.final.aval)))
        edit.replace_carry(loop, carry, carries)
        for n in nodes:
            edit.replace_node(n, [])
        edit.replace_node(max(nodes, key=index.position.__getitem__), inside)
        total, _ = trace_nodes(lambda *xs: _sum(xs), [c.final for c in carries])
        total[-1] = making(total[-1], [carry.final])
        edit.after_loop(loop, total)


def _zeros(edit: Editor, like: Var) -> Var:
    shape, dtype = shape_and_dtype(like)
    nodes, (out,) = trace_nodes(lambda: lax.optimization_barrier(jnp.zeros(shape, dtype)), [], layout_follows_loop=True)
    edit.at_start(nodes)
    new: Var = out
    return new


def _regroup_chains(flat: FlatProgram, placement: Placement) -> FlatProgram:
    """Adds up on each submesh first, wherever a sum's terms lie on several."""
    producer, uses = flat.index.producer, flat.index.uses
    done: set[Node] = set()
    replaced: dict[Node, list[Node]] = {}
    for root in reversed(flat.nodes):
        if root in done or not is_addition(root) or not root.outputs:
            continue
        (result,) = root.outputs
        terms, nodes = terms_of_sum(result, producer, uses, root.loop)
        done.update(nodes)
        groups = _by_submesh(terms, placement)
        if len(nodes) < 2 or len(groups) < 2 or all(len(g) == 1 for g in groups) or _is_grouped(nodes, placement):
            continue
        made: list[Node] = []
        subtotals = []
        for group in groups:
            new, (out,) = trace_nodes(lambda *xs: _sum(xs), group, loop=root.loop, backward=root.backward)
            made += new
            subtotals.append(out)
        new, _ = trace_nodes(lambda *xs: _sum(xs), subtotals, loop=root.loop, backward=root.backward)
        new[-1] = making(new[-1], [result])
        replaced.update({n: [] for n in nodes})
        replaced[root] = made + new
    if not replaced:
        return flat
    return replace(flat, nodes=nodes_where(flat.nodes, replaced), placement=None)


def _is_grouped(nodes: Sequence[Node], placement: Placement) -> bool:
    """Whether the sum already adds up locally: at most (submeshes - 1) additions read from elsewhere."""
    crossing = sum(
        any(v in placement.home and placement.home[v] not in placement.node.get(n, ()) for v in n.inputs) for n in nodes
    )
    places = {placement.home[v] for n in nodes for v in n.inputs if v in placement.home}
    return crossing <= max(len(places) - 1, 0)


def _sum(xs: tuple[Any, ...]) -> jax.Array:
    total = xs[0]
    for x in xs[1:]:
        total = lax.add(total, x)
    new: jax.Array = total
    return new


def _by_submesh(terms: Sequence[Var], placement: Placement) -> list[list[Var]]:
    groups: dict[int, list[Var]] = defaultdict(list)
    for t in terms:
        groups[placement.home.get(t, -1)].append(t)
    return [groups[k] for k in sorted(groups)]
