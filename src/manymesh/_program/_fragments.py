"""A program, split: one SPMD fragment per task and phase, and the values that cross. Pure data.

A `Program` is printable, comparable and checkable without a device. Its variables are those of the
flat jaxpr; inside a loop one variable stands for as many values as there are microbatches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jax.sharding import Mesh

from .._shown import MOST, Shown, joined, numbers, shortened, stem
from .._task import Task
from ._stacked import Stacked

Kind = Literal["F", "B", "W"]


def called(tasks: Iterable[str], phase: int, submesh: int | None) -> str:
    """What users know of a part of a program: its tasks, by name, and which pass of them it is, 0 the forward one."""
    names = ", ".join(map(repr, tasks))
    which = ("", "the backward pass of ", "the weight-gradient pass of ")[phase]
    return which + (f"task {names}" if names else f"what is outside of tasks on submesh {submesh}")


@dataclass(frozen=True, eq=False)
class Fragment:
    """A piece of the program that runs as one executable on one submesh.

    Attributes:
      index: position in `Program.fragments`, a topological order within each scope.
      name: tasks it holds, and its phase: ``front``, ``front_bwd``; unmarked ones are called after
        what they do (``before_0``, ``after_1``).
      submesh: index into `Program.submeshes`.
      loop: index into `Program.loops`, or None outside every loop.
      kind: ``F`` forward, ``B`` backward.
      stage: pipeline stage inside its loop; None outside.
      jaxpr: the computation; its variables are the program's.
      tasks: names of the tasks it holds.
      layout_follows_loop: prepares what a loop takes in, with the shardings that the loop wants.
    """

    index: int
    name: str
    submesh: int
    loop: int | None
    kind: Kind
    stage: int | None
    jaxpr: Any
    tasks: tuple[str, ...]
    layout_follows_loop: bool

    @property
    def invars(self) -> list[Any]:
        """Variables it reads."""
        return list(self.jaxpr.invars)

    @property
    def outvars(self) -> list[Any]:
        """Variables it makes that somebody else reads."""
        return list(self.jaxpr.outvars)

    def called(self) -> str:
        """What users know of it."""
        return called(self.tasks, "FBW".index(self.kind) if self.tasks or self.loop is not None else 0, self.submesh)

    def __repr__(self) -> str:
        loop = "" if self.loop is None else f" loop {self.loop} stage {self.stage}"
        return f"{self.name}: submesh {self.submesh}{loop}, {len(self.jaxpr.invars)} -> {len(self.jaxpr.outvars)}"


@dataclass(frozen=True, eq=False)
class Edge:
    """A value that crosses from one submesh to another.

    Attributes:
      var: the variable.
      source: submesh that makes it.
      target: submesh that reads it.
      loop: the loop in whose every microbatch it crosses; None if it crosses once a call.
      nbytes: bytes of one value.
    """

    var: Any
    source: int
    target: int
    loop: int | None
    nbytes: int


@dataclass(frozen=True, eq=False)
class LoopPlan:
    """A microbatch loop of the program.

    Attributes:
      name: name of the function that `microbatch` wrapped.
      num_microbatches: how often the body runs.
      schedule: the schedule object.
      placement: stage -> submesh.
      carries: (read, made, initial, final) variables of each accumulator.
      xs: (variable of the body, its piece for each microbatch).
      ys: (variable of the body, its copy for each microbatch).
      in_order: whether fragments follow the stage order, so that the schedule applies.
      against: if not, the first value that goes against it, and between what.
      of_losses: whether all results of what `microbatch` wrapped are sums and means of numbers, and there is no state.
    """

    name: str
    num_microbatches: int
    schedule: Any
    placement: tuple[int, ...]
    carries: tuple[tuple[Any, Any, Any, Any], ...]
    xs: tuple[tuple[Any, tuple[Any, ...]], ...]
    ys: tuple[tuple[Any, tuple[Any, ...]], ...]
    in_order: bool = True
    against: str = ""
    of_losses: bool = False


@dataclass(frozen=True)
class Reduction:
    """The sum of a loop's accumulator over the devices that share the batch.

    Attributes:
      task: the task that makes its terms, or ``unmarked``.
      value: dtype and shape of the accumulator.
      submesh: where it is.
      loop: index into `Program.loops`.
      axes: mesh axes over which it is taken once a call, after the loop; none if it is taken in every microbatch.
      why: why it could not wait for the end of the loop; empty if it does.
    """

    task: str
    value: str
    submesh: int
    loop: int
    axes: tuple[str, ...]
    why: str

    def __repr__(self) -> str:
        when = f"over {', '.join(self.axes)} once a call" if self.axes else f"in every microbatch: {self.why}"
        return f"{self.task} {self.value} on submesh {self.submesh}, {when}"


@dataclass(frozen=True, eq=False)
class Program(Shown):
    """A whole step.

    Attributes:
      submeshes: the meshes that fragments run on.
      fragments: all fragments.
      order: fragment indices and loops (as ``-1 - loop``) of the outermost scope, topological.
      loops: the microbatch loops.
      edges: what crosses submeshes.
      invars: inputs; the first ``len(consts)`` are constants.
      outputs: (variable or literal, submesh) of each result.
      home: submesh of the copy of record of each variable.
      input_submeshes: input -> submeshes that read it; none for one that nobody reads.
      consts: values of the constants, in order.
      unmarked: (primitive, submesh, reason, count) of the equations outside tasks.
      reductions: sums of accumulators over the devices that share a batch.
      stacked_inputs, stacked_outputs: arguments and results that lie in blocks on several submeshes. Each block is an
        input, or a result, of its own.
      tasks: mark -> task, for the tasks of the step: those it calls, and those that scopes became.
    """

    submeshes: tuple[Mesh, ...]
    fragments: tuple[Fragment, ...]
    order: tuple[int, ...]
    loops: tuple[LoopPlan, ...]
    edges: tuple[Edge, ...]
    invars: tuple[Any, ...]
    outputs: tuple[tuple[Any, int], ...]
    home: dict[Any, int]
    input_submeshes: dict[Any, tuple[int, ...]]
    consts: tuple[Any, ...]
    unmarked: tuple[tuple[str, int, str, int], ...] = field(default=())
    reductions: tuple[Reduction, ...] = field(default=())
    stacked_inputs: tuple[Stacked, ...] = field(default=())
    stacked_outputs: tuple[Stacked, ...] = field(default=())
    tasks: Mapping[str, Task] = field(default_factory=dict)

    def body(self, loop: int) -> Iterator[Fragment]:
        """Fragments of a loop's body, in topological order."""
        return (f for f in self.fragments if f.loop == loop)

    def as_text(self) -> str:
        """A line for each submesh, fragment, loop and edge."""
        lines = [f"Program: {len(self.fragments)} fragments on {len(self.submeshes)} submeshes"]
        for i, mesh in enumerate(self.submeshes):
            lines.append(f"  submesh {i}: {dict(mesh.shape)}, devices {[d.id for d in mesh.devices.flat]}")
        lines += [f"  {f!r}" for f in self.fragments]
        lines += [f"  {line}" for line in _loops(self.loops)]
        for e in self.edges:
            each = "once a call" if e.loop is None else f"each microbatch of loop {e.loop}"
            lines.append(f"  {e.source} -> {e.target}: {e.var.aval.str_short()}, {e.nbytes} bytes {each}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return _brief(self, self.as_text())


_PHASES = {"F": "forward", "B": "backward", "W": "weight gradients"}
_SHOWN = 3


def _brief(program: Program, whole: str) -> str:
    """The text of a program, in less than 40 lines.

    Args:
      program: the program.
      whole: its text with a line for each thing.
    """
    if whole.count("\n") < MOST:
        return whole
    lines = [
        f"Program: {len(program.fragments)} fragments on {len(program.submeshes)} submeshes (as_text() shows each)"
    ]
    lines += _submeshes(program)
    lines += [f"  {line}" for line in _fragments(program.fragments)]
    lines += [f"  {line}" for line in _loops(program.loops)]
    lines += [f"  {line}" for line in _edges(program.edges)]
    return shortened("\n".join(lines), whole="as_text()")


def _loops(given: Sequence[LoopPlan]) -> Iterator[str]:
    """A line for each microbatch loop."""
    for i, loop in enumerate(given):
        name = getattr(loop.schedule, "name", loop.schedule)
        how = name if loop.in_order else f"one after the other, as its stages are in no order that {name} could run"
        yield f"loop {i} {loop.name}: {loop.num_microbatches} microbatches, {how}, stages on submeshes {loop.placement}"


def _submeshes(program: Program) -> Iterator[str]:
    """Submeshes of one shape in one line."""
    shapes: dict[str, list[int]] = defaultdict(list)
    for i, mesh in enumerate(program.submeshes):
        shapes[str(dict(mesh.shape))].append(i)
    for shape, at in shapes.items():
        ids = numbers(d.id for i in at for d in program.submeshes[i].devices.flat)
        yield f"  submesh{'es' * (len(at) > 1)} {numbers(at)}: {shape}, devices {ids}"


def _fragments(fragments: Sequence[Fragment]) -> Iterator[str]:
    """Fragments whose names differ in numbers alone, and that run in the same phase of the same loop, in one line."""
    groups: dict[tuple[str, int | None, str], list[Fragment]] = defaultdict(list)
    for f in fragments:
        groups[stem(f.name), f.loop, f.kind].append(f)
    for (_, loop, kind), found in groups.items():
        submeshes = numbers(f.submesh for f in found)
        where = f"submesh{'es' * (not submeshes.isdecimal())} {submeshes}"
        scope = "once a call" if loop is None else f"loop {loop} {_PHASES[kind]}"
        yield f"{joined([f.name for f in found])}: {where}, {scope}"


def _edges(edges: Sequence[Edge]) -> Iterator[str]:
    """What goes one way in one scope, in one line."""
    groups: dict[tuple[int, int, int | None], list[Edge]] = defaultdict(list)
    for e in edges:
        groups[e.source, e.target, e.loop].append(e)
    for (source, target, loop), found in groups.items():
        kinds = Counter(e.var.aval.str_short() for e in found).most_common()
        words = [kind if count == 1 else f"{count} {kind}" for kind, count in kinds[:_SHOWN]]
        words += [f"{len(found) - sum(n for _, n in kinds[:_SHOWN])} others"] * (len(kinds) > _SHOWN)
        each = "once a call" if loop is None else f"each microbatch of loop {loop}"
        yield f"{source} -> {target}: {', '.join(words)}, {sum(e.nbytes for e in found)} bytes {each}"
