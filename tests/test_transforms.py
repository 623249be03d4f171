"""JAX transformations in and around tasks change nothing but where things run."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from stages import (
    WIDTH,
    assert_agrees,
    assert_same,
    back,
    dense,
    front,
    loss,
    microbatched,
    on_host,
    parameters,
    reference,
    rows,
)

# Differentiation and gradients


def test_taylor_series_through_tasks():
    """Higher derivatives along a line, as for the Laplacian of a network that solves an equation."""

    def along(p, x, v):
        def net(x):
            return jnp.sum(back(p["back"], front(p["front"], x)))

        return jet.jet(net, (x,), ((v, jnp.zeros_like(v)),))

    value, (first, second) = assert_agrees(along, parameters(), rows(), jnp.ones_like(rows()))
    assert first != 0 and second != 0


def test_a_gradient_that_leaves_one_task_enters_another_of_another_size():
    """A gradient in the middle of the model: it brings no mesh along."""
    one = mm.task(dense, "one", mesh=Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model")))
    two = mm.task(lambda w, x: dense(w, 0 + x), "two", devices=[0])

    def f(p, x):
        x = x - 0.1 * jax.grad(lambda x: jnp.sum(jnp.tanh(one(p["front"], x))))(x)
        return jnp.mean(two(p["back"], x) ** 2)

    assert_agrees(jax.value_and_grad(f), parameters(), rows())


def test_gradients_of_bf16_compute_on_float32_parameters_are_float32():
    """Gradient dtypes are those of the parameters, whatever the tasks compute in."""

    def cast(w, x):
        return dense(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))

    one, two = mm.task(cast, "one", devices=[0]), mm.task(cast, "two", devices=[1])

    def half_loss(p, x):
        return jnp.mean(two(p["back"], one(p["front"], x)).astype(jnp.float32) ** 2)

    _, grads = assert_agrees(microbatched(jax.value_and_grad(half_loss)), parameters(), rows(), tolerance=2e-2)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))


def test_gradients_of_bf16_parameters_are_bf16():
    """Nothing is promoted on the way through accumulators."""
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), parameters())
    x = rows().astype(jnp.bfloat16)
    _, grads = assert_agrees(microbatched(), params, x, tolerance=5e-2)
    assert all(g.dtype == jnp.bfloat16 for g in jax.tree.leaves(grads))
    assert_agrees(jax.grad(loss), params, x, tolerance=5e-2)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("looped", [False, True])
def test_a_tied_parameter_gets_its_whole_gradient(stages, looped):
    """A parameter that several stages use sums the gradient of each."""

    def tied(w, x):
        for i in range(stages):
            x = mm.task(dense, f"s{i}", devices=[i])(w if i % 2 == 0 else w.T, x)
        return jnp.mean(x**2)

    step = microbatched(jax.value_and_grad(tied)) if looped else jax.value_and_grad(tied)
    _, grad = assert_agrees(step, parameters()["front"], rows())
    assert_same(grad, jax.grad(tied)(parameters()["front"], rows()))


def test_a_sum_is_not_scaled_and_a_mean_is_divided_once():
    """Sum over 4 pieces of a sum is the sum over the batch."""

    def total(p, x):
        return jnp.sum(back(p["back"], front(p["front"], x)))

    whole = jax.value_and_grad(total)(parameters(), rows())
    assert_same(mm.jit(microbatched(jax.value_and_grad(total), reduce="sum"))(parameters(), rows()), whole)
    quarter = jax.tree.map(lambda v: v / 4, whole)
    assert_same(mm.jit(microbatched(jax.value_and_grad(total)))(parameters(), rows()), quarter)


def test_has_aux():
    """Auxiliary results come out beside the gradient, each reduced as asked."""

    def with_aux(p, x):
        y = back(p["back"], front(p["front"], x))
        return jnp.mean(y**2), {"y": y, "count": jnp.int32(x.shape[0]), "first": y[0]}

    both = jax.value_and_grad(with_aux, has_aux=True)
    assert_agrees(both, parameters(), rows())
    assert_agrees(
        microbatched(both, reduce=(("mean", {"y": "concat", "count": "sum", "first": "last"}), "mean")),
        parameters(), rows(),
    )  # fmt: skip


def test_several_argnums_of_the_gradient():
    """Gradients with respect to parameters and batch; the latter are collected."""
    both = jax.value_and_grad(loss, argnums=(0, 1))
    assert_agrees(both, parameters(), rows())
    assert_agrees(microbatched(both, reduce=("mean", ("mean", "concat"))), parameters(), rows())


def test_forward_mode_and_second_derivatives():
    """jvp, linearize and a Hessian-vector product through tasks."""
    p, x = parameters(), rows()
    assert_agrees(lambda p, x: jax.jvp(lambda q: loss(q, x), (p,), (p,)), p, x)
    assert_agrees(lambda p, x: jax.jvp(jax.grad(loss), (p, x), (p, x))[1], p, x)
    assert_agrees(lambda p, x: jax.vjp(lambda q: loss(q, x), p)[1](2.0), p, x)


def test_stop_gradient_between_tasks():
    """A cut path gives zeros, not errors."""

    def cut(p, x):
        return jnp.sum(back(p["back"], jax.lax.stop_gradient(front(p["front"], x))))

    _, grads = assert_agrees(microbatched(jax.value_and_grad(cut)), parameters(), rows())
    assert not on_host(grads["front"]).any()


def test_an_unused_parameter_gets_a_zero_gradient():
    """Symbolic zeros become arrays."""
    assert_agrees(microbatched(), {**parameters(), "unused": jnp.ones(3)}, rows())
    assert_agrees(jax.grad(loss), {**parameters(), "unused": jnp.ones(3)}, rows())


def test_jacobians_and_a_hessian():
    """vmap of forward and reverse mode."""

    def f(w, x):
        return back(jnp.eye(WIDTH), front(w, x))[0]

    w = parameters()["front"]
    assert_agrees(lambda w, x: (jax.jacrev(f)(w, x), jax.jacfwd(f)(w, x)), w, rows())
    assert_agrees(lambda w, x: jax.hessian(lambda v: loss({"front": v, "back": v}, x))(w), w, rows(2))


# JAX transformations in and around tasks


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_checkpoint_in_and_around_tasks(policy):
    """Rematerialisation changes nothing but memory."""
    inside = mm.task(jax.checkpoint(dense, policy=policy), "inside", devices=[0])
    around = jax.checkpoint(mm.task(dense, "around", devices=[1]), policy=policy)

    def f(p, x):
        return jnp.mean(around(p["back"], inside(p["front"], x)) ** 2)

    assert_agrees(jax.value_and_grad(f), parameters(), rows())
    assert_agrees(microbatched(jax.value_and_grad(f)), parameters(), rows())
    assert_agrees(microbatched(jax.value_and_grad(jax.checkpoint(f, policy=policy))), parameters(), rows())


def test_checkpoint_around_several_tasks():
    """One checkpoint over a stage boundary recomputes each task where it ran."""
    both = jax.checkpoint(lambda p, x: back(p["back"], front(p["front"], x)))

    def f(p, x):
        return jnp.mean(both(p, x) ** 2)

    assert_agrees(microbatched(jax.value_and_grad(f)), parameters(), rows())


def test_vmap_in_and_around_tasks():
    """Also over the gradient, and with an axis that is not the first."""
    one = mm.task(jax.vmap(dense, (None, 0)), "one", devices=[0])

    def f(p, x):
        y = one(p["front"], x)
        y = jax.vmap(back, (None, 1), 1)(p["back"], y)
        return jnp.mean(y**2)

    assert_agrees(lambda p, x: jax.vmap(front, (None, 0))(p["front"], x), parameters(), rows())
    assert_agrees(jax.value_and_grad(f), parameters(), rows().reshape(2, 4, WIDTH))

    def per_row(p, x):
        return jax.vmap(jax.grad(loss), (None, 0))(p, x[:, None])

    assert_agrees(per_row, parameters(), rows())


@jax.custom_vjp
def halved_gradient(x):
    return jnp.sin(x)


halved_gradient.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (g * cos / 2,))


@jax.custom_jvp
def tripled_tangent(x):
    return jnp.sin(x)


tripled_tangent.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 3 * jnp.cos(primals[0]) * tangents[0]))


@pytest.mark.parametrize("custom", [halved_gradient, tripled_tangent])
def test_custom_derivatives_in_and_around_tasks(custom):
    """A custom rule holds inside a task, between tasks, and around a whole task."""
    inside = mm.task(lambda w, x: custom(x @ w), "inside", devices=[0])

    def f(p, x):
        return jnp.mean(back(p["back"], custom(inside(p["front"], x))) ** 2)

    assert_agrees(jax.value_and_grad(f), parameters(), rows())
    assert_agrees(microbatched(jax.value_and_grad(f)), parameters(), rows())


def test_a_task_inside_a_custom_vjp():
    """The rule's own forward and backward may call tasks."""

    @jax.custom_vjp
    def layer(w, x):
        return front(w, x)

    def forward(w, x):
        y = front(w, x)
        return y, (w, x, y)

    def backward(saved, g):
        w, x, y = saved
        return mm.task(lambda w, x, y, g: (x.T @ (g * (1 - y**2)), (g * (1 - y**2)) @ w.T), "mine", devices=[0])(
            w, x, y, g
        )

    layer.defvjp(forward, backward)

    def f(p, x):
        return jnp.mean(back(p["back"], layer(p["front"], x)) ** 2)

    assert_agrees(f, parameters(), rows())
    assert_agrees(microbatched(jax.value_and_grad(f)), parameters(), rows())


