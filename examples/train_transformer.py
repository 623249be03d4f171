"""Trains a small language model as a pipeline on eight simulated devices, and checks it against one device.

    python examples/train_transformer.py --stages 2 --schedule 1f1b --num-microbatches 8 --steps 40
    python -m manymesh launch -n 4 --devices-per-process 2 examples/train_transformer.py --stages 4

The text is the reference documentation that comes with Python. The exit code is 1 if the pipeline and plain JAX
on one device disagree, or if the model did not learn.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

# JAX reads these when it starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

from pathlib import Path
from pydoc_data import topics

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformer import RULES, Decoder, next_byte_loss

import manymesh as mm
from manymesh import schedules
from manymesh.flax import tabulate

BATCH, LENGTH = 32, 128  # sequences in a batch, bytes in a sequence
DATA_SHARDS = 2  # devices that share a batch, on every stage
TIMELINE = Path(__file__).parents[1] / "build" / "timeline.png"
TOLERANCE = 1e-4  # relative difference between the two loss curves


def build(
    stages: int, schedule: str, num_microbatches: int, devices: Sequence[Any], data_shards: int = DATA_SHARDS
) -> tuple[Any, Any, Any]:
    """The step, what creates its state from a key, and the shape of its batch."""
    # 1. Devices: a mesh with an axis for stages, cut along it.
    shape = stages, data_shards, len(devices) // (stages * data_shards)
    mesh = jax.make_mesh(shape, ("stage", "data", "model"), devices=devices)
    tasks = [mm.Task(mesh=submesh, logical_axes=RULES) for submesh in mm.submeshes(mesh, "stage")]

    # 2. Model and optimizer: Flax and Optax as ever.
    model = Decoder(tasks, length=LENGTH)
    warmup = optax.schedules.warmup_constant_schedule(2e-4, 2e-3, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(warmup, weight_decay=0.01))

    def init(key: jax.Array) -> TrainState:
        params = model.init(key, np.zeros((1, LENGTH), np.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        return next_byte_loss(model.apply({"params": params}, tokens), tokens)

    # 3. The step: one line says that the batch goes through in pieces, under which schedule.
    def step(state: TrainState, tokens: jax.Array) -> tuple[jax.Array, TrainState]:
        grad = mm.microbatch(
            jax.value_and_grad(loss_fn), argnum=1, num_microbatches=num_microbatches, schedule=schedule, reduce="mean"
        )
        loss, grads = grad(state.params, tokens)
        return loss, state.apply_gradients(grads=grads)

    step = mm.jit(step, donate_argnums=0)
    return step, init, jax.ShapeDtypeStruct((BATCH, LENGTH), np.int32)


def plan(devices: Sequence[Any]) -> tuple[Any, ...]:
    """For ``python -m manymesh plan examples/train_transformer.py:plan --devices 64``: the step and its arguments."""
    step, init, batch = build(4, "1f1b", 8, devices, max(DATA_SHARDS, len(devices) // 16))  # four heads for "model"
    return step, jax.eval_shape(init, jax.random.key(0)), batch


def train(stages: int, schedule: str, num_microbatches: int, steps: int, timeline: Path, console: Console) -> bool:
    """Trains twice and compares; returns whether all is well."""
    step, init, batch = build(stages, schedule, num_microbatches, jax.devices())

    # 4. Compile on shapes alone, then create the state where the step wants it: no device ever holds all of it.
    key = jax.random.key(0)
    with console.status("compiling"):
        compiled = step.lower(jax.eval_shape(init, key), batch).compile()
        (state_shardings, _), _ = compiled.input_shardings
        state = mm.jit(init, out_shardings=state_shardings)(key)
    initial = mm.fetch(state)  # a copy on the host, for the comparison below; in every process

    console.print(tabulate(state.params, title="Parameters"))
    placement = compiled.program.loops[0].placement if num_microbatches > 1 else tuple(range(stages))
    order = schedules.get(schedule).order(placement, num_microbatches)
    console.print(
        f"\nSchedule {schedule}: {num_microbatches} microbatches on {stages} submeshes (a backward costs 2 forwards)"
    )
    console.print(schedules.picture(order), highlight=False, soft_wrap=True)

    print_cost(compiled, console)

    # 5. Train: as a pipeline, then the same steps in reference mode, which is plain JAX on one device.
    pipeline, state = run(compiled, state, steps, console, "pipeline  ")
    if jax.process_index() != 0:
        return True  # one process compares
    with mm.ignore_transforms():
        reference, _ = run(step, initial, steps, console, "one device")
    well = compare(pipeline, reference, console)

    # 6. Look: one more step, recorded. Of several processes each would record its own.
    if jax.process_count() > 1:
        return well
    with mm.inspect.record() as recording:
        compiled(state, next(batches(1)))
    console.print("\nWhere the time of a step goes")
    console.print(recording.timeline())
    timeline.parent.mkdir(parents=True, exist_ok=True)
    for path in (timeline, timeline.with_suffix(".html")):
        console.print(f"saved {recording.timeline().save(path)}", highlight=False, soft_wrap=True)
    return well


def print_cost(compiled: Any, console: Console) -> None:
    """What one step launches, and what each submesh holds and sends, a line each."""
    report = compiled.report()
    launches = sum(fragment.runs for fragment in report.fragments)
    executables = len({fragment.executable for fragment in report.fragments})
    console.print(f"\nCost of a step: {launches} launches of {executables} executables", highlight=False)
    for i, submesh in enumerate(compiled.program.submeshes):
        devices = submesh.devices.flatten()
        memory = report.memory[devices[0]]
        sends = ", ".join(f"{size(edge.nbytes)} to {edge.target}" for edge in report.edges if edge.source == i)
        console.print(
            f"{i} | devices {devices[0].id}-{devices[-1].id} hold {size(memory.argument_bytes)} each, "
            f"at most {size(memory.peak_bytes)}, and send {sends}",
            highlight=False,
        )
    console.print()


def size(nbytes: int) -> str:
    """``12 B``, ``64.0 KiB``, ``1.5 MiB``."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"


