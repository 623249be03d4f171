"""Which dimensions an equation ties together, primitive by primitive.

A link says that a dimension of one operand or result is a dimension of another: cut one over some
devices and the other is cut alike. XLA's sharding propagation works with the same links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..._compat import Atom, Eqn

SCATTERS = frozenset({"scatter-add", "scatter_add"})  # what adds rows, in the words of each JAX

# (value, dimension, value, dimension); a value is the position of an operand, or ``~position`` of a result.
Link = tuple[int, int, int, int]

_OUT = ~0


def links(eqn: Eqn) -> Iterator[Link]:
    """The links of an equation without a body.

    An unknown primitive keeps the dimensions of operands that have the rank of the result.

    Args:
      eqn: the equation. The caller checks that linked dimensions are equally long, except for a reshape's.
    """
    rule = _RULES.get(eqn.primitive.name)
    yield from _alike(eqn) if rule is None else rule(eqn)


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of a variable or literal; empty for what has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def updated_dims(eqn: Eqn) -> list[int]:
    """The dimensions of a scatter's updates that count its indices, and not places in the operand."""
    numbers = eqn.params["dimension_numbers"]
    return [d for d in range(len(shape_of(eqn.invars[2]))) if d not in numbers.update_window_dims]


def _alike(eqn: Eqn) -> Iterator[Link]:
    for o, out in enumerate(eqn.outvars):
        for k, v in enumerate(eqn.invars):
            if len(shape_of(v)) == len(shape_of(out)):
                yield from ((k, d, ~o, d) for d in range(len(shape_of(out))))


def _broadcast(eqn: Eqn) -> Iterator[Link]:
    return ((0, i, _OUT, d) for i, d in enumerate(eqn.params["broadcast_dimensions"]))


def _transpose(eqn: Eqn) -> Iterator[Link]:
    return ((0, d, _OUT, i) for i, d in enumerate(eqn.params["permutation"]))


def _squeeze(eqn: Eqn) -> Iterator[Link]:
    kept = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in eqn.params["dimensions"]]
    return ((0, d, _OUT, i) for i, d in enumerate(kept))


def _reduce(eqn: Eqn) -> Iterator[Link]:
    kept = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in eqn.params["axes"]]
    return ((0, d, ~o, i) for o in range(len(eqn.outvars)) for i, d in enumerate(kept))


def _reshape(eqn: Eqn) -> Iterator[Link]:
    """The major dimensions of each group of dimensions that become each other."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    old = [d for d, n in enumerate(before) if n > 1]
    new = [d for d, n in enumerate(after) if n > 1]
    i = j = 0
    while i < len(old) and j < len(new):
        yield 0, old[i], _OUT, new[j]
        a, b = before[old[i]], after[new[j]]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                if i == len(old):
                    return
                a, i = a * before[old[i]], i + 1
            else:
                if j == len(new):
                    return
                b, j = b * after[new[j]], j + 1


def _dot(eqn: Eqn) -> Iterator[Link]:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    yield from ((0, a, 1, b) for a, b in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)))
    place = 0
    for place, d in enumerate(left_batch, 1):
        yield 0, d, _OUT, place - 1
    for k, used in ((0, {*left, *left_batch}), (1, {*right, *right_batch})):
        for d in range(len(shape_of(eqn.invars[k]))):
            if d not in used:
                yield k, d, _OUT, place
                place += 1


def _conv(eqn: Eqn) -> Iterator[Link]:
    left, right, out = (
        eqn.params["dimension_numbers"].lhs_spec,
        eqn.params["dimension_numbers"].rhs_spec,
        eqn.params["dimension_numbers"].out_spec,
    )
    yield 0, left[1], 1, right[1]
    yield 1, right[0], _OUT, out[1]
    yield 0, left[0], _OUT, out[0]
    yield from ((0, a, _OUT, b) for a, b in zip(left[2:], out[2:], strict=True))


def _gather(eqn: Eqn) -> Iterator[Link]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, result = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = [d for d in range(len(operand)) if d not in gone]
    for d, at in zip(windows, numbers.offset_dims, strict=True):
        if sizes[d] == operand[d]:
            yield 0, d, _OUT, at
    counted = [d for d in range(len(result)) if d not in numbers.offset_dims]
    yield from ((1, i, _OUT, d) for i, d in enumerate(counted))
    for d, i in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        yield 0, d, 1, i


def _scatter(eqn: Eqn) -> Iterator[Link]:
    numbers = eqn.params["dimension_numbers"]
    operand = shape_of(eqn.invars[0])
    yield from ((0, d, _OUT, d) for d in range(len(operand)))
    yield from ((1, i, 2, d) for i, d in enumerate(updated_dims(eqn)))
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [d for d in range(len(operand)) if d not in gone]
    yield from ((0, d, 2, at) for d, at in zip(windows, numbers.update_window_dims, strict=True))
    for d, i in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        yield 0, d, 1, i


def _along(axis: str) -> Callable[[Eqn], Iterator[Link]]:
    """Every dimension but the one that a parameter names."""

    def rule(eqn: Eqn) -> Iterator[Link]:
        cut = eqn.params[axis]
        return (link for link in _alike(eqn) if link[1] != cut)

    return rule


def _stack(eqn: Eqn) -> Iterator[Link]:
    axis, rank = eqn.params["axis"], len(shape_of(eqn.invars[0]))
    return ((k, d, _OUT, d + (d >= axis)) for k in range(len(eqn.invars)) for d in range(rank))


def _unstack(eqn: Eqn) -> Iterator[Link]:
    axis, rank = eqn.params["axis"], len(shape_of(eqn.outvars[0]))
    return ((0, d + (d >= axis), ~o, d) for o in range(len(eqn.outvars)) for d in range(rank))


_RULES: dict[str, Callable[[Eqn], Iterator[Link]]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "gather": _gather,
    "concatenate": _along("dimension"),
    "split": _along("axis"),
    "stack": _stack,
    "unstack": _unstack,
    **dict.fromkeys((*SCATTERS, "scatter", "scatter_mul", "scatter-mul"), _scatter),
    **dict.fromkeys(("scatter_min", "scatter-min", "scatter_max", "scatter-max"), _scatter),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
        _reduce,
    ),
}
