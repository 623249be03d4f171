"""`microbatch` is the plain loop over the same pieces, whatever they are made of."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
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
    parameters,
    reference,
    rows,
)

# Microbatch loops


def test_forward_only_programs():
    """A loop without a backward pass, and an evaluation with several metrics."""

    def evaluate(p, x):
        y = back(p["back"], front(p["front"], x))
        return {"y": y, "max": jnp.max(y), "n": jnp.int32(len(x))}

    assert_agrees(evaluate, parameters(), rows())
    reduce = {"y": "concat", "max": "max", "n": "sum"}
    assert_agrees(microbatched(evaluate, reduce=reduce), parameters(), rows())
    assert_agrees(microbatched(evaluate, reduce=reduce, schedule="gpipe"), parameters(), rows())


def test_rows_without_elements():
    """What is put together has as many rows as the batch, also where a row has no elements, which do not tell how many."""

    def f(p, x):
        return x[:, :0], front(p["front"], x)

    assert_agrees(microbatched(f, reduce="concat"), parameters(), rows())


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "concat", "stack", "last"])
def test_every_reduction_over_floats_integers_and_keys(reduce):
    """Each reduction gives what the plain loop gives, dtypes included."""

    def f(p, x):
        y = back(p["back"], front(p["front"], x))
        return y, jnp.argmax(y, -1), -jnp.abs(y.astype(jnp.bfloat16))

    assert_agrees(microbatched(f, reduce=reduce), parameters(), rows(), tolerance=2e-2)


def test_booleans_reduce_as_in_the_plain_loop():
    """Sum, max and last of truth values."""

    def f(p, x):
        return (front(p["front"], x) > 0.9,) * 3

    assert_agrees(microbatched(f, reduce=("sum", "max", "last")), parameters(), rows())


def test_weighted_mean_of_masked_tokens_equals_the_full_batch():
    """Uneven counts in the pieces; value and gradients are those of the whole batch."""

    def masked(p, batch):
        y = back(p["back"], front(p["front"], batch["x"]))
        count = jnp.sum(batch["mask"])
        return jnp.sum(jnp.mean(y**2, -1) * batch["mask"]) / count, {"tokens": count}

    both = jax.value_and_grad(masked, has_aux=True)
    batch = {"x": rows(), "mask": jnp.array([1.0, 0, 1, 1, 1, 1, 0, 1])}
    step = microbatched(both, reduce=mm.WeightedMean("tokens"))
    result = assert_agrees(step, parameters(), batch)
    assert_same(result, both(parameters(), batch))


def test_weighted_means_of_parts_of_the_result():
    """Each by its own count, which is anywhere in the result, beside parts that combine in other ways."""

    def masked(p, batch):
        y = back(p["back"], front(p["front"], batch["x"]))
        tokens, even = jnp.sum(batch["mask"]), jnp.sum(batch["mask"][::2])
        each = jnp.mean(y**2, -1)
        loss = jnp.sum(each * batch["mask"]) / tokens
        some = jnp.sum((each * batch["mask"])[::2]) / jnp.maximum(even, 1)
        return loss, ({"some": some, "predictions": y, "largest": y.max()}, tokens, {"even": even.astype(jnp.int32)})

    both = jax.value_and_grad(masked, has_aux=True)
    batch = {"x": rows(), "mask": jnp.array([1.0, 0, 1, 1, 1, 1, 0, 1])}
    mean = mm.WeightedMean(lambda result: result[0][1][1])
    metrics = {"some": mm.WeightedMean("even"), "predictions": "concat", "largest": "max"}
    step = microbatched(both, reduce=((mean, (metrics, "sum", mm.WeightedMean("even"))), mean))
    result = assert_agrees(step, parameters(), batch)
    assert_same(result, both(parameters(), batch))


def test_batches_cut_along_another_dimension():
    """dim=1 and dim=-1, also for a tree of leaves with different ranks."""

    def f(p, batch):
        return jnp.sum(back(p["back"], front(p["front"], batch["x"].T)) * batch["y"][0, :, None])

    batch = {"x": rows().T, "y": jnp.arange(24.0).reshape(3, 8)}
    assert_agrees(microbatched(jax.value_and_grad(f), dim=1), parameters(), batch)
    assert_agrees(microbatched(jax.value_and_grad(f), dim=-1), parameters(), batch)


def test_several_batch_arguments():
    """argnum as a tuple, the batch before the parameters, and keyword arguments beside it."""

    def f(x, p, y, scale=1.0):
        return jnp.mean((back(p["back"], front(p["front"], x)) - y) ** 2) * scale

    step = microbatched(jax.value_and_grad(f, argnums=1), argnum=(0, 2))
    assert_agrees(step, rows(), parameters(), rows(8, 5))
    assert_agrees(step, rows(), parameters(), rows(8, 5), scale=jnp.float32(2))
    assert_agrees(lambda x, p, y: step(x, p, y, scale=3.0), rows(), parameters(), rows(8, 5))


def test_size_instead_of_a_number():
    """size=2 of 8 rows is 4 microbatches; the number follows the batch."""
    step = mm.jit(microbatched(num_microbatches=None, size=2))
    for count in (8, 12):
        assert_same(step(parameters(), rows(count)), reference(step, parameters(), rows(count)))
    assert step.lower(parameters(), rows(12)).program.loops[0].num_microbatches == 6


def test_one_microbatch_is_the_plain_call():
    """No loop is left in the program."""
    step = microbatched(num_microbatches=1)
    assert_agrees(step, parameters(), rows())
    assert not mm.jit(step).lower(parameters(), rows()).program.loops


def test_dropout_differs_between_microbatches():
    """Microbatch i sees fold_in(key, i): the masks differ from each other, and from those of another key."""

    def f(p, x, key):
        y = front(p["front"], x)
        drop = mm.task(lambda k, y: jnp.where(jax.random.bernoulli(k, 0.5, y.shape), y, 0), "drop", devices=[0])
        return back(p["back"], drop(key, y)), jax.random.bernoulli(key, 0.5, (64,))

    step = microbatched(f, reduce="stack", rng_argnum=2)
    _, masks = assert_agrees(step, parameters(), rows(), jax.random.key(0))
    expected = [jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), i), 0.5, (64,)) for i in range(4)]
    np.testing.assert_array_equal(np.asarray(masks), np.asarray(expected))
    assert len({m.tobytes() for m in np.asarray(masks)}) == 4
    other = mm.jit(step)(parameters(), rows(), jax.random.key(1))[1]
    assert (np.asarray(other) != np.asarray(masks)).any()


def test_rng_argnum_folds_a_tree_of_keys():
    """Old-style and typed keys, in a dictionary as Flax takes them."""

    def f(p, x, keys):
        return (
            jax.random.normal(keys["dropout"], ()) + jax.random.uniform(keys["noise"]) + jnp.sum(front(p["front"], x))
        )

    step = microbatched(f, reduce="stack", rng_argnum=2)
    assert_agrees(step, parameters(), rows(), {"dropout": jax.random.key(0), "noise": jax.random.PRNGKey(1)})


def test_without_rng_argnum_a_key_is_the_same_in_every_microbatch():
    """Nothing is folded in that the user did not ask for."""

    def f(p, x, key):
        return (jnp.sum(front(p["front"], x)), jax.random.normal(key, (4,)))

    _, noise = assert_agrees(microbatched(f, reduce="stack"), parameters(), rows(), jax.random.key(0))
    assert (np.asarray(noise) == np.asarray(noise)[0]).all()


def test_two_microbatch_loops_in_one_step():
    """The second may depend on the first."""

    def step(p, x):
        value, grads = microbatched()(p, x)
        p = jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)
        again = microbatched(loss, num_microbatches=2, schedule="gpipe")(p, x)
        return p, value, again

    assert_agrees(step, parameters(), rows())


def test_two_independent_loops_over_the_same_parameters():
    """Gradients of two batches, accumulated apart and added."""

    def step(p, x, y):
        a, b = microbatched()(p, x), microbatched(num_microbatches=2)(p, y)
        return jax.tree.map(jnp.add, a, b)

    assert_agrees(step, parameters(), rows(), rows(6, 3))


def test_a_loop_whose_parameters_are_computed_in_the_step():
    """What enters the loop may come from a task or from unmarked equations."""

    def step(p, x):
        cast = jax.tree.map(lambda w: w * 2, p)
        cast["back"] = mm.task(lambda w: w + 1, "prepare", devices=[1])(cast["back"])
        return microbatched()(cast, jnp.flip(x, 0))

    assert_agrees(step, parameters(), rows())


def test_the_same_stage_used_twice():
    """A chain that returns to its first submesh (0, 1, 0) has three stages."""

    def f(p, x):
        return jnp.mean(front(p["front"], back(p["back"], front(p["front"], x))) ** 2)

    for schedule in ("gpipe", "1f1b"):
        assert_agrees(microbatched(jax.value_and_grad(f), schedule=schedule), parameters(), rows())


def test_a_skip_over_a_stage():
    """A value made by stage 0 is read by stage 2."""

    def f(p, x):
        a = front(p["front"], x)
        c = mm.task(lambda w, h, skip: dense(w, h) + skip, "third", devices=[2])(p["front"], back(p["back"], a), a)
        return jnp.mean(c**2)

    assert_agrees(microbatched(jax.value_and_grad(f)), parameters(), rows())


def test_the_batch_is_read_by_first_and_last_stage():
    """Labels go straight to the last stage."""

    def f(p, batch):
        y = front(p["front"], batch["x"])
        return mm.task(lambda w, y, t: jnp.mean((dense(w, y) - t) ** 2), "last", devices=[1])(p["back"], y, batch["t"])

    assert_agrees(microbatched(jax.value_and_grad(f)), parameters(), {"x": rows(), "t": rows(8, 3)})


def test_integer_batches():
    """Token ids go through an embedding, whose gradient is accumulated."""

    def f(p, ids):
        y = mm.task(lambda w, i: w[i], "embed", devices=[0])(p["front"], ids)
        logits = mm.task(lambda w, y: y @ w.T, "head", devices=[1])(p["front"], y)
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    assert_agrees(microbatched(jax.value_and_grad(f)), parameters(), jnp.arange(8) % WIDTH)


def test_a_result_that_no_microbatch_changes():
    """Results of the body that depend on parameters only, or on nothing."""

    def f(p, x):
        return loss(p, x), jnp.sum(p["front"]), 3.0, jnp.int32(2)

    for reduce in ("sum", "mean", "max", "stack", "last"):
        assert_agrees(microbatched(f, reduce=reduce), parameters(), rows())


@pytest.mark.parametrize("size", [{}, {"num_microbatches": None, "size": 2}])
@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_a_key_for_each_microbatch_goes_by_rng_argnum(key, size):
    """What belongs to rows is one to a row; of one key each microbatch gets its own."""
    step = microbatched(lambda p, x, key: front(p["front"], x).mean(), argnum=(1, 2), **size)
    words = "; random keys are no rows: pass one for all microbatches in an argument of its own, and name that in rng_argnum, "
    with pytest.raises(mm.errors.MicrobatchError, match=re.escape(words)):
        mm.jit(step).lower(parameters(), rows(), jax.random.split(key(0), 4))


def test_typed_keys_in_a_batch_and_in_results():
    """Keys are cut like rows; they can be stacked, collected, and kept."""

    def f(p, keys, x):
        noise = jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(keys)
        return front(p["front"], x + noise), jax.random.fold_in(keys[0], 3)

    keys = jax.random.split(jax.random.key(0), 8)
    assert_agrees(microbatched(f, argnum=(1, 2), reduce=("concat", "stack")), parameters(), keys, rows())
    assert_agrees(microbatched(f, argnum=(1, 2), reduce=("sum", "last")), parameters(), keys, rows())


def test_a_loop_in_a_scan_over_batches():
    """Several steps in one program."""

    def f(p, xs):
        def body(p, x):
            value, grads = microbatched(num_microbatches=2)(p, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

        return jax.lax.scan(body, p, xs)

    assert_agrees(f, parameters(), rows(16).reshape(2, 8, WIDTH))


def test_a_loop_in_a_loop_and_in_a_task():
    """The inner loop is part of what the outer one repeats."""
    inner = microbatched(loss, num_microbatches=2)
    assert_agrees(microbatched(inner, num_microbatches=2), parameters(), rows())
    inside = microbatched(lambda p, x: dense(p["front"], x), reduce="concat")
    assert_agrees(mm.task(inside, "inside", devices=[1]), parameters(), rows())


def test_vmap_over_a_loop():
    """Each example of the outer batch has its own loop."""
    inner = microbatched(loss, num_microbatches=2)
    assert_agrees(lambda p, x: jax.vmap(inner, (None, 0))(p, x), parameters(), rows(16).reshape(2, 8, WIDTH))


def test_the_gradient_of_a_loop():
    """Differentiation around microbatch, instead of inside it."""
    assert_agrees(jax.value_and_grad(microbatched(loss, num_microbatches=2)), parameters(), rows())


def test_the_gradient_through_a_loop_that_gathers_rows():
    """What only the whole batch says (a contrastive loss) stands between the loop and its reverse, which read one batch."""

    def towers(p, x):
        return front(p["front"], x), back(p["back"], x)

    def contrast(p, x):
        one, two = microbatched(towers, reduce="concat", num_microbatches=2)(p, x)
        return jnp.mean(jax.nn.logsumexp(one @ two.T, axis=1))

    assert_agrees(jax.value_and_grad(contrast), parameters(), rows())


def test_a_loop_without_tasks():
    """It is the plain loop on one device."""
    f = microbatched(jax.value_and_grad(lambda p, x: jnp.mean(dense(p["front"], x))))
    with pytest.warns(UserWarning, match="no pipeline: its 4 microbatches run one after the other in one place"):
        assert_agrees(f, parameters(), rows())


@pytest.mark.parametrize("count", [2, 8])
def test_a_loop_in_a_shard_map(count):
    """It is the plain loop over the rows of each device, in the reference of many microbatches, too."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def step(p, x):
        loop = microbatched(lambda p, x: jnp.sum(x @ p["front"]), num_microbatches=count, reduce="sum")
        return jnp.sum(
            jax.shard_map(lambda p, x: loop(p, x)[None], mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))(
                p, x
            )
        )

    assert_agrees(jax.value_and_grad(step), parameters(), rows(16))


