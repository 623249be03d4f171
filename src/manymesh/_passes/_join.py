"""Sums of padded parts are the parts side by side.

What a Python loop reads of stacked weights, ``ws[i]``, gets its gradient with zeros around it, as large as all of the
weights, and these are added up: every stage would hold, and send, a gradient of the whole stack. Put together instead,
each part is where it is made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._compat import Var
from .._program._flat import FlatProgram
from .._program._nodes import Node, nodes_where, shape_and_dtype
from .._program._rewrite import making, of_one_operand, trace_nodes
from ._sums import SCALES, is_addition, linear_operand, numbers_of, terms_of_sum

_EXPANDS = ("broadcast_in_dim", "reshape")


class _Part(NamedTuple):
    """What is in a value that is zero elsewhere.

    Attributes:
      way: the equations that make the value of the padded one, last first.
      padded: the part with zeros around it.
      dim: the one dimension in which it is not all of that.
      start, end: where it is.
      made: what it is.
    """

    way: tuple[Node, ...]
    padded: Var
    dim: int
    start: int
    end: int
    made: Var

    @property
    def kind(self) -> tuple[object, ...]:
        """What is equal for parts of one value."""
        way = ((n.primitive, str(n.eqn.params), str(numbers_of(n))) for n in self.way)
        return str(self.padded.aval), self.dim, *way


def join_parts(flat: FlatProgram) -> FlatProgram:
    """Replaces sums of values that are zero where the others are not. Of single layers they become a stack."""
    producer = flat.index.producer
    done: set[Node] = set()
    replaced: dict[Node, list[Node]] = {}
    stacked = dict(flat.stacked)
    for root in reversed(flat.nodes):
        if root in done or not is_addition(root) or not root.outputs:
            continue
        (result,) = root.outputs
        terms, nodes = terms_of_sum(result, producer, flat.index.uses, root.loop)
        done.update(nodes)
        found = [(v, _part(v, root, producer)) for v in terms]
        kinds = Counter(p.kind for _, p in found if p is not None).most_common(1)
        parts = [p for _, p in found if p is not None and p.kind == kinds[0][0]]
        row = _in_a_row(parts) if len(parts) > 1 else None
        if row is None:
            continue
        made, column = _side_by_side(row, parts[0].dim, parts[0].padded, producer)
        (whole,) = made[-1].outputs
        rest = [v for v, p in found if p is None or p.kind != kinds[0][0]]
        if column and (rest or parts[0].way):
            stacked[whole], column = column, ()
        for node in reversed(parts[0].way):
            new, (whole,) = trace_nodes(of_one_operand(node.eqn), [whole])
            made += new
        if rest:
            made += trace_nodes(lambda *xs: jax.tree.reduce(lax.add, list(xs)), [*rest, whole])[0]
        elif column:
            stacked[result] = column
        made[-1] = making(made[-1], [result])
        replaced.update({n: [] for n in nodes})
        replaced[root] = [
            replace(n, loop=root.loop, backward=root.backward, stack=root.stack, guard=root.guard) for n in made
        ]
    if not replaced:
        return flat
    return replace(flat, nodes=nodes_where(flat.nodes, replaced), stacked=stacked, placement=None)


def _part(v: Var, reader: Node, producer: Mapping[Var, Node]) -> _Part | None:
    """What is in a value that is made of zeros and a part, for a reader beside it; None if it is nothing like that."""
    way: list[Node] = []
    while True:
        maker = producer.get(v)
        if maker is None or maker.task is not None or (maker.loop, maker.guard) != (reader.loop, reader.guard):
            return None
        if (operand := linear_operand(maker)) is None:
            break
        way.append(maker)
        v = operand
    if maker.primitive != "pad":
        return None
    value, zero = maker.eqn.invars
    padded = [(d, *config) for d, config in enumerate(maker.eqn.params["padding_config"]) if any(config)]
    if not _compat.is_var(value) or not isinstance(zero, _compat.Literal) or zero.val != 0 or len(padded) != 1:
        return None
    dim, low, high, interior = padded[0]
    if low < 0 or high < 0 or interior:
        return None
    return _Part(tuple(way), v, dim, low, low + _compat.shape(value)[dim], value)


def _in_a_row(parts: Sequence[_Part]) -> list[tuple[int, list[Var]]] | None:
    """The length of each stretch of a dimension and what is added up there, nothing in gaps; None where parts overlap."""
    at: dict[tuple[int, int], list[Var]] = defaultdict(list)
    for part in parts:
        at[part.start, part.end].append(part.made)
    if len(at) < 2 or (len(at) < len(parts) and any(n.primitive in SCALES for n in parts[0].way)):
        return None  # added up before they are cast or scaled, they would be rounded otherwise
    length = _compat.shape(parts[0].padded)[parts[0].dim]
    layers = all(b - a == 1 for a, b in at)
    row: list[tuple[int, list[Var]]] = []
    end = 0
    for start, stop in sorted([*at, (length, length)]):
        if start < end:
            return None
        gap = start - end
        row += [(1, [])] * gap if layers else [(gap, [])] * bool(gap)
        row += [(stop - start, at[start, stop])] * (stop > start)
        end = stop
    return row


def _side_by_side(
    row: Sequence[tuple[int, list[Var]]], dim: int, like: Var, producer: Mapping[Var, Node]
) -> tuple[list[Node], tuple[Var, ...]]:
    """Equations that put the stretches together, and the slices where they are those of a stack."""
    shape, dtype = shape_and_dtype(like)
    layers = dim == 0 and all(size == 1 for size, _ in row)
    made: list[Node] = []
    column: list[Var] = []
    for size, values in row:
        here = (*shape[:dim], size, *shape[dim + 1 :])
        before = [b for v in values if layers and (b := _before_expanding(v, producer)) is not None]
        if len(before) == len(values):
            values = before

        def total(*xs: jax.Array, here: tuple[int, ...] = here) -> jax.Array:
            x = sum(xs[1:], xs[0]) if xs else jnp.zeros(here, dtype)
            return lax.squeeze(x, (0,)) if layers and x.ndim == len(here) else x

        nodes, (out,) = trace_nodes(total, values)
        made += nodes
        column.append(out)
    put = (lambda *xs: jnp.stack(xs)) if layers else (lambda *xs: lax.concatenate(xs, dim))
    made += trace_nodes(put, column)[0]
    return made, tuple(column) if layers else ()


def _before_expanding(v: Var, producer: Mapping[Var, Node]) -> Var | None:
    """A layer before it got its dimension of one; None if it always had it."""
    maker = producer.get(v)
    if maker is None or maker.primitive not in _EXPANDS or maker.task is not None or len(maker.inputs) != 1:
        return None
    (before,) = maker.inputs
    return before if (1, *_compat.shape(before)) == _compat.shape(v) else None
