"""What each task costs in a call, its passes together."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .. import _compat
from .._compat import Var
from .._plan._instructions import Run
from .._program import Fragment, nbytes
from ._estimate import Estimate

# A parameter that went through these is still that parameter, or a part of it: cast, laid out for a loop, unstacked.
_SAME = frozenset(
    [
        "convert_element_type",
        "copy",
        "reshape",
        "squeeze",
        "sharding_constraint",
        "transpose",
        "optimization_barrier",
        "slice",
        "dynamic_slice",
        "split",
    ]
)


@dataclass(frozen=True)
class TaskLine:
    """A task in a call, on each of its devices.

    Attributes:
      name: the task, or several that run as one; ``outside tasks`` for what is in none.
      submesh: where.
      stage: its stage in the loop, if it is in one.
      runs: how often its forward pass runs.
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
    origin = _origins(program.fragments, {v for v in program.invars if found.kinds.get(v) == "parameters"})
    lines = []
    for (name, submesh), fragments in together.items():
        parts: dict[Var, dict[Var, int]] = defaultdict(dict)  # parameter -> it, or parts of it -> how many numbers
        for v in (v for f in fragments if f.tasks for v in f.invars if v in origin):
            parts[origin[v]][v] = _count(v)
        own = {whole: min(sum(read.values()), _count(whole)) for whole, read in parts.items()}
        forward = [f for f in fragments if f.kind == "F"]
        lines.append(
            TaskLine(
                name, submesh, next((f.stage for f in fragments if f.stage is not None), None),
                max((runs[f.index] for f in forward or fragments), default=0),
                sum(runs[f.index] * flops[f.index] for f in forward),
                sum(runs[f.index] * flops[f.index] for f in fragments if f.kind != "F"),
                sum(runs[f.index] * found.works[f.index].bytes_read for f in fragments),
                sum(own.values()), sum(n * nbytes(v.aval) // max(_count(v), 1) for v, n in own.items()),
            )
        )  # fmt: skip
    return tuple(sorted(lines, key=lambda line: line.name == "outside tasks"))


def _count(v: Var) -> int:
    return math.prod(_compat.shape(v))


def _origins(fragments: Sequence[Fragment], parameters: Iterable[Var]) -> dict[Var, Var]:
    """The parameter that each value is, or is a part of: itself, a cast, a layer of a stack."""
    origin = {v: v for v in parameters}
    for f in fragments:
        if not f.tasks and f.loop is None:
            for eqn in _compat.open_jaxpr(f.jaxpr).eqns:
                source = eqn.invars[0] if eqn.invars else None
                if eqn.primitive.name in _SAME and _compat.is_var(source) and source in origin:
                    origin.update(dict.fromkeys(eqn.outvars, origin[source]))
    return origin