def test_results_that_are_the_batch_or_the_parameters():
    """Handed through unchanged, for each reduction."""

    def f(p, x):
        return {"loss": loss(p, x), "p": p, "x": x}

    for word in ("sum", "max", "stack", "last"):
        reduce = {"loss": "sum", "p": word, "x": word}
        assert_agrees(microbatched(f, reduce=reduce, num_microbatches=2), parameters(), rows())


def test_reductions_of_extreme_values():
    """Accumulators start from what changes nothing: -inf, the least integer, zero."""

    def f(p, x):
        least = jnp.full((2,), -128, jnp.int8) + (0 * x[0, 0]).astype(jnp.int8)
        return jnp.abs(front(p["front"], x)) * -jnp.inf, least, (x[0] * 0 + 3).astype(jnp.uint8)

    assert_agrees(microbatched(f, reduce="max"), parameters(), rows())


def test_complex_and_float8_results():
    """Dtypes that fewer operations know."""

    def spectrum(p, x):
        return jnp.fft.fft(front(p["front"], x))

    def small(p, x):
        return front(p["front"], x).astype(jnp.float8_e4m3fn)

    for word in ("mean", "last"):
        assert_agrees(microbatched(spectrum, reduce=word), parameters(), rows())
    for word in ("concat", "last"):
        assert_agrees(microbatched(small, reduce=word), parameters(), rows())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int4"])
