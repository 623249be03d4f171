"""Where small values go that no submesh needs: beside what stands next to them among the arguments or results.

The count of a metric and its total are two leaves of one state; the total is where the loss is, and the count nowhere in
particular. On two submeshes ``total / count`` would be an error as soon as it is written outside of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Set

from .. import _compat
from .._compat import Var
from .._program._flat import FlatProgram
from .._program._nodes import Carry, Node
from .._program._placement import Placement


def beside(flat: FlatProgram, placement: Placement) -> tuple[dict[Var, int], dict[Var, int]]:
    """Homes of the states and of the results that are placed by nothing else.

    Args:
      flat: the program.
      placement: where it runs so far; what nobody needs is on the first submesh.

    Returns:
      State -> submesh, result -> submesh. What has no neighbour, or neighbours in several places, is not listed.
    """
    idle, carries = _idle(flat, placement)
    if not idle:
        return {}, {}
    pins, made = flat.pins, {v for n in idle for v in n.outputs}.union(c.final for c in carries)
    starts = {c.init for c in carries if _compat.is_var(c.init)}
    elsewhere = _read_by_loops(flat, carries) | flat.index.results
    read = {v: flat.index.readers.get(v, ()) for v in pins.names if v not in pins.inputs}
    free = {
        v for v, readers in read.items() if (readers or v in starts) and v not in elsewhere and idle.issuperset(readers)
    }
    around = _Names((name, placement.home[v]) for v, name in pins.names.items() if v not in free)
    # A state that a step resets to a number has a literal for its next value, which follows it.
    following = {v: flat.outvars[o] for v, o in pins.states if v in free}
    found = {
        v: around.of_neighbours(pins.names[v]) for v, out in following.items() if not _compat.is_var(out) or out in made
    }
    outs = {o: v for o, v in enumerate(flat.outvars) if _compat.is_var(v) and o in pins.result_names}
    around = _Names((pins.result_names[o], placement.home[v]) for o, v in outs.items() if v not in made)
    # One value may be two results: the next value of a state is where the state is, whatever else it is.
    fixed = {flat.outvars[o] for o in (*pins.outputs, *(o for _, o in pins.states)) if _compat.is_var(flat.outvars[o])}
    left = {v: around.of_neighbours(pins.result_names[o]) for o, v in outs.items() if v in made - fixed}
    runs = _runs(flat, placement, idle, carries)
    for v, out in following.items():
        if _compat.is_var(out) and out in runs and v in found:
            left[out] = found[v]
            found[v] = found[v] if found[v] in runs[out] else None
    left = {v: at for v, at in left.items() if at in runs.get(v, (at,))}
    return {v: at for v, at in found.items() if at is not None}, {v: at for v, at in left.items() if at is not None}


def of_literals(flat: FlatProgram, placement: Placement) -> dict[int, int]:
    """Position of a result that is a literal (the length of a batch, say) -> the submesh of its neighbours, if they have one."""
    names = flat.pins.result_names
    literals = [o for o, v in enumerate(flat.outvars) if o in names and not _compat.is_var(v)]
    if not literals:
        return {}
    values = ((o, v) for o, v in enumerate(flat.outvars) if o in names and _compat.is_var(v))
    around = _Names((names[o], placement.home[v]) for o, v in values)
    return {o: at for o in literals if (at := around.of_neighbours(names[o])) is not None}


def _idle(flat: FlatProgram, placement: Placement) -> tuple[set[Node], set[Carry]]:
    """Nodes on no submesh in particular, for what comes of them only leaves the step; and what loops hand on of it."""
    readers = flat.index.readers
    carries, adrift = {c for _, c in _carries(flat)}, _adrift(flat, placement)
    wanted = {v for o in flat.pins.outputs if _compat.is_var(v := flat.outvars[o])}
    while True:
        idle: set[Node] = set()
        read_by_loops = _read_by_loops(flat, carries)
        for n in reversed(flat.nodes):
            free = n in adrift and wanted.isdisjoint(n.outputs) and read_by_loops.isdisjoint(n.outputs)
            if free and all(reader in idle for v in n.outputs for reader in readers.get(v, ())):
                idle.add(n)
        # The next value of a state that something else reads goes where the state is.
        read = (o for v, o in flat.pins.states if not idle.issuperset(readers.get(v, ())))
        placed = {v for o in read if _compat.is_var(v := flat.outvars[o])}
        kept = {
            c
            for c in carries
            if idle.issuperset((*readers.get(c.inner, ()), *readers.get(c.final, ())))
            and flat.index.producer.get(c.out) in idle
            and not {c.inner, c.final} & (wanted | placed | read_by_loops)
        }
        if placed <= wanted and kept == carries:
            return idle, carries
        wanted |= placed
        carries = kept


def _adrift(flat: FlatProgram, placement: Placement) -> set[Node]:
    """Nodes that are where they are for no reason: cloned, or in a loop in no place in particular, or after such ones.

    What reads a batch is where the batch is, and so is what comes of it: it would have to cross.
    """
    producer, comes_from = flat.index.producer, flat.index.comes_from
    pieces = {p.inner for loop in flat.loops for p in loop.xs}
    found: set[Node] = set()
    for n in flat.nodes:
        why, made = placement.reason[n], [producer.get(comes_from.get(v, v)) for v in n.inputs]
        after = why in ("reads", "state", "default") and made and found.issuperset(made)
        by_itself = (
            why == "default" and n.loop is not None and found.issuperset(producer[v] for v in n.inputs if v in producer)
        )
        if pieces.isdisjoint(n.inputs) and (why == "cloned" or after or by_itself):
            found.add(n)
    return found


def _runs(flat: FlatProgram, placement: Placement, idle: set[Node], carries: set[Carry]) -> dict[Var, set[int]]:
    """What comes of loops -> where they run anyhow: no loop gets a stage for what it hands on."""
    bodies = flat.index.bodies
    found = {c.final: {k for n in bodies[i] for k in placement.node[n]} for i, c in _carries(flat) if c in carries}
    for n in flat.nodes:
        limits = [found[v] for v in n.inputs if v in found and n in idle]
        found.update(dict.fromkeys(n.outputs, set.intersection(*limits)) if limits else {})
    return found


def _carries(flat: FlatProgram) -> Iterator[tuple[int, Carry]]:
    """What loops hand on from one microbatch to the next: (loop, carry)."""
    return ((i, c) for i, loop in enumerate(flat.loops) for c in loop.carries)


def _read_by_loops(flat: FlatProgram, besides: Set[Carry]) -> set[Var]:
    """What loops read under other names, but for some carries."""
    found = {v for loop in flat.loops for p in loop.xs for v in p.outer if _compat.is_var(v)}
    found.update(p.inner for loop in flat.loops for p in loop.ys)
    found.update(v for _, c in _carries(flat) if c not in besides for v in (c.init, c.out) if _compat.is_var(v))
    return found


class _Names:
    """The tree of names, and the submeshes of its leaves.

    Args:
      leaves: (name of a leaf, step by step; its submesh).
    """

    def __init__(self, leaves: Iterable[tuple[tuple[str, ...], int]]) -> None:
        # Inner node -> number of steps down to a leaf -> submeshes of such leaves.
        self.below: dict[tuple[str, ...], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for path, at in leaves:
            for k in range(1, len(path)):
                self.below[path[:k]][len(path) - k].add(at)

    def of_neighbours(self, path: tuple[str, ...]) -> int | None:
        """The one place of the leaves next to a leaf; if there are none, of all below the nearest node with leaves."""
        for k in range(len(path) - 1, 0, -1):
            if path[:k] in self.below:
                depths = self.below[path[:k]]
                places = depths.get(len(path) - k) or set().union(*depths.values())
                return next(iter(places)) if len(places) == 1 else None
        return None
