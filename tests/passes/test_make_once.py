"""What is linear in gradients that cross comes after the loop, of sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flat import lines, program, run, switch_off, text
from manymesh._plan._digest import digest

BODY = """
    tasks: one 0, two 1
    inputs: x f32[512], y f32[512], m f32[512]
    loop 0: 2 microbatches, gpipe
    carry z f32[512] = {init}, then t, at last total
    zero = lax.full((512,), 0.0)
    start = y + y
    0: a = one: x + 1.0
    0: b = two: y + 1.0
    {body}
    results: {results}
"""


def body(*sums, init="zero", results="total"):
    return program(BODY.format(body="\n    ".join(f"0: {line}" for line in sums), init=init, results=results))


def test_each_term_is_added_up_where_it_is():
    """And multiplied once, by what every microbatch would compute alike."""
    after = run("remove_dead", run("make_once", body("k = jnp.exp(m)", "s = a + b", "g = s * k", "t = z + g")))
    assert [line for line in lines(after).splitlines() if "broadcast" not in line and "barrier" not in line] == text("""
        inputs: a f32[512], b f32[512], c f32[512]
        loop 0 step: 2 microbatches
          carry d f32[512] = e, then f, at last g
          carry h f32[512] = i, then j, at last k
        0: n f32[512] = task one(a)
        0: o f32[512] = task two(b)
        0: f f32[512] = add(d, n) [backward]
        0: j f32[512] = add(h, o) [backward]
        p f32[512] = exp(c)
        q f32[512] = add(g, k) [on {'unnamed_0': 1}]
        r f32[512] = mul(q, p) [on {'unnamed_0': 1}]
        results: r
    """).splitlines()


def test_other_terms_and_what_is_there_before_stay():
    """The loop adds up the rest; what the accumulator starts from is added to the sums."""
    flat = body("s = a + b", "g = s * m", "h = z + g", "c = one: x * 2.0", "t = h + c", init="start")
    after = run("remove_dead", run("make_once", flat))
    assert len(after.loops[0].carries) == 3
    tail = [n.primitive for n in after.nodes if n.loop is None][-3:]
    assert tail == ["add", "mul", "add"]


@pytest.mark.parametrize(
    "sums",
    {
        "both vary": ("s = a + b", "g = s * a", "t = z + g"),
        "not linear": ("s = a + b", "g = jnp.sin(s)", "t = z + g"),
        "affine": ("s = a + b", "g = (s + m) * m", "t = z + g"),
        "a quotient": ("s = a + b", "g = m / s", "t = z + g"),
        "of one submesh": ("s = a + a", "g = s * m", "t = z + g"),
        "read by another": ("s = a + b", "g = s * m", "h = one: jnp.sin(g)", "e = z + g", "t = e + h"),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_stays_in_the_loop(sums):
    flat = run("place", body(*sums[1]))
    assert lines(run("make_once", flat)) == lines(flat)


def test_a_result_of_each_microbatch_keeps_it_in_the_loop():
    """The loop needs it there anyway."""
    flat = program("""
        tasks: one 0, two 1
        inputs: x f32[512], y f32[512], m f32[512]
        loop 0: 2 microbatches, gpipe
        carry z f32[512] = zero, then t, at last total
        ys first f32[512], second f32[512] = g
        zero = lax.full((512,), 0.0)
        0: a = one: x + 1.0
        0: b = two: y + 1.0
        0: s = a + b
        0: g = s * m
        0: t = z + g
        results: total, first, second
    """)
    assert len(run("make_once", flat).loops[0].carries) == 1


WIDTH, VOCABULARY, LENGTH, STAGES = 16, 40, 6, 3
embed = mm.task(lambda e, x: e[x].astype(jnp.float32), "embed", devices=[0])
blocks = [mm.task(lambda w, h: h + jnp.tanh(h @ w.astype(jnp.float32)), f"b{i}", devices=[i]) for i in range(STAGES)]
mixers = [
    mm.task(lambda w, h, b: h + jax.nn.softmax(b.astype(jnp.float32)) @ (h @ w), f"m{i}", devices=[i])
    for i in range(STAGES)
]
head = mm.task(lambda e, h: jnp.mean(jax.nn.logsumexp(h @ e.astype(jnp.float32).T, -1)), "head", devices=[STAGES - 1])


def layers(p, x, e=None, ws=None):
    e = p["e"] if e is None else e
    h = embed(e, x)
    for block, w in zip(blocks, ws or p["w"], strict=True):
        h = block(w, h)
    return head(e, h)


def biased(p, x, bias):
    h = embed(p["e"], x)
    for mixer, w in zip(mixers, p["w"], strict=True):
        h = mixer(w, h, bias)
    return head(p["e"], h)


def distances():
    return jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None])


SHARED = {
    "a bias by position": lambda p, x: biased(p, x, p["table"][distances()]),
    "one in bfloat16": lambda p, x: biased(p, x, p["table"].astype(jnp.bfloat16)[distances()]),
    "a slope": lambda p, x: biased(p, x, -jax.nn.softplus(p["slope"]) * distances()),
    "a normalized embedding": lambda p, x: layers(p, x, p["e"] / jnp.linalg.norm(p["e"], axis=-1, keepdims=True)),
    "factors": lambda p, x: layers(p, x, p["e"][:, :4] @ p["up"]),
    "a masked embedding": lambda p, x: layers(p, x, jnp.where(p["e"] > -0.1, p["e"], 0.0)),
    "a padded one": lambda p, x: layers(p, x, jnp.pad(p["e"], ((0, 8), (0, 0)))),
    "one of two parts": lambda p, x: layers(p, x, jnp.concatenate([p["e"][:20], 2 * p["e"][20:]])),
    "a centred one": lambda p, x: layers(p, x, p["e"] - p["e"].mean(0)),
    "one layer, normalized": lambda p, x: layers(p, x, None, [p["w"][0] / jnp.linalg.norm(p["w"][0])] * STAGES),
}  # fmt: skip


def training(loss, reduce="mean"):
    def counted(p, x):
        return loss(p, x), {"count": (x > 1).sum()}

    def step(p, x):
        grad = jax.value_and_grad(counted, has_aux=True)
        (value, _), grads = mm.microbatch(grad, argnum=1, num_microbatches=4, schedule="1f1b", reduce=reduce)(p, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)

    rng = np.random.default_rng(0)
    shapes = {
        "e": (VOCABULARY, WIDTH),
        "w": [(WIDTH, WIDTH)] * STAGES,
        "table": (LENGTH,),
        "slope": (),
        "up": (4, WIDTH),
    }
    params = jax.tree.map(
        lambda s: np.asarray(rng.normal(size=s) / 4, "f4"), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )
    return step, (params, rng.integers(0, VOCABULARY, (16, LENGTH)))


def in_each_microbatch(step, args):
    """The shapes of what crosses in each, besides activations and their gradients."""
    edges = mm.jit(step).lower(*args).program.edges
    return {e.var.aval.shape for e in edges if e.loop is not None} - {(4, LENGTH, WIDTH)}


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_value_has_its_gradient_made_once(name):
    """Made of parameters outside of tasks, and read by several stages: nothing but activations crosses in a microbatch."""
    made_once(*training(SHARED[name]), set())


@pytest.mark.parametrize("name", ["a bias by position", "one in bfloat16", "a normalized embedding", "factors"])
def test_with_the_weights_of_microbatches_too(name):
    """Each term is scaled by the weight of its microbatch before it is added up; the weight is sent."""
    made_once(*training(SHARED[name], mm.WeightedMean("count")), {()})


def made_once(step, args, crosses):
    assert in_each_microbatch(step, args) <= crosses
    value, params = mm.jit(step)(*args)
    with mm.ignore_transforms():
        expected, after = step(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), params, after)


def test_a_sum_has_room_where_each_gradient_has():
    """A gradient of 30000 in each of four microbatches is one in float16, whose largest number is 65504."""
    first, second = (
        mm.task(lambda v, x, s: 1.5e4 * (v.astype(jnp.float32) * x).sum() + s, f"t{i}", devices=[i]) for i in range(2)
    )

    def loss(a, x):
        v = a.astype(jnp.float16)[jnp.array([1, 0, 3, 2])]
        return second(v, x, first(v, x, 0.0))

    grad = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=4, reduce="mean")
    args = np.ones(4, np.float32), np.ones((4, 1), np.float32)
    with mm.ignore_transforms():
        expected = grad(*args)
    assert np.all(expected == expected[0]) and 65504 / 4 < expected[0] < 65504
    np.testing.assert_array_equal(mm.jit(grad)(*args), expected)


def test_without_the_pass_it_crosses_in_every_microbatch(monkeypatch):
    switch_off(monkeypatch, "make_once")
    assert in_each_microbatch(*training(SHARED["a bias by position"])) == {(LENGTH, LENGTH)}


def test_the_order_does_not_depend_on_memory():
    """Processes derive one program each, which have to be equal. Several values are added up for one accumulator here."""

    def loss(edges, x):
        near = jnp.zeros((LENGTH, LENGTH)).at[jnp.arange(LENGTH - 1), jnp.arange(1, LENGTH)].add(edges) + jnp.eye(
            LENGTH
        )
        scale = jax.lax.rsqrt(near.sum(1))
        for task in tasks:
            x = task(x, scale[:, None] * near * scale[None])
        return jnp.mean(x**2)

    tasks = [mm.task(lambda x, near: jnp.tanh(near @ x), f"graph_{i}", devices=[i]) for i in range(4)]
    step = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean")
    traced = mm.jit(step).trace(np.ones(LENGTH - 1, "f4"), np.ones((8, LENGTH, WIDTH), "f4"))
    found, kept = set(), []
    for number in range(8):
        kept.append([{} for _ in range(317 * number)])
        lowered = traced.lower()
        found.add(str(digest(lowered.program, lowered.plan)))
    assert len(found) == 1


def test_what_a_task_reads_anyway_is_not_added_up():
    """The mean of an activation is taken where the activation is needed; it costs no crossing, and no room for a sum."""

    def loss(p, x):
        h = embed(p["e"], x)
        shown = h.mean() / 2
        for block, w in zip(blocks, p["w"], strict=True):
            h = block(w, h)
            shown += h.mean() / 2
        return head(p["e"], h), shown

    def step(p, x):
        grad = mm.microbatch(
            jax.value_and_grad(loss, has_aux=True), argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean"
        )
        return grad(p, x)

    _, args = training(SHARED["factors"])
    program = mm.jit(step).lower(*args).program
    activation = (4, LENGTH, WIDTH)
    assert not [e for e in program.edges if e.loop is None and e.var.aval.shape == activation]
    assert not [v for f in program.fragments if f.loop is None for v in f.invars if v.aval.shape == activation]
    with mm.ignore_transforms():
        expected = step(*args)
    (value, shown), _ = mm.jit(step)(*args)
    np.testing.assert_allclose([value, shown], expected[0], rtol=1e-5, atol=1e-6)
