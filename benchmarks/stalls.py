"""Pipelines of 32 microbatches in 4 processes in which everything stalls at random; none may hang or compute something else.

    python benchmarks/stalls.py [--runs 20] [--schedules gpipe 1f1b zero-bubble-h1 interleaved] [--seed 0] [--json FILE]

Tasks sleep at random, one in ten for up to 20 ms, and processes for up to 0.2 s between two steps; from outside a random
process is stopped by SIGSTOP about twice a second, for up to 0.3 s. A run is a training of three steps from other parameters
than the one before; the processes are started once for each schedule. Losses have to be those of plain JAX. Exit code 1 if
anything is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from _process import prepare
from _timing import row, write_rows

if __name__ == "__main__" and "--worker" not in sys.argv:
    prepare(devices=1, quiet=True)

import jax
import jax.numpy as jnp
import numpy as np
from _sleep import sleeper

import manymesh as mm
from manymesh._distributed._launch import run_processes

PROCESSES, MICROBATCHES, STEPS = 4, 32, 3
ROWS, WIDTH = 2, 8  # of a microbatch
SCHEDULES = {"gpipe": 4, "1f1b": 4, "zero-bubble-h1": 4, "interleaved": 8}  # and stages


def step_of(schedule: str, stages: int, draw: random.Random) -> Any:
    """A training step whose stages stall at random."""

    def seconds() -> float:
        return draw.uniform(0, 0.02) if draw.random() < 0.1 else 0.0

    @jax.custom_vjp
    def stall(x: jax.Array) -> jax.Array:
        return sleeper((ROWS, WIDTH), seconds)(x)

    stall.defvjp(lambda x: (stall(x), None), lambda _, g: (sleeper((ROWS, WIDTH), seconds)(g),))

    tasks = [
        mm.task(lambda w, x: stall(x + jnp.tanh(x @ w)), f"stage_{i}", devices=[i % PROCESSES]) for i in range(stages)
    ]

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for task, w in zip(tasks, params, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        grad = mm.microbatch(
            jax.value_and_grad(loss_fn), argnum=1, num_microbatches=MICROBATCHES, schedule=schedule, reduce="mean"
        )
        loss, grads = grad(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return mm.jit(step)


def plain(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """The same step without tasks, microbatches and stalls."""

    def loss_fn(params: Any) -> jax.Array:
        y = x
        for w in params:
            y = y + jnp.tanh(y @ w)
        return jnp.mean(y**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def work(schedule: str, runs: int, seed: int) -> None:
    """What runs in each process."""
    mm.distributed.initialize(stall_timeout=60)
    me = jax.process_index()
    draw = random.Random(f"{seed} {me}")
    step, expected_step = step_of(schedule, SCHEDULES[schedule], draw), jax.jit(plain)
    print(f"pid {os.getpid()} begins", flush=True)
    for number in range(runs):
        rng = np.random.default_rng((seed, number))
        params = expected = [np.float32(0.3 * rng.normal(size=(WIDTH, WIDTH))) for _ in range(SCHEDULES[schedule])]
        for _ in range(STEPS):
            x = np.float32(rng.normal(size=(ROWS * MICROBATCHES, WIDTH)))
            time.sleep(draw.uniform(0, 0.2))
            params, loss = step(params, x)
            expected, expected_loss = expected_step(expected, x)
            np.testing.assert_allclose(float(loss), float(expected_loss), rtol=1e-6)
        print(f"run {number} is done", flush=True)


class Stopper(threading.Thread):
    """Stops a random process for a moment, again and again, once all have begun.

    Args:
      output: what they print.
      draw: where chance comes from.
    """

    def __init__(self, output: io.StringIO, draw: random.Random) -> None:
        super().__init__(daemon=True)
        self.output, self.draw, self.over, self.stops = output, draw, threading.Event(), 0

    def run(self) -> None:
        """Until it is over."""
        while not self.over.wait(self.draw.uniform(0, 0.5)):
            pids = [int(pid) for pid in re.findall(r"pid (\d+) begins", self.output.getvalue())]
            if len(pids) < PROCESSES:
                continue
            pid = self.draw.choice(pids)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                try:
                    time.sleep(self.draw.uniform(0, 0.3))
                finally:
                    os.kill(pid, signal.SIGCONT)
                self.stops += 1


def stalling(schedule: str, runs: int, seed: int, timeout: float) -> tuple[int, float, int, str]:
    """Runs that were done in all processes, seconds, how often a process was stopped, and what they printed."""
    output = io.StringIO()
    stopper = Stopper(output, random.Random(seed))
    stopper.start()
    start = time.monotonic()
    command = [sys.executable, str(Path(__file__)), "--worker", "--schedules", schedule, "--runs", str(runs)]
    try:
        code = run_processes(
            [*command, "--seed", str(seed)], PROCESSES, 1, output=output, timeout=timeout,
            more={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TF_CPP_MIN_LOG_LEVEL": "3"},
        )  # fmt: skip
    finally:
        stopper.over.set()
        stopper.join()
    text = output.getvalue()
    done = min(len(re.findall(rf"\[{p}\] run \d+ is done", text)) for p in range(PROCESSES))
    return done, time.monotonic() - start, stopper.stops, "" if code == 0 and done == runs else text[-5000:]


def main() -> int:
    """Prints a line for each schedule; gives 1 if one hung or differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--schedules", nargs="+", choices=tuple(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=500, help="seconds for all runs of a schedule")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    given = parser.parse_args()
    if given.worker:
        work(given.schedules[0], given.runs, given.seed)
        return 0
    rows, wrong = [], 0
    for schedule in given.schedules:
        done, seconds, stops, words = stalling(schedule, given.runs, given.seed, given.timeout)
        wrong += bool(words)
        rows.append(
            row(
                f"{schedule}: {PROCESSES} processes, {MICROBATCHES} microbatches, random stalls",
                f"{done} of {given.runs} runs", f"{stops} stops from outside", f"{seconds:.0f} s", "all end", not words,
            )
        )  # fmt: skip
        print(f"{rows[-1]['what']}: {done} of {given.runs} runs ended well in {seconds:.0f} s; {stops} times stopped")
        print(words, end="", flush=True)
    write_rows(given.json, rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
