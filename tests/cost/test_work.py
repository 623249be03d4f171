"""Our own count of what a computation does, beside what XLA says of it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manymesh._cost._operations import flatten, split_of, spread
from manymesh._cost._work import work

KEY = jax.random.key(0)


def counted(fun, *shapes, axes=None, ins=None, outs=None, on_cpu=True):
    """The work of a function of float32 arrays of these shapes."""
    closed = jax.make_jaxpr(fun)(*[jax.ShapeDtypeStruct(s, "float32") for s in shapes])
    axes = axes or {}
    splits = [split_of(p, len(s), axes) for p, s in zip(ins or [P()] * len(shapes), shapes, strict=True)]
    results = (
        None if outs is None else [split_of(p, len(v.shape), axes) for p, v in zip(outs, closed.out_avals, strict=True)]
    )
    return work(closed, axes, splits, results, on_cpu=on_cpu)


def attention(x, q, k, v):
    return jax.nn.dot_product_attention(*(jnp.einsum("bse,ehd->bshd", x, w) for w in (q, k, v)))


def perceptron(x, up, down):
    return x + jax.nn.gelu(x @ up) @ down


MODELS = {
    "perceptron": (perceptron, ((64, 32), (32, 128), (128, 32))),
    "its gradient": (jax.grad(lambda *a: jnp.sum(perceptron(*a) ** 2), (0, 1, 2)), ((64, 32), (32, 128), (128, 32))),
    "attention": (attention, ((4, 64, 32), (32, 4, 8), (32, 4, 8), (32, 4, 8))),
    "convolution": (
        lambda x, w: jax.lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        ((2, 17, 17, 8), (3, 3, 8, 16)),
    ),
    "padded convolution": (
        lambda x, w: jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        ((2, 7, 7, 8), (3, 3, 8, 16)),
    ),
    "dilated convolution": (
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", rhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        ((2, 9, 9, 8), (3, 3, 8, 16)),
    ),
    "depthwise": (
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8
        ),
        ((2, 10, 10, 8), (3, 3, 1, 16)),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_that_xla_counts(name):
    """To within three parts of a hundred; most of them products."""
    fun, shapes = MODELS[name]
    cost = jax.jit(fun).lower(*[jax.ShapeDtypeStruct(s, "float32") for s in shapes]).compile().cost_analysis()
    assert counted(fun, *shapes).flops == pytest.approx(cost["flops"] + cost.get("transcendentals", 0), rel=0.03)


N = 64
FACTORED = {  # what textbooks say for a matrix of N x N
    "cholesky": (lambda a: jax.lax.linalg.cholesky(a, symmetrize_input=False), N**3 / 3),
    "triangular": (lambda a: jax.lax.linalg.triangular_solve(a, a, left_side=True), N**3),
    "lu": (lambda a: jax.lax.linalg.lu(a)[0], 2 * N**3 / 3),
    "qr": (lambda a: jax.lax.linalg.qr(a), 8 * N**3 / 3),
    "eigh": (lambda a: jax.lax.linalg.eigh(a, symmetrize_input=False), 9 * N**3),
    "singular vectors": (lambda a: jax.lax.linalg.svd(a, full_matrices=False), 22 * N**3),
    "all singular vectors": (lambda a: jax.lax.linalg.svd(a, full_matrices=True), 21 * N**3),
    "singular values": (lambda a: jax.lax.linalg.svd(a, compute_uv=False), 8 * N**3 / 3),
    "fft": (lambda a: jax.lax.fft(jax.lax.complex(a, a), "FFT", (N,)), 5 * N**2 * math.log2(N)),
    "real fft": (lambda a: jax.lax.fft(a, "RFFT", (N,)), 2.5 * N**2 * math.log2(N)),
    "solve": (lambda a: jnp.linalg.solve(a, a), 2 * N**3 / 3 + 2 * N**3),
    "complex product": (lambda a: jax.lax.complex(a, a) @ jax.lax.complex(a, a), 8 * N**3),
}


@pytest.mark.parametrize("name", FACTORED)
def test_factorizations_count_as_textbooks_do(name):
    """Of each matrix of a batch; XLA says nothing of those that a library computes."""
    fun, each = FACTORED[name]
    assert counted(fun, (N, N)).flops == pytest.approx(each, rel=0.1)
    assert counted(jax.vmap(fun), (3, N, N)).flops == pytest.approx(3 * each, rel=0.1)


def grouped(x, w, groups=1):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_gradients_of_a_convolution_take_as_much_as_it_does(groups):
    """That of its kernel has groups in the batch where the convolution has them among the features, that of its input padding."""
    x, w = (2, 10, 10, 8), (3, 3, 8 // groups, 16)
    forward = counted(lambda x, w: grouped(x, w, groups), x, w)
    assert forward.matmul_flops == {"float32": 2 * 2 * 8 * 8 * 16 * 3 * 3 * 8 // groups}
    of_kernel = counted(
        lambda x, w, g: jax.linear_transpose(lambda w: grouped(x, w, groups), w)(g), x, w, (2, 8, 8, 16)
    )
    assert of_kernel.matmul_flops == forward.matmul_flops
    of_input = counted(lambda x, w, g: jax.linear_transpose(lambda x: grouped(x, w, groups), x)(g), x, w, (2, 8, 8, 16))
    assert of_input.matmul_flops == forward.matmul_flops


TURNED = {  # subscripts of a product with a kernel, whose gradient is a transposed product
    "kernel": "bd,df->bf",
    "a kernel of each expert": "ebd,edf->ebf",
}


@pytest.mark.parametrize("name", TURNED)
def test_a_gradient_of_a_kernel_is_written_once(name):
    """XLA multiplies the other way around and writes it as it is wanted."""
    left, right, out = TURNED[name].replace("->", ",").split(",")
    sizes = {"e": 4, "b": 64, "d": 32, "f": 64}
    x, w, g = (tuple(sizes[c] for c in names) for names in (left, right, out))

    def gradient(x, g):
        def product(w):
            return jnp.einsum(TURNED[name], x, w)

        return jax.linear_transpose(product, jax.ShapeDtypeStruct(w, "float32"))(g)

    compiled = jax.jit(gradient).lower(*[jax.ShapeDtypeStruct(s, "float32") for s in (x, g)]).compile()
    for on_cpu in (True, False):
        found = counted(gradient, x, g, on_cpu=on_cpu)
        assert found.temporary_bytes == compiled.memory_analysis().temp_size_in_bytes == 0
        assert found.bytes_read + found.bytes_written == compiled.cost_analysis()["bytes accessed"]


ORDERS = {  # dimensions that are summed over, and those of a batch, of each operand
    "first and first": (((0,), (0,)), ((), ()), (64, 32), (64, 48)),
    "first and last": (((0,), (1,)), ((), ()), (64, 32), (48, 64)),
    "in a batch": (((1,), (2,)), ((0,), (0,)), (4, 64, 32), (4, 48, 64)),
    "two of them": (((0, 1), (0, 1)), ((), ()), (4, 16, 32), (4, 16, 48)),
    "before two others": (((0,), (0,)), ((), ()), (4, 16, 32), (4, 48)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_product_on_cpu_copies_what_it_cannot_read(name):
    """Not an operand with one dimension of each kind, which it reads either way."""
    *dimensions, left, right = ORDERS[name]

    def fun(a, b):
        return jax.lax.dot_general(a, b, tuple(dimensions))

    given = [jax.ShapeDtypeStruct(s, "float32") for s in (left, right)]
    needed = jax.jit(fun).lower(*given).compile().memory_analysis().temp_size_in_bytes
    assert (
        counted(fun, left, right).temporary_bytes
        == needed
        == (0 if name not in ("two of them", "before two others") else 8192)
    )


def test_a_complex_convolution_takes_four_times_as_much():
    def fun(x, w):
        return grouped(jax.lax.complex(x, x), jax.lax.complex(w, w))

    shapes = (2, 10, 10, 8), (3, 3, 8, 16)
    assert counted(fun, *shapes).matmul_flops == {"complex64": 4 * counted(grouped, *shapes).matmul_flops["float32"]}


def test_products_of_groups_of_rows():
    """Each row meets the matrix of its group, as in a mixture of experts; in both gradients too."""

    def experts(x, ws):
        return jax.lax.ragged_dot(x, ws, jnp.array([10, 0, 30, 24], jnp.int32))

    shapes = (64, 32), (4, 32, 16)
    once = {"float32": 2 * 64 * 32 * 16}
    assert counted(experts, *shapes).matmul_flops == once
    back = counted(lambda x, ws, g: jax.vjp(experts, x, ws)[1](g), *shapes, (64, 16))
    assert back.matmul_flops == {"float32": 3 * once["float32"]}  # of them one is the forward pass


def test_memory_of_a_perceptron_is_what_xla_takes():
    """Bytes to and from memory, and the room inside: the product and what is made of it."""
    fun, shapes = MODELS["perceptron"]
    compiled = jax.jit(fun).lower(*[jax.ShapeDtypeStruct(s, "float32") for s in shapes]).compile()
    found = counted(fun, *shapes)
    assert found.bytes_read + found.bytes_written == pytest.approx(compiled.cost_analysis()["bytes accessed"], rel=0.1)
    assert found.temporary_bytes == 4 * 64 * 128 + 4 * 64 * 32


def test_operations_of_a_dtype_are_counted_apart():
    """A bfloat16 product beside a float32 one."""

    def fun(x):
        return (x @ x, x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16))

    assert counted(fun, (16, 16)).matmul_flops == {"float32": 2 * 16**3, "bfloat16": 2 * 16**3}


@pytest.mark.parametrize(
    ("ins", "ways", "exchanged"),
    [
        ((P("data"), P()), 2, 0),  # rows
        ((P(), P(None, "model")), 4, 0),  # columns
        ((P("data"), P(None, "model")), 8, 0),
        ((P(None, "model"), P("model")), 4, 2 * 3 / 4 * 4 * 32 * 16),  # terms: their sum goes around a ring
        ((P("data", "model"), P("model")), 8, 2 * 3 / 4 * 4 * 32 * 16 / 2),
        ((P(), P()), 1, 0),
    ],
)
def test_a_product_is_divided_as_its_operands_are(ins, ways, exchanged):
    """Over rows, columns and terms; summing terms sends bytes."""
    found = counted(jnp.matmul, (32, 64), (64, 16), axes={"data": 2, "model": 4}, ins=ins)
    assert found.matmul_flops == {"float32": 2 * 32 * 64 * 16 / ways}
    assert found.exchanged_bytes == exchanged


def test_a_layout_goes_into_stacks_and_out_of_them():
    """Each device has its rows of all that is in a stack."""
    rows = {"axes": {"data": 2}, "ins": [P("data"), P()]}

    def fun(x, w):
        return [y @ w for y in jnp.unstack(jnp.tanh(jnp.stack([x, x * 2], 1)), axis=1)]

    assert counted(fun, (8, 16), (16, 4), **rows).flops == counted(fun, (4, 16), (16, 4)).flops


def test_a_layout_goes_through_calls_reshapes_and_norms():
    """And back from the results: what nothing says of an operand, its result does."""

    @jax.jit
    def fun(x, w):
        x = x - jnp.mean(x, -1, keepdims=True)
        heads = (x @ w).reshape(8, 4, 16)
        return jnp.sum(jnp.swapaxes(heads, 0, 1), -1), jnp.zeros((8, 4)) + 1

    closed = jax.make_jaxpr(fun)(jnp.ones((8, 32)), jnp.ones((32, 64)))
    axes = {"data": 2, "model": 4}
    found = flatten(closed)
    outs = [split_of(p, 2, axes) for p in (P("model", "data"), P("data"))]
    spread(found, axes, [split_of(P("data"), 2, axes), split_of(P(None, "model"), 2, axes)], outs)
    results = [found.splits[k] for k in found.outputs]
    assert results == [(("model",), ("data",)), (("data",), ())]
    assert any(op.name == "transpose" for op in found.operations)


def test_a_constraint_decides():
    """What it takes away is gathered."""
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def fun(x):
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.lax.with_sharding_constraint(x, P()) * 2

    found = counted(fun, (8, 4), axes={"data": 2}, ins=[P("data")])
    assert (found.exchanges, found.exchanged_bytes) == (1, 1 / 2 * 4 * 8 * 4)
    assert found.other_flops == 32


def test_a_loop_counts_as_often_as_it_runs():
    """And it is known what of that XLA leaves out."""

    def fun(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    found, once = counted(fun, (8, 16), (10, 16, 16)), counted(lambda x, w: jnp.tanh(x @ w), (8, 16), (16, 16))
    assert found.flops == 10 * once.flops
    rows = {"axes": {"m": 2}, "ins": [P(None, "m"), P(None, "m")]}  # each device has half of the terms of a product
    shared = counted(fun, (8, 16), (10, 16, 16), **rows).matmul_flops["float32"]
    assert shared == found.matmul_flops["float32"] / 2
    xla = jax.jit(fun).lower(jnp.ones((8, 16)), jnp.ones((10, 16, 16))).compile().cost_analysis()["flops"]
    assert found.flops - found.repeated_flops == pytest.approx(xla, rel=0.05)
    endless = counted(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x), (8, 8))
    assert (endless.open_loops, endless.matmul_flops) == (1, {"float32": 2 * 8**3})


def test_a_loop_without_rounds_does_nothing():
    """XLA leaves nothing of it out, so that nothing is added to or taken from its count."""

    def fun(x, ws):
        return jax.lax.scan(lambda x, w: (jax.lax.scan(lambda y, _: (y @ w, None), x, None, 3)[0], None), x @ x, ws)[0]

    found, empty = counted(fun, (16, 16), (0, 16, 16)), counted(lambda x: x @ x, (16, 16))
    assert (found.flops, found.repeated_flops, found.repeated_bytes) == (empty.flops, 0, 0)


@pytest.mark.parametrize("stacks", [False, True], ids=["carries", "stacks"])
def test_memory_of_a_loop_is_that_of_its_rounds(stacks):
    """A slice is cut off, read by a product, and what is stacked is written to its place: not all of it in each round."""

    def fun(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x if stacks else None), x, ws)

    shapes = (32, 64), (12, 64, 64)
    found = counted(fun, *shapes)
    compiled = jax.jit(fun).lower(*[jnp.ones(s) for s in shapes]).compile()
    once = found.bytes_read + found.bytes_written - found.repeated_bytes
    assert once == pytest.approx(compiled.cost_analysis()["bytes accessed"], rel=0.25)
    assert found.temporary_bytes == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.1)


def test_the_dearest_branch_counts():
    """Of a conditional."""

    def fun(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert counted(fun, (8, 8)).matmul_flops == {"float32": 2 * 2 * 8**3}


def test_a_gradient_is_not_kept_beside_the_sum_that_takes_it():
    """Where XLA saves memory, each of many sums runs as soon as its gradient is there; on CPU all gradients wait."""

    def fun(x, y, *sums):
        return [s + x.T @ (y * k) for k, s in enumerate(sums, 1)]

    shapes = ((4, 64), (4, 64), *[(64, 64)] * 4)
    gradient, operand = 4 * 64 * 64, 4 * 4 * 64
    saving, wide = (counted(fun, *shapes, on_cpu=c).temporary_bytes for c in (False, True))
    assert gradient <= saving < 2 * gradient
    assert wide > 3 * gradient > saving + 4 * operand


def test_arithmetic_is_fused_unless_it_is_dear_and_read_twice():
    """A chain needs no room; an exponential that two products' results wait for does."""
    assert counted(lambda x: jnp.sin(x * 2) + 1, (64, 64)).temporary_bytes == 0
    twice = counted(lambda x: (e := jnp.exp(x), e * 2, e * 3)[1:], (64, 64))
    assert twice.temporary_bytes == 4 * 64 * 64
    assert twice.bytes_written == 3 * 4 * 64 * 64


