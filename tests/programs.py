"""Hypothesis strategies for whole programs: task graphs on submeshes, and how to loop over them.

A generated `Graph` is data; `Graph.loss` makes the step from it. Every graph ends in a scalar loss, uses
each parameter at least once, and is small enough that compiling it takes a second.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh

import manymesh as mm

WIDTH = 4


@dataclass(frozen=True)
class Step:
    """One task: which submesh, which parameter, which earlier values it adds up."""

    submesh: int
    parameter: int
    reads: tuple[int, ...]
    op: str


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

    def parameters(self):
        count = max(s.parameter for s in self.steps) + 1
        rng = np.random.default_rng(0)
        return {f"w{i}": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) * 0.5 for i in range(count)}

    def loss(self, params, batch):
        meshes = self.meshes()
        values = [batch]
        rules = (("batch", "data"), ("hidden", "model"))
        for i, s in enumerate(self.steps):

            def body(w, *xs, op=s.op):
                x = sum(xs[1:], xs[0])
                x = mm.with_sharding_constraint(x, ("batch", None))
                w = mm.with_sharding_constraint(w, (None, "hidden"))
                if self.bf16:
                    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
                y = x @ w
                return {"tanh": jnp.tanh, "relu": jax.nn.relu, "none": lambda v: v}[op](y).astype(jnp.float32)

            fun = jax.checkpoint(body) if self.remat else body
            run = mm.task(fun, f"t{i}", mesh=meshes[s.submesh], logical_axes=rules)
            y = run(params[f"w{s.parameter}"], *[values[r] for r in s.reads])
            values.append(y * 1.5 + values[s.reads[0]] if self.unmarked else y)
        return jnp.mean(values[-1] ** 2) + sum(jnp.mean(v) for v in values[1:-1]) * 0.1


SIZES = [((1, 1), (1, 1)), ((2, 2), (2, 2)), ((2, 2), (2, 1), (1, 2)), ((1, 2), (1, 1), (2, 2)), ((1, 1),) * 4]


@st.composite
def graphs(draw, chains_only=False):
    """Chains, branches, skips, shared parameters, on equal and unequal submeshes."""
    sizes = draw(st.sampled_from(SIZES))
    count = draw(st.integers(2, 5))
    steps = []
    for i in range(count):
        if chains_only:
            reads, submesh = (i,), i * len(sizes) // count
        else:
            reads = tuple(sorted(set(draw(st.lists(st.integers(0, i), min_size=0, max_size=2))) | {i}))
            submesh = draw(st.integers(0, len(sizes) - 1))
        parameter = draw(st.integers(0, i))
        steps.append(Step(submesh, parameter, reads, draw(st.sampled_from(["tanh", "relu", "none"]))))
    used = sorted({s.parameter for s in steps})
    steps = [Step(s.submesh, used.index(s.parameter), s.reads, s.op) for s in steps]
    return Graph(sizes, tuple(steps), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))


def batch(rows):
    return jnp.asarray(np.random.default_rng(1).normal(size=(rows, WIDTH)), jnp.float32)
