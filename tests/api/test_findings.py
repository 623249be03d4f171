"""What a step says about itself: one warning for all that looks unintended, once; an error under strict."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import manymesh as mm
from manymesh import errors
from stages import WIDTH, back, dense, front, loss, microbatched, parameters, rows

pytestmark = pytest.mark.once

grad = jax.value_and_grad(loss)
second = mm.task(dense, "second", devices=[1])
third = mm.task(dense, "third", devices=[0])


def clipped(p, x):
    """Gradients of each microbatch by the norm of all of them: what the first stage makes last, the last one reads."""
    grads = jax.grad(lambda p, x: jnp.sum(back(p["back"], front(p["front"], x)) ** 2))(p, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g / norm, grads)


def dropped(p, x):
    second(p["back"], x)
    return front(p["front"], x)


def trained(p, x):
    """A whole step of training."""
    value, grads = grad(p, x)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)


def plain(p, x):
    return jnp.sum(dense(p["front"], x))


def distance(p, x, *, target, scale, key):
    return jnp.sum((back(p["back"], front(p["front"], x)) - target["y"]) ** 2) * scale


FROZEN = {"w": jnp.ones((2, 2)), "b": jnp.ones(4)}
FINDINGS = {
    "no task": (
        microbatched(plain, reduce="sum"), errors.PlacementError,
        r"microbatch\(plain\) is in a step without a task, so that there is no pipeline: its 4 microbatches",
    ),
    "dropped": (dropped, errors.PlacementError, "task 'second': dropped, for no result of the step depends on"),
    "no order": (
        microbatched(clipped, reduce="sum"), errors.PlacementError,
        r"microbatch\(clipped\): its stages .* in no order that schedule '1f1b' could run",
    ),
    "the parameters cut": (
        mm.microbatch(jax.grad(lambda p, x: jnp.sum(third(x, p["front"] + p["back"]))), num_microbatches=2),
        errors.MicrobatchError, "argnum=0 is the batch, which is cut into 2 pieces, .* differentiates .* write argnum=1",
    ),
    "the parameters cut, before a frozen tree": (
        lambda p, x: mm.microbatch(jax.grad(lambda p, q, x: jnp.sum(third(x, p["front"]))), num_microbatches=2)(p, FROZEN, x),
        errors.MicrobatchError, "if that is the parameters, write argnum=2, or whichever",
    ),
    "labels by keyword": (
        lambda p, x: microbatched(distance, num_microbatches=8)(p, x, target={"y": x}, scale=2.0, key=jax.random.PRNGKey(0)),
        errors.MicrobatchError,
        r"microbatch\(distance\): target=, of length 8 along dimension 0 as the batch, goes whole to each microbatch, beside 1",
    ),
    "a sum of means": (
        microbatched(grad, reduce="sum"), errors.MicrobatchError,
        "reduce='sum' adds up 4 losses each of which is a mean, .* 4 times those of the whole batch; write reduce='mean'",
    ),
    "a whole step in the loop": (
        microbatched(trained, reduce="sum"), errors.MicrobatchError,
        r"adds up 4 values of result\[1\]\['back'\].*, each of which is what the function is given plus .* the gradient alone",
    ),
    "a gradient around the loop": (
        jax.value_and_grad(microbatched(loss)), errors.ScheduleError,
        r"microbatch\(loss\) is differentiated from outside, so that all 4 forward passes come before the backward passes, against the "
        r"schedule '1f1b', .* [46]\d{3} bytes together, .* write mm.microbatch\(jax.value_and_grad\(loss\), ...\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding(name):
    """One warning at the user's line, once; under strict the error of its kind."""
    fun, kind, text = FINDINGS[name]
    batch = jnp.ones((WIDTH, WIDTH)) if name.startswith("the parameters cut") else rows(64 if "around" in name else 8)
    step = mm.jit(fun)
    with pytest.warns(UserWarning, match=text) as caught:
        step.lower(parameters(), batch)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.lower(parameters(), batch)
    with pytest.raises(kind, match=f"strict=True.*{text}"):
        mm.jit(fun, strict=True).lower(parameters(), batch)