def test_tasks_inside_a_custom_root():
    """A deep equilibrium model over two submeshes: what JAX hides in one equation is placed like anything else."""

    def solve(f, start):
        return jax.lax.fori_loop(0, 4, lambda i, h: h - f(h), start)

    def f(p, x):
        def residual(h):
            return h - 0.1 * back(p["back"], front(p["front"], h)) - x

        return jnp.mean(jax.lax.custom_root(residual, x, solve, lambda g, y: solve(lambda h: g(h) - y, y)) ** 2)

    assert_agrees(f, parameters(), rows())
    assert_agrees(jax.value_and_grad(f), parameters(), rows())
    for fun in (f, jax.grad(f)):
        fragments = mm.jit(fun).lower(parameters(), rows()).program.fragments
        assert {f.submesh for f in fragments if f.name.startswith("front")} == {0}
        assert {f.submesh for f in fragments if f.name.startswith("back")} == {1}


def test_a_task_inside_a_custom_jvp():
    """The rule may call tasks."""

    @jax.custom_jvp
    def layer(w, x):
        return front(w, x)

    layer.defjvp(lambda p, t: (front(*p), 2 * jax.jvp(front, p, t)[1]))

    def f(p, x):
        return jnp.mean(back(p["back"], layer(p["front"], x)) ** 2)

    assert_agrees(f, parameters(), rows())
    assert_agrees(jax.value_and_grad(f), parameters(), rows())


