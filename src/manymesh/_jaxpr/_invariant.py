"""Constants inside loops: to their one reader, or out of the loop."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .. import _compat
from ._nodes import Flat, Node, nbytes

SMALL = 1024  # bytes


def settle_constants(flat: Flat) -> None:
    """Moves, in place, what every microbatch would compute alike.

    An unmarked equation of a loop's body that depends on nothing, or a small one that depends only on
    values from outside, takes the phase of its only reader, so that it fuses with it. With several
    readers it leaves the loop and is computed once.
    """
    readers: dict[Any, list[Node]] = defaultdict(list)
    for n in flat.nodes:
        for v in dict.fromkeys(n.inputs):
            readers[v].append(n)
    for loop in flat.loops:
        inside = {c.inner for c in loop.carries} | {p.inner for p in loop.cut}
        inside |= {v for n in flat.nodes if n.loop is loop for v in n.outputs}
        leaving = {c.out for c in loop.carries if _compat.is_var(c.out)}
        leaving |= {p.inner for p in loop.collected if _compat.is_var(p.inner)}
        invariant: set[Any] = set()
        candidates = []
        for n in flat.nodes:
            if n.loop is not loop or n.task is not None or n.eqn.effects or any(v in leaving for v in n.outputs):
                continue
            outside = all(v not in inside or v in invariant for v in n.inputs)
            small = sum(nbytes(v.aval) for v in n.outputs) <= SMALL
            if outside and (small or not n.inputs):
                invariant.update(n.outputs)
                candidates.append(n)
        for n in reversed(candidates):
            found = list(dict.fromkeys(r for v in n.outputs for r in readers[v]))
            if len(found) == 1 and found[0].loop is loop:
                n.backward = found[0].backward
        hoisted: set[Any] = set()
        for n in candidates:
            found = list(dict.fromkeys(r for v in n.outputs for r in readers[v]))
            if len(found) != 1 and all(v not in invariant or v in hoisted for v in n.inputs):
                n.loop, n.backward = None, False
                hoisted.update(n.outputs)
