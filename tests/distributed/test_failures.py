"""Whatever happens to a process, the others end by themselves, and say what it was.

How soon, in seconds, is measured by benchmarks/failures.py.
"""

import io
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from manymesh._distributed._launch import run_processes
from manymesh._distributed._watch import ENDED_WITH_OTHERS
from manymesh._distributed._words import LONGEST, first_line, in_a_line, remedy_of

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("failures")]

SCRIPT = Path(__file__).with_name("failing.py")
TRACEBACK = "Traceback (most recent call last):"
# The value that process 0 waits for when process 1 fails between two calls may be that of either.
WAITS = r"it was in call [23] of train \(program 1\)(, where (task '\w+'(, microbatch \d,)? on submesh 0|a value of another process))?"

# case -> exit code, what the other process says
CASES = {
    "kill": (137, "process 1 (submesh 1) died: its connection closed without a word"),
    "kill with workers": (137, "process 1 (submesh 1) died: its connection closed without a word"),
    "stop": (ENDED_WITH_OTHERS, "process 1 (submesh 1) has shown no sign of life for 5 s"),
    "raise": (1, "process 1 (submesh 1) ended with ValueError: on purpose.\n"),
    "raise without words": (1, "process 1 (submesh 1) ended with Wordless: <exception str() failed>"),
    "catches": (
        3,
        "process 1 (submesh 1) did not finish call 3 of train (program 1), which ended there with FloatingPointError",
    ),
    "catches with state": (
        3,
        "caught mm.jit(train): NaN in a result of task 'back', at ",
    ),
    "leaves early": (
        ENDED_WITH_OTHERS,
        "the script of process 1 (submesh 1) has ended, after 4 calls, compilations and fetches; the last thing that process 1 did is call 2 of train (program 1)",
    ),
    "leaves with 3": (
        3,
        "the script of process 1 (submesh 1) has ended, after 4 calls, compilations and fetches; the last thing that process 1 did is call 2 of train (program 1)",
    ),
    "leaves at once": (3, "the script of process 1 has ended, after 0 calls, compilations and fetches"),
    "sleeps": (ENDED_WITH_OTHERS, "process 1 (submesh 1) has not come to call 3 of train"),
    # Process 0 finds it, or process 1 does when it compiles.
    "other shape": (None, "args[1] is float32[9,4] and was float32[6,4]"),
}


def run(case, limit=5.0, processes=2):
    output = io.StringIO()
    code = run_processes(
        [sys.executable, str(SCRIPT), case, str(limit)], processes, 1, output=output, timeout=300,
        more={"PYTHONPATH": ":".join(p for p in sys.path if p)},
    )  # fmt: skip
    return code, output.getvalue()


# case -> seconds that it waits
WAITING = {"stop": 5.0, "sleeps": 5.0, "never starts": 6.0}


@pytest.fixture(scope="module")
def waiting():
    """What comes of the cases that mostly wait; they run beside each other and the others."""
    with ThreadPoolExecutor(len(WAITING)) as pool:
        yield {case: pool.submit(run, case, limit) for case, limit in WAITING.items()}


@pytest.mark.parametrize("case", sorted(CASES, key=WAITING.__contains__))
def test_survivors_end_with_words(case, waiting):
    """By themselves, with the process, its submesh, the call and the task that waited."""
    expected, words = CASES[case]
    code, output = waiting[case].result() if case in waiting else run(case)
    assert code == expected if expected is not None else code in (1, ENDED_WITH_OTHERS), output
    assert words in output
    if case in ("kill", "kill with workers", "stop", "leaves early", "leaves with 3", "sleeps"):
        said = next(line for line in output.splitlines() if "process 0 (submesh 0) ends with the others" in line)
        assert re.search(WAITS, said)
    assert "ended well" not in output
    if case == "other shape":
        assert "the compilation of train" in output and "same shapes" in output
    if code in (1, 3):
        assert output.endswith(f"manymesh: process 1 ended with exit code {code}\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "RuntimeError"),
        ("one\ntwo", "one"),
        (f"INTERNAL: calling back: {TRACEBACK}\n  File 'a'\n    f()\nValueError: bad\n  row\nor two", "INTERNAL: calling back: ValueError: bad"),
        (f"A: {TRACEBACK}\n  File 'a'\nKeyError: 1\n\nDuring it:\n\n{TRACEBACK}\n  File 'b'\nValueError: bad", "A: ValueError: bad"),
        (f"A: {TRACEBACK}\n  File 'a'", f"A: {TRACEBACK}"),
    ],
    ids=range(5),
)  # fmt: skip
def test_an_exception_in_a_line(text, line):
    """Also where its text is that of another one, as of a callback that failed."""
    assert first_line(RuntimeError(text)) == line


