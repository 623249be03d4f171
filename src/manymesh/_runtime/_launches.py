"""The launches of a process beside others: how many may be unfinished, and which must not be at the same time.

JAX on CPU runs everything of a process on one pool of threads, and a rank of a collective keeps one until the others have
come. Two things would stop it for ever, so a launch waits here, in the thread that issues instructions:

- for its turn: past 32 unfinished launches on a device JAX blocks whoever launches, and Python then cannot send what others
  wait for; nor can a launch go on that has begun on some of its devices, which is why one process whose submeshes share
  some of theirs counts them as well;
- where it may hold a collective, for the unfinished ones on its devices that may: two collectives under way on the same
  devices take each other's threads. `distributed.initialize` sees to it that there are more threads than devices.

Whatever a launch waits for was launched before it, and all that those need has been sent before, by every process in the
order of the plan; so waiting ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .. import _compat
from .._plan._instructions import Run
from ._relayout import Relayouts

LAUNCHES = 16  # unfinished ones at a time


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
        while at.taker is not None and at.witness is not None and at.witness.is_deleted():
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


class Launches:
    """The unfinished launches of a process, the oldest first.

    Args:
      ordered: whether collectives must not be under way at the same time, as on CPU.
    """

    def __init__(self, ordered: bool) -> None:
        self._ordered = ordered
        self._window: deque[Launch] = deque()
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

        def counted(*args: jax.Array) -> Any:
            self._make_room(wide)
            results = call(*args)
            launch = Launch(run, witness(results), wide)
            for other in taken:
                if other.launch is not None:
                    other.launch.taker, other.launch = launch, None
            if handle is not None:
                handle.launch = launch
            self._window.append(launch)
            return results

        return counted

    def watch(self, x: jax.Array) -> None:
        """Counts a value from another process as something that is waited for."""
        self._window.append(Launch(None, x, frozenset()))
        if len(self._window) > 2 * LAUNCHES:  # in a process that launches nothing
            self._window.popleft()

    def settle(self) -> None:
        """Waits until no collective is under way that what the user does next could meet."""
        self._wait([x for x in self._window if x.wide])

    def missing(self) -> list[Run | None]:
        """The launches that are not finished, or have failed because a value did not come, the oldest first."""
        return [x.run for x in list(self._window) if not x.finished() or x.failed()]

    def unfinished(self) -> list[Run | None]:
        """The launches that are not finished, the oldest first; None for a value from another process."""
        return [x.run for x in list(self._window) if not x.finished()]

    def _make_room(self, wide: frozenset[int]) -> None:
        window = self._window
        if wide:
            self._wait([x for x in window if x.wide & wide])
        if len(window) >= LAUNCHES:
            self._window = window = deque(x for x in window if x.witness is not None)
        while len(window) >= LAUNCHES:
            self._wait([window[0]])
            window.popleft()

    def _wait(self, launches: Iterable[Launch]) -> None:
        for x in launches:
            last = x.last()
            if not last.wait():
                # A later call took its results: what was launched last, and still has some, knows.
                last = next((y for y in reversed(self._window) if y.witness is not None and y.wait()), last)
            last.witness = x.witness = None


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