def test_the_greatest_of_small_dtypes(dtype):
    """Some have no infinity, some not even a byte; what they begin with is not greater than any value."""

    def f(p, x):
        return front(p["front"], x).min().astype(dtype)

    assert_agrees(microbatched(f, reduce="max", num_microbatches=2), parameters(), rows() - 2)


def test_integers_smaller_than_a_byte():
    """They are added up, collected and kept as in the plain loop."""

    def f(p, x):
        y = (10 * front(p["front"], x)).astype(jnp.int4)
        return y.sum(dtype=jnp.int4), y, y[0], y[0, 0]

    reduce = ("sum", "concat", "stack", "last")
    assert_agrees(microbatched(f, reduce=reduce, num_microbatches=2), parameters(), rows())


@pytest.mark.parametrize(
    "reduce, words",
    [
        ("mean", r"result['key'] is key<fry>, and random keys cannot be added up; do not return it, or reduce it by "),
        ("sum", r"result['key'] is key<fry>, and random keys cannot be added up"),
        ("max", r"result['key'] is key<fry>, and random keys have no greatest one; do not return it, or reduce it by "),
        (
            mm.WeightedMean("n"),
            r"result['key'] is key<fry>, and random keys cannot be added up; do not return it, or reduce it by ",
        ),
    ],
)
def test_random_keys_are_not_added_up(reduce, words):
    """Such as the next key, returned beside the loss: neither in a program nor in the plain loop."""

    def f(p, x, key):
        y = front(p["front"], x)
        return {"y": y.mean(), "n": (y > 0).sum(), "key": jax.random.split(key)[0]}

    step = microbatched(f, reduce=reduce, rng_argnum=2)
    for call in (mm.jit(step), step):
        with pytest.raises(mm.errors.MicrobatchError, match=re.escape(words)):
            call(parameters(), rows(), jax.random.key(0))


