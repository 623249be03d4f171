"""Gradients of stacked layers: each layer keeps its own accumulator where it runs.

The gradient of a scan over layers is a stack with one slice a layer, and that of a vector with all parameters is made of
theirs, side by side. Added up as a whole, it would gather every layer's gradient on one submesh in every microbatch. A
sum of stacks is a stack of sums: the slices are added where they are made, and stacked once after the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import Mesh

from .. import _compat
from .._compat import Var
from .._program._edit import Editor
from .._program._flat import FlatProgram
from .._program._nodes import Carry, Node
from .._program._rewrite import making, of_one_operand, trace_nodes
from ._blocks._ties import put_together
from ._columns import ELEMENTWISE, Columns, Given, Layer, keeps_zero, make_layer
from ._pieces import SHAPES

_ADDS = ("add", "add_any")


def accumulate_each_layer(flat: FlatProgram) -> FlatProgram:
    """Replaces every accumulator of stacked values by one for each slice, and of parts of several submeshes by one for each.

    The equations of the whole are then dead.
    """
    reads = Counter(v for n in flat.nodes for v in n.inputs)
    edit = Editor(flat)
    known = Columns(flat)
    columns: dict[Var, tuple[Var, ...]] = {}
    for i, loop in enumerate(flat.loops):
        tied = Counter(v for c in loop.carries for v in (c.out, c.init) if _compat.is_var(v))
        tied.update(p.inner for p in loop.ys)
        for carry in loop.carries:
            if reads[carry.inner] == 1 and not tied[carry.inner] and tied[carry.out] == 1 and reads[carry.out] == 0:
                columns.update(_split(flat, known, edit, i, carry))
    new = edit.result()
    return replace(new, stacked={**flat.stacked, **columns}) if columns else new


def _split(flat: FlatProgram, known: Columns, edit: Editor, loop: int, carry: Carry) -> dict[Var, tuple[Var, ...]]:
    """Replaces one carry, if it adds up stacks; the result is then a stack too, of the slices that are returned."""
    add = flat.index.producer.get(carry.out)
    if add is None or add.primitive not in _ADDS or carry.inner not in add.inputs or len(add.inputs) != 2:
        return {}
    found = _column(flat, known, next((v for v in add.inputs if v is not carry.inner), carry.inner))
    if found is None:
        return {}
    shapes = [node for node in found.chain if node.primitive in SHAPES]  # right after the loop, for the whole
    spread = _spread(flat, carry)
    if shapes and spread is None:
        return {}
    inside: list[Node] = []
    before: list[Node] = []
    after: list[Node] = []
    carries: list[Carry] = []
    finals: list[Var] = []
    at = 0
    for layer, shape in zip(found.layers, found.shapes, strict=True):
        made, init = _start(spread, carry, at, shape, found.dim, follows=layer is not None)
        at += 1 if found.dim is None else shape[found.dim]
        if layer is None:  # it stays what it starts from
            after += made
            finals.append(init)
            continue
        before += made
        made, piece = make_layer(layer, loop=loop, backward=add.backward)
        inside += made
        for node in (node for node in reversed(found.chain) if node not in shapes):
            made, (piece,) = trace_nodes(of_one_operand(node.eqn), [piece], loop=loop, backward=add.backward)
            inside += made
        inner = _compat.new_var(init.aval)
        made, (out,) = trace_nodes(lax.add, [inner, piece], loop=loop, backward=add.backward)
        inside += made
        carries.append(Carry(inner, out, init, _compat.new_var(inner.aval)))
        finals.append(carries[-1].final)
    dim = found.dim
    put = (lambda *xs: jax.numpy.stack(xs)) if dim is None else (lambda *xs: lax.concatenate(xs, dim))
    made, (whole,) = trace_nodes(put, finals)
    after += made
    for node in reversed(shapes):
        made, (whole,) = trace_nodes(of_one_operand(node.eqn), [whole])
        after += made
    after[-1] = making(after[-1], [carry.final])
    edit.replace_node(add, inside)
    edit.before_loop(loop, before)
    edit.after_loop(loop, after)
    edit.replace_carry(loop, carry, carries)
    return {carry.final: tuple(finals)} if found.dim is None and not shapes else {}


class _Column(NamedTuple):
    """What a value is put together of, and how it became the value.

    Attributes:
      layers: the slices of a stack, None where they are zero, or parts that lie side by side along a dimension and are made
        on several submeshes.
      shapes: their shapes.
      dim: this dimension; None for a stack.
      chain: the equations on the way from there to the value, last first.
    """

    layers: tuple[Layer | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    dim: int | None
    chain: Sequence[Node] = ()


def _column(flat: FlatProgram, known: Columns, term: Var) -> _Column | None:
    """What a value is put together of; None if that is nothing that is added up by itself."""
    chain: list[Node] = []
    while (found := _layers(known, term) or _parts(flat, term)) is None:
        node = flat.index.producer.get(term)
        if node is None or node.primitive not in ELEMENTWISE | SHAPES or len(node.inputs) != 1:
            return None
        if any(getattr(v.aval, "shape", ()) for v in node.eqn.invars if not _compat.is_var(v)):
            return None
        chain.append(node)
        (term,) = node.inputs
    if None in found.layers and not all(node.primitive in SHAPES or keeps_zero(node) for node in chain):
        return None
    return found._replace(chain=chain) if len(found.layers) > 1 else None


def _layers(known: Columns, v: Var) -> _Column | None:
    """The slices of a stack."""
    layers = known.of(v)
    return _Column(layers, (_compat.shape(v)[1:],) * len(layers), None) if layers is not None else None


def _parts(flat: FlatProgram, v: Var) -> _Column | None:
    """The parts of a value that tasks of several submeshes make."""
    node = flat.index.producer.get(v)
    parts = put_together(node.eqn) if node is not None and node.task is None else None
    if node is None or parts is None or len(_meshes_behind(flat, node.inputs)) < 2:
        return None
    column = [x for x in node.eqn.invars if _compat.is_var(x)]
    if len(column) < len(node.eqn.invars) or (node.primitive != "concatenate" and parts.dim != 0):
        return None
    dim = parts.dim if node.primitive == "concatenate" else None
    return _Column(tuple(map(Given, column)), tuple(map(_compat.shape, column)), dim)


def _meshes_behind(flat: FlatProgram, values: Sequence[Var]) -> set[Mesh]:
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


def _start(
    spread: Node | None, carry: Carry, at: int, shape: tuple[int, ...], dim: int | None, *, follows: bool
) -> tuple[list[Node], Any]:
    """What the accumulator of a piece starts from. Zeros are made for each: cut from a whole, all of that would be there."""
    if spread is not None:
        out = _compat.new_var(jax.core.ShapedArray(shape, _compat.dtype(carry.inner)))
        eqn = spread.eqn.replace(outvars=[out], params={**spread.eqn.params, "shape": shape})
        return [Node(eqn, layout_follows_loop=follows)], out

    def start(whole: jax.Array) -> jax.Array:
        if dim is None:
            return lax.index_in_dim(whole, at, 0, keepdims=False)
        return lax.slice_in_dim(whole, at, at + shape[dim], axis=dim)

    nodes, (out,) = trace_nodes(start, [carry.init], layout_follows_loop=follows)
    return nodes, out
