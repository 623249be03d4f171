"""Equal layers in a task are differentiated once, and nothing that is said of their equations changes."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.interpreters import ad
from jax.sharding import Mesh

import manymesh as mm
from manymesh import _compat, _repeats
from manymesh._repeats import FEWEST, ODD, SHORTEST, find_runs

WIDTH, ROWS, LAYERS = 4, 8, 5


def runs(text):
    """The runs of a string, whose dots are like few others."""
    return [tuple(run) for run in find_runs([ODD if c == "." else ord(c) for c in text], [1] * len(text))]


def test_where_a_sequence_repeats_itself():
    assert runs("xyz" + 5 * "abcdefghij" + "qqq" + 4 * "klmnopqrstuv" + "z") == [(3, 53, 10), (56, 104, 12)]
    assert runs(4 * "abcdefghabcdefgh") == [(0, 64, 8)]  # the shortest block
    assert runs(40 * "." + 4 * "abcd.fghij" + 40 * ".") == [(40, 80, 10)]  # another number in each
    assert runs("vwxyz" + 3 * "abcdefghij" + "abc") == [(5, 38, 10)]  # what is behind the last block counts, too
    assert runs(2 * "abcdefghij") == runs("abcdefghijklmnopqrstuvwxyz") == runs("") == runs(100 * ".") == []


@given(
    st.lists(
        st.tuples(st.lists(st.integers(-1, 40), min_size=1, max_size=25), st.integers(1, 6)), min_size=1, max_size=5
    )
)
def test_runs_repeat_themselves_apart_from_each_other(parts):
    tokens = [token for block, count in parts for token in block * count]
    found = find_runs(tokens, [1] * len(tokens))
    for start, end, length in found:
        assert end - start >= FEWEST * length
        assert all(tokens[i] == tokens[i + length] for i in range(start, end - length))
        assert sum(token != ODD for token in tokens[start:end]) >= FEWEST * SHORTEST
    assert all(a.end <= b.start for a, b in zip(found, found[1:], strict=False))
    (block, count), *rest = parts
    if not rest and count >= FEWEST and ODD not in block and len(block) >= SHORTEST:
        assert found and found[0].end - found[0].start == len(tokens)


def norm(x):
    return (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)


def plain(w, x, i):
    return norm(x + jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"])


def named(w, x, i):
    with jax.named_scope(f"layer_{i}"):
        with jax.named_scope("up"):
            y = jnp.tanh(x @ w["up"])
        with jax.named_scope("down"):
            y = y @ w["down"] + w["bias"]
    return norm(x + y)


def with_rules(w, x, i):
    return norm(x + jax.nn.relu(x @ w["up"]) @ w["down"] + w["bias"])


def dropping(w, x, i):
    keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(3), i), 0.8, x.shape)
    return norm(x + jnp.where(keep, jnp.tanh(x @ w["up"]) @ w["down"] / 0.8, 0) + w["bias"])


def computed_again(w, x, i):
    return jax.checkpoint(lambda w, x: plain(w, x, i))(w, x)


def printing(w, x, i):
    jax.debug.print("layer {i}: {}", jnp.sum(x), i=i)
    return plain(w, x, i)


def in_pairs(w, x, i):
    y = plain(w, x, i)
    return y * 2 if i % 2 else y + 1


def reading_the_first(w, x, i):
    if isinstance(x, tuple):
        x, first = x
    else:
        first = x
    y = plain(w, x, i) + 0.1 * first
    return (y, first) if i < LAYERS - 1 else y


def wired_otherwise(w, x, i):
    y = plain(w, x, i)
    return (y if i % 2 else x) + 0.1 * y * x


def kept_by_one(w, x, i):
    x, *kept = x if isinstance(x, tuple) else (x,)
    hidden = jnp.tanh(x @ w["up"])
    y = norm(x + hidden @ w["down"] + w["bias"])
    if i == LAYERS - 1:
        return y + jnp.sum(kept[0])
    return (y, hidden) if i == 1 else (y, *kept)


def named_within(w, x, i):
    with jax.named_scope(f"layer_{i}"), jax.named_scope(f"part_{i}"):
        return plain(w, x, i)


def on_other_lines(w, x, i):
    if i % 2:
        return norm(x + jnp.sin(jnp.tanh(jnp.cos(x @ w["up"]))) @ w["down"] + w["bias"] * 2 - jnp.exp(x))
    return norm(x + jnp.sin(jnp.tanh(jnp.cos(x @ w["up"]))) @ w["down"] + w["bias"] * 2 - jnp.exp(x))


def told_numbers(w, x, i):
    return jax.jit(lambda w, x, by: plain(w, x, i) * by)(w, x, 1.5 + i % 2)


KINDS = [plain, named, with_rules, dropping, computed_again, printing, in_pairs, reading_the_first]
KINDS += [wired_otherwise, kept_by_one, named_within, on_other_lines, told_numbers]


def step_of(layer, schedule="1f1b", count=LAYERS):
    """A training step of two tasks, each a Python loop over layers, and its arguments."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))

    def stage(weights, x):
        for i, w in enumerate(weights):
            x = layer(w, x, i)
        return x

    tasks = [mm.task(stage, f"stage_{s}", mesh=m) for s, m in enumerate(mm.submeshes(mesh, "stage"))]

    def loss(weights, x):
        for task, w in zip(tasks, weights, strict=True):
            x = task(w, x)
        return jnp.mean((x - 1) ** 2)

    def step(weights, x):
        return mm.microbatch(
            jax.value_and_grad(loss), argnum=1, num_microbatches=2, schedule=schedule, reduce="mean"
        )(weights, x)  # fmt: skip

    rng = np.random.default_rng(7)

    def weights():
        drawn = {"up": (WIDTH, 6), "down": (6, WIDTH), "bias": (WIDTH,)}
        return {k: rng.normal(size=shape).astype(np.float32) for k, shape in drawn.items()}

    return step, [[weights() for _ in range(count)] for _ in tasks], rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