MOVES = {
    "stack": lambda x: jnp.stack([x, x]),
    "unstack": lambda x: jnp.unstack(x),
    "tile": lambda x: jnp.tile(x, (4, 1)),
    "repeat": lambda x: jnp.repeat(x, 4, axis=0),
}


@pytest.mark.parametrize("name", MOVES)
def test_numbers_that_only_move_are_no_arithmetic(name):
    assert counted(MOVES[name], (64, 64)).flops == 0


def test_rounding_is_arithmetic_like_other():
    """It is fused, as what `jax.checkpoint` keeps is rounded to its own precision."""
    rounded = counted(lambda x: jax.lax.reduce_precision(x * 2, 8, 7) + 1, (64, 64))
    other = counted(lambda x: x * 2 + 1, (64, 64))
    assert rounded == other


def test_a_view_needs_no_room():
    """Reshaping what a product made, for a result or for another product."""
    found = counted(lambda x, w: (x @ w).reshape(2, 32, 16), (64, 8), (8, 16))
    assert found.temporary_bytes == 0
    assert found.bytes_written == 4 * 64 * 16


def test_looking_up_reads_what_is_looked_up():
    """Not the whole table."""
    closed = jax.make_jaxpr(lambda table, i: table[i])(jnp.ones((1000, 8)), np.arange(4))
    found = work(closed, {}, [((), ()), ((),)], None)
    assert found.bytes_read < 4 * 1000 * 8 / 10


