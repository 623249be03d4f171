"""The command line, as a user meets it: what it prints, JSON, errors in one line, exit codes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import jax
import pytest

import manymesh as mm
from manymesh._cli import COMMANDS, _selftests, main
from views.steps import made_up, predicted

pytestmark = pytest.mark.once

SCRIPT = """
import jax, jax.numpy as jnp, manymesh as mm

def plan(devices):
    mesh = jax.make_mesh((2, len(devices) // 2), ("stage", "data"), devices=devices)
    front, back = (mm.task(jnp.sin, n, mesh=m) for n, m in zip(("front", "back"), mm.submeshes(mesh, "stage")))
    run = mm.microbatch(lambda x: back(front(x)), num_microbatches=4, reduce="concat")
    return mm.jit(run), jax.ShapeDtypeStruct((1024, 8), "float32")

def lowered(): return mm.jit(mm.task(jnp.sin, "alone", devices=[0])).lower(jnp.ones(3))
def traced(): return mm.jit(mm.task(jnp.sin, "alone", devices=[0])).trace(jnp.ones(3))
def compiled(): return lowered().compile()
def nothing(): pass
def needs(a, b=1, *c): pass
"""


@pytest.fixture
def run(capsys):
    """Runs a command; its exit code, and the lines of both outputs."""

    def run(*words):
        code = main([str(w) for w in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def script(tmp_path):
    """A script that describes steps; what importing it leaves behind is forgotten."""
    path = tmp_path / "described.py"
    path.write_text(SCRIPT)
    yield path
    sys.modules.pop("described", None)
    sys.path[:] = [p for p in sys.path if p != str(tmp_path)]


@pytest.fixture
def recording(tmp_path):
    """A saved run."""
    return made_up().save(tmp_path / "run.json")


def test_help_teaches(run):
    """Without a word, and with --help: every command with what it does and an example; each command's own help too."""
    for words in ((), ("--help",)):
        code, out, err = run(*words)
        assert (code, err) == (0 if words else 2, "")
        for command in COMMANDS:
            assert command.NAME in out and command.HELP in " ".join(out.split())
    for command in COMMANDS:
        code, out, err = run(command.NAME, "--help")
        assert (code, err) == (0, "") and "examples:\n" in out and ("--json" in out or command.NAME == "launch")
        assert f"python -m manymesh {command.NAME}" in out


def test_version(run):
    """That of the package."""
    assert run("--version") == (0, f"manymesh {mm.__version__}\n", "")


def test_every_example_in_the_help_is_understood(monkeypatch):
    """Each is a line that the parser takes."""
    seen = []
    for command in COMMANDS:
        monkeypatch.setattr(command, "run", lambda args: seen.append(args) or 0)
    for command in COMMANDS:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        for line in (parser.epilog or "").splitlines():
            if "python -m manymesh" in line:
                words = line.split("  ")[1].split("python -m manymesh ")[1].split(" > ")[0].split()
                before = len(seen)
                assert main(words) == 0, line
                assert len(seen) == before + 1, line


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("nonsense", 2, r"argument command: invalid choice: 'nonsense'"),
        ("schedule --stages 0", 2, "--stages: expected a whole number of at least 1, found '0'"),
        ("schedule --forward 1,x", 2, "expected a number, or one for each stage as in 1,2,1; found '1,x'"),
        (
            "schedule --microbatches 8",
            2,
            "--microbatches (did you mean --num-microbatches?); see python -m manymesh schedule",
        ),
        ("doctor --jso now", 2, "--jso now (did you mean --json?); see python -m manymesh doctor --help"),
        ("plan a.py:f b", 2, "unrecognized arguments: b; see python -m manymesh plan --help"),
        ("schedule 1f2b", 1, "unknown schedule '1f2b'; did you mean '1f1b'?"),
        ("schedule --forward 1,2 --stages 3", 1, "--forward has 2 numbers for 3 stages"),
        ("schedule 1f1b --compare", 1, "--compare shows all schedules"),
        ("schedule --out picture.gif", 1, "'picture.gif'; end the name in one of"),
        ("schedule --out text.txt", 1, "--out saves pictures; the text is what is printed"),
        ("trace nowhere.json", 1, "nowhere.json: No such file or directory"),
        ("plan train.py", 1, "expected SCRIPT.py:FUNCTION or package.module:function, found 'train.py'"),
        ("plan nowhere.py:plan", 1, "there is no file nowhere.py"),
        ("plan no_such_package.at_all:plan", 1, "there is no module 'no_such_package.at_all' here"),
    ],
)
def test_a_mistake_is_one_line(run, words, code, says):
    """On standard error, nothing else, with the exit code that says whose mistake it is."""
    found, out, err = run(*words.split())
    assert (found, out) == (code, "") and err.count("\n") == 1 and says in err


