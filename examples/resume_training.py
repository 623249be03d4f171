"""Trains a pipeline of two stages that survives: whenever it is started, it goes on from its last checkpoint.

    python examples/resume_training.py --directory run --steps 200 --every 20
    python -m manymesh launch -n 4 --max-restarts 9 examples/resume_training.py --directory run

Stop it, kill it or let it be started again by `launch`: the parameters at last are those of a run that nobody disturbed,
bit for bit, because what a step depends on is in the checkpoint: parameters, moments of the optimizer and the position in
the data. `history.jsonl` in the directory says which step saw which batch, in which attempt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# JAX reads these when it starts. Under launch each process has the devices that launch gives it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import manymesh as mm

ROWS, BATCH, WIDTH = 256, 16, 8  # rows of data, rows in a batch, features
MICROBATCHES = 4


class Batches:
    """Batches of shuffled rows, in another order in each epoch. All that it remembers is how many it has given.

    Args:
      position: how many batches were given before.
    """

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.rows = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """``float32[BATCH, WIDTH]``, and what the model is to make of it."""
        epoch, number = divmod(self.position, ROWS // BATCH)
        order = np.random.default_rng((1, epoch)).permutation(ROWS)  # depends on the epoch alone, not on the past
        x = self.rows[order[number * BATCH : (number + 1) * BATCH]]
        self.position += 1
        return x, np.sin(x[:, ::-1])


def build(devices: Sequence[Any]) -> tuple[Any, Any]:
    """The step, and what creates its state: two stages, each on half of the devices, or both on the only one."""
    half = max(1, len(devices) // 2)
    halves = devices[:half], devices[half : 2 * half] or devices
    meshes = [jax.sharding.Mesh(np.array(each), ("data",)) for each in halves]

    def block(w: Any, x: jax.Array) -> jax.Array:
        x = mm.with_sharding_constraint(x, ("data",))  # the devices of a stage share the rows of a microbatch
        return x + jnp.tanh(x @ w["in"]) @ w["out"]

    stages = [mm.task(block, f"stage_{i}", mesh=mesh) for i, mesh in enumerate(meshes)]
    optimizer = optax.adamw(1e-2)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, target = batch
        for i, stage in enumerate(stages):
            x = stage(params[f"stage_{i}"], x)
        return jnp.mean((x - target) ** 2)

    def step(state: Any, batch: Any) -> tuple[jax.Array, Any]:
        grad = mm.microbatch(
            jax.value_and_grad(loss_fn), argnum=1, num_microbatches=MICROBATCHES, schedule="1f1b", reduce="mean"
        )
        loss, grads = grad(state["params"], batch)
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        return loss, {"params": optax.apply_updates(state["params"], updates), "moments": moments}

    def init(seed: int) -> Any:
        draw = np.random.default_rng(seed).normal
        params = {
            f"stage_{i}": {
                "in": np.float32(0.3 * draw(size=(WIDTH, 2 * WIDTH))),
                "out": np.float32(0.3 * draw(size=(2 * WIDTH, WIDTH))),
            }
            for i in range(len(stages))
        }
        return {"params": params, "moments": optimizer.init(params)}

    return mm.jit(step, donate_argnums=0), init


def train(directory: Path, steps: int, every: int, devices: Sequence[Any], seed: int = 0) -> Any:
    """Trains up to a number of steps in all; gives the parameters as NumPy, in every process."""
    step, init = build(devices)
    attempt = int(os.environ.get("MANYMESH_RESTARTS", "0"))
    first = jax.process_index() == 0
    with mm.checkpoint.Manager(directory, max_to_keep=2, save_interval_steps=every) as manager:
        # 1. Go on from the last complete checkpoint, or begin. The shapes and shardings are read from the step, so it does
        #    not matter how many devices there were when it was saved.
        done = manager.latest_step()
        if done is None:
            done, state, batches = 0, init(seed), Batches()
        else:
            lowered = step.lower(jax.eval_shape(lambda: init(seed)), next(Batches()))
            state = manager.restore(done, like=mm.checkpoint.argument_of(lowered, 0))
            batches = Batches(manager.metadata(done)["position"])
        if first:
            print(f"attempt {attempt}: goes on after step {done} of {steps}", flush=True)

        # 2. Train. What is saved after a step is everything that the next one needs.
        loss = None
        for number in range(done + 1, steps + 1):
            position = batches.position
            loss, state = step(state, next(batches))
            if first:
                line = {"attempt": attempt, "step": number, "batch": position, "loss": float(loss)}
                with open(directory / "history.jsonl", "a") as history:
                    print(json.dumps(line), file=history)
            manager.save(number, state, metadata={"position": batches.position}, force=number == steps)
    if first and loss is not None:
        print(f"step {steps}: loss {float(loss):.6f}", flush=True)
    return mm.fetch(state["params"])


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="where checkpoints and the history are")
    parser.add_argument("--steps", type=int, default=200, help="training steps in all")
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    options = parser.parse_args(argv)
    mm.distributed.initialize()  # one of several processes, where it was launched as one
    options.directory.mkdir(parents=True, exist_ok=True)
    params = train(options.directory, options.steps, options.every, jax.devices())
    if jax.process_index() == 0:
        np.savez(
            options.directory / "params.npz",
            **{jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(params)},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
