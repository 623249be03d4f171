"""A conditional, or a scan, over values of several submeshes is opened: each part where its values are."""

import jax
import jax.numpy as jnp
import pytest

import manymesh as mm
from flat import lines, placed, program, run, text
from manymesh._passes import _spread
from manymesh._passes._flatten import UNROLLED
from stages import assert_same, reference

COND = """
    tasks: one 0, two {second}
    inputs: x f32[512], y f32[512], k i32[]
    a = one: x + 1.0
    b = two: y + 1.0
    c, d = lax.cond(k, lambda p, q: (p * 2.0, q), lambda p, q: (p, q * 3.0), a, b)
    e = one: c + 1.0
    f = two: d + 1.0
    results: e, f
"""


def test_both_branches_run_where_their_values_are():
    """And the results are selected there."""
    after = run("spread_control_flow", program(COND.format(second=1)))
    assert lines(after) == text("""
        inputs: a f32[512], b f32[512], c i32[]
        d f32[512] = task one(a)
        e f32[512] = task two(b)
        f bool[] = ne(c, 0)
        g i32[] = convert_element_type(f) new_dtype=int32
        h f32[512] = mul(e, 3.0)
        i f32[512] = mul(d, 2.0)
        j f32[512] = select_n(g, d, i)
        k f32[512] = select_n(g, h, e)
        l f32[512] = task one(j)
        m f32[512] = task two(k)
        results: l, m
    """)
    assert placed(run("place", after))[4:8] == [("mul", 1), ("mul", 0), ("select_n", 0), ("select_n", 1)]


def test_many_small_values_are_as_good_as_a_large_one():
    """The adapters of a model, in the state of an optimizer that skips steps."""
    many = [f"{n}{i}" for n in "ab" for i in range(3)]
    parts = [f"{v} = {'one' if v[0] == 'a' else 'two'}: x{v} + 1.0" for v in many]
    nexts = ", ".join(f"c{v}" for v in many)
    operands = ", ".join(many)
    equations = "\n        ".join(
        [
            *parts,
            f"{nexts} = lax.cond(k, lambda *p: p, lambda *p: tuple(v * 2.0 for v in p), {operands})",
            *(f"d{v} = {'one' if v[0] == 'a' else 'two'}: c{v} + 1.0" for v in many),
        ]
    )
    for size, stays in ((128, False), (32, True)):
        inputs = ", ".join(f"x{v} f32[{size}]" for v in many)
        flat = program(f"""
        tasks: one 0, two 1
        inputs: {inputs}, k i32[]
        {equations}
        results: {", ".join(f"d{v}" for v in many)}
    """)
        assert ("cond(" in lines(run("spread_control_flow", flat))) == stays


def test_a_conditional_of_one_submesh_stays():
    """XLA then runs one branch."""
    assert "cond(" in lines(run("spread_control_flow", program(COND.format(second=0))))


SCAN = """
    tasks: one 0, two 1
    inputs: x f32[512], y f32[512], k f32[]
    a = one: x + 1.0
    b = two: y + 1.0
    c, d, e = lax.scan(lambda c, _: {body}, (a, b, k), None, length={length})[0]
    f = one: c + 1.0
    g = two: d + 1.0
    results: f, g, e
"""
APART = "((c[0] * c[2], c[1] + c[2], jnp.sum(c[0]) + jnp.sum(c[1])), None)"


def test_a_scan_comes_apart_where_only_small_values_meet():
    """As in the recursion of L-BFGS, whose scalars sum over all parameters."""
    after = run("place", run("spread_control_flow", program(SCAN.format(body=APART, length=2))))
    assert "scan(" not in lines(after)
    large = [(name, s) for name, s in placed(after) if name in ("mul", "add", "reduce_sum")]
    assert [s for name, s in large if name == "mul"] == [0, 0]
    assert [s for name, s in large if name == "reduce_sum"] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "body, length",
    [
        ("((c[0] + c[1], c[1] * c[2], c[2]), None)", 2),  # its large values meet
        (APART, UNROLLED + 1),  # it is long
    ],
)
def test_a_scan_that_is_one_thing_stays(body, length):
    """XLA loops better than we do."""
    assert "scan(" in lines(run("spread_control_flow", program(SCAN.format(body=body, length=length))))


@pytest.mark.parametrize("length", [4, 8])
def test_what_each_iteration_does_is_opened_at_once(monkeypatch, length):
    """Opened, the first one spreads the states of the second one, and so on: one at a time, a long loop is placed as often."""
    one, two = (mm.task(lambda w, x: x * w, name, devices=[i]) for i, name in enumerate(("one", "two")))

    def step(state, xs):
        def body(state, x):
            loss, grads = jax.value_and_grad(lambda ws: jnp.sum(one(ws[0], x)) + jnp.sum(two(ws[1], x)))(state[0])
            update = lambda state: jax.tree.map(lambda x, g: x - g, state, (grads,) * 3)  # noqa: E731
            return jax.lax.cond(loss < 5.0, update, lambda state: state, state), loss

        return jax.lax.scan(body, state, xs)

    opened = []
    whole = _spread.open_control_flow
    monkeypatch.setattr(
        _spread, "open_control_flow", lambda flat, nodes: opened.append(len(nodes)) or whole(flat, nodes)
    )
    states = ([jnp.ones(128)] * 2,) * 3  # the states of a submesh are worth a thought together, a gradient is not
    args = states, jnp.ones((length, 128))
    assert_same(mm.jit(step)(*args), reference(jax.jit(step), *args))
    assert opened[0] == length