def test_a_message_has_a_length():
    """What connections carry has a limit, and an exception may show a whole array."""
    assert in_a_line(ValueError("x" * LONGEST)) == f"ValueError: {'x' * LONGEST}"
    assert in_a_line(ValueError("x" * 70000)) == f"ValueError: {'x' * LONGEST}…"


MOVES = """
import manymesh as mm
mm.distributed.initialize()
import jax
x = jax.device_put(1.0, jax.devices()[0])
moved = mm.jit(lambda x: x, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[1]))(x)
print("moved", mm.fetch(moved))
jax.device_put(x, jax.devices()[1])
"""


def test_an_array_is_moved_by_a_step(tmp_path):
    """Which a process says that ends in an error of `jax.device_put`."""
    script, output = tmp_path / "script.py", io.StringIO()
    script.write_text(MOVES)
    more = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    code = run_processes([sys.executable, str(script)], 2, 1, output=output, timeout=300, more=more)
    assert code == 1 and "moved 1.0" in output.getvalue(), output.getvalue()
    assert "move = manymesh.jit(lambda x: x, out_shardings=sharding), then move(x)" in output.getvalue()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Fetching value for `jax.Array` that spans non-addressable (non process local) devices is not possible", "fetch"),
        ("FAILED_PRECONDITION: FullyReplicatedShard: Array has no addressable shards.", "fetch"),
        ("Cannot reshard an input that is not fully addressable", "jit"),
        ("the first argument must be a fully addressable array or a non-addressable array with a single device sharding", "jit"),
        ("device_put's second argument must be a Device or a Sharding which represents addressable devices", "jit"),
        ("The backend (cpu, 1) does not support cross-host device transfers.", "jit"),
        ("For a cross-host reshard in multi-controller JAX, input and target sharding should have the same set of devices", "jit"),
        ("Gathering global non-fully-addressable arrays only supports tiled=True", "fetch"),
        ("If the Array has no addressable shards, `dtype` must be provided via the `dtype` argument", ""),
        ("on purpose", ""),
    ],
    ids=range(10),
)  # fmt: skip
def test_what_to_do_instead(text, word):
    """Of what JAX says, on both ends of the versions that are supported."""
    found = remedy_of(ValueError(text))
    assert f"manymesh.{word}(" in found if word else not found


def test_a_process_that_never_starts(waiting):
    """The others end when their time to start is over."""
    code, output = waiting["never starts"].result()
    assert code == ENDED_WITH_OTHERS
    assert "all 2 processes did not come to distributed.initialize within 6 s" in output
    assert "ended well" not in output


def test_process_0_hosts_the_service_and_leaves_with_a_code_of_its_own():
    """Which is its own without `launch` too: neither JAX's service nor its farewell takes part in it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, str(SCRIPT), "leaves with 3", "5", address, "2"]
    variables = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)}
    variables["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    children = [subprocess.Popen([*command, str(p)], env=variables, stderr=subprocess.DEVNULL) for p in range(2)]
    try:
        assert [child.wait(120) for child in children] == [3, ENDED_WITH_OTHERS]
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_nothing_fails():
    """All processes end well, and nobody says anything of it."""
    code, output = run("nothing")
    assert code == 0, output
    assert sorted(re.findall(r"\[(\d)\] ended well (\d)", output)) == [("0", "0"), ("1", "1")]
    assert "manymesh" not in output
