"""Gradients of parts, padded with zeros and added up, become the parts side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flat import lines, program, run, switch_off, text

SUM = """
    tasks: one 0, two 1
    inputs: x f32[4], y f32[4], z f32[{shape}]
    a = one: x + 1.0
    b = two: y + 1.0
    {sum}
    results: t
"""


def padded(value, *config):
    return f"lax.pad({value}, 0.0, {list(config)})"


def test_layers_become_a_stack():
    """Another term of the sum is added to the whole."""
    layers = [padded(f"{v}[None]", (i, 1 - i, 0), (0, 0, 0)) for i, v in enumerate("ab")]
    after = run("join_parts", program(SUM.format(shape="2,4", sum=f"t = (z + {layers[1]}) + {layers[0]}")))
    assert after.stacked == {next(iter(after.stacked)): tuple(v for n in after.nodes if n.task for v in n.outputs)}
    after = run("remove_dead", after)
    assert "pad" not in lines(after) and [n.primitive for n in after.nodes][-1] == "add"


def test_parts_of_any_length_are_put_together():
    """Those of one place are added up there, and what nobody gives is zero."""
    terms = [padded("a", (1, 7, 0)), padded("b", (6, 2, 0)), padded("a", (6, 2, 0))]
    after = run("remove_dead", run("join_parts", program(SUM.format(shape="12", sum=f"t = {' + '.join(terms)}"))))
    assert lines(after) == text("""
        inputs: a f32[4], b f32[4], c f32[12]
        d f32[4] = task one(a)
        e f32[4] = task two(b)
        f f32[1] = broadcast_in_dim(0.0) broadcast_dimensions=()
        g f32[1] = broadcast_in_dim(0.0) broadcast_dimensions=()
        h f32[4] = add(e, d)
        i f32[2] = broadcast_in_dim(0.0) broadcast_dimensions=()
        j f32[12] = concatenate(f, d, g, h, i) dimension=0
        results: j
    """)


def test_a_part_that_is_added_twice_counts_twice():
    terms = "p = {}\n    q = {}\n    t = (p + q) + p".format(padded("a", (0, 4, 0)), padded("b", (4, 0, 0)))
    after = run("join_parts", program(SUM.format(shape="8", sum=terms)))
    assert [n.primitive for n in run("remove_dead", after).nodes][-2:] == ["add", "concatenate"]


@pytest.mark.parametrize(
    "terms",
    [
        [padded("a", (0, 3, 0)), padded("b", (3, 0, 0))],  # overlap
        ["lax.pad(a, 1.0, [(0, 4, 0)])", padded("b", (4, 0, 0))],  # not with zeros
        [padded("a", (0, 1, 1)), padded("b", (0, 1, 1))],  # with zeros between
        [padded("a", (0, 4, 0)), "lax.concatenate([b, b], 0)"],  # one part, and a whole
    ],
)
def test_what_is_not_side_by_side_stays(terms):
    flat = program(SUM.format(shape="8", sum=f"t = {' + '.join(terms)}"))
    assert run("join_parts", flat) is flat


def indexed(read, layers, count=4):
    """A step that reads its stacked weights in a Python loop, and its arguments."""
    stages = [mm.task(lambda w, x: jnp.tanh(x @ w), f"stage{i}", devices=[i]) for i in range(count)]

    def loss(ws, x):
        for i in range(layers):
            x = stages[i * count // layers](read(ws, i), x)
        return jnp.mean(x**2)

    def step(ws, x):
        grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean")
        value, grads = grad(ws, x)
        return value, ws - 0.1 * grads

    rng = np.random.default_rng(0)
    return step, (rng.normal(size=(layers, 16, 16)).astype("f4") / 4, rng.normal(size=(32, 16)).astype("f4"))


def sent(step, args):
    """The shape of what crosses, where, and how often in a step."""
    edges = mm.jit(step).lower(*args).program.edges
    return sorted((e.source, e.target, e.var.aval.shape, 1 if e.loop is None else 4) for e in edges)


READS = {
    "an index": lambda ws, i: ws[i],
    "a slice": lambda ws, i: ws[i : i + 1][0],
    "a split": lambda ws, i: jnp.split(ws, len(ws))[i][0],
    "an index of a cast": lambda ws, i: ws.astype(jnp.bfloat16)[i].astype(jnp.float32),
    "an index of a multiple": lambda ws, i: (ws / 2 * -3.0)[i],
    "an index of another shape": lambda ws, i: ws.reshape(len(ws), 2, -1)[i].reshape(16, 16),
    "an iteration": lambda ws, i: list(ws)[i],
    "a computed index": lambda ws, i: ws[jnp.int32(i)],
    "an entry of an array": lambda ws, i: ws[jnp.arange(len(ws))[i]],
    "an array": lambda ws, i: ws[np.array([i])][0],
    "a dynamic index": lambda ws, i: jax.lax.dynamic_index_in_dim(ws, i, keepdims=False),
    "a take": lambda ws, i: jnp.take(ws, i, axis=0),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("layers", [4, 8])
def test_no_weight_of_a_python_loop_crosses(read, layers):
    """What crosses is what does between stages, an activation and its gradient in each microbatch."""
    step, args = indexed(read, layers)
    value, ws = mm.jit(step)(*args)
    neighbours = [(i, i + 1) for i in range(3)] + [(i + 1, i) for i in range(3)]
    assert sent(step, args) == sorted((i, j, (8, 16), 4) for i, j in neighbours)
    expected, after = jax.jit(step)(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(ws, after, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("read", [lambda ws, i, j: ws[i, j], lambda ws, i, j: ws[i][j]], ids=["at once", "in turn"])
@pytest.mark.parametrize("rounds", [True, False], ids=["rounds of stages", "stages of layers"])
def test_no_weight_of_a_grid_crosses(read, rounds):
    """Neither where each submesh has a column of it, its stages of an interleaved schedule, nor where it has a row."""
    stages = [mm.task(lambda w, x: jnp.tanh(x @ w), f"stage{i}", devices=[i]) for i in range(2)]

    def loss(params, x):
        for i in range(2):
            for j in range(2):
                x = stages[j if rounds else i](read(params["w"], i, j), x)
        return jnp.mean(x**2)

    def step(params, x):
        schedule = "interleaved" if rounds else "1f1b"
        grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, schedule=schedule, reduce="mean")
        value, grads = grad(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    rng = np.random.default_rng(0)
    args = {"w": rng.normal(size=(2, 2, 16, 16)).astype("f4") / 4}, rng.normal(size=(32, 16)).astype("f4")
    value, params = mm.jit(step)(*args)
    assert {shape for *_, shape, _ in sent(step, args)} == {(8, 16)}
    assert [s.data.shape[:2] for s in params["w"].addressable_shards] == [(2, 1) if rounds else (1, 2)] * 2
    expected, after = jax.jit(step)(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(params["w"], after["w"], rtol=1e-4, atol=1e-6)


def test_without_the_pass_whole_stacks_cross(monkeypatch):
    step, args = indexed(lambda ws, i: ws.reshape(-1)[256 * i : 256 * (i + 1)].reshape(16, 16), 4)
    before = len(sent(step, args))
    switch_off(monkeypatch, "join_parts")
    assert len(sent(step, args)) > 2 * before


def test_layers_in_no_equal_blocks_send_their_gradients_once():
    """Five on four submeshes lie together on one, which gets a sum over the microbatches from each of the others."""
    step, args = indexed(READS["an index"], 5)
    assert {times for *_, shape, times in sent(step, args) if shape == (16, 16)} == {1}


def test_a_gradient_padded_by_a_program_itself_is_right():
    """Outside of tasks, of several dimensions, with a part that is read twice."""
    head = mm.task(lambda x: jnp.sin(x), "head", devices=[0])
    tail = mm.task(lambda x: x.sum(), "tail", devices=[1])

    def loss(x):
        parts = [x[:, :2], x[:, 2:5], x[:, 2:5], x[1:2]]
        return tail(sum(head(p).sum() * (i + 1) for i, p in enumerate(parts)))

    x = np.random.default_rng(1).normal(size=(3, 6)).astype("f4")
    np.testing.assert_allclose(mm.jit(jax.grad(loss))(x), jax.jit(jax.grad(loss))(x), rtol=1e-6)
