"""The weight-gradient split of zero-bubble schedules.

A backward task does two things: it hands a gradient on to the stage before, which somebody waits for,
and it makes the gradients of its weights, which nobody waits for until the loop ends. Under a schedule
that asks for it the task's equation becomes two. The second reads what the first already computed, so
that no work is done twice; the values in between live until it runs.

After "Zero Bubble Pipeline Parallelism" (Qi et al., 2023), where the halves are called B and W.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from .. import _compat
from .._compat import Atom, Eqn, Var
from .._microbatch import LoopSpec
from .._program._calls import inlined_jaxpr
from .._program._edit import Editor
from .._program._flat import FlatProgram
from .._program._nodes import Node

# The operations that turn activations and their gradients into the gradient of a weight.
_CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "ragged_dot_general"})


def split_weights(flat: FlatProgram) -> FlatProgram:
    """Splits the backward tasks of every loop whose schedule splits the backward pass."""
    edit = Editor(flat)
    for i, loop in enumerate(flat.loops):
        body = flat.index.bodies[i]
        if not _splits_backward(loop.spec, {flat.tasks[n.task].name for n in body if n.task is not None}):
            continue
        waited_for = _waited_for(body)
        for n in body:
            if n.task is not None and n.backward and not n.weight:
                halves = _split(n, waited_for)
                if halves:
                    edit.replace_node(n, halves)
    return edit.result()


def _splits_backward(spec: LoopSpec, names: Collection[str | None]) -> bool:
    """Whether a loop's schedule splits the backward pass; one that the user wrote does if it names a weight half."""
    if spec.custom_schedule is None:
        return bool(spec.schedule.splits_backward)
    labels = {entry[1] if isinstance(entry, tuple) else entry for row in spec.custom_schedule for entry in row}
    return any(f"{name}_wgt" in labels for name in names if f"{name}_wgt" not in names)


def _waited_for(body: Sequence[Node]) -> set[Var]:
    """Values of the body that some task reads, directly or through unmarked equations."""
    needed: set[Var] = set()
    for n in reversed(body):
        if n.task is not None or any(v in needed for v in n.outputs):
            needed.update(n.inputs)
    return needed


def _split(node: Node, waited_for: set[Var]) -> list[Node]:
    """The two halves of a backward task; none where there is nothing to split off."""
    inner = _compat.open_jaxpr(node.eqn.params["jaxpr"])
    eqns, outs = inlined_jaxpr(inner)
    producer = {v: i for i, e in enumerate(eqns) for v in e.outvars if _compat.is_var(v)}
    is_weight = [
        _compat.is_var(o) and o in producer and v not in waited_for for o, v in zip(outs, node.eqn.outvars, strict=True)
    ]
    later = _weight_equations(eqns, producer, outs, is_weight)
    if not later or inner.consts:
        return []
    first = [e for i, e in enumerate(eqns) if i not in later]
    second = [e for i, e in enumerate(eqns) if i in later]
    made_later = {v for e in second for v in e.outvars if _compat.is_var(v)}
    read_later = {v for e in second for v in e.invars if _compat.is_var(v)}
    shared = list(dict.fromkeys(v for e in first for v in e.outvars if _compat.is_var(v) and v in read_later))
    direct = [v for v in inner.invars if v in read_later]
    early = [k for k, o in enumerate(outs) if not (_compat.is_var(o) and o in made_later)]
    late = [k for k in range(len(outs)) if k not in early]
    actual: dict[Var, Atom] = dict(zip(inner.invars, node.eqn.invars, strict=True))
    read_first = {w for e in first for w in e.invars if _compat.is_var(w)} | {o for o in outs if _compat.is_var(o)}
    used_first = [v for v in inner.invars if v in read_first]
    between = {v: _compat.new_var(v.aval) for v in shared}
    assert not made_later & set(inner.invars), "a task does not redefine what it reads"
    one = _half(node, used_first, [*(outs[k] for k in early), *shared], first, actual)
    two = _half(node, direct + shared, [outs[k] for k in late], second, {**actual, **between})
    made = list(between.values())
    one = one.replace(outvars=[node.eqn.outvars[k] for k in early] + made)
    two = two.replace(outvars=[node.eqn.outvars[k] for k in late])
    return [replace(node, eqn=one), replace(node, eqn=two, weight=True)]


def _half(node: Node, invars: list[Var], outvars: list[Atom], eqns: list[Eqn], actual: Mapping[Var, Atom]) -> Eqn:
    """One half as an equation of the flat program; what it makes is still to be named."""
    jaxpr = _compat.new_jaxpr(invars, outvars, eqns)
    results = [_compat.new_var(v.aval) for v in outvars]
    new = _compat.call_eqn(str(node.task), jaxpr, [actual[v] for v in invars], results)
    half: Eqn = new.replace(source_info=node.eqn.source_info)
    return half


def _weight_equations(
    eqns: list[Eqn], producer: Mapping[Var, int], outs: list[Atom], is_weight: list[bool]
) -> set[int]:
    """Positions of the equations that only weight gradients need, back to the contraction that makes each."""
    needed_now: set[int] = set()
    _walk_back(eqns, producer, [o for o, w in zip(outs, is_weight, strict=True) if not w], needed_now)
    later: set[int] = set()
    for o, w in zip(outs, is_weight, strict=True):
        if not w or not _compat.is_var(o) or producer[o] in needed_now:
            continue
        path = _back_to_contraction(eqns, producer, o)
        if path and not path & needed_now:
            later |= path
    # What something outside the set reads has to be computed with the first half.
    changed = True
    kept = {o for o, w in zip(outs, is_weight, strict=True) if not w and _compat.is_var(o)}
    while changed:
        readers = {v for i, e in enumerate(eqns) if i not in later for v in e.invars if _compat.is_var(v)} | kept
        early = {i for i in later if any(v in readers for v in eqns[i].outvars if _compat.is_var(v))}
        later -= early
        changed = bool(early)
    return later


def _back_to_contraction(eqns: list[Eqn], producer: Mapping[Var, int], result: Var) -> set[int]:
    """The equations from a result back to the first contraction, along single operands; empty if there is none."""
    path: set[int] = set()
    while result in producer:
        i = producer[result]
        path.add(i)
        if eqns[i].primitive.name in _CONTRACTIONS:
            return path
        operands = [v for v in eqns[i].invars if _compat.is_var(v) and v in producer]
        if len(operands) != 1:
            return set()
        result = operands[0]
    return set()


def _walk_back(eqns: list[Eqn], producer: Mapping[Var, int], starts: list[Atom], found: set[int]) -> None:
    stack = [v for v in starts if _compat.is_var(v)]
    while stack:
        i = producer.get(stack.pop())
        if i is not None and i not in found:
            found.add(i)
            stack += [v for v in eqns[i].invars if _compat.is_var(v)]