def two(p, x):
    return loss(p, x), jnp.float32(len(x))


def stateful(p, x, s):
    return loss(p, x) + jnp.sum(s * p["back"]), s + 1


IN_ORDER = {
    "it says so": jax.grad(microbatched(loss, schedule="gpipe")),
    "the gradient inside": microbatched(),
    "rows": jax.grad(lambda p, x: jnp.sum(microbatched(lambda p, x: back(p["back"], x), reduce="concat")(p, x))),
    "a second derivative": jax.grad(lambda p, x: jnp.sum(microbatched(jax.grad(loss))(p, x)["front"])),
    "the batch": jax.grad(microbatched(loss), argnums=1),
    "each computed again": jax.grad(microbatched(jax.checkpoint(loss))),
    "a loop in a loop": microbatched(jax.value_and_grad(microbatched(loss, num_microbatches=2))),
    "forward only": microbatched(loss),
    "a state": jax.grad(lambda p, x: microbatched(stateful, state_argnum=2)(p, x, jnp.zeros(()))[0]),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_no_finding_where_a_gradient_cannot_be_inside_or_is(name):
    """Of a loop of losses only, and where it says nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low = mm.jit(IN_ORDER[name], strict=True).lower(parameters(), rows(64))
    assert not low.findings


def test_a_gradient_around_a_loop_of_weighted_losses():
    """Also where the loss is one of several, and in the report."""
    step = mm.jit(jax.value_and_grad(microbatched(two, reduce=mm.WeightedMean(1)), has_aux=True))
    with pytest.warns(UserWarning, match=r"microbatch\(two\) is differentiated from outside"):
        low = step.lower(parameters(), rows(64))
    assert "microbatch(two) is differentiated from outside" in str(low.report())


@pytest.mark.parametrize("name", ["no task", "dropped"])
def test_a_finding_that_is_raised_is_raised_again(name):
    """Where warnings are errors, a second call is no other than the first."""
    fun, _, text = FINDINGS[name]
    step = mm.jit(fun)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning, match=text):
                step(parameters(), rows())
    with pytest.warns(UserWarning, match=text):
        step(parameters(), rows())


@pytest.mark.parametrize(
    ("layers", "called"),
    [(1, "task 'layer_0'"), (3, "tasks 'layer_0', 'layer_1', 'layer_2'"), (6, "tasks 'layer_0' .. 'layer_5' (6)")],
)
def test_what_is_found_of_many_tasks_is_said_once(layers, called):
    """A name is misspelt in every layer; two of them in two names."""
    devices, rules = jax.devices()[:2], [("hidden", "x")]

    def layer(x):
        return mm.with_sharding_constraint(mm.with_sharding_constraint(x, ("hiden", None)), (None, "hiden"))

    tasks = [mm.task(layer, f"layer_{i}", devices=devices, device_axes="x", logical_axes=rules) for i in range(layers)]
    step = mm.jit(lambda x: functools.reduce(lambda x, task: task(x), tasks, x))
    with pytest.warns(UserWarning) as caught:
        lowered = step.lower(rows())
    (text,) = [str(w.message) for w in caught]
    assert text.count("did you mean 'hidden'?") == text.count(f"{called}: axis name 'hiden' of (") == 2
    assert "; ".join(lowered.report().findings) in text
    with pytest.raises(errors.AxisError) as raised:
        mm.jit(step.fun, strict=True).lower(rows())
    assert str(raised.value).count("did you mean") == 2


def pieces(x):
    return jnp.split(x, 4)


def by_a_loop(p, x):
    total = jax.tree.map(jnp.zeros_like, p)
    for piece in pieces(x):
        total = jax.tree.map(jnp.add, total, jax.grad(squares)(p, piece))
    return total


def by_a_scan(p, x):
    def body(total, piece):
        return jax.tree.map(jnp.add, total, jax.grad(squares)(p, piece)), None

    return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, p), jnp.stack(pieces(x)))[0]


@pytest.mark.parametrize("fun", [by_a_loop, by_a_scan])
def test_gradients_that_are_added_up_by_hand(fun):
    """Nothing orders the pieces of the batch; told once for all tasks, in their order."""
    text = (
        "tasks 'front', 'back': called 4 times in a step, each time for a loss of its own, .* write "
        r"mm.microbatch\(jax.value_and_grad\(loss\), argnum=1, num_microbatches=4"
    )
    with pytest.warns(UserWarning, match=text):
        mm.jit(fun).lower(parameters(), rows())


def updates(p, x):
    for piece in pieces(x):
        p = jax.tree.map(jnp.subtract, p, jax.grad(squares)(p, piece))
    return p


def clipped_together(p, batches):
    models = [jax.tree.map(functools.partial(jnp.multiply, k), p) for k in (1.0, 2.0, 3.0, 4.0)]
    grads = [jax.grad(squares)(model, x) for model, x in zip(models, batches, strict=True)]
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g / norm, grads)


NOT_BY_HAND = {
    "one after the other": updates,
    "one loss of them all": jax.grad(lambda p, x: jnp.prod(jnp.stack([squares(p, piece) for piece in pieces(x)]))),
    "each for itself": lambda p, x: [jax.grad(squares)(p, piece) for piece in pieces(x)],
    "models of their own, and the norm of all gradients": lambda p, x: clipped_together(p, pieces(x)),
    "two losses": lambda p, x: jax.tree.map(
        jnp.add, *(jax.grad(squares)(p, piece) for piece in pieces(x)[:2])
    ),
    "forward passes alone": lambda p, x: sum(squares(p, piece) for piece in pieces(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_BY_HAND)
def test_several_calls_that_are_no_accumulation(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mm.jit(NOT_BY_HAND[name]).lower(parameters(), rows())


def squares(p, x):
    return jnp.mean(back(p["back"], front(p["front"], x)) ** 2)


COMBINED = {
    "two means": lambda p, x: squares(p, x) + jnp.mean(front(p["front"], x)),
    "a difference": lambda p, x: squares(p, x) - jnp.mean(front(p["front"], x)),
    "a smaller one": lambda p, x: squares(p, x) + 0.1 * jnp.mean(x @ p["front"]),
    "half of two": lambda p, x: 0.5 * (squares(p, x) + jnp.mean(jnp.abs(x @ p["front"]))),
    "a learned factor": lambda p, x: jnp.exp(p["back"][0, 0]) * squares(p, x),
    "a penalty on weights": lambda p, x: squares(p, x) + 1e-3 * sum(jnp.sum(w**2) for w in p.values()),
    "in a call": lambda p, x: jax.jit(squares)(p, x),
    "put together in a call": lambda p, x: jax.jit(lambda a, b: a + b)(squares(p, x), jnp.mean(x @ p["front"])),
    "by hand": lambda p, x: jnp.sum(x @ p["front"]) / 4 / (x.size / 4) + squares(p, x),
}


@pytest.mark.parametrize("name", COMBINED)
def test_losses_of_several_means(name):
    """Of which a sum over microbatches is as many times that of the whole batch."""
    step = mm.jit(microbatched(jax.value_and_grad(COMBINED[name]), reduce="sum"))
    with pytest.warns(UserWarning, match="adds up 4 losses each of which is a mean"):
        step.lower(parameters(), rows())


@pytest.mark.parametrize(
    "fun",
    [
        microbatched(jax.value_and_grad(lambda p, x: loss(p, x) + jnp.sum(x @ p["front"])), reduce="sum"),
        microbatched(
            jax.value_and_grad(lambda p, x: jnp.sum(front(p["front"], x)) + jnp.mean(p["back"])), reduce="sum"
        ),
        microbatched(grad, reduce="mean"),
        microbatched(jax.value_and_grad(lambda p, x: jnp.sum(loss(p, x)) * 3), reduce="mean"),
        microbatched(jax.value_and_grad(lambda p, x: jnp.sum(back(p["back"], front(p["front"], x)))), reduce="sum"),
        microbatched(
            jax.value_and_grad(lambda p, x: jax.jit(jnp.sum)(back(p["back"], front(p["front"], x)))), reduce="sum"
        ),
        microbatched(lambda p, x: loss(p, x), reduce="sum"),
        lambda p, x: grad(p, x)[1]["front"],
    ],
    ids=[
        "a mean and a sum",
        "a sum and a penalty",
        "mean of means",
        "a factor",
        "sum of sums",
        "sum in a call",
        "not differentiated",
        "a part of the results",
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(fun):
    """Warnings are errors in these tests."""
    mm.jit(fun, strict=True).lower(parameters(), rows())


def test_gradients_of_a_batch_that_are_put_together_again_are_meant():
    """As of adversarial examples."""
    fun = jax.value_and_grad(lambda p, x: jnp.mean(third(x, p)), argnums=1)
    step = mm.jit(mm.microbatch(fun, argnum=1, num_microbatches=2, reduce=("mean", "concat")), strict=True)
    step(jnp.eye(WIDTH), rows())


def test_a_loop_of_a_library():
    """The line of the user's that called the library, also where an attribute is asked for that parts have."""

    def newton(p, x):
        gradient = jax.grad(loss)(p, x)
        twice = functools.partial(jax.tree.map, lambda v: 2 * v)

        def product(v):
            return jax.tree.map(jnp.add, jax.jvp(lambda p: jax.grad(loss)(p, x), (p,), (v,))[1], twice(v))

        return jax.scipy.sparse.linalg.cg(product, gradient, maxiter=2)[0]

    number = newton.__code__.co_firstlineno + 7
    line = rf"\({__file__}:{number}(:\d+)? \(.*newton\)\)"
    with pytest.warns(UserWarning, match=f"several submeshes in it {line}, whose length"):
        lowered = mm.jit(microbatched(newton, num_microbatches=2)).lower(parameters(), rows())
    with pytest.raises(AttributeError, match=f"over several submeshes {line}, which"):
        lowered.program  # noqa: B018


def test_an_error_that_follows_from_a_forgotten_argnum():
    """Parameters that were cut seldom fit; the error then says what may have gone wrong."""
    step = mm.jit(mm.microbatch(grad, num_microbatches=2))
    with pytest.raises(TypeError, match="dot_general") as caught:
        step(parameters(), rows())
    assert any("write argnum=1" in note for note in caught.value.__notes__)


def test_a_step_in_a_function_that_is_traced():
    """Also with arguments that jax.jit does not trace; under jax.grad such a call is a constant."""
    step, p, x = mm.jit(lambda p, x: front(p["front"], x)), parameters(), rows()
    with pytest.raises(errors.ArgumentError, match="while JAX traces another function, such as one of jax.jit"):
        jax.jit(lambda y: y + step(p, x))(x)
    assert float(jax.grad(lambda y: y * step(p, x).sum())(2.0)) == pytest.approx(float(step(p, x).sum()))


def test_a_loss_in_the_place_of_the_state_is_named():
    """Results were unpacked the wrong way round: the error of the step itself gets a note."""
    step = mm.jit(lambda state, x: (jnp.sum(x), {"w": state["w"] + 1}))
    state, _ = step({"w": jnp.ones(2)}, jnp.ones(3))
    with pytest.raises(TypeError) as caught:
        step(state, jnp.ones(3))
    (note,) = [n for n in caught.value.__notes__ if "unpack" in n]
    assert "args[0] is one number, float32[], and was a tree of 1 arrays" in note
    with pytest.raises(TypeError) as caught:  # another mistake
        step({"v": jnp.ones(2)}["v"], jnp.ones(3))
    assert not [n for n in getattr(caught.value, "__notes__", ()) if "unpack" in n]


@pytest.mark.parametrize("kind", ["decay", "new", "weighted sum", "mean", "state"])
def test_sums_of_what_is_no_update(kind):
    """Gradients with a penalty, sums that start anew, means of parameters, and what goes on from piece to piece."""

    def fun(p, x):
        value, grads = grad(p, x)
        if kind == "state":
            return value, jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)
        scales = {"decay": lambda p, g: g + 0.1 * p, "new": lambda p, g: jnp.zeros_like(p) + g}
        change = scales.get(kind, lambda p, g: 0.9 * p + g if kind == "weighted sum" else p + g)
        return value, jax.tree.map(change, p, grads)

    how = {"reduce": "mean"} if kind == "mean" else {"reduce": "sum"}
    if kind == "state":
        how["state_argnum"] = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is what the function is given plus.*")
        mm.jit(mm.microbatch(fun, argnum=1, num_microbatches=4, **how)).lower(parameters(), rows())


