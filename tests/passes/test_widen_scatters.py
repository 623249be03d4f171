"""Rows of a table's gradient are added in the type of its accumulator, and right to it: no microbatch makes the whole table."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import manymesh as mm
from flat import looped, run
from manymesh._passes._unreduced._links import SCATTERS
from manymesh._program._calls import inlined
from stages import assert_agrees

BODY = """
    tasks: look 0
    inputs: i i32[3], r bf16[3,4]
    loop 0: 2 microbatches, gpipe
    carry a f32[8,4] = zero, then t, at last total
    zero = lax.full((8, 4), 0.0)
    {}
    results: total
"""
ROWS = "g = look_bwd: jnp.zeros((8, 4), 'bfloat16').at[i].add(r)"


def added_in(eqns):
    """The types in which equations add rows, calls opened."""
    found = inlined(list(eqns))[0]
    return [str(e.outvars[0].aval.dtype) for e in found if e.primitive.name in SCATTERS]


def scatters(flat):
    return added_in(n.eqn for n in flat.nodes)


@pytest.mark.parametrize(
    "equations",
    [
        [ROWS, "c = g.astype('float32')", "t = a + c"],
        [ROWS + ".astype('float32')", "t = a + g"],
        ["g = look_bwd: jnp.zeros((4, 8), 'bfloat16').at[:, i].add(r.T).T", "c = g.astype('float32')", "t = a + c"],
        ["g = jnp.zeros((8, 4), 'bfloat16').at[i].add(r)", "c = g.astype('float32')", "t = a + c"],
        [
            "g = look_bwd: jax.jit(lambda i, r: jnp.zeros((8, 4), 'bfloat16').at[i].add(r))(i, r)",
            "c = g.reshape(4, 8)",
            "d = c.astype('float32')",
            "e = d.reshape(8, 4)",
            "t = a + e",
        ],
    ],
)
def test_rows_are_added_in_the_type_of_the_sum(equations):
    """Wherever the cast is: in the task, behind it, behind what only moves elements."""
    flat = looped(BODY, *equations)
    assert scatters(flat) == ["bfloat16"]
    after = run("widen_scatters", flat)
    assert scatters(after) == ["float32"]
    wide = [n for n in after.nodes if n.primitive == "convert_element_type" and n.outputs[0].aval.shape != (3, 4)]
    assert not wide


@pytest.mark.parametrize(
    "equations",
    [
        [ROWS, "c = g.astype('float32')", "s = c + a", "t = s * g.sum()"],  # it is read in its own type, too
        [ROWS.replace("jnp.zeros((8, 4), 'bfloat16')", "jnp.ones((8, 4), 'bfloat16')"), "c = g.astype('float32')", "t = a + c"],
        [ROWS, "h = g.astype('float16')", "c = h.astype('float32')", "t = a + c"],  # another type of fewer numbers between
        [ROWS.replace(".add(", ".max("), "c = g.astype('float32')", "t = a + c"],
        [ROWS, "h = g.astype('float8_e4m3fn')", "c = h.astype('float32')", "t = a + c"],  # a type that promotes to none
    ],
)  # fmt: skip
def test_what_stays(equations):
    flat = looped(BODY, *equations)
    assert run("widen_scatters", flat) is flat


def test_several_tables_of_one_task():
    """Each of its results is made in the wider type: of tokens and of positions, say."""
    look = mm.task(lambda e, p, i: e[i] + p[i % 5], "look", devices=[0])
    score = mm.task(lambda w, h: jnp.mean((h @ w).astype("float32") ** 2), "score", devices=[1])

    def loss(params, i):
        e, p, w = jax.tree.map(lambda x: x.astype("bfloat16"), params)
        return score(w, look(e, p, i))

    grads = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, reduce="mean")
    params = (np.eye(8, 4, dtype="float32"), np.ones((5, 4), "float32"), np.ones((4, 2), "float32"))
    (bwd,) = [f for f in mm.jit(grads).lower(params, jnp.arange(6)).program.fragments if f.name == "look_bwd"]
    assert added_in(bwd.jaxpr.eqns) == ["float32", "float32"]
    assert_agrees(grads, params, jnp.arange(6), tolerance=2e-2)


def test_equal_tasks_stay_one():
    """Two lookups that JAX traced once share what they compute still, and are compiled once."""
    look = mm.task(lambda e, i: e.astype("bfloat16")[i], "look", devices=[0])
    score = mm.task(lambda *rows: sum(jnp.mean(x.astype("float32") ** 2) for x in rows), "score", devices=[1])
    grads = mm.microbatch(
        jax.grad(lambda es, i: score(*(look(e, i) for e in es))), argnum=1, num_microbatches=2, reduce="mean"
    )
    lowered = mm.jit(grads).lower([jnp.ones((8, 4)), jnp.zeros((8, 4))], jnp.arange(6))
    fragments = [f for f in lowered.program.fragments if f.name.startswith("look_bwd")]
    bodies = [e.params["jaxpr"] for f in fragments for e in f.jaxpr.eqns if "jaxpr" in e.params]
    assert len(bodies) == 2 and bodies[0] is bodies[1]
    assert all(added_in(f.jaxpr.eqns) == ["float32"] for f in fragments)
    backward = [f for f in lowered.compile().report().fragments if f.name.startswith("look_bwd")]
    assert len({f.executable for f in backward}) == 1


# Programs

VOCABULARY, WIDTH = 4000, 8


def lookup(mesh=None, dtype="bfloat16", tied=False, where="task"):
    """Gradients of a table that is looked up in a smaller type, over four microbatches."""
    cast = (lambda e: e.astype(dtype)) if where == "task" else lambda e: e
    rows = PartitionSpec("data") if mesh is not None else PartitionSpec()
    vocabulary = PartitionSpec("model") if mesh is not None else PartitionSpec()
    at = [{"devices": [0]}, {"devices": [1]}] if mesh is None else [{"mesh": m} for m in mm.submeshes(mesh, "stage")]

    def look(e, i):
        return mm.with_sharding_constraint(cast(mm.with_sharding_constraint(e, vocabulary))[i], rows)

    def score(w, e, h):
        h = jnp.tanh(h.astype("float32") @ w)
        return jnp.mean((h @ cast(e)[:50].astype("float32").T if tied else h) ** 2)

    look, score = mm.task(look, "look", **at[0]), mm.task(score, "score", **at[1])

    def loss(p, i):
        e = p["e"].astype(dtype) if where == "outside" else p["e"]
        return score(p["w"], e, look(e, i))

    grads = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean")
    params = {
        "e": jnp.asarray(np.random.default_rng(0).normal(size=(VOCABULARY, WIDTH)), "float32"),
        "w": jnp.eye(WIDTH),
    }
    return grads, params, jnp.asarray(np.random.default_rng(1).integers(0, VOCABULARY, (16, 6)))


def submeshes():
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("stage", "data", "model"))


CASES = [
    {"dtype": "float32"},
    {},
    {"where": "outside"},
    {"where": "outside", "tied": True},
    {"mesh": submeshes},
    {"mesh": submeshes, "dtype": "float32"},
    {"mesh": submeshes, "where": "outside", "tied": True},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)) or "cast in the task")
def test_no_microbatch_makes_a_table(case):
    """Of the room that the lookup's backward pass needs, counted by XLA and by us, and of the values."""
    case = {k: v() if callable(v) else v for k, v in case.items()}
    grads, params, i = lookup(**case)
    compiled = mm.jit(grads).lower(params, i).compile()
    table = VOCABULARY * WIDTH * 2 // (2 if "mesh" in case else 1)  # a narrow one, or the shard of it
    (line,) = [f for f in compiled.report().fragments if f.name == "look_bwd"]
    assert line.figures.temporary_bytes < table / 2 and line.counted.temporary_bytes < table / 2
    assert line.counted.nbytes < 2.1 * 2 * table  # the accumulator, in and out: rows are few
    assert_agrees(grads, params, i, tolerance=2e-2)


def test_a_table_of_flax():
    """`nn.Embed` in bfloat16: the rows are added in float32."""
    look = nn.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16)
    task = mm.task(lambda p, i: look.apply(p, i), "look", devices=[0])
    score = mm.task(lambda h: jnp.mean(h.astype("float32") ** 2), "score", devices=[1])
    i = jnp.arange(16) * 3
    params = look.init(jax.random.key(0), i)
    grads = mm.microbatch(jax.grad(lambda p, i: score(task(p, i))), argnum=1, num_microbatches=4, reduce="mean")
    program = mm.jit(grads).lower(params, i).program
    (bwd,) = [f for f in program.fragments if f.name == "look_bwd"]
    assert added_in(bwd.jaxpr.eqns) == ["float32"]
    assert_agrees(grads, params, i, tolerance=2e-2)
