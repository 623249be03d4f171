"""What tasks count from one microbatch to the next is counted beside them.

The count of a stream of random numbers that all layers draw from goes through every stage, and the first stage of the next
microbatch would wait for the last one. It is made of numbers alone: beside the tasks it is there before any of them runs.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .. import _compat
from .._compat import Atom, Eqn, Var
from .._program._calls import calls_back, inlined_jaxpr
from .._program._flat import FlatProgram
from .._program._groups import Groups
from .._program._nodes import Carry, Node, nbytes, nodes_where
from .._program._rewrite import making, rename, substitute
from ._hoist import SMALL

_STACKS = ("concatenate", "stack")  # of these each stage may have its own, and wait for nobody
_COUNTS = (jnp.integer, jnp.bool_, jax.dtypes.prng_key)


def count_beside(flat: FlatProgram) -> FlatProgram:
    """Makes beside the tasks, where the first of them is, what several submeshes count on: small whole numbers and keys."""
    after: dict[Node, list[Node]] = {}
    alias: dict[Var, Atom] = {}
    for chain in (chain for i in range(len(flat.loops)) for chain in _Worker(flat, i).shared()):
        for count in chain.counts.values():
            env: dict[Var, Atom] = dict(count.reads)
            new = [Node(substitute(e, env), loop=count.task.loop, mesh=chain.mesh) for e in count.eqns]
            after.setdefault(count.task, []).extend(new)
            alias[count.made] = env.get(count.result, count.result) if _compat.is_var(count.result) else count.result
        free = (n for n in chain.nodes if chain.mesh is not None and n.mesh is None and n.colocated_with is None)
        after.update((n, [replace(n, mesh=chain.mesh)]) for n in free)
    if not after:
        return flat
    for n in after:
        if n.task is not None:  # what it makes besides has other names, which nobody reads
            left = [_compat.new_var(v.aval) if v in alias else v for v in n.eqn.outvars]
            after[n].insert(0, making(n, left))
    results = {v: r for v, r in flat.results.items() if v not in alias}
    return rename(replace(flat, nodes=nodes_where(flat.nodes, after), results=results, placement=None), alias)


@dataclass(frozen=True, eq=False)
class _Count:
    """A number that a task makes of numbers.

    Attributes:
      task: the call of the task.
      made: what it is called outside.
      eqns: what makes it, in the variables of the task.
      reads: variable of the task -> the operand that it is.
      result: the variable of the task, or the literal, that it is.
    """

    task: Node
    made: Var
    eqns: tuple[Eqn, ...]
    reads: dict[Var, Atom]
    result: Atom


@dataclass(frozen=True, eq=False)
class _Chain:
    """How the next values of some carries, which are made of each other, are made.

    Attributes:
      counts: what tasks make of them, by what that is called.
      nodes: what is made outside of tasks.
      ends: what it starts from.
      readers: the tasks that read the carries, or make the next ones.
      mesh: the submesh of the first of these.
    """

    counts: dict[Var, _Count] = field(default_factory=dict)
    nodes: dict[Node, None] = field(default_factory=dict)
    ends: dict[Var, None] = field(default_factory=dict)
    readers: dict[Node, None] = field(default_factory=dict)
    mesh: Mesh | None = None


class _Worker:
    """Finds what is counted in the body of a loop."""

    def __init__(self, flat: FlatProgram, loop: int) -> None:
        self._flat, self._loop = flat, loop
        self._count = functools.cache(_count)

    def shared(self) -> list[_Chain]:
        """What can be made beside the tasks, and would else have tasks of one submesh wait for those of another."""
        carries = {c.inner: c for c in self._flat.loops[self._loop].carries if _counts(c.out)}
        chains = {v: chain for v, c in carries.items() if (chain := self._chain(c)) is not None}
        inner = {c.inner for c in self._flat.loops[self._loop].carries}
        # One that is made of another carry waits for what makes that one.
        while held := [v for v, c in chains.items() if any(x in inner and x not in chains for x in c.ends)]:
            for v in held:
                del chains[v]
        groups = Groups[Var]()
        for v, chain in chains.items():
            for x in chain.ends:
                if x in inner:
                    groups.join(x, v)
        joined: dict[Var, _Chain] = defaultdict(_Chain)
        for v, chain in chains.items():
            whole = joined[groups.find(v)]
            whole.counts.update(chain.counts)
            whole.nodes.update(chain.nodes)
            whole.readers.update(chain.readers)
        return [chain for c in joined.values() if (chain := self._placed(c)) is not None]

    def _placed(self, chain: _Chain) -> _Chain | None:
        """What several submeshes count on, with that of the first; None where one has all of it."""
        position = self._flat.index.position
        at = dict.fromkeys(self._flat.submesh_of(n) for n in sorted(chain.readers, key=position.__getitem__))
        return replace(chain, mesh=next(iter(at))) if len(at) > 1 else None

    def _chain(self, carry: Carry) -> _Chain | None:
        """What makes the next value of a carry; None where it is not made of numbers alone."""
        index, chain, seen, todo = self._flat.index, _Chain(), set[Var](), [carry.out]
        while todo:
            v = todo.pop()
            n = index.producer.get(v)
            if v in seen:
                continue
            seen.add(v)
            if n is None or n.loop != self._loop:
                chain.ends[v] = None
            elif n.task is None:
                if n.primitive in _STACKS or n.guard or not _is_counting([n.eqn]):
                    return None
                chain.nodes[n] = None
                todo += n.inputs
            elif (count := self._count(n, v)) is None:
                return None
            else:
                chain.counts[v] = count
                chain.readers[n] = None
                todo += [x for x in count.reads.values() if _compat.is_var(x)]
        chain.readers.update((n, None) for n in index.readers.get(carry.inner, ()) if n.task is not None)
        return chain


def _count(n: Node, made: Var) -> _Count | None:
    """A result of a task as a number made of numbers; None where it is made of anything else."""
    body = n.eqn.params["jaxpr"]
    if n.guard or n.backward or n.eqn.effects or _compat.open_jaxpr(body).consts or not _counts(made):
        return None
    small, used = _compat.dce(_compat.without_consts(body), [v is made for v in n.eqn.outvars])
    if not _is_counting(small.eqns):
        return None
    eqns, (result,) = inlined_jaxpr(small)
    operands = [x for x, is_used in zip(n.eqn.invars, used, strict=True) if is_used]
    reads = dict(zip(small.invars, operands, strict=True))
    return _Count(n, made, tuple(eqns), reads, result)


def _is_counting(eqns: Sequence[Eqn]) -> bool:
    """Whether equations make small whole numbers, truth values and keys of such alone."""
    return all(
        not e.effects and not calls_back(e) and all(map(_counts, (*e.invars, *e.outvars)))
        for e in eqns
    )  # fmt: skip


def _counts(atom: Atom) -> bool:
    """Whether a value is small, and of whole numbers, truth values or random keys."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and nbytes(atom.aval) <= SMALL and any(jnp.issubdtype(dtype, kind) for kind in _COUNTS)
