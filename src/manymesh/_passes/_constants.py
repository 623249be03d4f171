"""What is computed of nothing is made by whoever reads it: a mask of positions, the number that fills scores up.

JAX takes such values out of a loop over layers. As results of their own they would be kept, one for each pair of tokens and
each sequence, where the kernel that reads them makes them on the way.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from .._compat import Atom, Var
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes, nodes_where
from .._program._rewrite import reading, substitute
from ._blocks._ties import ELEMENTWISE
from ._hoist import SMALL, stays

# What costs next to nothing beside reading as many numbers.
CHEAP = {name for name in ELEMENTWISE if not name.startswith("manymesh_")}.union(
    (
        "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "iota", "pad", "reshape", "rev",
        "slice", "squeeze", "stack", "tile", "transpose",
    )
)  # fmt: skip


def repeat_constants(flat: FlatProgram) -> FlatProgram:
    """Gives everything in a loop that reads a large constant its own."""
    made = {v: n for n in constants(flat) for v in n.outputs}
    changed: dict[Node, list[Node]] = {}
    for reader in flat.nodes if made else ():
        if reader.loop is None or any(v in made for v in reader.outputs):
            continue
        read = [v for v in dict.fromkeys(reader.inputs) if v in made and made[v].loop == reader.loop]
        large = [v for v in read if nbytes(v.aval) > SMALL and not _is_its_own(flat, made[v], reader, made)]
        if large:
            env: dict[Var, Atom] = {}
            own = [n for v in large for n in _own(v, reader, made, env)]
            changed[reader] = [*own, reading(reader, {v: env[v] for v in large})]
    if not changed:
        return flat
    return replace(flat, nodes=nodes_where(flat.nodes, changed), placement=None)


def constants(flat: FlatProgram) -> list[Node]:
    """The unmarked equations that are cheap and depend on nothing, in order."""
    found: dict[Node, None] = {}
    made: set[Var] = set()
    for n in flat.nodes:
        if made.issuperset(n.inputs) and is_cheap(n) and flat.index.leaving.isdisjoint(n.outputs):
            found[n] = None
            made.update(n.outputs)
    return list(found)


def is_cheap(n: Node) -> bool:
    """Whether a node may run on several submeshes, wherever it is read."""
    free = n.task is None and n.colocated_with is None and n.mesh is None and not n.guard
    return free and n.primitive in CHEAP and not stays(n) and not n.layout_follows_loop


def _is_its_own(flat: FlatProgram, n: Node, reader: Node, made: Container[Var]) -> bool:
    """Whether nothing else reads a constant, and it is computed when its reader is."""
    index = flat.index
    todo, readers = [n], {reader}
    while todo:
        n = todo.pop()
        if n.phase != reader.phase or not readers.issuperset(r for v in n.outputs for r in index.readers.get(v, ())):
            return False
        readers.add(n)
        todo += [index.producer[v] for v in n.inputs if v in made]
    return True


def _own(v: Var, reader: Node, made: dict[Var, Node], env: dict[Var, Atom]) -> list[Node]:
    """The equations that make a constant for a reader; ``env`` knows what it is called there."""
    if v in env:
        return []
    n = made[v]
    before = [x for operand in n.inputs for x in _own(operand, reader, made, env)]
    own = replace(
        n, eqn=substitute(n.eqn, env), loop=reader.loop, backward=reader.backward, weight=reader.weight,
        colocated_with=reader.task or reader.colocated_with,
    )  # fmt: skip
    return [*before, own]
