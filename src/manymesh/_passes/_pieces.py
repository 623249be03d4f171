"""Equations that take values apart, for one dimension and one piece each, so that each piece is where it is read.

Also those that compute where they read, of numbers alone, and the gradients of all these, which put parts into zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import Atom, Eqn
from .._program._nodes import Node
from ._blocks._ties import taken_apart
from ._known import Known

SHAPES = {"reshape", "squeeze", "transpose"}  # they only say in which shape a value is meant
# They only say which part of a value is meant, and in which shape. Made twice of one value they are one value: of
# ``ws[0][1]`` and ``ws[0][2]`` both read the same ``ws[0]``.
VIEWS = SHAPES | {"slice"}
STRETCHES = 16  # how many pieces one equation may become where what it reads does not lie side by side


class Apart(NamedTuple):
    """What an equation does with one of its operands, in equations for one dimension and piece each.

    Attributes:
      operand: its position.
      fun: gives the result of the operand, or all results.
    """

    operand: int
    fun: Callable[[jax.Array], Any]


class _Cut(NamedTuple):
    """A dimension, and the stretches of it that are read."""

    dim: int
    stretches: Sequence[tuple[int, int]]


def in_pieces(eqn: Eqn, known: Known) -> Apart | None:
    """An equation taken apart; None for one that need not be, or cannot."""
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn, known) if rule is not None else None


def _pieces(eqn: Eqn, _known: Known) -> Apart:
    """Of ``split`` and ``unstack``, all pieces at once."""
    parts = taken_apart(eqn)
    assert parts is not None, "it takes its operand apart"
    drop = (parts.dim,) if eqn.primitive.name == "unstack" else ()
    return Apart(0, lambda x: [lax.squeeze(lax.slice_in_dim(x, a, b, axis=parts.dim), drop) for a, b in parts.ranges])


def _slice(eqn: Eqn, _known: Known) -> Apart | None:
    params, lengths = eqn.params, _compat.shape(eqn.invars[0])
    steps = params["strides"] or (1,) * len(lengths)
    cuts = _cuts(map(range, params["start_indices"], params["limit_indices"], steps), lengths)
    return Apart(0, lambda x: _take(x, cuts)) if cuts and not _is_one(cuts) else None


def _pad(eqn: Eqn, _known: Known) -> Apart | None:
    zero, config, lengths = eqn.invars[1], eqn.params["padding_config"], _compat.shape(eqn.outvars[0])
    if not isinstance(zero, _compat.Literal) or zero.val != 0 or any(low < 0 or high < 0 for low, high, _ in config):
        return None
    places = (range(low, n - high, 1 + inside) for n, (low, high, inside) in zip(lengths, config, strict=True))
    cuts = _cuts(places, lengths)
    return Apart(0, lambda x: _put(x, cuts, lengths)) if cuts and not _is_one(cuts) else None


def _dynamic_slice(eqn: Eqn, known: Known) -> Apart | None:
    whole, *at = eqn.invars
    cuts = _window(eqn.params["slice_sizes"], _compat.shape(whole), at, known)
    return None if cuts is None else Apart(0, lambda x: _take(x, cuts))


def _dynamic_update_slice(eqn: Eqn, known: Known) -> Apart | None:
    whole, part, *at = eqn.invars
    lengths = _compat.shape(whole)
    cuts = _window(_compat.shape(part), lengths, at, known)
    if cuts is None or not _compat.is_var(part) or not known.is_zero(whole):
        return None
    return Apart(1, lambda x: _put(x, cuts, lengths))


def _gather(eqn: Eqn, known: Known) -> Apart | None:
    numbers, (whole, at) = eqn.params["dimension_numbers"], eqn.invars
    dim, lengths = _one(numbers.start_index_map), _compat.shape(whole)
    if dim is None or (dim,) != numbers.collapsed_slice_dims or numbers.operand_batching_dims:
        return None
    if any(n != lengths[d] for d, n in enumerate(eqn.params["slice_sizes"]) if d != dim):
        return None
    cuts = _rows(dim, lengths, at, known)
    row = [d for d in range(len(_compat.shape(eqn.outvars[0]))) if d not in numbers.offset_dims]
    if cuts is None:
        return None
    return Apart(0, lambda x: jnp.moveaxis(_take(x, cuts), dim, row[0]) if row else lax.squeeze(_take(x, cuts), (dim,)))


def _scatter_add(eqn: Eqn, known: Known) -> Apart | None:
    numbers, (whole, at, part) = eqn.params["dimension_numbers"], eqn.invars
    dim, lengths, sizes = _one(numbers.scatter_dims_to_operand_dims), _compat.shape(whole), _compat.shape(part)
    if dim is None or (dim,) != numbers.inserted_window_dims or numbers.operand_batching_dims:
        return None
    if [sizes[d] for d in numbers.update_window_dims] != [n for d, n in enumerate(lengths) if d != dim]:
        return None
    cuts = _rows(dim, lengths, at, known)
    if cuts is None or not _compat.is_var(part) or not known.is_zero(whole):
        return None
    row = [d for d in range(len(sizes)) if d not in numbers.update_window_dims]
    return Apart(2, lambda x: _put(jnp.moveaxis(x, row[0], dim) if row else lax.expand_dims(x, (dim,)), cuts, lengths))


_RULES: dict[str, Callable[[Eqn, Known], Apart | None]] = {
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "scatter-add": _scatter_add,
    "slice": _slice,
    "split": _pieces,
    "unstack": _pieces,
}


def _one(dims: Sequence[int]) -> int | None:
    return dims[0] if len(dims) == 1 else None


def _window(sizes: Sequence[int], lengths: Sequence[int], at: Sequence[Atom], known: Known) -> list[_Cut] | None:
    """What a dynamic slice of a size reads."""
    places: list[range] = []
    for v, size, length in zip(at, sizes, lengths, strict=True):
        if (index := known(v)) is None:
            return None
        first = min(max(int(index), 0), length - size)  # it never reads outside
        places.append(range(first, first + size))
    return _cuts(places, lengths)


def _rows(dim: int, lengths: Sequence[int], at: Atom, known: Known) -> list[_Cut] | None:
    """What is read at an index, or at several in a row."""
    indices = known(at)
    if indices is None or indices.ndim > 2 or not np.all((indices >= 0) & (indices < lengths[dim])):
        return None
    return _cuts((indices.ravel().tolist() if d == dim else range(n) for d, n in enumerate(lengths)), lengths)


def _cuts(places: Iterable[Sequence[int]], lengths: Sequence[int]) -> list[_Cut] | None:
    """What of each dimension is read, if it is not all.

    Returns:
      None where several dimensions are cut and not all but the last by an index, or one in too many stretches.
    """
    cuts = [
        _Cut(dim, found)
        for dim, (place, length) in enumerate(zip(places, lengths, strict=True))
        if (found := _stretches(place)) != [(0, length)]
    ]
    if any(not 0 < len(c.stretches) <= (1 if c.dim else STRETCHES) for c in cuts):
        return None
    return (
        cuts if all(len(c.stretches) == 1 and c.stretches[0][1] - c.stretches[0][0] == 1 for c in cuts[:-1]) else None
    )


def _stretches(place: Sequence[int]) -> list[tuple[int, int]]:
    """Indices as stretches of what lies side by side; not all of them where there are too many."""
    if isinstance(place, range) and place.step == 1:
        return [(place.start, place.stop)]
    found: list[tuple[int, int]] = []
    for i in place:
        if found and found[-1][1] == i:
            found[-1] = found[-1][0], i + 1
        elif len(found) > STRETCHES:
            break
        else:
            found.append((i, i + 1))
    return found


def _is_one(cuts: Sequence[_Cut]) -> bool:
    """Whether one equation reads, or puts, it all."""
    return len(cuts) < 2 and all(len(c.stretches) == 1 for c in cuts)


def _take(x: jax.Array, cuts: Sequence[_Cut]) -> jax.Array:
    for dim, stretches in cuts:
        parts = [lax.slice_in_dim(x, a, b, axis=dim) for a, b in stretches]
        x = parts[0] if len(parts) == 1 else lax.concatenate(parts, dim)
    return x


def _put(x: jax.Array, cuts: Sequence[_Cut], lengths: Sequence[int]) -> jax.Array:
    """The reverse: zeros but for where it is taken from."""
    for dim, stretches in reversed(cuts):
        total, at = None, 0
        for a, b in stretches:
            part = x if len(stretches) == 1 else lax.slice_in_dim(x, at, at + b - a, axis=dim)
            around = [(a, lengths[dim] - b, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
            part = lax.pad(part, jnp.zeros((), x.dtype), around)
            total, at = part if total is None else total + part, at + b - a
        assert total is not None, "something is read"
        x = total
    return x


class Views:
    """What was made of values by equations that only say which part is meant."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Atom] = {}

    def known(self, node: Node) -> Atom | None:
        """What stands for the result of a node: the same of an earlier node; None if there is none, which is kept in mind."""
        eqn = node.eqn
        if (
            node.primitive not in VIEWS
            or len(eqn.invars) != 1
            or not all(map(_compat.is_var, (*eqn.invars, *eqn.outvars)))
        ):
            return None
        params = tuple(sorted((name, repr(value)) for name, value in eqn.params.items()))
        key = node.primitive, params, eqn.invars[0], node.loop, node.backward, node.guard
        if key in self._made:
            return self._made[key]
        self._made[key] = eqn.outvars[0]
        return None