def batches(steps: int) -> Iterator[np.ndarray[Any, Any]]:
    """``int32[BATCH, LENGTH]``: random windows of the text, the same ones on every call."""
    text = np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - LENGTH, BATCH)
        yield text[starts[:, None] + np.arange(LENGTH)].astype(np.int32)


def run(step: Any, state: Any, steps: int, console: Console, name: str) -> tuple[list[float], Any]:
    """Trains; returns the loss before each step, and the state at last."""
    losses: list[float] = []
    columns = (
        TextColumn(f"{name} {{task.description}}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[rate]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        line = progress.add_task("loss  ...  ", total=steps, rate="")
        began = 0.0
        for tokens in batches(steps):
            loss, state = step(state, tokens)
            losses.append(float(loss))
            began = began or time.perf_counter()  # the first step may compile
            rate = BATCH * LENGTH * (len(losses) - 1) / max(time.perf_counter() - began, 1e-9)
            progress.update(line, advance=1, description=f"loss {losses[-1]:.4f}", rate=f"{rate:,.0f} tokens/s")
    return losses, state


def compare(pipeline: list[float], reference: list[float], console: Console) -> bool:
    """Prints both loss curves side by side and the verdict."""
    difference = np.abs(np.subtract(pipeline, reference) / reference)
    table = Table("step", "pipeline", "one device", "difference", title="Loss in nats per byte")
    highest = max(filter(math.isfinite, pipeline + reference), default=1.0)
    for i in sorted({*range(0, len(pipeline), max(1, len(pipeline) // 10)), len(pipeline) - 1}):
        curves = (f"{loss:.6f} {bar(loss / highest)}" for loss in (pipeline[i], reference[i]))
        table.add_row(str(i), *curves, f"{difference[i]:.1e}")
    console.print(table)
    largest = float(np.max(difference))  # not a number if any of them is none
    agree, fell = largest <= TOLERANCE, pipeline[-1] < pipeline[0]
    console.print(f"largest relative difference {largest:.1e}: {'agrees' if agree else f'over {TOLERANCE:.0e}'}")
    console.print(f"loss {pipeline[0]:.3f} -> {pipeline[-1]:.3f}: {'fell' if fell else 'did not fall'}")
    return agree and fell


def bar(fraction: float, width: int = 16) -> str:
    """A bar of at most ``width`` characters."""
    return "█" * round(fraction * width) if math.isfinite(fraction) else ""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(word: str) -> int:
    """A whole number of at least one."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {word!r}")
    return int(word)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the options; a wrong value ends the program with exit code 2."""
    parser = OneLineParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--stages", type=positive, choices=(2, 4), default=2, help="pipeline stages")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="1f1b", help="order of the microbatches")
    parser.add_argument("--num-microbatches", type=positive, default=8, help="pieces of a batch")
    parser.add_argument("--steps", type=positive, default=40, help="training steps")
    parser.add_argument(
        "--timeline", type=Path, default=TIMELINE, help="where a picture of a step goes: .png, .svg or .pdf"
    )
    options = parser.parse_args(argv)
    fitting = [n for n in range(1, BATCH + 1) if BATCH % n == 0 and BATCH // n % DATA_SHARDS == 0]
    if options.num_microbatches not in fitting:
        parser.error(
            f"argument --num-microbatches: {options.num_microbatches} does not cut a batch of {BATCH} sequences into pieces for "
            f"{DATA_SHARDS} data shards; use one of {', '.join(map(str, fitting))}"
        )
    if options.steps < 2:
        parser.error("argument --steps: one step cannot show that the loss falls; use at least 2")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration; returns the exit code."""
    options = parse(argv)
    mm.distributed.initialize()  # one of several processes, where it was launched as one
    console = Console(width=None if sys.stdout.isatty() else 120, quiet=jax.process_index() != 0)
    fine = train(options.stages, options.schedule, options.num_microbatches, options.steps, options.timeline, console)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
