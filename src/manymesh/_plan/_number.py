"""Numbers for the variables of a program, the same in every process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from typing import Any

from .. import _compat
from .._program import Program
from ._instructions import Plan, Receive, Value


def variables_of(program: Program) -> tuple[_compat.Var, ...]:
    """The variables of a program in a fixed order; a variable's number is its position.

    Args:
      program: the program.

    Returns:
      Its inputs, then what loops and fragments read and make, in their order, each once.
    """
    return tuple(dict.fromkeys(v for v in _mentions(program) if _compat.is_var(v)))


def _mentions(program: Program) -> Iterator[Any]:
    yield from program.invars
    for loop in program.loops:
        for carry in loop.carries:
            yield from carry
        for inner, outer in (*loop.xs, *loop.ys):
            yield inner
            yield from outer
    for f in program.fragments:
        yield from f.invars
        yield from f.outvars


def value_of(variable: _compat.Var) -> Value:
    """Shape and dtype of a variable."""
    aval: Any = variable.aval
    return Value(tuple(aval.shape), str(aval.dtype))


def arguments_elsewhere(program: Program, plan: Plan) -> Iterator[tuple[int, _compat.Var, int, int]]:
    """Arguments that several submeshes read: they go on from their home in every call.

    Yields:
      the place among the inputs of the plan, the argument, its home, the other submesh.
    """
    for place, (i, s, _) in enumerate(plan.inputs):
        v = program.invars[i]
        if i >= len(program.consts) and s != (home := home_between_calls(program, v)):
            yield place, v, home, s


def home_between_calls(program: Program, v: _compat.Var) -> int:
    """The submesh on which an argument is between calls: its home, or the first that reads it where that does not."""
    home, readers = program.home[v], program.input_submeshes[v]
    return home if home in readers or not readers else readers[0]


def handed_on(program: Program, plan: Plan, asked_in: Container[int], asked_out: Container[int]) -> frozenset[int]:
    """Arguments that nobody reads and that come out as they came: the moments of another optimizer in the state, say.

    Args:
      program: the program.
      plan: its plan.
      asked_in: inputs that the user wants somewhere.
      asked_out: results that the user wants somewhere.

    Returns:
      Positions of inputs, without those that are constants or blocks of a stacked value.
    """
    results: dict[int, list[int]] = {}
    for o, slot in enumerate(plan.outputs):
        if slot is not None:
            results.setdefault(slot, []).append(o)
    places = Counter(i for i, _, _ in plan.inputs)
    shift = len(program.consts)
    blocks_in = {shift + i for stacked in program.stacked_inputs for i in stacked.positions}
    blocks_out = {o for stacked in program.stacked_outputs for o in stacked.positions}
    found = {
        slot: i
        for i, _, slot in plan.inputs
        if i >= shift and places[i] == 1 and slot in results and i not in asked_in and i not in blocks_in
        if not any(o in asked_out or o in blocks_out for o in results[slot])
    }
    if found:
        for instruction in plan.instructions:
            if not isinstance(instruction, Receive):
                for slot in found.keys() & instruction.inputs:
                    del found[slot]
    return frozenset(found.values())
