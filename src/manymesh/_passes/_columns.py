"""What stacked values are layer by layer, seen through what cuts, reverses, pads, joins, scales and adds up stacks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from jax import lax

from .. import _compat
from .._compat import Eqn, Var
from .._program._flat import FlatProgram
from .._program._nodes import Node
from .._program._rewrite import Tags, of_one_operand, trace_nodes
from ._sums import is_addition, is_zero, terms_of_sum

MOST = 512  # layers; what is longer is no stack
# Of one operand and blind to shapes: their parameters are right for a slice as they are for the stack.
ELEMENTWISE = {"convert_element_type", "neg", "copy", "real", "mul", "div", "stop_gradient"}


@dataclass(frozen=True)
class Given:
    """A layer that is a variable."""

    var: Var


@dataclass(frozen=True)
class Cut:
    """A layer that is cut from a value of which no more is known."""

    whole: Var
    at: int


@dataclass(frozen=True)
class Made:
    """A layer that an equation makes of layers: an elementwise one of one, or a sum of several."""

    node: Node
    operands: tuple[Layer, ...]


Layer = Given | Cut | Made


class Columns:
    """The layers of values.

    Args:
      flat: the program.
    """

    def __init__(self, flat: FlatProgram) -> None:
        self._producer, self._uses, self._stacked = flat.index.producer, flat.index.uses, flat.stacked
        self._slices = frozenset(x for column in flat.stacked.values() for x in column if _compat.is_var(x))
        self._found: dict[tuple[Var, int], Layer | None] = {}

    def layer(self, v: Var, at: int) -> Layer | None:
        """What a layer of a value is; None where it is zero."""
        if (v, at) not in self._found:
            self._found[v, at] = self._layer(v, at)
        return self._found[v, at]

    def of(self, v: Var) -> tuple[Layer | None, ...] | None:
        """All layers of a stack; None of a value that is none, or not made of layers alone."""
        shape = _compat.shape(v)
        found: list[Layer | None] = []
        for i in range(shape[0] if shape and shape[0] <= MOST else 0):
            layer = self.layer(v, i)
            if layer is not None and not is_there(layer):
                return None
            found.append(layer)
        return tuple(found) if any(x in self._slices for layer in found for x in _read(layer)) else None

    def _layer(self, v: Var, at: int) -> Layer | None:
        while v not in self._stacked and (node := self._followed(v)) is not None and node.primitive in _PLACES:
            place = _PLACES[node.primitive](node.eqn, at)
            if place is None:
                return Cut(v, at)
            if place[0] is None:
                return None
            v, at = place
        column, node = self._stacked.get(v), self._followed(v)
        if column is not None:
            x = column[at]
            if not _compat.is_var(x):
                return Cut(v, at)
            return None if is_zero(x, self._producer) else Given(x)
        if node is None:
            return Cut(v, at)
        if is_addition(node):
            found = [self.layer(w, at) for w in terms_of_sum(v, self._producer, self._uses, node.loop)[0]]
        elif (repeated := self._repeated(node)) is not None:
            length = _compat.shape(v)[0]
            found = [self.layer(repeated, i) for i in range(at, _compat.shape(repeated)[0], length)]
        else:
            return self._of_one(node, v, at)
        terms = tuple(x for x in found if x is not None)
        if len(terms) < 2:
            return terms[0] if terms else None
        return Cut(v, at) if all(isinstance(x, Cut) for x in terms) else Made(node, terms)

    def _followed(self, v: Var) -> Node | None:
        """The equation that makes a value, if it runs wherever that is best."""
        node = self._producer.get(v)
        if node is None or node.task or node.guard or node.colocated_with or node.mesh is not None:
            return None
        return node

    def _repeated(self, node: Node) -> Var | None:
        """The gradient of a stack that is repeated (``jnp.tile``), where an equation adds up that of each repetition."""
        apart = self._followed(node.inputs[0]) if node.primitive == "reduce_sum" else None
        if apart is None or apart.primitive != "reshape" or len(apart.inputs) != 1:
            return None
        (v,), sizes, (first, *others) = apart.inputs, apart.eqn.params["new_sizes"], node.eqn.params["axes"]
        shape, total = _compat.shape(v), _compat.shape(node.outputs[0])
        if first != 0 or any(sizes[d] != 1 for d in others) or not shape or total[1:] != shape[1:]:
            return None
        return v if total and total[0] * sizes[0] == shape[0] <= MOST else None

    def _of_one(self, node: Node, v: Var, at: int) -> Layer | None:
        """A layer of what an elementwise equation of one operand makes, or one that only gives it a dimension of one."""
        if len(node.inputs) != 1:
            return Cut(v, at)
        (operand,) = node.inputs
        if node.primitive in ("broadcast_in_dim", "reshape") and _compat.shape(v) == (1, *_compat.shape(operand)):
            return Given(operand)
        numbers = [x for x in node.eqn.invars if not _compat.is_var(x)]
        if node.primitive not in ELEMENTWISE or any(getattr(x.aval, "shape", ()) for x in numbers):
            return Cut(v, at)
        layer = self.layer(operand, at)
        if layer == Cut(operand, at) or (layer is None and not keeps_zero(node)):
            return Cut(v, at)
        return None if layer is None else Made(node, (layer,))


def keeps_zero(node: Node) -> bool:
    """Whether an elementwise equation of one operand makes zero of zero."""
    return node.primitive != "div" or _compat.is_var(node.eqn.invars[0])


def is_there(layer: Layer) -> bool:
    """Whether a layer need not be cut from something longer."""
    if isinstance(layer, Made):
        return all(map(is_there, layer.operands))
    return isinstance(layer, Given) or _compat.shape(layer.whole)[0] == 1


def _read(layer: Layer | None) -> Iterator[Var]:
    """The variables that a layer is made of."""
    if isinstance(layer, Made):
        yield from itertools.chain.from_iterable(map(_read, layer.operands))
    elif layer is not None:
        yield layer.var if isinstance(layer, Given) else layer.whole


def make_layer(layer: Layer, **tags: Unpack[Tags]) -> tuple[list[Node], Var]:
    """Equations that make a layer, and the variable that is it."""
    if isinstance(layer, Given):
        return [], layer.var
    if isinstance(layer, Cut):
        at = layer.at
        nodes, (out,) = trace_nodes(lambda x: lax.index_in_dim(x, at, 0, keepdims=False), [layer.whole], **tags)
        return nodes, out
    nodes, operands = [], []
    for operand in layer.operands:
        made, v = make_layer(operand, **tags)
        nodes += made
        operands.append(v)
    fun = of_one_operand(layer.node.eqn) if len(operands) == 1 else lambda *xs: functools.reduce(lax.add, xs)
    made, (out,) = trace_nodes(fun, operands, **tags)
    return nodes + made, out


# Where a layer is in the operands: the operand, None where it is zero, and the place. None where it is in no one place.
_Place = tuple[Any, int] | None


def _slice(eqn: Eqn, at: int) -> _Place:
    params, lengths = eqn.params, _compat.shape(eqn.invars[0])
    if (params["start_indices"][1:], params["limit_indices"][1:]) != ((0,) * (len(lengths) - 1), lengths[1:]):
        return None
    steps = params["strides"] or (1,) * len(lengths)
    return (eqn.invars[0], params["start_indices"][0] + at * steps[0]) if set(steps[1:]) <= {1} else None


def _reversed(eqn: Eqn, at: int) -> _Place:
    (v,) = eqn.invars
    return (v, _compat.shape(v)[0] - 1 - at) if tuple(eqn.params["dimensions"]) == (0,) else None


def _padded(eqn: Eqn, at: int) -> _Place:
    (v, zero), ((low, _, interior), *others) = eqn.invars, eqn.params["padding_config"]
    if not _compat.is_var(v) or not isinstance(zero, _compat.Literal) or zero.val != 0 or any(map(any, others)):
        return None
    within, between = divmod(at - low, interior + 1)
    return (None if between or not 0 <= within < _compat.shape(v)[0] else v), within


def _tiled(eqn: Eqn, at: int) -> _Place:
    (v,), (_, *others) = eqn.invars, eqn.params["reps"]
    return (v, at % _compat.shape(v)[0]) if set(others) <= {1} else None


def _joined(eqn: Eqn, at: int) -> _Place:
    if eqn.params["dimension"] != 0:
        return None
    for v in eqn.invars:
        length = _compat.shape(v)[0]
        if at < length:
            return (v, at) if _compat.is_var(v) else None
        at -= length
    return None


_PLACES: Mapping[str, Callable[[Eqn, int], _Place]] = {
    "concatenate": _joined,
    "pad": _padded,
    "rev": _reversed,
    "slice": _slice,
    "tile": _tiled,
}
