"""Records what steps do while they run, with times from the devices."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax.sharding import Mesh

from .. import _compat
from .._plan._instructions import Instruction, Receive, Run, Send, Tag
from .._runtime._describe import ARROW, Describer, Description
from .._runtime._lower import Lowered
from .._runtime._observe import Observer
from .._task import mesh_devices
from ._spans import Span

_clock = time.perf_counter
LAUNCH = "its launch"


class Recorder:
    """Watches every call of every step, and says afterwards what each device did when.

    Launching returns before anything is computed. So each result is handed to a thread that waits until it is there,
    one thread for each submesh, where results come in the order of issue. A result whose buffer the next launch takes
    over is gone by then: a thread of its own waits for it, and the launch goes on once that thread does.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._queues: dict[int, queue.SimpleQueue[tuple[Call, int, jax.Array] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._pool = ThreadPoolExecutor(256, "manymesh-record")
        self._pending: list[Future[None]] = []

    def watch(self, name: str, lowered: Lowered) -> Observer:
        """The observer of a call that begins; a `Watcher`."""
        call = Call(name, lowered, self)
        self.calls.append(call)
        return call

    def wait_in_order(self, call: Call, position: int, submesh: int, witness: jax.Array) -> None:
        """Has the submesh's thread write down when an array is there."""
        if submesh not in self._queues:
            box = self._queues[submesh] = queue.SimpleQueue()
            thread = threading.Thread(target=_wait, args=(box,), name=f"manymesh-record-{submesh}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queues[submesh].put((call, position, witness))

    def wait_now(self, call: Call, position: int, witness: jax.Array) -> None:
        """Has a thread write down when an array is there, and returns when that thread is waiting."""
        waiting = threading.Lock()
        waiting.acquire()
        self._pending.append(self._pool.submit(_wait_at_once, call, position, witness, waiting))
        waiting.acquire()

    def close(self) -> None:
        """Waits until everything that was recorded is done."""
        for box in self._queues.values():
            box.put(None)
        for thread in self._threads:
            thread.join()
        self._pool.shutdown()


def _wait(box: queue.SimpleQueue[tuple[Call, int, jax.Array] | None]) -> None:
    while (item := box.get()) is not None:
        call, position, witness = item
        call.done[position] = _when(witness)
        del item, witness  # not held while the next one is awaited


def _wait_at_once(call: Call, position: int, witness: jax.Array, waiting: threading.Lock) -> None:
    waiting.release()
    call.done[position] = _when(witness)


def _when(witness: jax.Array) -> float | None:
    """When an array was there; None if its buffer was handed on before anybody could look."""
    try:
        witness.block_until_ready()
    except RuntimeError:  # deleted; or what made it failed, which the caller hears from it
        return None
    return _clock()


class _Witnesses(NamedTuple):
    """What to wait for.

    Attributes:
      of: for each instruction, which of its outputs, and whether that may be gone soon; None for no outputs.
      soon_gone: for each input of the plan, whether what arrives there may be gone soon.
    """

    of: tuple[tuple[int, bool] | None, ...]
    soon_gone: tuple[bool, ...]


_witnesses: WeakKeyDictionary[Lowered, _Witnesses] = WeakKeyDictionary()


def _find_witnesses(lowered: Lowered) -> _Witnesses:
    found = _witnesses.get(lowered)
    if found is None:
        plan, donation = lowered.plan, lowered.layout.donation
        given = {
            ins.inputs[k]
            for ins in plan.instructions
            if isinstance(ins, Run)
            for k, _ in donation.get(ins.fragment, ())
        }
        results = set(plan.outputs)  # the next step may take over their buffers
        found = _witnesses[lowered] = _Witnesses(
            tuple(_witness(ins, given, results) for ins in plan.instructions),
            tuple(slot in given for _, _, slot in plan.inputs),
        )
    return found


def _witness(ins: Instruction, given: set[int], results: set[int | None]) -> tuple[int, bool] | None:
    if isinstance(ins, Send) or not ins.outputs:
        return None
    for k, slot in enumerate(ins.outputs):
        if slot not in given and slot not in results:
            return k, False
    return next(((k, True) for k, slot in enumerate(ins.outputs) if slot not in given), (0, True))


class Call(Observer):
    """One call of a step: when each instruction began, was issued, and was done."""

    def __init__(self, name: str, lowered: Lowered, recorder: Recorder) -> None:
        self._first = len(lowered.plan.instructions)  # arguments come after the instructions, by their place
        count = self._first + 2 * len(lowered.plan.inputs)  # then what they are made of
        self.name, self.lowered, self._recorder = name, lowered, recorder
        self.began: list[float | None] = [None] * count
        self.issued: list[float | None] = [None] * count
        self.done: list[float | None] = [None] * count
        self._witnesses = _find_witnesses(lowered)
        self._describe = Describer.of(lowered)

    def moves_argument(self, position: int, value: object, sharding: jax.sharding.NamedSharding) -> None:
        place = self._describe.place_of(position, sharding)
        if place is not None and self._describe.goes_on(place):
            at = self._first + place
            self.began[at] = _clock()
            if isinstance(value, jax.Array):  # the step before may still be making it
                home = self._describe.argument(place).source
                assert home is not None, "it comes from its home"
                self._recorder.wait_in_order(self, at + len(self.lowered.plan.inputs), home, value)

    def moved_argument(self, position: int, moved: jax.Array) -> None:
        place = self._describe.place_of(position, moved.sharding)
        if place is None:
            return
        at = self._first + place
        if not self._describe.goes_on(place):
            if not _compat.key_words(moved).is_ready():  # a thread of its own waits: it may be what is read last
                self._recorder.wait_now(self, at, moved)
        else:
            self.issued[at] = _clock()
            self._watch(at, self._describe.argument(place).submesh, moved, self._witnesses.soon_gone[place])

    def begin(self, position: int, instruction: Instruction, inputs: Sequence[jax.Array]) -> None:
        self.began[position] = _clock()

    def end(self, position: int, instruction: Instruction, outputs: Sequence[jax.Array]) -> None:
        self.issued[position] = _clock()
        if outputs and (witness := self._witnesses.of[position]) is not None:
            k, soon_gone = witness
            self._watch(position, instruction.submesh, outputs[k], soon_gone)

    def _watch(self, at: int, submesh: int, witness: jax.Array, soon_gone: bool) -> None:
        if soon_gone:
            self._recorder.wait_now(self, at, witness)
        else:
            self._recorder.wait_in_order(self, at, submesh, witness)


def submeshes_of_calls(calls: Sequence[Call]) -> tuple[Mesh, ...]:
    """The submeshes: those of the step with most of them, as it numbers them, then those that only other steps have."""
    programs = sorted((tuple(call.lowered.program.submeshes) for call in calls), key=len, reverse=True)
    return tuple(dict.fromkeys(mesh for meshes in programs for mesh in meshes))


def spans_of_calls(calls: Sequence[Call], submeshes: Sequence[Mesh]) -> list[Span]:
    """What the submeshes did, in order of start; times in seconds since the first call began.

    A device runs what it is given in the order of issue. So a launch starts when it was issued, when the one before
    it on its devices is done, or when what it reads is there, whichever is last.
    """
    zero = min((t for call in calls for t in call.began if t is not None), default=0.0)
    ends = _ends(calls)
    free: dict[object, float] = {}  # device -> when it is done with what it has
    spans: list[Span] = []
    numbers = {mesh: number for number, mesh in enumerate(submeshes)}
    for step, call in enumerate(calls):
        numbered = [numbers[mesh] for mesh in call.lowered.program.submeshes]
        spans += [_renumbered(span, numbered) for span in _spans(call, step, ends[step], zero, free)]
    return sorted(spans, key=lambda s: s.start)  # what starts together stays in the order of issue


def _renumbered(span: Span, numbers: Sequence[int]) -> Span:
    """A span with other numbers of submeshes than its step has, where several steps are recorded."""

    def renamed(label: str) -> str:
        maker, arrow, number = label.rpartition(ARROW)
        return f"{maker}{arrow}{numbers[int(number)]}" if arrow else label

    return span._replace(
        submesh=numbers[span.submesh], source=None if span.source is None else numbers[span.source],
        label=renamed(span.label), waited_for=renamed(span.waited_for),
    )  # fmt: skip


def _ends(calls: Sequence[Call]) -> list[list[float]]:
    """When each instruction was done, as tightly as is known.

    A thread that waits may be woken late. But nothing is done later than what reads it, nor later than what the same
    device ran after it.
    """
    after: dict[object, float] = {}  # device -> the end of what it ran next
    found = []
    for call in reversed(calls):
        devices = [mesh_devices(mesh) for mesh in call.lowered.program.submeshes]
        readers: dict[int, float] = {}  # slot -> the earliest end of what reads it
        ends = [math.inf if t is None else t for t in call.done]
        arrivals: dict[Tag, float] = {}
        plan = call.lowered.plan
        for k, ins in reversed(list(enumerate(plan.instructions))):
            if call.issued[k] is None:
                continue
            if isinstance(ins, Send):
                end = ends[k] = arrivals.get(ins.tag, math.inf)
            else:
                bounds = [readers[slot] for slot in ins.outputs if slot in readers]
                if isinstance(ins, Run):
                    bounds += [after[d] for d in devices[ins.submesh] if d in after]
                end = ends[k] = min([ends[k], *bounds])
            if isinstance(ins, Run):
                after.update(dict.fromkeys(devices[ins.submesh], end))
            if isinstance(ins, Receive):
                arrivals[ins.tag] = end
            else:
                readers.update((slot, min(end, readers.get(slot, math.inf))) for slot in ins.inputs)
        for k, (_, _, slot) in enumerate(plan.inputs, len(plan.instructions)):
            ends[k] = min(ends[k], readers.get(slot, math.inf))
        found.append(ends)
    return found[::-1]


def _spans(call: Call, step: int, ends: list[float], zero: float, free: dict[object, float]) -> list[Span]:
    describe, plan = Describer.of(call.lowered), call.lowered.plan
    devices = [mesh_devices(mesh) for mesh in call.lowered.program.submeshes]
    ready: dict[int, tuple[float, str]] = {}  # slot -> when it is there, and what made it
    sent: dict[Tag, tuple[float, float]] = {}  # when the Send began, when its values were there
    spans = []

    def add(what: Description, start: float, end: float, waited: str) -> None:
        spans.append(
            Span(what.submesh, what.label, what.kind, what.stage, what.microbatch, start - zero, end - zero, step,
                 what.source, what.nbytes, what.carried(), waited)
        )  # fmt: skip

    for place, (_, _, slot) in enumerate(plan.inputs):
        n = len(plan.instructions) + place
        began, issued = call.began[n], call.issued[n]
        if not describe.goes_on(place):
            if call.done[n] is not None:
                ready[slot] = ends[n], describe.arrives(place)
        elif began is not None and issued is not None:  # it was moved, and goes on from its home in every call
            what, end = describe.argument(place), ends[n] if ends[n] < math.inf else issued
            ready[slot] = end, what.label
            add(what, min(max(began, call.done[n + len(plan.inputs)] or began), end), end, "")
    for k, ins in enumerate(plan.instructions):
        began, issued = call.began[k], call.issued[k]
        if began is None or issued is None:
            continue  # another process runs it, or an error came before
        read = () if isinstance(ins, Receive) else ins.inputs
        there, maker = max((ready[slot] for slot in read if slot in ready), default=(0.0, ""))
        if isinstance(ins, Send):
            sent[ins.tag] = began, there
            continue
        what = describe(k, ins)
        waited = ""
        if isinstance(ins, Receive):
            start = max(sent.get(ins.tag, (began, 0.0)))
        else:
            at = max((free.get(d, 0.0) for d in devices[ins.submesh]), default=0.0)
            start = max(began, at, there)
            if start > at:
                waited = maker if start == there else LAUNCH
        end = ends[k] if ends[k] < math.inf else max(issued, start)
        start = min(start, end)
        ready.update(dict.fromkeys(ins.outputs, (end, what.label)))
        if isinstance(ins, Run):
            free.update(dict.fromkeys(devices[ins.submesh], end))
        add(what, start, end, waited)
    return spans
