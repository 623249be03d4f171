"""Layers are read, and their gradients stacked, through what only rearranges stacks.

Of ``ws[:3]``, ``ws[::-1]`` or ``jnp.concatenate([a, b])`` a scan reads one layer after the other. Read of ``ws`` or ``a``
itself, each is where that lies; and the gradient of such a slice, a stack with zeros around it, is a longer stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._compat import Var
from .._program._edit import Editor
from .._program._flat import FlatProgram
from .._program._nodes import Node, shape_and_dtype
from .._program._rewrite import making, rename, trace_nodes
from ._blocks._ties import taken_apart
from ._columns import Columns, Cut, Layer, make_layer
from ._pieces import VIEWS

_REARRANGE = {"concatenate", "pad", "rev", "slice"}


def see_through_stacks(flat: FlatProgram) -> FlatProgram:
    """Reads each layer of a rearranged stack of what that is made of, and makes stacks of rearranged stacks.

    What nobody reads then is dead.
    """
    columns = Columns(flat)
    edit = Editor(flat)
    alias: dict[Var, Var] = {}
    stacked = dict(flat.stacked)
    for n in flat.nodes:
        if n.task is not None or n.primitive not in _REARRANGE or n.layout_follows_loop or n.guard:
            continue
        at = _layer_read(n)
        if at is not None:
            layer = columns.layer(n.inputs[0], at)
            if layer is not None and layer != Cut(n.inputs[0], at):
                edit.replace_node(n, _read(flat, n, layer, alias))
        elif (column := columns.of(n.outputs[0])) is not None and _is_rearranged(n, column):
            made, stacked[n.outputs[0]] = _stack(n, column)
            edit.replace_node(n, made)
    new = edit.result()
    return rename(replace(new, stacked=stacked), alias) if new is not flat else flat


def _layer_read(n: Node) -> int | None:
    """The layer that an equation takes out of a stack; None if it is no such equation."""
    parts = taken_apart(n.eqn) if n.primitive == "slice" and n.inputs else None
    if parts is None or parts.dim != 0 or len(parts.ranges) != 1:
        return None
    ((a, b),) = parts.ranges
    return a if b - a == 1 else None


def _read(flat: FlatProgram, n: Node, layer: Layer, alias: dict[Var, Var]) -> list[Node]:
    """Equations that read a layer of what it is made of. What drops its dimension of one becomes another name of it."""
    (out,) = n.outputs
    once: list[Node] = []
    if isinstance(layer, Cut) and (n.loop is None or flat.index.scope.get(layer.whole) == n.loop):
        at = layer.at
        made, _ = trace_nodes(lambda x: lax.slice_in_dim(x, at, at + 1), [layer.whole])
    else:
        if isinstance(layer, Cut):  # a microbatch changes nothing of it
            at = layer.at
            cut = lambda x: lax.index_in_dim(x, at, keepdims=False)  # noqa: E731
            (once, (v,)), made = trace_nodes(cut, [layer.whole], unstacks=True), []
        else:
            made, v = make_layer(layer)
        for r in flat.index.readers.get(out, ()):
            drops = r.primitive == "squeeze" and tuple(r.eqn.params["dimensions"]) == (0,)
            if drops and (r.loop, r.guard) == (n.loop, ()) and r.outputs[0] not in flat.index.leaving:
                alias[r.outputs[0]] = v
        made += trace_nodes(lambda x: lax.expand_dims(x, (0,)), [v])[0]
    return [*once, *_instead(n, made)]


def _is_rearranged(n: Node, column: Sequence[Layer | None]) -> bool:
    """Whether an equation gives several layers, and does not only put single ones together."""
    several = sum(layer is not None for layer in column) > 1
    return several and any(_compat.shape(v)[:1] != (1,) for v in n.inputs)


def _stack(n: Node, column: Sequence[Layer | None]) -> tuple[list[Node], tuple[Var, ...]]:
    """Equations that stack layers, and the layers."""
    nodes: list[Node] = []
    zeros: list[Var] = []
    if None in column:
        shape, dtype = shape_and_dtype(n.outputs[0])
        nodes, zeros = trace_nodes(lambda: jnp.zeros(shape[1:], dtype), [])
    layers: list[Var] = []
    for layer in column:
        made, v = make_layer(layer) if layer is not None else ([], zeros[0])
        nodes += made
        layers.append(v)
    nodes += trace_nodes(lambda *xs: jnp.stack(xs), layers)[0]
    return _instead(n, nodes), tuple(layers)


def _instead(n: Node, made: Sequence[Node]) -> list[Node]:
    """Equations in the place of one, of which the last makes its result."""
    named = [*made[:-1], making(made[-1], n.outputs)]
    return [replace(n, eqn=node.eqn, unstacks=n.unstacks and node.primitive in VIEWS) for node in named]
