"""The weight-gradient split of zero-bubble schedules.

A backward task does two things: it hands a gradient on to the stage before, which somebody waits for,
and it makes the gradients of its weights, which nobody waits for until the loop ends. Under a schedule
that asks for it the task's equation becomes two. The second reads what the first already computed, so
that no work is done twice; the values in between live until it runs.

After "Zero Bubble Pipeline Parallelism" (Qi et al., 2023), where the halves are called B and W.
"""

from __future__ import annotations

from typing import Any

import jax

from .. import _compat
from .._jaxpr._nodes import Flat, Loop, Node, inlined, trace_nodes

# The operations that turn activations and their gradients into the gradient of a weight.
_CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "ragged_dot"})


def split_weights(flat: Flat) -> None:
    """Splits, in place, the backward tasks of every loop whose schedule splits the backward pass."""
    for loop in flat.loops:
        if getattr(loop.spec.schedule, "splits_backward", False):
            waited_for = _waited_for(flat, loop)
            flat.nodes = [
                half
                for n in flat.nodes
                for half in (_split(n, waited_for) if n.loop is loop and n.task is not None and n.backward else [n])
            ]


def _waited_for(flat: Flat, loop: Loop) -> set[Any]:
    """Values of the body that some task reads, directly or through unmarked equations."""
    needed: set[Any] = set()
    for n in reversed(flat.nodes):
        if n.loop is loop and (n.task is not None or any(v in needed for v in n.outputs)):
            needed.update(n.inputs)
    return needed


def _split(node: Node, waited_for: set[Any]) -> list[Node]:
    """The two halves of a backward task; the whole task where there is nothing to split off."""
    inner = _compat.open_jaxpr(node.eqn.params["jaxpr"])
    eqns, env = inlined(inner.eqns)
    outs = [env.get(v, v) if _compat.is_var(v) else v for v in inner.outvars]
    producer = {v: i for i, e in enumerate(eqns) for v in e.outvars if _compat.is_var(v)}
    is_weight = [
        _compat.is_var(o) and o in producer and v not in waited_for for o, v in zip(outs, node.eqn.outvars, strict=True)
    ]
    later = _weight_equations(eqns, producer, outs, is_weight)
    if not later or inner.consts:
        return [node]
    first = [e for i, e in enumerate(eqns) if i not in later]
    second = [e for i, e in enumerate(eqns) if i in later]
    made_later = {v for e in second for v in e.outvars if _compat.is_var(v)}
    read_later = {v for e in second for v in e.invars if _compat.is_var(v)}
    own = set(inner.invars)
    shared = list(dict.fromkeys(v for e in first for v in e.outvars if _compat.is_var(v) and v in read_later))
    direct = [v for v in inner.invars if v in read_later]
    early = [k for k, o in enumerate(outs) if not (_compat.is_var(o) and o in made_later)]
    late = [k for k in range(len(outs)) if k not in early]
    actual = dict(zip(inner.invars, node.eqn.invars, strict=True))
    used_first = [
        v
        for v in inner.invars
        if v in {w for e in first for w in e.invars if _compat.is_var(w)} | set(map(_atom, outs))
    ]
    one, made = _call(node, used_first, [outs[k] for k in early] + shared, first, actual)
    between = {v: made[len(early) + i] for i, v in enumerate(shared)}
    _name_results(one, made[: len(early)], [node.eqn.outvars[k] for k in early])
    two, made = _call(node, direct + shared, [outs[k] for k in late], second, {**actual, **between})
    _name_results(two, made, [node.eqn.outvars[k] for k in late])
    two.weight = True
    assert not (made_later & own), "a task does not redefine what it reads"
    return [one, two]


def _atom(v: Any) -> Any:
    return v if _compat.is_var(v) else None


def _call(
    node: Node, invars: list[Any], outvars: list[Any], eqns: list[Any], actual: dict[Any, Any]
) -> tuple[Node, list[Any]]:
    """One half as an equation of the flat program."""
    jaxpr = _compat.new_jaxpr(invars, outvars, eqns)

    def half(*args: Any) -> Any:
        return jax.core.eval_jaxpr(jaxpr, [], *args)

    half.__name__ = half.__qualname__ = str(node.task)
    operands = [actual[v] for v in invars]
    nodes, made = trace_nodes(jax.jit(half), operands, task=node.task, backward=True, loop=node.loop)
    assert len(nodes) == 1, "a jitted half is one equation"
    return nodes[0], made


def _name_results(node: Node, made: list[Any], wanted: list[Any]) -> None:
    """Lets the half define the variables that the rest of the program reads."""
    rename = {m: w for m, w in zip(made, wanted, strict=True) if _compat.is_var(m) and _compat.is_var(w)}
    node.eqn = node.eqn.replace(outvars=[rename.get(v, v) if _compat.is_var(v) else v for v in node.eqn.outvars])


def _weight_equations(eqns: list[Any], producer: dict[Any, int], outs: list[Any], is_weight: list[bool]) -> set[int]:
    """Positions of the equations that only weight gradients need, back to the contraction that makes each."""
    needed_now: set[int] = set()
    _walk_back(eqns, producer, [o for o, w in zip(outs, is_weight, strict=True) if not w], needed_now, set())
    later: set[int] = set()
    for o, w in zip(outs, is_weight, strict=True):
        if not w or producer[o] in needed_now:
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


def _back_to_contraction(eqns: list[Any], producer: dict[Any, int], result: Any) -> set[int]:
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


def _walk_back(eqns: list[Any], producer: dict[Any, int], starts: list[Any], found: set[int], stop: set[int]) -> None:
    stack = [v for v in starts if _compat.is_var(v)]
    while stack:
        i = producer.get(stack.pop())
        if i is not None and i not in found and i not in stop:
            found.add(i)
            stack += [v for v in eqns[i].invars if _compat.is_var(v)]
