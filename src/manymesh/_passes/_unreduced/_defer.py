"""Sums over the batch that wait for the end of a microbatch loop.

Where the batch is sharded over data axes, each device has a part of a weight's gradient, and XLA adds
the parts up in every microbatch. Here an accumulator keeps the parts instead: it gets a leading
dimension, sharded over those axes, so that a device holds as many bytes as before; it is summed over
that dimension once, after the loop. The way from the sum over the batch to the accumulator has to be
linear; each equation on it is applied to the parts.

This file decides which accumulators can do so, and why others cannot; `_rewrite` then changes the program. The idea
is that of unreduced shardings: a value may exist as terms on several devices whose sum is still to be taken.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ... import _compat
from ..._compat import Atom, Eqn, Var
from ..._program._calls import is_rewritable
from ..._program._flat import FlatProgram
from ..._program._fragments import Reduction
from ..._program._nodes import Carry, Node, nbytes
from ...meta._rules import parts_of
from ._dims import Analysis, Frame, Value, constraint_entries
from ._linear import EITHER, TOGETHER, is_linear_in_first, is_zero, mixes_groups, summed_dims
from ._links import shape_of
from ._rewrite import Unreduced, rewrite, starts_at_zero

Axes = dict[Value, tuple[str, ...]]  # value -> the axes over which it stays unreduced
Use = tuple[int, int]  # (equation, operand) that reads a value; (-1, result) where it leaves its frame


class _Refused(Exception):
    """An accumulator has to be summed in every microbatch. ``why`` is empty if there is nothing to sum."""

    def __init__(self, why: str = "") -> None:
        super().__init__(why)
        self.why = why


def leave_unreduced(flat: FlatProgram) -> FlatProgram:
    """Rewrites every loop so that gradients are summed over the data axes once, after it. Needs the placement.

    `FlatProgram.reductions` says for each accumulator that is a sum over a sharded batch whether that was done, and if
    not, why.
    """
    assert flat.placement is not None, "which accumulators are sums over devices depends on where they are"
    if all(m.size == 1 for m in flat.placement.submeshes):
        return flat
    found: list[Reduction] = []
    new = flat
    for i, loop in enumerate(flat.loops):
        seen = Analysis(flat, i)
        if not seen.is_sharded:
            continue
        planner = _Planner(flat, i, seen)
        accepted, refused = planner.run()
        for carry in loop.carries:
            plan, why = accepted.get(carry), refused.get(carry, "")
            if plan is not None or why:
                submesh = flat.placement.home[carry.out]
                value = carry.out.aval.str_short()
                found.append(Reduction(planner.task_of(carry), value, submesh, i, plan.axes if plan else (), why))
        if accepted:
            new = rewrite(new, i, seen, list(accepted.values()), flat.placement)
    return replace(new, reductions=tuple(found)) if found else new


class _Planner:
    def __init__(self, flat: FlatProgram, index: int, seen: Analysis) -> None:
        assert flat.placement is not None, "checked before"
        self.flat, self.index, self.loop, self.placement, self.seen = (
            flat,
            index,
            flat.loops[index],
            flat.placement,
            seen,
        )
        self.body = flat.index.bodies[index]
        self.carried = {c.inner: c for c in self.loop.carries}
        self.made_by = flat.index.producer
        self._readers: dict[Frame, dict[Atom, list[Use]]] = {}
        self._carrying: dict[Carry, set[Var]] = {}

    def run(self) -> tuple[dict[Carry, Unreduced], dict[Carry, str]]:
        """The accumulators that keep parts, and why others that sum over a sharded batch do not."""
        accepted: dict[Carry, Unreduced] = {}
        refused: dict[Carry, str] = {}
        for carry in self.loop.carries:
            try:
                accepted[carry] = self._plan(carry)
            except _Refused as refusal:
                refused[carry] = refusal.why
        while True:
            conflicts = self._conflicts(accepted)
            if not conflicts:
                return accepted, refused
            for carry, why in conflicts.items():
                del accepted[carry]
                refused[carry] = why

    # --- one accumulator ------------------------------------------------------------------------------

    def _plan(self, carry: Carry) -> Unreduced:
        top = self.seen.top
        if carry.out not in top.producer:
            raise _Refused
        plan = Unreduced(carry, self.placement.home[carry.out])
        todo: list[Value] = [(top, carry.out)]
        while todo:
            frame, v = todo.pop()
            if (frame, v) not in plan.values:
                todo += self._step(plan, frame, v)
                plan.values[frame, v] = None
        if not plan.sums:
            raise _Refused
        if not starts_at_zero(carry.init, self.made_by):
            raise _Refused("it does not start at zero")
        if (top, carry.inner) not in plan.values and self._readers_of(top).get(carry.inner):
            raise _Refused("it is read in every microbatch, and not to be added to")
        plan.axes = _common_axes(plan)
        if not plan.axes:
            raise _Refused(self._why_no_axes(plan))
        return plan

    def _why_no_axes(self, plan: Unreduced) -> str:
        own = sorted(
            plan.blocked & {a for found in plan.sums.values() for dims in found for x in dims.values() for a in x}
        )
        if not own:
            return "its terms are sharded over different axes"
        count = math.prod(self.placement.submeshes[plan.submesh].shape[a] for a in own)
        return f"it is sharded over {_names(own)} itself (fsdp), and parts would take {count} times its memory"

    def _step(self, plan: Unreduced, frame: Frame, v: Atom) -> list[Value]:
        """The values that have to become parts so that ``v`` does."""
        if v is plan.carry.inner:
            return []
        if not _compat.is_var(v):
            raise _Refused
        i = frame.producer.get(v)
        if i is None:
            return self._operand(plan, frame, v)
        if not self._is_reduced(plan, frame, v):
            raise _Refused
        eqn, s = frame.eqns[i], plan.submesh
        name = eqn.primitive.name
        if frame.up is None and s not in self.placement.node[self.seen.nodes[i]]:
            raise _Refused("it crosses between submeshes on its way to the accumulator")
        if i in frame.inner:
            return self._into(plan, frame, i, v)
        if any(self.seen.batched(frame, x, s) for x in eqn.invars if _compat.is_var(x)):
            if name == "shard_map" and self._has_its_own(eqn, v, self._batch_axes(frame, eqn, s)):
                raise _Refused
            plan.sums[frame, i] = self._sum(plan, frame, i)
            return []
        if name in ("sharding_constraint", "manymesh_constraint"):
            mesh = self.placement.submeshes[s]
            for entry in constraint_entries(eqn, mesh):
                plan.blocked |= {a for a in parts_of(entry) if mesh.shape.get(a, 1) > 1}
        slots = self._linear_in(plan, frame, i, v)
        plan.slots[frame, i].update(slots)
        # All of several pieces become parts, or none.
        pieces = [o for o in eqn.outvars if _compat.is_var(o)] if name in ("split", "unstack") else []
        return [(frame, eqn.invars[k]) for k in slots] + [(frame, o) for o in pieces]

    def _batch_axes(self, frame: Frame, eqn: Eqn, s: int) -> set[str]:
        """The axes that the batch is sharded over in what an equation reads."""
        operands = [(d, n) for x in eqn.invars for d, n in zip(frame.of(x), shape_of(x), strict=True)]
        return {a for d, n in operands if d.root().batch for a in self.seen.axes(d, n, s)}

    @staticmethod
    def _has_its_own(eqn: Eqn, v: Var, axes: set[str]) -> bool:
        """Whether each device of some axes makes a part of its own of a ``shard_map``'s result: that of its experts."""
        spec = _compat.out_specs_of(eqn)[list(eqn.outvars).index(v)]
        return axes <= {a for entry in spec for a in parts_of(entry)}

    def _linear_in(self, plan: Unreduced, frame: Frame, i: int, v: Var) -> list[int]:
        """The operands that an equation applies to part by part."""
        eqn = frame.eqns[i]
        name = eqn.primitive.name
        reduced = [k for k, x in enumerate(eqn.invars) if self._is_reduced(plan, frame, x)]
        if name == "optimization_barrier":
            return [k for k, out in enumerate(eqn.outvars) if out is v]
        if not reduced:  # what is computed on several submeshes may be a sum over devices on another one only
            raise _Refused
        if name == "select_n" and 0 not in reduced:
            return reduced
        if name in TOGETHER:
            linear = TOGETHER[name]
            if linear is None or set(reduced) <= set(linear):
                return reduced
        elif is_linear_in_first(eqn) and (reduced == [0] or (name == "div" and 0 in reduced)):
            return [0]
        elif name in EITHER and eqn.invars[0] is not eqn.invars[1]:
            # Of a gradient and a number that multiplies it, the gradient.
            k = max(reduced, key=lambda k: (not self._is_spread(frame, eqn.invars[k]), nbytes(eqn.invars[k].aval)))
            if not mixes_groups(eqn, k):
                return [k]
        raise _Refused(f"{name} is applied to it in every microbatch, and cannot be applied to parts")

    def _is_reduced(self, plan: Unreduced, frame: Frame, v: Atom) -> bool:
        if not _compat.is_var(v):
            return False
        if v in frame.reduced or (frame, v) in plan.values:
            return True
        return frame.up is None and (v in self.carried or v in self._made_from(plan.carry))

    def _made_from(self, carry: Carry) -> set[Var]:
        """The values of the body that depend on what an accumulator held before."""
        if carry not in self._carrying:
            found = self._carrying[carry] = {carry.inner}
            for n in self.body:
                if not found.isdisjoint(n.inputs):
                    found.update(n.outputs)
        return self._carrying[carry]

    @staticmethod
    def _is_spread(frame: Frame, v: Atom) -> bool:
        i = frame.producer.get(v)
        return i is not None and frame.eqns[i].primitive.name == "broadcast_in_dim"

    def _operand(self, plan: Unreduced, frame: Frame, v: Var) -> list[Value]:
        """A value that comes into a frame."""
        if frame.up is None:
            raise _Refused("another accumulator is read with it" if v in self.carried else "")
        outer, i = frame.up
        eqn = outer.eqns[i]
        k = frame.invars.index(v) if v in frame.invars else -1
        if k < 0:
            raise _Refused
        if eqn.primitive.name == "scan":
            scan = _compat.scan_parts(eqn)
            j = k - scan.num_consts
            if 0 <= j < scan.num_carry:  # its result was asked for, or is asked for with it
                return self._carried(plan, outer, i, j)
            raise _Refused("a scan reads it in every step")
        plan.slots[outer, i].add(k)
        return [(outer, eqn.invars[k])]

    def _into(self, plan: Unreduced, frame: Frame, i: int, v: Var) -> list[Value]:
        """The result of a call or scan becomes parts where its body makes it."""
        eqn, child = frame.eqns[i], frame.inner[i]
        if eqn.primitive.name != "scan" and not is_rewritable(eqn):
            raise _Refused(f"{eqn.primitive.name} over the batch cannot be done in parts")
        j = next(j for j, out in enumerate(eqn.outvars) if out is v)
        if eqn.primitive.name == "scan" and j < _compat.scan_parts(eqn).num_carry:
            return self._carried(plan, frame, i, j)
        return [(child, child.outvars[j])]

    def _carried(self, plan: Unreduced, frame: Frame, i: int, j: int) -> list[Value]:
        """What a scan carries from step to step: the start, what is read, what replaces it, and what is left."""
        eqn, child = frame.eqns[i], frame.inner[i]
        k = _compat.scan_parts(eqn).num_consts + j
        plan.values[child, child.invars[k]] = None
        plan.slots[frame, i].add(k)
        found = [(child, child.outvars[j])]
        if _compat.is_var(eqn.outvars[j]):
            plan.values[frame, eqn.outvars[j]] = None
        if self._is_reduced(plan, frame, eqn.invars[k]):
            found.append((frame, eqn.invars[k]))
        return found

    # --- the sum over the batch -----------------------------------------------------------------------

    def _sum(self, plan: Unreduced, frame: Frame, i: int) -> tuple[dict[int, tuple[str, ...]], ...]:
        """For each operand of a sum over the batch, the axes of each dimension that it sums over."""
        eqn, s = frame.eqns[i], plan.submesh
        summed = summed_dims(eqn)
        shapes = [shape_of(v) for v in eqn.invars]
        dims = [frame.of(v) for v in eqn.invars]
        if not summed or (eqn.primitive.name in TOGETHER and not is_zero(frame, eqn.invars[0])):
            raise _Refused(f"{eqn.primitive.name} over the batch cannot be done in parts")
        gone = {(k, d) for group in summed for k, d in group}
        kept = {
            a
            for k, shape in enumerate(shapes)
            for d, n in enumerate(shape)
            if (k, d) not in gone
            for a in self.seen.axes(dims[k][d], n, s)
        }
        found: tuple[dict[int, tuple[str, ...]], ...] = tuple({} for _ in eqn.invars)
        taken: set[str] = set()
        # The batch first: only it has to be there.
        for group in sorted(summed, key=lambda g: not dims[g[0][0]][g[0][1]].root().batch):
            k, d = group[0]
            axes = self.seen.axes(dims[k][d], shapes[k][d], s)
            if dims[k][d].root().batch and kept & set(axes):
                raise _Refused(
                    f"other dimensions of the activations are sharded over {_names(sorted(kept & set(axes)))} too"
                )
            free = tuple(_until(axes, kept | taken))
            taken.update(free)
            for operand, at in group:
                if free:
                    found[operand][at] = free
                if free != axes and eqn.primitive.name == "dot_general" and _compat.is_var(eqn.invars[operand]):
                    plan.gathered[frame, eqn.invars[operand]].add(at)
        if not taken:
            raise _Refused
        return found

    # --- all accumulators together --------------------------------------------------------------------

    def _conflicts(self, accepted: dict[Carry, Unreduced]) -> dict[Carry, str]:
        """Accumulators whose parts are read by something that needs the sum."""
        axes: Axes = {}
        submesh: dict[Value, int] = {}
        slots: dict[tuple[Frame, int], set[int]] = defaultdict(set)
        conflicts: dict[Carry, str] = {}
        for carry, plan in accepted.items():
            if any(axes.setdefault(key, plan.axes) != plan.axes for key in plan.values):
                conflicts[carry] = "two accumulators share terms that are sharded over different axes"
            elif any(submesh.setdefault(key, plan.submesh) != plan.submesh for key in plan.values):
                conflicts[carry] = "an accumulator on another submesh shares terms with it"
            for at, operands in plan.slots.items():
                slots[at] |= operands
        kept = {p.inner for p in self.loop.ys}
        kept |= {c.out for c in self.loop.carries if c not in accepted}
        kept |= {c.inner for c in self.loop.carries if c not in accepted}
        for carry, plan in accepted.items():
            for frame, v in plan.values:
                reader = self._reader(frame, v, axes, slots)
                if reader is None and frame.up is None and v in kept:
                    reader = "the result"
                if reader is not None:
                    conflicts.setdefault(carry, f"{reader} reads its terms in every microbatch")
        return conflicts

    def _reader(self, frame: Frame, v: Atom, axes: Axes, slots: Mapping[tuple[Frame, int], set[int]]) -> str | None:
        """What reads a value as a whole, or None."""
        for i, k in self._readers_of(frame).get(v, ()):
            if i < 0:
                assert frame.up is not None, "the loop's body lists no results"
                outer, at = frame.up
                result = outer.eqns[at].outvars[k]
                if _compat.is_var(result) and (outer, result) not in axes:
                    return _name(outer.eqns[at])
            elif k not in slots.get((frame, i), ()) and not self._enters(frame, i, k, axes):
                return _name(frame.eqns[i])
        return None

    def _enters(self, frame: Frame, i: int, k: int, axes: Axes) -> bool:
        child = frame.inner.get(i)
        return child is not None and (child, child.invars[k]) in axes

    def _readers_of(self, frame: Frame) -> dict[Atom, list[Use]]:
        """Variable -> (equation, operand) that read it; (-1, result) where it leaves the frame."""
        if frame not in self._readers:
            found: dict[Atom, list[Use]] = defaultdict(list)
            for i, eqn in enumerate(frame.eqns):
                for k, v in enumerate(eqn.invars):
                    if _compat.is_var(v):
                        found[v].append((i, k))
            for k, v in enumerate(frame.outvars):
                if _compat.is_var(v):
                    found[v].append((-1, k))
            self._readers[frame] = found
        return self._readers[frame]

    def task_of(self, carry: Carry) -> str:
        """The task that makes the terms of an accumulator, or a word for an unmarked one."""
        todo = [carry.out]
        seen: set[Node] = set()
        while todo:
            node = self.made_by.get(todo.pop(0))
            if node is None or node.loop != self.index or node in seen:
                continue
            seen.add(node)
            if node.task is not None:
                return (self.flat.tasks[node.task].name or "task") + ("", "_bwd", "_wgt")[node.phase]
            todo += node.inputs
        return "unmarked"


def _common_axes(plan: Unreduced) -> tuple[str, ...]:
    """The axes that every sum of a plan can be taken over in parts."""
    sums = [[axes for dims in found for axes in dims.values()] for found in plan.sums.values()]
    order = list(dict.fromkeys(a for axes in sums[0] for a in axes))
    chosen = set(order) - plan.blocked
    while True:
        # Of a dimension's axes only the major ones: a part is one contiguous piece of it.
        possible = set(chosen)
        for found in sums:
            possible &= {a for axes in found for a in _until(axes, set(axes) - chosen)}
        if possible == chosen:
            return tuple(a for a in order if a in chosen)
        chosen = possible


def _until(axes: Sequence[str], stop: set[str]) -> list[str]:
    """The axes before the first that is in ``stop``."""
    found: list[str] = []
    for a in axes:
        if a in stop:
            break
        found.append(a)
    return found


def _names(axes: Sequence[str]) -> str:
    return " and ".join(repr(a) for a in axes)


def _name(eqn: Eqn) -> str:
    return str(eqn.primitive.name)
