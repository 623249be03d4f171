"""Two processes of four devices, started once, that call functions together; for tests that need nothing fresher."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent
PROCESSES, DEVICES = 2, 4


class Failed(AssertionError):
    """A function failed in one of the processes."""


class Pool:
    """The processes. They end when the pool is closed, and when one of them fails to answer in time."""

    def __init__(self) -> None:
        self.folder: tempfile.TemporaryDirectory | None = None
        self.thread: threading.Thread | None = None

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="manymesh-pool-")
        self.output, self.calls = io.StringIO(), 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        from manymesh._distributed._launch import run_processes

        command = [sys.executable, str(Path(__file__)), self.folder.name]
        paths = os.pathsep.join(p for p in [*sys.path, str(TESTS), str(HERE)] if p)
        self.code = run_processes(command, PROCESSES, DEVICES, output=self.output, more={"PYTHONPATH": paths})

    def call(self, function: str, *args, timeout: float = 300):
        """What ``module.function`` returns in each process.

        Raises:
          Failed: it raised something in one of them, or did not return in time.
        """
        if self.thread is None or not self.thread.is_alive():
            self.close()
            self._start()
        number, folder = self.calls, Path(self.folder.name)
        self.calls += 1
        _write(folder / f"call{number}", pickle.dumps((function, args)))
        results = [folder / f"result{number}.{p}" for p in range(PROCESSES)]
        deadline, pauses = time.monotonic() + timeout, _pauses(0.005, 0.05)
        while not all(r.exists() for r in results):
            if not self.thread.is_alive() or time.monotonic() > deadline:
                words = "ended" if not self.thread.is_alive() else f"did not return within {timeout:g} s"
                # Where one raises, the other waits for it: its error is the one that matters.
                there = [pickle.loads(r.read_bytes()) for r in results if r.exists()]
                raised = "".join(text for fine, text in there if not fine)
                output = self.output.getvalue()[-6000:]
                self.close()
                raise Failed(f"{function}{args}: the processes {words}\n{raised}{output}")
            time.sleep(next(pauses))
        answers = [pickle.loads(r.read_bytes()) for r in results]
        errors = [f"process {p}: {text}" for p, (fine, text) in enumerate(answers) if not fine]
        if errors:
            self.close()  # the other one may be anywhere
            raise Failed(f"{function}{args}\n" + "\n".join(errors))
        return [value for _, value in answers]

    def close(self) -> None:
        """Ends the processes."""
        if self.thread is not None:
            _write(Path(self.folder.name) / f"call{self.calls}", pickle.dumps((None, ())))
            self.thread.join(10)
            if self.thread.is_alive():  # what hangs is killed: launch watches this file through its children
                (Path(self.folder.name) / "abandoned").touch()
                self.thread.join(20)
            self.thread = None
            self.folder.cleanup()


def _pauses(first: float, longest: float) -> Iterator[float]:
    """How long to sleep before looking again: a twentieth of the time that was waited so far, within limits."""
    begin = time.monotonic()
    while True:
        yield min(max(first, (time.monotonic() - begin) / 20), longest)


def _write(path: Path, content: bytes) -> None:
    aside = path.with_name(f"{path.name}.part{os.getpid()}")
    aside.write_bytes(content)
    aside.rename(path)


def _abandoned(folder: Path) -> None:
    """Ends this process when the pool has given up on it, or is gone."""
    parent = os.getppid()
    while not (folder / "abandoned").exists() and os.getppid() == parent:
        time.sleep(0.5)
    os._exit(3)


def main(folder: Path) -> None:
    """What runs in each process."""
    threading.Thread(target=_abandoned, args=(folder,), daemon=True).start()
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    import compiling
    import manymesh as mm

    compiling.set_up()
    # Asked for here, this transport is there later; `programs.under` chooses one for each function.
    mm.distributed.initialize(stall_timeout=100, transport="device_put")
    from manymesh._distributed._world import several

    several().asked = "pull"
    import jax

    number = 0
    while True:
        path, pauses = folder / f"call{number}", _pauses(0.002, 0.2)
        while not path.exists():
            time.sleep(next(pauses))
        function, args = pickle.loads(path.read_bytes())
        if function is None:
            return
        try:
            module, _, name = function.rpartition(".")
            answer = True, getattr(importlib.import_module(module), name)(*args)
        except Exception:
            answer = False, traceback.format_exc()
        _write(folder / f"result{number}.{jax.process_index()}", pickle.dumps(answer))
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
