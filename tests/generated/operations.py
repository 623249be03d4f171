"""The catalogue: functions of JAX as users write them, each from rows to rows.

An operation takes ``x: float32[rows, WIDTH]`` and a `Surroundings` with a kernel, token ids and a random key. What it
returns is cast and broadcast to the shape and dtype of ``x``, so that any operation can follow any other. Results stay
of the order of one, and no operation needs more than one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

WIDTH = 4


@dataclass
class Surroundings:
    """What an operation may use besides its operand.

    Attributes:
      kernel: float32[WIDTH, WIDTH], a parameter.
      ids: int32[rows], between 0 and 7.
      key: a random key of any implementation, typed or raw; None where none came in.
    """

    kernel: jax.Array
    ids: jax.Array
    key: Any


@dataclass(frozen=True)
class Operation:
    """One function and where it can be.

    Attributes:
      fun: ``(x, Surroundings) -> anything that broadcasts to x``.
      unsharded: it needs its operands whole, on a submesh of one device.
      coarse: it computes in fewer bits, so that results agree to fewer.
      random: it needs a key.
      alone: it cannot be under vmap.
      backwards: it has no derivative forwards, or none that can be differentiated.
      once: it can be differentiated once only.
    """

    fun: Callable[[Any, Surroundings], Any]
    unsharded: bool = False
    coarse: bool = False
    random: bool = False
    alone: bool = False
    backwards: bool = False
    once: bool = False


OPERATIONS: dict[str, Operation] = {}


def operation(fun=None, name=None, **flags):
    """Registers a function under its name."""

    def register(f):
        OPERATIONS[name or f.__name__.rstrip("_")] = Operation(f, **flags)
        return f

    return register if fun is None else register(fun)


def apply(name: str, x: Any, around: Surroundings) -> Any:
    """The operation's result with the shape and dtype of ``x``."""
    y = OPERATIONS[name].fun(x, around)
    return jnp.broadcast_to(jnp.asarray(y), x.shape).astype(x.dtype)


def unit(x):
    """``x`` between 0.1 and 0.9."""
    return 0.5 + 0.4 * jnp.tanh(x)


def wide(x):
    """``x`` as whole numbers of an integer type."""
    return jnp.round(x * 8).astype(jnp.int32)


