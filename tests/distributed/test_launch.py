"""Starting processes: what they print, how they end, and what is left of them."""

import contextlib
import functools
import io
import operator
import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

import manymesh as mm
from manymesh import _compat
from manymesh._cli import main
from manymesh._distributed import _launch
from manymesh._distributed._launch import run_processes
from manymesh._distributed._wires import Wires

pytestmark = pytest.mark.once

SCRIPT = """
import os, sys, time
me = os.environ["MANYMESH_PROCESS"]
print("hello", *sys.argv[1:], os.environ["XLA_FLAGS"].split()[-1])
print("pid", os.getpid(), flush=True)
if "wait" in sys.argv: time.sleep(100)
sys.exit(3 if me == "1" and "fail" in sys.argv else 0)
"""


def gone(output):
    """Whether no process that printed its number is left."""
    numbers = [int(n) for n in re.findall(r"pid (\d+)", output)]
    assert numbers
    return not any(os.path.exists(f"/proc/{n}") for n in numbers)


def test_lines_have_the_number_of_their_process(script, capsys):
    """And options of the script are left to it."""
    assert main(["launch", "-n", "3", "--devices-per-process", "2", script, "--a", "-n"]) == 0
    output = capsys.readouterr().out
    expected = "hello --a -n --xla_force_host_platform_device_count=2"
    assert sorted(line for line in output.splitlines() if "hello" in line) == [f"[{p}] {expected}" for p in range(3)]
    assert gone(output)


