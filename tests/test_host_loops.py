"""Loops of unknown length around tasks of several submeshes: the host runs them, with the result of the reference mode."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from generated.laws import counted_compilations
from manymesh._runtime._observe import Observer
from stages import WIDTH, assert_same, back, front, microbatched, parameters, reference, rows
from test_branches import note, runs_as


def both(p, h):
    return back(p["back"], front(p["front"], h))


def until(p, x, least=0.5, at_most=20):
    """Two tasks again and again, until a norm is small or it was often enough."""

    def unfinished(c):
        h, count = c
        return (jnp.sum(h**2) > least) & (count < at_most)

    return lax.while_loop(unfinished, lambda c: (both(p, c[0]), c[1] + 1), (x, 0))


def same(fun, *args, tolerance=2e-5, **options):
    """The values of plain JAX, twice, with one compilation; returns the step."""
    step = mm.jit(fun, **options)
    expected = reference(jax.jit(fun), *args)
    for _ in range(2):
        given = jax.tree.map(jnp.copy, args) if options else args
        assert_same(step(*given), expected, tolerance)
    assert "1 program compiled" in repr(step)
    return step


def parts(fun, *args):
    return list(mm.jit(fun).lower(*args).parts)


@pytest.mark.parametrize("least", [0.01, 0.5, 1e9])
def test_a_loop_at_the_top_of_a_step(least):
    same(functools.partial(until, least=least), parameters(), rows())


def test_its_parts():
    assert parts(until, parameters(), rows()) == ["part1", "while1", "part2"]


def test_a_loop_that_never_runs_changes_nothing():
    step = mm.jit(lambda p, x: until(p, x, 1e9))
    h, count = step(parameters(), rows())
    assert count == 0
    np.testing.assert_array_equal(h, rows())


def test_a_loop_inside_of_calls():
    @jax.custom_jvp
    def solved(p, x):
        return jax.jit(until)(p, x)[0]

    solved.defjvp(lambda primals, tangents: (solved(*primals), tangents[1]))
    same(lambda p, x: jnp.sin(solved(p, 2 * x)) + 1, parameters(), rows())


def test_loops_one_after_the_other():
    def fun(p, x):
        h, count = until(p, x, 0.5)
        g, more = until(p, h + x, 0.3, at_most=5)
        return jnp.mean(g @ p["back"]), count + more

    same(fun, parameters(), rows())
    assert parts(fun, parameters(), rows()) == ["part1", "while1", "part2", "while2", "part3"]


def test_a_loop_in_a_loop():
    def fun(p, x):
        def outer(c):
            h, total, k = c
            g, count = until(p, h + 0.1 * k, 0.5, 4)
            return front(p["front"], g) + h, total + count, k + 1

        return lax.while_loop(lambda c: c[2] < 3, outer, (x, 0, 0))

    same(fun, parameters(), rows())
    assert parts(fun, parameters(), rows()) == ["part1", "while1/part1", "while1/while1", "while1/part2", "part2"]


def test_a_number_of_times_that_is_an_argument():
    step = same(lambda p, x, n: lax.fori_loop(0, n, lambda i, h: both(p, h + i), x), parameters(), rows(), 3)
    with mm.ignore_transforms():
        expected = step(parameters(), rows(), 7)
    assert_same(step(parameters(), rows(), 7), expected)
    assert "1 program compiled" in repr(step)


def test_carries_that_swap_stay_or_are_literals():
    def fun(p, x):
        def body(c):
            a, b, kept, one, count = c
            return both(p, b), a + kept, kept, jnp.float32(1), count + 1

        return lax.while_loop(lambda c: c[4] < 3 * c[3], body, (x, 2 * x, x, jnp.float32(1), jnp.float32(0)))

    same(fun, parameters(), rows())


def test_one_value_in_many_places():
    def fun(p, x):
        def body(c):
            return both(p, c[0]), c[0], x, c[3] + 1

        a, b, c, _ = lax.while_loop(lambda c: c[3] < 3, body, (x, x, x, 0))
        return a, b, c, x, a

    same(fun, parameters(), rows())


def test_forward_derivatives_and_vmap_around_a_loop():
    def tangent(p, x):
        return jax.jvp(lambda v: until(p, v, 0.5)[0], (x,), (jnp.ones_like(x),))

    same(tangent, parameters(), rows())
    same(
        lambda p, x: jax.vmap(lambda v: until(p, v, 0.5))(x), parameters(), jnp.stack([rows(), 3 * rows(), 0 * rows()])
    )


def test_keys_whole_numbers_and_weak_types():
    def fun(p, x, key):
        def body(c):
            key, h, count, scale = c
            key, now = jax.random.split(key)
            return key, both(p, h + jax.random.normal(now, h.shape)), count + 1, scale * 0.5

        key, h, count, scale = lax.while_loop(
            lambda c: c[2] < 3, body, (key, x.astype(jnp.bfloat16).astype(x.dtype), 0, 1.0)
        )
        return key, h, count, jnp.bfloat16(2) * scale

    same(fun, parameters(), rows(), jax.random.key(0))
    same(fun, parameters(), rows(), jax.random.PRNGKey(1))


def test_results_are_as_weakly_typed_as_jax_says_however_often_a_loop_runs():
    """So that they are promoted alike outside, and no step is compiled again for what comes of one."""

    def fun(p, x, times):
        start = jnp.full(x.shape, 1.0)
        h, before, n = lax.while_loop(lambda c: c[2] < times, lambda c: (both(p, c[0]), c[0], c[2] + 1), (x, start, 0))
        full = lambda h: jnp.full(h.shape, 2.0)  # noqa: E731
        return before, lax.switch(n, [full, lambda h: until(p, h, 0.5, 2)[0]], h), lax.cond(n > 0, full, full, h)

    step = mm.jit(fun)
    for times in range(3):
        expected = reference(jax.jit(fun), parameters(), rows(), times)
        found = step(parameters(), rows(), times)
        assert_same(found, expected)
        assert [x.weak_type for x in found] == [x.weak_type for x in expected] == [False, True, True]
        half = jnp.bfloat16(1)
        assert [(half * x).dtype for x in found] == [(half * x).dtype for x in expected]


def test_constants_that_a_loop_closes_over():
    table, seed = np.linspace(0, 1, WIDTH, dtype=np.float32), jax.random.key(3)

    def fun(p, x):
        def body(c):
            h, i = c
            return both(p, h + jnp.asarray(table) + jax.random.normal(jax.random.fold_in(seed, i), h.shape)), i + 1

        def unfinished(c):
            return (c[1] < 2) & jnp.all(jnp.asarray(table) < 2)

        return jax.jit(lambda x: lax.while_loop(unfinished, body, (x, 0))[0])(x) * table

    compiled = same(fun, parameters(), rows()).prepare(parameters(), rows())
    assert sorted(x.shape for x in compiled._consts.values()) == [(), (WIDTH,)]  # each is on the devices once


def test_a_constant_that_only_dead_code_reads():
    """As a table that the initialization of a model makes, of whose variables only the cache is used."""
    table = np.linspace(0, 1, WIDTH, dtype=np.float32)

    def fun(p, x):
        both(p, x + jnp.asarray(table))
        return until(p, x)

    same(fun, parameters(), rows())


@pytest.mark.parametrize("how", ["debug", "io", "ordered"])
def test_effects_happen_as_often_as_the_body_runs(how):
    def fun(p, x):
        def body(c):
            h, count = c
            note("body", h, how)
            return both(p, h), count + 1

        note("before", x, how)
        h, count = lax.while_loop(lambda c: c[1] < 3, body, (x, 0))
        note("after", h, how)
        return h, count

    said = runs_as(fun, parameters(), rows())
    assert len(said) == 5


def search(params, opt_state, x, optimizer):
    """Gradient descent whose step is halved until the loss falls enough; the gradient is microbatched."""
    loss, grads = microbatched()(params, x)
    updates, opt_state = optimizer.update(grads, opt_state, params)

    def moved(scale):
        return jax.tree.map(lambda p, u: p + scale * u, params, updates)

    def unfinished(c):
        scale, value = c
        return (value > loss) & (scale > 1e-3)

    def halved(c):
        scale = c[0] / 2
        return scale, microbatched(lambda p, x: jnp.mean(both(p, x) ** 2))(moved(scale), x)

    first = microbatched(lambda p, x: jnp.mean(both(p, x) ** 2))(moved(8.0), x)
    scale, value = lax.while_loop(unfinished, halved, (jnp.float32(8.0), first))
    return moved(scale), opt_state, loss, value, scale


@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_a_line_search_with_a_pipeline_in_it(donate):
    optimizer = optax.adam(3e-1)
    params = parameters()
    fun = functools.partial(search, optimizer=optimizer)
    step = mm.jit(fun, donate_argnums=donate)
    plain, ours = (params, optimizer.init(params)), (jax.tree.map(jnp.copy, params), optimizer.init(params))
    for _ in range(3):
        *plain, loss, value, scale = reference(jax.jit(fun), *plain, rows())
        given = jax.tree.leaves(ours)
        *ours, ours_loss, ours_value, ours_scale = step(*ours, rows())
        assert_same((ours, ours_loss, ours_value, ours_scale), (plain, loss, value, scale), 1e-4)
        assert all(x.is_deleted() == bool(donate) for x in given)
    assert "1 program compiled" in repr(step)


class Moves(Observer):
    """Counts the arguments of parts that were not yet where they are wanted."""

    def __init__(self):
        self.count = 0

    def moves_argument(self, position, value, sharding):
        self.count += not hasattr(value, "sharding") or value.sharding.device_set != sharding.device_set


@pytest.mark.parametrize("where", ["elsewhere", "at home"])
def test_nothing_but_what_the_loop_carries_moves_in_it(where):
    step = mm.jit(until)
    compiled = step.prepare(parameters(), rows())
    args = jax.device_put((parameters(), rows()), jax.devices()[5])
    if where == "at home":
        args = jax.device_put(args, compiled.input_shardings[0])
    moves = Moves()
    compiled.call_flat(jax.tree.leaves(args), moves)
    assert moves.count == (
        1 if where == "elsewhere" else 0
    )  # the rows; weights go to their places before the loop begins
    with mm.inspect.record() as recording:
        _, count = step(*args)
    assert count > 3
    assert sum(span.label == "front" for span in recording.spans) == count
    sent = sum(span.nbytes for span in recording.spans if span.source is not None)
    assert sent == 2 * count * 8 * WIDTH * 4  # to the second task, and back for the next time round


def test_what_an_iteration_compiles_and_leaves_alive():
    step = mm.jit(until)
    args = (parameters(), rows())
    jax.block_until_ready(step(*args))
    with counted_compilations() as made:
        few = jax.block_until_ready(step(*args))
    assert not made
    alive = len(jax.live_arrays())
    del few
    again = jax.block_until_ready(step(*args))
    assert len(jax.live_arrays()) == alive
    del again


def test_arguments_that_are_not_donated_stay_and_donated_ones_go():
    x, p = rows(), parameters()
    step = mm.jit(until, donate_argnums=1)
    step(p, x)
    assert x.is_deleted() and not any(leaf.is_deleted() for leaf in jax.tree.leaves(p))
    with pytest.raises(RuntimeError, match=r"args\[1\].*deleted"):
        step(p, x)


def test_stacked_layers_in_a_loop():
    meshes = mm.submeshes(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
    layer = mm.task(lambda w, h: jnp.tanh(h @ w), "layer", mesh=list(meshes))

    def fun(ws, x):
        def body(c):
            h, count = c
            return lax.scan(lambda h, w: (layer(w, h), None), h, ws)[0], count + 1

        return lax.while_loop(lambda c: (jnp.sum(c[0] ** 2) > 0.1) & (c[1] < 5), body, (x, 0))

    ws = jnp.stack([parameters(k)["front"] for k in range(4)])
    same(fun, ws, rows())


def test_stacked_layers_that_two_programs_of_a_loop_cut_otherwise():
    """The copy that each of them wants is made once."""
    meshes = [Mesh(np.array(jax.devices()[k : k + 1]), ("x",)) for k in range(4)]
    by_two, by_four = (
        mm.task(lambda w, h: jnp.tanh(h @ w) / 2, f"over_{len(ms)}", mesh=ms) for ms in (meshes[:2], meshes)
    )

    def over(task, ws, h):
        return lax.scan(lambda h, w: (task(w, h), None), h, ws)[0]

    def fun(ws, x, n):
        def body(c):
            h = over(by_two, ws, c[0])
            return lax.while_loop(lambda c: c[1] < 2, lambda c: (over(by_four, ws, c[0]), c[1] + 1), (h, 0))[0], c[
                1
            ] + 1

        return lax.while_loop(lambda c: c[1] < n, body, (x, 0))

    ws = jnp.stack([parameters(k)["front"] for k in range(4)])
    for n in (0, 2):
        same(fun, ws, rows(), n)


def test_shardings_that_were_asked_for():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2:4]), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    wide = mm.task(lambda w, h: jnp.tanh(h @ w), "wide", mesh=mesh)

    def fun(p, x):
        def body(c):
            return wide(p["back"], front(p["front"], c[0])), c[1] + 1

        h, _ = lax.while_loop(lambda c: c[1] < 3, body, (x, 0))
        return h, p

    step = mm.jit(fun, in_shardings=({"front": None, "back": split}, None), out_shardings=(split, None))
    p = parameters()
    result, _ = step(p, rows())
    assert result.sharding.is_equivalent_to(split, 2)
    assert step.prepare(p, rows()).input_shardings[0][0]["back"] == split
    assert mm.checkpoint.argument_of(step.lower(p, rows()), 0)["back"].sharding == split
    assert_same(step(p, rows()), reference(jax.jit(fun), p, rows()))


def test_what_only_a_part_can_say():
    lowered = mm.jit(until).lower(parameters(), rows())
    compiled = lowered.compile()
    for step in (lowered, compiled):
        with pytest.raises(AttributeError, match=r"until.*while_loop.*test_host_loops.py.*\.parts\['while1'\]"):
            step.report()
        assert not hasattr(step, "program")
        assert step.parts["while1"].report().tasks
    assert "while1" in repr(lowered) and "while1" in repr(compiled)
    assert "// while1" in lowered.as_text() and "// while1" in compiled.as_text()


def test_a_nan_in_a_loop_names_the_step():
    bad = mm.task(lambda w, h: jnp.log(h - 1e9) @ w, "bad", devices=[1])
    fun = lambda p, x: lax.while_loop(lambda h: jnp.sum(h**2) > 0.5, lambda h: bad(p["back"], front(p["front"], h)), x)  # noqa: E731
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="while1.*bad"):
        jax.block_until_ready(mm.jit(fun)(parameters(), rows()))


def test_a_nan_in_a_loop_that_ran_well_before():
    """Its task and its line, each time; and what others look for in this thread is looked for as before."""
    logs = mm.task(lambda w, h: jnp.log(h @ w), "logs", devices=[1])
    step = mm.jit(
        lambda p, x: lax.fori_loop(
            0, jnp.int32(jnp.sum(x) > -1e9) + 1, lambda i, h: logs(p["back"], front(p["front"], h)), x
        )
    )
    alone = jax.jit(jnp.log)
    eye = {"front": jnp.eye(WIDTH), "back": 5 * jnp.eye(WIDTH)}

    def calls():
        step(eye, jnp.ones((2, WIDTH)))
        alone(jnp.ones(()))
        for _ in range(2):
            with pytest.raises(
                FloatingPointError, match=r"while1.*NaN in a result of task 'logs', at .*test_host_loops.py"
            ):
                step(eye, -jnp.ones((2, WIDTH)))
        with pytest.raises(FloatingPointError):
            alone(-jnp.ones(()))

    jax.config.update("jax_debug_nans", True)
    try:
        with ThreadPoolExecutor(1) as pool:  # JAX has not stopped looking there
            pool.submit(calls).result()
    finally:
        jax.config.update("jax_debug_nans", False)


def test_planned_devices():
    devices = mm.planned_devices(2)
    one, two = (
        mm.task(lambda w, h: jnp.tanh(h @ w), n, mesh=jax.sharding.Mesh(np.array([d]), ("x",)))
        for n, d in zip("ab", devices, strict=True)
    )
    fun = lambda p, x: lax.while_loop(lambda h: jnp.sum(h**2) > 0.5, lambda h: two(p["back"], one(p["front"], h)), x)  # noqa: E731
    lowered = mm.jit(fun).lower(parameters(), rows())
    assert lowered.parts["while1"].report().tasks
    with pytest.raises(mm.errors.MeshError, match="planned"):
        lowered.compile()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_in_a_scan(reverse):
    def fun(p, xs, keys):
        def body(c, piece):
            x, key = piece
            h, count = until(p, c + x + jax.random.normal(key, x.shape), 0.5, 3)
            return h, (count, h[:, 0], jax.random.split(key)[0], 2)

        h, ys = lax.scan(body, xs[0], (xs, keys), reverse=reverse)
        return front(p["front"], h), ys

    xs, keys = jnp.stack([rows(seed=k) for k in range(3)]), jax.random.split(jax.random.key(0), 3)
    same(fun, parameters(), xs, keys)
    assert parts(fun, parameters(), xs, keys)[1:-1] == ["while1/part1", "while1/while1", "while1/part2"]


@pytest.mark.parametrize("length", [0, 1])
def test_a_loop_in_a_short_scan_beside_another_loop(length):
    def fun(p, x, xs):
        h, count = until(p, x, 0.5, 3)
        last, ys = lax.scan(lambda c, x: (until(p, c + x, 0.5, 3)[0], (c, x, 2.0)), h, xs)
        return last, ys, count

    same(fun, parameters(), rows(), jnp.ones((length, *rows().shape)))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loop_in_a_branch(sign):
    """Only the branch that is taken runs."""

    def fun(p, x):
        h, count = lax.cond(
            x[0, 0] > 0, lambda h: until(p, h), lambda h: (back(p["back"], h) + note("other", h), jnp.int32(7)), x
        )
        return front(p["front"], h), count

    x = rows().at[0, 0].set(sign)
    assert len(runs_as(fun, parameters(), x)) == (sign < 0)
    step = mm.jit(fun, donate_argnums=1)
    assert_same(step(parameters(), jnp.copy(x)), reference(jax.jit(fun), parameters(), x))
    named = ["part1", "cond1/branch0", "cond1/branch1/part1", "cond1/branch1/while1", "cond1/branch1/part2", "part2"]
    assert parts(fun, parameters(), x) == named


def test_a_branch_of_the_host_in_a_loop_of_the_host():
    def fun(p, x, k):
        def body(c):
            h, i = c
            chosen = [lambda h: until(p, h, 0.5, 2)[0], lambda h: both(p, h), lambda h: -h]
            return lax.switch((i + k) % 3, chosen, h) + 0.1, i + 1

        return lax.while_loop(lambda c: c[1] < 5, body, (x, 0))

    same(fun, parameters(), rows(), 0)
    same(fun, parameters(), rows(), 2)


def test_reverse_mode_through_such_a_loop_is_what_it_is_in_jax():
    def fun(p, x):
        return jax.grad(lambda p: jnp.sum(until(p, x)[0]))(p)

    with pytest.raises(ValueError, match="Reverse-mode"):
        mm.jit(fun)(parameters(), rows())


@pytest.mark.parametrize("reduce", ["sum", "mean", "concat", "stack", "last", "max"])
def test_microbatches_with_such_a_loop_run_one_after_the_other(reduce):
    """There is no pipeline, which a finding says; the values are those of the loop in plain JAX."""

    def step(p, x):
        return microbatched(lambda p, x: {"h": until(p, x)[0]}, reduce=reduce)(p, x), jnp.sum(both(p, x))

    with pytest.warns(
        UserWarning, match=r"microbatch\(<lambda>\) has a lax.while_loop.*test_host_loops.py.*, whose length"
    ):
        same(step, parameters(), rows())
    with pytest.raises(mm.errors.PlacementError, match=r"strict=True\): microbatch"):
        mm.jit(step, strict=True)(parameters(), rows())


@pytest.mark.filterwarnings("ignore:.*has a lax.while_loop:UserWarning")
@pytest.mark.parametrize("weighted", [False, True])
def test_deep_equilibrium_with_microbatches(weighted):
    """A fixed point forwards, another one backwards, keys and a state for each microbatch, SGD whose state is donated."""

    def fixed_point(f, start):
        return lax.while_loop(
            lambda c: (jnp.max(jnp.abs(c[1] - c[0])) > 1e-6) & (c[2] < 60), lambda c: (c[1], f(c[1]), c[2] + 1), (start, f(start), 0)
        )[1]  # fmt: skip

    def cell(p, x, h):
        return 0.3 * both(p, h) + x

    @jax.custom_vjp
    def equilibrium(p, x):
        return fixed_point(functools.partial(cell, p, x), x)

    def forwards(p, x):
        h = equilibrium(p, x)
        return h, (p, x, h)

    def backwards(kept, ct):
        p, x, h = kept
        _, through_h = jax.vjp(lambda h: cell(p, x, h), h)
        u = fixed_point(lambda u: ct + through_h(u)[0], ct)
        return jax.vjp(lambda p, x: cell(p, x, h), p, x)[1](u)

    equilibrium.defvjp(forwards, backwards)

    def loss(p, x, key, seen):
        y = equilibrium(p, x + 0.01 * jax.random.normal(key, x.shape))
        if weighted:
            return (jnp.mean(y**2), {"tokens": jnp.sum(x[:, 0] > 0) + 1}), seen + jnp.mean(y)
        return jnp.mean(y**2), seen + jnp.mean(y)

    def graded(p, x, key, seen):
        (value, seen), grads = jax.value_and_grad(
            lambda p: (lambda out, seen: (out[0], (out[1], seen)) if weighted else (out, seen))(*loss(p, x, key, seen)), has_aux=True
        )(p)  # fmt: skip
        return ((value, seen[0], grads), seen[1]) if weighted else ((value, grads), seen)

    micro = mm.microbatch(
        graded, argnum=1, num_microbatches=4, rng_argnum=2, state_argnum=3,
        reduce=mm.WeightedMean("tokens") if weighted else "mean",
    )  # fmt: skip

    def step(p, x, key, seen):
        out, seen = micro(p, x, key, seen)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, out[-1]), out[:-1], seen

    same(step, parameters(), rows(), jax.random.key(3), jnp.float32(0), donate_argnums=(0, 3))


@pytest.mark.once
@pytest.mark.parametrize("micro", [False, True])
def test_an_optimizer_with_a_line_search(micro):
    """L-BFGS: its zoom is a while_loop with gradients of the model in it."""
    optimizer = optax.lbfgs()

    def fun(params, state, x):
        def value(p):
            mean = lambda p, x: jnp.mean((both(p, x) - 0.5) ** 2)  # noqa: E731
            return microbatched(mean)(p, x) if micro else mean(p, x)

        loss, grads = optax.value_and_grad_from_state(value)(params, state=state)
        updates, state = optimizer.update(grads, state, params, value=loss, grad=grads, value_fn=value)
        return optax.apply_updates(params, updates), state, loss

    plain = ours = (parameters(), optimizer.init(parameters()))
    step, reference_step = mm.jit(fun), jax.jit(fun)
    for _ in range(3):
        *plain, expected = reference(reference_step, *plain, rows())
        *ours, loss = step(*ours, rows())
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert loss < 0.9 * float(reference(jax.jit(fun), parameters(), optimizer.init(parameters()), rows())[2])


def test_conjugate_gradients_over_the_hessian_of_a_model():
    """Hessian-free optimization: a solver of JAX's own, whose matrix is a product through both tasks and back."""

    def fun(p, x):
        loss = lambda p: jnp.mean((both(p, x) - 0.5) ** 2)  # noqa: E731
        grads = jax.grad(loss)(p)

        def damped(v):
            return jax.tree.map(lambda a, b: a + 0.5 * b, jax.jvp(jax.grad(loss), (p,), (v,))[1], v)

        step, _ = jax.scipy.sparse.linalg.cg(damped, grads, maxiter=8)
        return jax.tree.map(jnp.subtract, p, step), loss(p)

    same(fun, parameters(), rows(), tolerance=2e-4)


