"""`Manager`: the checkpoints of a run, saved beside the training loop."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex, TypeVar, overload

import jax

from .. import _compat
from .._errors import ArgumentError, CheckpointError, CheckpointNotFoundError
from .._types import PyTree
from ._api import as_path
from ._format import ASIDE, ITEM, check_names_of_steps, read_metadata, steps_in, translated, unfinished_steps
from ._processes import Processes
from ._read import read
from ._write import Writing, is_under_way, prepare

T = TypeVar("T")


class Manager:
    """The checkpoints of a run: a directory with one directory for each step that was saved.

    As Orbax's ``CheckpointManager``, which reads the same directory. `save` copies the arrays to the host and returns;
    they are written in a thread, while the next steps run. What goes wrong there is raised by the next call. Everything that
    asks for checkpoints waits for the one that is being written. Several threads may call it.

    Args:
      directory: where they are; made by the first save if it is not there. In several processes, on a file system that all of
        them see. To restore, it need not be writable: if it is not, the first call of `save` says so, due or not.
      max_to_keep: how many stay; the oldest are removed after a newer one is complete; before them, those later than both
        the one that is complete and the one that `restore` gave, which a run that goes on from there has given up. None: all.
      save_interval_steps: `save` does nothing but for multiples of this.
      asynchronous: whether `save` returns before everything is on disk.

    Raises:
      CheckpointError: the directory is a file or below one, or holds steps under names that are not their numbers.

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

    @_compat.boundary
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = None,
        save_interval_steps: int = 1,
        asynchronous: bool = True,
    ) -> None:
        for name, given in (("max_to_keep", max_to_keep), ("save_interval_steps", save_interval_steps)):
            if given is not None and (_number(given) or 0) < 1:
                raise ArgumentError(f"Manager({name}={given!r:.60}): expected is a number from 1")
        self.directory = as_path(directory)
        there = _nearest(self.directory)
        if not there.is_dir():
            raise CheckpointError(
                f"Manager({str(self.directory)!r}): {there} is a file; expected is the name of a directory"
            )
        check_names_of_steps(self.directory)
        self._max_to_keep = None if max_to_keep is None else operator.index(max_to_keep)
        self._interval, self._asynchronous = operator.index(save_interval_steps), asynchronous
        self._thread: threading.Thread | None = None
        self._errors: list[tuple[str, BaseException]] = []  # of the last save, until somebody hears of it
        weakref.finalize(self, _say_unheard, self._errors)
        self._clean = False  # whether what was left unfinished, by earlier runs or a save that failed, has been removed
        self._tried = False  # whether anything was written, or tried to be
        self._restored: int | None = None  # the step that was restored last
        self._lock = threading.RLock()  # one save begins at a time, and one call waits for it

    @_compat.boundary
    def save(self, step: SupportsIndex, state: PyTree, *, metadata: Any = None, force: bool = False) -> bool:
        """Saves the state after a step.

        Waits for the save before this one, and until the arrays are computed and on the host; the next step may be given
        them to donate.

        Args:
          step: its number, from 0, or a scalar array of one, which is waited for.
          state: any pytree; see `save`.
          metadata: anything that JSON can say, as the position in the data; see `save`.
          force: whether to save steps between those of `save_interval_steps` too.

        Returns:
          Whether it is saved.

        Raises:
          CheckpointError: this step is saved already, the state cannot be, the directory cannot be written to, or the save
            before this one failed.
        """
        number = _as_step(step, "save(step, state)")
        with self._lock:
            if not (force or self.should_save(number)):
                self._look_after()
                return False
            self.wait_until_finished()
            self._tried = True
            writing = prepare(self.directory / str(number), ITEM, state, metadata, keep=self._asynchronous)
            if self._asynchronous:
                # No daemon: a program that ends while its last checkpoint is written waits for it.
                self._thread = threading.Thread(target=self._run, args=(writing,), name=f"manymesh-checkpoint-{number}")
                self._thread.start()
            else:
                with translated(f"{writing.path}: nothing was saved"):
                    self._write(writing)
        return True

    @_compat.boundary
    def should_save(self, step: SupportsIndex) -> bool:
        """Whether `save` would save this step."""
        return _as_step(step, "should_save(step)") % self._interval == 0

    @overload
    def restore(self, step: SupportsIndex | None = None) -> PyTree: ...
    @overload
    def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        like: T,
        stacked: Mapping[str, str] | None = None,
        cast: bool = False,
    ) -> T: ...
    @_compat.boundary
    def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        like: PyTree = None,
        stacked: Mapping[str, str] | None = None,
        cast: bool = False,
    ) -> PyTree:
        """Restores the state after a step. Waits until everything that was given to `save` is on disk.

        Args:
          step: its number; None for the latest.
          like, stacked, cast: as for `restore`.

        Raises:
          CheckpointNotFoundError: it was not saved, or nothing was.
          CheckpointError: it does not fit, or other processes restore another one; see `restore`. Or the last save failed.
        """
        found: list[Path] = []

        def find() -> Path:
            found.append(self._path(step, "restore(step, like=state)"))
            return found[0]

        state = read(find, like, stacked, cast)
        self._restored = int(found[0].name)
        return state

    @_compat.boundary
    def metadata(self, step: SupportsIndex | None = None) -> Any:
        """What was given to `save` as ``metadata=``; the latest where no step is named. Waits as `restore` does."""
        return read_metadata(self._path(step, "metadata(step)"))

    @_compat.boundary
    def latest_step(self) -> int | None:
        """The last step that was given to `save`, or saved before; None where nothing is. Waits until it is on disk."""
        return max(self.all_steps(), default=None)

    @_compat.boundary
    def all_steps(self) -> list[int]:
        """The steps that are saved, in order. Waits until everything that was given to `save` is on disk."""
        self.wait_until_finished()
        return steps_in(self.directory)

    @_compat.boundary
    def delete(self, step: SupportsIndex) -> None:
        """Removes a checkpoint. Of several processes the first removes it, and the others wait until it is gone.

        Raises:
          CheckpointNotFoundError: it was not saved.
          CheckpointError: it cannot be removed, or the first process does not come to it.
        """
        processes = Processes.of_this_run()
        with self._lock:
            path = self._path(_as_step(step, "delete(step)"), "delete(step)")
            if not processes.first:
                processes.wait_until_gone(path)
            else:
                with translated(f"{path} cannot be removed"):
                    if not path.exists():
                        raise CheckpointNotFoundError(
                            f"{path}: there is no checkpoint; all_steps() lists what there is"
                        )
                    _remove(path)

    @_compat.boundary
    def wait_until_finished(self) -> None:
        """Waits until everything that was given to `save` is on disk.

        Raises:
          CheckpointError: it could not be saved, or what it takes the place of could not be removed.
        """
        with self._lock:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            if self._errors:
                what, error = self._errors.pop()
                raise CheckpointError(what) from error

    @_compat.boundary
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

    def _path(self, step: SupportsIndex | None, call: str) -> Path:
        """Where a step is, or the latest, once nothing is being written any more."""
        number = None if step is None else _as_step(step, call)
        self.wait_until_finished()
        if number is None:
            number = self.latest_step()
            if number is None:
                raise CheckpointNotFoundError(
                    f"{self.directory} holds no finished checkpoint; latest_step() is None in a run that begins"
                )
        return self.directory / str(number)

    def _look_after(self) -> None:
        """Says what went wrong with the last save, without waiting for it, or would with the first one."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait_until_finished()
        if not self._tried:
            with (
                translated(f"{self.directory} cannot be written to"),
                tempfile.TemporaryFile(dir=_nearest(self.directory)),
            ):
                self._tried = True

    def _run(self, writing: Writing) -> None:
        try:
            self._write(writing)
        except BaseException as error:  # raised in the thread of the user
            saved = (
                isinstance(error, CheckpointError) and writing.path.exists()
            )  # but not all that comes after it is done
            what = str(error) if saved else f"a checkpoint in {self.directory} was not saved: {error}"
            self._errors.append((what, error))

    def _write(self, writing: Writing) -> None:
        if writing.processes.first and not self._clean and self.directory.is_dir():
            for left in unfinished_steps(self.directory):
                if not is_under_way(left):  # another manager of this process writes it
                    shutil.rmtree(left, ignore_errors=True)
        self._clean = False  # unless it ends well
        writing.run(functools.partial(self._remove_old, int(writing.path.name)))
        self._clean = True

    def _remove_old(self, saved: int) -> None:
        if self._max_to_keep is not None:
            # The new one stays, whatever its number.
            others = [step for step in steps_in(self.directory) if step != saved]
            restored = self._restored
            given_up = [] if restored is None else [step for step in others if step > max(saved, restored)]
            going = [*reversed(given_up), *others[: len(others) - len(given_up)]]
            for step in going[: max(len(others) + 1 - self._max_to_keep, 0)]:
                old = self.directory / str(step)
                with (
                    translated(f"{old}, beyond max_to_keep, could not be removed"),
                    contextlib.suppress(FileNotFoundError),  # somebody else has removed it, such as another manager
                ):
                    _remove(old)


def _say_unheard(errors: list[tuple[str, BaseException]]) -> None:
    """Warns of a last save that failed where the manager, or the program, ends without a call that would raise it."""
    for what, _ in errors:
        warnings.warn(f"{what}; close() of the Manager, or a with block around the loop, raises this", stacklevel=2)


def _number(value: SupportsIndex) -> int | None:
    """A whole number, of Python, NumPy or a scalar array; None for what is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _as_step(step: Any, call: str) -> int:
    """The number of a step.

    Args:
      step: what a user gave.
      call: where, for messages.

    Raises:
      ArgumentError: it is no number from 0, or an array of which this process has nothing.
    """
    concrete = isinstance(step, jax.Array) and not isinstance(step, jax.core.Tracer)
    if concrete and not step.sharding.addressable_devices:
        raise ArgumentError(
            f"{call}: step is an array on devices of other processes; expected is a number, as manymesh.fetch(step) gives it in "
            "every process"
        )
    number = _number(step)
    if number is not None and number >= 0:
        return number
    found = step if number is None else number
    if isinstance(found, (int, float, str)):
        raise ArgumentError(f"step={found!r:.60}: expected is a number from 0")
    raise ArgumentError(f"{call}: expected is a number from 0, which comes first; found {type(step).__name__}")


def _nearest(directory: Path) -> Path:
    """The directory, or else what is there of the way to it."""
    return next((path for path in (directory, *directory.parents) if os.path.exists(path)), directory)


def _remove(path: Path) -> None:
    """Removes a checkpoint; a part of it is never found under its name."""
    away = path.parent / f"{path.name}{ASIDE}-removed"
    _clear(away)
    os.rename(path, away)
    _clear(away)


def _clear(directory: Path) -> None:
    """Removes a directory if it is there; of one that is elsewhere, as on a larger disk, the link to it."""
    if directory.is_symlink():
        directory.unlink()
    elif directory.exists():
        shutil.rmtree(directory)
