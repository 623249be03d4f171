"""Sets up JAX and Hypothesis for the tests and for the doctests in src.

It stands at the root, above both trees, so that it is read before anything imports JAX.
"""

from __future__ import annotations

import gc
import importlib
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis
import pytest

NUM_DEVICES = 8

os.environ.pop("COLUMNS", None)  # what prints itself would be as wide as the terminal of whoever runs the tests

# JAX reads both when it is imported or starts its backend. Values that are already set win, so that
# the same tests can run on another platform (`JAX_PLATFORMS=cuda make test`).
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What JAX does for each program and tests do not need: keys for a cache on disk, even where there is none, and the frames
# of Python above the line that an operation comes from.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# NumPy multiplies small matrices; its threads would wait in a busy loop.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# XLA compiles most of the time that the tests take. These settings concern the code of a kernel only: how a program
# is partitioned, what it aliases and which collectives it holds is decided before. With OPTIMIZED=1 XLA compiles as
# for users; CI does so on the second pair of Python and JAX.
CHEAP_COMPILATION = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):
    CHEAP_COMPILATION.append("--xla_cpu_use_fusion_emitters=false")  # saves the most; gone from newer XLA
_flags = [f"--xla_force_host_platform_device_count={NUM_DEVICES}"]
if not os.environ.get("OPTIMIZED"):
    _flags += CHEAP_COMPILATION
_given = os.environ.get("XLA_FLAGS", "").split()
_names = {flag.partition("=")[0] for flag in _given}
os.environ["XLA_FLAGS"] = " ".join([*_given, *(flag for flag in _flags if flag.partition("=")[0] not in _names)])

# One example may compile several programs: a deadline or a speed check would fail on the first one.
_SLOW_EXAMPLES = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
# `ci` always draws the same examples, so that a red build comes from the change under test.
hypothesis.settings.register_profile(
    "ci",
    max_examples=10,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=_SLOW_EXAMPLES,
    # Shrinking a program compiles hundreds of others; a failing example is small enough to read as it is.
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
# For a second pair of Python and JAX, after `ci` has run on the first.
hypothesis.settings.register_profile("brief", hypothesis.settings.get_profile("ci"), max_examples=3)
hypothesis.settings.load_profile("ci")  # `--hypothesis-profile` is read later and wins


# Tests that take long, and run no branch of the package that the others do not: `tests/pick_long.py` picks them.
LONG = Path(__file__).parent / "tests" / "long.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make test` runs, and not `make test-all`."""
    parser.addoption("--quick", action="store_true", help="leave out the tests that tests/long.txt lists")


def pytest_configure(config: pytest.Config) -> None:
    """What XLA has compiled is kept for the next run, unless pytest keeps nothing."""
    cache = getattr(config, "cache", None)
    if cache is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    folder = cache.mkdir("executables")
    os.environ.setdefault("MANYMESH_TESTS_EXECUTABLES", str(folder))
    week = 7 * 24 * 3600
    for path in folder.glob("*/*"):
        if path.stat().st_mtime < time.time() - week:  # no test has used it since
            path.unlink(missing_ok=True)


def pytest_collection_finish() -> None:
    """Where tests were found that use JAX, it compiles less, and what it keeps for good is seldom looked through."""
    if "jax" in sys.modules:
        gc.set_threshold(5000, 20, 50)
        importlib.import_module("compiling").set_up()


# Of the cases of a test that has many a brief run has one in so many.
SAMPLED, MANY = 3, 4


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a second pair of Python and JAX every test runs, and of those with many cases some; of a quick run see `LONG`."""
    kept = set(items)
    if config.getoption("--hypothesis-profile") == "brief":
        cases: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            cases[item.nodeid.partition("[")[0]].append(item)
        kept &= {item for found in cases.values() for item in (found if len(found) < MANY else found[::SAMPLED])}
    if config.getoption("--quick"):
        long = set(LONG.read_text(encoding="utf-8").splitlines())
        kept = {item for item in kept if item.get_closest_marker("quick") or long.isdisjoint(_names(item))}
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def _names(item: pytest.Item) -> tuple[str, str]:
    """A test and its function as `LONG` has them: without the group that pytest-xdist adds."""
    name = f"{item.location[0]}::{item.name}"
    return name, name.partition("[")[0]


# Files whose tests have little in common, and take long.
APART = ("tests/test_laws.py",)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker has all tests of a file, which mostly compile the same, unless they belong to another group."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Files(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group: str = super()._split_scope(nodeid)
            return group if group != nodeid or nodeid.startswith(APART) else nodeid.partition("::")[0]

    return Files(config, log)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run have, and the processes that they start."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What examples and the processes that tests start make in temporary folders goes with those of pytest."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("t"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Collects what is garbage, whose finalizers pytest still hears, and puts the rest aside.

    Else pytest and Python would each look through all that is left, twice.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says above the closing line what the tests ran on."""
    terminalreporter.write_line(f"Python {platform.python_version()}, JAX {version('jax')}")
    if terminalreporter.config.getoption("--quick"):
        terminalreporter.write_line("without the tests that tests/long.txt lists, which make test-all runs too")