def test_random_keys_are_collected():
    """Each as the key that it is."""
    f = microbatched(
        lambda p, x, key: (front(p["front"], x).mean(), jax.random.split(key), key, key),
        reduce=("mean", "concat", "stack", "last"),
        rng_argnum=2,
    )
    assert_agrees(f, parameters(), rows(), jax.random.key(0))


def test_complex_numbers_have_no_greatest():
    """Neither in a program nor in the plain loop."""
    f = microbatched(lambda p, x: {"y": jnp.fft.fft(front(p["front"], x))}, reduce="max")
    for call in (mm.jit(f), f):
        with pytest.raises(mm.errors.MicrobatchError, match=r"result\['y'\] is complex64.*absolute values"):
            call(parameters(), rows())


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("typed", [True, False])
def test_the_key_of_a_microbatch_is_that_of_a_plain_loop(kind, typed):
    """Bit by bit ``fold_in(key, i)``, whatever makes the random numbers and whether keys have a dtype of their own."""
    step = microbatched(
        lambda x, key: (front(jnp.eye(WIDTH), x), jax.random.bits(key, (2,))), argnum=0, rng_argnum=1, reduce="concat"
    )
    with jax.default_prng_impl(kind):
        key = jax.random.key(3) if typed else jax.random.PRNGKey(3)
        assert_same(mm.jit(step)(rows(), key), reference(step, rows(), key))
        assert len(mm.jit(step).lower(rows(), key).program.loops) == 1  # making the keys is no loop of microbatches