def test_nested_jit_in_and_around_tasks():
    """A jit is transparent."""
    inside = mm.task(jax.jit(dense), "inside", devices=[0])
    around = jax.jit(lambda p, x: jax.jit(back)(p["back"], inside(p["front"], x)))
    f = jax.jit(lambda p, x: jnp.mean(around(p, x) ** 2))
    assert_agrees(f, parameters(), rows())
    assert_agrees(microbatched(jax.jit(jax.value_and_grad(f))), parameters(), rows())


def test_a_jitted_function_called_twice_is_two_tasks_with_two_values():
    """JAX hands one cached jaxpr to both calls; they must not be confused."""
    layer = jax.jit(front)

    def f(p, x):
        return jnp.mean(back(p["back"], layer(p["back"], layer(p["front"], x))) ** 2)

    assert_agrees(microbatched(jax.value_and_grad(f)), parameters(), rows())


def test_a_function_that_was_jitted_and_called_before_still_has_its_tasks():
    """The jaxpr that JAX cached outside, without marks, is not used inside; nor the other way round."""
    user = jax.jit(loss)
    eager = user(parameters(), rows())
    step = mm.jit(jax.value_and_grad(user))
    value, _ = step(parameters(), rows())
    assert_same(value, eager)
    tasks = {t for f in step.lower(parameters(), rows()).program.fragments for t in f.tasks}
    assert tasks == {"front", "back"}
    assert_same(user(parameters(), rows()), eager)
    assert_same(reference(step, parameters(), rows())[0], eager)