def test_modules_of_nnx_in_a_loop():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.front = mm.nnx.task(nnx.Linear, "front", devices=[0])(WIDTH, WIDTH, rngs=rngs)
            self.back = mm.nnx.task(nnx.Linear, "back", devices=[1])(WIDTH, WIDTH, rngs=rngs)
            self.calls = nnx.Variable(jnp.int32(0))

    def run(model, x):
        def body(c):
            model, h, count = c
            model.calls.set_value(model.calls.get_value() + 1)
            return model, jnp.tanh(model.back(model.front(h))), count + 1

        return nnx.while_loop(lambda c: c[2] < 3, body, (model, x, 0))[1:]

    step, model, plain = mm.nnx.jit(run), Model(), Model()
    for _ in range(2):
        assert_same(step(model, rows()), reference(step, plain, rows()))
    assert int(model.calls.get_value()) == int(plain.calls.get_value()) == 6


# Where the parts of a loop keep what they share

SUBMESHES = [Mesh(np.array(jax.devices()[i : i + 2]), ("data",)) for i in (0, 2)]


def trained(p, x, steps=4, at=("front", "back")):
    """Gradient descent until the loss is small, over two submeshes of two devices."""
    first, second = (mm.task(lambda w, x: jnp.tanh(x @ w), n, mesh=m) for n, m in zip(at, SUBMESHES, strict=True))

    def one(p):
        value, grads = jax.value_and_grad(lambda p: jnp.mean((second(p["back"], first(p["front"], x)) - 0.5) ** 2))(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    return lax.while_loop(
        lambda c: (c[1] > 0.01) & (c[2] < steps), lambda c: (*one(c[0]), c[2] + 1), (p, jnp.float32(1), 0)
    )


def places(tree):
    return jax.tree.map(lambda x: (sorted(d.id for d in x.sharding.device_set), x.sharding.spec), tree)


def test_each_state_of_a_loop_is_where_its_task_is():
    """Between calls and in the loop; a second call moves nothing."""
    step = same(trained, parameters(), rows())
    compiled = step.prepare(parameters(), rows())
    found = places(step(parameters(), rows())[0])
    assert found == {"front": ([0, 1], P()), "back": ([2, 3], P())} == places(compiled.arguments[0][0])
    for part in compiled.parts.values():
        moved = Moves()
        args = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), part.arguments)
        part.call_flat(jax.tree.leaves(args), moved)
        assert moved.count == 0


