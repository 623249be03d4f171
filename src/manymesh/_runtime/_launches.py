"""The launches of a process beside others: how many may be unfinished, and which must not be at the same time.

JAX on CPU runs everything of a process on one pool of threads, and a rank of a collective keeps one until the others have
come. Two things would stop it for ever, so a launch waits here, in the thread that issues instructions:

- for its turn: past 32 unfinished launches on a device JAX blocks whoever launches, and Python then cannot send what others
  wait for; nor can a launch go on that has begun on some of its devices, for what would make room on the others finds no
  thread, which is why one process whose submeshes have several devices counts them as well;
- where it may hold a collective, for the unfinished ones on its devices that may: two collectives under way on the same
  devices take each other's threads. `distributed.initialize` sees to it that there are more threads than devices.

Whatever a launch waits for was launched before it, and all that those need has been sent before, by every process in the
order of the plan; so waiting ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .. import _compat
from .._plan._instructions import Run
from ._relayout import Relayouts

LAUNCHES = 16  # unfinished ones at a time
# Of one process, on a submesh, every fourth launch is kept to be waited for, since its result stays alive so long, and two of
# these may be unfinished: several steps may run there at once, and 32 are too many for all of them.
EVERY, ALONE = 4, 2


class Launch:
    """A launch that may be unfinished.

    Attributes:
      run: what it runs; None for a change of layout, and for a value from another process.
      witness: a result by which it is told that the launch is finished; None once it is known to be.
      wide: ids of the devices here that it may hold a collective on.
      taker: the launch that its witness was donated to.
    """

    __slots__ = ("run", "taker", "wide", "witness")

    def __init__(self, run: Run | None, witness: Any, wide: frozenset[int]) -> None:
        self.run, self.wide = run, wide
        self.witness: Any = witness
        self.taker: Launch | None = None

    def last(self) -> Launch:
        """The launch that has its witness now: when that one is finished, so is this."""
        at = self
        while at.taker is not None and (witness := at.witness) is not None and witness.is_deleted():
            at = at.taker
        return at

    def finished(self) -> bool:
        """Whether it is known to be finished; also where nobody can tell, because a later call took its results."""
        x = self.last().witness
        try:
            return x is None or bool(x.is_deleted() or x.is_ready())
        except RuntimeError:  # deleted by the thread that issues instructions, since it was asked
            return True

    def failed(self) -> bool:
        """Whether its results are errors; asked of one that is finished, so that nothing waits."""
        try:
            self.last().wait()
        except Exception:  # whatever it is, the value is not there
            return True
        return False

    def wait(self) -> bool:
        """Waits until it is finished; False where nobody can tell, because its results were taken."""
        x = self.witness
        if x is None:
            return True
        if x.is_deleted():
            return False
        try:
            x.block_until_ready()
        except RuntimeError:
            # JAX says of an array what holds of its first shard, whose buffer a copy on one device may have kept.
            if any(shard.data.is_deleted() for shard in x.addressable_shards):
                return False
            raise
        return True


class Handle:
    """Stands for the launches of one instruction, call by call."""

    __slots__ = ("launch",)

    def __init__(self) -> None:
        self.launch: Launch | None = None


class _Window(deque[Launch]):
    """Launches that may be unfinished, and how many there have been with those that are not counted."""

    launched = 0


class Launches:
    """The unfinished launches of a process, the oldest first. Several threads may call the steps that it counts.

    Args:
      ordered: whether collectives must not be under way at the same time, as on CPU.
      most: how many may be unfinished of those that are counted.
      every: which launches are counted: all, or every n-th.
      apart: ids of devices that share no launch, each counted by itself; by default all are counted together.
    """

    def __init__(
        self, ordered: bool, most: int = LAUNCHES, every: int = 1, apart: Sequence[frozenset[int]] = ()
    ) -> None:
        self._ordered, self._most, self._every, self._apart = ordered, most, every, apart
        self._windows = [_Window() for _ in apart or (None,)]
        self._lock = threading.Lock()  # never held while something is waited for
        self.dispatching = False

    def counted(
        self,
        call: Callable[..., Any],
        run: Run | None,
        witness: Callable[[Any], jax.Array],
        mesh: Mesh | AbstractMesh,
        handle: Handle | None = None,
        taken: Sequence[Handle] = (),
    ) -> Callable[..., Any]:
        """A launch that waits for its turn.

        Args:
          call: the executable.
          run: what it runs.
          witness: picks the result by which it is told that the launch is finished.
          mesh: where it runs.
          handle: what stands for its launches.
          taken: what stands for those whose witness it is given to use up.
        """
        me = jax.process_index()
        wide: frozenset[int] = frozenset()
        if self._ordered and mesh.size > 1:
            assert isinstance(mesh, Mesh), "what runs has devices"
            wide = frozenset(d.id for d in mesh.devices.flat if d.process_index == me)

        windows = self._windows_of(mesh)

        def counted(*args: jax.Array) -> Any:
            with self._lock:
                is_due = any(other.launch is not None for other in taken)
                for window in windows:
                    window.launched += 1
                    is_due = is_due or window.launched % self._every == 0
            if not is_due:
                return call(*args)
            for window in windows:
                self._make_room(window, wide)
            results = call(*args)
            launch = Launch(run, witness(results), wide)
            with self._lock:
                for other in taken:
                    if other.launch is not None:
                        other.launch.taker, other.launch = launch, None
                if handle is not None:
                    handle.launch = launch
                for window in windows:
                    window.append(launch)
            return results

        return counted

    def _windows_of(self, mesh: Mesh | AbstractMesh) -> list[_Window]:
        """Where launches on a mesh are counted."""
        if not self._apart:
            return self._windows
        assert isinstance(mesh, Mesh), "what runs has devices"
        ids = {d.id for d in mesh.devices.flat}
        return [window for window, devices in zip(self._windows, self._apart, strict=True) if devices & ids]

    def _all(self) -> list[Launch]:
        return [x for window in self._windows for x in self._in(window)]

    def _in(self, window: deque[Launch]) -> list[Launch]:
        """Those of a window, the oldest first, while other threads launch."""
        with self._lock:
            return list(window)

    def watch(self, x: jax.Array) -> None:
        """Counts a value from another process as something that is waited for."""
        (window,) = self._windows
        window.append(Launch(None, x, frozenset()))
        if len(window) > 2 * self._most:  # in a process that launches nothing
            window.popleft()

    def settle(self) -> None:
        """Waits until no collective is under way that what the user does next could meet."""
        for window in self._windows:
            self._wait(window, [x for x in self._in(window) if x.wide])

    def missing(self) -> list[Run | None]:
        """The launches that are not finished, or have failed because a value did not come, the oldest first."""
        return [x.run for x in self._all() if not x.finished() or x.failed()]

    def unfinished(self) -> list[Run | None]:
        """The launches that are not finished, the oldest first; None for a value from another process."""
        return [x.run for x in self._all() if not x.finished()]

    def _make_room(self, window: deque[Launch], wide: frozenset[int]) -> None:
        if wide:
            self._wait(window, [x for x in self._in(window) if x.wide & wide])
        while (oldest := self._in_the_way(window)) is not None:
            self._wait(window, [oldest])

    def _in_the_way(self, window: deque[Launch]) -> Launch | None:
        """The oldest of as many as may be unfinished; None where there are fewer."""
        with self._lock:
            if len(window) >= self._most:
                left = [x for x in window if x.witness is not None]
                window.clear()
                window.extend(left)
            return window[0] if len(window) >= self._most else None

    def _wait(self, window: deque[Launch], launches: Iterable[Launch]) -> None:
        for x in launches:
            last = x.last()
            if not self._waited(last):
                # A later call took its results: what was launched last, and still has some, knows.
                others = reversed(self._in(window))
                last = next((y for y in others if y.witness is not None and self._waited(y)), last)
            last.witness = x.witness = None

    def _waited(self, launch: Launch) -> bool:
        """`Launch.wait`. Of one process, what went wrong in another call is told to those who read its results alone."""
        try:
            return launch.wait()
        except Exception:
            if not self._apart:
                raise
            return True


class CountedRelayouts(Relayouts):
    """Changes of layout that count as launches."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches
        self._counted: dict[Callable[..., Any], Callable[..., Any]] = {}

    def get(self, aval: Any, sharding: NamedSharding) -> Callable[..., Any]:
        """See `Relayouts.get`."""
        compiled = super().get(aval, sharding)
        if compiled not in self._counted:
            self._counted[compiled] = self._launches.counted(compiled, None, _compat.key_words, sharding.mesh)
        return self._counted[compiled]
