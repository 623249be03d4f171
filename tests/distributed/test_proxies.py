"""Runs where the environment names a proxy: processes of one machine find each other without it."""

import io
import os
import subprocess
import sys

import pytest

from manymesh._distributed._launch import run_processes
from manymesh._distributed._proxies import past_proxies, words_on_proxies

pytestmark = pytest.mark.once

NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize("proxy", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_launch_goes_by_none(monkeypatch, proxy):
    """Whatever is excepted already, also in words that gRPC does not understand; others find their variables as they were."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(proxy, NOWHERE)
    monkeypatch.setenv("no_proxy", "*")
    output = io.StringIO()
    program = "import os, manymesh as mm; mm.distributed.initialize(start_timeout=10); print(os.environ['no_proxy'])"
    assert run_processes([sys.executable, "-c", program], 2, 1, output=output, timeout=100) == 0, output.getvalue()
    assert sum(output.getvalue().count(f"[{p}] *\n") for p in range(2)) == 2, output.getvalue()


def test_what_is_excepted_already():
    """Stays so; without a proxy nothing is."""
    assert past_proxies({"https_proxy": NOWHERE}, "a") == {"no_grpc_proxy": "a"}
    assert past_proxies({"https_proxy": NOWHERE, "no_proxy": "b,c"}, "a") == {"no_grpc_proxy": "b,c,a"}
    assert past_proxies({"http_proxy": NOWHERE, "no_grpc_proxy": "d", "no_proxy": "b,c"}, "a") == {
        "no_grpc_proxy": "d,a"
    }
    assert past_proxies({"no_grpc_proxy": "d", "HTTPS_PROXY": NOWHERE}, "a") == {}


def test_a_start_that_fails_mentions_the_proxy():
    """Where processes were not launched."""
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_proxy")}
    variables |= {"https_proxy": NOWHERE, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    program = "import manymesh as mm; mm.distributed.initialize('localhost:1', 2, 1, start_timeout=2)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=variables)
    assert (
        "; https_proxy is set, so processes ask that proxy for localhost: name localhost in no_proxy\n" in done.stderr
    )


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, ""),
        ({"http_proxy": NOWHERE, "no_proxy": "other, t.here"}, ""),
        ({"HTTPS_PROXY": NOWHERE}, ""),  # which gRPC does not read
        ({"http_proxy": NOWHERE, "no_proxy": "host.here", "no_grpc_proxy": "other"}, "name host.here in no_grpc_proxy"),
    ],
)
def test_words(variables, words):
    """Only where a proxy is asked."""
    said = words_on_proxies(variables, "host.here")
    assert said.endswith(words) and bool(said) == bool(words)


def test_words_on_an_address():
    """Which a range may be about."""
    assert words_on_proxies({"http_proxy": NOWHERE, "no_proxy": "10.0.0.0/8"}, "10.1.2.3") == ""
    assert words_on_proxies({"http_proxy": NOWHERE, "no_proxy": "10.0.0.0/16, ::1"}, "10.1.2.3").endswith("in no_proxy")
