"""Sums over submeshes: added up on each first, then once across."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import manymesh as mm
from flat import lines, placed, program, run, switch_off, text
from manymesh import meta
from stages import assert_agrees


def test_terms_are_added_up_where_they_are():
    """One value crosses, in place of one for each addition."""
    flat = program("""
        tasks: one 0, two 1
        inputs: x f32[512], y f32[512]
        a = one: x + 1.0
        b = two: y + 1.0
        c = one: x + 2.0
        d = two: y + 2.0
        e = a + b + c + d
        results: e
    """)
    assert lines(run("regroup_sums", flat)) == text("""
        inputs: a f32[512], b f32[512]
        c f32[512] = task one(a)
        d f32[512] = task two(b)
        e f32[512] = task one(a)
        f f32[512] = task two(b)
        g f32[512] = add(c, e)
        h f32[512] = add(d, f)
        i f32[512] = add(g, h)
        results: i
    """)


def test_every_submesh_has_its_own_accumulator():
    """The sum of the two is taken once, after the loop."""
    flat = program("""
        tasks: one 0, two 1
        inputs: x f32[512], y f32[512]
        loop 0: 2 microbatches, gpipe
        carry z f32[512] = zero, then t, at last total
        zero = lax.full((512,), 0.0)
        0: a = one: x + 1.0
        0: b = two: y + 1.0
        0: t = z + (a + b)
        results: total
    """)
    after = run("regroup_sums", flat)
    assert lines(after) == text("""
        inputs: a f32[512], b f32[512]
        loop 0 step: 2 microbatches
          carry c f32[512] = d, then e, at last f
          carry g f32[512] = h, then i, at last j
        d f32[512] = broadcast_in_dim(0.0) broadcast_dimensions=() [layout follows loop]
        k f32[512] = broadcast_in_dim(0.0) broadcast_dimensions=() [layout follows loop]
        h f32[512] = optimization_barrier(k) [layout follows loop]
        0: l f32[512] = task one(a)
        0: m f32[512] = task two(b)
        0: e f32[512] = add(c, l)
        0: i f32[512] = add(g, m)
        n f32[512] = add(f, j)
        results: n
    """)
    assert placed(run("place", after))[3:7] == [("one", 0), ("two", 1), ("add", 0), ("add", 1)]


def test_a_sum_that_crosses_once_stays():
    """As often as there are submeshes less one."""
    flat = run(
        "place",
        program("""
            tasks: one 0, two 1
            inputs: x f32[512], y f32[512]
            a = one: x + 1.0
            b = one: x + 2.0
            c = two: y + 1.0
            e = a + b + c
            results: e
        """),
    )
    assert lines(run("regroup_sums", flat)) == lines(flat)


def accumulated(*sums):
    """A loop that adds up what becomes of two terms from two submeshes."""
    return program(
        """
        tasks: one 0, two 1
        inputs: x f32[512], y f32[512]
        loop 0: 2 microbatches, gpipe
        carry z f32[512] = zero, then t, at last total
        zero = lax.full((512,), 0.0)
        0: a = one: x + 1.0
        0: b = two: y + 1.0
        {}
        results: total
    """.format("\n        ".join(f"0: {line}" for line in sums))
    )


def test_sums_are_seen_through_what_is_linear():
    """Each term is scaled where it is; those of one submesh are added up before."""
    after = run("regroup_sums", accumulated("s = (a + b) + a", "c = s * 3.0", "d = -c", "t = z + d"))
    assert [line for line in lines(after).splitlines() if line.startswith("0: ")] == text("""
        0: l f32[512] = task one(a)
        0: m f32[512] = task two(b)
        0: n f32[512] = add(l, l)
        0: o f32[512] = mul(n, 3.0)
        0: p f32[512] = neg(o)
        0: e f32[512] = add(c, p)
        0: q f32[512] = mul(m, 3.0)
        0: r f32[512] = neg(q)
        0: i f32[512] = add(g, r)
    """).splitlines()


def test_a_number_of_each_microbatch_scales_each_term():
    """As the weight of a microbatch does."""
    after = run("regroup_sums", accumulated("n = one: x.sum()", "s = a + b", "c = n * s", "t = z + c"))
    assert len(after.loops[0].carries) == 2
    assert sorted(where for name, *where in placed(run("place", after)) if name == "mul") == [[0], [1]]


@pytest.mark.parametrize(
    "sums",
    [
        ("s = a + b", "c = s * s", "t = z + c"),
        ("s = a + b", "n = s.sum()", "c = s * n", "t = z + c"),  # the number is made of the sum
        ("s = a + b", "c = jnp.sin(s)", "t = z + c"),
        ("s = a + b", "c = 3.0 / s", "t = z + c"),
        ("s = a + b", "c = s * 3.0", "d = c * c", "e = z + c", "t = e + d"),  # read by another, too
        ("s = a + a", "c = s * 3.0", "t = z + c"),  # of one submesh
        (
            "s = a + b",
            "c = s.astype(jnp.float16)",
            "d = c.astype(jnp.float32)",
            "t = z + d",
        ),  # has no room for each term
    ],
)
def test_sums_are_not_seen_through_anything_else(sums):
    flat = run("remove_dead", accumulated(*sums))
    after = run("regroup_sums", flat)
    assert len(after.loops[0].carries) == 1
    assert sorted(n.primitive for n in after.nodes) == sorted(n.primitive for n in run("place", flat).nodes)


@pytest.mark.parametrize(
    "cut", [lambda x: x.astype(int), lambda x: (10 * x).astype(int) // 4, lambda x: (x > 1).astype(int)]
)
def test_what_rounds_is_done_with_the_sum(cut):
    first, second = (mm.task(lambda x: 0.6 * x, f"t{i}", devices=[i]) for i in range(2))
    summed = mm.microbatch(lambda x: cut(first(x) + second(x)), argnum=0, num_microbatches=4, reduce="sum")
    x = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(mm.jit(summed)(x), summed(x))


WIDTH, ROWS = 16, 48  # of a table that two stages read
VIEWS = {
    "as it is": lambda p: p,
    "cast": lambda p: {**p, "table": p["table"].astype(jnp.bfloat16)},
    "scaled": lambda p: {**p, "table": p["table"] / 4 * -1.0},
    "constrained": lambda p: {**p, "table": mm.with_sharding_constraint(p["table"], ("rows", None))},
    "constrained and cast": lambda p: {
        **p, "table": mm.with_sharding_constraint(p["table"], ("rows", None)).astype(jnp.bfloat16)
    },
    "unboxed": lambda p: meta.unbox({**p, "table": meta.Partitioned(p["table"], ("rows", None))}),
    "of a vector": lambda p: {**p, "table": jnp.ravel(p["table"])[: ROWS * WIDTH].reshape(ROWS, WIDTH)},
    "turned": lambda p: {**p, "table": p["table"].reshape(WIDTH, ROWS).T},
}  # fmt: skip


def tied(view, reduce="mean"):
    """A step of a model whose first and last stage read one table, and its arguments."""
    meshes = [Mesh(np.array(jax.devices()[2 * i : 2 * i + 2]), ("model",)) for i in range(2)]
    first, last = ({"mesh": mesh, "logical_axes": [("rows", "model")]} for mesh in meshes)
    embed = mm.task(lambda table, x: table[x].astype(jnp.float32), "embed", **first)
    block = mm.task(lambda w, x: jnp.tanh(x @ w), "block", **last)
    head = mm.task(lambda table, x: jnp.mean(jax.nn.logsumexp(x @ table.T.astype(jnp.float32), -1)), "head", **last)

    def loss(params, x):
        p = view(params)
        return head(p["table"], block(p["w"], embed(p["table"], x))), {"count": (x > 1).sum()}

    def step(params, x):
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, _), grads = mm.microbatch(grad, argnum=1, num_microbatches=4, schedule="1f1b", reduce=reduce)(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    rng = np.random.default_rng(0)
    params = {
        "table": rng.normal(size=(ROWS, WIDTH)).astype("f4"),
        "w": rng.normal(size=(WIDTH, WIDTH)).astype("f4") / 4,
    }
    return step, (params, rng.integers(0, ROWS, 16))


def times(step, args):
    """How often what is as large as the table crosses."""
    edges = mm.jit(step).lower(*args).program.edges
    return sum(1 if e.loop is None else 4 for e in edges if e.var.aval.size == ROWS * WIDTH)


@pytest.mark.parametrize("reduce", ["mean", mm.WeightedMean("count")], ids=["mean", "weighted"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_tied_table_crosses_once_and_so_does_its_gradient(view, reduce):
    """However its readers get it. The other one has a copy of what lies on one submesh, and adds up its own gradient."""
    step, args = tied(view, reduce)
    value, params = mm.jit(step)(*args)
    assert times(step, args) <= 2
    with mm.ignore_transforms():
        expected, after = step(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4), params, after)


def test_without_the_pass_its_gradient_crosses_in_every_microbatch(monkeypatch):
    switch_off(monkeypatch, "regroup_sums")
    assert times(*tied(VIEWS["cast"])) >= 4


def test_norms_of_small_weights_are_added_up_where_the_weights_are():
    """Their squares are computed wherever they are read; a bias does not cross for them, but one number for each submesh."""

    def layer(ps, x):
        for p in ps:
            x = jnp.tanh(x @ p["w"] + p["b"])
        return x

    tasks = [mm.task(layer, f"t{i}", devices=[i]) for i in range(3)]
    params = [[{"w": jnp.ones((32, 32)) / 32, "b": jnp.ones(32) * i} for _ in range(2)] for i in range(3)]

    def step(params, x):
        for task, ps in zip(tasks, params, strict=True):
            x = task(ps, x)
        norm = jnp.sqrt(sum(jnp.vdot(p, p) for p in jax.tree.leaves(params)))
        biases = sum(jnp.sum(p["b"] ** 2) for ps in params for p in ps)
        return jnp.mean(x), norm, biases

    x = jnp.ones((8, 32))
    program = mm.jit(step).lower(params, x).program
    assert {len(program.input_submeshes[v]) for v in program.invars} == {1}
    assert [e.nbytes for e in program.edges if e.nbytes < x.nbytes] == [4] * 4  # two for each sum
    assert_agrees(step, params, x)


@pytest.mark.parametrize("heads", [(0, 1), (0, 1, 0), (1, 0, 1), (0, 1, 0, 1), (1, 1, 0)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_gradients_of_heads_are_added_up_where_they_are_made(heads, schedule):
    """Each submesh sends one to the trunk that all heads read, so that microbatches overlap."""
    trunk = [mm.task(lambda w, x: jnp.tanh(x @ w), f"trunk_{i}", devices=[i]) for i in range(2)]
    tasks = [mm.task(lambda w, x: x @ w, f"head_{i}", devices=[at]) for i, at in enumerate(heads)]

    def loss(ws, x):
        for task in trunk:
            x = task(ws[0], x)
        return jnp.mean(sum(task(w, x) for task, w in zip(tasks, ws[1:], strict=True)) ** 2)

    grads = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=4, schedule=schedule, reduce="mean")
    args = [jnp.eye(8) + 0.1 * i for i in range(1 + len(heads))], jnp.sin(jnp.arange(128.0)).reshape(16, 8)
    program = mm.jit(grads).lower(*args).program
    assert program.loops[0].in_order
    kinds = {v: f.kind for f in program.fragments for v in f.outvars}
    back = [e for e in program.edges if e.loop is not None and kinds[e.var] == "B" and (e.source, e.target) == (0, 1)]
    assert len(back) <= 2  # of the loss, and of all heads there
    assert_agrees(grads, *args)


PARTS = {
    "the whole and a part": (lambda y: (y, y[:-1]), 1),
    "parts that overlap": (lambda y: (y[1:], y[:-1]), 1),
    "parts that do not": (lambda y: (y[:4], y[4:]), 1),
    "one part": (lambda y: (y[:4],), 1 / 2),
}


@pytest.mark.parametrize("num_microbatches", [None, 2])
@pytest.mark.parametrize("parts", PARTS)
def test_gradients_of_parts_that_are_read_elsewhere_cross_as_one_or_as_they_are(parts, num_microbatches):
    """What has fewer bytes: the sum of what they are padded to, or they themselves."""
    trunk = mm.task(lambda w, x: jnp.tanh(w * x), "trunk", devices=[0])
    tail = mm.task(lambda y: jnp.mean(jnp.exp(y)), "tail", devices=[0])
    head = mm.task(lambda y: jnp.mean(jnp.sin(y)), "head", devices=[1])
    take, crosses = PARTS[parts]

    def loss(w, x):
        y = jnp.moveaxis(trunk(w, x), 1, 0)
        return sum(map(head, take(y))) + tail(y)

    grads = jax.grad(loss)
    if num_microbatches:
        grads = mm.microbatch(grads, argnum=1, num_microbatches=num_microbatches, reduce="mean")
    w, x = jnp.linspace(0.5, 1.5, 64), jnp.sin(jnp.arange(8 * 8 * 64.0)).reshape(8, 8, 64)
    back = [e.nbytes for e in mm.jit(grads).lower(w, x).report().edges if (e.source, e.target) == (1, 0)]
    assert back == [crosses * x.nbytes]
    assert_agrees(grads, w, x)
