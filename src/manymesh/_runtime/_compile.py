"""Compiling fragments: each distinct one once, as many at a time as there are cores."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from .. import _compat
from .._collector import collector_paused

Request = Generator["Future[Any]", Any, Any]


@dataclass(eq=False)
class Executables:
    """Compiled fragments by structure, shardings and donation; shared by the programs of one ``mm.jit``, and by threads.

    Stages of one kind compile once: for the devices of another submesh of the same form the executable of the
    first is loaded again. JAX ties executables to devices, so each submesh has to have its own.

    Attributes:
      by_key: (what makes executables equal, submesh) -> the executable, or the work that will give it. None for
        an executable that could not be loaded again and has to be compiled.
      compiled: how many were made by XLA.
      reused: how often one was asked for that there was already, or that was loaded again.
    """

    by_key: dict[tuple[Any, Mesh], Future[Any]] = field(default_factory=dict)
    compiled: int = 0
    reused: int = 0
    _first: dict[Any, tuple[Mesh, Future[Any]]] = field(default_factory=dict)
    _saved: dict[Any, Future[Any]] = field(default_factory=dict)
    # Where it is made -> what was asked for there: what makes executables equal, the submesh, the work.
    _asked: dict[ThreadPoolExecutor, list[tuple[Any, Mesh, Future[Any]]]] = field(default_factory=dict)

    def request(
        self, pool: ThreadPoolExecutor, key: Any, mesh: Mesh, lower: Callable[[], Callable[[], Any]]
    ) -> Request:
        """Asks for an executable; a generator, as `run_requests` takes them.

        Args:
          pool: where XLA compiles.
          key: what makes executables equal, without devices.
          mesh: the submesh, whose devices it is for.
          lower: called here, because JAX's settings belong to a thread; what it returns is called in the pool.
        """
        while True:
            future = self.by_key.get((key, mesh))
            if future is not None:
                self.reused += 1
            elif (first := self._first.get(key)) is not None and _can_load_again(first[0], mesh):
                future = self._load_again(pool, key, *first, mesh)
                self._keep(pool, key, mesh, future)
                self.reused += 1
            else:
                future = pool.submit(lower())
                self._keep(pool, key, mesh, future)
                self.compiled += 1
                self._first.setdefault(key, (mesh, future))
            executable = yield future
            if executable is not None:
                return executable
            self.reused -= 1
            self._first.pop(key, None)  # neither this one nor another can be loaded for other devices
            if self.by_key.get((key, mesh)) is future:
                self.by_key.pop((key, mesh), None)

    def _keep(self, pool: ThreadPoolExecutor, key: Any, mesh: Mesh, future: Future[Any]) -> None:
        self._asked.setdefault(pool, []).append((key, mesh, future))
        self.by_key[key, mesh] = future

    def _load_again(
        self, pool: ThreadPoolExecutor, key: Any, source: Mesh, made: Future[Any], target: Mesh
    ) -> Future[Any]:
        saved = self._saved.get(key)
        if saved is None:
            saved = self._saved[key] = _then(pool, made, _compat.save_executable)
        return _then(pool, saved, functools.partial(_compat.load_executable, source=source, target=target))

    def settle(self, pool: ThreadPoolExecutor) -> None:
        """Drops what is needed only while a program is compiled, and what did not compile, so that another call tries.

        Args:
          pool: where it was compiled. What another thread compiles meanwhile stays.
        """
        self._saved.clear()
        for key, mesh, future in self._asked.pop(pool, ()):
            if not future.done() or future.cancelled() or future.exception():
                if self.by_key.get((key, mesh)) is future:
                    self.by_key.pop((key, mesh), None)
                if self._first.get(key) == (mesh, future):
                    self._first.pop(key, None)


def _can_load_again(a: Mesh, b: Mesh) -> bool:
    """Whether an executable for the devices of one mesh can be loaded for those of the other."""
    if _compat.caches_on_disk():
        # What comes from JAX's cache on disk cannot be written out again (on CPU it then lacks its kernels), and the
        # cache, which goes by devices, should have the executables of all submeshes.
        return False
    kinds = {(d.platform, d.device_kind, d.process_index) for mesh in (a, b) for d in mesh.devices.flat}
    return (
        len(kinds) == 1
        and (a.axis_names, a.axis_types, a.devices.shape) == (b.axis_names, b.axis_types, b.devices.shape)
        # On TPU what the devices of a submesh say to each other depends on where in the torus they are.
        and (a.size == 1 or next(iter(kinds))[0] != "tpu")
    )


def _then(pool: ThreadPoolExecutor, first: Future[Any], call: Callable[[Any], Any]) -> Future[Any]:
    """What ``call`` makes of a future's result, in the pool; no thread waits for the future."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call(first.result()))
        except BaseException as error:
            result.set_exception(error)

    def start(_: Future[Any]) -> None:
        try:
            pool.submit(run)
        except RuntimeError as error:  # the pool was closed, because something else failed
            result.set_exception(error)

    first.add_done_callback(start)
    return result


def workers() -> int:
    """How many compilations run at a time."""
    return max(2, min(os.cpu_count() or 1, 16))


def run_requests(
    names: Sequence[str], requests: Sequence[Callable[[], Request]], progress: Callable[[str], None]
) -> list[Any]:
    """Runs requests for executables side by side.

    Args:
      names: what each is called, for the progress and for errors.
      requests: each gives a generator that yields futures, gets their results, and returns its executable.
      progress: called with the name of each that is finished.

    Returns:
      What each request returned.
    """
    results: list[Any] = [None] * len(requests)
    active: dict[int, tuple[Request, Future[Any]]] = {}

    def advance(k: int, request: Request, value: Any) -> None:
        """Sends a value to a request."""
        try:
            active[k] = request, request.send(value)
        except StopIteration as end:
            active.pop(k, None)
            results[k] = end.value
            progress(names[k])

    def finish(k: int, request: Request, future: Future[Any]) -> None:
        advance(k, request, future.result())

    with collector_paused():
        for k, request in enumerate(requests):
            _noted(names[k], advance, k, request(), None)
    while active:
        wait([future for _, future in active.values()], return_when=FIRST_COMPLETED)
        for k in [k for k, (_, future) in sorted(active.items()) if future.done()]:
            running, future = active[k]
            _noted(names[k], finish, k, running, future)
    return results


def _noted(name: str, call: Callable[..., None], *args: Any) -> None:
    """The call; an exception says which fragment it is about."""
    try:
        call(*args)
    except Exception as error:
        note = f"while compiling fragment {name!r}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
