"""Other ways to run the same training step as a pipeline of two stages.

    python benchmarks/peers.py [--rounds 15] [--seconds 60] [--torch PYTHON] [--schedule 1F1B]
                              [--only spmd spectrax torch] [--quick] [--json FILE]

SPMD: one program for both devices (``shard_map`` and ``ppermute``), beside ManyMesh in turns, in one process.
torch: ``torch.distributed.pipelining``, one process a stage, each on its own core, and one process alone on one core;
its figure is its own efficiency, half the serial time divided by its time. ``--torch`` names a Python that has torch.
SpectraX: loss and gradients without an optimizer, beside the same with ManyMesh in turns, where it is installed.
A peer that is not installed says so. None is a dependency.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _process import prepare, spread_threads

if __name__ == "__main__":
    prepare(devices=2, quiet=True)

import jax
import numpy as np
from _model import Size
from _ours import WithManyMesh
from _spmd import Spmd
from _timing import alternate, ratio, row, write_rows

TARGET = 1.3
PEERS = ("spmd", "spectrax", "torch")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")


def spmd(size: Size, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of the SPMD pipeline."""
    steps = {"mm": WithManyMesh(size, "1f1b"), "spmd": Spmd(size)}
    losses: dict[str, list[float]] = {who: [] for who in steps}
    runs = {who: lambda who=who: losses[who].append(steps[who]()) for who in steps}
    samples = alternate(runs, rounds, patience=seconds / 4, seconds=seconds)
    np.testing.assert_allclose(losses["mm"], losses["spmd"], rtol=1e-4, err_msg="losses differ")
    found = ratio(samples["spmd"], samples["mm"])
    ours, theirs = (1e3 * min(s.wall for s in samples[who]) for who in ("mm", "spmd"))
    print(f"SPMD pipeline takes {found} of mm 1f1b; best: {theirs:.0f} ms, mm {ours:.0f} ms", flush=True)
    return row(
        "SPMD pipeline", f"{ours:.0f} ms, 1f1b", f"{theirs:.0f} ms SPMD",
        f"{found.median:.2f}x faster ({found.low:.2f} to {found.high:.2f})", f">= {TARGET:.1f}x",
        found.median >= TARGET,
    )  # fmt: skip


def spectrax(size: Size, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of SpectraX."""
    if importlib.util.find_spec("spectrax") is None:
        return _absent("SpectraX 1F1B, gradients")
    try:
        from _spectrax import gradients  # an optional peer

        theirs = gradients(size)
        theirs()
    except Exception as error:  # its own errors are its own; the table goes on
        print(f"SpectraX: {type(error).__name__}: {error}", flush=True)
        return row("SpectraX 1F1B, gradients", "", f"fails: {type(error).__name__}", "", "", None)
    ours = WithManyMesh(size, "1f1b")
    samples = alternate(
        {"mm": ours.without_optimizer, "spectrax": theirs}, rounds, patience=seconds / 4, seconds=seconds
    )
    found = ratio(samples["spectrax"], samples["mm"])
    best = {who: 1e3 * min(s.wall for s in each) for who, each in samples.items()}
    print(f"SpectraX takes {found} of mm; best: {best['spectrax']:.0f} ms, mm {best['mm']:.0f} ms", flush=True)
    return row(
        "SpectraX 1F1B, gradients", f"{best['mm']:.0f} ms, 1f1b", f"{best['spectrax']:.0f} ms SpectraX",
        f"{found.median:.2f}x faster ({found.low:.2f} to {found.high:.2f})", "", None,
    )  # fmt: skip


class TorchRanks:
    """The processes of one torch variant, waiting for work on their own cores."""

    def __init__(self, python: str, schedule: str, world: int, size: Size) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        cores = sorted(os.sched_getaffinity(0))
        worker = str(Path(__file__).with_name("_torch_worker.py"))
        self.ranks = []
        for rank in range(world):
            command = [python, worker, str(rank), str(world), str(port), schedule, json.dumps(dataclasses.asdict(size))]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
            )
            os.sched_setaffinity(process.pid, {cores[rank % len(cores)]})
            self.ranks.append(process)
        for process in self.ranks:
            if self._line(process) != "ready":
                raise RuntimeError(f"torch {schedule} did not start")

    @staticmethod
    def _line(process: Any) -> str:
        return process.stdout.readline().strip()

    def step(self) -> tuple[float, float]:
        """Seconds and loss of one step."""
        for process in self.ranks:
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [json.loads(self._line(process)) for process in self.ranks]
        return max(seconds for seconds, _ in answers), max(loss for _, loss in answers)

    def close(self) -> None:
        """Ends the processes."""
        for process in self.ranks:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def torch(size: Size, python: str, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """The rows of torch."""
    if subprocess.run([python, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode:
        return [_absent("torch pipelines")]
    variants = {"serial": TorchRanks(python, "1F1B", 1, size)}
    seconds: dict[str, list[float]] = {}
    try:
        for name in names:
            variants[name] = TorchRanks(python, name, 2, size)
        for name in list(variants) * rounds:
            taken, loss = variants[name].step()
            assert np.isfinite(loss), f"torch {name}: loss {loss}"
            seconds.setdefault(name, []).append(taken)
    finally:
        for ranks in variants.values():
            ranks.close()
    result = []
    alone = seconds.pop("serial")
    for name, each in seconds.items():
        efficiency = sorted(s / 2 / t for s, t in zip(alone, each, strict=True))
        low, middle, high = (efficiency[int(q * (rounds - 1))] for q in (0.25, 0.5, 0.75))
        print(f"torch {name:16} {1e3 * statistics.median(each):.0f} ms, serial {1e3 * statistics.median(alone):.0f} ms; "
              f"efficiency {middle:.2f} ({low:.2f} to {high:.2f}, {rounds} rounds)", flush=True)  # fmt: skip
        beside = f"{1e3 * statistics.median(each):.0f} ms torch, {1e3 * statistics.median(alone):.0f} ms serial"
        result.append(row(f"torch {name}", "", beside, f"{middle:.2f} its efficiency", "", None))
    return result


def _absent(what: str) -> dict[str, Any]:
    print(f"{what}: not installed")
    return row(what, "", "not installed", "", "", None)


def main() -> None:
    """Reads the command line and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60, help="about the time for each peer")
    parser.add_argument("--torch", default=os.environ.get("MANYMESH_BENCH_TORCH", sys.executable), metavar="PYTHON")
    parser.add_argument("--schedule", nargs="+", default=SCHEDULES, help="torch's, named as torch does")
    parser.add_argument("--only", nargs="+", default=PEERS, choices=PEERS)
    parser.add_argument("--quick", action="store_true", help="a small problem, a few rounds")
    parser.add_argument("--json", help="write the rows of the table to this file")
    a = parser.parse_args()
    jax.devices()
    spread_threads()
    size = Size(4, 64, 128, 64, 4) if a.quick else Size()
    print(f"{size}, float32, JAX {jax.__version__}, Python {sys.version.split()[0]}")
    rows = [spmd(size, a.rounds, a.seconds)] if "spmd" in a.only else []
    rows += [spectrax(size, a.rounds, a.seconds)] if "spectrax" in a.only else []
    write_rows(a.json, rows + (torch(size, a.torch, a.schedule, min(a.rounds, 9)) if "torch" in a.only else []))


if __name__ == "__main__":
    main()
