"""How long it takes to plan a very deep pipeline, and how much memory: no device, nothing compiled.

    python benchmarks/planning.py [--stages 64] [--microbatches 512] [--schedule gpipe 1f1b zero-bubble-h1]
                                  [--profile] [--json FILE]

A training step of one small matrix product a stage, each stage on a submesh of two planned devices. Two times are
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
from _hand import SCHEDULES
from _timing import row, write_rows

import manymesh as mm
from manymesh import schedules

SECONDS, GIGABYTES = 10.0, 2.0
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


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--schedule", nargs="+", default=SCHEDULES, choices=schedules.names())
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    print(f"{a.stages} stages, {a.microbatches} microbatches, JAX {jax.__version__}, Python {sys.version.split()[0]}")
    write_rows(a.json, [measure(s, a.stages, a.microbatches) for s in a.schedule])
    if a.profile:
        profiler = cProfile.Profile()
        profiler.runcall(whole_plan, a.schedule[0], a.stages, a.microbatches)
        pstats.Stats(profiler, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
