"""Compiling fragments: each distinct one once, as many at a time as there are cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

Request = Generator["Future[Any]", Any, Any]


@dataclass(eq=False)
class Executables:
    """Compiled fragments by structure, shardings and donation; shared by the programs of one ``mm.jit``.

    Attributes:
      by_key: key -> the executable, or its compilation under way.
      compiled: how many were made.
      reused: how often one was asked for that there was already.
    """

    by_key: dict[Any, Future[Any]] = field(default_factory=dict)
    compiled: int = 0
    reused: int = 0

    def submit(self, pool: ThreadPoolExecutor, key: Any, lower: Callable[[], Callable[[], Any]]) -> Future[Any]:
        """The executable of a key.

        Args:
          pool: where XLA compiles.
          key: what makes executables equal.
          lower: called here, because JAX's settings belong to a thread; what it returns is called in the pool.
        """
        if key in self.by_key:
            self.reused += 1
        else:
            self.by_key[key] = pool.submit(lower())
            self.compiled += 1
        return self.by_key[key]

    def forget_failures(self) -> None:
        """Drops what did not compile, so that another call tries again."""
        self.by_key = {k: f for k, f in self.by_key.items() if f.done() and not f.cancelled() and not f.exception()}


def workers() -> int:
    """How many compilations run at a time."""
    return max(2, min(os.cpu_count() or 1, 16))


def run_requests(
    names: list[str], requests: Sequence[Callable[[], Request]], needs: list[set[int]], progress: Callable[[str], None]
) -> list[Any]:
    """Runs requests for executables side by side.

    Args:
      names: what each is called, for the progress and for errors.
      requests: each gives a generator that yields futures, gets their results, and returns its executable.
      needs: for each, the requests that have to be finished before it starts.
      progress: called with the name of each that is finished.

    Returns:
      What each request returned.
    """
    results: list[Any] = [None] * len(requests)
    waits = [set(n) for n in needs]
    dependents: list[list[int]] = [[] for _ in requests]
    for k, of in enumerate(needs):
        for n in of:
            dependents[n].append(k)
    active: dict[int, tuple[Request, Future[Any]]] = {}

    def advance(k: int, request: Request, value: Any) -> list[int]:
        """Sends a value to a request; returns the requests that may start because it is finished."""
        try:
            active[k] = request, request.send(value)
        except StopIteration as end:
            active.pop(k, None)
            results[k] = end.value
            progress(names[k])
            for d in dependents[k]:
                waits[d].discard(k)
            return [d for d in dependents[k] if not waits[d]]
        return []

    ready = [k for k, w in enumerate(waits) if not w]
    while ready or active:
        while ready:
            k = ready.pop(0)
            ready += _noted(names[k], advance, k, requests[k](), None)
        if active:
            wait([future for _, future in active.values()], return_when=FIRST_COMPLETED)
        for k in [k for k, (_, future) in sorted(active.items()) if future.done()]:
            request, future = active[k]
            ready += _noted(names[k], lambda k=k, r=request, f=future: advance(k, r, f.result()))
    return results


def _noted(name: str, call: Callable[..., list[int]], *args: Any) -> list[int]:
    """The call; an exception says which fragment it is about."""
    try:
        return call(*args)
    except Exception as error:
        note = f"while compiling fragment {name!r}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def first_touches(touched: Iterable[Iterable[Any]]) -> list[set[int]]:
    """For each item, the earlier items that were the first to touch something it touches."""
    first: dict[Any, int] = {}
    needs = []
    for k, things in enumerate(touched):
        needs.append({first.setdefault(t, k) for t in things} - {k})
    return needs