# --- schedule --------------------------------------------------------------------------------------------------------


def test_schedule(run):
    """The picture, the step, the bubble and the memory."""
    code, out, err = run("schedule", "1f1b", "--stages", 3, "--num-microbatches", 4)
    assert (code, err) == (0, "")
    assert out.startswith("0 | 0>1>2>........0<<<3>1<<<..2<<<..3<<<\n")
    assert "a step takes 18, of which submeshes wait 33.3%" in out and "activations kept at a time: 3, 2, 1" in out


def test_schedule_as_json(run):
    """The same as data, with every action."""
    code, out, _ = run("schedule", "gpipe", "--stages", 2, "--num-microbatches", 3, "--backward", 0, "--json")
    found = json.loads(out)
    assert code == 0 and found["makespan"] == 4 and found["bubble_fraction"] == 0.25 and found["activations"] == [0, 0]
    assert found["timeline"][0] == [0, "F", 0, 0, 0.0, 1.0] and len(found["timeline"]) == 6


def test_schedules_compared(run):
    """The fastest first; those that put several stages on a submesh do the same work in as many smaller stages."""
    code, out, _ = run("schedule", "--compare", "--stages", 4, "--num-microbatches", 8, "--json")
    found = json.loads(out)["schedules"]
    spans = [c["makespan"] for c in found]
    by = {c["name"]: c for c in found}
    assert code == 0 and spans == sorted(spans) and found[0]["name"] == "zbv"
    assert (by["1f1b"]["makespan"], by["1f1b"]["stages_per_submesh"], by["1f1b"]["activations"]) == (33, 1, 4)
    assert (by["interleaved"]["makespan"], by["interleaved"]["stages_per_submesh"]) == (28.5, 2)
    assert by["gpipe"]["activations"] == 8
    code, out, _ = run("schedule", "--compare", "--stages", 4, "--num-microbatches", 8)
    assert code == 0 and "python -m manymesh schedule zbv --stages 8 --num-microbatches 8" in out
    numbers = ("--stages", 2, "--num-microbatches", 3, "--forward", "1,2")
    code, out, _ = run("schedule", "--compare", *numbers, "--json")
    by = {c["name"]: c for c in json.loads(out)["schedules"]}
    # Of each microbatch the second submesh has 2 + 2; the first has half a stage before, and one after, in each way.
    assert code == 0 and (by["1f1b"]["makespan"], by["interleaved"]["makespan"]) == (15, 13.5)
    code, out, _ = run("schedule", "--compare", "--stages", 3, "--transfer", "0.1,0.2")
    assert code == 0 and "gpipe" in out and "zbv: --compare takes one --transfer for all" in out
    code, _, error = run("schedule", "--compare", "--stages", 2, "--forward", "1,2,3")
    assert code == 1 and "--forward has 3 numbers for 2 stages" in error
    code, out, _ = run("schedule", "--compare", "--stages", 1, "--num-microbatches", 1)
    assert code == 0 and out.startswith("1 submesh, 1 microbatch ")
    code, out, _ = run("schedule", "--compare", "--stages", 2, "--forward", 0, "--backward", 0)  # takes no time
    assert code == 0 and "gpipe" in out


def test_a_schedule_as_a_page(run, tmp_path):
    """Saved, and its path printed."""
    code, out, _ = run("schedule", "zbv", "--stages", 4, "--num-microbatches", 4, "--out", tmp_path / "zbv.html")
    assert code == 0 and f"saved {tmp_path / 'zbv.html'}" in out
    assert "zbv, 4 stages, 4 microbatches, on 2 submeshes" in (tmp_path / "zbv.html").read_text()


# --- trace ----------------------------------------------------------------------------------------------------------


def test_trace(run, recording, tmp_path):
    """As text, as files, and beside a prediction."""
    code, out, _ = run("trace", recording)
    assert code == 0 and out.startswith("train on 2 submeshes: 20.0 ms, bubble 33.7%\n0 | 0>")
    code, out, _ = run("trace", recording, "--out", tmp_path / "a.html", "--out", tmp_path / "b.json")
    assert out == f"saved {tmp_path / 'a.html'}\nsaved {tmp_path / 'b.json'}\n"
    assert json.loads((tmp_path / "b.json").read_text())["traceEvents"]
    prediction = tmp_path / "prediction.json"
    prediction.write_text(json.dumps(predicted()))
    code, out, _ = run("trace", recording, "--prediction", prediction)
    assert code == 0 and "most is off in backward 'back_bwd'" in out and "  ' 0>" in out
    code, out, _ = run("trace", recording, "--prediction", recording, "--json")
    found = json.loads(out)
    assert found["comparison"]["differences"][0]["measured"] == found["comparison"]["differences"][0]["predicted"]
    assert found["seconds"] == pytest.approx(0.02) and len(found["spans"]) == len(made_up().spans)


