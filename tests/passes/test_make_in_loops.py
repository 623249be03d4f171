"""A scan in a task makes what is large and made of little, such as a mask, where it reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flat import switch_off
from manymesh import _compat
from stages import assert_agrees

LAYERS, ROWS, LENGTH, HEADS, WIDTH = 3, 2, 128, 2, 16


def masked(mask):
    """The scores of an attention over rows, masked."""

    def layer(x, w):
        q = (x @ w).reshape(*x.shape[:-1], HEADS, -1)
        scores = mask(jnp.einsum("bqhd,bkhd->bhqk", q, q))
        return x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), q).reshape(x.shape)

    return lambda ws, x: jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, ws)[0]


def lengths(scores):
    """Padding of each row: as many words as rows, of which a mask as large as the scores is made."""
    valid = jnp.arange(LENGTH) < jnp.array([LENGTH // 2, LENGTH])[:, None]
    return jnp.where(valid[:, None, None], scores, -1e9)


MASKS = {
    "causal": lambda s: jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), s, -1e9),
    "of NumPy": lambda s: jnp.where(np.tril(np.ones((LENGTH, LENGTH), bool)), s, -1e9),
    "a window": lambda s: jnp.where(abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)) < 4, s, -jnp.inf),
    "padding": lengths,
}


def step_of(mask):
    front, back = (mm.task(masked(mask), name, devices=[i]) for i, name in enumerate(("front", "back")))

    def loss(ws, x):
        return jnp.mean(back(ws[1], front(ws[0], x)) ** 2)

    return mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, reduce="mean")


def arguments():
    ws = [jax.random.normal(jax.random.key(i), (LAYERS, WIDTH, WIDTH)) / 4 for i in range(2)]
    return ws, jax.random.normal(jax.random.key(9), (2 * ROWS, LENGTH, WIDTH))


def constants(jaxpr):
    """Bytes of the largest constant of each scan in a computation."""
    found = []
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "scan":
            read = eqn.invars[: _compat.scan_parts(eqn).num_consts]
            found.append(max((v.aval.size * v.aval.dtype.itemsize for v in read), default=0))
        for inner in _compat.jaxprs_in(eqn):
            found += constants(inner)
    return found


def largest(lowered):
    return max(n for f in lowered.program.fragments for n in constants(f.jaxpr))


SCORES = ROWS * HEADS * LENGTH**2 * 4


@pytest.mark.parametrize("name", MASKS)
def test_no_scan_reads_what_is_as_large_as_the_scores(name):
    step, args = step_of(MASKS[name]), arguments()
    assert largest(mm.jit(step).lower(*args)) <= SCORES / 16
    assert_agrees(step, *args)


def test_without_the_pass_scans_read_it_from_memory(monkeypatch):
    switch_off(monkeypatch, "make_in_loops")
    assert largest(mm.jit(step_of(MASKS["causal"])).lower(*arguments())) >= SCORES / 4


def test_a_task_needs_less_room():
    """Before compiling, and as XLA says."""
    lowered = mm.jit(step_of(MASKS["causal"])).lower(*arguments())
    compiled = lowered.compile()
    for f, executable in zip(compiled.program.fragments, compiled._lowered.executables, strict=True):
        if f.tasks and f.kind == "F":
            assert executable.memory_analysis().temp_size_in_bytes < 2.3 * SCORES
            assert lowered._estimate.works[f.index].temporary_bytes < 2.3 * SCORES


def test_what_is_no_larger_than_what_it_is_made_of_stays():
    def scanned(table, ws, x):
        twice = table + 1.0

        def layer(x, w):
            return jnp.tanh(x @ w) + jnp.sum(twice), None

        return jax.lax.scan(layer, x, ws)[0]

    task = mm.task(scanned, devices=[0])
    lowered = mm.jit(lambda t, ws, x: task(t, ws, x)).lower(
        *[jax.ShapeDtypeStruct(s, "float32") for s in ((128, 128), (LAYERS, WIDTH, WIDTH), (4, WIDTH))]
    )
    assert largest(lowered) == 4 * 128 * 128


def test_what_costs_something_stays():
    """A bias is computed once, not in every round."""

    def biased(scores):
        return scores + jnp.exp(-abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)) / 8.0)

    step, args = step_of(biased), arguments()
    assert largest(mm.jit(step).lower(*args)) == 4 * LENGTH**2
    assert_agrees(step, *args)
