"""Which of the scans around a task step through its layers.

The iterations of a scan over layers are split over the meshes of a task. Another scan around it may be over rounds of layers;
or over pieces of a batch, steps of training or tokens, for each of which all layers are the same. One in it may be over
parts of a sequence. Told by what most values are that the task reads and that scans cut off: its parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp

from .. import _compat
from .._compat import AbstractJaxpr, Atom, Eqn, Var
from .._implicit import Iteration
from .._program._calls import call_body
from .._program._nodes import shape_and_dtype

INNERMOST = (0,)


@dataclass(frozen=True)
class _Cut:
    """Where a value comes from.

    Attributes:
      scans: those that cut it off, by how many are around them.
      root: how many scans are around what it was cut off from.
    """

    scans: frozenset[int]
    root: int


_Cuts = Mapping[Var, _Cut]


@dataclass(eq=False)
class _Nest:
    """A scan's body.

    Attributes:
      lengths: of this scan and those around it, the outermost first.
      read: its operands that scans cut off.
    """

    lengths: tuple[int, ...] = ()
    read: dict[Var, _Cut] = field(default_factory=dict)

    def levels(self) -> tuple[int, ...]:
        """The scans that step through layers: 0 the innermost, 1 the one around it."""
        count = Counter(self.read.values())
        most = max(count.values(), default=0)
        # A layer may have few parameters, and a piece of a batch a mask or two.
        rivals = [cut for cut in count if 2 * count[cut] >= most]
        best = max(rivals, key=lambda cut: (-cut.root, max(cut.scans), count[cut]), default=None)
        return INNERMOST if best is None else tuple(sorted(len(self.lengths) - 1 - k for k in best.scans))


class Layers:
    """The scans of a traced program.

    Args:
      closed: the program; None where nothing is of interest.
      tasks: its tasks, by mark.
      loops: its microbatch loops, by mark.
    """

    def __init__(self, closed: AbstractJaxpr | None, tasks: Mapping[str, object], loops: Mapping[str, object]) -> None:
        self._tasks, self._loops = tasks, loops
        self._scans: dict[int, _Nest] = {}  # by the id of the equation
        self._around: dict[str, _Nest] = {}  # task -> the scans around it
        if closed is not None:
            self._visit(closed, {v: _Cut(frozenset(), 0) for v in _compat.open_jaxpr(closed).invars}, _Nest())

    def levels(self, scan: Eqn) -> tuple[int, ...]:
        """Which scans step through the layers in a scan: 0 itself, 1 the one around it."""
        nest = self._scans.get(id(scan))
        return INNERMOST if nest is None else nest.levels()

    def of_task(self, mark: str, scans: Sequence[Iteration]) -> tuple[int, int] | None:
        """Index and number of the layer that a task is in some iterations; None where no layer can be told."""
        nest = self._around.get(mark)
        return None if nest is None else layer_of(scans, nest.lengths, nest.levels())

    def _visit(self, jaxpr: AbstractJaxpr, given: _Cuts, nest: _Nest) -> list[_Cut | None]:
        """Looks at equations; where the results come from.

        Args:
          jaxpr: theirs.
          given: where its inputs come from.
          nest: the scans around.
        """
        cuts = dict(given)
        for eqn in _compat.open_jaxpr(jaxpr).eqns:
            reads = [v for v in eqn.invars if _compat.is_var(v)]
            marked = _compat.is_jit(eqn) and eqn.params["name"] in self._tasks
            if marked:
                before = self._around.get(eqn.params["name"])
                # What differentiation took out of a scan is in fewer; the forward pass comes first.
                if before is None or len(before.lengths) < len(nest.lengths):
                    self._around[eqn.params["name"]] = nest
            if marked or not _compat.jaxprs_in(eqn):
                # What differentiation takes out of a task, as it is the same in each iteration, is of parameters as well.
                if (cut := _of_result(eqn, reads, cuts)) is not None:
                    cuts.update((v, cut) for v in eqn.outvars if _compat.is_var(v))
            else:
                look = self._scan if eqn.primitive.name == "scan" else self._call
                found = zip(eqn.outvars, look(eqn, cuts, nest), strict=False)
                cuts.update((v, cut) for v, cut in found if _compat.is_var(v) and cut is not None)
        return [cuts.get(v) if _compat.is_var(v) else None for v in _compat.open_jaxpr(jaxpr).outvars]

    def _scan(self, eqn: Eqn, cuts: _Cuts, nest: _Nest) -> list[_Cut | None]:
        parts = _compat.scan_parts(eqn)
        depth = len(nest.lengths)
        inner: dict[Var, _Cut] = {}
        for k, (v, operand) in enumerate(zip(_compat.open_jaxpr(parts.jaxpr).invars, eqn.invars, strict=True)):
            cut = cuts.get(operand) if _compat.is_var(operand) else None
            if k in range(parts.num_consts, parts.num_consts + parts.num_carry):
                inner[v] = _Cut(frozenset(), depth + 1)
            elif cut is not None:
                inner[v] = cut if k < parts.num_consts else _Cut(cut.scans | {depth}, cut.root)
        body = _Nest((*nest.lengths, parts.length))
        read = {v for e in _compat.open_jaxpr(parts.jaxpr).eqns for v in e.invars if _compat.is_var(v)}
        floats = (v for v in inner if v in read and jnp.issubdtype(shape_and_dtype(v)[1], jnp.inexact))
        body.read.update({v: inner[v] for v in floats if inner[v].scans})
        self._scans.setdefault(id(eqn), body)
        found = self._visit(parts.jaxpr, inner, body)
        # What is made of each of some layers, such as a cast that differentiation takes out, is of layers again.
        stacks = [_Cut(cut.scans - {depth}, cut.root) if cut and depth in cut.scans else None for cut in found]
        return [None] * parts.num_carry + stacks[parts.num_carry :]

    def _call(self, eqn: Eqn, cuts: _Cuts, nest: _Nest) -> list[_Cut | None]:
        body = call_body(eqn)
        if body is not None and _compat.is_jit(eqn) and eqn.params["name"] in self._loops:
            for loop in _compat.open_jaxpr(body).eqns:
                self._whole(loop, {}, nest)
        elif body is not None:
            return self._visit(body, _given(body, eqn.invars, cuts), nest)
        else:
            self._whole(eqn, cuts, nest)
        return []

    def _whole(self, eqn: Eqn, cuts: _Cuts, nest: _Nest) -> None:
        """Looks into what is no scan over layers: a conditional, a loop of unknown length, one over microbatches."""
        for jaxpr in _compat.jaxprs_in(eqn):
            invars = _compat.open_jaxpr(jaxpr).invars
            given = {v: _Cut(frozenset(), len(nest.lengths)) for v in invars}
            operands = eqn.invars[len(eqn.invars) - len(invars) :] if eqn.primitive.name == "cond" else []
            self._visit(jaxpr, {**given, **_given(jaxpr, operands, cuts)}, nest)


NONE = Layers(None, {}, {})


def _of_result(eqn: Eqn, reads: Sequence[Var], cuts: _Cuts) -> _Cut | None:
    """Where a result comes from: whence all that is read comes, or the array that an index is put to."""
    if eqn.primitive.name in ("dynamic_slice", "gather") and reads and all(v in cuts for v in reads):
        return _Cut(frozenset().union(*(cuts[v].scans for v in reads)), cuts[reads[0]].root)
    found = {cuts.get(v) for v in reads}
    return found.pop() if len(found) == 1 else None


def _given(jaxpr: AbstractJaxpr, operands: Sequence[Atom], cuts: _Cuts) -> _Cuts:
    """Where the inputs of a called jaxpr come from."""
    pairs = zip(_compat.open_jaxpr(jaxpr).invars, operands, strict=False)
    return {v: cuts[x] for v, x in pairs if _compat.is_var(x) and x in cuts}


def layer_of(scans: Sequence[Iteration], lengths: Sequence[int], levels: Sequence[int]) -> tuple[int, int] | None:
    """Which layer of how many it is in some iterations; None where those are not of the scans that step through layers.

    Args:
      scans: the iterations, the outermost scan first.
      lengths: of all scans that are around where the layers are.
      levels: which of them step through layers: 0 the innermost, 1 the one around it.
    """
    index, count = 0, 1
    for level in sorted(levels, reverse=True):
        if not level < min(len(scans), len(lengths)) or scans[-1 - level].length != lengths[-1 - level]:
            return None
        step = scans[-1 - level]
        index, count = index * step.length + step.index, count * step.length
    return index, count
