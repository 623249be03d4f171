"""`initialize`: this process becomes one of several."""

from __future__ import annotations

import atexit
import contextlib
import errno
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from .. import _compat
from .._errors import ProcessError
from ._join import agree_on_start, connect, wait_for_neighbour
from ._proxies import words_on_proxies
from ._transports import TransportName, asked_for, prepare
from ._watch import ENDED_WITH_OTHERS, Watch, say
from ._wires import Wires
from ._words import first_line, in_a_line, remedy_of
from ._world import Doing, World, enter, flood_of, world

# What `launch` tells the processes that it starts.
COORDINATOR, COUNT, PROCESS = "MANYMESH_COORDINATOR", "MANYMESH_PROCESSES", "MANYMESH_PROCESS"
RESTARTS = "MANYMESH_RESTARTS"  # how often all were started again
NOTES = "MANYMESH_NOTES"  # a folder of `launch`, where a process notes that it called `initialize`, and that it joins
# The number that the system gives to the process that has joined; what that one starts finds it, and does not join.
JOINED = "MANYMESH_JOINED"
# JAX's own watch looks at the coordinator only and ends a process without words: it comes after ours.
HEARTBEAT_TIMEOUT = 100
_INTERRUPTED = "its end, after Ctrl-C"  # what a process is busy with that nobody interrupts any more


