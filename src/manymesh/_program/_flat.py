"""The flat form of a whole program.

Everything here is frozen. A pass takes a `FlatProgram` and returns another; the variables and equations that it does
not touch are shared between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding

from .._compat import Atom, Var
from .._findings import Finding
from .._implicit import Matcher
from .._task import Task
from ._fragments import Reduction
from ._index import Index
from ._nodes import Loop, Node
from ._placement import Placement
from ._stacked import Stacked
from ._text import text


@dataclass(frozen=True)
class Pins:
    """What is known of where the step's arguments and results are.

    Attributes:
      inputs: input -> the submesh it is on.
      outputs: position among the results -> the submesh that the result has to be on.
      states: (input, position of the result that replaces it): the result is wanted where the input is.
      input_shardings, output_shardings: the whole sharding that an input or result is asked to have.
      names: input -> what users call it, step by step: ``("args", "[0]", "['w']")``.
      result_names: position of a result -> what users call it, likewise.
      given: input -> the sharding that it has when the step begins, where that is known.
    """

    inputs: Mapping[Var, Mesh] = field(default_factory=dict)
    outputs: Mapping[int, Mesh] = field(default_factory=dict)
    states: tuple[tuple[Var, int], ...] = ()
    input_shardings: Mapping[Var, NamedSharding] = field(default_factory=dict)
    output_shardings: Mapping[int, NamedSharding] = field(default_factory=dict)
    names: Mapping[Var, tuple[str, ...]] = field(default_factory=dict)
    result_names: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    given: Mapping[Var, NamedSharding] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A result of a task.

    Attributes:
      which: the mark of the task, the iterations that it is in, the number of the result: the same for the forward pass and
        for what computes it again, and for all calls of a function that JAX traced once.
      operands: number of an operand -> what it is in this call.
    """

    which: tuple[object, ...]
    operands: Mapping[int, Atom] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, eq=False)
class FlatProgram:
    """A whole step, flat: nodes in an order in which every value is made before it is read.

    The nodes of a loop's body need not stand next to each other; the loop's results are there after the last of them.
    ``str`` gives the program as text with stable names; `check` asserts what has to hold.

    Attributes:
      invars: inputs; the first ``len(consts)`` of them are constants.
      outvars: results.
      nodes: the equations.
      loops: the microbatch loops; nodes refer to them by position, so that a position never changes.
      tasks: mark -> the task that it stands for, those that passes made included.
      consts: constant input -> its value.
      stacked: value that an unrolled scan stacked -> its slices.
      pins: where arguments and results are known to be.
      registered: the tasks registered by name when the step was traced.
      findings: what is suspicious, found by the passes so far.
      reductions: what is known of the sums over a sharded batch.
      results: value -> which result of a task it is, or a number that values have which are computed alike.
      placement: where every node runs; None where nothing computed it for these nodes.
      stacked_inputs, stacked_outputs: arguments and results that are in blocks on several submeshes; each block is an
        input, or a result, of its own.
    """

    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    nodes: tuple[Node, ...]
    loops: tuple[Loop, ...] = ()
    tasks: Mapping[str, Task] = field(default_factory=dict)
    consts: Mapping[Var, object] = field(default_factory=dict)
    stacked: Mapping[Var, tuple[Atom, ...]] = field(default_factory=dict)
    pins: Pins = field(default_factory=Pins)
    registered: Matcher = field(default_factory=Matcher)
    findings: tuple[Finding, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    results: Mapping[Var, Result | int] = field(default_factory=dict)
    placement: Placement | None = None
    stacked_inputs: tuple[Stacked, ...] = ()
    stacked_outputs: tuple[Stacked, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tasks", "consts", "stacked", "results"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @cached_property
    def index(self) -> Index:
        """Who makes and who reads every variable."""
        return Index(self.outvars, self.nodes, self.loops)

    def submesh_of(self, node: Node) -> Mesh | None:
        """The submesh that a node's task, or the node itself, asks for; None where placement is free."""
        mark = node.task or node.colocated_with
        mesh = self.tasks[mark].mesh if mark is not None else None
        return node.mesh if mesh is None else mesh

    def __str__(self) -> str:
        return text(self.invars, self.outvars, self.nodes, self.loops, self.tasks)
