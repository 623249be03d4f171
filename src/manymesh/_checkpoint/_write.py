"""Writing a checkpoint aside, and making it the current one in one step.

Until the rename there is no directory of the checkpoint's name; from then on all of it is there. Whoever is killed in
between leaves a directory whose name says that it is not finished, which nobody restores from and the next save removes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import CheckpointError
from .._types import PyTree
from ._alike import check_alike
from ._format import ASIDE, translated, write_descriptions, write_json
from ._leaves import Leaf, leaves_of, text
from ._left_out import check_left_out
from ._metadata import own, settled, with_all
from ._processes import Processes
from ._snapshot import Part, snapshot
from ._store import Database, merge

_numbers = itertools.count()  # saves begin in the same order in every process
_under_way: dict[Path, Writing] = {}  # what this process is writing, whichever manager began it


@dataclass(frozen=True)
class Writing:
    """A checkpoint of which everything is on the host.

    Attributes:
      path: what it is going to be called.
      item: name of its only item, or None.
      leaves: leaves and empty containers of the tree.
      parts: what this process writes.
      metadata: the user's, settled.
      processes: who else writes.
      number: how many saves this process began before.
      calls: how many steps and other things that all processes do together.
    """

    path: Path
    item: str | None
    leaves: Sequence[Leaf]
    parts: Sequence[Part]
    metadata: Any
    processes: Processes
    number: int
    calls: int

    @property
    def aside(self) -> Path:
        """Where it is written."""
        return self.path.parent / (self.path.name + ASIDE)

    @property
    def directory(self) -> Path:
        """Where its arrays are written."""
        return self.aside / self.item if self.item else self.aside

    def run(self, afterwards: Callable[[], None] | None = None) -> None:
        """Writes it and makes it current. Every process does so.

        Args:
          afterwards: what the first process does when it is current, before any process goes on.

        Raises:
          CheckpointError: a process could not, so nothing was saved; or ``afterwards`` raised, and it is saved.
        """
        try:
            self._run(afterwards)
        finally:
            if _under_way.get(self.aside) is self:
                del _under_way[self.aside]

    def _run(self, afterwards: Callable[[], None] | None) -> None:
        self.processes.agree(self.number, self.path, self.calls)
        if self.processes.count > 1:
            check_alike(self.path, self._place_of("alike"), self.processes, self.parts, self.metadata)
        for place, work in (("made", self._make), ("written", self._write), ("current", self._finish)):
            self._together(place, work)
        if afterwards is not None:
            try:
                self._together("after", afterwards if self.processes.first else lambda: None, state="")
            except Exception as raised:
                raise CheckpointError(f"{self.path} is saved, but {raised}") from raised

    def _together(self, place: str, work: Callable[[], None], **words: str) -> None:
        """Does a part of the work, and waits until every process has done its own."""
        error = None
        try:
            work()
        except Exception as raised:  # the others are waiting, and have to hear of it whatever it is
            error = raised
        self.processes.meet(self._place_of(place), error, **words)

    def _place_of(self, name: str) -> str:
        """What processes call a place at which they meet."""
        return f"{self.number}/{self.path.name}/{name}"

    def _make(self) -> None:
        if self.processes.first:
            if _under_way.setdefault(self.aside, self) is not self:
                raise CheckpointError(f"{self.path} is being saved already, by another call; wait for that one")
            if self.aside.exists():
                shutil.rmtree(self.aside)
            self.directory.mkdir(parents=True)

    def _write(self) -> None:
        database = Database(self._place(self.processes.index))
        for part in self.parts:
            if part.pieces:
                database.put(part.record, part.shape, part.dtype, part.chunk, part.pieces)
        database.commit()
        if self.processes.count > 1:
            counts = [sum(math.prod(piece.shape) for _, piece in part.pieces) for part in self.parts]
            write_json(self._account(self.processes.index), {"counts": counts, "own": own(self.metadata)})

    def _finish(self) -> None:
        if not self.processes.first:
            return
        owns = [own(self.metadata)]
        if self.processes.count > 1:
            everyone = range(self.processes.count)
            accounts = [self._read_account(k) for k in everyone]
            self._check(accounts)
            owns = [account["own"] for account in accounts]
            merge(self.directory, [place for k in everyone if (place := self._place(k)).exists()])
        records = [(part.record, part.chunk) for part in self.parts]
        write_descriptions(self.aside, self.item, self.leaves, records, with_all(self.metadata, owns))
        os.rename(self.aside, self.path)
        _sync(self.path.parent)

    def _check(self, accounts: Sequence[Any]) -> None:
        """Together the processes wrote each number of the tree once."""
        for i, part in enumerate(self.parts):
            written = sum(account["counts"][i] for account in accounts)
            if written != math.prod(part.shape):
                raise CheckpointError(
                    f"{text(part.record.name)} of shape {part.shape}: {written} of its numbers were written, expected are "
                    f"{math.prod(part.shape)}; its sharding is not the same in every process"
                )

    def _read_account(self, process: int) -> Any:
        """What a process says that it wrote."""
        file = self._account(process)
        try:
            return json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"process {self.processes.index} does not see what process {process} wrote: there is no {file}; the directory "
                "has to be on a disk that all processes share"
            ) from None

    def _place(self, process: int) -> Path:
        """Where a process makes its database."""
        return self.directory / f"ocdbt.process_{process}" if self.processes.count > 1 else self.directory

    def _account(self, process: int) -> Path:
        return self.directory / "manymesh" / f"process_{process}.json"


def prepare(path: Path, item: str | None, tree: PyTree, metadata: Any, *, keep: bool) -> Writing:
    """Brings a tree to the host, as far as this process writes it.

    Args:
      path: what the checkpoint is going to be called.
      item: name of its only item, or None.
      tree: any pytree.
      metadata: anything that JSON can say, with `ByProcess` in it.
      keep: whether the arrays may be overwritten before it is written.

    Raises:
      CheckpointError: there is a checkpoint already, or something cannot be saved.
    """
    processes, number = Processes.of_this_run(), next(_numbers)
    calls = processes.calls()
    with processes.preparing(number, path):
        metadata = settled(path, metadata)
        with translated(f"{path}: nothing was saved"):
            exists = path.exists()
        if exists:
            remedy = "remove it, or save under another name"
            if item is not None:
                remedy = f"manager.delete({path.name}) removes it, as where a run goes on from an earlier step"
            raise CheckpointError(f"{path} exists already: {remedy}")
        if ASIDE in path.name:
            raise CheckpointError(
                f"{path}: names with {ASIDE!r} are those of checkpoints that are not finished; save under another name"
            )
        leaves, _ = leaves_of(tree, with_empty=True)
        check_left_out(path, leaves)
        parts = snapshot(leaves, processes, keep=keep)
    return Writing(path, item, leaves, parts, metadata, processes, number, calls)


def is_under_way(aside: Path) -> bool:
    """Whether this process is writing there."""
    return aside in _under_way


def _sync(directory: Path) -> None:
    """Has the entries of a directory on disk when it returns."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