@pytest.mark.parametrize("length", [3, 700])
def test_a_sum_in_python_of_many_terms(length):
    """A loss of many means, an update of many parts, and doubling: nothing is followed twice, nor one call deeper for each."""

    def total(p, x):
        y = back(p["back"], front(p["front"], x))
        value, new, twice = 0.0, p["front"], y
        for k in range(length):
            value, new, twice = value + jnp.mean(y * k), new + y[:WIDTH] * k, twice + twice
        return value, new, twice

    def found(which):
        fun = jax.value_and_grad(lambda p, x: total(p, x)[0]) if which == 0 else lambda p, x: total(p, x)[which]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mm.jit(mm.microbatch(fun, argnum=1, num_microbatches=2, reduce="sum")).trace(parameters(), rows())
        return [str(w.message) for w in caught]

    assert any("adds up 2 losses each of which is a mean" in text for text in found(0))
    assert any("adds up 2 values of result, each" in text for text in found(1))
    assert not any("adds up" in text for text in found(2))


def test_an_update_by_a_library():
    """In a jit of its own, and in another dtype."""

    def fun(p, x):
        p = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)
        return jax.jit(optax.apply_updates)(p, grad(p, x)[1])

    with pytest.warns(UserWarning, match=r"adds up 2 values of result\['back'\]"):
        mm.jit(mm.microbatch(fun, argnum=1, num_microbatches=2, reduce="sum")).lower(parameters(), rows())


