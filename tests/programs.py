"""Hypothesis strategies for whole programs: task graphs on submeshes, and how to loop over them.

A generated `Graph` is data; `Graph.loss` makes the step from it. Every graph ends in a scalar loss, uses
each parameter at least once, and is small enough that compiling it takes a second.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh

import manymesh as mm

WIDTH = 4


# What a task is called through: each is a construct that the compiler has to see through.
WRAPS = ("plain", "jit", "checkpoint", "cond", "scan", "layers", "vmap", "custom_vjp", "switch", "nested")


@dataclass(frozen=True)
class Step:
    """One task: which submesh, which parameter, which earlier values it adds up, and what it is wrapped in."""

    submesh: int
    parameter: int
    reads: tuple[int, ...]
    op: str
    wrap: str = "plain"


@dataclass(frozen=True)
class Graph:
    """A program: submesh sizes, tasks in order, and how values are treated on the way."""

    sizes: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]
    bf16: bool
    unmarked: bool
    remat: bool

    def meshes(self):
        devices, start, out = jax.devices(), 0, []
        for a, b in self.sizes:
            out.append(Mesh(np.array(devices[start : start + a * b]).reshape(a, b), ("data", "model")))
            start += a * b
        return out

    def to_json(self):
        """The graph as text, to be kept when it breaks something."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text):
        """The graph that `to_json` wrote."""
        fields = json.loads(text)
        steps = tuple(Step(**{**s, "reads": tuple(s["reads"])}) for s in fields.pop("steps"))
        return cls(tuple(map(tuple, fields.pop("sizes"))), steps, **fields)

    def parameters(self):
        count = max(s.parameter for s in self.steps) + 1
        rng = np.random.default_rng(0)
        return {f"w{i}": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) * 0.5 for i in range(count)}

    def loss(self, params, batch):
        meshes = self.meshes()
        values = [batch]
        for i, s in enumerate(self.steps):
            x = sum((values[r] for r in s.reads[1:]), values[s.reads[0]])
            run = self._task(i, s, meshes)
            y = _wrapped(s.wrap, run, params[f"w{s.parameter}"], x)
            values.append(y * 1.5 + values[s.reads[0]] if self.unmarked else y)
        return jnp.mean(values[-1] ** 2) + sum(jnp.mean(v) for v in values[1:-1]) * 0.1

    def _task(self, i, step, meshes):
        rules = (("batch", "data"), ("hidden", "model"))

        def body(w, x):
            x = mm.with_sharding_constraint(x, ("batch", None))
            w = mm.with_sharding_constraint(w, (None, "hidden"))
            if self.bf16:
                x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
            y = x @ w
            return {"tanh": jnp.tanh, "relu": jax.nn.relu, "none": lambda v: v}[step.op](y).astype(jnp.float32)

        mesh = meshes[step.submesh]
        if step.wrap == "layers":
            mesh = [mesh, *(m for m in meshes if m is not mesh and m.shape == mesh.shape)][:2]
        if step.wrap == "nested":
            body = mm.task(body, f"inner{i}", mesh=mesh, logical_axes=rules)
        fun = jax.checkpoint(body) if self.remat else body
        return mm.task(fun, f"t{i}", mesh=mesh, logical_axes=rules)


def _wrapped(wrap, run, w, x):
    """``run(w, x)``, or something of that shape, through a construct of JAX."""
    if wrap == "jit":
        return jax.jit(run)(w, x)
    if wrap == "checkpoint":
        return jax.checkpoint(run)(w, x)
    if wrap == "cond":
        return jax.lax.cond(jnp.sum(x) > 0, run, lambda w, x: 0.5 * run(w, x) + x, w, x)
    if wrap == "switch":
        return jax.lax.switch(jnp.argmax(x[0]), [run, lambda w, x: x, lambda w, x: jnp.zeros_like(x)], w, x)
    if wrap == "scan":
        return jax.lax.scan(lambda h, _: (run(w, h), jnp.sum(h)), x, None, length=2)[0]
    if wrap == "layers":
        return jax.lax.scan(lambda h, v: (run(v, h), None), x, jnp.stack([w, 0.5 * w, -w]))[0]
    if wrap == "vmap":
        return jax.vmap(lambda h: run(w, h))(x.reshape(2, -1, WIDTH)).reshape(x.shape)
    if wrap == "custom_vjp":
        return _half_gradient(run, w, x)
    return run(w, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _half_gradient(run, w, x):
    return run(w, x)


def _half_forward(run, w, x):
    return run(w, x), (w, x)


def _half_backward(run, saved, ct):
    _, pullback = jax.vjp(run, *saved)
    return jax.tree.map(lambda g: 0.5 * g, pullback(ct))


_half_gradient.defvjp(_half_forward, _half_backward)


SIZES = [((1, 1), (1, 1)), ((2, 2), (2, 2)), ((2, 2), (2, 1), (1, 2)), ((1, 2), (1, 1), (2, 2)), ((1, 1),) * 4]


@st.composite
def graphs(draw, chains_only=False):
    """Chains, branches, skips, shared parameters, on equal and unequal submeshes."""
    sizes = draw(st.sampled_from(SIZES))
    count = draw(st.sampled_from([2, 2, 3, 3, 4]))
    steps = []
    for i in range(count):
        if chains_only:
            reads, submesh = (i,), i * len(sizes) // count
        else:
            reads = tuple(sorted(set(draw(st.lists(st.integers(0, i), min_size=0, max_size=2))) | {i}))
            submesh = draw(st.integers(0, len(sizes) - 1))
        parameter = draw(st.integers(0, i))
        op, wrap = draw(st.sampled_from(["tanh", "relu", "none"])), draw(st.sampled_from(WRAPS))
        steps.append(Step(submesh, parameter, reads, op, "plain" if chains_only else wrap))
    used = sorted({s.parameter for s in steps})
    steps = [replace(s, parameter=used.index(s.parameter)) for s in steps]
    return Graph(sizes, tuple(steps), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))


def batch(rows):
    return jnp.asarray(np.random.default_rng(1).normal(size=(rows, WIDTH)), jnp.float32)
