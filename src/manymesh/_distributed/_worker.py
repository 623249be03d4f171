"""A function in several processes: what `launch` starts, and what runs there."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import _compat
from .._errors import ProcessError
from ._initialize import PROCESS, initialize
from ._launch import run_processes
from ._restarts import Restarts

_START = "import sys; from manymesh._distributed._worker import main; main(sys.argv[1])"


@_compat.boundary
def launch(
    function: Callable[..., Any],
    processes: int,
    *,
    devices_per_process: int = 1,
    args: Sequence[Any] = (),
    timeout: float | None = None,
    max_restarts: int = 0,
) -> list[Any]:
    """Runs a function in several local processes, each after `initialize`; for notebooks and tests.

    Args:
      function: called in each process. It has to be importable there, from a module; a function of a notebook or of the
        script itself needs the package ``cloudpickle``.
      processes: how many.
      devices_per_process: simulated CPU devices of each.
      args: arguments of the function.
      timeout: seconds after which all are ended.
      max_restarts: how often all are ended and started again when one fails, each time from the beginning of the
        function: it is for functions that go on from a checkpoint.

    Returns:
      What the function returned in each process; it has to be picklable, such as `manymesh.fetch` gives it.

    Raises:
      ProcessError: one of them failed, and its output has been printed, each line with the number of its process; or
        something cannot be meant, or cannot go to another process.

    Example:
      >>> import operator, manymesh as mm
      >>> mm.distributed.launch(operator.add, processes=2, args=(1, 2), timeout=60)
      [3, 3]
    """
    if not callable(function):
        raise ProcessError(
            f"distributed.launch: function has to be a function, found {function!r}; import it, and give it itself"
        )
    if not isinstance(args, (tuple, list)):
        raise ProcessError(
            f"distributed.launch: args has to be a tuple of the arguments, found {type(args).__name__} {args!r:.80}; write ({args!r:.80},)"
        )
    with tempfile.TemporaryDirectory(prefix="manymesh-") as folder:
        task = Path(folder) / "task"
        task.write_bytes(_pickled(function, tuple(args)))
        code = run_processes(
            [sys.executable, "-c", _START, folder], processes, devices_per_process, timeout=timeout,
            restarts=Restarts(max_restarts), more={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )  # fmt: skip
        if code:
            name = getattr(function, "__name__", repr(function))
            raise ProcessError(f"distributed.launch({name}) failed with exit code {code}; its output says why")
        # These files are of this function's own processes, in a folder that only this user can write.
        return [pickle.loads((Path(folder) / f"result{p}").read_bytes()) for p in range(processes)]


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    imported: Any = function
    while isinstance(imported, functools.partial):  # which goes wherever its function does
        imported = imported.func
    if not hasattr(imported, "__qualname__"):
        imported = type(imported)
    name = imported.__qualname__
    dumps: Callable[[object], bytes] = pickle.dumps
    if getattr(imported, "__module__", "__main__") == "__main__" or "<" in name:
        dumps = _cloudpickle(name)
    try:
        return bytes(dumps((function, args)))
    except Exception as error:  # whatever an object says that cannot be pickled
        raise ProcessError(
            f"distributed.launch({name}): the function, what it closes over or its arguments cannot go to another process "
            f"({error}); make meshes, tasks and steps inside the function, and give it numpy arrays and other plain values"
        ) from error


def _cloudpickle(name: str) -> Callable[[object], bytes]:
    try:
        import cloudpickle  # type: ignore[import-not-found, import-untyped, unused-ignore]  # optional
    except ImportError:
        raise ProcessError(
            f"distributed.launch({name}): the other processes cannot import it; put it in a module of its own, or "
            "install cloudpickle"
        ) from None
    dumps: Callable[[object], bytes] = cloudpickle.dumps
    return dumps


def main(folder: str) -> None:
    """What runs in each process."""
    initialize()  # before anything makes an array: one may be among what is read now
    function, args = pickle.loads((Path(folder) / "task").read_bytes())
    result = function(*args)
    (Path(folder) / f"result{os.environ[PROCESS]}").write_bytes(pickle.dumps(result))
