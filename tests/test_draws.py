"""Random numbers that are the same in each microbatch: told of where rows are meant to have their own, and nowhere else."""

import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flax import nnx
from manymesh import errors
from stages import WIDTH, back, dense, front, parameters, rows

pytestmark = pytest.mark.once

# Each takes (parameters, rows, key) and returns what enters the first stage.


def mask(p, x, key):
    return x * jax.random.bernoulli(key, 0.5, x.shape)


def folded(p, x, key):
    return jnp.where(jax.random.uniform(jax.random.fold_in(key, 3), x.shape) < 0.5, x, 0)


def one_key_a_row(p, x, key):
    keys = jax.random.split(key, len(x))
    return jax.vmap(lambda k, x: eqx.nn.Dropout(0.5)(x, key=k))(keys, x)


def of_linen(p, x, key):
    return nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": key})


def time_of_each_row(p, x, key):
    return x * jnp.linspace(0, 1, 10)[jax.random.randint(key, (len(x),), 0, 10)][:, None]


def in_a_scan(p, x, key):
    return jax.lax.scan(lambda x, k: (mask(p, x, k), None), x, jax.random.split(key, 3))[0]


def masks_of_a_scan(p, x, key):
    masks = jax.lax.map(lambda k: jax.random.bernoulli(k, 0.5, x.shape), jax.random.split(key, 3))
    return jax.lax.scan(lambda x, m: (x * m, None), x, masks)[0]


def in_a_branch(p, x, key):
    return jax.lax.cond(jnp.sum(p["front"]) > 0, mask, lambda p, x, key: x, p, x, key)


def in_a_while(p, x, key):
    body = lambda c: (c[0] + 1, mask(p, c[1], jax.random.fold_in(key, c[0])))  # noqa: E731, a loop in one line
    return jax.lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1]


def turned(p, x, key):
    return x + jax.random.normal(key, (WIDTH, len(x))).T


def turned_in_each_round(p, x, key):
    square = jax.random.normal(key, (len(x), len(x)))
    square = jax.lax.fori_loop(0, 3, lambda i, a: a.T * 2, square)
    return x + square[:, :1]


def in_a_task(p, x, key):
    return mm.task(mask, "front")(p, x, key)


SAME = (
    mask, folded, one_key_a_row, of_linen, time_of_each_row, in_a_scan, masks_of_a_scan, in_a_branch, in_a_while, turned, turned_in_each_round, in_a_task,
)  # fmt: skip


def of_weights(p, x, key):
    return x @ (jnp.eye(WIDTH) * jax.random.bernoulli(key, 0.5, (WIDTH, WIDTH)))


def of_all_rows(p, x, key):
    return x * jax.random.bernoulli(key, 0.5, (WIDTH,))


def broadcast(p, x, key):
    return x * jnp.broadcast_to(jax.random.bernoulli(key, 0.5, (WIDTH,)), x.shape)


def a_constant(p, x, key):
    return x * jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)


def by_what_it_holds(p, x, key):
    return mask(p, x, jax.random.fold_in(key, jnp.int32(jnp.sum(x))))


def unused(p, x, key):
    jax.random.bernoulli(key, 0.5, x.shape)
    return x


ON_PURPOSE = of_weights, of_all_rows, broadcast, a_constant, by_what_it_holds, unused


def looped(how, **kwargs):
    def loss(p, x, key):
        return jnp.mean(back(p["back"], front(p["front"], how(p, x, key))) ** 2)

    how_many = {"argnum": 1, "num_microbatches": 4, "reduce": "mean"}
    return mm.microbatch(jax.value_and_grad(loss), **(how_many | kwargs))


