"""Arithmetic of factorizations, solvers and Fourier transforms, by the counts of textbooks.

Golub and Van Loan, Matrix Computations (4th ed., 2013), for square and rectangular matrices; an FFT takes 5 N log2 N
operations on complex numbers, half on real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from .. import _compat
from .._compat import Atom, Eqn
from .._passes._unreduced._links import shape_of


def factored(eqn: Eqn) -> float | None:
    """Operations of an equation of this kind, all matrices of a batch together; None for another one."""
    count = _COUNTS.get(eqn.primitive.name)
    return None if count is None else count(eqn)


def _of_matrices(count: Callable[[float, float, Eqn], float]) -> Callable[[Eqn], float]:
    """A count for one matrix, of its longer and its shorter side, as one for a batch of them."""

    def of_batch(eqn: Eqn) -> float:
        *batch, rows, columns = shape_of(eqn.invars[0])
        return math.prod(batch) * count(max(rows, columns), min(rows, columns), eqn)

    return of_batch


def _reflections(m: float, n: float, eqn: Eqn) -> float:
    return 2 * m * n**2 - 2 * n**3 / 3


def _svd(m: float, n: float, eqn: Eqn) -> float:
    if not eqn.params.get("compute_uv", True):
        return 4 * m * n**2 - 4 * n**3 / 3
    if eqn.params.get("full_matrices", False):
        return 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    return 14 * m * n**2 + 8 * n**3


def _triangular(eqn: Eqn) -> float:
    return float(math.prod(shape_of(eqn.invars[1])) * shape_of(eqn.invars[0])[-1])


def _fft(eqn: Eqn) -> float:
    lengths = math.prod(eqn.params["fft_lengths"])
    ends = (eqn.invars[0], eqn.outvars[0])
    values = max(math.prod(shape_of(v)) for v in ends)  # of a real transform its real end
    each = 5.0 if all(_is_complex(v) for v in ends) else 2.5
    return each * values * math.log2(max(lengths, 2))


def _is_complex(v: Atom) -> bool:
    return jnp.issubdtype(_compat.dtype(v), jnp.complexfloating)


_COUNTS: Mapping[str, Callable[[Eqn], float]] = {
    "cholesky": _of_matrices(lambda m, n, eqn: n**3 / 3),
    "lu": _of_matrices(lambda m, n, eqn: m * n**2 - n**3 / 3),
    "geqrf": _of_matrices(_reflections),
    "geqp3": _of_matrices(_reflections),
    "householder_product": _of_matrices(_reflections),
    "qr": _of_matrices(lambda m, n, eqn: 2 * _reflections(m, n, eqn)),  # both factors
    "eigh": _of_matrices(lambda m, n, eqn: 9 * n**3),
    "eig": _of_matrices(lambda m, n, eqn: 25 * n**3),
    "schur": _of_matrices(lambda m, n, eqn: 25 * n**3),
    "svd": _of_matrices(_svd),
    "triangular_solve": _triangular,
    "fft": _fft,
}
