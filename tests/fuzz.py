"""`make fuzz`: the laws on thousands of generated programs; what breaks one is kept as a test.

    python tests/fuzz.py --examples 5000 --jobs 2 --page docs/generated.md

Programs have numbers, drawn one by one. Batches of them run in processes of their own, because JAX keeps what it
compiles, and because the compiler ends the process on some programs: the next process goes on after it. Of programs
that fail alike, the first is made smaller and written to tests/regressions/, which test_laws.py runs. At the end stands
which primitives and constructs were drawn how often, and, with ``--page``, in the documentation. With ``--results``
each batch is written to a file when it is done, and the same command goes on after the batches that are there.

JAX's cache on disk is not used: with it no executable is loaded again for another submesh, which is to be tested too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
REGRESSIONS = HERE / "regressions"
BATCH = 50
TRIES = 40  # to make a failing program smaller


def run_batch(first: int, count: int, simplify: bool, trace: bool) -> None:
    """Runs programs in this process; prints a line of JSON before and after each."""
    sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent), str(HERE)]  # this tree, not an installed one
    import conftest  # noqa: F401  # devices and profiles, before JAX is imported

    import compiling

    compiling.set_up()
    from generated.coverage import constructs
    from generated.draw import drawn
    from generated.laws import check, traced
    from generated.simplify import simplest

    seen: set[str] = set()
    for number in range(first, first + count):
        program = drawn(number)
        print(json.dumps({"begins": number, "program": json.loads(program.to_json())}), flush=True)
        found = {"constructs": sorted(constructs(program))}
        try:
            outcome = traced(program) if trace else check(program)
            found.update(primitives=outcome.primitives, remarks=outcome.remarks)
        except Exception as error:
            kind = _kind(error)
            found.update(error=f"{type(error).__name__}: {error}"[:2000], kind=kind)
            if simplify and kind not in seen:
                seen.add(kind)
                small = simplest(program, lambda p, kind=kind: _breaks(check, p) == kind, TRIES)
                found["program"] = json.loads(small.to_json())
        print(json.dumps({"ended": number, **found}), flush=True)


def _breaks(check, program) -> str | None:
    try:
        check(program)
    except Exception as error:
        return _kind(error)
    return None


def _kind(error: Exception) -> str:
    """What failures of one cause have in common: the class, the words without numbers, the line of this package."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/src/manymesh/" in f.filename]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    words = re.sub(r"\d+|'[^']*'|\[[^\]]*\]|\([^)]*\)|\{[^}]*\}", "_", str(error))
    return f"{type(error).__name__}: {words[:70]} {at}"


class Tally:
    """What came of all programs."""

    def __init__(self) -> None:
        self.ran = 0
        self.broken: dict[str, list[dict]] = {}
        self.primitives: Counter[str] = Counter()
        self.constructs: Counter[str] = Counter()
        self.remarks: Counter[str] = Counter()

    def add(self, found: dict) -> None:
        self.ran += 1
        self.constructs.update(found["constructs"])
        self.primitives.update(found.get("primitives", {}).keys())
        self.remarks.update(found.get("remarks", ()))
        if "error" in found:
            self.broken.setdefault(found["kind"], []).append(found)


