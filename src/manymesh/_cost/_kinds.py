"""What the values of a step are to its user: parameters, optimizer state, gradients, activations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import jax.numpy as jnp

from .. import _compat
from .._compat import Var
from .._layout._layout import Layout
from .._program import Fragment, Program
from .._program._calls import call_body
from .._program._updates import of_gradients

Kind = Literal["parameters", "optimizer state", "arguments", "constants", "gradients", "activations", "results"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# A parameter that went through these is still that parameter, or a part of it: cast, laid out for a loop, unstacked.
SAME = frozenset(
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


def kinds_of(
    program: Program, layout: Layout, states: Iterable[tuple[int, int]], first: range = range(0)
) -> dict[Var, Kind]:
    """The kind of each variable that has one other than ``activations``.

    Parameters are the arguments that every microbatch reads as they are, or as they were cast before the loop, and, outside
    loops, those that a forward pass reads and that the step gives back, or a gradient of their shape; where there is no
    backward pass, those of its first argument that it does not give back. Other arguments that a training step
    gives back are optimizer state. Gradients are what a loop adds up over microbatches, and what a backward pass makes
    for the optimizer.

    Args:
      program: the program.
      layout: says what is replaced by what.
      states: (input, result) positions where the result is the next value of the input, or has its form.
      first: positions of the arrays of the first argument.
    """
    kinds: dict[Var, Kind] = {}
    count = len(program.consts)
    kinds.update(dict.fromkeys(program.invars[:count], "constants"))
    pieces = _behind(program, {v for loop in program.loops for _, outer in loop.xs for v in outer if _compat.is_var(v)})
    forward = {task for f in program.fragments if f.kind == "F" for task in f.tasks}
    # A task of which only the gradient is wanted may have no forward pass of its own; its backward pass computes it.
    passes = [f for f in program.fragments if f.tasks and (f.kind == "F" or forward.isdisjoint(f.tasks))]
    gradients = of_gradients(program)
    read = _behind(program, {v for f in passes for v in _read_forward(f, gradients)})
    kept = {program.invars[i] for i, _ in states}
    made_back = {v for f in program.fragments if f.kind != "F" and f.loop is None for v in f.outvars}
    handed_out = {
        (_compat.shape(v), _compat.dtype(v)) for v, _ in program.outputs if _compat.is_var(v) and v in gradients
    }
    trains = any(f.kind != "F" for f in program.fragments)
    owned = kept if trains else {program.invars[count + k] for k in first} - kept
    looped = {v for f in program.fragments if f.loop is not None for v in f.invars}
    invariant = _behind(program, looped) - pieces
    for v in program.invars[count:]:
        if not jnp.issubdtype(_compat.dtype(v), jnp.inexact):
            kinds[v] = "optimizer state" if trains and v in kept and v not in read else "arguments"
        elif v in read - pieces and (
            v in owned or v in invariant or (_compat.shape(v), _compat.dtype(v)) in handed_out
        ):
            kinds[v] = "parameters"
        else:
            kinds[v] = "optimizer state" if trains and v in kept else "arguments"
    for loop in program.loops:
        for carry in loop.carries:
            variables = [v for v in carry if _compat.is_var(v)]
            if any(_compat.shape(v) for v in variables):
                for v in variables:
                    kinds.setdefault(v, "gradients")
    read_back = {v for f in program.fragments if f.kind != "F" and f.tasks for v in f.invars}
    shapes = {_compat.shape(v) for v, kind in kinds.items() if kind == "parameters"}
    # What is cast, taken out of a stack or cut into pieces, once for all microbatches.
    for same in ("parameters", "arguments"):
        for v in origins(program.fragments, {v for v, kind in kinds.items() if kind == same}):
            kinds.setdefault(v, same)
    for inner, outer in (pair for loop in program.loops for pair in loop.xs):
        if all(kinds.get(v) == "arguments" for v in outer if _compat.is_var(v)):
            kinds.setdefault(inner, "arguments")
    for v in looped.intersection(v for f in program.fragments if f.loop is None for v in f.outvars) - pieces:
        if _compat.shape(v) in shapes:  # cast once for all microbatches
            kinds.setdefault(v, "parameters")
    updated = _updated(program, layout)
    for v in made_back - read_back - updated:
        if _compat.shape(v) in shapes:
            kinds.setdefault(v, "gradients")
    # A gradient that is handed out is no next value, though it has the form of the parameters.
    handed_on = {v for f in program.fragments if not f.tasks or f.kind != "F" for v in f.outvars} & of_gradients(
        program
    )
    for result, argument in layout.replaces.items():
        kind = kinds.get(argument)
        if kind == "optimizer state" or (kind == "parameters" and result not in handed_on - updated):
            kinds.setdefault(result, kind)
    for f in program.fragments:  # the mean of a gradient, a clipped one, an update
        if not f.tasks and f.loop is None:
            found = {v for v in f.invars if kinds.get(v) == "gradients"}
            for eqn in _compat.open_jaxpr(f.jaxpr).eqns:
                if not found.isdisjoint(v for v in eqn.invars if _compat.is_var(v)):
                    found.update(v for v in eqn.outvars if _compat.shape(v) in shapes)
            for v in found.intersection(f.outvars):
                kinds.setdefault(v, "gradients")
    for result, _ in program.outputs:
        if _compat.is_var(result):
            kinds.setdefault(result, "results")
    return kinds


def _read_forward(f: Fragment, gradients: set[Var]) -> Iterable[Var]:
    """What a forward pass reads, not what an update reads that runs with it, as in a step that trains and then evaluates."""
    if f.loop is not None:
        return f.invars
    read = set(f.outvars)
    for eqn in reversed(_compat.open_jaxpr(f.jaxpr).eqns):
        if _compat.jaxprs_in(eqn) or not (read & {v for v in eqn.outvars if _compat.is_var(v)} <= gradients):
            read.update(v for v in eqn.invars if _compat.is_var(v))
    return read.intersection(f.invars)


def _updated(program: Program, layout: Layout) -> set[Var]:
    """Next values that are made of the arguments that they replace, element by element, outside of tasks and loops."""
    found = set(layout.replaces.values())
    for f in program.fragments:
        for eqn in _compat.open_jaxpr(f.jaxpr).eqns if f.loop is None else ():
            if eqn.primitive.name == "dot_general" or (f.tasks and call_body(eqn) is not None):
                continue
            shapes = {_compat.shape(v) for v in eqn.invars if _compat.is_var(v) and v in found}
            found.update(v for v in eqn.outvars if _compat.is_var(v) and _compat.shape(v) in shapes)
    return found & layout.replaces.keys()


def _behind(program: Program, wanted: set[Var]) -> set[Var]:
    """Those values, and what unmarked fragments made them of before there were gradients."""
    found, updated = set(wanted), of_gradients(program)
    for f in reversed(program.fragments):
        if not f.tasks and f.loop is None and not found.isdisjoint(f.outvars):
            for eqn in reversed(_compat.open_jaxpr(f.jaxpr).eqns):
                if not (found & {v for v in eqn.outvars if _compat.is_var(v)} <= updated):
                    found.update(v for v in eqn.invars if _compat.is_var(v))
    return found


def origins(fragments: Sequence[Fragment], parameters: Iterable[Var]) -> dict[Var, Var]:
    """The parameter, or other argument, that each value is, or is a part of: itself, a cast, a layer of a stack."""
    origin = {v: v for v in parameters}
    for f in fragments:
        if not f.tasks and f.loop is None:
            for eqn in _compat.open_jaxpr(f.jaxpr).eqns:
                source = eqn.invars[0] if eqn.invars else None
                if eqn.primitive.name in SAME and _compat.is_var(source) and source in origin:
                    origin.update(dict.fromkeys(eqn.outvars, origin[source]))
    return origin
