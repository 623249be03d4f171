"""Equations in blocks: what each block gives is that block of what the whole equation gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from manymesh import _compat
from manymesh._passes._blocks._ties import block_eqn, joins_blocks, put_together, taken_apart, tie_of

COUNT = 2
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 2)), jnp.float32)
ROW = X[:, :1]
SQUARES = jnp.einsum("lij,lik->ljk", X, X)[:, :2, :2] + 3 * jnp.eye(2)
PLACES = jnp.asarray([[[[1]], [[0]]] * 3] * 4, jnp.int32)


def gathered(x, i, sizes, at, batch=()):
    """Elements of ``x`` at places along one dimension."""
    whole = [d for d in range(x.ndim) if d not in (*at, *batch)]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(0, 2)[: len(whole)] if whole else (), collapsed_slice_dims=at, start_index_map=at,
        operand_batching_dims=batch, start_indices_batching_dims=batch,
    )  # fmt: skip
    return lax.gather_p.bind(
        x, i, dimension_numbers=numbers, slice_sizes=sizes, indices_are_sorted=False, unique_indices=False,
        mode=lax.GatherScatterMode.CLIP, fill_value=None,
    )  # fmt: skip


def put(x, i, u, window, at, batch=()):
    """Elements added to those of ``x`` at places along one dimension."""
    numbers = lax.ScatterDimensionNumbers(window, at, at, batch, batch)
    return lax.scatter_add_p.bind(
        x, i, u, dimension_numbers=numbers, indices_are_sorted=False, unique_indices=False,
        mode=lax.GatherScatterMode.CLIP, update_jaxpr=None, update_consts=(),
    )  # fmt: skip


# name -> the function, its operands, the dimension of the first operand that is cut.
CASES = {
    "elementwise": (lambda x, y: x * y, (X, X + 1), 1),
    "length one": (lambda x, y: x * y, (X, ROW), 1),
    "length one, cut": (lambda x, y: x * y, (X, ROW), 0),
    "a number": (lambda x, p, y: lax.select_n(p, x, y), (X, jnp.bool_(True), X + 1), 0),
    "clamp": (lambda x: lax.clamp(-0.5, x, 0.5), (X,), 0),
    "cast": (lambda x: x.astype(jnp.bfloat16), (X,), 2),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (3, 4, 6, 2, 5), (1, 2, 3)), (X,), 1),
    "reshape": (lambda x: lax.reshape(x, (8, 3, 2)), (X,), 0),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), (X,), 0),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (ROW,), 2),
    "sum": (lambda x: jnp.sum(x, 1), (X,), 2),
    "sum over blocks": (lambda x: jnp.sum(x, (0, 1)), (X,), 0),
    "max over blocks": (lambda x: jnp.max(x), (X,), 1),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), (X,), 0),
    "cumsum": (lambda x: lax.cumsum(x, 1), (X,), 0),
    "sort": (lambda x: lax.sort(x, dimension=2), (X,), 0),
    "rev": (lambda x: lax.rev(x, (1,)), (X,), 0),
    "slice": (lambda x: lax.slice(x, (0, 1, 0), (4, 5, 2)), (X,), 0),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice_p.bind(x, i, i, i, slice_sizes=(4, 2, 1)), (X, jnp.int32(1)), 0),
    "dynamic_update_slice": (lambda x, u, i: lax.dynamic_update_slice_p.bind(x, u, i, i, i), (X, X[:, :2], jnp.int32(1)), 0),
    "pad": (lambda x: lax.pad(x, jnp.float32(1), ((0, 0, 0), (1, 2, 0), (0, 0, 1))), (X,), 0),
    "concatenate": (lambda x, y: lax.concatenate((x, y), 1), (X, ROW), 0),
    "batched product": (lambda x, y: lax.dot_general(x, y, (((2,), (2,)), ((0,), (0,)))), (X, X + 1), 0),
    "product, rows": (lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((), ()))), (X, jnp.ones((5, 2))), 1),
    "cholesky": (lambda x: lax.linalg.cholesky_p.bind(x), (SQUARES,), 0),
    "eigh": (lambda x: lax.linalg.eigh(x, symmetrize_input=False), (SQUARES,), 0),
    "svd": (lambda x: lax.linalg.svd(x), (SQUARES,), 0),
    "lu": (lambda x: lax.linalg.lu(x), (SQUARES,), 0),
    "permutation": (lambda x: lax.linalg.lu_pivots_to_permutation(x, 3), (jnp.ones((4, 3), jnp.int32),), 0),
    "triangular_solve": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), (SQUARES, SQUARES + 1), 0),
    "fft": (lambda x: lax.fft_p.bind(x, fft_type=lax.FftType.FFT, fft_lengths=(2,)), (X.astype(jnp.complex64),), 1),
    "top_k": (lambda x: lax.top_k(x, 3), (X.transpose(2, 0, 1),), 0),
    "convolution": (lambda x, k: lax.conv(x, k, (1,), "SAME"), (X, jnp.ones((3, 6, 3))), 0),
    "looked up side by side": (lambda x, i: gathered(x, i, (1, 1, 1), batch=(0, 1), at=(2,)), (X, PLACES), 0),
    "looked up, whole": (lambda x, i: gathered(x, i, (4, 1, 2), at=(1,)), (X, PLACES[0, :, 0]), 0),
    "reshape, behind a one": (lambda x: lax.reshape(x, (1, 8, 6)), (X,), 0),
    "repeated": (lambda x: lax.tile_p.bind(x, reps=(1, 2, 3)), (X,), 0),
    "put side by side": (lambda x, i, u: put(x, i, u, window=(), at=(2,), batch=(0, 1)), (X, PLACES, X[..., :1]), 0),
    "put whole": (lambda x, i, u: put(x, i, u, window=(0, 2), at=(1,)), (X, PLACES[0, :, 0], X), 0),
    "product over blocks": (lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))), (X, X[:, 0]), 0),
}  # fmt: skip
if jax.__version_info__ >= (0, 10, 1):  # before, it is several equations
    CASES["stack"] = (lambda x, y: jnp.stack([x, y], 1), (X, X + 1), 1)


def equation(fun, operands):
    (eqn,) = _compat.open_jaxpr(jax.make_jaxpr(fun)(*operands)).eqns
    return eqn


def evaluate(eqn, operands):
    out = eqn.primitive.bind(*operands, **eqn.params)
    return list(out) if eqn.primitive.multiple_results else [out]


def block(x, dim, k):
    size = x.shape[dim] // COUNT
    return lax.slice_in_dim(x, k * size, (k + 1) * size, axis=dim)


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_an_equation(name):
    fun, operands, dim = CASES[name]
    jaxpr = _compat.open_jaxpr(jax.make_jaxpr(fun)(*operands))
    (eqn,) = jaxpr.eqns
    values = dict(zip(jaxpr.invars, operands, strict=True))
    given = [values[v] if _compat.is_var(v) else v.val for v in eqn.invars]
    tie = tie_of(eqn, eqn.invars.index(jaxpr.invars[0]), dim, COUNT)
    assert tie is not None
    whole = evaluate(eqn, given)
    made = []
    for k in range(COUNT):
        own = [block(x, tie.operands[i], k) if i in tie.operands else x for i, x in enumerate(given)]
        new = block_eqn(eqn, tie, COUNT, eqn.invars)
        made.append(evaluate(new, own))
        assert [v.aval.shape for v in new.outvars] == [x.shape for x in made[-1]]
    for o, expected in enumerate(whole):
        parts = [outs[o] for outs in made]
        if tie.combined_by:
            combine = {"add": jnp.add, "max": jnp.maximum}[tie.combined_by]
            found = functools.reduce(combine, parts)
        else:
            found = jnp.concatenate(parts, tie.results[o])
            back = tie_of(eqn, ~o, tie.results[o], COUNT)  # the same from the other side
            assert back is not None and (back.operands, back.results) == (tie.operands, tie.results)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("fun", "operands", "dim"),
    [
        (lambda x: lax.cumsum(x, 0), (X,), 0),
        (lambda x: lax.sort(x, dimension=1), (X,), 1),
        (lambda x: lax.slice(x, (1, 0, 0), (4, 6, 2)), (X,), 0),
        (lambda x: lax.reshape(x, (3, 8, 2)), (X,), 0),
        (lambda x: lax.reshape(x, (4, 12)), (X,), 1),
        (lambda x: lax.argmax(x, 0, jnp.int32), (X,), 0),
        (lambda x, y: lax.concatenate((x, y), 0), (X, X), 0),
        (lambda x: lax.pad(x, jnp.float32(1), ((1, 0, 0), (0, 0, 0), (0, 0, 0))), (X,), 0),
        (jnp.sin, (X[:3],), 0),
    ],
)
def test_what_cannot_be_done_in_blocks(fun, operands, dim):
    """It mixes the blocks, or there are no equal ones."""
    assert tie_of(equation(fun, operands), 0, dim, COUNT) is None


def test_parts():
    """What takes a value apart, what puts one together, and in which block each part is."""
    part = taken_apart(equation(lambda x: lax.slice(x, (2, 0, 0), (3, 6, 2)), (X,)))
    assert (part.dim, part.ranges, part.blocks(4, 2)) == (0, ((2, 3),), (1,))
    assert taken_apart(equation(lambda x: lax.slice(x, (1, 0, 0), (3, 6, 2)), (X,))).blocks(4, 2) is None
    assert taken_apart(equation(lambda x: lax.slice(x, (1, 1, 0), (3, 6, 2)), (X,))) is None
    assert taken_apart(equation(lambda x: lax.slice(x, (0, 0, 0), (4, 6, 2), (2, 1, 1)), (X,))) is None
    assert taken_apart(equation(lambda x: lax.split(x, (1, 3)), (X,))).blocks(4, 2) is None
    assert taken_apart(equation(lambda x: lax.split(x, (2, 2, 0)), (X,))).blocks(4, 2) == (
        0,
        1,
        1,
    )  # nothing is anywhere
    assert taken_apart(equation(lambda x: lax.split(x, (0, 0)), (X[:0],))).blocks(0, 2) is None
    joined = put_together(equation(lambda x, y: lax.concatenate((x, y, y), 1), (X, ROW)))
    assert (joined.dim, joined.ranges) == (1, ((0, 6), (6, 7), (7, 8)))
    if jax.__version_info__ >= (0, 10, 1):  # before, these are several equations
        pieces = taken_apart(equation(lambda x: jnp.unstack(x), (X,)))
        assert pieces.blocks(4, 2) == (0, 0, 1, 1) and pieces.blocks(4, 3) is None
        stack = equation(lambda x, y: jnp.stack([x, x, y, x], 1), (X, X))
        assert joins_blocks(stack, 1, 2) == (0, 0, 1, 1) and joins_blocks(stack, 0, 2) is None
