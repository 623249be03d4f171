"""What happens to one process of three, how long each of the others takes to end, and what it says.

    python benchmarks/failures.py [--repetitions 10] [--only kill] [--json FILE]

The failures are those of tests/distributed/failing.py, in the third call of a step. Limits: three seconds of silence, half
a second for one that left, eight seconds to start. Prints the table of docs/processes.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _process import prepare
from _timing import row, write_rows

if __name__ == "__main__":
    prepare(devices=1, quiet=True)

from manymesh._distributed._launch import run_processes

FAILING = Path(__file__).resolve().parents[1] / "tests" / "distributed" / "failing.py"
PROCESSES, GRACE = 3, 5.0
SILENCE, LEFT, START = 3.0, 0.5, 8.0


class Case(NamedTuple):
    """A failure.

    Attributes:
      what: in words.
      limit: seconds that the survivors have been given.
    """

    what: str
    limit: float


CASES = {
    "kill": Case("killed by `SIGKILL`", 0.0),
    "raise": Case("an exception", 0.0),
    "stop": Case("stopped by `SIGSTOP`", SILENCE),
    "leaves early": Case("its script ends early", LEFT),
    "sleeps": Case("sleeps", SILENCE),
    "other shape": Case("a batch of another shape", 0.0),
    "never starts": Case("never starts", START),
    "lost coordinator": Case("process 0, the coordinator without `launch`, is killed", 0.0),
    "lost launcher": Case("`launch` itself is killed", 0.0),
}


class Survivor(NamedTuple):
    """One that was not what failed.

    Attributes:
      process: its number.
      seconds: from the failure, or from its own start, until it said why it ends; until it has ended, if it said nothing.
      words: what it said.
    """

    process: int
    seconds: float
    words: str


class Stamped(io.StringIO):
    """Text in which each line knows when it came."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.lines.append((time.time(), text))
        return super().write(text)


def survivors(case: str) -> list[Survivor]:
    """What those do that are left."""
    if case == "lost coordinator":
        return _lost_coordinator()
    if case == "lost launcher":
        return _lost_launcher()
    output = Stamped()
    limit = START if case == "never starts" else SILENCE
    run_processes([sys.executable, str(FAILING), case, str(limit)], PROCESSES, 1, output=output, timeout=120)
    found = []
    for process in (0, 2):
        said = [(at, line[4:].strip()) for at, line in output.lines if line.startswith(f"[{process}] manymesh: ")]
        assert said, f"{case}: process {process} did not say why it ends\n{output.getvalue()}"
        began = rf"\[{process}\] pid \d+ starts" if case == "never starts" else r"\[1\] fails"
        since = float(re.search(rf"{began} at ([\d.]+)", output.getvalue())[1])
        found.append(Survivor(process, said[0][0] - since, said[0][1]))
    return found


def _lost_coordinator() -> list[Survivor]:
    """Processes that nobody launched, as on several hosts: process 0 hosts the service."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [sys.executable, str(FAILING), "lost coordinator", str(SILENCE), address, str(PROCESSES)]
    children = [
        subprocess.Popen([*words, str(p)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for p in range(PROCESSES)
    ]
    try:
        children[0].wait(120)
        failed, found = time.time(), {}
        while len(found) < PROCESSES - 1 and time.time() - failed < 60:
            for p, child in enumerate(children[1:], 1):
                if p not in found and child.poll() is not None:
                    found[p] = time.time() - failed
            time.sleep(0.01)
    finally:
        for child in children:
            child.kill()
    texts = [child.communicate()[0] for child in children]
    return [Survivor(p, found.get(p, float("inf")), _first_words(texts[p], children[p].returncode)) for p in (1, 2)]


def _first_words(text: str, code: int) -> str:
    said = re.search(r"manymesh: .*", text)
    if said:
        return said[0]
    jax = re.search(r"(Terminating process because|Polled an error|UNAVAILABLE)[^\n]*", text)
    return f"exit code {code}: {jax[0][:100] if jax else 'nothing'}"


def _lost_launcher() -> list[Survivor]:
    """The service is gone, and nobody reads what they print."""
    words = ["launch", "-n", str(PROCESSES), "--devices-per-process", "1", str(FAILING), "lost launcher", str(SILENCE)]
    launch = subprocess.Popen([sys.executable, "-m", "manymesh", *words], stdout=subprocess.PIPE, text=True)
    pids: dict[int, int] = {}
    try:
        ready = 0
        while ready < PROCESSES:
            line = launch.stdout.readline()
            assert line, "launch ended"
            if started := re.match(r"\[(\d)\] pid (\d+) starts", line):
                pids[int(started[1])] = int(started[2])
            ready += "] fails at" in line
        launch.send_signal(signal.SIGKILL)
        launch.wait()
        failed, found = time.time(), {}
        while len(found) < PROCESSES and time.time() - failed < 60:
            found |= {p: time.time() - failed for p, pid in pids.items() if p not in found and _gone(pid)}
            time.sleep(0.01)
    finally:
        launch.kill()
        launch.wait()
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return [Survivor(p, found.get(p, float("inf")), "nobody reads it") for p in pids]


def _gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has asked for yet has a line of its own, with a Z."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def in_words(case: str, rounds: Sequence[Sequence[Survivor]]) -> str:
    """A row of the table in the documentation."""
    numbers = sorted({survivor.process for found in rounds for survivor in found})
    each = []
    for p in numbers:
        times = [s.seconds for found in rounds for s in found if s.process == p]
        each.append(f"{p}: {statistics.median(times):.2f} ({max(times):.2f})")
    what, limit = CASES[case]
    said = Counter(_in_short(survivor.words) for found in rounds for survivor in found)
    (words, _), *others = said.most_common()
    spoken = f"`{words}`" + "".join(f", or `{other}` ({times} of {said.total()})" for other, times in others)
    return f"| {what} | {f'{limit:g} s' if limit else 'at once'} | {'; '.join(each)} | {len(rounds)} | {spoken} |"


def _in_short(words: str) -> str:
    """What happened, without what to do about it and how far everybody was."""
    return words.removeprefix("manymesh: ").partition(";")[0].rstrip(".")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--only", choices=tuple(CASES), action="append")
    parser.add_argument("--json")
    given = parser.parse_args()
    rows = []
    print("| what happens | limit | seconds of each survivor: median (longest) | times | what they say |")
    print("|---|---|---|---|---|")
    for case in given.only or CASES:
        rounds = [survivors(case) for _ in range(given.repetitions)]
        print(in_words(case, rounds), flush=True)
        times = [s.seconds for found in rounds for s in found]
        worst, limit = max(times), CASES[case].limit
        rows.append(
            row(
                f"process 1 of {PROCESSES}: {case}", f"{statistics.median(times):.2f} s, {len(rounds)} times",
                f"limit {limit:g} s", f"at most {worst:.2f} s: {rounds[0][0].words}", f"<= {limit + GRACE:g} s",
                worst <= limit + GRACE,
            )
        )  # fmt: skip
    write_rows(given.json, rows)


if __name__ == "__main__":
    main()
