"""A task that a step calls several times alike is called once, so that what it reads crosses once."""

import jax
import jax.numpy as jnp
import pytest

import manymesh as mm
from flat import lines, looped, program, run, switch_off, text
from stages import WIDTH, assert_same, back, front, parameters, reference, rows

BODY = """
    tasks: front 0, back 1
    inputs: w f32[4,4], x f32[4,4]
    loop 0: 2 microbatches, gpipe
    xs b f32[2,4] = p, q
    carry a f32[2,4] = p, then t, at last total
    p = x[0:2]
    q = x[2:4]
    {}
    results: total
"""


def test_equal_calls_are_one():
    """Of the same task, in a loop as well, and of tasks that read what equal calls and equal equations make."""
    flat = looped(
        BODY,
        "c = front: lax.tanh(b @ w)", "d = lax.neg(c)", "e = back: lax.exp(d @ w)",
        "f = front: lax.tanh(b @ w)", "g = lax.neg(f)", "h = back: lax.exp(g @ w)",
        "t = a + e * h",
    )  # fmt: skip
    assert lines(run("remove_dead", run("call_once", flat))) == text("""
        inputs: a f32[4,4], b f32[4,4]
        loop 0 step: 2 microbatches
          xs c f32[2,4] = d, e
          carry f f32[2,4] = d, then g, at last h
        d f32[2,4] = slice(b) start_indices=(0, 0) limit_indices=(2, 4)
        e f32[2,4] = slice(b) start_indices=(2, 0) limit_indices=(4, 4)
        0: i f32[2,4] = task front(c, a)
        0: j f32[2,4] = neg(i)
        0: k f32[2,4] = task back(j, a)
        0: l f32[2,4] = mul(k, k)
        0: g f32[2,4] = add(f, l)
        results: h
    """)


def test_the_call_that_makes_more_takes_the_place_of_the_first():
    """That of a gradient makes residuals besides; a metric before it reads the same call, in time."""
    flat = program("""
        tasks: front 0
        inputs: w f32[4,4], x f32[4,4]
        a = front: lax.tanh(x @ w)
        b = lax.neg(a)
        c, d = front: (lax.tanh(x @ w), x @ w)
        e = lax.mul(c, d)
        results: b, e
    """)
    assert lines(run("call_once", flat)) == text("""
        inputs: a f32[4,4], b f32[4,4]
        c f32[4,4], d f32[4,4] = task front(b, a)
        e f32[4,4] = neg(c)
        f f32[4,4] = mul(c, d)
        results: e, f
    """)


def test_a_call_that_reads_what_a_loop_leaves_stays_behind_it():
    """Though one before the loop makes a part of what it makes: it is not there yet."""
    flat = program("""
        tasks: front 0
        inputs: w f32[4,4], x f32[4,4]
        loop 0: 2 microbatches, gpipe
        xs b f32[2,4] = p, q
        carry a f32[2,4] = p, then t, at last total
        p = x[0:2]
        q = x[2:4]
        c = front: lax.tanh(x @ w)
        0: t = a + b
        d, e = front: (lax.tanh(x @ w), total @ w)
        results: c, d, e
    """)
    assert run("call_once", flat) is flat


@pytest.mark.parametrize(
    "other",
    [
        "front: lax.tanh(y @ w)",  # of other operands
        "front: lax.exp(x @ w)",  # something else
        "back: lax.tanh(x @ w)",  # by another task
        "front_bwd: lax.tanh(x @ w)",  # which checkpointing computes again on purpose
    ],
)
def test_what_is_not_alike_stays(other):
    flat = program(f"""
        tasks: front 0, back 1
        inputs: w f32[4,4], x f32[4,4], y f32[4,4]
        a = front: lax.tanh(x @ w)
        b = {other}
        results: a, b
    """)
    assert run("call_once", flat) is flat


def model(p, x):
    return back(p["back"], front(p["front"], x))


def evaluate(p, x):
    """As `evaluate` is often written: the loss calls the model, a metric calls it again."""
    return jnp.mean((model(p, x) - 1) ** 2), jnp.mean(jnp.abs(model(p, x) - 1))


def train(p, x):
    value, grads = jax.value_and_grad(lambda p: jnp.mean((model(p, x) - 1) ** 2))(p)
    return value, grads, jnp.mean(jnp.abs(model(p, x) - 1))


def metric_first(p, x):
    return jnp.mean(jnp.abs(model(p, x) - 1)), jax.grad(lambda p: jnp.mean((model(p, x) - 1) ** 2))(p)


@pytest.mark.parametrize("step", [evaluate, train, metric_first])
@pytest.mark.parametrize("looped", [False, True])
def test_the_model_is_called_once(monkeypatch, step, looped):
    """And its activations cross once, of the loss or its gradient and the metric."""
    p, x = parameters(), rows()
    step = mm.microbatch(step, argnum=1, num_microbatches=2, reduce="mean") if looped else step

    def forward():
        compiled = mm.jit(step).lower(p, x).compile()
        assert_same(compiled(p, x), reference(jax.jit(step), p, x))
        names = [task for f in compiled.program.fragments for task in f.tasks if "bwd" not in f.name]
        return len(names), sum(e.var.aval.shape[-1:] == (WIDTH,) and e.source == 0 for e in compiled.program.edges)

    assert forward() == (2, 1)
    switch_off(monkeypatch, "call_once")
    assert forward() == (4, 2)


def test_two_calls_that_are_differentiated_stay_two_in_a_loop():
    """A backward pass for both would wait for the later one."""
    flat = looped(
        BODY,
        "c = front: lax.tanh(b @ w)", "d = front: lax.tanh(b @ w)", "e = front_bwd: lax.exp(d)", "f = front_bwd: lax.exp(c)",
        "t = a + e + f",
    )  # fmt: skip
    assert run("call_once", flat) is flat


@pytest.mark.parametrize("first", [False, True])
def test_one_of_two_heads(first):
    """A metric of one result of a task, which reads less, and of a function with a derivative of its own."""

    def heads(p, h):
        return jax.nn.relu(h @ p["back"]), h @ p["value"]

    trunk, both = mm.task(lambda w, x: jax.nn.relu(x @ w), "trunk", devices=[0]), mm.task(heads, "heads", devices=[1])
    run_ = lambda p, x: both(p, trunk(p["front"], x))  # noqa: E731

    def step(p, x):
        metric = lambda: jnp.mean(run_(p, x)[0] > 0.5)  # noqa: E731
        before = metric() if first else None
        grads = jax.grad(lambda p: sum(jnp.mean(y**2) for y in run_(p, x)))(p)
        return grads, before if first else metric()

    p = parameters() | {"value": jnp.ones((WIDTH, 1))}
    compiled = mm.jit(step).lower(p, rows()).compile()
    assert_same(compiled(p, rows()), reference(jax.jit(step), p, rows()))
    assert [f.name for f in compiled.program.fragments if f.tasks and "bwd" not in f.name] == ["trunk", "heads"]