# Every entry is one line, because there are many: the name, and what a user would write.
SIMPLE: dict[str, Callable[[Any, Surroundings], Any]] = {
    # Python numbers on the left, and the builtin sum, which begins with 0 + x
    "zero_left": lambda x, c: jnp.tanh((0 + x) @ c.kernel),
    "builtin_sum": lambda x, c: sum([x, x @ c.kernel, jnp.tanh(x)]) / 3,
    "builtin_sum_of_rows": lambda x, c: sum(x[:, i] for i in range(WIDTH))[:, None] / WIDTH,
    "two_times": lambda x, c: 2 * x,
    "one_minus": lambda x, c: 1 - x,
    "one_over": lambda x, c: 1 / (1 + x * x),
    "half_times_left": lambda x, c: 0.5 * x + 0.5,
    "power_left": lambda x, c: 2.0 ** jnp.tanh(x),
    "python_max": lambda x, c: jnp.maximum(0, x),
    "modulo_left": lambda x, c: 3 % (2 + jnp.tanh(x)),
    "true_times": lambda x, c: True * x,
    "numpy_scalar": lambda x, c: np.float32(0.5) * x + np.int32(1),
    "numpy_mask": lambda x, c: jnp.where(np.arange(WIDTH) % 2 == 0, jax.nn.gelu(x), x),
    "numpy_mask_in_jit": lambda x, c: (
        jax.nn.softmax(jax.jit(lambda w: jnp.where(np.tri(WIDTH, dtype=bool), w, -1))(c.kernel)) @ x[0] + x
    ),
    "appended_number": lambda x, c: jnp.append(jnp.ravel(x), 0.5)[: x.size].reshape(x.shape) + jnp.ravel(0.25),
    "numpy_constant": lambda x, c: x * np.linspace(0.5, 1, WIDTH, dtype=np.float32),
    # Numbers that are equal, and not the same
    "both_zeros": lambda x, c: jnp.copysign(x, 0.0) + 0.3 * jnp.copysign(x, -0.0),
    "one_and_true": lambda x, c: x * jnp.full((), 1.0) + 0.5 * x * jnp.full((), True) + jnp.full((), 1),
    "not_a_number": lambda x, c: jnp.where(jnp.isnan(jnp.float32(np.nan)), x, 0) + jnp.where(x == np.nan, 1, 0),
    "infinities": lambda x, c: jnp.minimum(x, np.inf) + jnp.maximum(x, -np.inf) * (x < np.inf),
    # Elementwise
    "negative": lambda x, c: -x,
    "sine": lambda x, c: jnp.sin(x),
    "cosine": lambda x, c: jnp.cos(x),
    "tangent": lambda x, c: jnp.tan(jnp.tanh(x)),
    "arcsine": lambda x, c: jnp.arcsin(unit(x)),
    "arccosine": lambda x, c: jnp.arccos(unit(x)),
    "arctangent": lambda x, c: jnp.arctan(x),
    "arctangent_two": lambda x, c: jnp.arctan2(x, 1 + x * x),
    "hyperbolic_sine": lambda x, c: jnp.sinh(jnp.tanh(x)),
    "hyperbolic_cosine": lambda x, c: jnp.cosh(jnp.tanh(x)),
    "tanh": lambda x, c: jnp.tanh(x),
    "area_sine": lambda x, c: jnp.arcsinh(x),
    "area_cosine": lambda x, c: jnp.arccosh(1.5 + x * x),
    "area_tangent": lambda x, c: jnp.arctanh(unit(x)),
    "exponential": lambda x, c: jnp.exp(-jnp.abs(x)),
    "exponential_two": lambda x, c: jnp.exp2(jnp.tanh(x)),
    "expm1": lambda x, c: jnp.expm1(jnp.tanh(x)),
    "logarithm": lambda x, c: jnp.log(1 + x * x),
    "log1p": lambda x, c: jnp.log1p(jnp.square(x)),
    "sigmoid": lambda x, c: jax.nn.sigmoid(x),
    "root": lambda x, c: jnp.sqrt(1 + x * x),
    "reciprocal_root": lambda x, c: lax.rsqrt(1 + x * x),
    "cube_root": lambda x, c: jnp.cbrt(2 + jnp.tanh(x)),
    "power": lambda x, c: unit(x) ** unit(-x),
    "cube": lambda x, c: jnp.tanh(x) ** 3,
    "absolute": lambda x, c: jnp.abs(x),
    "sign": lambda x, c: jnp.sign(x) * x,
    "floor": lambda x, c: x - jnp.floor(x),
    "ceil": lambda x, c: 0.2 * jnp.ceil(x) + x,
    "round": lambda x, c: 0.2 * jnp.round(x) + x,
    "trunc": lambda x, c: 0.2 * jnp.trunc(x) + x,
    "is_finite": lambda x, c: jnp.where(jnp.isfinite(x), x, 0.0),
    "remainder": lambda x, c: jnp.fmod(x, 1.5),
    "modulo": lambda x, c: x % 1.5,
    "clip": lambda x, c: jnp.clip(x, -1, 1),
    "clamp": lambda x, c: lax.clamp(-0.5, x, 0.5),
    "next_after": lambda x, c: jnp.nextafter(lax.stop_gradient(x), jnp.inf) + x,
    "erf": lambda x, c: lax.erf(x),
    "erfc": lambda x, c: lax.erfc(x),
    "erf_inverse": lambda x, c: lax.erf_inv(unit(x)),
    "log_gamma": lambda x, c: lax.lgamma(1 + unit(x)),
    "digamma": lambda x, c: lax.digamma(1 + unit(x)),
    "polygamma": lambda x, c: 0.1 * jax.scipy.special.polygamma(1, lax.stop_gradient(1 + unit(x))) + x,
    "zeta": lambda x, c: 0.1 * lax.zeta(3.0 + lax.stop_gradient(unit(x)), 1.5) + x,
    "incomplete_gamma": lambda x, c: lax.igamma(1.5, unit(x)),
    "incomplete_gamma_complement": lambda x, c: lax.igammac(1.5, unit(x)),
    "incomplete_beta": lambda x, c: lax.betainc(1.5, 2.0, unit(x)),
    "bessel": lambda x, c: lax.bessel_i0e(x) + lax.bessel_i1e(x),
    "select": lambda x, c: jnp.where(x > 0.1, x, -0.5 * x),
    "select_by_id": lambda x, c: jnp.where(c.ids[:, None] > 3, x, 0.0),
    "select_n": lambda x, c: lax.select_n(jnp.broadcast_to(c.ids[:, None] % 3, x.shape), x, -x, 0.5 * x),
    "not_equal": lambda x, c: x * (c.ids[:, None] != 0),
    "logical": lambda x, c: x * ((c.ids > 1) & ~(c.ids == 5) | (c.ids <= 0) ^ (c.ids >= 7))[:, None],
    "relu": lambda x, c: jax.nn.relu(x),
    "leaky_relu": lambda x, c: jax.nn.leaky_relu(x),
    "gelu": lambda x, c: jax.nn.gelu(x),
    "silu": lambda x, c: jax.nn.silu(x),
    "softplus": lambda x, c: jax.nn.softplus(x),
    "elu": lambda x, c: jax.nn.elu(x),
    "softmax": lambda x, c: jax.nn.softmax(x),
    "log_softmax": lambda x, c: jax.nn.log_softmax(x),
    "logsumexp": lambda x, c: jax.nn.logsumexp(x, axis=-1, keepdims=True),
    "standardize": lambda x, c: jax.nn.standardize(x, epsilon=0.1),
    "logaddexp": lambda x, c: jnp.logaddexp(x, 0.0),
    "sinc": lambda x, c: jnp.sinc(x),
    "ldexp": lambda x, c: jnp.ldexp(0.1 * x, c.ids[:, None] % 3),
    "frexp": lambda x, c: x + 0.1 * jnp.frexp(lax.stop_gradient(x))[1],
    "hypot": lambda x, c: jnp.hypot(x, 1.0),
    "nan_to_num": lambda x, c: jnp.nan_to_num(x),
    "reduce_precision": lambda x, c: lax.reduce_precision(x, 8, 20),
    "stop_gradient": lambda x, c: lax.stop_gradient(x) * 0.5 + x,
    "optimization_barrier": lambda x, c: lax.optimization_barrier((x, c.kernel))[0],
    "copy": lambda x, c: jnp.copy(x),
    "complex_numbers": lambda x, c: jnp.abs(lax.complex(x, 1 + jnp.tanh(x)) * (0.3 + 0.4j)),
    "complex_conjugate": lambda x, c: jnp.real(jnp.conj(lax.complex(x, 0.5 * x)) * 1j) + x,
    "complex_exponential": lambda x, c: jnp.imag(jnp.exp(1j * x)),
    "complex_angle": lambda x, c: jnp.angle(lax.complex(2 + jnp.tanh(x), x)),
    # Integers and bits
    "integer_division": lambda x, c: x + (c.ids // 2)[:, None] * 0.1,
    "integer_remainder": lambda x, c: x + (c.ids % 3)[:, None] * 0.1,
    "integer_power": lambda x, c: x + (c.ids**2)[:, None] * 0.01,
    "integer_clip": lambda x, c: x + jnp.clip(c.ids, 1, 4)[:, None] * 0.1,
    "lax_remainder": lambda x, c: x + lax.rem(c.ids, jnp.int32(3))[:, None] * 0.1,
    "shift_left": lambda x, c: x + (c.ids << 2)[:, None] * 0.01,
    "shift_right": lambda x, c: x + ((c.ids - 4) >> 1)[:, None] * 0.1,
    "shift_right_logical": lambda x, c: x + lax.shift_right_logical(c.ids, 1)[:, None] * 0.1,
    "bit_and": lambda x, c: x + (c.ids & 3)[:, None] * 0.1,
    "bit_or_not": lambda x, c: x + (~c.ids | 1)[:, None] * 0.1,
    "bit_xor": lambda x, c: x + (c.ids ^ 5)[:, None] * 0.1,
    "population_count": lambda x, c: x + lax.population_count(c.ids)[:, None] * 0.1,
    "leading_zeros": lambda x, c: x + (lax.clz(c.ids) - 29)[:, None] * 0.1,
    "bitcast": lambda x, c: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32), jnp.float32) + x,
    "sign_bit": lambda x, c: jnp.where(jnp.signbit(x), -x, x),
    "unsigned": lambda x, c: x + (c.ids.astype(jnp.uint8) - jnp.uint8(9)).astype(jnp.float32)[:, None] / 256,
    "small_integers": lambda x, c: x + (c.ids.astype(jnp.int4) * 3).astype(jnp.float32)[:, None] * 0.1,
    "quantize": lambda x, c: x + (lax.stop_gradient(jnp.round(x * 16).astype(jnp.int8)) - x) * 0.05,
    "integer_matmul": lambda x, c: (
        x + (wide(lax.stop_gradient(x)).astype(jnp.int8) @ np.eye(WIDTH, dtype=np.int8)) * 0.01
    ),
    "unsigned_count": lambda x, c: x + (9 - jnp.sum(x > 0, -1, dtype=jnp.uint32)).astype(jnp.float32)[:, None] * 0.1,
    "unsigned_count_of_rows": lambda x, c: x + (99 - jnp.sum(c.ids > 3, dtype=jnp.uint32)).astype(jnp.float32) * 0.01,
    "unsigned_below_zero": lambda x, c: x + (c.ids.astype(jnp.uint32) - 9).astype(jnp.float32)[:, None] * 2.0**-32,
    "sum_that_wraps": lambda x, c: x + jnp.sum(c.ids.astype(jnp.uint8) * 99, dtype=jnp.uint8) * 0.01,
    "product_that_wraps": lambda x, c: x + (c.ids * np.int32(2**30 + 1)).astype(jnp.float32)[:, None] * 2.0**-32,
    "sum_of_small": lambda x, c: x + jnp.sum(c.ids.astype(jnp.int8) * 9) * 0.001,
    "mean_of_bools": lambda x, c: x * jnp.mean(c.ids > 2) + jnp.mean(x > 0),
    "bytes_of_ids": lambda x, c: x + lax.bitcast_convert_type(c.ids, jnp.uint8).astype(jnp.float32) * 0.1,
    "packed_bits": lambda x, c: x + jnp.packbits(c.ids[:, None] > np.arange(8), axis=1) * 0.001,
    # Shapes
    "reshape": lambda x, c: x.reshape(-1).reshape(x.shape),
    "transpose": lambda x, c: (x.T * 0.5).T,
    "swap": lambda x, c: jnp.swapaxes(x[None], 0, 1)[:, 0],
    "expand": lambda x, c: (x[:, None, :] * x[:, :, None]).sum(-1) * 0.3,
    "squeeze": lambda x, c: jnp.squeeze(jnp.expand_dims(x, (0, 2)), (0, 2)),
    "broadcast": lambda x, c: jnp.broadcast_to(x[:, :1], x.shape),
    "concatenate": lambda x, c: jnp.concatenate([x, -x], axis=1)[:, 2:6],
    "concatenate_rows": lambda x, c: jnp.concatenate([x, x], axis=0)[: x.shape[0]],
    "stack": lambda x, c: jnp.stack([x, 2 * x, -x]).sum(0) * 0.4,
    "split": lambda x, c: jnp.concatenate(jnp.split(x, 2, axis=1)[::-1], axis=1),
    "array_split": lambda x, c: jnp.hstack(jnp.array_split(x, 3, axis=1)[::-1]),
    "lax_split": lambda x, c: jnp.concatenate(lax.split(x, (1, 3), axis=1)[::-1], axis=1),
    "pad": lambda x, c: jnp.pad(x, ((0, 0), (1, 1)))[:, :WIDTH],
    "pad_edge": lambda x, c: jnp.pad(x, ((0, 0), (1, 1)), mode="edge")[:, 2:],
    "slice": lambda x, c: jnp.tile(x[:, 1:3], (1, 2)),
    "strided_slice": lambda x, c: jnp.repeat(x[:, ::2], 2, axis=1),
    "negative_stride": lambda x, c: x[:, ::-1],
    "flip": lambda x, c: jnp.flip(x, axis=0),
    "roll": lambda x, c: jnp.roll(x, 1, axis=1),
    "roll_rows": lambda x, c: jnp.roll(x, 1, axis=0),
    "arange": lambda x, c: x * (1 + jnp.arange(WIDTH) / WIDTH),
    "iota": lambda x, c: x + lax.broadcasted_iota(jnp.float32, x.shape, 1) * 0.1,
    "eye": lambda x, c: x @ jnp.eye(WIDTH) + jnp.full((WIDTH,), 0.1) + jnp.zeros(()),
    "meshgrid": lambda x, c: x + jnp.meshgrid(jnp.arange(WIDTH), jnp.arange(x.shape[0]))[0] * 0.1,
    "triangle": lambda x, c: x @ jnp.tril(c.kernel),
    "causal_mask": lambda x, c: jnp.where(jnp.tril(jnp.ones((WIDTH, WIDTH), bool)), c.kernel, 0.0)[0] + x,
    "tile": lambda x, c: jnp.tile(x, (1, 2))[:, :WIDTH],
    "empty_slices": lambda x, c: jnp.concatenate(
        [x[:, :0], x, c.kernel[:0].sum(0) * x[:, WIDTH:].sum(-1, keepdims=True)], 1
    )[:, :WIDTH],
    "space_to_depth": lambda x, c: x.reshape(x.shape[0], 2, 2).transpose(0, 2, 1).reshape(x.shape),
    # Taking and putting
    "dynamic_slice": lambda x, c: lax.dynamic_slice_in_dim(jnp.concatenate([x, x], 1), c.ids[0] % 4, WIDTH, axis=1),
    "dynamic_index": lambda x, c: lax.dynamic_index_in_dim(x, c.ids[0] % WIDTH, axis=1),
    "dynamic_update_slice": lambda x, c: lax.dynamic_update_slice(x, x[:1, :2] * 0.5, (0, c.ids[0] % 3)),
    "take": lambda x, c: jnp.take(c.kernel, c.ids % WIDTH, axis=0) + x,
    "take_columns": lambda x, c: jnp.take(x, jnp.asarray([2, 0, 1, 1]), axis=1),
    "take_along": lambda x, c: jnp.take_along_axis(x, (c.ids % WIDTH)[:, None], axis=1),
    "index": lambda x, c: c.kernel[c.ids % WIDTH] * x,
    "index_pairs": lambda x, c: c.kernel[c.ids % WIDTH, (c.ids + 1) % WIDTH][:, None] + x,
    "index_dynamically": lambda x, c: c.kernel[c.ids[0] % WIDTH] + x,
    "index_of_fraction": lambda x, c: x + c.kernel[jnp.floor(jnp.float32(1.7)).astype(jnp.int32)],
    "index_computed": lambda x, c: x + c.kernel[jnp.int32(jnp.nan_to_num(jnp.tanh(x[:, 0]) * 3 + 3) // 2)],
    "index_out_of_range": lambda x, c: x + c.kernel[c.ids] + c.kernel.at[c.ids].get(mode="fill", fill_value=0.5),
    "index_negative": lambda x, c: x + c.kernel[c.ids - 7] + c.kernel[-1] * x[:, -2:-1],
    "index_wrapped": lambda x, c: x + jnp.take(c.kernel, c.ids - 3, axis=0, mode="wrap"),
    "index_of_bools": lambda x, c: x + c.kernel[(c.ids > 3).astype(jnp.int8)],
    "embedding": lambda x, c: jax.nn.one_hot(c.ids, WIDTH) @ c.kernel + x,
    "one_hot": lambda x, c: jax.nn.one_hot(c.ids % 3, WIDTH) * x,
    "set_at": lambda x, c: x.at[:, 1].set(0.5),
    "set_at_value": lambda x, c: x.at[0].set(x[-1] * 2),
    "add_at": lambda x, c: x.at[:, c.ids[0] % WIDTH].add(0.5),
    "add_at_many": lambda x, c: jnp.zeros((8, WIDTH)).at[c.ids].add(x)[c.ids] * 0.5,
    "multiply_at": lambda x, c: x.at[:, 2].multiply(0.5),
    "subtract_at": lambda x, c: x.at[:, 0].add(-x[:, 1]),
    "drop_at": lambda x, c: x.at[c.ids * 3 - 2].set(0.5, mode="drop"),
    "max_at": lambda x, c: lax.stop_gradient(x).at[:, 0].max(0.2) + x,
    "min_at": lambda x, c: lax.stop_gradient(x).at[:, 0].min(0.2) + x,
    "power_at": lambda x, c: lax.stop_gradient(jnp.abs(x) + 1).at[:, 0].power(2.0) * x * 0.3,
    "segment_sum": lambda x, c: jax.ops.segment_sum(x, c.ids, num_segments=8)[c.ids] * 0.5,
    "segment_max": lambda x, c: jax.ops.segment_max(lax.stop_gradient(x), c.ids, num_segments=8)[c.ids] + x,
    "bin_count": lambda x, c: jnp.bincount(c.ids, length=8)[c.ids][:, None] * 0.1 + x,
    "search_sorted": lambda x, c: jnp.searchsorted(jnp.asarray([0.5, 2.5, 4.5]), c.ids)[:, None] * 0.1 + x,
    "digitize": lambda x, c: jnp.digitize(c.ids, np.array([1, 4]))[:, None] * 0.1 + x,
    "put_along": lambda x, c: jnp.put_along_axis(x, (c.ids % WIDTH)[:, None], 0.5, axis=1, inplace=False),
    "interpolate": lambda x, c: jnp.interp(x, jnp.asarray([-2.0, 0.0, 2.0]), jnp.asarray([0.0, 1.0, 0.5])),
    # Reductions and scans
    "reduce_sum": lambda x, c: x.sum(axis=-1, keepdims=True) * 0.3,
    "reduce_sum_all": lambda x, c: x + x.sum() * 0.05,
    "reduce_mean": lambda x, c: x - x.mean(axis=0),
    "reduce_max": lambda x, c: x - x.max(axis=-1, keepdims=True),
    "reduce_min": lambda x, c: x - x.min(axis=-1, keepdims=True),
    "reduce_product": lambda x, c: jnp.prod(jnp.tanh(x), axis=-1, keepdims=True) + x,
    "reduce_and": lambda x, c: x * jnp.all(c.ids >= 0) + jnp.any(x > 5),
    "reduce_xor": lambda x, c: x + lax.reduce_xor(c.ids, (0,)) * 0.1,
    "reduce_bits": lambda x, c: x + (lax.reduce_or(c.ids, (0,)) - lax.reduce_and(c.ids, (0,))) * 0.1,
    "reduce_generic": lambda x, c: x + lax.reduce(lax.stop_gradient(x), -jnp.inf, lax.max, (1,))[:, None],
    "variance": lambda x, c: x * lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 0.1),
    "standard_deviation": lambda x, c: x / (1 + jnp.std(x + c.kernel[:1], axis=-1, keepdims=True)),
    "norm": lambda x, c: x / (1 + jnp.linalg.norm(x, axis=-1, keepdims=True)),
    "median": lambda x, c: x - jnp.median(x, axis=-1, keepdims=True),
    "quantile": lambda x, c: x - jnp.quantile(x, 0.3, axis=-1, keepdims=True),
    "argmax": lambda x, c: x + 0.1 * jnp.argmax(x, axis=-1)[:, None],
    "argmin": lambda x, c: x + 0.1 * jnp.argmin(x, axis=-1)[:, None],
    "argmax_of_bools": lambda x, c: x + 0.1 * jnp.argmax(c.ids[:, None] > np.arange(WIDTH), axis=-1)[:, None],
    "positions": lambda x, c: x + 0.05 * jnp.cumsum(jax.nn.one_hot(c.ids, WIDTH, dtype=jnp.int32), axis=0),
    "unique": lambda x, c: x + 0.1 * jnp.unique(c.ids, size=WIDTH, fill_value=-1),
    "argmax_of_ids": lambda x, c: x + 0.1 * jnp.argmax(c.ids),
    "nonzero": lambda x, c: x + 0.1 * jnp.stack(jnp.nonzero(c.kernel > 0, size=WIDTH)).sum(0),
    "count_nonzero": lambda x, c: x + 0.1 * jnp.count_nonzero(c.ids),
    "cumsum": lambda x, c: jnp.cumsum(x, axis=1) * 0.4,
    "cumsum_rows": lambda x, c: jnp.cumsum(x, axis=0) * 0.3,
    "cumsum_reverse": lambda x, c: lax.cumsum(x, axis=1, reverse=True) * 0.4,
    "cumprod": lambda x, c: jnp.cumprod(0.5 + unit(x), axis=1),
    # The gradient asks what is equal to the largest so far. XLA computes a function like the incomplete gamma twice for
    # that, and rounds it otherwise; in fewer bits both are the same.
    "cummax": lambda x, c: lax.cummax(lax.reduce_precision(x, 8, 10), axis=1),
    "cummin": lambda x, c: lax.cummin(lax.reduce_precision(x, 8, 10), axis=1),
    "cumlogsumexp": lambda x, c: lax.cumlogsumexp(x, axis=1),
    "associative_scan": lambda x, c: lax.associative_scan(lambda a, b: a * 0.5 + b, x, axis=1),
    "difference": lambda x, c: jnp.diff(x, axis=1, prepend=0),
    "sort": lambda x, c: jnp.sort(x, axis=-1),
    "sort_rows": lambda x, c: jnp.sort(x, axis=0),
    "argsort": lambda x, c: x + 0.1 * jnp.argsort(x, axis=-1),
    "sort_ids": lambda x, c: x[jnp.argsort(c.ids)],
    "sort_pairs": lambda x, c: lax.sort((x, -x), num_keys=1, dimension=1)[1],
    "top_k": lambda x, c: lax.top_k(x, 2)[0].sum(-1, keepdims=True),
    # Above what lies between the second and the third: XLA computes x again for the comparison and rounds it otherwise than
    # what it sorted, so that in plain `jax.jit`, too, the second may not reach itself.
    "top_k_mask": lambda x, c: x * (x >= lax.top_k(x, 3)[0][:, 1:].mean(1, keepdims=True)),
    "top_k_experts": lambda x, c: jax.nn.one_hot(lax.top_k(x, 2)[1], WIDTH).sum(1) * x,
    "trapezoid": lambda x, c: jnp.trapezoid(x, axis=1)[:, None] * 0.3,
    # Products
    "matmul": lambda x, c: x @ c.kernel,
    "matmul_transposed": lambda x, c: x @ c.kernel.T,
    "outer": lambda x, c: x + jnp.outer(x[:, 0], c.kernel[0]),
    "tensordot": lambda x, c: jnp.tensordot(x, c.kernel, axes=[[1], [1]]),
    "einsum": lambda x, c: jnp.einsum("bi,ij,j->bj", x, c.kernel, c.kernel[0]),
    "einsum_batch": lambda x, c: jnp.einsum("bhi,bhj->bij", x.reshape(-1, 2, 2), x.reshape(-1, 2, 2)).reshape(x.shape),
    "einsum_trace": lambda x, c: x + 0.1 * jnp.einsum("ii->", c.kernel),
    "vector_dot": lambda x, c: jnp.vdot(c.kernel[0], c.kernel[1]) + x,
    "kronecker": lambda x, c: x @ jnp.kron(c.kernel[:2, :2], jnp.eye(2)),
    "precise_matmul": lambda x, c: jnp.matmul(x, c.kernel, precision="highest"),
    "matmul_into_float32": lambda x, c: jnp.matmul(x, c.kernel, preferred_element_type=jnp.float32),
    "self_attention": lambda x, c: jax.nn.softmax(x @ x.T) @ x,
    "attention_mask": lambda x, c: jax.nn.softmax(jnp.where(c.ids[:, None] >= c.ids, x @ x.T, -1e9)) @ x,
    "bilinear": lambda x, c: jnp.sum((x @ c.kernel) * x, axis=-1, keepdims=True),
    "polynomial": lambda x, c: jnp.polyval(jnp.asarray([0.1, -0.2, 0.5]), x),
}
# Of what is sharded, XLA on CPU cannot reduce by bits; and before JAX 0.12 what is written at one place of a product with
# a sharded contraction comes out wrong where that dimension is sharded, under plain jax.jit as well.
_AT = ("set_at", "set_at_value", "add_at", "add_at_many", "multiply_at", "subtract_at", "max_at", "min_at", "power_at")
# A scan by a tree leaves interior padding, which XLA's partitioner gets wrong (0.10 to 0.12) where a device has one element
# of a dimension: jax.jit of ``lax.pad(x, 0., ((0, 0, 0), (1, 0, 1))) * y``, x [4, 1], and y [4, 2] sharded over the second.
_TREES = ("cumprod", "cummax", "cummin", "cumlogsumexp", "associative_scan")
# And the cotangent of rows that were turned around and stacked, ``f = jnp.flip(x, 0)`` in ``jnp.stack([f, 2 * f, -f])``, where
# a device has one row (0.10 to 0.12).
_UNSHARDED = ("reduce_xor", "reduce_bits", "flip", *_TREES, *(_AT if jax.__version_info__ < (0, 12) else ()))
for _name, _fun in SIMPLE.items():
    operation(_fun, name=_name, unsharded=_name in _UNSHARDED)


# In fewer bits


@operation(coarse=True)
def bfloat16(x, c):
    return (x.astype(jnp.bfloat16) @ c.kernel.astype(jnp.bfloat16)).astype(jnp.float32)


@operation(coarse=True)
def bfloat16_accumulated(x, c):
    return jnp.dot(x.astype(jnp.bfloat16), c.kernel.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


@operation(coarse=True)
def bfloat16_table(x, c):
    return c.kernel.astype(jnp.bfloat16)[c.ids % WIDTH].astype(x.dtype) + x


@operation()
def named_for_checkpoint(x, c):
    return checkpoint_name(jnp.tanh(x @ c.kernel), "hidden") + x


@operation(coarse=True)
def bfloat16_times_number(x, c):
    return x.astype(jnp.bfloat16) * 0.1 + 1


@operation(coarse=True)
def float16(x, c):
    return (x.astype(jnp.float16) * 0.5).astype(jnp.float32)


@operation(coarse=True)
def float8(x, c):
    return x + x.astype(jnp.float8_e4m3fn).astype(jnp.float32) * 0.1


@operation(coarse=True)
def float8_wide(x, c):
    return x + x.astype(jnp.float8_e5m2).astype(jnp.bfloat16) * 0.1