def test_the_devices_of_a_process_are_those_that_were_asked_for(monkeypatch):
    """Whatever number the environment says."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    code = "import jax; print('devices', jax.local_device_count())"
    for devices, found in ((2, 2), (None, 4)):
        output = io.StringIO()
        more = {"JAX_PLATFORMS": "cpu"} | ({} if devices else {"XLA_FLAGS": ""})
        assert run_processes([sys.executable, "-c", code], 1, devices, output=output, more=more) == 0
        assert f"[0] devices {found}\n" in output.getvalue()


def test_the_first_failure_is_the_exit_code(script, capsys):
    """Also where others end well, and where others hang: these are ended."""
    assert main(["launch", "-n", "2", script, "fail"]) == 3
    assert "manymesh: process 1 ended with exit code 3" in capsys.readouterr().out


def test_a_time_limit(script, capsys):
    """All are ended, with the code of `timeout`."""
    assert main(["launch", "-n", "2", "--timeout", "1.5", script, "wait"]) == 124
    output = capsys.readouterr().out
    assert "process 0, 1 still ran" in output
    assert gone(output)


def test_the_service_waits_longer_than_any_process_says(script, monkeypatch):
    """A process speaks to it once in its ``stall_timeout``, which may be an hour; after its own, the service ends all."""
    waits = []
    start = _launch._compat.start_coordination_service

    def noted(address, processes, heartbeat_timeout):
        waits.append(heartbeat_timeout)
        return start(address, processes, heartbeat_timeout)

    monkeypatch.setattr(_launch._compat, "start_coordination_service", noted)
    assert run_processes([sys.executable, script], 2, 1, output=io.StringIO()) == 0
    assert waits[0] > 365 * 24 * 3600


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launch_leaves_nothing(script, number):
    """Ctrl-C and SIGTERM."""
    command = [sys.executable, "-m", "manymesh", "launch", "-n", "2", script, "wait"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output = "".join(child.stdout.readline() for _ in range(4))
        child.send_signal(number)
        assert child.wait(20) == 130
        assert gone(output)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


INTERRUPTED = """
import sys, time
import manymesh as mm
mm.distributed.initialize()
import jax
me = jax.process_index()
try:
    print("ready", flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(0.5 * me)  # the slower one is not cut short by the other
    print("saves", flush=True)
    if "goes" in sys.argv: sys.exit(0)
    raise
finally:
    print("tidies up", flush=True)
"""


@pytest.mark.parametrize("how", ["raises", "goes"])
def test_ctrl_c_comes_to_the_script(tmp_path, how):
    """In each process, after `initialize`, where JAX keeps SIGTERM to itself; and launch says what it does."""
    (tmp_path / "script.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "manymesh", "launch", "-n", "2", str(tmp_path / "script.py"), how]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output = ""
        while output.count("ready") < 2:
            output += (line := child.stdout.readline())
            assert line, output
        child.send_signal(signal.SIGINT)
        output += child.communicate(timeout=30)[0]
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130
    assert "\nmanymesh: interrupted; all processes are ended" in output
    for process in range(2):
        assert f"[{process}] saves\n" in output and f"[{process}] tidies up\n" in output, output
    assert output.count("KeyboardInterrupt") == (2 if how == "raises" else 0), output


PREEMPTED = """
import itertools, os, signal, sys, time
import manymesh as mm
mm.distributed.initialize()
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
front, back = (mm.task(lambda w, x: x @ w, name, devices=[p]) for p, name in enumerate(("front", "back")))
step = mm.jit(lambda w, x: (back(w["back"], front(w["front"], x)).sum(), w))
state = {"front": jnp.eye(2), "back": jnp.eye(2)}
with mm.checkpoint.Manager(sys.argv[1], save_interval_steps=10**6) as manager:
    for number in itertools.count(1):
        loss, state = step(state, jnp.ones((4, 2)))
        last = multihost_utils.reached_preemption_sync_point(number)
        manager.save(number, state, force=last)
        if number == 3: print("ready", flush=True)
        if last: break
        time.sleep(0.02)
time.sleep(2.5)  # longer than the two seconds that there are without --grace
print("stopped after", number, manager.all_steps() == [number], flush=True)
"""


@pytest.mark.parametrize("grace", [["--grace", "60"], []])
def test_a_sigterm_is_a_step_at_which_all_stop(tmp_path, grace):
    """JAX takes the signal, and all processes save the same step, if they are given the time."""
    (tmp_path / "script.py").write_text(PREEMPTED)
    command = [sys.executable, "-m", "manymesh", "launch", "-n", "2", "--devices-per-process", "1", *grace]
    child = subprocess.Popen(
        [*command, str(tmp_path / "script.py"), str(tmp_path / "saved")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output = ""
        while output.count("ready") < 2:
            output += (line := child.stdout.readline())
            assert line, output
        child.send_signal(signal.SIGTERM)
        output += child.communicate(timeout=100)[0]
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130
    assert f"manymesh: ended by SIGTERM; all processes are ended, after {60 if grace else 2} s by force" in output
    found = re.findall(r"\[([01])\] stopped after (\d+) True", output)
    assert len({number for _, number in found}) == bool(grace) and len(found) == 2 * bool(grace), output


def test_a_wrong_count(script, capsys):
    """Said before anything starts."""
    assert main(["launch", "-n", "0", script]) == 2
    assert "processes has to be at least 1, found 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ends", "code", "words"),
    [
        ("sys.exit(0)", 75, "ended with exit code 0"),
        ("sys.exit(3)", 3, "ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
    ],
)
def test_a_process_that_ends_before_it_joins(ends, code, words):
    """Ends the others, which would wait for it as long as for one that is late."""
    output, program = io.StringIO(), "import os, sys\nif os.environ['MANYMESH_PROCESS'] == '1': "
    program += f"{ends}\nimport manymesh as mm\nmm.distributed.initialize()\nprint('joined')"
    started = time.monotonic()
    assert run_processes([sys.executable, "-c", program], 3, output=output, timeout=100) == code
    assert time.monotonic() - started < 60
    words = f"manymesh: process 1 {words} before it called manymesh.distributed.initialize(), in which process "
    assert words in output.getvalue() and "would wait for it; all are ended" in output.getvalue()
    assert "joined" not in output.getvalue()


def test_a_process_that_ends_after_it_joined_and_one_that_joins_by_itself(capsys):
    """Are no reason to end others: the first may have no more to do, the second may mean other processes."""
    output = io.StringIO()
    program = "import os, time, manymesh as mm\nmm.distributed.initialize()\ntime.sleep(0.5 * int(os.environ['MANYMESH_PROCESS']))"
    assert run_processes([sys.executable, "-c", program], 2, output=output, timeout=100) == 0, output.getvalue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    program = (
        "import os, sys, manymesh as mm\nme = int(os.environ['MANYMESH_PROCESS'])\nif me == 2: sys.exit(0)\n"
        f"mm.distributed.initialize('{address}', 2, me)\nprint('joined')"
    )
    assert run_processes([sys.executable, "-c", program], 3, output=output, timeout=100) == 0, output.getvalue()
    assert output.getvalue().count("joined") == 2


@pytest.mark.parametrize(
    ("calls", "processes", "says"), [("", 2, 1), ("", 1, 0), ("mm.distributed.initialize()", 2, 0)]
)
def test_a_forgotten_initialize(calls, processes, says):
    """Leaves each process to itself; launch says so, which is no error."""
    output = io.StringIO()
    assert (
        run_processes([sys.executable, "-c", f"import manymesh as mm; {calls}"], processes, output=output, timeout=60)
        == 0
    )
    words = "manymesh: no process called manymesh.distributed.initialize(), so each of the 2 ran the script for itself"
    assert output.getvalue().count(words) == says


def test_a_failure_before_initialize():
    """An import that fails, as a rule: the advice to call it would lead astray."""
    output = io.StringIO()
    assert run_processes([sys.executable, "-c", "import not_there"], 2, output=output, timeout=60) == 1
    assert "manymesh: that was before any process called manymesh.distributed.initialize()" in output.getvalue()
    assert "call it first" not in output.getvalue()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--timeout", "0", "SCRIPT"], "timeout has to be a positive number of seconds, found 0.0"),
        (["--timeout", "-5", "SCRIPT"], "timeout has to be a positive number of seconds, found -5.0"),
        (["--timeout", "nan", "SCRIPT"], "timeout has to be a positive number of seconds, found nan"),
        (["not_there.py"], "there is no file 'not_there.py'"),
    ],
)
def test_what_cannot_be_meant(script, capsys, words, says):
    """Is one line, and nothing starts."""
    assert main(["launch", "-n", "2", *(script if word == "SCRIPT" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_no_grace_at_all(script, capsys):
    """Said before anything starts."""
    assert main(["launch", "-n", "2", "--grace", "0", script]) == 2
    assert "launch: grace has to be a positive number of seconds, found 0.0" in capsys.readouterr().err


def test_a_module(tmp_path, monkeypatch, capsys):
    """As of python -m; its options are left to it."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "-n", "1", "-m", "package.train", "-m", "--steps", "5"]) == 0
    assert capsys.readouterr().out == "[0] __main__ package ['-m', '--steps', '5']\n"


def test_a_function_in_two_processes():
    """What it returns in each; and an error where it fails."""
    assert mm.distributed.launch(operator.add, 2, args=(1, 2), timeout=300) == [3, 3]
    with pytest.raises(mm.errors.ProcessError, match=r"launch\(truediv\) failed with exit code 1"):
        mm.distributed.launch(operator.truediv, 1, args=(1, 0), timeout=300)


def test_an_array_goes_to_a_function():
    """It is made again in each process, which has joined by then; a partial goes wherever its function does."""
    double = functools.partial(operator.mul, jax.numpy.arange(3.0))
    answers = mm.distributed.launch(double, 2, args=(2,), timeout=300)
    assert [list(map(float, x)) for x in answers] == [[0.0, 2.0, 4.0]] * 2


def test_a_mesh_does_not_go_to_a_function():
    """Its devices are those of this process; the message says where to make one."""
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    for given in (mesh, mm.task(operator.neg, "front", mesh=mesh)):
        with pytest.raises(
            mm.errors.ProcessError, match=r"launch\(pos\): .*; make meshes, tasks and steps inside the function"
        ):
            mm.distributed.launch(operator.pos, 2, args=(given,), timeout=60)


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        ("train", {"processes": 2}, "function has to be a function, found 'train'; import it"),
        (operator.pos, {"processes": "2"}, "processes has to be an int, found '2'"),
        (operator.pos, {"processes": 2, "devices_per_process": 1.5}, "devices_per_process has to be an int, found 1.5"),
        (operator.pos, {"processes": 2, "timeout": "5"}, "timeout has to be a positive number of seconds, found '5'"),
    ],
)
def test_a_function_and_numbers_of_other_types(function, options, words):
    """Are refused before anything starts."""
    with pytest.raises(mm.errors.ProcessError, match=re.escape(words)):
        mm.distributed.launch(function, **options)


