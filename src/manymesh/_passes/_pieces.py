"""Equations that take values apart, for one dimension and one piece each, so that each piece is where it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._compat import Atom, Eqn
from .._program._nodes import Node
from ._blocks._ties import taken_apart

# They only say which part of a value is meant, and in which shape. Made twice of one value they are one value: of
# ``ws[0][1]`` and ``ws[0][2]`` both read the same ``ws[0]``.
VIEWS = {"expand_dims", "reshape", "slice", "squeeze", "transpose"}


def in_pieces(eqn: Eqn) -> Callable[[jax.Array], Any] | None:
    """What an equation does with its first operand, in equations for one dimension or piece each; None if it is one."""
    name, params = eqn.primitive.name, eqn.params
    if name in ("split", "unstack"):
        parts = taken_apart(eqn)
        assert parts is not None, "it takes its operand apart"
        dim, ranges = parts.dim, parts.ranges
        if name == "split":
            return lambda x: [_cut(x, dim, *r) for r in ranges]
        return lambda x: [lax.squeeze(_cut(x, dim, *r), (dim,)) for r in ranges]
    if name == "slice" and all(stride == 1 for stride in params["strides"] or ()):
        cuts = [
            (d, a, b)
            for d, (a, b) in enumerate(zip(params["start_indices"], params["limit_indices"], strict=True))
            if b - a != _compat.shape(eqn.invars[0])[d]
        ]
        return (lambda x: _cut_each(x, cuts)) if _by_index(cuts) else None
    if name == "pad" and isinstance(eqn.invars[1], _compat.Literal) and eqn.invars[1].val == 0:
        if any(low < 0 or high < 0 or inside for low, high, inside in params["padding_config"]):
            return None
        pads = [(d, low, high) for d, (low, high, _) in enumerate(params["padding_config"]) if low or high]
        sizes = _compat.shape(eqn.invars[0])
        # The gradient of such a slice.
        return (lambda x: _pad_each(x, pads)) if _by_index([(d, low, low + sizes[d]) for d, low, _ in pads]) else None
    return None


def _by_index(cuts: list[tuple[int, int, int]]) -> bool:
    """Whether several dimensions are cut, all but the last of them by an index."""
    return len(cuts) > 1 and all(b - a == 1 for _, a, b in cuts[:-1])


def _cut(x: jax.Array, dim: int, start: int, end: int) -> jax.Array:
    return lax.slice_in_dim(x, start, end, axis=dim)


def _cut_each(x: jax.Array, cuts: list[tuple[int, int, int]]) -> jax.Array:
    for cut in cuts:
        x = _cut(x, *cut)
    return x


def _pad_each(x: jax.Array, pads: list[tuple[int, int, int]]) -> jax.Array:
    for dim, low, high in reversed(pads):
        x = lax.pad(x, jnp.zeros((), x.dtype), [(low, high, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)])
    return x


class Views:
    """What was made of values by equations that only say which part is meant."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Atom] = {}

    def known(self, node: Node) -> Atom | None:
        """What stands for the result of a node: the same of an earlier node; None if there is none, which is kept in mind."""
        eqn = node.eqn
        if node.primitive not in VIEWS or len(eqn.invars) != 1 or not _compat.is_var(eqn.outvars[0]):
            return None
        params = tuple(sorted((name, repr(value)) for name, value in eqn.params.items()))
        key = node.primitive, params, eqn.invars[0], node.loop, node.backward, node.guard
        if key in self._made:
            return self._made[key]
        self._made[key] = eqn.outvars[0]
        return None
