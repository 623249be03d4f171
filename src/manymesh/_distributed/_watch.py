"""The watch: a thread that sees when another process dies, falls silent or goes another way, and ends this one with words.

Processes stand in a ring and show each other signs of life, so that what is sent does not grow with the square of their
number and no process is special. A connection that closes is a death, and one that stays open without signs of life is a
stop. Whoever notices tells its neighbours, they tell theirs, and all end at once: a process that waits for a value in XLA
cannot be woken by an exception.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import defaultdict

from ._wires import Message
from ._words import INTERRUPTED
from ._world import SLOW, Doing, World, counted, flood_of

PERIOD = 0.25  # seconds between two signs of life
# The exit code of a process that ends because another one did: what went wrong is to be looked for there.
ENDED_WITH_OTHERS = 75

PUT_ALIKE = "every process has to call a step with arguments that are put on the same devices, or nowhere"
SAME_SHAPES = (
    "Every process has to call a step with arguments of the same shapes and dtypes, with equal static ones, under the same settings of "
    "JAX; where the last batch is smaller, drop it or pad it"
)


class Watch(threading.Thread):
    """Watches the other processes of a run."""

    def __init__(self, world: World) -> None:
        super().__init__(name="manymesh-watch", daemon=True)
        self.world = world
        n, me = world.count, world.process
        self.neighbours = {(me - 1) % n, (me + 1) % n} - {me}
        self._silent: defaultdict[int, float] = defaultdict(float)
        self._behind: defaultdict[int, float] = defaultdict(float)
        self._gone: defaultdict[int, float] = defaultdict(float)
        self._seen: dict[int, int] = {}  # how far each was when `_look` looked last
        self._apart: set[int] = set()  # those that were given arguments otherwise
        self._told = Doing()
        self._ending = threading.Lock()

    def run(self) -> None:
        """Reads messages, and looks around every `PERIOD`."""
        try:
            self._watch()
        except Exception as error:  # without a watch the others would wait for this process, and it for them
            self.end(f"the watch of {self.world.name(self.world.process)} ended with {type(error).__name__}: {error}")

    def _watch(self) -> None:
        before = time.monotonic()
        while True:
            self.world.wires.poll(PERIOD / 2, self._hear)
            now = time.monotonic()
            if now - before >= PERIOD:
                # When this process itself was stopped for a while, the others' silence was not theirs.
                self._look(min(now - before, 2 * PERIOD))
                before = now

    def _hear(self, peer: int, message: Message | None) -> None:
        world = self.world
        self._silent[peer] = 0.0
        if message is None:
            if not world.progress[peer].left and peer in self.neighbours | set(world.progress):
                self.end(f"{world.name(peer)} died: its connection closed without a word")
            return
        kind = message["kind"]
        if kind == "received":
            world.acknowledge(peer, message["count"])
        elif kind == "end":
            self.end(message["why"], message)
        elif kind == "progress":
            self._progress(peer, message)

    def _progress(self, peer: int, message: Message) -> None:
        """Passes on how far a process is, and notes it, in this order: whoever hears the last one may leave."""
        world, known = self.world, self.world.progress.get(message["origin"])
        if known is None or known.left or message["calls"] < known.calls:
            return
        doing = Doing(*(message[name] for name in Doing._fields))
        doing = doing._replace(failed=tuple((number, why) for number, why in doing.failed))  # JSON has lists
        if doing != known:
            world.wires.flood(message, besides=peer)
            world.progress[message["origin"]] = doing
            self._compare_ways(message["origin"], doing)
        with world.changed:
            world.changed.notify_all()

    def _compare_ways(self, p: int, known: Doing) -> None:
        """A step that needs no other process to bring arguments where they belong would go on with what differs."""
        label, ways = self.world.ways.get(known.calls, ("", 0))
        if known.label != label or known.ways == ways or p in self._apart:
            return
        why = f"{self.world.name(p)} called a step with arguments that were put elsewhere than here, in {label} or before; {PUT_ALIKE}"
        self._apart.add(p)
        if self.world.doing.left:  # too late to end anything
            say(f"manymesh: {why}.\n")
        else:
            self.end(why)

    def _look(self, elapsed: float) -> None:
        world = self.world
        for peer in self.neighbours:
            world.wires.post(peer, {"kind": "alive"})
            if not world.progress[peer].left:
                self._silent[peer] += elapsed
                if self._silent[peer] > world.stall_timeout:
                    self.end(f"{world.name(peer)} has shown no sign of life for {world.stall_timeout:g} s")
        now = world.doing
        if now != self._told:
            self._told = now
            world.wires.flood(flood_of("progress", world, **now._asdict()))
        for p, known in world.progress.items():
            self._compare_ways(p, known)
        waiting = world.waiting
        interrupted = waiting is not None and dict(now.failed).get(waiting.number) == INTERRUPTED
        if waiting is None or waiting.finished() or interrupted:
            self._behind.clear()
            self._gone.clear()
            return
        for p in waiting.others:
            known = world.progress[p]
            goes_on, self._seen[p] = self._seen.get(p) != known.calls, known.calls
            why = dict(known.failed).get(waiting.number)
            if why is not None:
                self._gone[p] += elapsed
                # Ctrl-C mostly comes to all, and what each still does then is not cut short.
                if self._gone[p] > (world.stall_timeout if why == INTERRUPTED else world.death_timeout):
                    self.end(f"{world.name(p)} did not finish {waiting.label}, which ended there with {why}")
            elif known.calls >= waiting.number:
                if known.calls == waiting.number and known.label and known.label != waiting.label:
                    self.end(f"{world.name(p)} is in {known.label}, while this one is in {waiting.label}")
                if known.calls == waiting.number and known.label and known.given != waiting.given:
                    self.end(
                        f"{world.name(p)} is in {known.label} with arguments that were put elsewhere than here; {PUT_ALIKE}"
                    )
                self._behind[p] = self._gone[p] = 0.0
            elif known.left:
                self._gone[p] += elapsed
                if self._gone[p] > world.death_timeout:
                    self.end(f"the script of {world.name(p)} has ended, after {counted(known.calls)}")
            elif goes_on:  # what is heard of it is older than what this process has begun since
                self._behind[p] = 0.0
            elif not known.busy:
                self._behind[p] += elapsed
                # Later than the neighbours of one that is stopped, who know that it is.
                if self._behind[p] > world.stall_timeout + 4 * PERIOD:
                    self.end(
                        f"{world.name(p)} has not come to {waiting.label} for {world.stall_timeout:g} s; every process has "
                        f"to call the same steps in the same order ({_at(known.calls, known.label)})"
                    )

    def _more(self) -> str:
        """What is known besides of a process that is waited for in vain.

        For which other arguments it compiles, and what to do, or what it did last before its script ended.
        """
        waiting = self.world.waiting
        if waiting is None or waiting.finished():
            return ""
        for p in sorted(waiting.others):
            known = self.world.progress[p]
            if known.calls == waiting.number and known.unlike:
                return f"; in process {p} {known.unlike}. {SAME_SHAPES}"
            if known.calls < waiting.number and known.left and known.label:
                return f"; the last thing that process {p} did is {known.label}"
        return ""

    def takes_the_end(self) -> bool:
        """Whether nobody else in this process is ending it already."""
        return self._ending.acquire(blocking=False)

    def end(self, why: str, told: Message | None = None, code: int = ENDED_WITH_OTHERS) -> None:
        """Ends this process, and tells the others. One whose script has ended ends with its own exit code.

        Args:
          why: what happened.
          told: the message that said so, where it came from another process.
          code: exit code.
        """
        if not self.takes_the_end():
            return
        world = self.world
        if told is None:
            with contextlib.suppress(Exception):
                why += self._more()
        world.wires.flood(told or flood_of("end", world, why=why))
        if world.doing.left:  # it waits for the others in `_leave`
            if world.doing.failed:  # and may have ended because of this, with an exception that says less
                say(f"manymesh: {why.removesuffix('.')}.\n")
            with world.changed:
                world.over = True
                world.changed.notify_all()
            return
        waiting = world.waiting
        doing = f"; it was in {world.doing.label}" if world.doing.label else ""
        if waiting is not None:
            with contextlib.suppress(Exception):  # whatever happens, this process ends
                text = waiting.text() if waiting.number == world.doing.calls else ""
                doing += f", where {text}" if text else ""
        where = world.submeshes.get(world.process)
        here = f"process {world.process}" + (f" ({where})" if where else "")
        say(f"manymesh: {why.removesuffix('.')}.\nmanymesh: {here} ends with the others{doing}.\n")
        world.wires.flood({"kind": "alive"})  # flushes what is left
        os._exit(code)


def say(text: str) -> None:
    """Writes to standard error, whatever state the streams of Python are in."""
    flushing = threading.Thread(target=_flush, daemon=True)  # a full pipe must not hold up the end
    flushing.start()
    flushing.join(0.5)
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or somebody else's object
            stream.flush()


def _at(calls: int, label: str) -> str:
    done = f"it has done {counted(calls)}, the last was {label}" if label else "it has called none yet"
    return f"{done}; {SLOW}"
