"""How a process joins the others that JAX has found: all were told the same, and each has its neighbours in the ring."""

from __future__ import annotations

import json
import time

from .._errors import ProcessError
from ._transports import different_transports
from ._world import World

# Seconds that others wait longer than process 0, which says in all of them what it has waited for.
_LATER = 5.0
_PORTS = "each process listens on ports that the system chooses, which have to be open between the machines of a run"


def agree_on_start(world: World, timeout: float) -> None:
    """Goes on once all processes have come and were told the same, and refuses to go on otherwise: in every process.

    Args:
      world: the processes.
      timeout: seconds to wait for the others.

    Raises:
      ProcessError: one did not come, or they were told different numbers of processes or transports.
    """
    world.write(f"told/{world.process}", json.dumps([world.count, world.asked]))
    if world.process == 0:
        verdict = _verdict(world, timeout)
        world.write("verdict", verdict)
    else:
        try:
            verdict = world.read("verdict", timeout + _LATER)
        except TimeoutError:  # process 0 has not come itself
            verdict = _missing([0], timeout)
    if verdict:
        raise ProcessError(f"distributed.initialize: {verdict}")


def connect(world: World, timeout: float) -> None:
    """Connects to the next process of the ring.

    Args:
      world: the processes.
      timeout: seconds to wait for its address.

    Raises:
      ProcessError: there is none, or nobody is reached there.
    """
    me, after = world.process, (world.process + 1) % world.count
    world.write(f"wire/{me}", world.wires.address)
    try:
        address = world.read(f"wire/{after}", timeout)
    except TimeoutError:
        raise ProcessError(f"distributed.initialize: {_missing([after], timeout)}") from None
    try:
        world.wires.connect(after, address)
    except OSError as error:
        host, port, _ = json.loads(address)
        raise ProcessError(
            f"distributed.initialize: process {me} does not reach process {after} at {host}, port {port} ({error}); {_PORTS}"
        ) from error


def wait_for_neighbour(world: World, timeout: float) -> None:
    """Waits until the process before this one in the ring has connected to it. Somebody else reads the connections.

    Args:
      world: the processes.
      timeout: seconds to wait.

    Raises:
      ProcessError: it did not come.
    """
    before, deadline = (world.process - 1) % world.count, time.monotonic() + timeout
    while not world.wires.has(before):
        if time.monotonic() > deadline:
            raise ProcessError(
                f"distributed.initialize: process {before} did not reach process {world.process} at {world.host}, port "
                f"{world.wires.port}, within {timeout:g} s; {_PORTS}"
            )
        time.sleep(0.005)


def _verdict(world: World, timeout: float) -> str:
    """Why the processes cannot start, as process 0 sees it; empty where they can."""
    told, missing, deadline = {}, [], time.monotonic() + timeout
    for p in range(world.count):
        try:
            told[p] = json.loads(world.read(f"told/{p}", max(deadline - time.monotonic(), 0.1)))
        except TimeoutError:
            missing.append(p)
            continue
        if told[p][0] != world.count:
            return f"process {p} was told num_processes={told[p][0]}, process 0 was told {world.count}; give all of them the same"
    if missing:
        return _missing(missing, timeout)
    return different_transports([asked for _, asked in told.values()])


def _missing(processes: list[int], timeout: float) -> str:
    several = len(processes) > 1
    who = f"process{'es' * several} {', '.join(map(str, processes))}"
    return (
        f"{who} did not come to it within {timeout:g} s, but to the coordinator; look at what {'they print' if several else 'it prints'}, "
        "and call manymesh.distributed.initialize() in every process, also below a jax.distributed.initialize() of the script"
    )