def test_a_function_that_others_cannot_import():
    """Says what to do."""
    with pytest.raises(mm.errors.ProcessError, match="put it in a module of its own, or install cloudpickle"):
        mm.distributed.launch(lambda: 1, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("localhost:1234", 2, 2), "process_id has to be one of 0 to 1, found 2"),
        (("localhost:1234", 0, 0), "num_processes has to be a positive int, found 0"),
        (("localhost", 2, 0), "coordinator_address has to be 'host:port', found 'localhost'"),
        (("localhost:99999", 2, 0), "coordinator_address has to be 'host:port', found 'localhost:99999'"),
        (("localhost:1234", 2, 0), "after JAX has looked for devices"),
    ],
)
def test_wrong_arguments_of_initialize(arguments, words):
    """Each says what is expected; too late is one of them, in a process that has its devices."""
    assert jax.devices()
    with pytest.raises(mm.errors.ProcessError, match=re.escape(words)):
        mm.distributed.initialize(*arguments)


TAKEN = """
import sys
import manymesh as mm
for address in sys.argv[1:]:
    try:
        mm.distributed.initialize(address, 2, 0, start_timeout=5)
    except mm.errors.ProcessError as error:
        print(error)
"""


def test_a_port_in_use():
    """Is found before JAX starts, whose service would crash there; by whatever name, and on whichever address."""
    pairs = [("localhost", "127.0.0.1"), ("some.host", "127.0.0.1"), ("some.host", "")]
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(socket.create_server((taken, 0))) for _, taken in pairs]
        hosts = [f"{host}:{other.getsockname()[1]}" for (host, _), other in zip(pairs, others, strict=True)]
        done = subprocess.run([sys.executable, "-c", TAKEN, *hosts], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == len(hosts), done.stdout
    for line, host in zip(said, hosts, strict=True):
        port = host.rpartition(":")[2]
        words = f"process 0 is to host the service at coordinator_address='{host}', but port {port} of this machine is in use"
        assert words in line


def test_nobody_takes_the_port_of_a_launch(monkeypatch):
    """Between choosing a port and JAX's listening there it is nobody else's; a service without its port crashes."""
    start, refused = _compat.start_coordination_service, []

    def look(address, *rest):
        host, _, port = address.rpartition(":")
        with pytest.raises(OSError, match="in use"):
            socket.create_server((host, int(port)))
        refused.append(address)
        return start(address, *rest)

    monkeypatch.setattr(_compat, "start_coordination_service", look)
    assert run_processes([sys.executable, "-S", "-c", ""], 2, output=io.StringIO(), timeout=60) == 0
    assert len(refused) == 1


def test_twice_is_once_too_often():
    """In a script of one process that was launched as one of one."""
    text = "import manymesh as mm; mm.distributed.initialize(); mm.distributed.initialize()"
    output = io.StringIO()
    code = run_processes([sys.executable, "-c", text], 2, output=output, timeout=300)
    assert code == 1
    assert "distributed.initialize is called twice" in output.getvalue()


def test_in_one_process_fetch_is_numpy():
    """Also of typed keys, and refuses a process that is not there."""
    assert mm.fetch(3) == 3
    with pytest.raises(mm.errors.ProcessError, match="process=1, but there are processes 0 to 0"):
        mm.fetch(3, process=1)


def test_strangers_are_cut_off():
    """Who does not know the token is not listened to, and its going is nobody's death."""
    one, two = Wires(0, "127.0.0.1"), Wires(1, "127.0.0.1")
    heard = []

    def poll():
        for wires in (one, two):
            wires.poll(0.05, lambda peer, message: heard.append((peer, message)))

    two.connect(0, one.address.replace(one.token, "0" * 32))
    for _ in range(4):
        poll()
    assert not one.has(1)
    two.connect(0, one.address)
    two.post(0, {"kind": "alive"})
    deadline = time.monotonic() + 5
    while not one.has(1) and time.monotonic() < deadline:
        poll()
    one.post(1, {"kind": "alive"})
    for _ in range(4):
        poll()
    assert one.has(1)
    assert (1, {"kind": "alive"}) in heard or (0, {"kind": "alive"}) in heard
    assert (1, None) not in heard
    for wires in (one, two):
        wires.close()


ADOPTED = """
import os, sys, jax, jax.numpy as jnp
import manymesh as mm
from jax.sharding import NamedSharding, PartitionSpec as P
address, count, me = (os.environ["MANYMESH_" + word] for word in ("COORDINATOR", "PROCESSES", "PROCESS"))
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, int(count), int(me), coordinator_bind_address="127.0.0.1:0")
joins = "joins" in sys.argv
if joins: mm.distributed.initialize()

def step(*devices):
    f, g = (mm.task(lambda w, x: x @ w, name, devices=places) for name, places in zip("fg", devices))
    return mm.jit(lambda w, x: jnp.mean(g(w, f(w, x))))

def tells(function, *args):
    try:
        return function(*args)
    except mm.errors.ProcessError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]

arguments = jnp.eye(4), jnp.ones((8, 4))
print("plans", len(step([0], [2]).lower(*arguments).program.submeshes))
print("crosses", tells(step([0], [2]), *arguments))
print("spans", tells(step([1, 3], [0, 2]), *arguments))
ones = jax.make_array_from_callback((4,), NamedSharding(jax.make_mesh((4,), ("x",)), P("x")), lambda at: jnp.ones(4)[at])
print("fetches", tells(mm.fetch, ones))
own = [0, 1] if joins else [k for k, d in enumerate(jax.devices()) if d.process_index == int(me)]
print("has", tells(step(*([k] for k in own)), *arguments), tells(step(range(4), range(4)), *arguments))
"""


@pytest.mark.parametrize("joins", [False, True])
def test_an_initialize_beside_that_of_jax(joins):
    """Takes over what JAX has begun. Where it is forgotten, what would cross is refused in each process, at once; what is a
    process's own, and one program for all, is as ever."""
    output = io.StringIO()
    command = [sys.executable, "-c", ADOPTED, *["joins"] * joins]
    assert run_processes(command, 2, 2, output=output, timeout=100) == 0, output.getvalue()
    for p, where in enumerate(("1 is on devices 2048 of process 1", "0 is on devices 0 of process 0")):
        wrong = f"; this is process {p}, which has not joined the others: JAX runs 2 processes, but manymesh.distributed.initialize()"
        wanted = {
            "plans": "2",
            "crosses": "1.0" if joins else f"ProcessError: mm.jit(<lambda>): submesh {where}{wrong}",
            "spans": "1.0"
            if joins
            else f"ProcessError: mm.jit(<lambda>): submesh 0 is on devices 1, 2049 of processes 0, 1{wrong}",
            "fetches": "[1. 1. 1. 1.]"
            if joins
            else f"ProcessError: fetch: an array is on devices of other processes{wrong}",
            "has": "1.0 1.0",
        }
        for word, words in wanted.items():
            assert f"[{p}] {word} {words}" in output.getvalue(), output.getvalue()