def test_a_scan_within_a_task():
    """It stays a scan, forward and backward."""

    def layers(ws, x):
        return jax.lax.scan(lambda h, w: (dense(w, h), jnp.sum(h)), x, ws)

    deep = mm.task(layers, "deep", devices=[0])

    def f(p, x):
        y, sums = deep(p["deep"], x)
        return jnp.mean(back(p["back"], y) ** 2) + jnp.sum(sums)

    params = {"deep": jnp.stack([parameters(i)["front"] for i in range(3)]), "back": parameters()["back"]}
    assert_agrees(microbatched(jax.value_and_grad(f)), params, rows())


@pytest.mark.parametrize("reverse", [False, True])
def test_tasks_in_a_scan(reverse):
    """The scan is unrolled, with carries, stacked inputs and outputs, and its gradient."""

    def f(ws, x):
        def layer(h, w):
            h = back(w[1], front(w[0], h))
            return h, jnp.sum(h)

        h, sums = jax.lax.scan(layer, x, ws, reverse=reverse)
        return jnp.mean(h**2) + jnp.sum(sums * jnp.arange(3.0))

    ws = jnp.stack([jnp.stack([parameters(i)["front"], parameters(i)["back"]]) for i in range(3)])
    assert_agrees(f, ws, rows())
    assert_agrees(jax.value_and_grad(f), ws, rows())
    assert_agrees(microbatched(jax.value_and_grad(f)), ws, rows())


def test_control_flow_in_a_task_and_between_tasks():
    """cond and while_loop without tasks in them are opaque."""

    def body(w, x):
        x = jax.lax.cond(jnp.sum(x) > 0, lambda v: v @ w, lambda v: -v, x)
        return jax.lax.fori_loop(0, 3, lambda i, v: v * 0.5 + i, x)

    one = mm.task(body, "one", devices=[0])

    def f(p, x):
        y = one(p["front"], x)
        y = jax.lax.switch(jnp.argmax(y[0]), [jnp.sin, jnp.cos, jnp.tanh, lambda v: v], y)
        return jnp.mean(back(p["back"], y) ** 2)

    assert_agrees(microbatched(jax.value_and_grad(f)), parameters(), rows())


def solved(matvec, b):
    """A linear system, by a few steps of Richardson's iteration."""
    return jax.lax.custom_linear_solve(
        matvec, b, lambda f, b: jax.lax.fori_loop(0, 10, lambda _, x: x + 0.3 * (b - f(x)), b), symmetric=True
    )


def with_rule_for_vmap(fun):
    """A function that says itself how it is vectorized over its second argument."""
    mapped = jax.custom_batching.custom_vmap(fun)
    mapped.def_vmap(lambda size, batched, w, x: (jax.vmap(fun, (None, 0))(w, x), True))
    return mapped