def test_a_state_that_nothing_reads_is_where_the_loop_leaves_its_next_value():
    """As the flag of `optax.apply_if_finite`: a second step moves nothing."""
    at = [mm.task(lambda w, x: jnp.tanh(x @ w), n, mesh=m) for n, m in zip("ab", SUBMESHES, strict=True)]

    def fun(state, x):
        def once(c):
            p, _, count = c
            value, grads = jax.value_and_grad(lambda p: jnp.mean(at[1](p["back"], at[0](p["front"], x)) ** 2))(p)
            return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), jnp.sum(grads["front"]) > 0, count + 1

        p, _ = state
        p, flag, _ = lax.while_loop(lambda c: c[2] < 3, once, once((p, jnp.bool_(False), 0)))
        return p, flag

    step = mm.jit(fun)
    state = (parameters(), jnp.bool_(True))
    homes = places(step.prepare(state, rows()).arguments[0][0])
    assert places(step(state, rows())) == homes


@pytest.mark.parametrize("how", ["in_shardings", "device_put"])
def test_a_state_lies_in_a_loop_as_the_user_says_of_the_argument(how):
    """The weights stay sharded in every part, and come back so."""
    said = {"front": NamedSharding(SUBMESHES[0], P("data")), "back": NamedSharding(SUBMESHES[1], P(None, "data"))}
    step = mm.jit(trained, **({"in_shardings": (said, None)} if how == "in_shardings" else {}))
    p = parameters() if how == "in_shardings" else jax.device_put(parameters(), said)
    compiled = step.prepare(p, rows())
    expected = reference(jax.jit(trained), parameters(), rows())
    result = step(p, rows())
    assert_same(result, expected, 2e-5)
    assert jax.tree.map(lambda x: x.sharding, result[0]) == said == compiled.input_shardings[0][0]
    body = [x.sharding for x in jax.tree.leaves(compiled.parts["while1"].arguments) if x.shape == (WIDTH, WIDTH)]
    assert sorted(map(str, body)) == sorted(map(str, said.values()))


