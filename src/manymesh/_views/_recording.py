"""`record`: what the steps inside a block did, and when."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax

from .._errors import ArgumentError
from .._runtime._ownership import ownership
from .._runtime._watch import watching
from ._chrome import chrome_trace
from ._compare import Comparison, compare
from ._recorder import Recorder, spans_of_calls, submeshes_of_calls
from ._spans import Prediction, Span, bubble_fraction, busy, checked, extent
from ._timeline import Timeline
from ._words import describe_mesh, format_seconds, with_elsewhere

FORMAT = 1


@dataclass
class Recording:
    """What was recorded; filled when the block of `record` is left.

    Attributes:
      spans: every stretch of time, in order of start; seconds since the first call began.
      submeshes: of each submesh its mesh and devices, in words; where several steps were recorded, those of the step with most of
        them, and then those that only others have.
      steps: name of the step of each call.
      elsewhere: the submeshes that other processes run, and record; nothing of them is among the spans.
    """

    spans: tuple[Span, ...] = ()
    submeshes: tuple[str, ...] = ()
    steps: tuple[str, ...] = field(default=())
    elsewhere: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """From the start of the first thing to the end of the last."""
        begin, end = extent(self.spans)
        return end - begin

    @property
    def bubble_fraction(self) -> float:
        """The part of their time in which the submeshes wait, in [0, 1)."""
        return bubble_fraction(self.spans)

    def busy(self, submesh: int) -> float:
        """Seconds in which a submesh computes."""
        return busy(self.spans, submesh)

    def timeline(self, prediction: Prediction | None = None) -> Timeline:
        """What ran where and when, to be printed, shown in a notebook, or saved.

        Args:
          prediction: shown beside what was measured.
        """
        return Timeline.of(self, prediction)

    def compare(self, prediction: Prediction) -> Comparison:
        """Which tasks and transfers took another time than predicted, and by how much.

        In several processes of the submeshes that were recorded here, which also the predicted seconds and bubble are of.

        Args:
          prediction: of one step: a report, spans, tuples ``(submesh, label, kind, stage, microbatch, start, end)``, or a
            simulation whose unit is the second; or another recording.
        """
        return compare(self, prediction)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the recording as JSON, which `load` reads and which Perfetto and ``chrome://tracing`` open as it is.

        Returns:
          The path.
        """
        path = Path(path)
        trace = chrome_trace(self.spans, with_elsewhere(self.submeshes, self.elsewhere))
        trace["manymesh"] = {
            "format": FORMAT, "submeshes": self.submeshes, "steps": self.steps,
            "elsewhere": self.elsewhere, "fields": Span._fields, "spans": [list(s) for s in self.spans],
        }  # fmt: skip
        path.write_text(json.dumps(trace), "utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Reads what `save` wrote.

        Raises:
          ArgumentError: the file holds something else.
          OSError: it cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text("utf-8"))["manymesh"]
            fields = data["fields"]
            rows = (Span(**dict(zip(fields, row, strict=True))) for row in data["spans"])
            spans = tuple(checked(span, f"span {i}") for i, span in enumerate(rows))
            return cls(spans, tuple(data["submeshes"]), tuple(data["steps"]), tuple(data.get("elsewhere", ())))
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"{os.fspath(path)} is no recording of manymesh ({type(error).__name__}: {error}); make one with "
                "mm.inspect.record() and Recording.save"
            ) from error

    def __repr__(self) -> str:
        return (
            f"Recording({len(self.steps)} calls on {len(self.submeshes)} submeshes, {len(self.spans)} spans, "
            f"{format_seconds(self.seconds)}, bubble {self.bubble_fraction:.1%})"
        )

    def _repr_html_(self) -> str:
        return self.timeline()._repr_html_()


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Records every step that this thread runs inside the block.

    Leaving the block waits until the devices are done. Times come from the devices: a thread of its own waits for what
    each launch makes, so that the step runs as it does unrecorded. Run the step once before, or the time that its
    first call takes longer is in the recording too. In several processes each records what its own devices do.

    Yields:
      A `Recording`, which is filled when the block is left.

    Example:
      >>> import jax.numpy as jnp, manymesh as mm
      >>> front, back = (mm.task(jnp.sin, name, devices=[i]) for i, name in enumerate(("front", "back")))
      >>> step = mm.jit(lambda x: back(front(x)))
      >>> with mm.inspect.record() as run:
      ...     y = step(jnp.ones(8))
      >>> [span.label for span in run.spans]
      ['front', 'front -> submesh 1', 'back']
    """
    recorder, recording = Recorder(), Recording()
    try:
        with watching(recorder.watch):
            yield recording
    finally:
        recorder.close()
        calls = recorder.calls
        recording.steps = tuple(call.name for call in calls)
        meshes = submeshes_of_calls(calls)
        recording.spans = tuple(spans_of_calls(calls, meshes))
        recording.submeshes = tuple(describe_mesh(mesh) for mesh in meshes)
        ours = ownership(meshes, jax.process_index()).submeshes
        recording.elsewhere = tuple(i for i in range(len(meshes)) if i not in ours)
