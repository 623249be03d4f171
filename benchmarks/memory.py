"""How many activations each stage really keeps, beside what the simulator says.

    python benchmarks/memory.py [--stages 2 4] [--microbatches 8] [--schedule gpipe 1f1b zero-bubble-h1] [--json FILE]

An activation is what the forward pass of one stage and one microbatch leaves for its backward pass. Its arrays are
watched while a real step runs: after each instruction it is counted as live if one of them still is. The simulator
counts from the start of a forward to the end of the backward that uses it up, the weight gradient where that is apart.
Beside the count stands the peak of the live bytes of these arrays.

Then what one layer of a transformer keeps for its backward pass, beside what ``jax.vjp`` keeps of the same layer, which
is what a pipeline written by hand holds for every microbatch in flight. Weights and the layer's input do not count.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

from _process import prepare

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

if __name__ == "__main__":
    prepare(devices=4)

import jax
import jax.numpy as jnp
from _hand import SCHEDULES
from _model import Size
from _ours import WithManyMesh
from _timing import row, write_rows
from transformer import Block

import manymesh as mm
from manymesh._plan._instructions import Run
from manymesh._runtime._observe import Observer
from manymesh.schedules import simulate


class Watch(Observer):
    """Counts the activations that live while a step runs.

    Attributes:
      peak: submesh -> most activations at once.
      peak_bytes: submesh -> most bytes of their arrays at once.
    """

    def __init__(self, compiled: Any) -> None:
        self.peak: dict[int, int] = defaultdict(int)
        self.peak_bytes: dict[int, int] = defaultdict(int)
        self._live: dict[tuple[int, int | None], list[tuple[weakref.ref[Any], int]]] = {}
        self._program = compiled.program
        self._read_back = {v for f in self._program.fragments if f.loop is not None and f.kind != "F" for v in f.invars}

    def end(self, position: int, instruction: Any, outputs: Any) -> None:
        """Takes the count: what the instruction before freed is gone, and what this one reads is still held."""
        fragment = self._program.fragments[instruction.fragment] if isinstance(instruction, Run) else None
        if fragment is not None and fragment.loop is not None and fragment.kind == "F":
            kept = [x for v, x in zip(fragment.outvars, outputs, strict=True) if v in self._read_back]
            self._live[fragment.submesh, instruction.microbatch] = [(weakref.ref(x), x.nbytes) for x in kept]
        self._count()

    def _count(self) -> None:
        live: dict[int, int] = defaultdict(int)
        nbytes: dict[int, int] = defaultdict(int)
        for (submesh, _), arrays in self._live.items():
            there = [n for ref, n in arrays if (x := ref()) is not None and not x.is_deleted()]
            live[submesh] += bool(there)
            nbytes[submesh] += sum(there)
        for s in live:
            self.peak[s] = max(self.peak[s], live[s])
            self.peak_bytes[s] = max(self.peak_bytes[s], nbytes[s])


def measure(schedule: str, stages: int, count: int) -> dict[str, Any]:
    """A row of the table."""
    size = Size(blocks=2 * stages, width=64, hidden=256, batch=32 * count, microbatches=count, stages=stages)
    step = WithManyMesh(size, schedule)
    step()
    (compiled,) = step.step._compiled.values()
    watch = Watch(compiled)
    jax.block_until_ready(compiled.call_flat(jax.tree.leaves((step.state, step.batch)), watch))
    found = tuple(watch.peak[s] for s in range(stages))
    expected = simulate(schedule, stages, count).live_activations
    kilobytes = ", ".join(f"{watch.peak_bytes[s] / 1e3:.0f}" for s in range(stages))
    print(f"{schedule:14} {stages} stages, {count} microbatches: {found} live, simulator {expected}; {kilobytes} kB")
    return row(
        f"live activations, {schedule}, {stages} stages",
        ", ".join(map(str, found)),
        ", ".join(map(str, expected)) + " simulated",
        "equal" if found == expected else "different",
        "equal",
        found == expected,
    )


def kept_by_a_layer() -> dict[str, Any]:
    """The row for a transformer's layer."""
    block, x = Block(heads=4), jnp.ones((8, 64, 128))
    params = jax.jit(block.init)(jax.random.key(0), x)
    given = {id(v) for v in jax.tree.leaves((params, x))}
    _, backward = jax.vjp(block.apply, params, x)
    by_hand = sum(v.nbytes for v in jax.tree.leaves(backward) if id(v) not in given)
    layers = [mm.task(block.apply, f"layer_{k}", devices=[k]) for k in range(3)]

    def loss(weights: Any, x: Any) -> Any:
        for layer, w in zip(layers, weights, strict=True):
            x = layer(w, x)
        return jnp.mean(x**2)

    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, schedule="1f1b")
    program = mm.jit(grad).lower([params] * 3, jnp.concatenate([x, x])).program
    forward, backward = (next(f for f in program.fragments if f.name == name) for name in ("layer_1", "layer_1_bwd"))
    ours = sum(v.aval.size * v.aval.dtype.itemsize for v in set(forward.outvars) & set(backward.invars))
    print(f"a layer of a transformer keeps {ours / 1e6:.2f} MB, by jax.vjp {by_hand / 1e6:.2f} MB")
    return row(
        "kept by a transformer layer", f"{ours / 1e6:.2f} MB", f"{by_hand / 1e6:.2f} MB jax.vjp",
        f"{ours / by_hand:.2f}", "", None,
    )  # fmt: skip


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], choices=[2, 3, 4])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    print(f"JAX {jax.__version__}, Python {sys.version.split()[0]}")
    rows = [measure(s, n, a.microbatches) for n in a.stages for s in a.schedule]
    write_rows(a.json, [*rows, kept_by_a_layer()])


if __name__ == "__main__":
    main()
