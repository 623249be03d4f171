"""What tasks are called through, and what is inside of them: constructs that a compiler has to see through."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .operations import WIDTH

# How often a function ran on the host, by what it was told; see `observed`.
NOTES: Counter[str] = Counter()


def _note(label: str) -> None:
    NOTES[label] += 1


def _observed(label, run):
    """``run`` with an effect that the host can see."""

    def fun(p, x, ids, key):
        jax.debug.callback(functools.partial(_note, label))
        return run(p, x, ids, key)

    return fun


def call_wrapped(wrap: str, run: Any, p: Any, x: Any, ids: Any, key: Any, label: str) -> Any:
    """``run(p, x, ids, key)``, or something of that shape, through a construct of JAX.

    Args:
      wrap: a key of `WRAPS`.
      run: ``(parameters, x: float32[rows, WIDTH], ids: int32[rows], key) -> float32[rows, WIDTH]``.
      p, x, ids, key: its arguments.
      label: what effects are counted under.
    """
    return WRAPS[wrap](run, p, x, ids, key, label)


def _halved(run):
    """Another function with the same task in it."""
    return lambda p, x, ids, key: 0.5 * run(p, x, ids, key) + x


def _plain(run, p, x, ids, key, label):
    return run(p, x, ids, key)


def _jit(run, p, x, ids, key, label):
    return jax.jit(run)(p, x, ids, key)


def _keywords(run, p, x, ids, key, label):
    return run(p, x, own=key, ids=ids)


def _checkpoint(run, p, x, ids, key, label):
    return jax.checkpoint(run)(p, x, ids, key)


def _policy(run, p, x, ids, key, label):
    return jax.checkpoint(run, policy=jax.checkpoint_policies.dots_saveable)(p, x, ids, key)


def _cond(run, p, x, ids, key, label):
    return lax.cond(ids[0] > 3, run, _halved(run), p, x, ids, key)


def _cond_on_data(run, p, x, ids, key, label):
    return lax.cond(jnp.sum(x) > 0, lambda: run(p, x, ids, key), lambda: x)


def _switch(run, p, x, ids, key, label):
    branches = [run, lambda p, x, ids, key: x, _halved(run)]
    return lax.switch(ids[0] % 3, branches, p, x, ids, key)


def _observed_cond(run, p, x, ids, key, label):
    taken, other = _observed(f"{label} true", run), _observed(f"{label} false", _halved(run))
    return lax.cond(ids[0] > 3, taken, other, p, x, ids, key)


def _guarded_while(run, p, x, ids, key, label):
    p, x = lax.stop_gradient((p, x))
    return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.tanh(run(p, s[1], ids, key))), (0, x))[1]


def _scan(run, p, x, ids, key, label):
    def body(h, _):
        h = jnp.tanh(run(p, h, ids, key))
        return h, jnp.sum(h)

    h, sums = lax.scan(body, x, None, length=2)
    return h + sums[0] * 0.01


def _fori(run, p, x, ids, key, label):
    return lax.fori_loop(0, 2, lambda i, h: jnp.tanh(run(p, h, ids, key)) + 0.1 * i, x)


def _empty_scan(run, p, x, ids, key, label):
    return lax.scan(lambda h, _: (run(p, h, ids, key), None), x, None, length=0)[0]


def _layers(run, p, x, ids, key, label):
    """Stacked where it is used."""
    stack = jax.tree.map(lambda v: jnp.stack([v, 0.5 * v, -v]), p)
    return lax.scan(lambda h, v: (jnp.tanh(run(v, h, ids, key)), None), x, stack)[0]


def _stacked(run, p, x, ids, key, label):
    """Parameters that come stacked, as `nn.scan` keeps them."""
    return lax.scan(lambda h, v: (jnp.tanh(run(v, h, ids, key)), None), x, p)[0]


def _stacked_reversed(run, p, x, ids, key, label):
    return lax.scan(lambda h, v: (jnp.tanh(run(v, h, ids, key)), None), x, p, reverse=True)[0]


def _stacked_collected(run, p, x, ids, key, label):
    """What every layer makes is a result as well."""

    def body(h, v):
        h = jnp.tanh(run(v, h, ids, key))
        return h, (h, jnp.mean(v["kernel"]))

    h, (every, means) = lax.scan(body, x, p)
    return h + 0.1 * every.mean(0) + means.sum()


def _python_loop(run, p, x, ids, key, label):
    for _ in range(2):
        x = jnp.tanh(run(p, x, ids, key))
    return x


def _vmap(run, p, x, ids, key, label):
    groups = x.reshape(2, -1, WIDTH), ids.reshape(2, -1)
    return jax.vmap(lambda h, n: run(p, h, n, key))(*groups).reshape(x.shape)


def _examples(run, p, x, ids, key, label):
    return jax.vmap(lambda h, n: run(p, h[None], n[None], key)[0])(x, ids)


def _ensemble(run, p, x, ids, key, label):
    """Several sets of parameters at once."""
    many = jax.tree.map(lambda v: jnp.stack([v, 0.5 * v]), p)
    return jax.vmap(run, in_axes=(0, None, None, None))(many, x, ids, key).mean(0)


def _map(run, p, x, ids, key, label):
    return lax.map(lambda s: run(p, s[0], s[1], key), (x.reshape(2, -1, WIDTH), ids.reshape(2, -1))).reshape(x.shape)


def _jvp(run, p, x, ids, key, label):
    y, tangent = jax.jvp(lambda v: run(p, v, ids, key), (x,), (jnp.ones_like(x),))
    return y + 0.1 * tangent


def _linearize(run, p, x, ids, key, label):
    y, linear = jax.linearize(lambda v: run(p, v, ids, key), x)
    return y + 0.1 * linear(jnp.ones_like(x)) + 0.1 * linear(x)


def _root(run, p, x, ids, key, label):
    """An implicit layer: h = x + 0.1 tanh(run(h)), and its derivative from that equation."""

    def solve(f, start):
        return lax.fori_loop(0, 3, lambda i, h: h - f(h), start)

    def tangent_solve(f, y):
        return lax.fori_loop(0, 3, lambda i, h: h - (f(h) - y), jnp.zeros_like(y))

    return lax.custom_root(lambda h: h - x - 0.1 * jnp.tanh(run(p, h, ids, key)), x, solve, tangent_solve)


def _gradient_penalty(run, p, x, ids, key, label):
    return x - 0.1 * jax.grad(lambda v: jnp.sum(jnp.tanh(run(p, v, ids, key))))(x)


def _returned_number(run, p, x, ids, key, label):
    y, times = run(p, x, ids, key)
    for _ in range(times):
        y = 0.5 * y
    return y


def _scoped(run, p, x, ids, key, label):
    with jax.named_scope("block"):
        return run(p, x, ids, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _half_gradient(run, p, x, ids, key):
    return run(p, x, ids, key)


def _half_forward(run, p, x, ids, key):
    return run(p, x, ids, key), (p, x, ids, key)


def _half_backward(run, saved, ct):
    p, x, ids, key = saved
    _, pullback = jax.vjp(lambda p, x: run(p, x, ids, key), p, x)
    return (*jax.tree.map(lambda g: 0.5 * g, pullback(ct)), None, None)


_half_gradient.defvjp(_half_forward, _half_backward)
_half_optimized = jax.custom_vjp(_half_gradient.fun, nondiff_argnums=(0,))
_half_optimized.defvjp(_half_forward, _half_backward, optimize_remat=True)


def _custom_vjp(run, p, x, ids, key, label):
    return _half_gradient(run, p, x, ids, key)


def _custom_vjp_optimized(run, p, x, ids, key, label):
    return _half_optimized(run, p, x, ids, key)


WRAPS: dict[str, Any] = {
    "plain": _plain,
    "nested": _plain,
    "keywords": _keywords,
    "jit": _jit,
    "checkpoint": _checkpoint,
    "policy": _policy,
    "cond": _cond,
    "cond_on_data": _cond_on_data,
    "switch": _switch,
    "observed_cond": _observed_cond,
    "guarded_while": _guarded_while,
    "scan": _scan,
    "fori": _fori,
    "empty_scan": _empty_scan,
    "layers": _layers,
    "stacked": _stacked,
    "stacked_reversed": _stacked_reversed,
    "stacked_collected": _stacked_collected,
    "python_loop": _python_loop,
    "vmap": _vmap,
    "examples": _examples,
    "ensemble": _ensemble,
    "map": _map,
    "jvp": _jvp,
    "linearize": _linearize,
    "root": _root,
    "gradient_penalty": _gradient_penalty,
    "scoped": _scoped,
    "returned_number": _returned_number,
    "custom_vjp": _custom_vjp,
    "custom_vjp_optimized": _custom_vjp_optimized,
}
STACKED = ("stacked", "stacked_reversed", "stacked_collected")  # their parameters come stacked
FORWARDS = ("jvp", "linearize")
TWICE = (*FORWARDS, "gradient_penalty")  # what is differentiated once more around it
VMAPPED = ("vmap", "examples", "ensemble", "map")


def inner_wrapped(inner: str, fun: Any, x: Any, ids: Any) -> Any:
    """``fun(x, ids)``, or something of that shape, inside of a task."""
    return INNER[inner](fun, x, ids)


def _inner_rows(fun, x, ids):
    return jax.vmap(lambda row, n: fun(row[None], n[None])[0])(x, ids)


def _inner_while(fun, x, ids):
    h = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.tanh(fun(s[1], ids))), (0, lax.stop_gradient(x)))[1]
    return h + x


INNER: dict[str, Any] = {
    "plain": lambda fun, x, ids: fun(x, ids),
    "residual": lambda fun, x, ids: 0.5 * x + fun(x, ids),
    "checkpoint": lambda fun, x, ids: jax.checkpoint(fun)(x, ids),
    "policy": lambda fun, x, ids: jax.checkpoint(fun, policy=jax.checkpoint_policies.nothing_saveable)(x, ids),
    "jit": lambda fun, x, ids: jax.jit(fun)(x, ids),
    "scan": lambda fun, x, ids: lax.scan(lambda h, _: (jnp.tanh(fun(h, ids)), None), x, None, length=2)[0],
    "cond": lambda fun, x, ids: lax.cond(ids[0] > 2, fun, lambda h, n: h * 0.5, x, ids),
    "while": _inner_while,
    "rows": _inner_rows,
    "stopped": lambda fun, x, ids: x + lax.stop_gradient(fun(x, ids)),
}