def test_many_findings_are_counted():
    """Each layer has unknown names of its own: the warning says some of them, and what it lowers to has all."""
    tasks = [
        mm.task(
            lambda w, x, k=k: mm.with_sharding_constraint(x @ w, (f"rows_{k}", None)),
            f"t{k}",
            devices=[k % 2],
            device_axes=("x",),
            logical_axes=(),
        )
        for k in range(20)
    ]

    def fun(w, x):
        for task in tasks:
            x = task(w, x)
        return x

    args = jnp.eye(4), jnp.ones((4, 4))
    with pytest.warns(UserWarning, match=r"'t0'.*; and 8 more, which lower\(\.\.\.\)\.findings") as caught:
        lowered = mm.jit(fun).lower(*args)
    assert len(lowered.findings) == 20
    assert "t12" not in str(caught[0].message)
    with pytest.raises(errors.AxisError, match="and 8 more"):
        mm.jit(fun, strict=True).lower(*args)


def test_a_structure_that_does_not_fit_is_told_in_short():
    """Not with all of its hundreds of keys, twice."""
    args = {f"key_{k}": jnp.ones(2) for k in range(400)}
    there = jax.sharding.NamedSharding(mm.Task(devices=[0]).mesh, jax.sharding.PartitionSpec())
    with pytest.raises(errors.ArgumentError, match="in_shardings: its structure is no prefix") as caught:
        mm.jit(lambda p: p, in_shardings=({**dict.fromkeys(args, there), "more": there},)).lower(args)
    assert len(str(caught.value)) < 1200
