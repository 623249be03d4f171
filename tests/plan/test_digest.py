"""Digests: equal in two processes, and different where something is."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh._plan._digest import SECTIONS, digest, lines
from stages import dense, loss, parameters, rows

pytestmark = pytest.mark.once

SCRIPT = """
import json, jax, jax.numpy as jnp, optax, manymesh as mm
from manymesh._plan._digest import digest
from manymesh._plan._check import check

rules = (("batch", "data"), ("hidden", "model"))
mesh = jax.make_mesh((2, 2, 2), ("stage", "data", "model"))

@jax.checkpoint
def layer(w, x):
    w = mm.with_sharding_constraint(w, (None, "hidden"))
    return mm.with_sharding_constraint(jax.nn.relu(x @ w), ("batch", "hidden"))

tasks = [mm.task(layer, n, mesh=m, logical_axes=rules) for n, m in zip(("one", "two"), mm.submeshes(mesh, "stage"))]
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

def loss(p, x, key):
    x = x * jax.random.bernoulli(key, 0.5, x.shape)
    for name, task in zip(sorted(p), tasks):
        x = task(p[name], x)
    return jnp.mean(x**2)

def step(state, x, key):
    p, opt = state
    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, reduce="mean", rng_argnum=2)
    value, grads = grad(p, x, key)
    updates, opt = optimizer.update(grads, opt, p)
    return (optax.apply_updates(p, updates), opt), value

p = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
lowered = mm.jit(step, donate_argnums=0).lower((p, optimizer.init(p)), jnp.ones((8, 8)), jax.random.key(0))
check(lowered.plan)
print(json.dumps([digest(lowered.program, lowered.plan), lowered.plan.text([f.name for f in lowered.program.fragments])]))
"""


def test_two_processes_with_other_hash_seeds_agree():
    """Program, plan and donation of a training step, digest by digest and line by line."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed in ("1", "2718")
    ]
    try:
        first, second = (p.communicate(timeout=300)[0] for p in running)
    finally:
        for p in running:
            p.kill()
            p.wait()
    assert first and first == second


def sections(fun, *args, donate=(), **kwargs):
    lowered = mm.jit(fun, donate_argnums=donate).lower(*args)
    return digest(lowered.program, lowered.plan, **kwargs)


def different(a, b):
    assert tuple(a) == tuple(b) == SECTIONS
    return {name for name in a if a[name] != b[name]}


def test_a_difference_shows_in_its_section():
    """Another number in the program, another schedule, another donation, another sharding of an argument."""
    grad = jax.value_and_grad(loss)

    def step(p, x, schedule="1f1b", factor=2.0):
        value, grads = mm.microbatch(grad, argnum=1, num_microbatches=4, schedule=schedule, reduce="mean")(
            p, factor * x
        )
        return jax.tree.map(jnp.subtract, p, grads), value

    args = parameters(), rows()
    base = sections(step, *args)
    assert different(base, sections(step, *args)) == set()
    assert different(base, sections(functools.partial(step, factor=3.0), *args)) == {"program"}
    assert different(base, sections(functools.partial(step, schedule="gpipe"), *args)) == {"program", "plan"}
    assert {"plan", "donation"} == different(base, sections(step, *args, donate=0))
    given = [None, None, jax.sharding.SingleDeviceSharding(jax.devices()[3])]
    assert different(base, sections(step, *args, arguments=given)) == {"arguments"}


def test_layouts_have_a_section():
    """The sharding of every value on every submesh, once it is known."""
    front = mm.task(dense, "front", devices=[0])
    compiled = mm.jit(front).lower(jnp.ones((4, 4)), rows()).compile()
    program, plan, lowered = compiled.program, compiled._lowered.plan, compiled._lowered
    known = lowered.sharding
    assert different(digest(program, plan), digest(program, plan, sharding=known)) == {"layout"}
    found = list(lines("layout", program, plan, sharding=known))
    assert found == [f"v{k} on 0: {P()}" for k in range(3)]


def test_lines_tell_two_programs_apart():
    """The differing line names the equation."""

    def text(factor):
        lowered = mm.jit(lambda x: mm.task(lambda x: x * factor, "front", devices=[0])(x)).lower(rows())
        return list(lines("program", lowered.program, lowered.plan))

    one, two = text(2.0), text(3.0)
    assert len(one) == len(two)
    (pair,) = [(a, b) for a, b in zip(one, two, strict=True) if a != b]
    assert "mul" in pair[0] and "2.0" in pair[0] and "3.0" in pair[1]


@pytest.mark.parametrize("within", [lambda f: f, jax.checkpoint, jax.jit], ids=["as it is", "checkpoint", "jit"])
def test_a_key_that_a_task_has_closed_over_counts(within):
    """A constant of its body, wherever that ends up: two keys are two programs."""

    def digests(seed):
        key = jax.random.key(seed)
        one = mm.task(within(lambda w, x: (x @ w) * jax.random.normal(key, x.shape)), "one", devices=[0])
        lowered = mm.jit(lambda w, x: jnp.sum(one(w, x))).lower(parameters()["front"], rows())
        return digest(lowered.program, lowered.plan)["program"]

    assert digests(0) == digests(0) != digests(1)
