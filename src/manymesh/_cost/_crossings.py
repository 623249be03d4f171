"""Every value that crosses between submeshes, by name."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from .._compat import Var
from .._layout._layout import Layout
from .._plan._instructions import Plan, Receive
from .._plan._number import arguments_elsewhere, variables_of
from .._program import Program, nbytes


@dataclass(frozen=True)
class ValueLine:
    """Values that cross and are alike.

    Attributes:
      name: the path of an argument or result, or the tasks: ``front -> back``.
      source, target: submeshes.
      type: dtype and shape, all shards together.
      layout: device axes of each dimension where it comes from; where they differ, also where it goes.
      nbytes: bytes of one value, all shards together; what is replicated over n devices counts once.
      shard_bytes: bytes that arrive on each device.
      values: how many values are alike.
      times: how often each crosses in a call: once, or once a microbatch.
    """

    name: str
    source: int
    target: int
    type: str
    layout: str
    nbytes: int
    shard_bytes: int
    values: int
    times: int

    @property
    def total_bytes(self) -> int:
        """Bytes in a call."""
        return self.nbytes * self.values * self.times


def crossings(program: Program, plan: Plan, layout: Layout) -> tuple[ValueLine, ...]:
    """The values that cross in a call, those that are alike as one line; in the order in which they first cross."""
    times: Counter[tuple[int, int, int]] = Counter()
    for (source, target, numbers), count in batches(plan).items():
        for k in numbers:
            times[k, source, target] += count
    variables = variables_of(program)
    readers = _Readers(program)
    makers = _makers(program)
    lines: Counter[tuple[str, int, int, str, str, int, int, int]] = Counter()

    def note(v: Var, source: int, target: int, count: int) -> None:
        name = layout.names.get(v, "")
        if v in makers and not name.startswith("result"):
            name = f"{makers[v]} -> {readers.of(v, target)}"
        here, there = (_spec(layout, v, s) for s in (source, target))
        how = _spec_text(here) if here == there else f"{_spec_text(here)} -> {_spec_text(there)}"
        type_ = _compat.abstract(v.aval)
        lines[
            name, source, target, f"{type_.dtype}[{','.join(map(str, type_.shape))}]", how, nbytes(v.aval),
            shard_bytes(v, layout, target), count,
        ] += 1  # fmt: skip

    for _, v, source, target in arguments_elsewhere(program, plan):
        note(v, source, target, 1)
    for (number, source, target), count in times.items():
        note(variables[number], source, target, count)
    return tuple(ValueLine(*key[:7], values, key[7]) for key, values in lines.items())


def _makers(program: Program) -> dict[Var, str]:
    """Which fragment makes a value; of what a loop leaves, such as the sum of a gradient, the one that makes it in there."""
    makers = {v: f.name for f in program.fragments for v in f.outvars}
    for loop in program.loops:
        left = [(out, (final,)) for _, out, _, final in loop.carries] + list(loop.ys)
        for inside, outside in left:
            if inside in makers:
                makers.update((v, makers[inside]) for v in outside if v not in makers)
    return makers


class _Readers:
    """Which fragment reads a value on a submesh; of what a microbatch leaves, in the next one."""

    def __init__(self, program: Program) -> None:
        self.names: dict[tuple[Var, int], str] = {}
        self.links: dict[Var, list[tuple[Var, str]]] = defaultdict(list)  # a value -> what carries call it
        for f in program.fragments:
            for v in f.invars:
                self.names.setdefault((v, f.submesh), f.name)
        for loop in program.loops:
            for inner, out, init, _ in loop.carries:
                self.links[out].append((inner, " of the next microbatch"))
                if _compat.is_var(init):
                    self.links[init].append((inner, ""))

    def of(self, v: Var, submesh: int) -> str:
        """The first of them; "result" if there is none."""
        seen, todo = set[Var](), deque([(v, "")])
        while todo:
            v, when = todo.popleft()
            if (v, submesh) in self.names:
                return self.names[v, submesh] + when
            if v not in seen:
                seen.add(v)
                todo += [(inner, when or then) for inner, then in self.links.get(v, ())]
        return "result"


def batches(plan: Plan) -> Counter[tuple[int, int, tuple[int, ...]]]:
    """(source, target, numbers of the variables) of what crosses together -> how often in a call."""
    return Counter((i.source, i.submesh, i.variables) for i in plan.instructions if isinstance(i, Receive))


def shard_bytes(v: Var, layout: Layout, submesh: int) -> int:
    """Bytes that each device of a submesh has of a value."""
    shape = _compat.shape(v)
    if not shape:
        return nbytes(v.aval)
    return bytes_of_shard(v, layout.sharding(v, submesh))


def bytes_of_shard(v: Var, sharding: NamedSharding) -> int:
    """Bytes of one shard of a value."""
    shape = _compat.shape(v)
    whole = math.prod(shape) or 1
    return nbytes(v.aval) * math.prod(sharding.shard_shape(shape)) // whole


def _spec(layout: Layout, v: Var, s: int) -> PartitionSpec | None:
    return layout.spec(v, s) if (v, s) in layout.decisions else None


def _spec_text(spec: PartitionSpec | None) -> str:
    return "?" if spec is None else f"P({', '.join(map(repr, spec))})"
