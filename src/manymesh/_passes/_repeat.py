"""Constraints of what no microbatch changes: repeated by whoever reads the value, not kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace

from .. import _compat
from .._compat import Var
from .._mark import box_constraint_p, constraint_p
from .._program._flat import FlatProgram
from .._program._nodes import Node, nodes_where
from .._program._rewrite import reading

_CONSTRAINTS = frozenset({constraint_p.name, box_constraint_p.name, "sharding_constraint"})


def repeat_constraints(flat: FlatProgram) -> FlatProgram:
    """Gives each task, in each phase, its own copy of the constraints of the arguments that it reads.

    A step that constrains its parameters before it calls its tasks would otherwise make a second copy of each, and one
    for every microbatch in flight where it does so inside a loop, because the backward pass reads it too.
    """
    index = flat.index
    found = (n for n in flat.nodes if n.task is None and n.primitive in _CONSTRAINTS and _is_constant(n, flat))
    constant = dict.fromkeys(found)  # in order: other processes make the same program
    reads: dict[Node, dict[Var, Var]] = defaultdict(dict)
    before: dict[Node, list[Node]] = defaultdict(list)
    gone: set[Node] = set()
    for n in constant:
        (result,) = n.outputs
        readers = index.readers.get(result, ())
        groups: dict[Hashable, list[Node]] = defaultdict(list)
        for reader in readers:
            groups[reader.task or reader.colocated_with, reader.phase, reader.loop].append(reader)
        stays = len(groups) < 2 and all(r.loop == n.loop for r in readers)
        # Of a constraint of a constraint the last one is repeated first, in this run; the one before it in the next.
        if stays or result in index.leaving or not constant.keys().isdisjoint(readers):
            continue
        gone.add(n)
        for users in groups.values():
            first = users[0]
            own = _compat.new_var(result.aval)
            before[first].append(
                replace(
                    n, eqn=n.eqn.replace(outvars=[own]), loop=first.loop, backward=first.backward, weight=first.weight,
                    colocated_with=first.task or first.colocated_with,
                )
            )  # fmt: skip
            for user in users:
                reads[user][result] = own
    if not gone:
        return flat
    changed: dict[Node, list[Node]] = {n: [] for n in gone}
    changed |= {user: [*before[user], reading(user, env)] for user, env in reads.items()}
    return replace(flat, nodes=nodes_where(flat.nodes, changed), placement=None)


def _is_constant(n: Node, flat: FlatProgram) -> bool:
    """Whether a constraint is one of an argument, or of something else that its loop does not change."""
    index = flat.index
    if len(n.inputs) != 1 or len(n.outputs) != 1:
        return False
    (v,) = n.inputs
    maker = index.producer.get(v)
    if maker is not None and maker.task is None and maker.primitive in _CONSTRAINTS:
        return _is_constant(maker, flat)
    return v in flat.invars or (n.loop is not None and index.scope.get(v) != n.loop)
