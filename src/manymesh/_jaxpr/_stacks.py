"""Gradients of stacked layers: each layer keeps its own accumulator where it runs.

The gradient of a scan over layers is a stack, one slice a layer. Added up as a whole, it would gather
every layer's gradient on one submesh in every microbatch. A sum of stacks is a stack of sums: the
slices are added where they are made, and stacked once after the loop.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
from jax import lax

from .. import _compat
from ._nodes import Carry, Flat, Loop, Node, trace_nodes

_ADDS = ("add", "add_any")
# Of one operand and shape-blind: their parameters are right for a slice as they are for the stack.
_ELEMENTWISE = {"convert_element_type", "neg", "copy", "real", "mul", "div"}


def sum_layers_apart(flat: Flat) -> bool:
    """Rewrites, in place, every accumulator of stacked values into one for each slice.

    Returns:
      Whether anything changed; the whole-stack equations are then dead.
    """
    producer = {v: n for n in flat.nodes for v in n.outputs}
    uses = Counter(v for n in flat.nodes for v in n.inputs)
    changed = False
    for loop in flat.loops:
        elsewhere = Counter(v for c in loop.carries for v in (c.out, c.init) if _compat.is_var(v))
        elsewhere.update(p.inner for p in loop.collected)
        for carry in list(loop.carries):
            if uses[carry.inner] == 1 and not elsewhere[carry.inner] and elsewhere[carry.out] == 1:
                changed |= uses[carry.out] == 0 and _split(flat, loop, carry, producer)
    return changed


def _split(flat: Flat, loop: Loop, carry: Carry, producer: dict[Any, Node]) -> bool:
    add = producer.get(carry.out)
    if add is None or add.eqn.primitive.name not in _ADDS or carry.inner not in add.inputs or len(add.inputs) != 2:
        return False
    (term,) = [v for v in add.inputs if v is not carry.inner] or [None]
    chain: list[Node] = []
    while term not in flat.stacked:
        node = producer.get(term)
        if node is None or node.eqn.primitive.name not in _ELEMENTWISE or len(node.inputs) != 1:
            return False
        if any(v.aval.shape for v in node.eqn.invars if not _compat.is_var(v)):
            return False
        chain.append(node)
        term = node.inputs[0]
    column = flat.stacked[term]
    if len(column) < 2 or not all(_compat.is_var(v) for v in column):
        return False
    start = flat.nodes.index(add)
    new: list[Node] = []
    before: list[Node] = []
    finals = []
    for i, piece in enumerate(column):
        for node in reversed(chain):
            made, (piece,) = trace_nodes(_Same(node.eqn), [piece], loop=loop, backward=add.backward)
            new += made
        inner = _compat.new_var(jax.core.ShapedArray(carry.inner.aval.shape[1:], carry.inner.aval.dtype))
        made, (out,) = trace_nodes(lax.add, [inner, piece], loop=loop, backward=add.backward)
        new += made
        made, init = _start(carry, i, producer)
        before += made
        finals.append(_compat.new_var(inner.aval))
        loop.carries.append(Carry(inner, out, init, finals[-1]))
    after, (total,) = trace_nodes(lambda *xs: jax.numpy.stack(xs), finals)
    after[-1].eqn = after[-1].eqn.replace(outvars=[carry.final])
    assert after[-1].eqn.outvars[0] is not total, "the stack takes the accumulator's name"
    flat.stacked[carry.final] = finals
    loop.carries.remove(carry)
    flat.nodes[start:start] = new
    last = max(k for k, n in enumerate(flat.nodes) if n.loop is loop)
    flat.nodes[last + 1 : last + 1] = after
    first = min(k for k, n in enumerate(flat.nodes) if n.loop is loop)
    flat.nodes[first:first] = before
    return True


def _start(carry: Carry, i: int, producer: dict[Any, Node]) -> tuple[list[Node], Any]:
    """What a layer's accumulator starts from. Zeros are made for each layer: all of them would take a whole stack."""
    made = producer.get(carry.init)
    if made is not None and made.eqn.primitive.name == "broadcast_in_dim":
        kept = made.eqn.params["broadcast_dimensions"]
        if 0 not in kept:
            shape = carry.inner.aval.shape[1:]
            params = {**made.eqn.params, "shape": shape, "broadcast_dimensions": tuple(d - 1 for d in kept)}
            out = _compat.new_var(jax.core.ShapedArray(shape, carry.inner.aval.dtype))
            return [Node(made.eqn.replace(outvars=[out], params=params), deferred=True)], out
    nodes, (out,) = trace_nodes(lambda a: lax.index_in_dim(a, i, 0, keepdims=False), [carry.init], deferred=True)
    return nodes, out


class _Same:
    """An equation of one operand and literals, as a function of another operand."""

    def __init__(self, eqn: Any) -> None:
        self.eqn = eqn

    def __call__(self, x: Any) -> Any:
        operands = [x if _compat.is_var(v) else v.val for v in self.eqn.invars]
        return self.eqn.primitive.bind(*operands, **self.eqn.params)
