"""What the executor adds in Python to each task it runs, beside a bare loop of ``compiled(*args)``.

    python benchmarks/dispatch.py [--arrays 4 300] [--tasks 64] [--rounds 60] [--profile] [--json FILE]

A chain of tiny equal tasks on one device, each from n arrays to n arrays. Both loops run the same executables, so
that the difference is what ManyMesh does around them. What a call costs once (checking and placing its arguments,
packing its results) is told apart by a chain of another length.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
from collections.abc import Callable
from typing import Any

from _process import prepare

if __name__ == "__main__":
    prepare(devices=2)

import jax
import jax.numpy as jnp
from _timing import alternate, row, write_rows

import manymesh as mm

TARGET = 20.0  # microseconds a task


def work(values: list[jax.Array]) -> list[jax.Array]:
    """What each task does: next to nothing."""
    return [x + 1 for x in values]


def chain(arrays: int, tasks: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """One call of the chain with ManyMesh, and the bare loop of the same."""
    task = mm.task(work, "tiny", devices=[0])

    def run(values: list[jax.Array]) -> list[jax.Array]:
        for _ in range(tasks):
            values = task(values)
        return values

    start = [jax.device_put(jnp.float32(i), jax.devices()[0]) for i in range(arrays)]
    ours = mm.jit(run)
    compiled = ours.lower(start).compile()
    # The very executables of the program: in their own loop nothing but the loop differs.
    executables = compiled._lowered.executables
    assert len(executables) == tasks, f"expected {tasks} fragments:\n{compiled.report()}"

    start = jax.block_until_ready(ours(start))  # as a second step finds them: where the step put them

    def loop() -> list[jax.Array]:
        values = start
        for executable in executables:
            values = executable(*values)
        return values

    assert [float(x) for x in loop()] == [float(x) for x in ours(start)], "the two loops disagree"
    return (lambda: jax.block_until_ready(ours(start))), (lambda: jax.block_until_ready(loop()))


def measure(arrays: int, tasks: int, rounds: int) -> dict[str, Any]:
    """The row of one task size, in microseconds; the best of the rounds."""
    runs: dict[str, Callable[[], Any]] = {}
    for length in (tasks, tasks // 4):
        runs[f"mm {length}"], runs[f"bare {length}"] = chain(arrays, length)
    samples = alternate(runs, rounds)

    def best(name: str) -> float:
        return 1e6 * min(s.wall for s in samples[name])  # nothing here is left to chance but the noise of others

    def added(length: int) -> float:
        return best(f"mm {length}") - best(f"bare {length}")

    whole, short = added(tasks), added(tasks // 4)
    per_task = (whole - short) / (tasks - tasks // 4)
    per_call = whole - per_task * tasks
    bare = best(f"bare {tasks}") / tasks
    print(
        f"{arrays:4} arrays: bare loop {bare:.1f} us a task, mm {whole / tasks:+.1f} us "
        f"(each task {per_task:.1f}, each call {per_call:.0f}, {tasks} tasks in it); target {TARGET:.0f}"
    )
    return row(
        f"dispatch, {arrays} arrays a task",
        f"{bare + whole / tasks:.1f} us a task",
        f"{bare:.1f} us bare loop",
        f"{whole / tasks:+.1f} us",
        f"<= {TARGET:.0f} us",
        whole / tasks <= TARGET,
    )


def profile(arrays: int, tasks: int, calls: int = 200) -> None:
    """Where the time of a call goes, by function."""
    ours, _ = chain(arrays, tasks)
    ours()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(calls):
        ours()
    profiler.disable()
    print(f"\n{arrays} arrays, {calls} calls of {tasks} tasks")
    pstats.Stats(profiler, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(14)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arrays", type=int, nargs="+", default=[4, 300])
    parser.add_argument("--tasks", type=int, default=64, help="length of the chain")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    print(f"chains of {a.tasks} tasks on one device, JAX {jax.__version__}, Python {sys.version.split()[0]}")
    rows = [measure(n, a.tasks, a.rounds) for n in a.arrays]
    if a.profile:
        for n in a.arrays:
            profile(n, a.tasks)
    write_rows(a.json, rows)


if __name__ == "__main__":
    main()