AROUND = {
    "custom_linear_solve": lambda p, x: back(p, solved(lambda v: v + 0.1 * front(jnp.eye(WIDTH), v), x)),
    "custom_vmap": lambda p, x: with_rule_for_vmap(lambda w, x: back(w, front(w, x)))(p, x),
    "custom_vmap, vectorized": lambda p, x: jax.vmap(
        with_rule_for_vmap(lambda w, x: back(w, front(w, x[None]))[0]), (None, 0)
    )(p, x),
    "linear_call": lambda p, x: back(
        p,
        jax.custom_derivatives.linear_call(lambda w, x: x + front(w, 0 * x), lambda w, t: t, p, x),
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_operations_around_tasks(name):
    """What computes a function of its own with tasks in it; a system whose tasks are on one submesh is one task there."""
    f = AROUND[name]
    assert_agrees(f, parameters()["front"], rows())
    if name == "custom_linear_solve":
        assert_agrees(jax.value_and_grad(lambda p, x: jnp.mean(f(p, x) ** 2), (0, 1)), parameters()["front"], rows())


@pytest.mark.parametrize("looped", [False, True])
def test_a_system_over_several_submeshes(looped):
    """What solves it stands in its place, where its derivatives are taken already."""

    def f(p, x):
        return jnp.mean(solved(lambda v: v + 0.1 * back(jnp.eye(WIDTH), front(jnp.eye(WIDTH), v)), x @ p["front"]) ** 2)

    fun = jax.value_and_grad(f)
    assert_agrees(microbatched(fun) if looped else fun, parameters(), rows())


def test_an_operation_around_tasks_of_several_submeshes():
    one, two = (mm.task(lambda a, b: a + b, name, devices=[k]) for k, name in enumerate(("one", "two")))

    def f(x):
        return jax.lax.reduce(x, 0.0, lambda a, b: two(one(a, b), 0.0), (0, 1))

    with pytest.raises(mm.errors.PlacementError, match="reduce .* is one operation, which runs on one submesh"):
        mm.jit(f)(rows())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tasks_in_a_conditional(seed):
    """Every branch runs on its submeshes and the results are selected; gradients too, with or without a loop."""

    def f(p, x):
        h = jax.lax.cond(jnp.sum(x) > 0, lambda: front(p["front"], x), lambda: 2 * back(p["back"], x))
        branches = [lambda v: front(p["front"], v), lambda v: v, lambda v: back(p["back"], v), jnp.zeros_like]
        return jnp.sum(jax.lax.switch(jnp.argmax(x[0]), branches, h) ** 2)

    assert_agrees(jax.value_and_grad(f), parameters(seed), rows(seed=seed))
    assert_agrees(microbatched(jax.value_and_grad(f)), parameters(seed), rows(seed=seed))


def test_a_conditional_keeps_what_its_branches_agree_on():
    """Equal results and literals need no selection; a branch that is not taken adds no NaN."""

    def f(p, x):
        branches = [lambda: (x, 1.0, front(p["front"], x)), lambda: (x, 1.0, jnp.log(-jnp.abs(back(p["back"], x))))]
        return jax.lax.switch(0 * jnp.argmax(x[0]), branches)

    assert_agrees(f, parameters(), rows())
    assert_agrees(jax.grad(lambda p, x: jnp.sum(f(p, x)[2])), parameters(), rows())


def test_sorting_and_random_bits_between_tasks():
    """Unmarked equations of any kind are placed somewhere and computed once or alike."""

    def f(p, x, key):
        y = front(p["front"], jnp.sort(x, 0) + jax.random.normal(key, x.shape))
        y = jnp.take(y, jax.random.permutation(key, y.shape[0]), 0)
        return back(p["back"], y), jax.random.uniform(key, (3,))

    assert_agrees(f, parameters(), rows(), jax.random.key(0))


def test_a_jitted_function_in_many_programs_keeps_its_tasks():
    """JAX caches its jaxpr for each program apart, also when a program that is gone had the same address."""
    layer = jax.jit(front)

    def program(before):
        def step(x):
            for i in range(before):
                x = mm.task(jnp.sin, f"t{i}", devices=[2])(x)
            return layer(jnp.eye(WIDTH), x)

        return mm.jit(step).lower(rows()).program

    gc.freeze()  # what other tests left behind takes a second to go through, each time
    try:
        for k in range(8):
            tasks = [t for f in program(k % 4).fragments for t in f.tasks]
            assert sorted(tasks) == ["front", *(f"t{i}" for i in range(k % 4))]
            gc.collect()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("context", [False, True])
def test_shard_map_in_a_task(context):
    """With its own mesh, or with that of the task around it; psum adds over the submesh."""
    mesh = Mesh(np.array(jax.devices()[2:4]), ("d",))
    given = {} if context else {"mesh": mesh}
    total = jax.shard_map(lambda v: jax.lax.psum(v, "d"), in_specs=P("d"), out_specs=P(), **given)
    y = mm.jit(mm.task(total, "total", mesh=mesh))(rows())
    assert_same(y, rows()[:4] + rows()[4:])
    assert y.devices() == set(mesh.devices.flat)


def constraining(size, *more_rules):
    """A task that constrains the rows of its batch, on a mesh with so many devices for them."""
    mesh = Mesh(np.array(jax.devices()[2 : 2 + size]), ("data",))

    def layer(w, x):
        return mm.with_sharding_constraint(jnp.sin(x @ w), ("batch", "embed" if more_rules else None))

    return mm.task(layer, "first", mesh=mesh, logical_axes=[("batch", "data"), *more_rules])


keeps_axis = pytest.mark.parametrize("keeps_axis", [True, False], ids=["of length one", "gone"])


@keeps_axis
def test_gradients_of_single_examples_through_a_task_that_constrains_the_batch(keeps_axis):
    """The axis is one of vmap's now: its constraint is dropped, and said so, or goes where spmd_axis_name says."""
    first = constraining(2)

    def example(p, x):
        return jnp.sum(back(p["back"], first(p["front"], x[None] if keeps_axis else x)))

    def grads(p, xs, **options):
        return jax.vmap(jax.grad(example), (None, 0), **options)(p, xs)

    text = "task 'first': the constraint of axis 'batch' is dropped under jax.vmap.*spmd_axis_name='data'"
    with pytest.warns(UserWarning, match=text):
        assert_agrees(grads, parameters(), rows())
    with pytest.raises(mm.errors.AxisError, match="divide" if keeps_axis else "2 axis names"):
        mm.jit(lambda w, x: first(w, x[None] if keeps_axis else x))(parameters()["front"], rows()[0])


@keeps_axis
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("more_rules", [(), (("embed", "data"),)], ids=["", "the axis is wanted elsewhere"])
def test_spmd_axis_name_says_where_the_axis_of_single_examples_is(size, more_rules, keeps_axis):
    """There is nothing to find then, on a mesh of any size, and other names do not get the device axis."""
    first = constraining(size, *more_rules)

    def outputs(w, xs):
        return jax.vmap(lambda x: first(w, x[None] if keeps_axis else x), spmd_axis_name="data")(xs)

    w = parameters()["front"]
    out = mm.jit(outputs, strict=True)(w, rows())
    assert_same(out, jnp.sin(rows() @ w)[:, None] if keeps_axis else jnp.sin(rows() @ w))
    assert out.sharding.spec == (P("data") if size > 1 else P())

    def loss(w, xs):
        return jnp.sum(
            jax.vmap(jax.grad(lambda w, x: jnp.sum(first(w, x[None]))), (None, 0), spmd_axis_name="data")(w, xs), 0
        )

    assert_agrees(loss, w, rows())


def test_spmd_axis_name_that_is_a_logical_name():
    """JAX knows no such axis; a note says what it wants."""
    first = constraining(2)
    step = mm.jit(lambda w, xs: jax.vmap(first, (None, 0), spmd_axis_name="batch")(w, xs[:, None]))
    with pytest.raises(ValueError, match="batch") as raised:
        step(parameters()["front"], rows())
    assert "spmd_axis_name 'batch', which has to name device axes" in raised.value.__notes__[0]
    assert "('data',)" in raised.value.__notes__[0]


def test_spmd_axis_name_of_stacked_stages():
    """As an SPMD pipeline has it, around a scan: the axis of the stages is none of a task's, and a note says what to leave out."""
    first = constraining(2)

    def stage(ws, x):
        return jax.lax.scan(lambda x, w: (first(w, x), None), x, ws)[0]

    step = mm.jit(lambda ws, xs: jax.vmap(stage, spmd_axis_name="stage")(ws, xs))
    with pytest.raises(ValueError, match="stage") as raised:
        step(jnp.stack([jnp.stack([jnp.eye(WIDTH)] * 3)] * 2), jnp.stack([rows()] * 2))
    (note,) = (note for note in raised.value.__notes__ if "stage" in note)
    assert "one of 'data'; the axis of the stages is none: leave out the vmap" in note


def test_spmd_axis_name_around_a_constraint_outside_of_tasks():
    """The new axis is constrained with the others; one device axis cannot be at two of them."""
    mesh = Mesh(np.array(jax.devices()[2:6]).reshape(2, 2), ("data", "model"))
    double = mm.task(lambda x: 2 * x, "double", mesh=mesh)

    def step(xs, names):
        return double(jax.vmap(lambda x: mm.with_sharding_constraint(x, names), spmd_axis_name="data")(xs))

    xs = rows().reshape(2, -1, WIDTH)
    out = mm.jit(lambda xs: step(xs, (None, "model")))(xs)
    assert out.sharding.spec == P("data", None, "model")
    assert_same(out, 2 * xs)
    with pytest.raises(mm.errors.AxisError, match="'data' stands at more than one dimension"):
        mm.jit(lambda xs: step(xs, ("data", None)))(xs)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize(
    "between",
    [
        lambda x: 0 + x,
        lambda x: sum([x, 2 * x]),
        lambda x: jnp.where(x > 0, x, 0),
        lambda x: jnp.broadcast_to(jnp.clip(x, -1, 1), x.shape),
        lambda x: jax.checkpoint(lambda y: 1 + jnp.sin(y))(x),
    ],
    ids=["zero", "sum", "where", "broadcast", "checkpoint"],
)
def test_tasks_on_submeshes_of_different_sizes(sizes, between):
    """What a task returns keeps nothing of its mesh, whatever the next one does with it; once and twice differentiated."""
    one = mm.task(lambda w, x: jnp.tanh(x @ w), "one", devices=list(range(sizes[0])), device_axes=("d",))
    devices = [4 + i for i in range(sizes[1])]
    two = mm.task(lambda w, x: jnp.sum(jnp.tanh(between(x) @ w)), "two", devices=devices, device_axes=("d",))

    def loss(p, x):
        return two(p["back"], between(one(p["front"], x)))

    for fun in (jax.grad(loss), lambda p, x: jax.jvp(jax.grad(loss), (p, x), (p, x))[1]):
        mm.jit(fun).trace(parameters(), rows())
    if sizes == (2, 1):
        assert_agrees(jax.grad(loss), parameters(), rows())


def test_a_gradient_inside_the_loss_of_what_is_put_on_a_larger_submesh():
    """Its second derivative gets a cotangent on the mesh that the user named, for a loop in a task on another one."""
    small = mm.task(
        lambda w, x: jax.lax.map(lambda row: jnp.tanh(row @ w), x), "small", devices=[0], device_axes=("d",)
    )
    mesh = Mesh(np.array(jax.devices()[4:8]), ("d",))

    def loss(p, x):
        h = x - 0.1 * jax.grad(lambda v: jnp.sum(jnp.tanh(small(p["front"], v))))(x)
        with jax.named_scope("large"):
            return jnp.mean(dense(p["back"], jax.device_put(h, NamedSharding(mesh, P("d")))))

    with mm.register_task("large", task=mm.Task(mesh=mesh)):
        assert_agrees(jax.value_and_grad(loss), parameters(), rows())