@pytest.mark.parametrize("number", [1.5, 3])
def test_weak_types_of_results(number):
    """A number that a microbatch makes of Python's stays weak where it does in the plain loop: it promotes nothing."""
    words = ("sum", "mean", "max", "last", "stack")

    def step(x):
        loop = microbatched(
            lambda x: (front(jnp.eye(WIDTH), x).sum(), *[jnp.where(True, number, number)] * len(words)),
            argnum=0, reduce=("sum", *words), num_microbatches=2,
        )  # fmt: skip
        y, *results = loop(x)
        return y, results, [jnp.bfloat16(1) * r for r in results]

    actual, expected = mm.jit(step)(rows()), reference(step, rows())
    kinds = [[(x.dtype, x.weak_type) for x in jax.tree.leaves(y)] for y in (actual, expected)]
    assert kinds[0] == kinds[1]
    assert kinds[0][-1][0] == jnp.bfloat16
    assert_same(actual, expected)


def test_the_gradient_of_integer_parameters():
    """It has no values (float0), in a task and in a loop, and nothing to add up."""
    grad = jax.grad(lambda x, n: (2 * x).sum(), argnums=(0, 1), allow_int=True)
    numbers = jnp.arange(3)

    def step(x):
        y = front(jnp.eye(WIDTH), x)
        loop = microbatched(lambda x: grad(front(jnp.eye(WIDTH), x), numbers), argnum=0, reduce=("concat", "sum"))
        return mm.task(grad, "grad", devices=[1])(y, numbers), loop(x)

    for (dx, dn), (expected, none) in zip(mm.jit(step)(rows()), reference(step, rows()), strict=True):
        np.testing.assert_array_equal(dx, expected)
        assert dn.dtype == none.dtype == jax.dtypes.float0 and dn.shape == none.shape == (3,)


