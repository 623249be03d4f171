"""What follows when an attempt to run a script in several processes has failed: another one, or the end."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from .._errors import ProcessError
from ._watch import ENDED_WITH_OTHERS

# Two attempts in a row that fail sooner than this, by an error of the script, are taken for a mistake that stays. A run
# that fails later has usually saved something, and a mistake in it costs at most as many restarts as were asked for.
SOON = 60.0
# What a process brings upon itself. Other signals come from outside: somebody's, or those of a system without memory.
_CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
      code: its exit code.
      words: what ended it, as ``process 1 was killed by SIGKILL``.
      seconds: how long it took.
      final: whether the time for all attempts is over.
    """

    code: int
    words: str
    seconds: float
    final: bool = False

    @property
    def of_the_script(self) -> bool:
        """Whether a process ended by an error of its own, as an exception, and was not stopped or killed."""
        if self.code > 128:
            return self.code - 128 in _CRASHES
        return self.code != ENDED_WITH_OTHERS


@dataclass(frozen=True)
class Restarts:
    """How often all processes may be started again, and how many at least.

    Attributes:
      most: how often.
      min_processes: each time that one died there is one fewer, down to this; None leaves their number.
    """

    most: int = 0
    min_processes: int | None = None

    def check(self, processes: int) -> None:
        """Refuses numbers that cannot be meant.

        Raises:
          ProcessError: they make no sense.
        """
        if not isinstance(self.most, int):
            raise ProcessError(f"launch: max_restarts has to be an int, found {self.most!r}")
        if self.most < 0:
            raise ProcessError(f"launch: max_restarts has to be 0 or more, found {self.most}")
        if self.min_processes is None:
            return
        if not 1 <= self.min_processes <= processes:
            raise ProcessError(f"launch: min_processes has to be one of 1 to {processes}, found {self.min_processes}")
        if not self.most:
            raise ProcessError("launch: min_processes counts when processes are started again; give max_restarts too")

    def after(self, endings: tuple[Ending, ...], processes: int) -> tuple[int | None, str]:
        """What follows.

        Args:
          endings: how all attempts so far ended, the last one last; it failed.
          processes: how many there were in it.

        Returns:
          How many processes to start again, or None; and a line that says so, empty where nothing was to be expected.
        """
        last, left = endings[-1], self.most - len(endings)
        if not self.most or last.final:
            return None, ""
        said = f"manymesh: exit code {last.code} after {last.seconds:.0f} s ({last.words}); "
        if left < 0:
            return None, f"{said}no restart is left of {self.most}"
        if len(endings) > 1 and all(e.of_the_script and e.seconds < SOON for e in endings[-2:]):
            return None, (
                f"{said}not started again, because the script failed twice in a row within {SOON:g} s; "
                f"restarts left: {left + 1} of {self.most}"
            )
        again = processes
        if self.min_processes is not None and not last.of_the_script:
            again = max(self.min_processes, processes - 1)
        count = "the process is" if again == 1 else f"all {again} processes are"
        return again, f"{said}{count} started again; restarts left: {left} of {self.most}"