def main() -> int:
    """Runs all batches and says how many programs ran, what broke, and what was covered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no batch of 50 after so long")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="number of the first program")
    parser.add_argument("--page", type=Path, help="write the coverage into this page of the documentation")
    parser.add_argument("--keep", type=Path, default=REGRESSIONS, help="where failing programs are written")
    parser.add_argument("--results", type=Path, help="a file of what is done, to stop and go on")
    parser.add_argument("--as-drawn", action="store_true", help="do not make failing programs smaller")
    parser.add_argument("--trace-only", action="store_true", help="coverage of what would be drawn; nothing is checked")
    parser.add_argument("--with", dest="known", default="", help="entries of generated/known.py to draw all the same")
    parser.add_argument("--batch", type=int, nargs=2, metavar=("FIRST", "COUNT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.batch:
        run_batch(*given.batch, not given.as_drawn, given.trace_only)
        return 0
    os.environ["MANYMESH_GENERATED_WITH"] = given.known
    firsts = range(given.seed, given.seed + given.examples, BATCH)
    options = ["--as-drawn"] * given.as_drawn + ["--trace-only"] * given.trace_only
    tally, start = Tally(), time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        ends = given.seed + given.examples
        last = start + 60 * given.minutes
        done = finished(given.results)
        futures = {pool.submit(lambda k=k: done[k]): k for k in firsts if k in done}
        run = functools.partial(in_processes, options=options, latest=last)
        futures |= {pool.submit(run, k, min(BATCH, ends - k)): k for k in firsts if k not in done}
        for k, future in enumerate(concurrent.futures.as_completed(futures)):
            if given.results is not None and futures[future] not in done and future.result():
                with given.results.open("a", encoding="utf-8") as file:
                    print(json.dumps({"first": futures[future], "found": future.result()}), file=file)
            for found in future.result():
                new = found.get("kind") is not None and found["kind"] not in tally.broken
                tally.add(found)
                if new:
                    print(f"broken: {keep(found, given.keep)}: {found['error'][:500]}", flush=True)
            broken = sum(map(len, tally.broken.values()))
            print(f"{k + 1} of {len(firsts)} batches, {tally.ran} programs, {broken} broken", flush=True)
    finish(tally, given.seed, (time.monotonic() - start) / 60, given)
    return 1 if tally.broken else 0


def finished(results: Path | None) -> dict[int, list[dict]]:
    """What an earlier run has written of its batches, by their first programs."""
    if results is None or not results.exists():
        return {}
    batches = map(json.loads, results.read_text("utf-8").splitlines())
    return {batch["first"]: batch["found"] for batch in batches}


def finish(tally: Tally, seed: int, minutes: float, given: argparse.Namespace) -> None:
    """Prints the result and the coverage; writes the page."""
    sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent), str(HERE)]
    import conftest  # noqa: F401

    from generated.coverage import table, write_page

    text = table(tally.primitives, tally.constructs, tally.ran)
    print(text)
    for kind, all_of_it in sorted(tally.broken.items(), key=lambda item: -len(item[1])):
        numbers = ", ".join(str(found.get("seed", found.get("begins"))) for found in all_of_it[:20])
        print(f"{len(all_of_it)} programs ({numbers}): {kind}")
    broken = sum(map(len, tally.broken.values()))
    print(f"Remarks: {dict(tally.remarks)}")
    print(f"{tally.ran} programs ran in {minutes:.1f} minutes from seed {seed}; {broken} broke a law")
    if given.page is not None:
        import jax

        result = "drawn and traced, not run" if given.trace_only else f"{minutes:.0f} minutes, {broken} broke a law"
        write_page(given.page, text, f"JAX {jax.__version__}, programs from number {seed} on: {result}.")


def in_processes(first: int, count: int, options: list[str], latest: float) -> list[dict]:
    """The results of a batch, in one process, or in one more for each that the compiler ended; none after ``latest``."""
    out, last = [], first + count
    if time.monotonic() > latest:
        return out
    while first < last:
        command = [sys.executable, __file__, "--batch", str(first), str(last - first), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
        out += [{"seed": f["ended"], **f} for f in lines if "ended" in f]
        begun = [f for f in lines if "begins" in f]
        if not begun:
            raise RuntimeError(f"no program began: {done.stderr[-2000:]}")
        if "ended" not in lines[-1]:
            reason = next((x for x in done.stderr.splitlines() if "Check failed" in x), done.stderr[-500:])
            kind = f"process ended with {done.returncode}: {re.sub('[0-9]+', '_', reason.split(' ', 3)[-1])[:80]}"
            out.append({"constructs": [], "kind": kind, "error": f"{kind}: {reason}", **begun[-1]})
        first = begun[-1]["begins"] + 1
    return out


def keep(found: dict, folder: Path) -> str:
    """Writes a program that broke a law where the tests find it; returns its name."""
    if "program" not in found:
        return f"program {found.get('seed')}"
    text = json.dumps(found["program"], indent=1) + "\n"
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(text, "utf-8")
    return name


if __name__ == "__main__":
    sys.exit(main())