def told(fun, *args, **kwargs):
    """What lowering a step tells of its random numbers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mm.jit(fun).lower(*args, **kwargs)
    return [str(w.message) for w in caught if "random numbers" in str(w.message)]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("how", SAME, ids=lambda f: f.__name__)
def test_rows_that_draw_the_same(how, raw):
    """With the argument to name; once it is named there is nothing to tell."""
    key = (jax.random.PRNGKey if raw else jax.random.key)(1)
    batch = rows(4 * 3)
    (text,) = told(looped(how), parameters(), batch, key)
    assert "each of 4 microbatches draws the same random numbers for its rows" in text
    assert "write rng_argnum=2 for keys that differ" in text
    assert not told(looped(how, rng_argnum=2), parameters(), batch, key)


@pytest.mark.parametrize("how", ON_PURPOSE, ids=lambda f: f.__name__)
def test_what_is_meant_to_be_the_same(how):
    assert not told(looped(how), parameters(), rows(4 * 3), jax.random.key(1))


def test_the_line_and_strict():
    line = mask.__code__.co_firstlineno + 1
    step, args = looped(mask), (parameters(), rows(), jax.random.key(1))
    with pytest.raises(errors.MicrobatchError, match=rf"test_draws.py:{line}.*\(mask\); write rng_argnum=2"):
        mm.jit(step, strict=True).lower(*args)


def test_it_is_so():
    """What is told of is true: rows of one microbatch drop what those of the next drop."""
    drops = mm.task(lambda x, key: mask(None, x, key), "front", devices=[0])
    args = jnp.ones((8, WIDTH)), jax.random.key(1)
    same, other = (
        np.asarray(mm.jit(mm.microbatch(drops, num_microbatches=2, reduce="stack", **how))(*args))
        for how in ({}, {"rng_argnum": 1})
    )
    assert (same[0] == same[1]).all()
    assert (other[0] != other[1]).any()


def test_a_key_by_keyword_and_two_keys():
    by_keyword = mm.microbatch(
        lambda p, x, *, key: jnp.sum(front(p["front"], mask(p, x, key))), argnum=1, num_microbatches=4, reduce="sum"
    )
    (text,) = told(by_keyword, parameters(), rows(), key=jax.random.key(1))
    assert "give one key by position and name that in rng_argnum for keys that differ" in text

    several = looped(lambda p, x, keys: mask(p, mask(p, x, keys[0]), keys[1]))
    (text,) = told(several, parameters(), rows(), jax.random.split(jax.random.key(1)))
    assert "give one key by position and name that in rng_argnum" in text  # which takes no array of keys

    def of_two(p, keys, x, more):
        return jnp.sum(front(p["front"], mask(p, mask(p, x, keys["a"]), more)))

    keys = jax.random.split(jax.random.key(1))
    arguments = parameters(), {"a": keys[0]}, rows(), keys[1]
    (text,) = told(mm.microbatch(of_two, argnum=2, num_microbatches=4), *arguments)
    assert "write rng_argnum=1 or rng_argnum=3 for" in text
    from_the_end = mm.microbatch(of_two, argnum=-2, num_microbatches=4, rng_argnum=-1)
    (text,) = told(from_the_end, *arguments)
    assert "write rng_argnum=1 for" in text


def test_keys_that_differ_by_themselves():
    """Keys among the rows of the batch, and one that goes from one microbatch to the next."""

    def of_rows(p, batch):
        x = jax.vmap(lambda key, x: mask(p, x, key))(batch["key"], batch["x"])
        return jnp.mean(back(p["back"], front(p["front"], x)) ** 2)

    loop = {"num_microbatches": 4, "reduce": "mean"}
    batch = {"x": rows(), "key": jax.random.split(jax.random.key(1), len(rows()))}
    assert not told(mm.microbatch(jax.value_and_grad(of_rows), argnum=1, **loop), parameters(), batch)

    def threaded(p, key, x):
        key, own = jax.random.split(key)
        return jnp.mean(dense(p["front"], mask(p, x, own)) ** 2), key

    assert not told(mm.microbatch(threaded, argnum=2, state_argnum=1, **loop), parameters(), jax.random.key(1), rows())


def test_a_stream_of_nnx_goes_on():
    model = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    stages = mm.nnx.task(model, "all", devices=[0])
    loop = mm.nnx.microbatch(lambda m, x: jnp.mean(m(x) ** 2), argnum=1, num_microbatches=4, reduce="mean")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mm.nnx.jit(loop)(stages, rows())


def test_along_another_dimension():
    def loss(p, x, key):
        return jnp.sum(front(p["front"], in_a_scan(p, x, key).T))

    def loop(dim):
        return mm.microbatch(loss, dim=dim, argnum=1, num_microbatches=2)

    (text,) = told(loop(1), parameters(), rows().T, jax.random.key(1))
    assert "each of 2 microbatches" in text
    assert told(loop(-1), parameters(), rows().T, jax.random.key(1)) == [text]