def test_a_prediction_that_is_none(run, recording, tmp_path):
    """Says what is wrong with the file."""
    bad = tmp_path / "bad.json"
    bad.write_text("[[1, 2]]")
    code, _, err = run("trace", recording, "--prediction", bad)
    assert code == 1 and "row 0 of the prediction has to be (submesh, label, kind" in err
    bad.write_text("nonsense")
    assert "bad.json is no JSON" in run("trace", recording, "--prediction", bad)[2]


# --- plan -----------------------------------------------------------------------------------------------------------


def test_plan_says_what_belongs_to_an_error(run, tmp_path):
    """Whose pieces have the shape that it speaks of."""
    (tmp_path / "plan.py").write_text("""
import jax, jax.numpy as jnp, manymesh as mm

def plan():
    mesh = jax.make_mesh((3,), ("data",), devices=mm.planned_devices(3))
    layer = mm.task(lambda x: mm.with_sharding_constraint(x, ("batch",)), "layer", mesh=mesh, logical_axes=(("batch", "data"),))
    looped = mm.microbatch(lambda x: jnp.sum(layer(x)), num_microbatches=4)
    return mm.jit(looped), jax.ShapeDtypeStruct((16,), "float32")
""")
    code, _, err = run("plan", f"{tmp_path / 'plan.py'}:plan")
    first, *notes = err.splitlines()
    assert code == 1 and first.startswith(
        "manymesh plan: task 'layer': dimension 0 ('batch') of shape (4,) does not divide"
    )
    assert notes == [
        "  in task 'layer'",
        "  microbatch(<lambda>): each of 4 microbatches has 4 of 16 along dimension 0 of args[0]",
    ]


def test_plan_of_a_script_with_arguments(run, script, monkeypatch):
    """It finds none of the words that are the command's, and what it requires is said."""
    head = "import argparse, sys\nparser = argparse.ArgumentParser()\nparser.add_argument('--steps', type=int{})\n"
    script.write_text(head.format(", default=3") + "given = parser.parse_args()\n" + SCRIPT)
    monkeypatch.setattr(sys, "argv", words := ["manymesh", "plan", f"{script}:plan"])
    code, out, err = run(*words[1:])
    assert code == 0 and "front" in out, err
    assert sys.modules["described"].given.steps == 3 and sys.argv is words
    script.write_text(head.format(", required=True") + SCRIPT + "def asks(): parser.parse_args()\n")
    code, out, err = run("plan", f"{script}:asks")
    assert code == 1 and "described.py ended with 2" in err and "if __name__ == '__main__':" in err


def test_plan(run, script, monkeypatch):
    """For devices that nobody has: what runs where, and what crosses; nothing is compiled."""
    jax.devices()  # of this process, which asking for 64 must not change any more
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    monkeypatch.setenv("XLA_FLAGS", "")
    code, out, err = run("plan", f"{script}:plan", "--devices", 64)
    assert (code, err) == (0, "") and "front" in out and "back" in out and "nothing was compiled" in out
    code, out, _ = run("plan", f"{script}:plan", "--devices", 64, "--json")
    found = json.loads(out)
    assert code == 0 and (found["function"], found["devices"]) == (f"{script}:plan", 64) and len(found) > 2
    code, out, _ = run("plan", f"{script}:plan", "--devices", 64, "--hardware", "tpu_v5p", "--json")
    assert code == 0 and json.loads(out)["report"]["prediction"]["seconds"] > 0
    code, out, _ = run("plan", f"{script}:plan", "--layout")
    assert code == 0 and "Layout: " in out


@pytest.mark.parametrize("name", ["lowered", "traced"])
def test_plan_takes_every_stage_of_a_step(run, script, name):
    """What trace and lower give."""
    code, out, _ = run("plan", f"{script}:{name}")
    assert code == 0 and "alone" in out


