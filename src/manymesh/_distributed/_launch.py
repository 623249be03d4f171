"""`launch`: several processes on this machine, as if each were a host of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from .. import _compat
from .._errors import ProcessError
from ._initialize import COORDINATOR, COUNT, JOINED, NOTES, PROCESS, RESTARTS, joins
from ._output import Output
from ._ports import reserve_port
from ._proxies import past_proxies
from ._restarts import Ending, Restarts
from ._watch import ENDED_WITH_OTHERS

HOST = "127.0.0.1"  # where processes find the service
# Seconds of silence after which JAX's service takes a process for dead and ends all of them: a process speaks to it as often as
# its own ``stall_timeout`` says, and who died or stalls is found out without the service.
NEVER = 10**8
# Seconds that processes have to end by themselves, after the first one that failed or Ctrl-C, and then to end when told.
GRACE, TERMINATION = 5.0, 2.0


class _Terminated(KeyboardInterrupt):
    """Somebody ended this process by SIGTERM."""


def run_processes(
    command: Sequence[str],
    processes: int,
    devices_per_process: int | None = None,
    *,
    output: IO[str] | None = None,
    more: Mapping[str, str] | None = None,
    timeout: float | None = None,
    restarts: Restarts | None = None,
    grace: float | None = None,
) -> int:
    """Runs a command in several processes that find each other, and waits for all of them.

    Each line that they print is prefixed with the number of its process. This process hosts the service through which
    they find each other, on loopback. However this function ends, no process is left. Where restarts were asked for, all
    are ended when one has failed, and all are started again, with a service of their own; a line on standard error, or
    in the output that was given, says so. Where nobody takes the output any more, all are ended.

    Args:
      command: what to run.
      processes: how many.
      devices_per_process: simulated CPU devices of each; None leaves that to the environment.
      output: where lines go; standard output by default.
      more: further variables for the environment of all.
      timeout: seconds after which all are ended, restarts included.
      restarts: whether they are started again when one fails.
      grace: seconds that they have after Ctrl-C or SIGTERM before what is left is killed; by default 5 after Ctrl-C, 2 after
        SIGTERM.

    Returns:
      0 where all ended well, else the exit code of the first that failed; 128 and the signal, where it was killed. With
      restarts, that of the last attempt. Where the output cannot be written, that of `Output`.

    Raises:
      ProcessError: fewer than one process or device, no time, or restarts that make no sense.
    """
    for name, number in (("processes", processes), ("devices_per_process", devices_per_process)):
        if not isinstance(number, int) and (number is not None or name == "processes"):
            raise ProcessError(f"launch: {name} has to be an int, found {number!r}")
        if number is not None and number < 1:
            raise ProcessError(f"launch: {name} has to be at least 1, found {number}")
    for name, seconds in (("timeout", timeout), ("grace", grace)):
        if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
            raise ProcessError(f"launch: {name} has to be a positive number of seconds, found {seconds!r}")
    restarts = restarts or Restarts()
    restarts.check(processes)
    until = (time.monotonic(), timeout)
    out = Output(sys.stdout if output is None else output)
    endings: tuple[Ending, ...] = ()
    again: int | None = processes
    with _terminated_as_interrupted():
        while again is not None:
            with tempfile.TemporaryDirectory(prefix="manymesh-") as notes:
                variables = {
                    **_environment(devices_per_process),
                    **(more or {}),
                    RESTARTS: str(len(endings)),
                    NOTES: notes,
                }
                ending = _attempt(command, again, variables, out, until, grace)
                silent = not os.listdir(notes)
            if out.error is not None:
                if not isinstance(out.error, BrokenPipeError):  # whose reader has seen enough
                    Output(sys.stderr).line(
                        f"manymesh: what the processes print cannot be written: {out.error}; all are ended"
                    )
                return out.code
            if again > 1 and silent:
                out.line(
                    "manymesh: that was before any process called manymesh.distributed.initialize()"
                    if ending.code
                    else f"manymesh: no process called manymesh.distributed.initialize(), so each of the {again} ran the script "
                    "for itself; call it first in the script, before anything makes an array"
                )
            if not ending.code:
                return 0
            endings = (*endings, ending)
            again, words = restarts.after(endings, again)
            if words:
                Output(sys.stderr if output is None else output).line(words)
    return endings[-1].code


def _attempt(
    command: Sequence[str],
    processes: int,
    variables: Mapping[str, str],
    output: Output,
    limit: tuple[float, float | None],
    grace: float | None,
) -> Ending:
    """Starts all processes, and leaves none.

    Args:
      command, processes: see `run_processes`.
      variables: the environment of all.
      output: where lines go.
      limit: when the first attempt began, and how many seconds all have together.
      grace: see `run_processes`.
    """
    with _service(processes) as address:
        children: list[subprocess.Popen[str]] = []
        pumps: list[threading.Thread] = []
        steps = [(signal.SIGTERM, TERMINATION)]
        try:
            for process in range(processes):
                own = {COORDINATOR: address, COUNT: str(processes), PROCESS: str(process)}
                child = subprocess.Popen(
                    list(command), env={**variables, **own}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
                )  # fmt: skip
                children.append(child)
                pumps.append(threading.Thread(target=_copy, args=(process, child, output), daemon=True))
                pumps[-1].start()
            return _wait(children, output, limit, variables[NOTES])
        except KeyboardInterrupt as error:
            if not isinstance(error, _Terminated):  # a script may save something then; JAX keeps SIGTERM to itself
                steps.insert(0, (signal.SIGINT, grace or GRACE))
            else:
                steps = [(signal.SIGTERM, grace or TERMINATION)]
            said = "ended by SIGTERM" if isinstance(error, _Terminated) else "interrupted"
            output.line(f"manymesh: {said}; all processes are ended, after {steps[0][1]:g} s by force")
            raise
        finally:
            _end(children, steps)
            for pump in pumps:
                pump.join(2)
            for child in children:
                if child.stdout is not None:
                    child.stdout.close()


def _environment(devices: int | None) -> dict[str, str]:
    """The environment of a process that has a number of simulated devices."""
    variables = {k: v for k, v in os.environ.items() if k not in (COORDINATOR, COUNT, PROCESS, JOINED)}
    variables["PYTHONUNBUFFERED"] = "1"
    variables.update(past_proxies(variables, HOST))
    if devices is not None:
        variables.pop("JAX_NUM_CPU_DEVICES", None)  # which JAX heeds before XLA's flag
        flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", variables.get("XLA_FLAGS", ""))
        variables["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
        variables.setdefault("JAX_PLATFORMS", "cpu")
    return variables


@contextlib.contextmanager
def _service(processes: int) -> Iterator[str]:
    """Hosts the service through which processes find each other; gives its address."""
    with reserve_port(HOST) as held:
        address = f"{HOST}:{held.getsockname()[1]}"
        service: Any = _compat.start_coordination_service(address, processes, NEVER)
        try:
            yield address
        finally:
            del service


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A SIGTERM ends as Ctrl-C does, so that what is cleaned up there is cleaned up here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _copy(process: int, child: subprocess.Popen[str], output: Output) -> None:
    """Copies the lines of a process, each with its number in front; reads on where they cannot be written."""
    assert child.stdout is not None, "it was asked for"
    for line in child.stdout:
        if line.startswith("[Gloo] Rank "):
            continue  # printed by each process for each group of devices
        output.line(f"[{process}] {line.removesuffix(chr(10))}")


def _wait(
    children: Sequence[subprocess.Popen[str]], output: Output, limit: tuple[float, float | None], notes: str
) -> Ending:
    """Waits until all have ended, or the first that failed was given company, or others wait for one that has ended."""
    codes: dict[int, int] = {}
    started, failed = time.monotonic(), None
    first_start, timeout = limit
    while len(codes) < len(children):
        for process, child in enumerate(children):
            ended = child.poll()
            if ended is not None:
                codes.setdefault(process, ended)
        now = time.monotonic()
        if (words := _never_comes(codes, len(children), notes)) is not None:
            output.line(f"manymesh: {words}; all are ended")
            code = next((c for c in codes.values() if c), ENDED_WITH_OTHERS)
            return Ending(code if code > 0 else 128 - code, words, now - started)
        if failed is None and any(codes.values()):
            failed = now
        if failed is not None and now - failed > GRACE:
            break
        if timeout is not None and now - first_start > timeout:
            words = f"after {timeout:g} s process {_unfinished(codes, children)} still ran"
            output.line(f"manymesh: {words}; all are ended")
            return Ending(124, words, now - started, final=True)
        if output.error is not None:
            break
        time.sleep(0.01)
    wrong = {p: code for p, code in codes.items() if code}
    # Who ended because another one did is not the first that failed, in whatever order they are seen.
    failure = next((p for p, code in wrong.items() if code != ENDED_WITH_OTHERS), next(iter(wrong), None))
    if failure is None:
        return Ending(0, "all ended well", time.monotonic() - started)
    first, how = wrong[failure], _how(wrong[failure])
    output.line(f"manymesh: process {failure} {how}")
    if left := _unfinished(codes, children):
        output.line(f"manymesh: process {left} did not end by itself and is killed")
    seconds = (failed or started) - started
    return Ending(first if first > 0 else 128 - first, f"process {failure} {how}", seconds)


def _never_comes(codes: Mapping[int, int], count: int, notes: str) -> str | None:
    """What has happened where a process has ended before it joined, and others wait in `initialize` for all to join."""
    gone = next((p for p in codes if not os.path.exists(os.path.join(notes, joins(p)))), None)
    waiting = [str(p) for p in range(count) if p not in codes and os.path.exists(os.path.join(notes, joins(p)))]
    if gone is None or not waiting:
        return None
    return (
        f"process {gone} {_how(codes[gone])} before it called manymesh.distributed.initialize(), in which process "
        f"{', '.join(waiting)} would wait for it"
    )


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _unfinished(codes: Mapping[int, int], children: Sequence[object]) -> str:
    return ", ".join(str(p) for p in range(len(children)) if p not in codes)


def _end(children: Sequence[subprocess.Popen[str]], steps: Sequence[tuple[signal.Signals, float]]) -> None:
    """Ends what still runs, with all that it has started, and reaps it.

    Args:
      children: the processes, which may have ended.
      steps: signals for those that have not, each with the seconds that they have then; SIGKILL follows.
    """
    try:
        for number, seconds in steps:
            running = [child for child in children if child.poll() is None]
            for child in running:
                _signal(child, number)
            deadline = time.monotonic() + (seconds if running else 0)
            while time.monotonic() < deadline and any(child.poll() is None for child in running):
                time.sleep(0.01)
    finally:  # also when somebody presses Ctrl-C once more
        for child in children:
            _signal(child, signal.SIGKILL)  # also what an ended one may have left in its session
            child.wait()


def _signal(child: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
