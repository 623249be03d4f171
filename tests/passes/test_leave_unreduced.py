"""Sums over a sharded batch stay unreduced until the loop ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import manymesh as mm
from flat import program, run, text
from manymesh._passes._unreduced._linear import is_linear_in_first

TASK = """
    inputs: w f32[4,4], x f32[8,4]
    loop 0: 2 microbatches, gpipe
    xs b f32[4,4] = p, q
    carry a f32[4,4] = zero, then t, at last total
    p = x[0:4]
    q = x[4:8]
    zero = lax.full((4, 4), 0.0)
    0: c = front: lax.with_sharding_constraint(b, spec)
    0: g = front_bwd: c.T @ c
    0: t = a + {term}
    results: total
"""


@pytest.fixture
def built():
    """From the term that is added up to the program, its task on two devices that share the batch."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    auto = "jax.sharding.AbstractMesh((2,), ('d',), axis_types=(jax.sharding.AxisType.Auto,))"
    spec = f"jax.sharding.NamedSharding({auto}, jax.sharding.PartitionSpec('d'))"
    source = TASK.replace("spec", spec)
    return lambda term: program(source.format(term=term), tasks={"front": mm.Task("front", mesh=mesh)})


def test_each_device_group_keeps_its_terms(built):
    """The accumulator gets a dimension for the groups; its sum is taken once, after the loop."""
    after = run("leave_unreduced", built("g"))
    assert str(after) == text("""
        inputs: a f32[4,4], b f32[8,4]
        loop 0 step: 2 microbatches
          xs c f32[4,4] = d, e
          carry f f32[2,4,4] = g, then h, at last i
        d f32[4,4] = slice(b) start_indices=(0, 0) limit_indices=(4, 4)
        e f32[4,4] = slice(b) start_indices=(4, 0) limit_indices=(8, 4)
        j f32[4,4] = broadcast_in_dim(0.0) broadcast_dimensions=() [layout follows loop]
        k f32[2,4,4] = broadcast_in_dim(0.0) broadcast_dimensions=() [layout follows loop]
        g f32[2,4,4] = optimization_barrier(k) [layout follows loop]
        0: l f32[4,4] = task front(c)
            inputs: a f32[4,4]
            b f32[4,4] = sharding_constraint(a) P('d',)
            results: b
        0: m f32[2,4,4] = task front_bwd(l)
            inputs: a f32[4,4]
            b f32[4,4] = transpose(a) permutation=(1, 0)
            c f32[2,4,4] = shard_map(b, a)
                inputs: a f32[4,2], b f32[2,4]
                c f32[4,4] = dot_general(a, b)
                d f32[1,4,4] = broadcast_in_dim(c) broadcast_dimensions=(1, 2)
                results: d
            results: c
        0: h f32[2,4,4] = add(f, m) [on {'d': 2}]
        n f32[4,4] = reduce_sum(i) axes=(0,) [on {'d': 2}]
        results: n
    """)
    assert [str(r) for r in after.reductions] == ["front_bwd float32[4,4] on submesh 0, over d once a call"]


def test_what_is_not_linear_is_summed_in_every_microbatch(built):
    """And the program says so."""
    after = run("leave_unreduced", built("lax.tanh(g)"))
    (reduction,) = after.reductions
    assert not reduction.axes and "tanh is applied to it in every microbatch" in reduction.why
    assert "shard_map" not in str(after)


@pytest.mark.parametrize("dtype", ["uint32", "int32"])
def test_terms_below_zero_of_unsigned_numbers(dtype):
    """What is left of a number, as a float: of unsigned numbers a term below zero would be a large one. Of signed ones it waits."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    front = mm.task(lambda x: mm.with_sharding_constraint(x, jax.sharding.PartitionSpec("d")), "front", mesh=mesh)

    def left(x):
        return (100 - jnp.sum(front(x) > 0, dtype=dtype)).astype("float32")

    step = mm.jit(mm.microbatch(left, argnum=0, num_microbatches=2, reduce="sum"))
    x = jnp.ones((8, 4))
    assert float(step(x)) == 200 - x.size
    (reduction,) = step.lower(x).report().reductions
    assert bool(reduction.axes) == (dtype == "int32")


@pytest.mark.parametrize(
    ("old", "new", "linear"),
    [
        ("int4", "int32", False), ("int4", "float32", False), ("uint4", "int8", False), ("int8", "int16", False),
        ("uint32", "float32", False), ("int16", "int8", True), ("int32", "float32", True), ("uint32", "int32", True),
        ("float32", "float16", False), ("float32", "bfloat16", True), ("float8_e4m3fn", "float32", True), ("bool", "int32", False),
    ],
)  # fmt: skip
def test_casts_of_parts(old, new, linear):
    """Parts of a sum may be too large, or below zero, for a type that their sum fits, and the sum for its own."""
    (eqn,) = jax.make_jaxpr(lambda x: x.astype(new))(jax.ShapeDtypeStruct((2,), old)).eqns
    assert is_linear_in_first(eqn) == linear
