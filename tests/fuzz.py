"""`make fuzz`: the laws on thousands of generated programs; what breaks one is kept as a test.

    python tests/fuzz.py --examples 5000 --jobs 2

Each batch of examples runs in a process of its own, because JAX keeps what it compiles. A program that
breaks a law is written, as small as Hypothesis got it, to tests/regressions/, which test_laws.py runs.

Nearly all the time goes into compiling, and what is compiled runs on a few numbers once. So XLA generates
code without optimizing it; test_laws.py runs its programs with XLA as users have it. JAX's cache on disk is
not used: with it no executable is loaded again for another submesh, which is to be tested too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
REGRESSIONS = HERE / "regressions"
BATCH = 100
# They concern the code of a kernel only: how a program is partitioned over devices is decided before.
CHEAP_COMPILATION = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_use_fusion_emitters=false",  # saves the most; gone from the newest XLA
)


def run_batch(first_seed: int, examples: int) -> None:
    """Runs one batch in this process and prints what came of it as one line of JSON."""
    sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent), str(HERE)]  # this tree, not an installed one
    import conftest  # noqa: F401  # devices and profiles, before JAX is imported
    from hypothesis import Phase, given, seed, settings

    from programs import graphs
    from test_laws import COUNTS, REDUCTIONS, check_laws

    ran, broken = 0, {}

    @seed(first_seed)
    @settings(max_examples=examples, database=None, derandomize=False, phases=[Phase.generate, Phase.shrink])
    @given(graph=graphs(), microbatches=COUNTS, reduce=REDUCTIONS)
    def check(graph, microbatches, reduce):
        nonlocal ran
        ran += not broken  # what Hypothesis tries in order to make a broken program smaller is no new example
        try:
            check_laws(graph, microbatches, reduce)
        except Exception as error:
            case = {"graph": json.loads(graph.to_json()), "microbatches": microbatches, "reduce": reduce}
            broken.update(case=case, error=f"{type(error).__name__}: {error}"[:2000])
            raise

    try:
        check()
    except Exception as error:
        broken.setdefault("error", repr(error))
    print(json.dumps({"ran": ran, **broken}))


def main() -> int:
    """Runs all batches and says how many examples ran and which were kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="of the first batch")
    parser.add_argument("--batch", type=int, nargs=2, metavar=("SEED", "EXAMPLES"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.batch:
        run_batch(*given.batch)
        return 0
    sizes = [min(BATCH, given.examples - done) for done in range(0, given.examples, BATCH)]
    ran, kept, start = 0, [], time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        environment = cheap_environment()
        print(f"XLA_FLAGS={environment['XLA_FLAGS']}", flush=True)
        futures = [pool.submit(in_a_process, given.seed + k, size, environment) for k, size in enumerate(sizes)]
        for k, future in enumerate(concurrent.futures.as_completed(futures)):
            result = future.result()
            ran += result["ran"]
            if "error" in result:
                kept.append(keep(result))
                print(f"broken: {kept[-1]}: {result['error']}", flush=True)
            print(f"{k + 1} of {len(sizes)} batches, {ran} examples, {len(kept)} broken", flush=True)
    minutes = (time.monotonic() - start) / 60
    print(f"{ran} examples ran in {minutes:.1f} minutes from seed {given.seed}; {len(kept)} broke a law")
    return 1 if kept else 0


def cheap_environment() -> dict[str, str]:
    """This process's environment with what makes compilation cheap; flags that are already set win."""
    flags = [flag for flag in CHEAP_COMPILATION if is_known(flag)]
    return {**os.environ, "XLA_FLAGS": " ".join([*flags, os.environ.get("XLA_FLAGS", "")]).strip()}


def is_known(flag: str) -> bool:
    """Whether XLA has a flag. It ends the process where it does not, so another process asks."""
    environment = {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


def in_a_process(seed: int, examples: int, environment: dict[str, str]) -> dict:
    """The result of a batch; one that died is a failure too."""
    command = [sys.executable, __file__, "--batch", str(seed), str(examples)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"ran": 0, "error": f"the process of seed {seed} ended with {done.returncode}: {done.stderr[-2000:]}"}


def keep(result: dict) -> str:
    """Writes a program that broke a law where the tests find it; returns its name."""
    if "case" not in result:
        return "no program"
    text = json.dumps(result["case"], indent=1) + "\n"
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    REGRESSIONS.mkdir(exist_ok=True)
    (REGRESSIONS / f"{name}.json").write_text(text, "utf-8")
    return name


if __name__ == "__main__":
    sys.exit(main())