def test_a_stacked_state_that_is_not_donated_comes_back_as_it_came():
    """The weights, a bare array, as well as the moments in the optimizer's state."""
    layer = mm.task(lambda w, h: jnp.tanh(h @ w), "layer", mesh=SUBMESHES)
    optimizer = optax.adam(1e-2)

    def fun(ws, state, x):
        def once(c):
            ws, state, _ = c
            value, grads = jax.value_and_grad(
                lambda ws: jnp.mean(lax.scan(lambda h, w: (layer(w, h), None), x, ws)[0] ** 2)
            )(ws)
            updates, state = optimizer.update(grads, state, ws)
            return optax.apply_updates(ws, updates), state, value

        return lax.while_loop(lambda c: c[2] > 0.05, once, (ws, state, jnp.float32(1)))

    ws = jnp.stack([parameters(k)["front"] for k in range(4)])
    step = same(fun, ws, optimizer.init(ws), rows(), tolerance=2e-4)
    ws, (adam, _), _ = step(ws, optimizer.init(ws), rows())
    for state in (ws, adam.mu, adam.nu):
        assert len(state.sharding.device_set) == 4 and not state.sharding.is_fully_replicated


def test_what_several_submeshes_read_crosses_once_a_loop():
    """A table at both ends of the model, in a loop and in a loop of such loops."""
    first = mm.task(lambda t, ids: t[ids], "embed", devices=[0])
    last = mm.task(lambda t, h: jnp.argmax(h @ t.T, -1), "head", devices=[1])

    def decoded(table, ids):
        return lax.while_loop(lambda c: c[1] < 5, lambda c: (last(table, first(table, c[0])), c[1] + 1), (ids, 0))[0]

    def twice(table, ids):
        return lax.while_loop(
            lambda c: c[1] < 3, lambda c: (decoded(2 * table, c[0]) + decoded(table, c[0]), c[1] + 1), (ids, 0)
        )

    table = jnp.asarray(np.random.default_rng(0).normal(size=(32, WIDTH)), jnp.float32)
    for fun, crossings in ((decoded, 1), (lambda t, ids: twice(t, ids % 4), 4)):
        step = same(fun, table, jnp.arange(8))
        compiled = step.prepare(table, jnp.arange(8))
        copied = []
        for part in compiled.parts.values():
            count_copies(part._executor._relayouts, copied)
        args = jax.device_put((table, jnp.arange(8)), compiled.input_shardings[0])
        compiled.call_flat(list(args))
        assert copied.count(table.shape) == crossings