@_compat.boundary
def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    death_timeout: float = 2.0,
    stall_timeout: float = 30.0,
    start_timeout: float = 300.0,
    transport: TransportName | None = None,
) -> None:
    """Makes this process one of those that run a script together; to be called first, before JAX looks for devices.

    Without arguments it takes what ``python -m manymesh launch`` says, or else what JAX finds out about a cluster
    (Slurm, Kubernetes, Open MPI, TPU pods). Where there is neither, it does nothing: the script runs in one process. So it
    does in what a process of the run starts itself, such as the workers of `multiprocessing` that load data.

    From then on a thread watches the other processes. When one of them dies, falls silent or ends with an exception, all
    end, each with a message that says which process it was and what was waited for.

    Args:
      coordinator_address: ``host:port`` of process 0, which then hosts the service through which all find each other.
      num_processes: how many there are.
      process_id: which of them this is, from 0.
      local_device_ids: the local devices to use, where they are not to be all of them.
      death_timeout: seconds until the others end when one has ended too early; they notice a death at once.
      stall_timeout: seconds that a process may show no sign of life, or not come to what the others are in.
      start_timeout: seconds to wait for the others at the start.
      transport: how arrays get from one process to another: ``"pull"``, ``"device_put"`` or ``"ppermute"``. By default the
        environment variable ``MANYMESH_TRANSPORT`` says so, or else the backend. All processes have to say the same.

    Raises:
      ProcessError: it is called twice, or after JAX has looked for devices; a number is missing or out of range; the port
        of the coordinator is in use; there is no such transport, or the processes ask for different ones; the others did not come.

    Example:
      >>> import manymesh as mm
      >>> mm.distributed.initialize()  # one process, no cluster
    """
    _note("called")
    asked = asked_for(transport)
    given = coordinator_address is not None or num_processes is not None or process_id is not None
    if _is_started_by_one_that_joined(given):
        return
    if world() is not None:
        raise ProcessError("distributed.initialize is called twice; call it once, at the beginning of the script")
    launched = not given and COORDINATOR in os.environ
    if launched:
        coordinator_address = os.environ[COORDINATOR]
        num_processes, process_id = int(os.environ[COUNT]), int(os.environ[PROCESS])
    adopted = _compat.coordination_client() is not None
    if not given and not launched and not adopted and _compat.cluster_name() is None:
        return
    timeouts = {"death_timeout": death_timeout, "stall_timeout": stall_timeout, "start_timeout": start_timeout}
    _check(coordinator_address, num_processes, process_id, timeouts)
    if _compat.backends_have_started():
        raise ProcessError(
            "distributed.initialize is called after JAX has looked for devices, and so has them already for this process "
            "alone; call it first, before anything makes an array or asks for jax.devices()"
        )
    _widen_pool()
    if launched:
        _note(joins(os.environ[PROCESS]))
    if not adopted:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        host = (coordinator_address or "").rpartition(":")[0]
        # The launcher hosts the service, so that no process is special; what process 0 would host is never asked.
        local = "127.0.0.1:0" if launched else coordinator_address if _is_loopback(host) else None
        if given and process_id == 0 and coordinator_address is not None:
            _check_port(coordinator_address, local or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"))
        # JAX would end the process with a stack trace of its own.
        timer = threading.Timer(start_timeout, _nobody_came, (coordinator_address, num_processes, start_timeout))
        timer.daemon = True
        timer.start()
        try:
            jax.distributed.initialize(
                coordinator_address, num_processes, process_id, local_device_ids, coordinator_bind_address=local,
                initialization_timeout=int(start_timeout) + 30,
                heartbeat_timeout_seconds=max(HEARTBEAT_TIMEOUT, int(2 * stall_timeout)),
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise ProcessError(f"distributed.initialize: {first_line(error)}; {_hint(coordinator_address)}") from error
        finally:
            timer.cancel()
    os.environ[JOINED] = str(os.getpid())
    _enter(death_timeout, stall_timeout, start_timeout, asked)


def joins(process: int | str) -> str:
    """The note of a process that it joins the others that `launch` has started, all of whom it then waits for."""
    return f"joins-{process}"


def _note(name: str) -> None:
    with contextlib.suppress(KeyError, OSError):  # nobody launched it, or launch is gone
        (Path(os.environ[NOTES]) / name).touch()


def _is_started_by_one_that_joined(given: bool) -> bool:
    """Whether what this process finds in its environment is meant for the one that started it.

    Args:
      given: whether the script says by itself which process this is. A worker of `multiprocessing` imports the script of
        its parent, and says what that says; another program may mean it.
    """
    if os.environ.get(JOINED, str(os.getpid())) == str(os.getpid()):
        return False
    return not given or multiprocessing.parent_process() is not None


def _widen_pool() -> None:
    """Asks for more threads than devices on CPU.

    There are as many as devices or cores, and each rank of a collective blocks one until the ranks of other processes have
    come; nothing would be left to send what those are waiting for. XLA takes ``NPROC`` for the number of cores.
    """
    forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    configured: int = jax.config.values["jax_num_cpu_devices"]
    devices = max(configured, int(forced[-1]) if forced else 1)
    said = os.environ.get("NPROC", "")
    if 2 * devices > (int(said) if said.isdigit() else os.cpu_count() or 1):
        os.environ["NPROC"] = str(2 * devices)


def _check(address: str | None, count: int | None, process: int | None, timeouts: Mapping[str, float]) -> None:
    """Refuses arguments that cannot be meant."""
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ProcessError(f"distributed.initialize: num_processes has to be a positive int, found {count!r}")
    if process is not None and (not isinstance(process, int) or not 0 <= process < (count or process + 1)):
        raise ProcessError(
            f"distributed.initialize: process_id has to be one of 0 to {(count or 1) - 1}, found {process!r}"
        )
    port = address.rpartition(":")[2] if isinstance(address, str) else ""
    if address is not None and not (port.isdecimal() and int(port) < 1 << 16):
        raise ProcessError(f"distributed.initialize: coordinator_address has to be 'host:port', found {address!r}")
    for name, seconds in timeouts.items():
        if not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ProcessError(
                f"distributed.initialize: {name} has to be a positive number of seconds, found {seconds!r}"
            )


def _check_port(address: str, local: str | None) -> None:
    """Refuses a port that another program listens on; JAX crashes there.

    Args:
      address: what was asked for.
      local: where the service will listen; None where that is every address of this machine.
    """
    host, _, port = (local or address).rpartition(":")
    host = host.strip("[]") if local else ""
    every = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if every or ":" in host else socket.AF_INET
    try:
        socket.create_server(("::" if every else host, int(port)), family=family, dualstack_ipv6=every).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # of what else may be wrong JAX has words
            raise ProcessError(
                f"distributed.initialize: process 0 is to host the service at coordinator_address={address!r}, but port {port} "
                "of this machine is in use, by another program or by a run that has not ended; end that one, or give every "
                "process another port"
            ) from error


def _nobody_came(address: str | None, count: int | None, timeout: float) -> None:
    """Ends this process, which waits for others in a call that cannot be interrupted."""
    all_of_them = f"all {count} processes" if count else "all processes"
    say(f"manymesh: {all_of_them} did not come to distributed.initialize within {timeout:g} s; {_hint(address)}\n")
    os._exit(ENDED_WITH_OTHERS)


def _hint(address: str | None) -> str:
    host = (address or _compat.coordinator_address() or "").rpartition(":")[0].strip("[]")
    return (
        f"start as many processes as num_processes says, all with the same num_processes and coordinator address ({address})"
        f"{words_on_proxies(os.environ, host) if host else ''}"
    )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "[::1]", "::1")


def _own_address() -> str:
    """The address under which other processes reach this one: loopback where the coordinator is there."""
    host = (_compat.coordinator_address() or "127.0.0.1:0").rpartition(":")[0].strip("[]")
    if _is_loopback(host):
        return "127.0.0.1"
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # nothing is sent: the system only says which way it would go
        probe.connect(address)
        return str(probe.getsockname()[0])


def _enter(death_timeout: float, stall_timeout: float, start_timeout: float, asked: TransportName | None) -> None:
    """Connects to the neighbours and starts the watch."""
    me, count = _compat.process_numbers()
    if count == 1:
        return
    host = _own_address()
    prepare(asked, host)
    new = World(me, count, Wires(me, host), host, death_timeout, stall_timeout, asked)
    new.progress = dict.fromkeys(new.others, Doing())
    # What this process forks, as workers that load data, would keep the connections open when this one has died.
    os.register_at_fork(after_in_child=new.wires.close)
    agree_on_start(new, start_timeout)
    connect(new, start_timeout)
    watch = Watch(new)
    watch.start()
    wait_for_neighbour(new, start_timeout)
    enter(new)
    sys.excepthook = _Hook(watch, sys.excepthook)
    atexit.register(_leave, new)


class _Hook:
    """What happens to an exception that nobody caught: the others are told, and nobody waits for anybody."""

    def __init__(self, watch: Watch, before: object) -> None:
        self.watch, self.before = watch, before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        """Prints the exception as ever, and ends all processes."""
        world = self.watch.world
        if world.is_of_another:
            self.before(kind, error, traceback)  # type: ignore[operator]  # whatever was there
            return
        text = in_a_line(error)
        if remedy := remedy_of(error):
            error.add_note(remedy)
        elif type(error).__module__.startswith("jax") and not isinstance(error, KeyboardInterrupt):
            # Somebody else's death looks like an error of ours when a value does not come: the watch knows better.
            time.sleep(min(world.death_timeout, 2.0))
        if not self.watch.takes_the_end():
            time.sleep(5)  # the watch ends this process
        self.before(kind, error, traceback)  # type: ignore[operator]  # whatever was there
        if issubclass(kind, KeyboardInterrupt):
            _wait_for_the_interrupted(world)
        world.wires.flood(flood_of("end", world, why=f"{world.name(world.process)} ended with {text}"))
        say("")
        code = 1
        if issubclass(kind, KeyboardInterrupt):
            code = 130
        elif issubclass(kind, ProcessError) and any(p.left for p in world.progress.values()):
            code = ENDED_WITH_OTHERS  # what went wrong is why that one has left
        os._exit(code)


def _wait_for_the_interrupted(world: World) -> None:
    """Ctrl-C mostly comes to all processes, and what each still does then is not cut short by the first that has ended."""
    world.doing = world.doing._replace(busy=_INTERRUPTED)
    world.wires.flood(flood_of("progress", world, **world.doing._asdict()))
    with world.changed, contextlib.suppress(KeyboardInterrupt):  # once more: at once
        world.changed.wait_for(
            lambda: all(p.left or p.busy == _INTERRUPTED for p in world.progress.values()),
            min(world.death_timeout, 4.0),  # launch ends whoever takes 5
        )


def _leave(world: World) -> None:
    """The script has ended: what others still want is given, and nobody is left alone with JAX's own farewell."""
    if world.is_of_another:
        _compat.leave_without_farewell()  # which needs threads that are not here
        return
    world.doing = world.doing._replace(left=True)
    world.wires.flood(flood_of("progress", world, **world.doing._asdict()))
    try:
        with world.changed:
            world.changed.wait_for(lambda: world.over or all(p.left for p in world.progress.values()))
    except KeyboardInterrupt:  # JAX's own farewell would wait for the others too
        say("")
        os._exit(130)
    if world.over:
        _compat.leave_without_farewell()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)  # whatever else Python still does: nobody waits for it
        return
    try:
        jax.effects_barrier()
    except Exception:  # JAX would not come to its farewell, for which the others wait
        _compat.leave_with_farewell()
