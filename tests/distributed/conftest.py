"""The pool of processes that tests of this folder share."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not: pool and programs are imported by bare names

from pool import Pool  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """One worker has all tests of the pool: there is one, and what its processes have compiled is there."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("pool"))


@pytest.fixture(scope="session")
def pool(request):
    """Two processes of four devices each."""
    # Else every worker would start processes, and compile in them.
    if getattr(request.config.option, "loadgroup", False):
        assert any(item.nodeid.endswith("@pool") for item in request.session.items), "pytest-xdist groups nothing"
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """In the background of a script SIGINT is ignored, by the tests and by whatever they start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def script(tmp_path, request):
    """Path of the SCRIPT of a test file."""
    path = tmp_path / "script.py"
    path.write_text(request.module.SCRIPT)
    return str(path)
