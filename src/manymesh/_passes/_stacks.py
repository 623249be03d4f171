"""Gradients of stacked layers: each layer keeps its own accumulator where it runs.

The gradient of a scan over layers is a stack with one slice a layer, and that of a vector with all parameters is made of
theirs, side by side. Added up as a whole, it would gather every layer's gradient on one submesh in every microbatch. A
sum of stacks is a stack of sums: the slices are added where they are made, and stacked once after the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh

from .. import _compat
from .._compat import Atom, Var
from .._program._edit import Editor
from .._program._flat import FlatProgram
from .._program._nodes import Carry, Node
from .._program._rewrite import making, of_one_operand, trace_nodes
from ._blocks._ties import put_together
from ._pieces import SHAPES

_ADDS = ("add", "add_any")
# Of one operand and blind to shapes: their parameters are right for a slice as they are for the stack.
_ELEMENTWISE = {"convert_element_type", "neg", "copy", "real", "mul", "div"}


def accumulate_each_layer(flat: FlatProgram) -> FlatProgram:
    """Replaces every accumulator of stacked values by one for each slice, and of parts of several submeshes by one for each.

    The equations of the whole are then dead.
    """
    reads = Counter(v for n in flat.nodes for v in n.inputs)
    edit = Editor(flat)
    columns: dict[Var, tuple[Var, ...]] = {}
    for i, loop in enumerate(flat.loops):
        tied = Counter(v for c in loop.carries for v in (c.out, c.init) if _compat.is_var(v))
        tied.update(p.inner for p in loop.ys)
        for carry in loop.carries:
            if reads[carry.inner] == 1 and not tied[carry.inner] and tied[carry.out] == 1 and reads[carry.out] == 0:
                columns.update(_split(flat, edit, i, carry))
    new = edit.result()
    return replace(new, stacked={**flat.stacked, **columns}) if columns else new


def _split(flat: FlatProgram, edit: Editor, loop: int, carry: Carry) -> dict[Var, tuple[Var, ...]]:
    """Replaces one carry, if it adds up stacks; the result is then a stack too, of the slices that are returned."""
    add = flat.index.producer.get(carry.out)
    if add is None or add.primitive not in _ADDS or carry.inner not in add.inputs or len(add.inputs) != 2:
        return {}
    found = _column(flat, next((v for v in add.inputs if v is not carry.inner), carry.inner))
    if found is None:
        return {}
    column, dim, chain = found
    shapes = [node for node in chain if node.primitive in SHAPES]  # right after the loop, for the whole
    spread = _spread(flat, carry)
    if shapes and spread is None:
        return {}
    inside: list[Node] = []
    before: list[Node] = []
    carries: list[Carry] = []
    at = 0
    for piece in column:
        made, init = _start(spread, carry, at, piece, dim)
        before += made
        at += 1 if dim is None else _compat.shape(piece)[dim]
        for node in (node for node in reversed(chain) if node not in shapes):
            made, (piece,) = trace_nodes(of_one_operand(node.eqn), [piece], loop=loop, backward=add.backward)
            inside += made
        inner = _compat.new_var(init.aval)
        made, (out,) = trace_nodes(lax.add, [inner, piece], loop=loop, backward=add.backward)
        inside += made
        carries.append(Carry(inner, out, init, _compat.new_var(inner.aval)))
    put = (lambda *xs: jax.numpy.stack(xs)) if dim is None else (lambda *xs: lax.concatenate(xs, dim))
    after, (whole,) = trace_nodes(put, [c.final for c in carries])
    for node in reversed(shapes):
        made, (whole,) = trace_nodes(of_one_operand(node.eqn), [whole])
        after += made
    after[-1] = making(after[-1], [carry.final])
    edit.replace_node(add, inside)
    edit.before_loop(loop, before)
    edit.after_loop(loop, after)
    edit.replace_carry(loop, carry, carries)
    return {carry.final: tuple(c.final for c in carries)} if dim is None and not shapes else {}


def _column(flat: FlatProgram, term: Var) -> tuple[tuple[Var, ...], int | None, list[Node]] | None:
    """What a value is put together of, and how it became the value.

    Returns:
      The slices of a stack, or the parts that lie side by side along a dimension and are made on several submeshes; this
      dimension, None for a stack; and the elementwise equations on the way from there to the value.
    """
    chain: list[Node] = []
    while (found := _pieces(flat, term)) is None:
        node = flat.index.producer.get(term)
        if node is None or node.primitive not in _ELEMENTWISE | SHAPES or len(node.inputs) != 1:
            return None
        if any(getattr(v.aval, "shape", ()) for v in node.eqn.invars if not _compat.is_var(v)):
            return None
        chain.append(node)
        (term,) = node.inputs
    pieces, dim = found
    column = tuple(v for v in pieces if _compat.is_var(v))
    return (column, dim, chain) if len(column) == len(pieces) > 1 else None


def _pieces(flat: FlatProgram, v: Var) -> tuple[Sequence[Atom], int | None] | None:
    """The slices of a stack, or the parts of a value that tasks of several submeshes make, and their dimension."""
    if v in flat.stacked:
        return flat.stacked[v], None
    node = flat.index.producer.get(v)
    parts = put_together(node.eqn) if node is not None and node.task is None else None
    if node is None or parts is None or len(_meshes_behind(flat, node.inputs)) < 2:
        return None
    if node.primitive == "concatenate":
        return node.eqn.invars, parts.dim
    return (node.eqn.invars, None) if parts.dim == 0 else None


def _meshes_behind(flat: FlatProgram, values: Sequence[Atom]) -> set[Mesh]:
    """The submeshes of the nearest tasks that values are computed from."""
    found: set[Mesh] = set()
    todo = [v for v in values if _compat.is_var(v)]
    seen = set(todo)
    while todo:
        node = flat.index.producer.get(todo.pop())
        if node is None:
            continue
        mesh = flat.submesh_of(node)
        if mesh is not None:
            found.add(mesh)
        elif node.task is None:
            new = [v for v in dict.fromkeys(node.inputs) if v not in seen]
            seen.update(new)
            todo += new
    return found


def _spread(flat: FlatProgram, carry: Carry) -> Node | None:
    """The equation that spreads out a number, zero mostly, for an accumulator to start from; None where it starts otherwise."""
    made = flat.index.producer.get(carry.init) if _compat.is_var(carry.init) else None
    if made is None or made.primitive != "broadcast_in_dim" or made.eqn.params["broadcast_dimensions"]:
        return None
    return made


def _start(spread: Node | None, carry: Carry, at: int, piece: Var, dim: int | None) -> tuple[list[Node], Any]:
    """What the accumulator of a piece starts from. Zeros are made for each: cut from a whole, all of that would be there."""
    shape = _compat.shape(piece)
    if spread is not None:
        out = _compat.new_var(jax.core.ShapedArray(shape, _compat.dtype(carry.inner)))
        eqn = spread.eqn.replace(outvars=[out], params={**spread.eqn.params, "shape": shape})
        return [Node(eqn, layout_follows_loop=True)], out

    def start(whole: jax.Array) -> jax.Array:
        if dim is None:
            return lax.index_in_dim(whole, at, 0, keepdims=False)
        return lax.slice_in_dim(whole, at, at + shape[dim], axis=dim)

    nodes, (out,) = trace_nodes(start, [carry.init], layout_follows_loop=True)
    return nodes, out
