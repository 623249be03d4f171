"""The processes of a run, as one of them sees them."""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import _compat
from .._errors import ProcessError
from ._wires import Message, Wires

# Batches that may be on their way to one process before one of them was asked for. More lets a fast sender fill its
# memory; fewer makes it wait for the receiver.
WINDOW = 16
ACKNOWLEDGED_EVERY = 8
REMEMBERED = 4096  # the things that all do together of which it is known how arguments came
FAILURES = 16  # the most that a process tells of; whoever is in the first of them ends


class Doing(NamedTuple):
    """What a process does; one object, so that no thread sees half of a change.

    Attributes:
      calls: how many things that all processes do together it has begun.
      label: what the last of them is.
      busy: what it does before it can go on; empty where it runs.
      left: whether its script has ended.
      failed: the numbers of those that an exception ended here and that others may still be in, each with that exception in
        a line.
      unlike: how the arguments that it compiles for differ from those that it has compiled for before, if it has.
      given: which of the ways, on which all have agreed, the arguments come in; 0 where that is said by the label.
      ways: a digest of all that were ``given`` so far.
    """

    calls: int = 0
    label: str = ""
    busy: str = ""
    left: bool = False
    failed: tuple[tuple[int, str], ...] = ()
    unlike: str = ""
    given: int = 0
    ways: int = 0


@dataclass(eq=False)
class Waiting:
    """Something that this process does together with others and that is not finished.

    Attributes:
      number: which of the things that all do together.
      label: what it is.
      others: the processes that take part.
      finished: whether it is.
      text: what waits, for a message; empty where nothing does.
      given: as in `Doing`.
    """

    number: int
    label: str
    others: frozenset[int]
    finished: Callable[[], bool]
    text: Callable[[], str]
    given: int = 0


