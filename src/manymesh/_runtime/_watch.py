"""Who looks on while steps run: those who record, and JAX's profiler while it traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import jax

from .._plan._instructions import Instruction, Run, Send
from ._describe import Describer, Description
from ._lower import Lowered
from ._observe import Observer

Watcher = Callable[[str, Lowered], Observer]
"""Takes the name of a step that is about to run and what it was lowered to; gives who is told."""

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("manymesh_watchers", default=())

_profiled: Callable[[], bool] = jax.profiler.TraceAnnotation.is_enabled


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Every step that this thread runs inside the block is shown to a watcher."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


def observer_of(name: str, lowered: Lowered) -> Observer | None:
    """Who has to be told of a call that begins now; None, which costs nothing, where nobody looks.

    Args:
      name: name of the step.
      lowered: what it was lowered to.
    """
    watchers, profiled = _watchers.get(), _profiled()
    if not watchers and not profiled:
        return None
    observers = [watcher(name, lowered) for watcher in watchers]
    if profiled:
        observers.append(_Annotations(lowered))
    return observers[0] if len(observers) == 1 else _Several(observers)


class _Annotations(Observer):
    """Names what is launched in the traces of ``jax.profiler``: task, phase, stage and microbatch, or what crosses."""

    def __init__(self, lowered: Lowered) -> None:
        self._describe = Describer.of(lowered)
        self._open: jax.profiler.TraceAnnotation | None = None

    def begin(self, position: int, instruction: Instruction, inputs: Sequence[jax.Array]) -> None:
        what = self._describe(position, instruction)
        self._open = jax.profiler.TraceAnnotation(annotation(what, instruction), **_details(what))
        self._open.__enter__()

    def end(self, position: int, instruction: Instruction, outputs: Sequence[jax.Array]) -> None:
        self.failed()

    def failed(self) -> None:
        assert self._open is not None, "an instruction that ends has begun"
        self._open.__exit__(None, None, None)


class _Several(Observer):
    """Tells several observers, in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def moves_argument(self, position: int, value: object, sharding: jax.sharding.NamedSharding) -> None:
        for observer in self._observers:
            observer.moves_argument(position, value, sharding)

    def moved_argument(self, position: int, moved: jax.Array) -> None:
        for observer in self._observers:
            observer.moved_argument(position, moved)

    def begin(self, position: int, instruction: Instruction, inputs: Sequence[jax.Array]) -> None:
        for observer in self._observers:
            observer.begin(position, instruction, inputs)

    def end(self, position: int, instruction: Instruction, outputs: Sequence[jax.Array]) -> None:
        for observer in self._observers:
            observer.end(position, instruction, outputs)

    def failed(self) -> None:
        for observer in self._observers:
            observer.failed()


def annotation(what: Description, instruction: Instruction) -> str:
    """``front forward stage 0 microbatch 3``; ``receive front -> submesh 1 microbatch 3: float32[4,64] from front``."""
    words = [f"{what.label} {what.kind}"]
    if not isinstance(instruction, Run):
        words = [f"{'send' if isinstance(instruction, Send) else 'receive'} {what.label}"]
    if what.stage is not None and what.kind != "transfer":
        words.append(f"stage {what.stage}")
    if what.microbatch is not None:
        words.append(f"microbatch {what.microbatch}")
    text = " ".join(words)
    return f"{text}: {what.carried()}" if what.kind == "transfer" else text


def _details(what: Description) -> dict[str, str | int]:
    """What the profiler shows beside the name."""
    details: dict[str, str | int] = {"task": what.label, "phase": what.kind, "submesh": what.submesh}
    if what.stage is not None:
        details["stage"] = what.stage
    if what.microbatch is not None:
        details["microbatch"] = what.microbatch
    if what.nbytes:
        details["bytes"] = what.nbytes
    return details
