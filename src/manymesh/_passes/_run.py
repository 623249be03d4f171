"""The passes in order, and the loop that runs them.

A pass is a function from a flat program to a flat program. It says which facts it needs, and which of them no longer
hold once it changed something; whatever it needs and does not hold is made to hold first. A pass that changes nothing
returns the program that it was given, the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from .._program._flat import FlatProgram
from ._again import compute_where_read
from ._alike import compute_alike_once
from ._apart import recompute_apart
from ._between import keep_less_between
from ._blocks._spread_stacks import spread_stacks
from ._by_hand import place_by_hand
from ._call_once import call_once
from ._casts import cast_once
from ._constants import repeat_constants
from ._copies import copy_results
from ._counters import count_beside
from ._dead import remove_dead
from ._hoist import cross_once, hoist_loop_invariants
from ._in_loops import make_in_loops
from ._inner import advance_inner_gradients
from ._join import join_parts
from ._late import make_once
from ._mark_scopes import mark_scopes
from ._numbers import hold_numbers
from ._place import place
from ._repeat import repeat_constraints
from ._residuals import minimise_residuals
from ._scans import minimise_scans
from ._scatters import widen_scatters
from ._see_through import see_through_stacks
from ._shrink import shrink_where_made
from ._split import split_weights
from ._spread import spread_control_flow
from ._stacks import accumulate_each_layer
from ._sums import regroup_sums
from ._told import follow_gradients
from ._unreduced._defer import leave_unreduced
from ._vectors import leave_apart


class Fact(Enum):
    """Something that is known of a program."""

    NO_DEAD_CODE = "no dead code"
    PLACEMENT = "placement"


@dataclass(frozen=True)
class Pass:
    """A step from a flat program to a better one.

    Attributes:
      name: its name.
      run: what it does.
      needs: facts that have to hold when it starts.
      makes_stale: facts that do not hold any more once it changed something.
      repeats: whether it is run until it changes nothing.
    """

    name: str
    run: Callable[[FlatProgram], FlatProgram]
    needs: frozenset[Fact] = frozenset()
    makes_stale: frozenset[Fact] = frozenset()
    repeats: bool = False


ALL = frozenset(Fact)
_DEAD, _PLACED = frozenset({Fact.NO_DEAD_CODE}), frozenset({Fact.PLACEMENT})

# What makes a fact hold. Dead code is removed first: it would have its say in where things are.
PROVIDERS: Mapping[Fact, Pass] = {
    Fact.NO_DEAD_CODE: Pass("remove_dead", remove_dead, makes_stale=_PLACED),
    Fact.PLACEMENT: Pass("place", place, needs=_DEAD),
}

PASSES: tuple[Pass, ...] = (
    Pass("advance_inner_gradients", advance_inner_gradients, needs=_DEAD, makes_stale=_PLACED),
    Pass("mark_scopes", mark_scopes, needs=_DEAD, makes_stale=ALL),
    Pass("place_by_hand", place_by_hand, needs=_DEAD, makes_stale=_PLACED),
    Pass("follow_gradients", follow_gradients, makes_stale=_PLACED),
    Pass("recompute_apart", recompute_apart, makes_stale=ALL),
    Pass("count_beside", count_beside, needs=_DEAD, makes_stale=ALL),
    Pass("call_once", call_once, needs=_DEAD, makes_stale=ALL),
    Pass("repeat_constraints", repeat_constraints, needs=_DEAD, makes_stale=_PLACED, repeats=True),
    Pass("join_parts", join_parts, needs=_DEAD, makes_stale=ALL, repeats=True),
    Pass("see_through_stacks", see_through_stacks, needs=_DEAD, makes_stale=ALL),
    Pass("accumulate_each_layer", accumulate_each_layer, needs=_DEAD, makes_stale=ALL),
    Pass("spread_stacks", spread_stacks, needs=_DEAD, makes_stale=ALL),
    Pass("split_weights", split_weights, needs=_DEAD, makes_stale=_PLACED),
    Pass("minimise_scans", minimise_scans, makes_stale=ALL, repeats=True),
    Pass("minimise_residuals", minimise_residuals, makes_stale=ALL),
    Pass("make_in_loops", make_in_loops, makes_stale=_PLACED),
    Pass("cast_once", cast_once, needs=_DEAD, makes_stale=ALL),
    Pass("repeat_constants", repeat_constants, needs=_DEAD, makes_stale=ALL),
    Pass("hoist_loop_invariants", hoist_loop_invariants, needs=_DEAD, makes_stale=_PLACED),
    Pass("compute_alike_once", compute_alike_once, needs=_DEAD, makes_stale=ALL),
    Pass("spread_control_flow", spread_control_flow, needs=ALL, makes_stale=ALL, repeats=True),
    Pass("cross_once", cross_once, needs=ALL, makes_stale=ALL),
    Pass("make_once", make_once, needs=ALL, makes_stale=ALL),
    Pass("shrink_where_made", shrink_where_made, needs=ALL, makes_stale=ALL),
    Pass("compute_where_read", compute_where_read, needs=ALL, makes_stale=_DEAD),
    Pass("keep_less_between", keep_less_between, needs=_PLACED, makes_stale=_DEAD),
    Pass("leave_apart", leave_apart, needs=_PLACED, makes_stale=ALL),
    Pass("regroup_sums", regroup_sums, needs=_PLACED, makes_stale=ALL),
    Pass("widen_scatters", widen_scatters, makes_stale=_DEAD),
    Pass("leave_unreduced", leave_unreduced, needs=ALL, makes_stale=ALL),
    Pass("hold_numbers", hold_numbers, needs=_DEAD, makes_stale=_PLACED),
    Pass("copy_results", copy_results, needs=ALL, makes_stale=_PLACED),
)

Between = Callable[[str, FlatProgram], None]


def run_passes(
    flat: FlatProgram,
    passes: Sequence[Pass] = PASSES,
    *,
    then: frozenset[Fact] = ALL,
    between: Between | None = None,
) -> FlatProgram:
    """Runs passes in order, each with the facts that it needs.

    Args:
      flat: the program.
      passes: what to run.
      then: facts that have to hold in the end.
      between: called with the name of each pass that ran and the program that it left.

    Raises:
      NothingPlacedError: placement is needed, and nothing says where anything runs.
    """
    holds: set[Fact] = set()

    def apply(step: Pass, before: FlatProgram) -> FlatProgram:
        while True:
            before = provide(step.needs, before)
            after = step.run(before)
            if between is not None:
                between(step.name, after)
            if after is not before:
                holds.difference_update(step.makes_stale)
            if after is before or not step.repeats:
                return after
            before = after

    def provide(needed: frozenset[Fact], program: FlatProgram) -> FlatProgram:
        for fact, provider in PROVIDERS.items():
            if fact in needed and fact not in holds:
                program = apply(provider, program)
                holds.add(fact)
        return program

    for step in passes:
        flat = apply(step, flat)
    return provide(then, flat)