@dataclass(eq=False)
class World:
    """The processes of a run.

    Attributes:
      process: number of this one.
      count: how many there are.
      wires: connections to others.
      host: address that this process listens on.
      death_timeout, stall_timeout: seconds; see `initialize`.
      asked: name of the transport that was asked for; None where the backend decides.
      carriers: name of a transport -> what carries arrays by it, once it was needed.
      over: whether the script of this process has ended before those of others, which do not go on.
      agreed: what all processes have agreed to mean, so that they need not ask again -> its number, from 1.
      ways: number of a thing that all do together -> what it is, and `Doing.ways` of it; of the last ones.
      number: that of this process for the system.
    """

    process: int
    count: int
    wires: Wires
    host: str
    death_timeout: float
    stall_timeout: float
    asked: str | None = None
    doing: Doing = Doing()
    waiting: Waiting | None = None
    progress: dict[int, Doing] = field(default_factory=dict)
    submeshes: dict[int, str] = field(default_factory=dict)
    over: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    carriers: dict[str, Any] = field(default_factory=dict)
    agreed: dict[Any, int] = field(default_factory=dict)
    ways: dict[int, tuple[str, int]] = field(default_factory=dict)
    number: int = field(default_factory=os.getpid)
    _turn: Any = field(default_factory=threading.RLock)
    _sent: dict[int, int] = field(default_factory=dict)
    _received: dict[int, int] = field(default_factory=dict)
    _acknowledged: dict[int, int] = field(default_factory=dict)

    @property
    def store(self) -> Any:
        """The key-value store that all processes share; for short texts."""
        return _compat.coordination_client()

    @property
    def is_of_another(self) -> bool:
        """Whether this process was forked by the one of the run, has a copy of all this, and is no part of it."""
        return os.getpid() != self.number

    @property
    def others(self) -> frozenset[int]:
        """The numbers of the other processes."""
        return frozenset(range(self.count)) - {self.process}

    def begin(self, label: str, busy: str = "", unlike: str = "", given: int = 0) -> int:
        """Counts something that all processes do together; gives its number, from 1."""
        calls, ways = self.doing.calls + 1, zlib.crc32(b"%d,%d" % (self.doing.ways, given))
        self.ways[calls] = label, ways
        self.ways.pop(calls - REMEMBERED, None)
        self.doing = self.doing._replace(calls=calls, label=label, busy=busy, unlike=unlike, given=given, ways=ways)
        return calls

    @contextlib.contextmanager
    def in_turn(self, what: str) -> Iterator[None]:
        """Around a call that all processes make together: of one thread at a time, for these keep no order between processes.

        Raises:
          ProcessError: another thread is in such a call.
        """
        if not self._turn.acquire(blocking=False):
            raise ProcessError(
                f"{what} is called by a thread while another one of {self.name(self.process)} is in {self.doing.label}; all processes "
                "call, compile and fetch in one order, which threads do not keep: make them one after the other, from one thread"
            )
        try:
            yield
        finally:
            self._turn.release()

    def fails(self, number: int, why: str) -> None:
        """Notes that an exception ended something that all do together. Who waits for what was still to come is told."""
        last = min((p.calls for p in self.progress.values() if not p.left), default=number)
        known = [x for x in self.doing.failed if x[0] >= last]
        self.doing = self.doing._replace(failed=(*known, (number, why))[:FAILURES])

    def is_ready(self) -> None:
        """What held the process up, as a compilation does, is over."""
        self.doing = self.doing._replace(busy="")

    def name(self, process: int) -> str:
        """``process 1 (submesh 0 on devices 2, 3)``."""
        where = self.submeshes.get(process)
        return f"process {process} ({where})" if where else f"process {process}"

    def counts_sent(self, target: int) -> None:
        """Counts a batch to another process; waits while too many were not asked for."""
        self._sent[target] = sent = self._sent.get(target, 0) + 1
        if sent - self._acknowledged.get(target, 0) > WINDOW:
            with self.changed:
                self.changed.wait_for(lambda: sent - self._acknowledged.get(target, 0) <= WINDOW)

    def counts_received(self, source: int) -> None:
        """Counts a batch that was asked for; says so every few batches."""
        self._received[source] = received = self._received.get(source, 0) + 1
        if received % ACKNOWLEDGED_EVERY == 0:
            if not self.wires.has(source):
                self.wires.connect(source, self.read(f"wire/{source}"))
            self.wires.post(source, {"kind": "received", "count": received})

    def acknowledge(self, source: int, count: int) -> None:
        """Notes that a process has asked for batches."""
        with self.changed:
            self._acknowledged[source] = max(count, self._acknowledged.get(source, 0))
            self.changed.notify_all()

    def write(self, key: str, value: str) -> None:
        """Writes a text for the other processes."""
        self.store.key_value_set(f"manymesh/{key}", value)

    def read(self, key: str, timeout: float | None = None, check: Callable[[], bool] = lambda: True) -> str:
        """Reads a text that another process writes, maybe later.

        Args:
          key: what it is called.
          timeout: seconds to wait; `stall_timeout` by default.
          check: called about twice a second; gives whether the time counts, and raises where waiting makes no sense any more.

        Raises:
          TimeoutError: nobody wrote it.
        """
        name, left = f"manymesh/{key}", self.stall_timeout if timeout is None else timeout
        while left > 0:
            if (found := _compat.stored_text(self.store, name, min(0.5, left))) is not None:
                return found
            try:
                counts = check()
            except Exception:
                # It may have written this, and have gone on to what makes waiting senseless, since we looked.
                if (found := _compat.stored_text(self.store, name, 0)) is not None:
                    return found
                raise
            left -= 0.5 * counts
        raise TimeoutError(key)


# What to do about a process that would come later, for messages.
SLOW = "one that is only slow in between needs a larger stall_timeout= of manymesh.distributed.initialize"

_worlds: list[World] = []


def world() -> World | None:
    """The processes of this run; None where there is only one."""
    return _worlds[0] if _worlds else None


def enter(new: World) -> None:
    """Makes this process one of several."""
    _worlds.append(new)


def several() -> World:
    """The processes of this run, which are several."""
    assert _worlds, "only one process"
    return _worlds[0]


def flood_of(kind: str, world: World, **more: Any) -> Message:
    """A message that goes on from process to process until all have it."""
    return {"kind": kind, "origin": world.process, **more}


def counted(calls: int) -> str:
    """How many things a process has begun that all do together, in words: steps are not the only ones."""
    return f"{calls} calls, compilations and fetches" if calls != 1 else "1 call, compilation or fetch"


def names(world: World, processes: Sequence[int]) -> str:
    """``process 1 and process 2``."""
    return " and ".join(world.name(p) for p in processes)