def test_an_order_of_ones_own_without_a_backward_pass():
    """Nothing accumulates, so that microbatches may run in any order; what adds up says that it may not."""
    table = [[(2, "front"), (0, "front"), (1, "front")], [(2, "back"), (0, "back"), (1, "back")]]

    def step(reduce):
        return mm.microbatch(
            lambda p, x: back(p["back"], front(p["front"], x)),
            argnum=1, num_microbatches=3, schedule="custom", custom_schedule=table, reduce=reduce,
        )  # fmt: skip

    compiled = mm.jit(step("concat")).lower(parameters(), rows(6)).compile()
    assert_same(compiled(parameters(), rows(6)), reference(step("concat"), parameters(), rows(6)))
    with pytest.raises(mm.errors.ScheduleError, match="front:F2 before front:F0; .* because results accumulate"):
        mm.jit(step("sum"))(parameters(), rows(6))


def test_weighted_mean_with_a_piece_that_counts_nothing():
    """A whole microbatch behind the mask, an integer count, and a function that picks it."""

    def masked(p, batch):
        y, count = back(p["back"], front(p["front"], batch["x"])), batch["mask"].sum()
        return (y.mean(-1) * batch["mask"]).sum() / jnp.maximum(count, 1), count.astype(jnp.int32)

    both = jax.value_and_grad(masked, has_aux=True)
    batch = {"x": rows(), "mask": jnp.array([0.0, 0, 1, 1, 1, 0, 1, 1])}
    result = assert_agrees(microbatched(both, reduce=mm.WeightedMean(lambda out: out[0][1])), parameters(), batch)
    assert_same(result, both(parameters(), batch))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_numbers_of_python_among_results(num_microbatches):
    """A count that is no array, and results that are none, also where the loop is the plain function: each as in `mm.jit`."""

    def f(p, x):
        return {"loss": jnp.mean(back(p["back"], front(p["front"], x))), "rows": x.shape[0], "scale": 0.5}

    for count in ("rows", lambda out: out["rows"]):
        step = microbatched(f, num_microbatches=num_microbatches, reduce=mm.WeightedMean(count))
        expected = f(parameters(), rows())
        for result in (step(parameters(), rows()), assert_agrees(step, parameters(), rows())):
            assert {name: pytest.approx(float(x), rel=1e-5) for name, x in result.items()} == expected
    with pytest.raises(mm.errors.MicrobatchError, match="is a scalar in each microbatch"):
        microbatched(f, num_microbatches=num_microbatches, reduce="concat")(parameters(), rows())


