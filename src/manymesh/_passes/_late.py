"""What is linear in gradients that cross comes after the loop.

A value that the step makes of parameters outside of its tasks, and that several stages read (a position bias, a normalized
or masked weight, an embedding of factors), has a gradient from each of them. They would meet in every microbatch, to become
the gradient of the parameters. But what makes that of them is linear, and the same for all microbatches: each stage adds up
its own, they cross once, and the gradient of the parameters is made once, of the sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._compat import Atom, Var
from .._program._edit import Editor
from .._program._flat import FlatProgram
from .._program._nodes import Carry, Node
from .._program._placement import Placement
from .._program._rewrite import making, substitute, trace_nodes
from ._hoist import stays
from ._sums import Term, add_up, exponents, is_addition, is_zero, scaled_by, seen_through, terms_of_sum, zeros
from ._unreduced._linear import is_linear_in

# The exponent of the largest float32, and bfloat16; of float16 and less, a sum over microbatches may be infinite.
ROOM = 128
Env = dict[Var, Atom]  # variable of a loop's body -> what stands for it after the loop


def make_once(flat: FlatProgram) -> FlatProgram:
    """Moves what is linear in gradients of several submeshes, and ends in accumulators, out of loops. Needs the placement."""
    assert flat.placement is not None, "what crosses is told by where it is made and read"
    edit = Editor(flat)
    for i in range(len(flat.loops)):
        worker = _Worker(flat, flat.placement, i)
        for late in worker.find():
            worker.move(late, edit)
    return edit.result()


@dataclass(frozen=True, eq=False)
class _Late:
    """An accumulator of which some terms come after the loop.

    Attributes:
      carry: the accumulator.
      terms: these terms.
      rest: the others, added up in the loop as before.
      additions: the nodes that add them all up.
      linear: the nodes that make the terms, from what is linear in something that crosses on, in order.
      scales: numbers of each microbatch that scale the terms, such as its weight.
    """

    carry: Carry
    terms: Sequence[Term]
    rest: Sequence[Term]
    additions: Sequence[Node]
    linear: tuple[Node, ...]
    scales: tuple[Var, ...]


class _Worker:
    """The body of one loop.

    Attributes:
      fixed: the nodes that compute the same in every microbatch.
      linear: value -> the node that makes it, for what is linear in values some of which cross on the way to it.
      sums: what is added up in place, and the numbers that scale it -> the value of the accumulator after the loop.
    """

    def __init__(self, flat: FlatProgram, placement: Placement, loop: int) -> None:
        self.flat, self.index, self.placement, self.loop = flat, flat.index, placement, loop
        self.fixed: dict[Var, Node] = {}
        self.linear: dict[Var, Node] = {}
        self.sums: dict[tuple[Var, tuple[Var, ...]], Var] = {}
        movable = [n for n in self.index.bodies[loop] if not stays(n) and not n.guard and len(n.outputs) == 1]
        for n in movable:
            if not self._varying(n):
                self.fixed[n.outputs[0]] = n
        for n in movable:
            if self._is_linear(n) and any(self._crosses(v, n) for v in self._varying(n)):
                self.linear[n.outputs[0]] = n

    def _varying(self, n: Node) -> list[Var]:
        """What a node reads that another microbatch has otherwise."""
        return [v for v in n.inputs if self.index.scope.get(v) == self.loop and v not in self.fixed]

    def _crosses(self, v: Var, reader: Node) -> bool:
        """Whether a value crosses on its way to a reader, or before, and for no other one that stays, such as a task."""
        at = set(self.placement.node[reader])
        if v in self.linear or self.placement.home.get(v) in at:
            return v in self.linear
        return all(at.isdisjoint(self.placement.node[r]) or self._is_linear(r) for r in self.index.readers[v])

    def _is_linear(self, n: Node) -> bool:
        """Whether a node is linear in all that varies of what it reads, and has room for sums of them."""
        eqn, varying = n.eqn, set(self._varying(n))
        if n.task is not None or any(exponents(v) < ROOM for v in (*varying, *n.outputs)):
            return False
        at = [k for k, v in enumerate(eqn.invars) if _compat.is_var(v) and v in varying]
        return is_linear_in(eqn, at, self._is_zero)

    def _is_zero(self, v: Atom) -> bool:
        return is_zero(v, self.index.producer)

    # --- which accumulators ---------------------------------------------------------------------------

    def find(self) -> list[_Late]:
        """The accumulators with terms that can be made after the loop, where nothing else reads what makes them."""
        found = [late for carry in self.flat.loops[self.loop].carries if (late := self._late(carry)) is not None]
        while True:
            gone = {n for late in found for n in (*late.linear, *late.additions, *_ways(late.terms))}
            kept = [late for late in found if all(self._read_only_by(n, gone) for n in late.linear)]
            if len(kept) == len(found):
                return found
            found = kept

    def _read_only_by(self, n: Node, readers: set[Node]) -> bool:
        return all(v not in self.index.leaving and readers.issuperset(self.index.readers.get(v, ())) for v in n.outputs)

    def _late(self, carry: Carry) -> _Late | None:
        uses = self.index.uses
        if uses[carry.inner] != 1 or uses[carry.out] != 1:
            return None
        terms, additions = seen_through(carry.out, self.flat, self.placement, self.loop)
        if (inner := Term(carry.inner, ())) not in terms:
            return None
        terms.remove(inner)
        terms = [opened for t in terms for opened in self._unscaled(t, additions)]
        late = [t for t in terms if t.source in self.linear and not is_addition(self.linear[t.source])]
        late = [t for t in late if _scales(t) == _scales(late[0])]
        linear: set[Node] = set()
        todo = [t.source for t in late]
        while todo:
            n = self.linear.get(todo.pop())
            if n is not None and n not in linear:
                linear.add(n)
                todo += self._varying(n)
        rest = [t for t in terms if t not in late]
        in_order = sorted(linear, key=self.index.position.__getitem__)
        return _Late(carry, late, rest, additions, tuple(in_order), _scales(late[0])) if late else None

    def _unscaled(self, term: Term, additions: list[Node]) -> list[Term]:
        """The terms of what a number of each microbatch scales; what adds them up, and scales, goes to the additions."""
        n, uses = self.index.producer.get(term.source), self.index.uses
        found = None if n is None or n.guard or n.loop != self.loop or uses[term.source] != 1 else scaled_by(n)
        if n is None or found is None or uses[found[0]] != 1:
            return [term]
        sources, more = terms_of_sum(found[0], self.index.producer, uses, self.loop)
        additions += [n, *more]
        return [Term(v, (n, *term.way)) for v in sources]

    # --- after the loop -------------------------------------------------------------------------------

    def move(self, late: _Late, edit: Editor) -> None:
        """Adds up what the terms are made of, and makes them of the sums."""
        carry = late.carry
        inside: list[Node] = []
        carries: list[Carry] = []
        env: Env = {}
        for v in dict.fromkeys(v for n in late.linear for v in self._varying(n) if v not in self.linear):
            if (v, late.scales) not in self.sums:
                self._accumulate(v, late.scales, carry, edit, inside, carries)
            env[v] = self.sums[v, late.scales]
        after, parts = self._made_again(late, env)
        if late.rest:
            made, out = add_up(carry.inner, late.rest, self.loop, late.additions[0].backward)
            inside += made
            carries.append(Carry(carry.inner, out, carry.init, _compat.new_var(carry.final.aval)))
            parts.append(carries[-1].final)
        elif not self._is_zero(carry.init):
            parts.append(carry.init)
        after += trace_nodes(lambda *xs: jax.tree.reduce(lax.add, list(xs)), parts)[0]
        after[-1] = making(after[-1], [carry.final])
        edit.replace_carry(self.loop, carry, carries)
        for n in late.additions:
            edit.replace_node(n, [])
        edit.replace_node(max(late.additions, key=self.index.position.__getitem__), inside)
        edit.after_loop(self.loop, after)

    def _accumulate(
        self, v: Var, scales: Sequence[Var], like: Carry, edit: Editor, inside: list[Node], carries: list[Carry]
    ) -> None:
        """An accumulator for a scaled value, in its dtype or that of the one that it is for, whichever is wider."""
        dtype = jnp.promote_types(_compat.dtype(v), _compat.dtype(like.inner))
        inner = _compat.new_var(jax.core.ShapedArray(_compat.shape(v), dtype))
        made, (out,) = trace_nodes(
            lambda a, x, *by: a + math.prod((s.astype(dtype) for s in by), start=x.astype(dtype)), [inner, v, *scales],
            loop=self.loop, backward=True,
        )  # fmt: skip
        inside += made
        carries.append(Carry(inner, out, zeros(edit, self.loop, inner), _compat.new_var(inner.aval)))
        self.sums[v, tuple(scales)] = carries[-1].final

    def _made_again(self, late: _Late, env: Env) -> tuple[list[Node], list[Atom]]:
        """The nodes that make the terms of sums, outside of the loop, and the terms."""
        made: list[Node] = []
        for v, total in list(env.items()):
            cast, (env[v],) = trace_nodes(
                functools.partial(lax.convert_element_type, new_dtype=_compat.dtype(v)), [total]
            )
            made += cast
        needed = set(late.linear)
        todo = list(late.linear)
        while todo:
            new = [m for v in todo.pop().inputs if (m := self.fixed.get(v)) is not None and m not in needed]
            needed.update(new)
            todo += new
        for n in sorted(needed, key=self.index.position.__getitem__):
            at = self.placement.submeshes[self.placement.node[n][0]]  # what it reads crosses, and not what it makes
            made.append(replace(_outside(n, env), mesh=at if n in late.linear else n.mesh))
        parts: list[Atom] = []
        for term in late.terms:
            part = env[term.source]
            for n in term.way:
                if scaled_by(n) is None:  # what was added up is scaled
                    made.append(_outside(n, {n.inputs[0]: part}))
                    (part,) = made[-1].outputs
            parts.append(part)
        return made, parts


def _scales(term: Term) -> tuple[Var, ...]:
    return tuple(found[1] for n in term.way if (found := scaled_by(n)) is not None)


def _ways(terms: Iterable[Term]) -> Iterable[Node]:
    return (n for t in terms for n in t.way)


def _outside(n: Node, env: Env) -> Node:
    """A node with other operands, after its loop."""
    return replace(n, eqn=substitute(n.eqn, env), loop=None, backward=False)