def count_copies(relayouts, copied):
    """Has the shapes of arrays added to a list that go to other devices."""
    bring = relayouts.bring

    def counting(x, sharding):
        if getattr(x, "sharding", sharding).device_set != sharding.device_set:
            copied.append(x.shape)
        return bring(x, sharding)

    relayouts.bring = counting


def test_a_task_that_another_part_runs_is_not_dropped():
    def fun(p, x):
        front(p["front"], x)  # nobody reads it
        return until(p, x)

    mm.jit(fun, strict=True)(parameters(), rows())
    with pytest.raises(mm.errors.PlacementError, match="task 'unread': dropped"):
        mm.jit(lambda p, x: (mm.task(jnp.sin, "unread", devices=[0])(x), until(p, x))[1], strict=True)(
            parameters(), rows()
        )


def test_collected_weak_types_and_keys_of_a_scan_around_a_loop():
    def fun(p, x, key):
        def body(h, key):
            h, count = until(p, h, at_most=2)
            return h, (count, jax.random.fold_in(key, count))

        return lax.scan(body, x, jax.random.split(key, 3))

    same(fun, parameters(), rows(), jax.random.key(0))
    assert mm.jit(fun)(parameters(), rows(), jax.random.key(0))[1][0].weak_type


def test_a_loop_in_each_layer_of_a_scan_is_one_task():
    """Each iteration of the scan is on one submesh, so that nothing is left for the host, but for the loop behind."""
    layer = mm.task(lambda w, h: jnp.tanh(h @ w), "layer", mesh=SUBMESHES)

    def fun(ws, p, x):
        def deep(h, w):
            return lax.while_loop(lambda c: c[1] < 3, lambda c: (layer(w, c[0]), c[1] + 1), (h, 0))

        return lax.scan(deep, x, ws)

    ws = jnp.stack([parameters(k)["front"] for k in range(4)])
    assert not hasattr(same(fun, ws, parameters(), rows()).lower(ws, parameters(), rows()), "parts")
    same(lambda ws, p, x: (fun(ws, p, x), until(p, x)), ws, parameters(), rows())

    def all_layers(c):
        return lax.scan(lambda h, w: (layer(w, h), None), c[0], ws)[0], c[1] + 1

    def scanned(ws, x):  # here each time is on all submeshes
        return lax.scan(
            lambda h, _: (lax.while_loop(lambda c: c[1] < 2, all_layers, (h, 0))[0], None), x, None, length=2
        )[0]

    assert parts(scanned, ws, rows())[1].startswith("while1")
    same(scanned, ws, rows())


def test_parallelized():
    step, init, batches = mm.parallelize(until, init_params=parameters, get_input_batch=rows, devices=jax.devices()[:2])
    assert_same(step(init(), batches()), reference(jax.jit(until), parameters(), rows()), 2e-5)
    with pytest.raises(mm.errors.MeshError, match="'back' runs on devices"):
        mm.parallelize(until, init_params=parameters, get_input_batch=rows, devices=jax.devices()[:1])


def test_a_name_that_nothing_has():
    step = mm.jit(until).lower(parameters(), rows())
    with pytest.raises(AttributeError, match="LoweredParts has no attribute 'prats'"):
        step.prats  # noqa: B018
