"""What devices of a submesh are counted to send each other, beside the collectives that XLA makes."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manymesh._cost._operations import split_of
from manymesh._cost._work import work

pytestmark = pytest.mark.once

AXES = {"data": 2, "model": 4}
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


@functools.cache
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), tuple(AXES))


def asked(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P(*spec)))


def backward(fun):
    """The gradients of a function of a weight and rows that gives rows of the same shape."""
    return lambda w, x: jax.vjp(fun, w, x)[1](x)


def fsdp(w, x):
    """A weight that is sharded over the axis of the batch."""
    return asked(asked(x, "model") @ asked(w, "model"), "model")


def sequence_parallel(ws, x):
    up, down = ws
    h = asked(asked(asked(x, None, "model") * 2, None) @ asked(up, None, "model"), None, None, "model")
    return asked(jnp.tanh(h) @ asked(down, "model"), None, "model")


def convolved(w, x, groups=1):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def own_exchange(x):
    def total(x):
        return jax.lax.psum(x, "model")

    return jax.shard_map(total, mesh=mesh(), in_specs=P("model"), out_specs=P())(x)


MOST = 3 / 4  # what a ring of 4 sends of a value that it gathers
KIB = 1024
CASES = {  # function, shapes, specs, XLA's collectives, bytes that each device sends
    "rows of a table cut between rows": (
        lambda w, t: w[t],
        ((64, 16), "float32"),
        ((16,), "int32"),
        (P("model"), P()),
        {"all-reduce": 1},
        2 * MOST * KIB,
    ),
    "terms": (lambda w, x: x @ w, ((64, 16), "float32"), ((16, 64), "float32"), (P("model"), P(None, "model")), {"all-reduce": 1}, 2 * MOST * KIB),
    "weights sharded as the batch": (fsdp, ((32, 32), "float32"), ((128, 32), "float32"), (P("model"), P("model")), {"all-gather": 1}, MOST * 4 * KIB),
    # XLA on CPU adds up all of the gradient on each device, others only what it keeps.
    "their gradients": (
        backward(fsdp),
        ((32, 32), "float32"),
        ((128, 32), "float32"),
        (P("model"), P("model")),
        {"all-gather": 1, "all-reduce": 1},
        2 * MOST * 4 * KIB,
    ),
    "from one dimension to another": (
        lambda w, x: asked(asked(x, "model") * w, None, "model"),
        ((), "float32"),
        ((32, 32), "float32"),
        (P(), P("model")),
        {"all-to-all": 1},
        MOST * 1 * KIB,
    ),
    "gathered": (lambda w, x: asked(asked(x, "model") * w, None), ((), "float32"), ((32, 32), "float32"), (P(), P("model")), {"all-gather": 1}, MOST * 4 * KIB),
    "rows that are added to each of a batch": (
        lambda w, x: jax.vmap(lambda w, x: w.at[jnp.array([0, 2])].add(x))(w, x),
        ((8, 4, 16), "float32"), ((8, 2, 16), "float32"), (P("model"), P("model")), {}, 0,
    ),
    "gradient of a kernel": (
        lambda w, x: jax.linear_transpose(lambda w: convolved(w, x), w)(x),
        ((3, 3, 16, 16), "float32"), ((8, 4, 4, 16), "float32"), (P(), P("model")), {"all-reduce": 1}, 2 * MOST * 9 * KIB,
    ),
    "channels of a convolution": (
        convolved,
        ((3, 3, 16, 16), "float32"), ((4, 4, 4, 16), "float32"), (P(None, None, "model"), P(None, None, None, "model")),
        {"all-reduce": 1}, 2 * MOST * 4 * KIB,
    ),
    "channels that a convolution leaves apart": (
        lambda w, x: convolved(w, x, 16),
        ((3, 3, 1, 16), "float32"), ((4, 4, 4, 16), "float32"), (P(None, None, None, "model"), P(None, None, None, "model")), {}, 0,
    ),
    "by hand": (lambda w, x: own_exchange(x) + w, ((), "float32"), ((16, 64), "float32"), (P(), P("model")), {"all-reduce": 1}, 2 * MOST * KIB),
}  # fmt: skip


def both(fun, shapes, specs):
    """Our count, and the collectives of the compiled function."""
    given = [jax.ShapeDtypeStruct(*s, sharding=NamedSharding(mesh(), p)) for s, p in zip(shapes, specs, strict=True)]
    splits = [split_of(p, len(s[0]), AXES) for s, p in zip(shapes, specs, strict=True)]
    text = jax.jit(fun).lower(*given).compile().as_text()
    return work(jax.make_jaxpr(fun)(*given), AXES, splits), Counter(re.findall(rf" ({KINDS})(?:-start)?\(", text))


@pytest.mark.parametrize("name", CASES)
def test_collectives_are_those_of_xla(name):
    """Their number, and what a ring sends for them."""
    fun, w, x, specs, collectives, sent = CASES[name]
    found, made = both(fun, (w, x), specs)
    assert made == collectives
    assert (found.exchanges, found.exchanged_bytes) == (sum(collectives.values()), sent)


@pytest.mark.parametrize(
    "name", ["gradient of a kernel", "channels of a convolution", "channels that a convolution leaves apart"]
)
def test_devices_share_the_terms_of_a_convolution(name):
    """Of those that are added up across devices each has its part."""
    fun, w, x, specs, _, _ = CASES[name]
    shared, _ = both(fun, (w, x), specs)
    alone, _ = both(fun, (w, x), (P(), P()))
    assert shared.matmul_flops == {"float32": alone.matmul_flops["float32"] / AXES["model"]}


BY_HAND = {  # of 1 KiB on each device, what a device sends
    "passed on": (lambda x: jax.lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)]), KIB),
    "passed on by one": (lambda x: jax.lax.ppermute(x, "model", [(0, 1)]), KIB),
    "gathered": (lambda x: jax.lax.all_gather(x, "model"), MOST * 4 * KIB),
    "gathered for all": (lambda x: jax.lax.all_gather(x, "model", tiled=True, to="invarying"), MOST * 4 * KIB),
    "scattered": (lambda x: jax.lax.psum_scatter(x, "model", tiled=True), MOST * KIB),
    "exchanged": (lambda x: jax.lax.all_to_all(x, "model", 0, 1, tiled=True), MOST * KIB),
    "exchanged as wanted": (
        lambda x: jax.lax.ragged_all_to_all(x, jnp.zeros_like(x), *[jnp.arange(4), jnp.ones(4, int)] * 2, axis_name="model"),
        MOST * KIB,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_what_a_shard_map_exchanges(name):
    """Each device passes all of its value on, and sends of what it gathers or exchanges all but its own part."""
    fun, sent = BY_HAND[name]
    spec = P() if name == "gathered for all" else P("model")
    mapped = jax.shard_map(fun, mesh=mesh(), axis_names={"model"}, in_specs=P("model"), out_specs=spec)
    x = jax.ShapeDtypeStruct((64, 16), "float32", sharding=NamedSharding(mesh(), P("model")))
    found = work(jax.make_jaxpr(mapped)(x), AXES, [(("model",), ())])
    assert (found.exchanges, found.exchanged_bytes) == (1, sent)


def test_the_smaller_operand_is_gathered_where_both_want_an_axis():
    """As for a sequence-parallel layer, forward and backward."""

    def layer(up, down, x):
        return jnp.sum(sequence_parallel((up, down), x) ** 2)

    f = "float32"
    shapes, specs = (((16, 64), f), ((64, 16), f), ((4, 8, 16), f)), (P(None, "model"), P("model"), P(None, "model"))
    found, made = both(jax.grad(layer, (0, 1, 2)), shapes, specs)
    # Two gathers and two sums in shards of 2 KiB, of which XLA on CPU makes sums on all; and numbers.
    assert found.exchanged_bytes == pytest.approx(4 * MOST * 2 * KIB, rel=0.3)
    assert found.exchanges == pytest.approx(sum(made.values()), abs=1)


def test_what_is_gathered_needs_room():
    """All of it, once for all that read it."""
    shapes, specs = (((64, 64), "float32"), ((2, 64), "float32")), (P("data"), P("data"))
    found, _ = both(lambda w, x: jnp.tanh(x @ w) @ w, shapes, specs)
    assert found.exchanges == 1
    assert 16 * KIB <= found.temporary_bytes < 20 * KIB


def test_what_a_shard_map_gives_lies_as_it_says():
    """And as those want it who read it: each device has its terms of a gradient, its columns of them, and sends nothing."""

    def terms(w, x):
        own = jax.shard_map(
            lambda x, w: (x.T @ w)[None], mesh=mesh(), axis_names={"data"}, in_specs=P("data"), out_specs=P("data")
        )
        return asked(own(x, w), "data", None, "model")

    # As many numbers come as go, which makes it no reshape.
    shapes, specs = (((8, 32), "float32"), ((8, 4), "float32")), (P("data", "model"), P("data"))
    found, made = both(terms, shapes, specs)
    assert (made, found.exchanges, found.exchanged_bytes) == ({}, 0, 0)


def test_rows_of_a_table_that_is_cut_as_they_are():
    """As of an embedding that is sharded over the axis of its batch: the rows are added up, or the table is gathered."""
    for tokens, exchanges, sent in ((16, 2, 3 * MOST * KIB), (256, 1, MOST * 4 * KIB)):
        shapes = ((64, 16), "float32"), ((tokens,), "int32")
        found, _ = both(lambda w, t: asked(w[t], "model"), shapes, (P("model"), P("model")))
        assert (found.exchanges, found.exchanged_bytes) == (exchanges, sent)
