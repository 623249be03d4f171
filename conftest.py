"""Sets up JAX and Hypothesis for the tests and for the doctests in src.

It stands at the root, above both trees, so that it is read before anything imports JAX.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import hypothesis
import pytest

NUM_DEVICES = 8

# JAX reads both when it is imported or starts its backend. Values that are already set win, so that
# the same tests can run on another platform (`JAX_PLATFORMS=cuda make test`).
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}".strip()
    )

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says above the closing line what the tests ran on."""
    terminalreporter.write_line(f"Python {platform.python_version()}, JAX {version('jax')}")