def lowered(layer, schedule="1f1b"):
    jax.clear_caches()
    step, *args = step_of(layer, schedule)
    return mm.jit(step).lower(*args)


def calls(jaxpr):
    """How many calls of blocks there are in a jaxpr, and of how many blocks."""
    pending, found = [jaxpr], []
    while pending:
        for eqn in _compat.open_jaxpr(pending.pop()).eqns:
            pending += _compat.jaxprs_in(eqn)
            if _compat.is_jit(eqn) and eqn.params["name"] == "block":
                found.append(id(eqn.params["jaxpr"]))
    return len(found), len(set(found))


def opened(jaxpr, outer=None):
    """All equations that compute, calls opened: what each computes, under which names, for which line."""
    for inner in _compat.open_jaxpr(jaxpr).eqns:
        eqn = _compat.within(inner, outer)
        if _compat.is_jit(eqn):
            for body in _compat.jaxprs_in(eqn):
                yield from opened(body, eqn)
        else:
            shapes = tuple(v.aval.shape for v in eqn.outvars)
            if eqn.primitive.name == "add_any":  # of cotangents, which are summed up wherever JAX is at the time
                yield eqn.primitive.name, shapes
                continue
            # Where JAX differentiates a call, names within it are not in the brackets: jvp(layer)/up, jvp(layer/up).
            names = re.sub(r"jvp|transpose|[()]", "", _compat.name_stack(eqn))
            yield eqn.primitive.name, shapes, re.sub("/+", "/", names).strip("/"), _compat.source_line(eqn)


@pytest.mark.parametrize(
    ("layer", "schedule"),
    [(plain, "1f1b"), *((layer, "zero-bubble-h1") for layer in KINDS)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_fragments_are_those_without_it(layer, schedule, monkeypatch):
    def described():
        program = lowered(layer, schedule).program
        return {f.name: (len(f.invars), len(f.outvars), Counter(opened(f.jaxpr))) for f in program.fragments}

    fast = described()
    monkeypatch.setattr(_repeats, "find_runs", lambda tokens, weights: [])
    slow = described()
    assert fast == slow
    # A layer has a dozen equations, and the test would see nothing in an empty program.
    assert sum(sum(eqns.values()) for *_, eqns in slow.values()) > 100


@pytest.mark.parametrize(
    "layer", [wired_otherwise, kept_by_one, reading_the_first, told_numbers], ids=lambda f: f.__name__
)
def test_values(layer):
    step, *args = step_of(layer)
    found = mm.jit(step)(*args)
    with mm.ignore_transforms():
        wanted = jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "of"),
    [(plain, 2), (named, 3), (with_rules, 2), (dropping, 4), (computed_again, 3)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_layers_are_calls(layer, of):
    jax.clear_caches()
    step, *args = step_of(layer)
    made, distinct = calls(mm.jit(step).trace(*args).jaxpr)
    # The first layer of a task reads what came from outside. Of both tasks a forward and a backward pass.
    assert made >= 2 * 2 * (LAYERS - 1)
    assert distinct == of, "both tasks have the same layers"


def test_more_layers_cost_no_more_linearizing(monkeypatch):
    anew = []
    process = ad.LinearizeTrace.process_primitive
    monkeypatch.setattr(
        ad.LinearizeTrace, "process_primitive", lambda *args, **kw: anew.append(1) or process(*args, **kw)
    )

    def times(count):
        del anew[:]
        jax.clear_caches()
        step, *args = step_of(plain, count=count)
        mm.jit(step).trace(*args)
        return len(anew)

    few, many = times(6), times(18)
    # A call of each of 24 layers more, which have fourteen equations, and the border of each of their operands.
    assert 24 <= many - few <= 24 * 6


def test_equal_tasks_stay_one(monkeypatch):
    made = []
    blocks = _repeats._blocks
    monkeypatch.setattr(_repeats, "_blocks", lambda jaxpr, tokens: made.append(jaxpr) or blocks(jaxpr, tokens))
    step, *args = step_of(plain)
    mm.jit(step).trace(*args)
    assert len(made) == 1, "JAX differentiates each of them by itself"


def test_equal_layers_of_unequal_tasks_are_one():
    jax.clear_caches()
    step, weights, x = step_of(plain)
    del weights[1][0]
    assert calls(mm.jit(step).trace(weights, x).jaxpr) == (14, 2)  # of the backward pass, too
