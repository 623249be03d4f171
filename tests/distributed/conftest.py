"""The pool of processes that tests of this folder share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not: pool and programs are imported by bare names

from pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool():
    """Two processes of four devices each."""
    made = Pool()
    yield made
    made.close()
