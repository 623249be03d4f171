"""`Manager`: the checkpoints of a run, saved beside the training loop."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import jax

from .._errors import ArgumentError, CheckpointError, CheckpointNotFoundError
from .._types import PyTree
from ._api import as_path
from ._format import ASIDE, ITEM, read_metadata, steps_in
from ._read import read
from ._write import Writing, prepare

T = TypeVar("T")


class Manager:
    """The checkpoints of a run: a directory with one directory for each step that was saved.

    As Orbax's ``CheckpointManager``, which reads the same directory. `save` copies the arrays to the host and returns;
    they are written in a thread, while the next steps run. What goes wrong there is raised by the next call.

    Args:
      directory: where they are; made if it is not there. In several processes, on a file system that all of them see.
      max_to_keep: how many stay; the oldest are removed after a newer one is complete. None: all.
      save_interval_steps: `save` does nothing but for multiples of this.
      asynchronous: whether `save` returns before everything is on disk.

    Example:
      >>> import tempfile, jax.numpy as jnp, manymesh as mm
      >>> with mm.checkpoint.Manager(tempfile.mkdtemp(), max_to_keep=2, save_interval_steps=10) as manager:
      ...     for step in range(1, 41):
      ...         _ = manager.save(step, {"w": jnp.full(4, step)}, metadata={"batch": 8 * step})
      >>> manager.all_steps(), manager.metadata()
      ([30, 40], {'batch': 320})
      >>> manager.restore(like={"w": jnp.zeros(4, jnp.int32)})["w"].tolist()
      [40, 40, 40, 40]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = None,
        save_interval_steps: int = 1,
        asynchronous: bool = True,
    ) -> None:
        for name, number in (("max_to_keep", max_to_keep), ("save_interval_steps", save_interval_steps)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ArgumentError(f"Manager({name}={number!r}): expected is a number from 1")
        self.directory = as_path(directory)
        self._max_to_keep, self._interval, self._asynchronous = max_to_keep, save_interval_steps, asynchronous
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._clean = False  # whether what earlier runs left unfinished has been removed

    def save(self, step: int, state: PyTree, *, metadata: Any = None, force: bool = False) -> bool:
        """Saves the state after a step.

        Waits for the save before this one, and until the arrays are computed and on the host; the next step may be given
        them to donate.

        Args:
          step: its number, from 0.
          state: any pytree; see `save`.
          metadata: anything that JSON can say, as the position in the data; see `save`.
          force: whether to save steps between those of `save_interval_steps` too.

        Returns:
          Whether it is saved.

        Raises:
          CheckpointError: this step is saved already, the state cannot be, or the save before this one failed.
        """
        _check_step(step)
        if not (force or self.should_save(step)):
            return False
        self.wait_until_finished()
        writing = prepare(self.directory / str(step), ITEM, state, metadata, keep=self._asynchronous)
        if self._asynchronous:
            # No daemon: a program that ends while its last checkpoint is written waits for it.
            self._thread = threading.Thread(target=self._run, args=(writing,), name=f"manymesh-checkpoint-{step}")
            self._thread.start()
        else:
            self._write(writing)
        return True

    def should_save(self, step: int) -> bool:
        """Whether `save` would save this step."""
        return step % self._interval == 0

    @overload
    def restore(self, step: int | None = None) -> PyTree: ...
    @overload
    def restore(
        self, step: int | None = None, *, like: T, stacked: Mapping[str, str] | None = None, cast: bool = False
    ) -> T: ...
    def restore(
        self,
        step: int | None = None,
        *,
        like: PyTree = None,
        stacked: Mapping[str, str] | None = None,
        cast: bool = False,
    ) -> PyTree:
        """Restores the state after a step.

        Args:
          step: its number; None for the latest.
          like, stacked, cast: as for `restore`.

        Raises:
          CheckpointNotFoundError: it was not saved, or nothing was.
          CheckpointError: it does not fit.
        """
        return read(self._path(step), like, stacked, cast)

    def metadata(self, step: int | None = None) -> Any:
        """What was given to `save` as ``metadata=``; the latest where no step is named."""
        return read_metadata(self._path(step))

    def latest_step(self) -> int | None:
        """The last step that is saved completely; None where nothing is."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """The steps that are saved completely, in order."""
        return steps_in(self.directory)

    def delete(self, step: int) -> None:
        """Removes a checkpoint.

        Raises:
          CheckpointNotFoundError: it was not saved.
        """
        self.wait_until_finished()
        path = self._path(step)
        if jax.process_index() == 0:
            _remove(path)

    def wait_until_finished(self) -> None:
        """Waits until everything that was given to `save` is on disk.

        Raises:
          CheckpointError: it could not be saved.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"a checkpoint in {self.directory} was not saved: {error}") from error

    def close(self) -> None:
        """Waits as `wait_until_finished` does. The manager can be used again."""
        self.wait_until_finished()

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._thread is not None:
            self._thread.join()  # what went wrong in the loop is the news

    def _path(self, step: int | None) -> Path:
        if step is None:
            step = self.latest_step()
            if step is None:
                raise CheckpointNotFoundError(
                    f"{self.directory} holds no finished checkpoint; latest_step() is None in a run that begins"
                )
        _check_step(step)
        return self.directory / str(step)

    def _run(self, writing: Writing) -> None:
        try:
            self._write(writing)
        except BaseException as error:  # raised in the thread of the user
            self._error = error

    def _write(self, writing: Writing) -> None:
        if writing.processes.first and not self._clean and self.directory.is_dir():
            for left in self.directory.iterdir():
                if ASIDE in left.name:
                    shutil.rmtree(left, ignore_errors=True)
        self._clean = True
        writing.run(functools.partial(self._remove_old, int(writing.path.name)))

    def _remove_old(self, saved: int) -> None:
        if self._max_to_keep is not None:
            others = [step for step in self.all_steps() if step != saved]  # the new one stays, whatever its number
            for step in others[: max(len(others) + 1 - self._max_to_keep, 0)]:
                _remove(self.directory / str(step))


def _check_step(step: int) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ArgumentError(f"step={step!r}: expected is a number from 0")


def _remove(path: Path) -> None:
    """Removes a checkpoint; a part of it is never found under its name."""
    away = path.parent / f"{path.name}{ASIDE}-removed"
    if away.exists():
        shutil.rmtree(away)
    os.rename(path, away)
    shutil.rmtree(away)
