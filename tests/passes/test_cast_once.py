"""Weights that tasks cast to a smaller type are cast once a call, before the loop."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import manymesh as mm
from flat import lines, program, run, text
from manymesh._program._calls import inlined
from manymesh.flax import shard_axes
from manymesh.flax import task as flax_task
from stages import assert_agrees, initial

BODY = """
    tasks: front 0
    inputs: w f32[4,4], x f32[2,4]
    loop 0: 2 microbatches, gpipe
    carry a f32[] = zero, then t, at last total
    zero = lax.full((), 0.0)
    {}
    0: t = a + r
    results: total
"""


def body(*equations):
    return program(BODY.format("\n".join(f"0: {line}" for line in equations)))


def test_both_passes_of_a_task_read_what_was_cast_once():
    """Neither casts any more, and nobody reads the large weight."""
    after = run(
        "cast_once",
        body("h = front: x @ w.astype('bfloat16')", "r = front_bwd: h.sum() * w.T.astype('bfloat16')[0, 0]"),
    )
    assert str(after).count("convert_element_type(e) new_dtype=bfloat16") == 0
    assert lines(after) == text("""
        inputs: a f32[4,4], b f32[2,4]
        loop 0 step: 2 microbatches
          carry c f32[] = 0.0, then d, at last e
        f bf16[4,4] = convert_element_type(a) new_dtype=bfloat16
        0: g f32[2,4] = task front(b, f)
        0: h f32[] = task front_bwd(g, f)
        0: d f32[] = add(c, h)
        results: e
    """)


def test_a_part_of_a_weight_is_cut_out_and_cast_once():
    """What is not read of it is not cast."""
    after = run("cast_once", body("p = w[:2]", "h = front: x[:, :2] @ p.astype('bfloat16')", "r = jnp.sum(h)"))
    assert lines(run("remove_dead", after)) == text("""
        inputs: a f32[4,4], b f32[2,4]
        loop 0 step: 2 microbatches
          carry c f32[] = 0.0, then d, at last e
        f f32[2,4] = slice(a) start_indices=(0, 0) limit_indices=(2, 4)
        g bf16[2,4] = convert_element_type(f) new_dtype=bfloat16
        0: h f32[2,4] = task front(b, g)
        0: i f32[] = reduce_sum(h) axes=(0, 1)
        0: d f32[] = add(c, i)
        results: e
    """)


@pytest.mark.parametrize(
    "equation",
    [
        "r = front: (w.astype('bfloat16') @ x.T).sum() + w.sum()",  # the large one is read, too
        "r = front: (w.astype('bfloat16').sum() + w.astype('float16').sum()).astype('float32')",  # two types
        "r = front: w.astype('float32').sum()",  # no cast
        "r = front: w.astype('int8').sum().astype('float32')",  # not the same number in a smaller type
        "r = front: (x * a).astype('bfloat16').sum().astype('float32')",  # made in the microbatch
    ],
)
def test_what_stays(equation):
    flat = body(equation)
    assert run("cast_once", flat) is flat


def test_a_cast_outside_of_tasks():
    """Of what a constraint or reshape made of a weight, too."""
    after = run(
        "cast_once", body("v = w.reshape(16)", "c = v.astype('bfloat16')", "r = front: c.sum().astype('float32')")
    )
    (cast,) = [n for n in after.nodes if n.primitive == "convert_element_type" and n.loop is None]
    (flat,) = [n for n in after.nodes if n.primitive == "reshape" and n.inputs == cast.outputs]
    (front,) = [n for n in after.nodes if n.task]
    assert flat.loop is None and front.inputs == flat.outputs


# Programs


def casts_in_the_loop(fun, *args):
    """How many matrices the fragments of a loop cast to bfloat16, all that they hold opened."""

    def count(eqns):
        found = 0
        for e in inlined(eqns)[0]:
            found += sum(count(mm._compat.open_jaxpr(j).eqns) for j in mm._compat.jaxprs_in(e))
            if e.primitive.name == "convert_element_type" and e.params["new_dtype"] == jnp.bfloat16:
                found += e.invars[0].aval.shape[-2:] == (8, 8)
        return found

    return sum(count(f.jaxpr.eqns) for f in mm.jit(fun).lower(*args).program.body(0))


def layer(w, x):
    return jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)


def scanned(ws, x):
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0]


def scanned_again(ws, x):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, ws)[0]


def jitted(ws, x):
    for w in ws:
        x = jax.jit(layer)(w.T, x)
    return x


def shared(ws, x):
    return jax.lax.scan(lambda x, _: (layer(ws[0], x), None), x, None, length=2)[0]


@pytest.mark.parametrize("fun", [scanned, scanned_again, jitted, shared])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
def test_casts_inside_of_scans_and_calls(fun, schedule):
    """Neither the forward nor the backward pass of a microbatch casts a weight; values are those of the reference mode."""
    tasks = [mm.task(fun, f"t{k}", devices=[k]) for k in range(2)]

    def loss(params, x):
        for task, ws in zip(tasks, params, strict=True):
            x = task(ws, x)
        return jnp.mean(x**2)

    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, schedule=schedule, reduce="mean")
    params = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype("f4") / 3
    x = np.random.default_rng(1).normal(size=(8, 8)).astype("f4")
    assert casts_in_the_loop(grad, list(params), x) == 0
    for f in mm.jit(grad).lower(list(params), x).program.body(0):
        assert not any(v.aval.dtype == jnp.bfloat16 and v.aval.shape[-2:] == (8, 8) for v in f.outvars)
    assert_agrees(grad, list(params), x, tolerance=2e-2)


class Dense(nn.Module):
    """A layer of Flax in mixed precision, with boxes that name axes."""

    @nn.compact
    def __call__(self, x):
        kernel = shard_axes("in", "out")
        return nn.gelu(nn.Dense(8, dtype=jnp.bfloat16, kernel_init=kernel)(x))


def test_annotated_parameters_of_flax():
    """What is cast is laid out as the parameter."""
    meshes = [Mesh(np.array(jax.devices()[k : k + 2]), ("model",)) for k in (0, 2)]
    rules = (("in", None), ("out", "model"))
    model = nn.Sequential([flax_task(Dense, f"dense_{k}", mesh=m, logical_axes=rules)() for k, m in enumerate(meshes)])

    def loss(params, x):
        return jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)

    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, schedule="1f1b", reduce="mean")
    x = np.random.default_rng(1).normal(size=(8, 8)).astype("f4")
    params = initial(model.init, jax.random.key(0), x)
    assert casts_in_the_loop(grad, params, x) == 0
    lowered = mm.jit(grad).lower(params, x)
    casts = [
        v
        for f in lowered.program.fragments
        for v in f.outvars
        if v.aval.dtype == jnp.bfloat16 and v.aval.shape == (8, 8)
    ]
    assert len(casts) == 2
    for v in casts:
        assert lowered.layout.sharding(v, lowered.program.home[v]).spec == PartitionSpec(None, "model")
    assert_agrees(grad, params, x, tolerance=2e-2)


def test_a_constraint_between_loop_and_task_is_kept():
    """A step that constrains its parameters before it calls its tasks: they lie as it says, and are cast once."""
    meshes = [Mesh(np.array(jax.devices()[k : k + 2]), ("model",)) for k in (0, 2)]
    tasks = [mm.task(layer, f"t{k}", mesh=m) for k, m in enumerate(meshes)]

    def loss(ws, x):
        for task, w in zip(tasks, ws, strict=True):
            x = task(mm.with_sharding_constraint(w, PartitionSpec(None, "model")), x)
        return jnp.mean(x**2)

    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, schedule="1f1b", reduce="mean")
    ws, x = list(np.random.default_rng(0).normal(size=(2, 8, 8)).astype("f4") / 3), np.eye(8, dtype="f4")
    assert casts_in_the_loop(grad, ws, x) == 0
    for fun in (grad, mm.microbatch(loss, argnum=1, num_microbatches=2, reduce="mean")):
        shardings = mm.jit(fun).lower(ws, x).compile().input_shardings[0][0]
        assert [s.spec for s in shardings] == [PartitionSpec(None, "model")] * 2
    assert_agrees(grad, ws, x, tolerance=2e-2)
