"""Processes that save and restore together."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from .. import _compat
from .._distributed._world import SLOW, world
from .._errors import CheckpointError

# Seconds. As long as the slowest process may take to write its part; the watchdog of a run notices a death much earlier.
PATIENCE = 3600.0
_LOOKS_EVERY = 0.5  # seconds
_ALL = "every process has to call checkpoint.save, or Manager.save, alike and in the same order"


@dataclass(frozen=True)
class Occasion:
    """Something that several processes do together.

    Attributes:
      key: under which each says what it does; used once, the same in every process.
      calls: how many other things that all do together this process had begun. Who has begun more, and has not said what it
        does here, will not come to it.
      doing: what it is, for messages.
      remedy: what to do where a process does not come.
    """

    key: str
    calls: int
    doing: str
    remedy: str


@dataclass(frozen=True)
class Processes:
    """All processes of a run, seen from one of them.

    Attributes:
      index: number of this process. That with number 0 makes directories and renames them.
      count: how many there are.
    """

    index: int
    count: int

    @classmethod
    def of_this_run(cls) -> Processes:
        """As JAX knows them."""
        return cls(jax.process_index(), jax.process_count())

    @property
    def first(self) -> bool:
        """Whether this is the process that makes directories and renames them."""
        return self.index == 0

    @contextlib.contextmanager
    def preparing(self, number: int, path: Path) -> Iterator[None]:
        """Tells the others how the block ends, in which this process makes everything ready to save. Waits for nobody.

        Args:
          number: how many saves this process began before.
          path: what is saved.
        """
        failed = "it was interrupted"
        with self.busy("copying a checkpoint to the host"):
            try:
                yield
                failed = ""
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
                raise
            finally:
                if self.count > 1:
                    self._say(number, path, failed)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Nobody is impatient with this process in the block, which may take as long as it takes."""
        run = world() if self.count > 1 else None
        if run is not None:
            run.doing = run.doing._replace(busy=what)
        try:
            yield
        finally:
            if run is not None:
                run.is_ready()

    def calls(self) -> int:
        """How many things this process has begun that all do together; none is known where nobody watches."""
        run = world()
        return 0 if run is None else run.doing.calls

    def agree(self, number: int, path: Path, calls: int) -> None:
        """Goes on once every process saves the same; how long they then take to write is their affair.

        Args:
          number: how many saves this process began before.
          path: what is saved. It may be called otherwise elsewhere, but for its last part.
          calls: what `calls` gave as this one began. Who has begun more, and not this save, will not come to it.

        Raises:
          CheckpointError: a process saves something else, could not, or does something else.
        """
        try:
            for p in range(self.count):
                if p != self.index:
                    self._compare(number, p, path, calls)
        except CheckpointError as error:
            self._say(number, path, str(error))  # to who comes later
            raise

    def _say(self, number: int, path: Path, failed: str) -> None:
        self.say(_key(number), json.dumps({"path": str(path), "failed": failed}))

    def say(self, key: str, said: str) -> None:
        """Says something to the others, who ask for it by `said`."""
        _compat.coordination_client().key_value_set(f"{key}/{self.index}", said, allow_overwrite=True)

    def _compare(self, number: int, p: int, path: Path, calls: int) -> None:
        remedy = f"{_ALL}, not process 0 alone: each writes what it has of the arrays"
        said = json.loads(self.said(Occasion(_key(number), calls, f"checkpoint.save of {path}", remedy), p))
        if Path(said["path"]).name != path.name:
            raise CheckpointError(
                f"process {self.index} saves {path}, while process {p} saves {said['path']}; {_ALL}, with the same "
                "path; each writes what it has of the arrays, and nothing was saved"
            )
        if said["failed"]:
            raise CheckpointError(f"{path}: nothing was saved, because of process {p}: {said['failed']}")

    def said(self, occasion: Occasion, p: int) -> str:
        """What another process said, once it has.

        Raises:
          CheckpointError: it will not say anything.
        """
        run, left, waited = world(), 0.0, 0.0
        limit = PATIENCE if run is None else run.stall_timeout
        while True:
            why = ""
            if run is not None:  # seen before it is asked: it says what it does before it goes on
                other = run.progress[p]
                if other.calls > occasion.calls:
                    why = f"it has gone on, and is in {other.label}"
                elif other.left and left > run.death_timeout:
                    why = "its script has ended"
                left += _LOOKS_EVERY if other.left else 0.0
                waited -= _LOOKS_EVERY if other.busy else 0.0
            if waited > limit:
                slow = "" if run is None else f"; {SLOW}"
                why = why or f"it has not come to it for {limit:g} s{slow}"
            found = _compat.stored_text(_compat.coordination_client(), f"{occasion.key}/{p}", _LOOKS_EVERY)
            if found is not None:
                return found
            waited += _LOOKS_EVERY
            if why:
                name = f"process {p}" if run is None else run.name(p)
                raise CheckpointError(
                    f"process {self.index} is in {occasion.doing}, and {name} is not: {why}; {occasion.remedy}"
                )

    def wait_until_gone(self, path: Path) -> None:
        """Waits until the first process has removed a checkpoint, which nobody in this process is to find any more.

        Raises:
          CheckpointError: it has not.
        """
        run = world()
        limit = PATIENCE if run is None else run.stall_timeout
        end = time.monotonic() + limit
        while path.exists():
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{path}: process 0 has not removed it for {limit:g} s; every process has to call delete(step), and the first "
                    "one removes it"
                )
            time.sleep(0.02)

    def meet(self, place: str, error: Exception | None, state: str = "nothing was saved, because of ") -> None:
        """Waits until every process is at the same place, and raises in all of them what went wrong in one.

        A barrier of the coordination service and no collective: it runs in a thread of its own, while the main thread
        launches programs whose collectives must not be interleaved with others.

        Args:
          place: a name that is used once, the same in every process.
          error: what went wrong here.
          state: how a message begins that goes on with what went wrong in another process.

        Raises:
          CheckpointError: something went wrong in another process.
        """
        if self.count > 1:
            client = _compat.coordination_client()
            key = f"manymesh.checkpoint/{place}"
            if error is not None:
                client.key_value_set(
                    f"{key}/failed/{self.index}", f"process {self.index}: {type(error).__name__}: {error}"
                )
            client.wait_at_barrier(key, timeout_in_ms=int(PATIENCE * 1000))
            failed = [text for _, text in client.key_value_dir_get(f"{key}/failed/")]
            if failed and error is None:
                raise CheckpointError(f"{state}{'; '.join(failed)}")
        if error is not None:
            raise error

    def exchange(self, place: str, say: Callable[[], str]) -> list[str]:
        """What every process says at a place, in order. Waits until all have come there, as `meet` does.

        Args:
          place: a name that is used once, the same in every process.
          say: gives what this process says, a short text.

        Raises:
          CheckpointError: something went wrong in another process.
        """
        if self.count == 1:
            return [say()]
        client, error = _compat.coordination_client(), None
        key = f"manymesh.checkpoint/{place}/said"
        try:
            client.key_value_set(f"{key}/{self.index}", say())
        except Exception as raised:  # the others are waiting, and have to hear of it whatever it is
            error = raised
        self.meet(place, error)
        said = {int(name.rpartition("/")[2]): text for name, text in client.key_value_dir_get(f"{key}/")}
        return [said[p] for p in range(self.count)]


def _key(number: int) -> str:
    """Under which processes say what their saves with this number are."""
    return f"manymesh.checkpoint/{number}/said"
