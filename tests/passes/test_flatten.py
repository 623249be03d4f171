"""From a traced step to the flat program."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import manymesh as mm
from flat import lines, text
from manymesh._passes._flatten import flatten
from manymesh._program._check import check
from stages import assert_same, loss, parameters, reference, rows

layer = mm.task(lambda w, x: x @ w, "layer", devices=[0])


def flat(fun, *args):
    """The flat program of a step; the checker has looked at it."""
    traced = mm.jit(fun).trace(*args)
    result = flatten(traced.jaxpr, traced._record)
    check(result)
    return result


def test_calls_are_opened_and_tasks_stay():
    """Also those of jit and remat around a task; what is in a task stays in it."""
    fun = jax.jit(jax.checkpoint(lambda w, x: layer(w, jnp.sin(x))))
    assert lines(flat(fun, jnp.ones((2, 2)), jnp.ones((2, 2)))) == text("""
        inputs: a f32[2,2], b f32[2,2]
        c f32[2,2] = sin(b)
        d f32[2,2] = task layer(a, c)
        results: d
    """)


def test_a_scan_that_holds_a_task_is_unrolled():
    """The stack of weights is taken apart, and the stack of results made."""
    found = flat(
        lambda ws, x: lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0], jnp.ones((2, 2, 2)), jnp.ones((2, 2))
    )
    words = [line.split(" = ")[1].split("(")[0] for line in lines(found).splitlines()[1:-1]]
    assert words.count("task layer") == 2
    assert sum("[unstacks]" in line for line in lines(found).splitlines()) >= 2


def test_a_scan_without_a_task_stays_one_equation():
    """XLA loops better than we do."""
    found = flat(
        lambda w, x: layer(w, lax.scan(lambda c, _: (c * 2.0, None), x, None, length=3)[0]),
        jnp.ones((2, 2)),
        jnp.ones((2, 2)),
    )
    assert [n.primitive for n in found.nodes][0] == "scan"


def test_a_microbatch_loop_is_there_once():
    """Its batch in pieces, its accumulator as a carry, and what no microbatch changes read from outside."""
    fun = mm.microbatch(lambda w, x: jnp.sum(layer(w, x)), argnum=1, num_microbatches=2)
    found = lines(flat(fun, jnp.ones((2, 2)), jnp.ones((4, 2)))).splitlines()
    assert found[1].endswith(": 2 microbatches")
    assert [line.split()[0] for line in found[2:4]] == ["xs", "carry"]
    assert [line for line in found if "task" in line and line.startswith("0: ")]
    assert sum("[layout follows loop, unstacks]" in line for line in found) >= 2


def test_a_carry_that_is_collected_is_copied_in_the_loop():
    """Before its pieces are put together, and those of whatever is collected before it."""
    loop = mm.microbatch(
        lambda w, s, x: ((s, layer(w, x), s), x), argnum=2, num_microbatches=2, reduce="stack", state_argnum=1
    )
    flat(lambda w, s, x: loop(w, s, x), jnp.ones((2, 2)), jnp.ones((2, 2)), jnp.ones((4, 2)))


def test_an_unchanged_carry_is_read_from_outside():
    """A value that every microbatch hands on as it came is no carry."""
    (loop,) = flat(
        mm.microbatch(lambda w, x: (jnp.sum(layer(w, x)), w), argnum=1, num_microbatches=2, reduce=("sum", "last")),
        jnp.ones((2, 2)),
        jnp.ones((4, 2)),
    ).loops
    assert len(loop.carries) == 1


@pytest.mark.parametrize("word", ["stack", "last"])
def test_a_cast_weight_that_a_task_returns_is_of_its_microbatch(word):
    """It is made again of the weight, in the loop: what is read of it, by whom it may be, is no value from outside."""
    cast = mm.task(lambda ws: ws.astype(jnp.bfloat16), "cast", devices=[0])

    def fun(ws, x):
        small = cast(ws)
        return small, jnp.sum(lax.scan(lambda x, w: (layer(w.astype(x.dtype), x), None), x, small)[0])

    step = mm.microbatch(fun, argnum=1, num_microbatches=2, reduce=(word, "sum"))
    ws, x = jnp.stack([*parameters().values()]), rows()
    flat(step, ws, x)
    assert_same(mm.jit(step)(ws, x), reference(step, ws, x))


def test_the_layers_of_a_stack_are_no_carry_that_stays_as_it_is():
    """The gradient of a bias that is added in each layer is that of the sum after all microbatches."""

    def fun(p, x):
        h, ys = lax.scan(lambda h, p: (h + p["b"], layer(p["w"], x)), jnp.zeros_like(x), p)
        return h, jnp.sum(ys)

    def loss(p, x):
        h, s = mm.microbatch(fun, argnum=1, num_microbatches=2, schedule="gpipe")(p, x)
        return jnp.sum(jnp.sin(h)) + s

    p = {"w": jnp.stack([*parameters().values()]), "b": jnp.ones((2, 4, 4))}
    assert_same(mm.jit(jax.grad(loss))(p, rows()), reference(jax.grad(loss), p, rows()))


def test_a_conditional_on_one_submesh_is_one_task():
    """Its tasks are inside."""
    found = flat(lambda w, x: lax.cond(x[0, 0] > 0, lambda: layer(w, x), lambda: x), jnp.ones((2, 2)), jnp.ones((2, 2)))
    assert [n.task is not None for n in found.nodes if n.primitive == "jit"] == [True]
    assert "select_n(" not in lines(found)


def test_a_conditional_over_submeshes_becomes_a_selection():
    """Which submesh has a fragment never depends on data; each task knows the branch that it is in."""
    other = mm.task(lambda w, x: x @ w, "other", devices=[1])
    found = lines(
        flat(
            lambda w, x: lax.cond(x[0, 0] > 0, lambda: layer(w, x), lambda: other(w, x)),
            jnp.ones((2, 2)),
            jnp.ones((2, 2)),
        )
    )
    assert "cond" not in found and "select_n(" in found
    assert [line.rpartition(" is ")[2] for line in found.splitlines() if "task" in line] == ["0]", "1]"]


def test_a_loop_of_a_backward_pass_is_all_backward():
    """Also what takes the layers of a scan in it apart: as a forward pass it would keep the loop from being a pipeline."""

    def deep(ws, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.sin(layer(w, x)), None), x, ws)[0])

    fun = jax.grad(mm.microbatch(deep, argnum=1, num_microbatches=2))
    found = flat(fun, jnp.ones((2, 2, 2)), jnp.ones((4, 2)))
    assert [{n.backward for n in found.nodes if n.loop == i} for i in range(len(found.loops))] == [{False}, {True}]


def test_what_rounds_of_a_scan_read_is_of_the_forward_pass():
    """JAX takes a weight's constraint out of a scan; for rounds without a gradient too, which are no backward pass."""
    meshes = [jax.sharding.Mesh(jax.devices()[k : k + 1], ("data",)) for k in range(2)]
    constrained = lambda w, x: jnp.tanh(x @ mm.with_sharding_constraint(w, (None, None)))  # noqa: E731
    named = [mm.task(constrained, f"task_{k}", mesh=mesh) for k, mesh in enumerate(meshes)]

    def recycled(p, x):
        def trunk(z):
            return named[1](p["back"], named[0](p["front"], x + z))

        z, _ = jax.lax.scan(lambda z, _: (jax.lax.stop_gradient(trunk(z)), None), jnp.zeros_like(x), None, length=2)
        return jnp.mean(trunk(z) ** 2)

    step = mm.jit(mm.microbatch(jax.value_and_grad(recycled), argnum=1, num_microbatches=4, reduce="mean"))
    p, x = {"front": jnp.eye(64), "back": jnp.eye(64)}, jnp.ones((8, 64))  # what is small is made anywhere
    (loop,) = step.lower(p, x).program.loops
    assert (loop.placement, loop.in_order) == ((0, 1, 0, 1, 0, 1), True)
    assert_same(step(p, x), reference(step, p, x))


@pytest.mark.parametrize(
    "operation",
    [jax.device_put, lax.optimization_barrier, jax.checkpoint(lambda grads: jax.tree.map(jnp.sin, grads))],
    ids=["device_put", "optimization_barrier", "checkpoint"],
)
def test_what_is_done_leaf_by_leaf_is_done_where_each_leaf_is(operation):
    """Gradients of two tasks in one equation, as a solver has them, do not come together for it."""

    def step(p, x):
        grads = operation(jax.grad(loss)(p, x))
        return jax.tree.map(lambda p, g: p - g, p, grads)

    p, x = parameters(), rows()
    compiled = mm.jit(step).lower(p, x).compile()
    assert [e.var.aval.shape for e in compiled.program.edges] == [x.shape, x.shape], "activations and their gradients"
    assert_same(compiled(p, x), reference(jax.jit(step), p, x))
