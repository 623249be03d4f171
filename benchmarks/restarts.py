"""A long run in several processes of which somebody kills one every now and then, beside one that nobody disturbs.

    python benchmarks/restarts.py [--steps 200] [--processes 4] [--every 20] [--seed 0] [--json FILE]

Runs examples/resume_training.py under `launch` twice. In the second run a random process is killed by SIGKILL, at a random
moment of about every 20 steps; all are started again and go on from the last complete checkpoint. At last the parameters
have to be equal bit by bit, and the steps that led to them have to have seen each batch once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _process import prepare
from _timing import row, write_rows

if __name__ == "__main__":
    prepare(devices=1)

from manymesh._distributed._launch import run_processes
from manymesh._distributed._restarts import Restarts

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "resume_training.py"
# The example in a process that says its number first, so that somebody can kill it.
_START = """
import os, runpy, sys
print(f"pid {os.getpid()} of attempt {os.environ['MANYMESH_RESTARTS']}", flush=True)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_PID = re.compile(r"\[\d+\] pid (\d+) of attempt (\d+)")


@dataclass(frozen=True)
class Run:
    """What came of a run.

    Attributes:
      code: exit code of `launch`.
      seconds: how long it took.
      kills: processes that were killed.
      restarts: how often all were started again.
      batches: which batch each step saw that led to the last state.
      repeated: steps that were done again because they were lost.
      params: the parameters at last.
      output: all lines.
    """

    code: int
    seconds: float
    kills: int
    restarts: int
    batches: tuple[int, ...]
    repeated: int
    params: dict[str, np.ndarray]
    output: str


class Killer(threading.Thread):
    """Kills a random process at a random moment after each of some steps.

    Args:
      history: the file in which the run notes its steps.
      output: what the run prints.
      after: the steps.
      draw: where chance comes from.
    """

    def __init__(self, history: Path, output: io.StringIO, after: list[int], draw: random.Random) -> None:
        super().__init__(daemon=True)
        self.history, self.output, self.after, self.draw = history, output, after, draw
        self.kills, self.over = 0, threading.Event()

    def run(self) -> None:
        """Until every step has had its turn, or the run is over."""
        for step in self.after:
            while not self.over.is_set() and self._reached() < step:
                time.sleep(0.005)
            time.sleep(self.draw.uniform(0, 0.05))  # somewhere in a step, or in the checkpoint after it
            if self.over.is_set():
                return
            found = [(int(pid), int(attempt)) for pid, attempt in _PID.findall(self.output.getvalue())]
            latest = max(attempt for _, attempt in found)
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.draw.choice([pid for pid, attempt in found if attempt == latest]), signal.SIGKILL)
                self.kills += 1
            self._wait_for(latest + 1)

    def _reached(self) -> int:
        lines = self.history.read_text().splitlines() if self.history.exists() else []
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0

    def _wait_for(self, attempt: int) -> None:
        while not self.over.is_set() and f"attempt {attempt}:" not in self.output.getvalue():
            time.sleep(0.01)


def run(steps: int, processes: int, every: int, kills: list[int], seed: int = 0, timeout: float = 500) -> Run:
    """Trains in several processes.

    Args:
      steps: how many steps in all.
      processes: how many, each with one device.
      every: steps from one checkpoint to the next.
      kills: after which steps somebody kills one of them.
      seed: of chance.
      timeout: seconds after which all are ended.
    """
    with tempfile.TemporaryDirectory(prefix="manymesh-restarts-") as folder:
        output = io.StringIO()
        killer = Killer(Path(folder, "history.jsonl"), output, kills, random.Random(seed))
        killer.start()
        start = time.monotonic()
        words = [sys.executable, "-c", _START, str(EXAMPLE), "--directory", folder]
        try:
            code = run_processes(
                [*words, "--steps", str(steps), "--every", str(every)], processes, 1, output=output, timeout=timeout,
                more={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}, restarts=Restarts(len(kills)),
            )  # fmt: skip
        finally:
            killer.over.set()
            killer.join()
        seconds = time.monotonic() - start
        if code:
            return Run(code, seconds, killer.kills, 0, (), 0, {}, output.getvalue())
        lines = [json.loads(line) for line in Path(folder, "history.jsonl").read_text().splitlines()]
        # A step that was done again replaces what was lost, as the state that it began with did.
        survived = {line["step"]: line["batch"] for line in lines}
        with np.load(Path(folder, "params.npz")) as saved:
            params = dict(saved)
        return Run(
            code, seconds, killer.kills, output.getvalue().count(" started again; "),
            tuple(survived[step] for step in sorted(survived)), len(lines) - len(survived), params, output.getvalue(),
        )  # fmt: skip


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether all arrays have the same bits."""
    return one.keys() == other.keys() and all(one[k].tobytes() == other[k].tobytes() for k in one)


def wrong_batches(found: Run, steps: int) -> tuple[int, int]:
    """How many batches were skipped, and how many were seen more than once."""
    seen = Counter(found.batches)
    return len(set(range(steps)) - set(seen)), sum(count > 1 for count in seen.values())


def main() -> int:
    """Prints what came of it; gives 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--every", type=int, default=20, help="steps from one kill to the next, about")
    parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print what the processes print")
    parser.add_argument("--json")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    near: Callable[[int], int] = lambda step: step + draw.randint(-given.every // 4, given.every // 4)  # noqa: E731
    kills = [near(step) for step in range(given.every, given.steps, given.every)]
    calm = run(given.steps, given.processes, given.save_every, [])
    shaken = run(given.steps, given.processes, given.save_every, kills, given.seed)
    if given.show or calm.code or shaken.code:
        print(calm.output + shaken.output)
    equal = same_bits(calm.params, shaken.params)
    skipped, twice = wrong_batches(shaken, given.steps)
    well = not calm.code and not shaken.code and equal and not skipped and not twice and shaken.restarts == shaken.kills
    words = (
        f"{shaken.kills} kills, {shaken.restarts} restarts, {shaken.repeated} steps done again, bits "
        f"{'equal' if equal else 'DIFFER'}, {skipped} batches skipped, {twice} seen twice, exit code {shaken.code}"
    )
    result = row(
        f"{given.steps} steps in {given.processes} processes, killed about every {given.every}",
        f"{shaken.seconds:.0f} s", f"undisturbed {calm.seconds:.0f} s", words, "bits equal, 0, 0", well,
    )  # fmt: skip
    print(f"{result['what']}: {result['ours']}, {result['theirs']}; {words}")
    write_rows(given.json, [result])
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