@pytest.mark.parametrize(("said", "expected"), [(None, 2 * 64**3), (7, 7)])
def test_operations_of_a_pallas_kernel(said, expected):
    """Those of its products, for each block of its grid; or what it says itself."""
    from jax.experimental import pallas as pl

    def kernel(a, b, out):
        out[...] = a[...] @ b[...]

    rows, whole = pl.BlockSpec((16, 64), lambda i: (i, 0)), pl.BlockSpec((64, 64), lambda i: (0, 0))
    estimate = None if said is None else pl.CostEstimate(flops=said, transcendentals=0, bytes_accessed=0)
    call = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((64, 64), np.float32), grid=(4,), in_specs=[rows, whole], out_specs=rows,
        cost_estimate=estimate, interpret=True,
    )  # fmt: skip
    counted = work(jax.make_jaxpr(call)(*[jax.ShapeDtypeStruct((64, 64), np.float32)] * 2), {}, [((), ())] * 2)
    assert dict(counted.matmul_flops) == {"float32": expected}


def test_nothing_is_done_by_nothing():
    """A jaxpr without equations whose result is its argument: it is read."""
    found = counted(lambda x: x, (4, 4))
    assert (found.flops, found.temporary_bytes, found.bytes_read) == (0, 0, math.prod((4, 4, 4)))