def test_plan_takes_a_step_of_nnx(run, tmp_path, monkeypatch):
    """What it changes in its modules is a result, which the pass back is for."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_nnx.py").write_text(
        "import jax, jax.numpy as jnp, manymesh as mm, optax\n"
        "from flax import nnx\n"
        "def step(model, optimizer, x):\n"
        "    optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))\n"
        "def plan():\n"
        "    model = mm.nnx.task(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), 'alone', devices=[0])\n"
        "    return mm.nnx.jit(step), model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param), jnp.ones((2, 4))\n"
    )
    code, out, _ = run("plan", "of_nnx:plan")
    assert code == 0 and "alone_bwd" in out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("compiled", "returns a compiled step; return what lower gives"),
        (
            "nothing",
            "has to return mm.jit(step).lower(...), or a tuple of the step and its arguments; it returned NoneType",
        ),
        ("needs", "needs a; plan calls it with nothing, or with devices"),
        ("missing", "has no function 'missing'; it has compiled, lowered, needs, nothing, plan, traced"),
    ],
)
def test_a_function_that_describes_no_step(run, script, name, says):
    """In one line, with what would do."""
    code, out, err = run("plan", f"{script}:{name}")
    assert (code, out) == (1, "") and err.count("\n") == 1 and says in err


@pytest.mark.parametrize(
    ("lines", "function", "shown"),
    [
        (
            "def fails(): return inner()\ndef inner(): return {}['x']",
            "fails",
            ["in fails", "in inner", "KeyError: 'x'"],
        ),
        ("import no_such_module", "plan", ["in <module>", "No module named 'no_such_module'"]),
        ("def f(:", "plan", ["def f(:", "SyntaxError"]),
        (
            "def fails(): return mm.jit(lambda x: x @ jnp.ones((7, 2))), jnp.ones((3, 3))",
            "fails",
            ["in <lambda>", "TypeError: dot_general requires"],
        ),
    ],
)
def test_an_error_of_the_script_begins_at_its_own_line(run, script, lines, function, shown):
    """Without the frames of the command and of what imports the script; and the exit code is 1."""
    script.write_text(SCRIPT + lines)
    code, out, err = run("plan", f"{script}:{function}")
    assert (code, out) == (1, "") and all(words in err for words in shown), err
    assert "_cli" not in err and "importlib" not in err and "runpy" not in err
    assert next(line for line in err.splitlines() if line.startswith("  File ")).startswith(f'  File "{script}"')


# --- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor(run, monkeypatch):
    """Versions, devices, settings, and tests that can fail: then the exit code is 1."""
    code, out, _ = run("doctor")
    assert code == 0 and f"jax {jax.__version__}" in out and "8 x cpu" in out and out.endswith("all is well\n")
    assert "transport inside this process" in out and "a pipeline, against plain JAX" in out
    assert "transport between processes pull, which suits the backend (cpu); between two processes" in " ".join(
        out.split()
    )
    monkeypatch.setenv("MANYMESH_TRANSPORT", "tcp")
    monkeypatch.setattr(_selftests.LocalTransport, "move", lambda self, batch: lambda *values: [v + 1 for v in values])
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert code == 1 and found["healthy"] is False
    transports = [c for c in found["checks"] if c["name"].startswith("transport")]
    assert [c["ok"] for c in transports] == [False, False]
    assert "MANYMESH_TRANSPORT has to be one of 'pull', 'device_put', 'ppermute', found 'tcp'" in transports[1]["words"]
    assert found["versions"]["jax"] == jax.__version__ and found["devices"] == {"cpu cpu": 8}


# --- as a process ---------------------------------------------------------------------------------------------------


def test_a_reader_who_has_seen_enough(tmp_path):
    """`python -m manymesh ... | head -1` ends without a complaint."""
    shell = f"'{sys.executable}' -m manymesh schedule --stages 64 --num-microbatches 256 --json | head -1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_without_some_characters(tmp_path, encoding):
    """Bars are drawn in others, and what is somebody's own is replaced."""
    variables = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "manymesh", "schedule", "--compare", "--stages", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, encoding=encoding)
    assert done.returncode == 0 and done.stderr == ""
    assert " ####" in done.stdout and "#.. " in done.stdout and "?" not in done.stdout
    (tmp_path / "described.py").write_text(SCRIPT.replace('"alone"', '"alone \N{SNOWMAN}"'), encoding="utf-8")
    command = [sys.executable, "-m", "manymesh", "plan", f"{tmp_path / 'described.py'}:lowered"]
    done = subprocess.run(command, capture_output=True, timeout=300, env=variables)
    assert done.returncode == 0 and b"alone ?" in done.stdout, done.stderr
