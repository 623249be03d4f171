"""What each task costs in a call, its passes together."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .. import _compat
from .._compat import Var
from .._plan._instructions import Run
from .._program import Fragment, nbytes
from ._estimate import Estimate
from ._kinds import SAME, origins


@dataclass(frozen=True)
class TaskLine:
    """A task in a call, on each of its devices.

    Attributes:
      name: the task, or several that run as one; ``outside tasks`` for what is in none.
      submesh: where.
      stage: its stage in the loop, if it is in one.
      runs: how often its forward pass runs in a call, wherever in the step it is called; without one, its backward pass.
      forward_flops, backward_flops: operations in a call, on each device.
      bytes_read: bytes that its fragments read in a call, on each device.
      parameters: how many numbers its parameters have, all shards together.
      parameter_bytes: their bytes, all shards together.
    """

    name: str
    submesh: int
    stage: int | None
    runs: int
    forward_flops: float
    backward_flops: float
    bytes_read: float
    parameters: int
    parameter_bytes: int


def tasks_of(found: Estimate, flops: Sequence[float]) -> tuple[TaskLine, ...]:
    """The tasks of a step in the order of its fragments, and what is outside of them, one line for each submesh.

    Args:
      found: the step.
      flops: of one run of each fragment.
    """
    program = found.program
    runs = Counter(ins.fragment for ins in found.plan.instructions if isinstance(ins, Run))
    together: dict[tuple[str, int], list[Fragment]] = defaultdict(list)
    for f in program.fragments:
        together[" + ".join(f.tasks) or "outside tasks", f.submesh].append(f)
    origin = origins(program.fragments, {v for v in program.invars if found.kinds.get(v) == "parameters"})
    lines = []
    for (name, submesh), fragments in together.items():
        parts: dict[Var, dict[Var, int]] = defaultdict(dict)  # parameter -> it, or parts of it -> how many numbers
        for v in (v for f in fragments if f.tasks for v in _own(f) if v in origin):
            parts[origin[v]][v] = _count(v)
        own = {whole: min(sum(read.values()), _count(whole)) for whole, read in parts.items()}
        forward = [f for f in fragments if f.kind == "F"]
        first = min((f.kind for f in fragments), key="FBW".index)  # a task may have no forward pass of its own
        lines.append(
            TaskLine(
                name, submesh, next((f.stage for f in fragments if f.stage is not None), None),
                sum(runs[f.index] for f in fragments if f.kind == first),
                sum(runs[f.index] * flops[f.index] for f in forward),
                sum(runs[f.index] * flops[f.index] for f in fragments if f.kind != "F"),
                sum(runs[f.index] * found.works[f.index].bytes_read for f in fragments),
                sum(own.values()), sum(n * nbytes(v.aval) // max(_count(v), 1) for v, n in own.items()),
            )
        )  # fmt: skip
    return tuple(sorted(lines, key=lambda line: line.name == "outside tasks"))


def _own(f: Fragment) -> list[Var]:
    """What a task reads of what comes in, and what joined its forward pass, such as a head that is in no task.

    An update of other parameters, which may join its backward pass, is none of that.
    """
    eqns = _compat.open_jaxpr(f.jaxpr).eqns
    inner = [bool(list(_compat.jaxprs_in(eqn))) for eqn in eqns]
    if f.kind == "F" or not any(inner):
        return f.invars
    read = set[Var]()
    for eqn, is_task in zip(reversed(eqns), reversed(inner), strict=True):
        if is_task or (eqn.primitive.name in SAME and not read.isdisjoint(eqn.outvars)):
            read.update(v for v in eqn.invars if _compat.is_var(v))
    return [v for v in f.invars if v in read]


def _count(v: Var) -> int:
    return math.prod(_compat.shape(v))
