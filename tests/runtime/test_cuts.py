"""Pieces of one value share a kernel: which slices are handed where they begin, and what XLA then compiles."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh import _compat
from manymesh._program import Fragment
from manymesh._runtime._cuts import MANY, Cuts

NOWHERE = P()


def fragment(fun, *shapes):
    """A fragment of a function of float32 arrays."""
    jaxpr = jax.make_jaxpr(fun)(*[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    return Fragment(0, "before_0", 0, None, "F", None, _compat.without_consts(jaxpr), (), False)


def starts(fun, *shapes, spec=NOWHERE):
    """Where the pieces of a function begin that are handed it."""
    return Cuts.of(fragment(fun, *shapes), lambda v: spec).starts


def rows(x, count=MANY):
    """A batch in pieces."""
    return [lax.index_in_dim(x, i, 0, keepdims=False) for i in range(count)]


@pytest.mark.parametrize(
    ("fun", "shape"),
    [
        (rows, (MANY, 3, 2)),
        (lambda x: rows(x.reshape(MANY, 2, 3)), (2 * MANY, 3)),
        (lambda x: rows(jnp.moveaxis(x.reshape(3, MANY, 2), 1, 0)), (3, 2 * MANY)),
        (lambda x: [y * 2 for y in rows(x)], (MANY, 3, 2)),
    ],
    ids=["stack", "batch", "another dimension", "with what reads them"],
)
def test_many_pieces(fun, shape):
    """The values are those of the slices, and every beginning comes in once."""
    f = fragment(fun, shape)
    found = Cuts.of(f, lambda v: P())
    assert found.starts == tuple(range(MANY))
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    given = [np.int32(i) for i in found.starts]
    for ours, plain in zip(jax.core.eval_jaxpr(found.jaxpr(f), [], x, *given), fun(x), strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_leaves_of_a_batch_share_beginnings():
    """One scalar for a microbatch, not one for each leaf."""
    assert starts(lambda x, y: [*rows(x), *rows(y)], (MANY, 3), (MANY, 5, 7)) == tuple(range(MANY))


@pytest.mark.parametrize(
    ("fun", "shape", "spec"),
    [
        (lambda x: rows(x, MANY - 1), (MANY, 3), P()),
        (rows, (MANY, 4), P("data")),
        (lambda x: rows(x.reshape(MANY, 2, 3)), (2 * MANY, 3), P("data")),
        (lambda x: [x[i : i + 4 : 2] for i in range(MANY)], (3 * MANY, 3), P()),
        (lambda x: [x[i : i + 2, i : i + 2] for i in range(MANY)], (2 * MANY, 2 * MANY), P()),
        (lambda x: [x[: i + 1] for i in range(MANY)], (MANY, 3), P()),
        (lambda x: rows(jnp.cumsum(x, 0)), (MANY, 3), P()),
    ],
    ids=["few", "sharded stack", "sharded batch", "strides", "two dimensions", "unequal", "of something computed"],
)  # fmt: skip
def test_what_stays_as_it_is(fun, shape, spec):
    """Also where a device has only a part of the dimension: XLA would gather it."""
    f = fragment(fun, shape)
    found = Cuts.of(f, lambda v: spec)
    assert found.starts == () and found.jaxpr(f) is f.jaxpr


def test_other_dimensions_may_be_sharded():
    """Layers of a stack whose matrices are sharded."""
    assert starts(rows, (MANY, 4, 6), spec=P(None, "data", "model")) == tuple(range(MANY))


def trained(count, size, devices, sharding=None, dim=0):
    """Two stages, the compiled step with ``count`` microbatches of ``size`` rows, and its arguments."""
    meshes = [Mesh(np.array(d), ("data",)) for d in devices]
    tasks = [
        mm.task(lambda w, x: jnp.tanh(mm.with_sharding_constraint(x, ("batch", None)) @ w), name, mesh=mesh,
                logical_axes={"batch": "data"})
        for name, mesh in zip(("front", "back"), meshes, strict=True)
    ]  # fmt: skip

    def loss(weights, batch):
        h, y = batch["x"] if dim == 0 else batch["x"].T, batch["y"]
        for task, w in zip(tasks, weights, strict=True):
            h = task(w, h)
        return jnp.mean((h - (y if dim == 0 else y.T)) ** 2)

    def step(weights, batch):
        grad = mm.microbatch(
            jax.value_and_grad(loss), argnum=1, num_microbatches=count, schedule="1f1b", reduce="mean", dim=dim
        )
        value, grads = grad(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(3, 3)).astype(np.float32) for _ in tasks]
    shape = (count * size, 3) if dim == 0 else (3, count * size)
    batch = {name: rng.normal(size=shape).astype(np.float32) for name in "xy"}
    if sharding is not None:
        batch = {name: jax.device_put(x, NamedSharding(meshes[0], sharding)) for name, x in batch.items()}
    return step, weights, batch


def kernels(text):
    """The bodies of the fused computations of an executable that cut something."""
    bodies = re.findall(r"^%\S+ \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    return [b for b in bodies if re.search(r" (dynamic-)?slice\(", b)]


@pytest.mark.parametrize("devices", [([0], [1]), ([0, 1], [2, 3])], ids=["one device", "two"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_kernel_for_all_microbatches(devices, dim):
    """However many there are; the values are those of plain JAX."""
    step, weights, batch = trained(12, 4, [[jax.devices()[i] for i in d] for d in devices], dim=dim)
    compiled = mm.jit(step).lower(weights, batch).compile()
    lowered = compiled._lowered
    cutting = [f for f in compiled.program.fragments if f.index in lowered.starts]
    assert sorted(f.submesh for f in cutting) == [0, 1], "x is cut for the first stage, y for the last"
    for f in cutting:
        text = lowered.executables[f.index].as_text()
        assert " slice(" not in text
        found = kernels(text)
        assert found and len({re.sub(r"[%.\w-]*\d+|metadata=\{.*?\}", "", b) for b in found}) == 1
    for _ in range(2):
        ours, value = compiled(weights, batch)
        plain, expected = jax.jit(step)(weights, batch)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), ours, plain)
        weights = jax.tree.map(np.asarray, ours)


def test_a_batch_that_is_sharded():
    """It is cut as XLA does it, and the values are those of plain JAX."""
    devices = [jax.devices()[:2], jax.devices()[2:4]]
    step, weights, batch = trained(4, 4, devices, P("data"))
    ours, value = mm.jit(step)(weights, batch)
    host = jax.tree.map(np.asarray, batch)
    plain, expected = jax.jit(step)(weights, host)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), ours, plain)