def test_the_sharding_of_a_piece():
    """arg_shardings holds for every piece, also where there is only one."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    layer = mm.task(dense, "layer", mesh=mesh)
    for count in (1, 2):
        f = microbatched(layer, num_microbatches=count, reduce="concat", arg_shardings=("d", None))
        compiled = mm.jit(f).lower(parameters()["front"], rows()).compile()
        fragment = next(i for i, f in enumerate(compiled.program.fragments) if "layer" in f.name)
        specs = [s.spec for s in compiled._lowered.executables[fragment].input_shardings[0]]
        assert P("d") in specs or P("d", None) in specs
        assert_same(compiled(parameters()["front"], rows()), reference(f, parameters()["front"], rows()))


@pytest.mark.parametrize("wanted", [P("d"), ("d",), [P("d"), P("d")], (P("d"), None)])
def test_one_sharding_for_several_batches_or_one_for_each(wanted):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    layer = mm.task(lambda x, y: x * y, "layer", mesh=mesh)
    f = mm.microbatch(layer, argnum=(0, 1), num_microbatches=2, reduce="concat", arg_shardings=wanted)
    compiled = mm.jit(f).lower(rows(), rows()).compile()
    fragment = next(i for i, f in enumerate(compiled.program.fragments) if "layer" in f.name)
    assert P("d") in [s.spec for s in compiled._lowered.executables[fragment].input_shardings[0]]
    assert_same(compiled(rows(), rows()), reference(f, rows(), rows()))


def test_what_prepares_labels_is_part_of_the_stage_that_reads_them():
    """It makes no stage of its own, whose place in the schedule nobody asked for."""
    embed = mm.task(lambda w, t: w[t], "embed", devices=[0])
    head = mm.task(lambda w, x: x @ w, "head", devices=[1])

    def f(p, tokens):
        logits, labels = head(p[1], embed(p[0], tokens))[:, :-1], tokens[:, 1:]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0])

    step = microbatched(jax.value_and_grad(f))
    args = (jnp.ones((8, 4)), jnp.ones((4, 8))), jnp.arange(40).reshape(8, 5) % 8
    (loop,) = mm.jit(step).lower(*args).program.loops
    assert loop.placement == (0, 1)
    assert_agrees(step, *args)


def test_many_microbatches():
    """More than JAX lets a device queue."""
    assert_agrees(microbatched(num_microbatches=48), parameters(), rows(96))


def test_branches_in_both_directions():
    """Two chains that cross: each stage sends to the other."""

    def f(p, x):
        a, b = front(p["front"], x), back(p["back"], x)
        return jnp.mean(front(p["front"], b) * back(p["back"], a))

    for schedule in ("gpipe", "1f1b"):
        assert_agrees(microbatched(jax.value_and_grad(f), schedule=schedule), parameters(), rows())


@pytest.mark.parametrize("reduce", ["sum", "mean", "last", "stack"])
def test_a_result_that_is_known_without_the_loop(reduce):
    """Nothing is left to be scheduled; a task whose result nobody wants is dropped with a warning."""

    def constant(p, x):
        loss(p, x)
        return jnp.float32(3 * len(x))

    run = microbatched(constant, reduce=reduce)
    with pytest.warns(UserWarning, match="dropped, for no result of the step"):
        got = mm.jit(run)(parameters(), rows())
    assert_same(got, reference(run, parameters(), rows()))
    both = lambda p, x: (run(p, x), loss(p, x))  # noqa: E731
    assert_agrees(both, parameters(), rows())


@pytest.mark.parametrize("count", [4, 8, 16])
def test_the_reference_is_compiled_once_and_not_for_each_microbatch(count):
    """Where JAX traces it; what it gives is what the loop in Python gives, types included."""

    def fun(w, x, key, state):
        noise = jax.random.normal(key, x.shape) * 0.1
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh((x + noise) @ w) ** 2))(w)
        return (value, grad, x.sum(1), x.max(), x[0] > 0), {"seen": state["seen"] + x.shape[0], "mean": x.mean()}

    run = mm.microbatch(
        fun,
        argnum=1,
        num_microbatches=count,
        rng_argnum=2,
        state_argnum=3,
        reduce=("mean", "sum", "concat", "max", "stack"),
    )
    x = jax.random.normal(jax.random.key(1), (16, 4))
    args = jnp.eye(4), x, jax.random.key(0), {"seen": jnp.array(0), "mean": jnp.float32(0)}
    found, expected = jax.jit(run)(*args), run(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert list(map(jax.typeof, jax.tree.leaves(found))) == list(map(jax.typeof, jax.tree.leaves(expected)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, expected)
    tanhs = str(jax.make_jaxpr(run)(*args)).count(" = tanh ")
    assert tanhs == (count if count <= 4 else 1)


def test_many_microbatches_that_are_no_scan_are_a_loop_in_the_reference():
    """A state that grows, which `mm.jit` refuses."""

    def fun(seen, x):
        return x.sum(), jnp.concatenate([seen, x[:1, 0]])

    run = mm.microbatch(fun, argnum=1, num_microbatches=8, state_argnum=0, reduce="sum")
    found, expected = (call(jnp.ones(1), rows()) for call in (jax.jit(run), run))
    assert found[1].shape == (9,)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    with pytest.raises(mm.errors.MicrobatchError, match=r"of shape \(1,\) becomes one of shape \(2,\)"):
        mm.jit(run)(jnp.ones(1), rows())


def test_what_a_function_changes_in_its_arguments_is_unknown_to_the_next_microbatch():
    """In the reference mode as well, where no gradient gives it others."""

    def double(p, b):
        p["front"] = 2 * p["front"]
        return jnp.mean(back(p["back"], front(p["front"], b.pop("x"))))

    def step(p, b):
        return mm.microbatch(double, argnum=1, num_microbatches=4, reduce="mean")(p, b), p["front"], b["x"]

    batch = {"x": rows()}
    assert_same(mm.jit(step)(parameters(), batch), reference(step, parameters(), batch))
    assert_same(reference(step, parameters(), batch)[1], parameters()["front"])
