"""Gradients of stacked layers: each layer keeps its own accumulator where it runs.

The gradient of a scan over layers is a stack with one slice a layer. Added up as a whole, it would gather every layer's
gradient on one submesh in every microbatch. A sum of stacks is a stack of sums: the slices are added where they are
made, and stacked once after the loop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from .. import _compat
from .._compat import Eqn, Var
from .._program._edit import Editor
from .._program._flat import FlatProgram
from .._program._nodes import Carry, Node
from .._program._rewrite import making, trace_nodes

_ADDS = ("add", "add_any")
# Of one operand and blind to shapes: their parameters are right for a slice as they are for the stack.
_ELEMENTWISE = {"convert_element_type", "neg", "copy", "real", "mul", "div"}


def accumulate_each_layer(flat: FlatProgram) -> FlatProgram:
    """Replaces every accumulator of stacked values by one for each slice; the equations of the whole stack are then dead."""
    reads = Counter(v for n in flat.nodes for v in n.inputs)
    edit = Editor(flat)
    columns: dict[Var, tuple[Var, ...]] = {}
    for i, loop in enumerate(flat.loops):
        tied = Counter(v for c in loop.carries for v in (c.out, c.init) if _compat.is_var(v))
        tied.update(p.inner for p in loop.ys)
        for carry in loop.carries:
            if reads[carry.inner] == 1 and not tied[carry.inner] and tied[carry.out] == 1 and reads[carry.out] == 0:
                columns.update(_split(flat, edit, i, carry))
    return replace(edit.result(), stacked={**flat.stacked, **columns}) if columns else flat


def _split(flat: FlatProgram, edit: Editor, loop: int, carry: Carry) -> dict[Var, tuple[Var, ...]]:
    """Replaces one carry, if it adds up stacks; the result is then a stack too, of the slices that are returned."""
    add = flat.index.producer.get(carry.out)
    if add is None or add.primitive not in _ADDS or carry.inner not in add.inputs or len(add.inputs) != 2:
        return {}
    found = _column(flat, next((v for v in add.inputs if v is not carry.inner), carry.inner))
    if found is None:
        return {}
    column, chain = found
    inside: list[Node] = []
    before: list[Node] = []
    carries: list[Carry] = []
    for i, piece in enumerate(column):
        for node in reversed(chain):
            made, (piece,) = trace_nodes(_Same(node.eqn), [piece], loop=loop, backward=add.backward)
            inside += made
        aval = carry.inner.aval
        inner = _compat.new_var(jax.core.ShapedArray(aval.shape[1:], aval.dtype))  # type: ignore[attr-defined]
        made, (out,) = trace_nodes(lax.add, [inner, piece], loop=loop, backward=add.backward)
        inside += made
        made, init = _start(flat, carry, i)
        before += made
        carries.append(Carry(inner, out, init, _compat.new_var(inner.aval)))
    after, _ = trace_nodes(lambda *xs: jax.numpy.stack(xs), [c.final for c in carries])
    after[-1] = making(after[-1], [carry.final])
    edit.replace_node(add, inside)
    edit.before_loop(loop, before)
    edit.after_loop(loop, after)
    edit.replace_carry(loop, carry, carries)
    return {carry.final: tuple(c.final for c in carries)}


def _column(flat: FlatProgram, term: Var) -> tuple[tuple[Var, ...], list[Node]] | None:
    """The slices that a value is the stack of, and the elementwise equations on the way from the stack to it."""
    chain: list[Node] = []
    while term not in flat.stacked:
        node = flat.index.producer.get(term)
        if node is None or node.primitive not in _ELEMENTWISE or len(node.inputs) != 1:
            return None
        if any(getattr(v.aval, "shape", ()) for v in node.eqn.invars if not _compat.is_var(v)):
            return None
        chain.append(node)
        (term,) = node.inputs
    column = tuple(v for v in flat.stacked[term] if _compat.is_var(v))
    if len(column) < 2 or len(column) != len(flat.stacked[term]):
        return None
    return column, chain


def _start(flat: FlatProgram, carry: Carry, i: int) -> tuple[list[Node], Any]:
    """What a layer's accumulator starts from. Zeros are made for each layer: all of them would take a whole stack."""
    made = flat.index.producer.get(carry.init) if _compat.is_var(carry.init) else None
    if made is not None and made.primitive == "broadcast_in_dim":
        kept, (_, *shape) = made.eqn.params["broadcast_dimensions"], _compat.shape(carry.inner)
        if 0 not in kept:
            params = {**made.eqn.params, "shape": tuple(shape), "broadcast_dimensions": tuple(d - 1 for d in kept)}
            out = _compat.new_var(jax.core.ShapedArray(tuple(shape), _compat.dtype(carry.inner)))
            return [Node(made.eqn.replace(outvars=[out], params=params), layout_follows_loop=True)], out
    nodes, (out,) = trace_nodes(
        lambda a: lax.index_in_dim(a, i, 0, keepdims=False), [carry.init], layout_follows_loop=True
    )
    return nodes, out


class _Same:
    """An equation of one operand and literals, as a function of another operand."""

    def __init__(self, eqn: Eqn) -> None:
        self.eqn = eqn

    def __call__(self, x: Any) -> Any:
        operands = [v.val if isinstance(v, _compat.Literal) else x for v in self.eqn.invars]
        return self.eqn.primitive.bind(*operands, **self.eqn.params)
