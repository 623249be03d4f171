"""Numbers that a step computes alike several times outside of its loops, as ``jax.tree.map`` does for each leaf.

XLA would see that within a fragment. But each would cross for itself, and be a result: ``g * jnp.minimum(1, 1 / norm)`` for a
hundred gradients on another submesh than the norm makes a hundred numbers.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from .. import _compat
from .._compat import Atom, Literal, Var
from .._key import content_of
from .._program._flat import FlatProgram
from .._program._harmless import is_harmless
from .._program._nodes import Node, nbytes
from .._program._rewrite import rename
from ._roles import NUMBER


def compute_alike_once(flat: FlatProgram) -> FlatProgram:
    """Computes once what several equations make alike, of numbers."""
    alias: dict[Var, Atom] = {}
    first: dict[Hashable, Node] = {}
    for n in flat.nodes:
        if _is_free(n) and flat.index.leaving.isdisjoint(n.outputs):
            known = first.setdefault(_key(n, alias), n)
            if known is not n:
                alias.update(zip(n.outputs, known.outputs, strict=True))
    if not alias:
        return flat
    nodes = tuple(n for n in flat.nodes if alias.keys().isdisjoint(n.outputs))
    return rename(replace(flat, nodes=nodes, placement=None), alias)


def _is_free(n: Node) -> bool:
    """Whether a node only makes numbers of numbers, where nothing says when or where."""
    if n.task is not None or n.loop is not None or n.guard or n.mesh is not None or n.colocated_with is not None:
        return False
    numbers = (*n.inputs, *n.outputs)
    if n.layout_follows_loop or n.unstacks or not n.inputs or any(nbytes(v.aval) > NUMBER for v in numbers):
        return False
    every = len(n.outputs) == len(n.eqn.outvars)
    return every and is_harmless(n.eqn) and n.primitive not in ("copy", "copy_p", "optimization_barrier")


def _key(n: Node, alias: dict[Var, Atom]) -> Hashable:
    """What equal nodes have in common."""
    reads = tuple(
        [(str(v.aval), content_of(v.val)) if isinstance(v, Literal) else alias.get(v, v) for v in n.eqn.invars]
    )
    params = tuple(sorted((k, str(v)) for k, v in n.eqn.params.items()))
    return n.primitive, n.backward, reads, params, _compat.eqn_context(n.eqn)
