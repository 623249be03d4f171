"""Dead code in the flat program, also inside tasks."""

from __future__ import annotations

from typing import Any

from .. import _compat
from ._nodes import Flat, Loop, Node


def remove_dead(flat: Flat) -> None:
    """Drops, in place, every equation whose results nobody reads, and the unread results of tasks.

    Loops keep only the carries and collected values that are read after them; this repeats until
    nothing changes, because a dropped carry can free what only it read.
    """
    while True:
        live = {v for v in flat.outvars if _compat.is_var(v)}
        live |= _live_through_loops(flat, live)
        kept: list[Node] = []
        for node in reversed(flat.nodes):
            used = [_compat.is_var(v) and v in live for v in node.eqn.outvars]
            if not any(used) and not node.eqn.effects:
                continue
            if node.task is not None and not all(used):
                node = _trim_task(node, used)
            live.update(node.inputs)
            kept.append(node)
        changed = len(kept) != len(flat.nodes)
        flat.nodes = kept[::-1]
        changed |= _drop_from_loops(flat)
        if not changed:
            return


def _live_through_loops(flat: Flat, live: set[Any]) -> set[Any]:
    found: set[Any] = set()
    for loop in flat.loops:
        for carry in loop.carries:
            found |= {v for v in (carry.out, carry.init) if _compat.is_var(v)}
        for pieces in loop.cut:
            found |= {v for v in pieces.outer if _compat.is_var(v)}
        for pieces in loop.collected:
            found |= {v for v in (pieces.inner,) if _compat.is_var(v)}
    return found


def _drop_from_loops(flat: Flat) -> bool:
    read = {v for v in flat.outvars if _compat.is_var(v)}
    for node in flat.nodes:
        read.update(node.inputs)
    for loop in flat.loops:
        read |= {v for c in loop.carries for v in (c.init,) if _compat.is_var(v)}
        read |= {v for p in loop.cut for v in p.outer if _compat.is_var(v)}
    changed = False
    for loop in flat.loops:
        # A carry is alive if its final value is read, or if something other than its own update reads it.
        read_by_others = _read_by_others(flat, loop)
        carries = [c for c in loop.carries if c.final in read or c.inner in read_by_others]
        cut = [p for p in loop.cut if p.inner in read or any(p.inner is c.out for c in carries)]
        collected = [p for p in loop.collected if any(v in read for v in p.outer)]
        if (len(carries), len(cut), len(collected)) != (len(loop.carries), len(loop.cut), len(loop.collected)):
            changed = True
        loop.carries, loop.cut, loop.collected = carries, cut, collected
    return changed


def _read_by_others(flat: Flat, loop: Loop) -> set[Any]:
    """What the body reads of the carries, but for the equations that only make a carry's next value of it."""
    out = {c.inner: c.out for c in loop.carries}
    return {
        v
        for node in flat.nodes
        if node.loop is loop
        for v in node.inputs
        if v in out and not all(made is out[v] for made in node.outputs)
    }


def _trim_task(node: Node, used: list[bool]) -> Node:
    """The task's equation without the results that nobody reads; operands it then needs no more go too."""
    outs = [v for v, u in zip(node.eqn.outvars, used, strict=True) if u]
    invars = list(dict.fromkeys(node.inputs))
    small, used_in = _compat.dce(_compat.new_jaxpr(invars, outs, [node.eqn]), [True] * len(outs))
    (eqn,) = small.eqns
    return Node(eqn, node.task, node.backward, node.loop, node.deferred, node.weight, stack=node.stack)
