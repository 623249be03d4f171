"""The demonstration: it runs, it says clearly what is wrong with its options, and it can fail."""

from __future__ import annotations

import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

pytestmark = pytest.mark.once

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_transformer.py"

# The same program with a narrow model on short texts: what takes time is compiling.
SMALL = """
import functools, sys
import train_transformer as demo
demo.LENGTH = 16
demo.Decoder = functools.partial(demo.Decoder, features=16, heads=2, blocks=2)
sys.exit(demo.main(sys.argv[1:]))
"""


def run(*command):
    """Python in a process of its own, which sets up its own devices, and compiles as the tests do."""
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    env |= {
        "XLA_FLAGS": re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"]),
        "PYTHONPATH": os.pathsep.join((str(EXAMPLES), str(EXAMPLES.parent / "src"))),
        "COLUMNS": "120",
    }
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def demo():
    """The module of the script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("train_transformer")


def test_it_trains_and_agrees_with_one_device(tmp_path):
    """Table, schedule, cost, progress, both curves, and where the time goes, as text and as a picture; exit code 0."""
    picture = tmp_path / "made" / "timeline.png"
    done = run("-c", SMALL, "--steps", "3", "--num-microbatches", "4", "--schedule", "1f1b", "--timeline", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "embed/table", "float32[256,16]", "vocab, embed", "P(None, model)", "4-7", "19 arrays",
        "Schedule 1f1b: 4 microbatches on 2 submeshes", "bubble 20.0%",
        "Cost of a step: ", "0 | devices 0-3 hold", "1 | devices 4-7 hold",
        "pipeline   loss", "one device loss", "3/3", "tokens/s",
        "Loss in nats per byte", ": agrees", ": fell",
    ):  # fmt: skip
        assert words in done.stdout, words
    assert done.stderr == ""
    assert done.stdout.endswith(f"saved {picture}\nsaved {picture.with_suffix('.html')}\n")
    assert picture.read_bytes().startswith(b"\x89PNG") and "</html>" in picture.with_suffix(".html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--stages 3", r"argument --stages: invalid choice: 3 \(choose from 2, 4\)"),
        ("--stages two", r"argument --stages: expected a whole number of at least 1, found 'two'"),
        ("--schedule foo", r"argument --schedule: invalid choice: 'foo' \(choose from '?gpipe'?, '?1f1b'?\)"),
        (
            "--num-microbatches 5",
            r"argument --num-microbatches: 5 does not cut .* 32 sequences .* use one of 1, 2, 4, 8, 16",
        ),
        (
            "--num-microbatches 32",
            r"argument --num-microbatches: 32 does not cut .* 2 data shards; use one of 1, 2, 4, 8, 16",
        ),
        ("--steps 0", r"argument --steps: expected a whole number of at least 1, found '0'"),
        ("--steps 1", r"argument --steps: one step cannot show that the loss falls; use at least 2"),
        ("--steps 2.5", r"argument --steps: expected a whole number of at least 1, found '2.5'"),
        ("--layers 3", r"unrecognized arguments: --layers 3"),
    ],
)
def test_a_wrong_value_gives_one_clear_line(demo, capsys, options, words):
    """On standard error, with exit code 2, before anything is compiled."""
    with pytest.raises(SystemExit) as left:
        demo.main(options.split())
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1
    assert re.search(words, err), err


def test_a_wrong_value_ends_the_script_as_well():
    """As a process, as a user would see it."""
    done = run(str(SCRIPT), "--stages", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"train_transformer\.py: argument --stages: .*\n", done.stderr)


def test_options_and_their_defaults(demo):
    """Those of the help text."""
    found = demo.parse([])
    assert (found.stages, found.schedule, found.num_microbatches, found.steps) == (2, "1f1b", 8, 40)
    found = demo.parse(["--stages", "4", "--schedule", "gpipe", "--num-microbatches", "2", "--steps", "7"])
    assert (found.stages, found.schedule, found.num_microbatches, found.steps) == (4, "gpipe", 2, 7)


CURVES = [
    pytest.param([4.0, 3.0], [4.0, 3.0], True, (": agrees", ": fell"), id="equal"),
    pytest.param([4.0, 3.0002], [4.0, 3.0], True, ("6.7e-05: agrees", ": fell"), id="within the tolerance"),
    pytest.param([4.0, 3.0004], [4.0, 3.0], False, ("1.3e-04: over 1e-04", ": fell"), id="beyond the tolerance"),
    pytest.param([4.0, 3.5, 3.0], [4.0, 3.6, 3.0], False, (": over 1e-04", ": fell"), id="apart in between"),
    pytest.param([3.0, 4.0], [3.0, 4.0], False, (": agrees", ": did not fall"), id="rising"),
    pytest.param([3.0, 3.0], [3.0, 3.0], False, (": agrees", ": did not fall"), id="flat"),
    pytest.param([4.0, float("nan")], [4.0, float("nan")], False, ("nan: over 1e-04", ": did not fall"), id="not a number"),
    pytest.param([4.0, float("nan")], [4.0, 3.0], False, ("nan: over 1e-04",), id="not a number in the pipeline"),
    pytest.param([4.0, float("nan"), 3.0], [4.0, float("nan"), 3.0], False, ("nan: over 1e-04",), id="not a number in between"),
]  # fmt: skip


@pytest.mark.parametrize(("pipeline", "reference", "well", "words"), CURVES)
def test_the_comparison_can_fail(demo, pipeline, reference, well, words):
    """Losses that differ by more than 1e-4, or that did not fall, or that are no numbers."""
    out = io.StringIO()
    assert demo.compare(pipeline, reference, Console(file=out, width=120)) is well
    for word in words:
        assert word in out.getvalue(), out.getvalue()


@pytest.mark.parametrize(("well", "code"), [(True, 0), (False, 1)])
def test_the_verdict_is_the_exit_code(demo, monkeypatch, well, code):
    """What `train` returns."""
    monkeypatch.setattr(demo, "train", lambda *_: well)
    assert demo.main(["--steps", "2"]) == code


def test_batches_are_the_same_on_every_call(demo):
    """Both runs see the same text: windows of English, as bytes."""
    one, two = list(demo.batches(2)), list(demo.batches(2))
    np.testing.assert_array_equal(one, two)
    assert one[0].shape == (demo.BATCH, demo.LENGTH) and (one[0] != one[1]).any()
    text = bytes(one[0].astype(np.uint8).reshape(-1)).decode("utf-8", "ignore")
    assert sum(c.isalpha() or c.isspace() for c in text) > 0.7 * len(text)
