"""Which equations can be computed block by block, and what each block's equation says.

Cut a value in equal blocks along one dimension. An elementwise equation of such values gives blocks of its result, a
sum over another dimension too, and a sum over this very dimension gives partial sums. A `Tie` says which dimensions of
the operands and results of an equation are cut together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

from ... import _compat
from ..._compat import Atom, Eqn

ELEMENTWISE = frozenset(
    (
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
        "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type",
        "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
        "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to",
        "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "manymesh_box", "manymesh_constraint", "max", "min",
        "mul", "mulhi", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "polygamma", "polynomial",
        "population_count", "pow", "random_gamma_grad", "real", "reduce_precision", "regularized_incomplete_beta", "rem",
        "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh",
        "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
    )
)  # fmt: skip

# How partial results along a dimension become one: a reduction -> the equation that combines two of them.
REDUCTIONS = {
    "reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "mul", "reduce_and": "and",
    "reduce_or": "or",
}  # fmt: skip
COMBINE: Mapping[str, Callable[[Any, Any], jax.Array]] = {
    "add": lax.add, "max": lax.max, "min": lax.min, "mul": lax.mul, "and": lax.bitwise_and, "or": lax.bitwise_or,
}  # fmt: skip


@dataclass(frozen=True)
class Tie:
    """Dimensions of one equation that are cut together.

    Attributes:
      operands: operand -> its dimension. Every other operand is read whole.
      results: result -> its dimension.
      combined_by: the primitive that makes one result of those of the blocks, where ``results`` is empty.
      params: parameters of the equation that are shapes, as functions of the number of blocks.
    """

    operands: Mapping[int, int]
    results: Mapping[int, int]
    combined_by: str = ""
    params: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)


def tie_of(eqn: Eqn, position: int, dim: int, count: int) -> Tie | None:
    """The tie that a dimension of an operand, or of a result (``~position``), belongs to.

    Args:
      eqn: the equation.
      position, dim: the operand or result, and its dimension.
      count: number of blocks.

    Returns:
      The tie, or None where the equation cannot be computed in blocks along this dimension.
    """
    rule = _RULES.get(eqn.primitive.name)
    if rule is None or eqn.effects:
        return None
    for tie in rule(eqn):
        found = tie.operands.get(position) if position >= 0 else tie.results.get(~position)
        if found == dim:
            sizes = [_shape(eqn.invars[k])[d] for k, d in tie.operands.items()]
            sizes += [_shape(eqn.outvars[o])[d] for o, d in tie.results.items()]
            return tie if all(n % count == 0 for n in sizes) else None
    return None


def block_eqn(eqn: Eqn, tie: Tie, count: int, invars: Sequence[Atom]) -> Eqn:
    """The equation of one of ``count`` equal blocks, with fresh results."""
    outvars = []
    for o, v in enumerate(eqn.outvars):
        if o in tie.results:
            outvars.append(_compat.new_var(block_aval(v.aval, tie.results[o], count)))
        else:
            outvars.append(_compat.new_var(v.aval))
    params = {**eqn.params, **{name: of(count) for name, of in tie.params.items()}}
    new: Eqn = eqn.replace(invars=list(invars), outvars=outvars, params=params)
    return new


def block_aval(aval: Any, dim: int, count: int) -> Any:
    """The abstract value of one of ``count`` equal blocks along a dimension."""
    shape = list(aval.shape)
    shape[dim] //= count
    return aval.update(shape=tuple(shape))


@dataclass(frozen=True)
class Parts:
    """Contiguous parts of a value along one dimension: what an equation takes it apart into, or puts it together of.

    Attributes:
      dim: the dimension.
      ranges: start and end of each part. Those taken apart are the results of the equation, in their order; those put
        together its operands.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def blocks(self, length: int, count: int) -> tuple[int, ...] | None:
        """The block that each part is in, of ``count`` equal ones; None where a part is in several."""
        size, rest = divmod(length, count)
        if rest or not size:
            return None
        last = length - 1  # where what is empty may begin behind it
        found = [(min(a, last) // size, min(max(b - 1, a), last) // size) for a, b in self.ranges]
        return tuple(k for k, _ in found) if all(k == last for k, last in found) else None


def taken_apart(eqn: Eqn) -> Parts | None:
    """The parts that an equation takes of its one operand."""
    name, params = eqn.primitive.name, eqn.params
    if name == "unstack":
        return Parts(params["axis"], tuple((i, i + 1) for i in range(len(eqn.outvars))))
    if name == "split":
        return Parts(params["axis"], _ranges(params["sizes"]))
    if name != "slice" or any(s != 1 for s in params["strides"] or ()):
        return None
    starts, limits = params["start_indices"], params["limit_indices"]
    cut = [d for d, n in enumerate(_shape(eqn.invars[0])) if (starts[d], limits[d]) != (0, n)]
    return Parts(cut[0], ((starts[cut[0]], limits[cut[0]]),)) if len(cut) == 1 else None


def put_together(eqn: Eqn) -> Parts | None:
    """The parts that an equation makes its one result of."""
    if eqn.primitive.name == "stack":
        return Parts(eqn.params["axis"], tuple((i, i + 1) for i in range(len(eqn.invars))))
    if eqn.primitive.name == "concatenate":
        d = eqn.params["dimension"]
        return Parts(d, _ranges([_shape(v)[d] for v in eqn.invars]))
    return None


def joins_blocks(eqn: Eqn, dim: int, count: int) -> tuple[int, ...] | None:
    """The block of its result that each operand belongs to, where an equation puts blocks along ``dim`` together."""
    parts = put_together(eqn)
    if parts is None or parts.dim != dim:
        return None
    return parts.blocks(_shape(eqn.outvars[0])[dim], count)


def _ranges(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    ends = [0, *itertools.accumulate(sizes)]
    return tuple(itertools.pairwise(ends))


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _smaller(eqn: Eqn, name: str, dim: int) -> dict[str, Callable[[int], Any]]:
    """A parameter that is a shape, with one dimension of a block."""
    sizes = eqn.params[name]
    return {name: lambda count: tuple(n // count if d == dim else n for d, n in enumerate(sizes))}


def _elementwise(eqn: Eqn) -> Iterator[Tie]:
    """Operands of the result's shape, up to dimensions of length one, and numbers."""
    shape = _shape(eqn.outvars[0])
    shapes = {k: _shape(v) for k, v in enumerate(eqn.invars) if _shape(v)}
    if all(len(s) == len(shape) and all(a in (1, n) for a, n in zip(s, shape, strict=True)) for s in shapes.values()):
        yield from (Tie({k: d for k, s in shapes.items() if s[d] == n}, {0: d}) for d, n in enumerate(shape))


def _barrier(eqn: Eqn) -> Iterator[Tie]:
    """One operand and its result at a time; the pass takes the equation apart."""
    yield from (Tie({k: d}, {k: d}) for k, v in enumerate(eqn.invars) for d in range(len(_shape(v))))


def _broadcast(eqn: Eqn) -> Iterator[Tie]:
    source = {d: i for i, d in enumerate(eqn.params["broadcast_dimensions"])}
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    for d, n in enumerate(after):
        i = source.get(d)
        yield Tie({0: i} if i is not None and before[i] == n else {}, {0: d}, params=_smaller(eqn, "shape", d))


def _iota(eqn: Eqn) -> Iterator[Tie]:
    for d in range(len(_shape(eqn.outvars[0]))):
        if d != eqn.params["dimension"]:
            yield Tie({}, {0: d}, params=_smaller(eqn, "shape", d))


def _reshape(eqn: Eqn) -> Iterator[Tie]:
    """Blocks of the major dimension, but for those of length one, are contiguous, whatever becomes of the rest."""
    before, after = ([d for d, n in enumerate(_shape(v)) if n != 1] for v in (eqn.invars[0], eqn.outvars[0]))
    if before and after and eqn.params.get("dimensions") is None:
        yield Tie({0: before[0]}, {0: after[0]}, params=_smaller(eqn, "new_sizes", after[0]))


def _transpose(eqn: Eqn) -> Iterator[Tie]:
    yield from (Tie({0: d}, {0: i}) for i, d in enumerate(eqn.params["permutation"]))


def _squeeze(eqn: Eqn) -> Iterator[Tie]:
    kept = [d for d in range(len(_shape(eqn.invars[0]))) if d not in eqn.params["dimensions"]]
    yield from (Tie({0: d}, {0: i}) for i, d in enumerate(kept))


def _reduce(eqn: Eqn) -> Iterator[Tie]:
    axes = eqn.params["axes"]
    kept = [d for d in range(len(_shape(eqn.invars[0]))) if d not in axes]
    yield from (Tie({0: d}, {0: i}) for i, d in enumerate(kept))
    if eqn.primitive.name in REDUCTIONS:
        yield from (Tie({0: d}, {}, REDUCTIONS[eqn.primitive.name]) for d in axes)


def _slice(eqn: Eqn) -> Iterator[Tie]:
    """Dimensions that stay whole."""
    starts, limits, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
    for d, n in enumerate(_shape(eqn.invars[0])):
        if (starts[d], limits[d], (strides or {d: 1})[d]) == (0, n, 1):
            yield Tie({0: d}, {0: d}, params=_smaller(eqn, "limit_indices", d))


def _dynamic_slice(eqn: Eqn) -> Iterator[Tie]:
    for d, n in enumerate(_shape(eqn.invars[0])):
        if eqn.params["slice_sizes"][d] == n:
            yield Tie({0: d}, {0: d}, params=_smaller(eqn, "slice_sizes", d))


def _dynamic_update(eqn: Eqn) -> Iterator[Tie]:
    for d, (n, part) in enumerate(zip(_shape(eqn.invars[0]), _shape(eqn.invars[1]), strict=True)):
        if n == part:
            yield Tie({0: d, 1: d}, {0: d})


def _pad(eqn: Eqn) -> Iterator[Tie]:
    yield from (Tie({0: d}, {0: d}) for d, p in enumerate(eqn.params["padding_config"]) if tuple(p) == (0, 0, 0))


def _but(name: str) -> Callable[[Eqn], Iterator[Tie]]:
    """All operands and results alike, in every dimension but those that a parameter names."""

    def rule(eqn: Eqn) -> Iterator[Tie]:
        named = eqn.params[name]
        named = named if isinstance(named, tuple) else (named,)
        for d in range(len(_shape(eqn.outvars[0]))):
            if d not in named:
                yield Tie(dict.fromkeys(range(len(eqn.invars)), d), dict.fromkeys(range(len(eqn.outvars)), d))

    return rule


def _stack(eqn: Eqn) -> Iterator[Tie]:
    axis = eqn.params["axis"]
    for d in range(len(_shape(eqn.invars[0]))):
        yield Tie(dict.fromkeys(range(len(eqn.invars)), d), {0: d + (d >= axis)})


def _dot(eqn: Eqn) -> Iterator[Tie]:
    contracted, batch = eqn.params["dimension_numbers"]
    yield from (Tie({0: a, 1: b}, {}, "add") for a, b in zip(*contracted, strict=True))
    yield from (Tie({0: a, 1: b}, {0: i}) for i, (a, b) in enumerate(zip(*batch, strict=True)))
    at = len(batch[0])
    for k in (0, 1):
        for d in range(len(_shape(eqn.invars[k]))):
            if d not in (*contracted[k], *batch[k]):
                yield Tie({k: d}, {0: at})
                at += 1


def _batched(core: Callable[[Eqn], int]) -> Callable[[Eqn], Iterator[Tie]]:
    """All operands and results alike in the first dimensions: ``core`` says how many of the first operand's are others."""

    def rule(eqn: Eqn) -> Iterator[Tie]:
        for d in range(len(_shape(eqn.invars[0])) - core(eqn)):
            yield Tie(dict.fromkeys(range(len(eqn.invars)), d), dict.fromkeys(range(len(eqn.outvars)), d))

    return rule


def _drawn(eqn: Eqn) -> Iterator[Tie]:
    """A key for each layer draws the numbers of that layer. Of other kinds than Threefry the first key draws those of all."""
    if _compat.key_kind(_compat.dtype(eqn.invars[0])) == "threefry2x32":
        yield from (Tie({0: d}, {0: d}) for d in range(len(_shape(eqn.invars[0]))))


def _conv(eqn: Eqn) -> Iterator[Tie]:
    numbers = eqn.params["dimension_numbers"]
    if eqn.params["batch_group_count"] == 1:
        yield Tie({0: numbers.lhs_spec[0]}, {0: numbers.out_spec[0]})


def _gather(eqn: Eqn) -> Iterator[Tie]:
    """What is looked up side by side, dimensions that are taken whole, and those of the indices."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, indices = _shape(eqn.invars[0]), len(_shape(eqn.invars[1])) - 1
    places = [d for d in range(len(_shape(eqn.outvars[0]))) if d not in numbers.offset_dims]  # of the indices
    for a, i in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        yield Tie({0: a, 1: i}, {0: places[i]})
    whole = [d for d in range(len(shape)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    for d, out in zip(whole, numbers.offset_dims, strict=True):
        if sizes[d] == shape[d] and d not in numbers.start_index_map:
            yield Tie({0: d}, {0: out}, params=_smaller(eqn, "slice_sizes", d))
    for i in range(indices):
        if i not in numbers.start_indices_batching_dims:
            yield Tie({1: i}, {0: places[i]})


def _scatter(eqn: Eqn) -> Iterator[Tie]:
    """What is put side by side, and dimensions that are put whole."""
    numbers = eqn.params["dimension_numbers"]
    shape, part = _shape(eqn.invars[0]), _shape(eqn.invars[2])
    places = [d for d in range(len(part)) if d not in numbers.update_window_dims]  # of the indices
    for a, i in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        yield Tie({0: a, 1: i, 2: places[i]}, {0: a})
    whole = [d for d in range(len(shape)) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
    for d, at in zip(whole, numbers.update_window_dims, strict=True):
        if part[at] == shape[d] and d not in numbers.scatter_dims_to_operand_dims:
            yield Tie({0: d, 2: at}, {0: d})


def _tile(eqn: Eqn) -> Iterator[Tie]:
    yield from (Tie({0: d}, {0: d}) for d, times in enumerate(eqn.params["reps"]) if times == 1)


_PUTS = ("scatter", *(f"scatter{c}{how}" for c in "-_" for how in ("add", "max", "min", "mul", "sub")))
_MATRICES = (
    "cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd",
    "triangular_solve", "tridiagonal",
)  # fmt: skip

_RULES: dict[str, Callable[[Eqn], Iterator[Tie]]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys((*REDUCTIONS, "argmax", "argmin"), _reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _but("axis")),
    **dict.fromkeys(_MATRICES, _batched(lambda eqn: 2)),
    **dict.fromkeys(_PUTS, _scatter),
    "broadcast_in_dim": _broadcast,
    "concatenate": _but("dimension"),
    "conv_general_dilated": _conv,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "fft": _batched(lambda eqn: len(eqn.params["fft_lengths"])),
    "gather": _gather,
    "iota": _iota,
    "lu_pivots_to_permutation": _batched(lambda eqn: 1),
    "optimization_barrier": _barrier,
    "pad": _pad,
    "random_bits": _drawn,
    "reshape": _reshape,
    "rev": _but("dimensions"),
    "slice": _slice,
    "sort": _but("dimension"),
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "top_k": _but("axis"),
    "transpose": _transpose,
}
