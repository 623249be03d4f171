"""How long it takes to plan a very deep pipeline, and how much memory: no device, nothing compiled.

    python benchmarks/planning.py [--stages 64] [--microbatches 512] [--schedule gpipe 1f1b zero-bubble-h1]
                                  [--layers 96] [--profile] [--json FILE]

A training step of one small matrix product a stage, each stage on a submesh of two planned devices; and one of a decoder
with tensor parallelism, tied embedding and AdamW with clipping, a task a layer, on submeshes of 2x4. Two times are
told apart: that of the schedule alone (the order of all actions, its proof, the order of issue), and that of the
whole plan (tracing, splitting, edges, and every instruction of a call). The figure that counts is the whole. Planning
runs on one thread and waits for nothing, so that CPU time is its time on an idle machine.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import sys
import time
from typing import Any

from _process import prepare

if __name__ == "__main__":
    prepare(devices=1)

import jax
import jax.numpy as jnp
import optax
from _hand import SCHEDULES
from _timing import row, write_rows

import manymesh as mm
from manymesh import schedules

SECONDS, GIGABYTES = 10.0, 2.0
DECODER_GIGABYTES = 0.5
WIDTH, ROWS = 8, 2


def schedule_alone(schedule: str, stages: int, count: int) -> tuple[float, int]:
    """Seconds for the order, its proof and the order of issue; number of actions."""
    start = time.process_time()
    order = schedules.get(schedule).order(tuple(range(stages)), count)
    schedules.check(order)
    actions = schedules.issue_order(order)
    return time.process_time() - start, len(actions)


def whole_plan(schedule: str, stages: int, count: int) -> tuple[float, float, Any]:
    """Seconds for tracing, seconds for the program and its instructions, and these."""
    mesh = jax.make_mesh((stages, 2), ("stage", "data"), devices=mm.planned_devices(2 * stages))
    tasks = [
        mm.task(lambda w, x: jnp.tanh(x @ w), f"stage_{i}", mesh=m) for i, m in enumerate(mm.submeshes(mesh, "stage"))
    ]

    def loss(weights: Any, x: Any) -> Any:
        for task, w in zip(tasks, weights, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    grad = jax.value_and_grad(loss)
    step = mm.jit(mm.microbatch(grad, argnum=1, num_microbatches=count, schedule=schedule, reduce="mean"))
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * stages
    batch = jax.ShapeDtypeStruct((ROWS * count, WIDTH), "float32")
    start = time.process_time()
    traced = step.trace(weights, batch)
    middle = time.process_time()
    lowered = traced.lower()
    return middle - start, time.process_time() - middle, lowered


def measure(schedule: str, stages: int, count: int) -> dict[str, Any]:
    """A row of the table. Memory is that of the whole process so far, everything imported included."""
    alone, actions = schedule_alone(schedule, stages, count)
    tracing, planning, lowered = whole_plan(schedule, stages, count)
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{schedule:14} schedule alone {alone:.2f} s ({actions} actions); whole plan {tracing + planning:.2f} s "
        f"(tracing {tracing:.2f}, {len(lowered.plan.instructions)} instructions), at most {gigabytes:.2f} GB; "
        f"target {SECONDS:.0f} s, {GIGABYTES:.0f} GB",
        flush=True,
    )
    return row(
        f"plan {stages} x {count}, {schedule}",
        f"{tracing + planning:.1f} s, {gigabytes:.2f} GB",
        f"{alone:.1f} s of it for the schedule",
        f"{tracing + planning:.1f} s",
        f"< {SECONDS:.0f} s, {GIGABYTES:.0f} GB",
        tracing + planning < SECONDS and gigabytes < GIGABYTES,
    )


def decoder_plan(layers: int, stages: int, count: int) -> tuple[float, float, Any]:
    """As `whole_plan`, of a decoder: seconds for tracing, seconds for the rest, and the lowered step."""
    width, heads, vocabulary, length = 64, 4, 256, 16
    rules = (("batch", "data"), ("heads", "model"), ("mlp", "model"), ("vocabulary", "model"))
    constrain = mm.with_sharding_constraint

    def norm(scale: Any, x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return scale * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def layer(p: Any, x: Any) -> Any:
        h = norm(p["norm_1"], x)
        q, k, v = (jnp.einsum("btd,dhe->bthe", h, constrain(p[n], (None, "heads", None))) for n in "qkv")
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), jnp.einsum("bthe,bshe->bhts", q, k) / 4, -1e9)
        mixed = jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores), v)
        out = jnp.einsum("bthe,hed->btd", mixed, constrain(p["out"], ("heads", None, None)))
        x = x + constrain(out, ("batch", None, None))
        h = jax.nn.gelu(norm(p["norm_2"], x) @ constrain(p["up"], (None, "mlp")))
        return x + constrain(h @ constrain(p["down"], ("mlp", None)), ("batch", None, None))

    def look_up(embedding: Any, tokens: Any) -> Any:
        return constrain(embedding, ("vocabulary", None))[tokens]

    def loss_of(embedding: Any, scale: Any, x: Any, targets: Any) -> Any:
        logits = norm(scale, x) @ constrain(embedding, ("vocabulary", None)).T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))

    mesh = jax.make_mesh((stages, 2, 4), ("stage", "data", "model"), devices=mm.planned_devices(8 * stages))
    meshes = mm.submeshes(mesh, "stage")
    tasks = [mm.task(layer, f"layer_{i}", mesh=meshes[i * stages // layers], logical_axes=rules) for i in range(layers)]
    front = mm.task(look_up, "embed", mesh=meshes[0], logical_axes=rules)
    back = mm.task(loss_of, "loss", mesh=meshes[-1], logical_axes=rules)

    def loss(p: Any, batch: Any) -> Any:
        x = front(p["embedding"], batch[0])
        for task, w in zip(tasks, p["layers"], strict=True):
            x = task(w, x)
        return back(p["embedding"], p["norm"], x, batch[1])

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=count, schedule="1f1b", reduce="mean")

    def train(state: Any, batch: Any) -> Any:
        value, grads = grad(state[0], batch)
        updates, moments = optimizer.update(grads, state[1], state[0])
        return value, (optax.apply_updates(state[0], updates), moments)

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "float32")

    each = width // heads
    weights = {
        "norm_1": floats(width), "norm_2": floats(width), "out": floats(heads, each, width),
        **{name: floats(width, heads, each) for name in "qkv"},
        "up": floats(width, 4 * width), "down": floats(4 * width, width),
    }  # fmt: skip
    parameters = {
        "embedding": floats(vocabulary, width),
        "norm": floats(width),
        "layers": [dict(weights) for _ in range(layers)],
    }
    tokens = jax.ShapeDtypeStruct((4 * count, length), "int32")
    state = parameters, jax.eval_shape(optimizer.init, parameters)
    start = time.process_time()
    traced = mm.jit(train, donate_argnums=0).trace(state, (tokens, tokens))
    middle = time.process_time()
    lowered = traced.lower()
    return middle - start, time.process_time() - middle, lowered


def measure_decoder(layers: int, stages: int, count: int) -> dict[str, Any]:
    """A row of the table; memory as in `measure`."""
    tracing, planning, lowered = decoder_plan(layers, stages, count)
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    seconds = tracing + planning
    print(
        f"decoder, {layers} layers: {seconds:.2f} s (tracing {tracing:.2f}, {len(lowered.plan.instructions)} instructions), "
        f"at most {gigabytes:.2f} GB; target {SECONDS:.0f} s, {DECODER_GIGABYTES} GB",
        flush=True,
    )
    return row(
        f"plan a decoder of {layers} layers, {stages} x {count}",
        f"{seconds:.1f} s, {gigabytes:.2f} GB",
        f"{tracing:.1f} s of it for tracing",
        f"{seconds:.1f} s",
        f"< {SECONDS:.0f} s, {DECODER_GIGABYTES} GB",
        seconds < SECONDS and gigabytes < DECODER_GIGABYTES,
    )


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--schedule", nargs="+", default=SCHEDULES, choices=schedules.names())
    parser.add_argument("--layers", type=int, default=96, help="of the decoder; 0 leaves it out")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    print(f"{a.stages} stages, {a.microbatches} microbatches, JAX {jax.__version__}, Python {sys.version.split()[0]}")
    # The decoder first: memory is that of the whole process so far.
    table = [measure_decoder(a.layers, a.stages, a.microbatches)] if a.layers else []
    write_rows(a.json, [*table, *(measure(s, a.stages, a.microbatches) for s in a.schedule)])
    if a.profile:
        profiler = cProfile.Profile()
        profiler.runcall(whole_plan, a.schedule[0], a.stages, a.microbatches)
        pstats.Stats(profiler, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
