"""Processes that restore one tree together: all from the same checkpoint, or none of them anything.

Each reads the parts of arrays that its devices get. Where one of them read another checkpoint, or none, what they put together
would be no state that a run ever had; so whoever has devices in ``like=`` waits for the others, before it reads and after.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import CheckpointError
from ._processes import Occasion, Processes
from ._target import Target

# Those who restore together begin their restores in the same order: by their numbers, how many they have begun.
_numbers: defaultdict[frozenset[int], Iterator[int]] = defaultdict(itertools.count)
_REMEDY = (
    "every process whose devices get a part of like= has to restore it, in the same order; alone, a process restores what like= "
    "puts on its own devices, or on none"
)

Agree = Callable[[Path, str], None]


@dataclass(frozen=True)
class Together:
    """One restore of several processes, seen from one of them.

    Attributes:
      processes: all of the run.
      others: the numbers of those that take part, without this one.
      key: what this restore is called, in all of them.
      calls: how many things that all do together this process had begun.
    """

    processes: Processes
    others: tuple[int, ...]
    key: str
    calls: int

    def agree(self, path: Path, identity: str) -> None:
        """Goes on once all have found the same checkpoint.

        Args:
          path: where this process found it; it may be called otherwise elsewhere.
          identity: what is the same wherever it is found, and different in each checkpoint.

        Raises:
          CheckpointError: a process found another one or none, or does something else.
        """
        found = {self.processes.index: {"path": str(path), "identity": identity}}
        self.processes.say(f"{self.key}/found", json.dumps(found[self.processes.index]))
        found |= {p: json.loads(said) for p, said in self._said("found", path)}
        self._check_failed(path, {p: said.get("failed", "") for p, said in found.items()})
        if len({said["identity"] for said in found.values()}) > 1:
            raise CheckpointError(
                f"nothing was restored: {_paths(found)}; every process has to restore the same checkpoint"
            )

    def end(self, path: Path | None, failed: str) -> None:
        """Says how it went here, and goes on once it went well everywhere; where it did not here, at once.

        Args:
          path: where this process found it, if it did.
          failed: what went wrong here; empty where nothing did.

        Raises:
          CheckpointError: something went wrong in another process.
        """
        if path is None:
            self.processes.say(f"{self.key}/found", json.dumps({"failed": failed}))
        self.processes.say(f"{self.key}/read", failed)
        if path is not None and not failed:
            self._check_failed(path, dict(self._said("read", path)))

    def _said(self, place: str, path: Path) -> list[tuple[int, str]]:
        """What each of the others said at a place."""
        occasion = Occasion(f"{self.key}/{place}", self.calls, f"checkpoint.restore of {path}", _REMEDY)
        return [(p, self.processes.said(occasion, p)) for p in self.others]

    def _check_failed(self, path: Path, failed: dict[int, str]) -> None:
        for p, why in failed.items():
            if why:
                raise CheckpointError(f"{path}: nothing was restored, because of process {p}: {why}")


@contextlib.contextmanager
def together(targets: Iterable[Target]) -> Iterator[Agree]:
    """Has the processes that a tree is spread over restore it from one checkpoint, in the block.

    Args:
      targets: the leaves that are wanted. Where they are on devices of this process alone, or on none, it is alone.

    Yields:
      What is called with the path and the identity of what was found, before anything is read.

    Raises:
      CheckpointError: another process found another checkpoint, or could not restore this one.
    """
    processes = Processes.of_this_run()
    members = _members(targets) if processes.count > 1 else frozenset()
    if len(members) < 2 or processes.index not in members:
        yield lambda path, identity: None
        return
    name = hashlib.sha256(json.dumps(sorted(members)).encode()).hexdigest()[:16]
    key = f"manymesh.checkpoint/restore/{name}/{next(_numbers[members])}"
    restore = Together(processes, tuple(sorted(members - {processes.index})), key, processes.calls())
    agreed: list[Path] = []
    failed = "it was interrupted"
    with contextlib.ExitStack() as stack:

        def agree(path: Path, identity: str) -> None:
            agreed.append(path)
            restore.agree(path, identity)
            stack.enter_context(processes.busy("restoring a checkpoint"))

        try:
            yield agree
            failed = ""
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
            raise
        finally:
            stack.close()
            restore.end(agreed[0] if agreed else None, failed)


def _members(targets: Iterable[Target]) -> frozenset[int]:
    """The processes that have devices on which something is wanted."""
    shardings = {target.sharding for target in targets if target.sharding is not None and target.has_devices()}
    devices: set[Any] = set().union(*(sharding.device_set for sharding in shardings))
    return frozenset(device.process_index for device in devices)


def _paths(found: dict[int, dict[str, str]]) -> str:
    """``process 0 restores run/5, while process 1 restores run/4``."""
    groups: dict[tuple[str, str], list[int]] = {}
    for p in sorted(found):
        groups.setdefault((found[p]["path"], found[p]["identity"]), []).append(p)
    return ", while ".join(
        f"process {ps[0]} restores {path}" if len(ps) == 1 else f"processes {', '.join(map(str, ps))} restore {path}"
        for (path, _), ps in groups.items()
    )
