"""Switches off each pass in turn, and shows which tests of its own file then fail.

    python tests/switch_off.py [--quick] [PASS ...]

A pass that nobody misses is not tested: the exit status is 1 if there is one. Each pass is replaced by one that changes
nothing, in the list that `mm.jit` uses too. With ``--quick`` one test that fails is enough, and nobody looks whether the tests
pass with the pass on: that is what the tests do themselves.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]

import conftest  # noqa: E402, F401  (sets up JAX)
import pytest  # noqa: E402

from manymesh._passes import _build, _run  # noqa: E402


class Switch:
    """A pytest plugin: one pass changes nothing; it notes the tests that fail."""

    def __init__(self, name):
        self.name, self.passed, self.failed = name, [], []

    def __enter__(self):
        self.before = _run.PASSES, dict(_run.PROVIDERS)
        off = lambda p: replace(p, run=lambda flat: flat) if p.name == self.name else p  # noqa: E731
        _run.PASSES = _build.PASSES = tuple(map(off, _run.PASSES))
        _run.PROVIDERS.update({fact: off(p) for fact, p in _run.PROVIDERS.items()})
        return self

    def __exit__(self, *_):
        passes, providers = self.before
        _run.PASSES = _build.PASSES = passes
        _run.PROVIDERS.update(providers)

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            (self.failed if report.failed else self.passed).append(report.nodeid.rpartition("::")[2])


def names():
    """Every pass, those that make facts hold included."""
    return [p.name for p in (*_run.PROVIDERS.values(), *_run.PASSES)]


def run(name, *, off=True, quick=False):
    """Runs the test file of a pass, with the pass switched off or not; up to the first failure if ``quick``."""
    file = ROOT / "tests" / "passes" / f"test_{name}.py"
    assert file.exists(), f"{name} has no test file {file}"
    switch = Switch(name if off else "")
    with switch:
        options = ["-p", "no:cacheprovider", "-p", "no:terminal", "--assert=plain", *["-x"] * quick]
        pytest.main([str(file), f"--rootdir={ROOT}", *options], plugins=[switch])
    return switch


def main(chosen):
    """Prints what fails without each pass. Returns the passes that nobody misses."""
    quick, chosen = "--quick" in chosen, [name for name in chosen if name != "--quick"]
    unmissed = []
    for name in chosen or names():
        assert quick or not run(name, off=False).failed, f"the tests of {name} fail with the pass on"
        switch = run(name, quick=quick)
        print(f"{name}: {len(switch.failed)} of {len(switch.failed) + len(switch.passed)} fail: {switch.failed}")
        if not switch.failed:
            unmissed.append(name)
    for name in unmissed:
        print(f"nobody misses {name}")
    return unmissed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
