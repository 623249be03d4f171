"""Gradients that a forward pass takes, such as the penalty of a critic or the inner step of a meta-learner, belong to it.

A schedule knows a forward and a backward pass. What transposes within the forward pass of an outer gradient is no backward
pass to it: the forward pass goes on with what comes of it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from .._program._flat import FlatProgram
from .._program._nodes import Node, nodes_where

# The outermost transformation of a name stack such as ``jvp(transpose(jvp(critic)))``.
_OUTERMOST = re.compile(r"\b(jvp|transpose)\(")


def advance_inner_gradients(flat: FlatProgram) -> FlatProgram:
    """Counts as forward what a gradient within the forward pass of another one computes."""
    backward = [n for n in flat.nodes if n.backward and n.loop is not None]
    around = {n.loop for n in backward if _outermost(n) == "transpose"}
    inner = {n: [replace(n, backward=False)] for n in backward if n.loop in around and is_inner(n)}
    return replace(flat, nodes=nodes_where(flat.nodes, inner), placement=None) if inner else flat


def is_inner(n: Node) -> bool:
    """Whether a node is in the forward pass of a gradient, if there is one around it, and transposes within it."""
    return _outermost(n) == "jvp"


def _outermost(n: Node) -> str:
    found = _OUTERMOST.search(n.stack)
    return found[1] if found else ""
