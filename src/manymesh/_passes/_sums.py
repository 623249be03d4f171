"""Sums over submeshes: add up on each submesh first, cross once.

A parameter used by several stages gets one gradient from each; inside a microbatch loop each stage
keeps its own accumulator and the total is taken once after the loop. A global norm adds per-parameter
scalars: one partial sum a submesh, not one transfer a parameter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._compat import Atom, Eqn, Var
from .._mark import box_constraint_p, constraint_p
from .._program._edit import Editor
from .._program._flat import FlatProgram
from .._program._nodes import Carry, Node, nbytes, nodes_where, shape_and_dtype
from .._program._placement import Placement
from .._program._rewrite import making, substitute, trace_nodes
from ._pieces import SHAPES
from ._roles import NUMBER

_ADDS = ("add", "add_any")


def regroup_sums(flat: FlatProgram) -> FlatProgram:
    """Rewrites every chain of additions whose terms lie on several submeshes. Needs the placement."""
    assert flat.placement is not None, "sums are regrouped by where their terms are"
    placement = flat.placement
    edit = Editor(flat)
    for i in range(len(flat.loops)):
        _split_accumulators(flat, edit, i, placement)
    return _regroup_chains(edit.result(), placement)


def is_addition(node: Node | None) -> bool:
    """Whether a node adds up variables of one shape and dtype."""
    if node is None or node.task is not None or node.primitive not in _ADDS:
        return False
    result = shape_and_dtype(node.eqn.outvars[0])
    return all(_compat.is_var(v) and shape_and_dtype(v) == result for v in node.eqn.invars)


def terms_of_sum(
    root: Var, producer: Mapping[Var, Node], uses: Counter[Var], loop: int | None
) -> tuple[list[Var], list[Node]]:
    """The terms of a sum, left to right, and the additions that make it up."""
    node = producer.get(root)
    if node is None or not is_addition(node) or node.loop != loop:
        return [root], []
    terms: list[Var] = []
    nodes = [node]
    stack = list(node.inputs[::-1])
    while stack:
        v = stack.pop()
        inner = producer.get(v)
        if inner is not None and is_addition(inner) and uses[v] == 1 and inner.loop == loop:
            nodes.append(inner)
            stack += inner.inputs[::-1]
        else:
            terms.append(v)
    return terms, nodes


# What is zero where its operand is, and of a sum is the sum of what it is of the terms; scaled, to within rounding.
SCALES = {"convert_element_type", "div", "mul"}
_LINEAR = {"copy", "neg", constraint_p.name, box_constraint_p.name} | SHAPES | SCALES


def linear_operand(n: Node) -> Var | None:
    """The variable that an equation only casts, constrains, scales by a number or brings into shape."""
    if n.task is not None or n.primitive not in _LINEAR or len(n.inputs) != 1:
        return None
    if len(numbers_of(n)) != len(n.eqn.invars) - 1:
        return None
    (operand,) = n.inputs
    if n.primitive == "div" and n.eqn.invars[0] is not operand:
        return None
    # Of integers a quotient is cut off, and a cast wraps; a cast to what ends earlier makes infinities of large terms.
    rounds = n.primitive in ("convert_element_type", "div")
    return operand if not rounds or 0 < exponents(operand) <= exponents(n.outputs[0]) else None


def scaled_by(n: Node) -> tuple[Var, Var] | None:
    """The array that an equation scales, and the number by which it does: a variable, such as a microbatch's weight."""
    if n.task is not None or n.primitive != "mul" or len(n.inputs) != 2 or exponents(n.outputs[0]) == 0:
        return None
    array, number = sorted(n.inputs, key=lambda v: not _compat.shape(v))
    return (array, number) if _compat.shape(array) and not _compat.shape(number) else None


def _seen_operand(n: Node) -> Var | None:
    return found[0] if (found := scaled_by(n)) is not None else linear_operand(n)


def exponents(v: Atom) -> int:
    """The exponent of the largest number of a value's dtype; 0 if that is of no floating-point numbers."""
    dtype = _compat.dtype(v)
    return int(jnp.finfo(dtype).maxexp) if jnp.issubdtype(dtype, jnp.inexact) else 0  # type: ignore[no-untyped-call]


def numbers_of(n: Node) -> list[Any]:
    """The numbers that an equation says itself."""
    return [v.val for v in n.eqn.invars if isinstance(v, _compat.Literal) and not _compat.shape(v)]


class Term(NamedTuple):
    """A term of a sum.

    Attributes:
      source: what it is made of.
      way: the linear equations that make it of that, first to last; some scale by a variable, as `scaled_by` says.
    """

    source: Var
    way: tuple[Node, ...]


def seen_through(v: Var, flat: FlatProgram, placement: Placement, loop: int) -> tuple[list[Term], list[Node]]:
    """The terms of a sum and the nodes that add it up, seen through what is linear where that lets each be where it is made.

    The gradient of a tied embedding that is cast to bfloat16, say, is a cast of the sum of two. Added up in the dtype of the
    accumulator, each where it is made, it is rounded less.
    """
    index = flat.index
    found: list[Term] = []
    plain, nodes = terms_of_sum(v, index.producer, index.uses, loop)
    for term in plain:
        way: list[Node] = []
        source = term
        while index.uses[source] == 1 and (maker := index.producer.get(source)) is not None and maker.loop == loop:
            operand = None if maker.guard else _seen_operand(maker)
            if operand is None:
                break
            way.insert(0, maker)
            source = operand
        inner, more = (
            seen_through(source, flat, placement, loop) if way and index.uses[source] == 1 else ([Term(source, ())], [])
        )
        if {placement.home.get(t.source) for t in inner} == {placement.home.get(term)}:
            found.append(Term(term, ()))
        else:
            found += [Term(t.source, (*t.way, *way)) for t in inner]
            nodes += [*more, *way]
    return found, nodes


def _split_accumulators(flat: FlatProgram, edit: Editor, loop: int, placement: Placement) -> None:
    """Gives every submesh that adds to an accumulator one of its own; their sum is taken after the loop."""
    index = flat.index
    for carry in flat.loops[loop].carries:
        if index.uses[carry.inner] != 1 or index.uses[carry.out] != 1:
            continue
        terms, nodes = seen_through(carry.out, flat, placement, loop)
        if Term(carry.inner, ()) not in terms:
            continue
        groups: dict[int, list[Term]] = defaultdict(list)
        for term in terms:
            if term.source is not carry.inner:
                groups[placement.home.get(term.source, -1)].append(term)
        if len(groups) < 2:
            continue
        inside: list[Node] = []
        carries: list[Carry] = []
        for i, (_, group) in enumerate(sorted(groups.items())):
            inner = carry.inner if i == 0 else _compat.new_var(carry.inner.aval)
            made, out = add_up(inner, group, loop, nodes[0].backward)
            inside += made
            init = carry.init if i == 0 else zeros(edit, loop, carry.inner)
            carries.append(Carry(inner, out, init, _compat.new_var(carry.final.aval)))
        edit.replace_carry(loop, carry, carries)
        for n in nodes:
            edit.replace_node(n, [])
        edit.replace_node(max(nodes, key=index.position.__getitem__), inside)
        total, _ = trace_nodes(lambda *xs: summed(xs), [c.final for c in carries])
        total[-1] = making(total[-1], [carry.final])
        edit.after_loop(loop, total)


def add_up(inner: Var, terms: Sequence[Term], loop: int, backward: bool) -> tuple[list[Node], Var]:
    """Adds terms to an accumulator; of those that go the same way their sum goes it."""
    alike: dict[tuple[Node, ...], list[Var]] = defaultdict(list)
    for term in terms:
        alike[term.way].append(term.source)
    nodes: list[Node] = []
    parts = [inner, *alike.pop((), ())]
    for way, sources in alike.items():
        made, (part,) = trace_nodes(lambda *xs: summed(xs), sources, loop=loop, backward=backward)
        for n in way:
            operand = _seen_operand(n)
            assert operand is not None, "a sum was seen through it"
            made.append(replace(n, eqn=substitute(n.eqn, {operand: part})))
            (part,) = made[-1].outputs
        nodes += made
        parts.append(part)
    made, (out,) = trace_nodes(lambda *xs: summed(xs), parts, loop=loop, backward=backward)
    return [*nodes, *made], out


def zeros(edit: Editor, loop: int, like: Var) -> Var:
    """Zeros before a loop, for an accumulator to start from."""
    shape, dtype = shape_and_dtype(like)
    nodes, (out,) = trace_nodes(lambda: lax.optimization_barrier(jnp.zeros(shape, dtype)), [], layout_follows_loop=True)
    edit.before_loop(loop, nodes)
    new: Var = out
    return new


def is_zero(v: Atom, producer: Mapping[Var, Node]) -> bool:
    """Whether a value is known to be all zeros."""
    return is_made_zero(v, lambda x: None if (n := producer.get(x)) is None else n.eqn)


def is_made_zero(v: Atom, made_by: Callable[[Var], Eqn | None]) -> bool:
    """The same, where ``made_by`` gives the equation that makes a variable."""
    while _compat.is_var(v) and (eqn := made_by(v)) is not None:
        if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
            return False
        v = eqn.invars[0]
    return isinstance(v, _compat.Literal) and not _compat.shape(v) and bool(v.val == 0)


def _regroup_chains(flat: FlatProgram, placement: Placement) -> FlatProgram:
    """Adds up on each submesh first, wherever a sum's terms lie on several."""
    producer, uses, readers = flat.index.producer, flat.index.uses, flat.index.readers
    homes = _Homes(flat, placement)
    done: set[Node] = set()
    replaced: dict[Node, list[Node]] = {}
    for root in reversed(flat.nodes):
        if root in done or not is_addition(root) or not root.outputs:
            continue
        (result,) = root.outputs
        terms, nodes = terms_of_sum(result, producer, uses, root.loop)
        done.update(nodes)
        if len(nodes) < 2:
            continue
        homes.note_padded(terms, uses)
        groups = _by_submesh(terms, homes)
        if len(groups) < 2 or max(map(len, groups.values())) == 1 or _is_grouped(nodes, homes, readers.get(result, ())):
            continue
        made: list[Node] = []
        subtotals = []
        for at, group in groups.items():
            # What is computed wherever it is read says nothing of where it should be.
            mesh = placement.submeshes[at] if at >= 0 and all(map(homes.is_anywhere, group)) else None
            new, (out,) = trace_nodes(lambda *xs: summed(xs), group, loop=root.loop, backward=root.backward, mesh=mesh)
            made += new
            subtotals.append(out)
        new, _ = trace_nodes(lambda *xs: summed(xs), subtotals, loop=root.loop, backward=root.backward)
        new[-1] = making(new[-1], [result])
        replaced.update({n: [] for n in nodes})
        replaced[root] = made + new
    if not replaced:
        return flat
    return replace(flat, nodes=nodes_where(flat.nodes, replaced), placement=None)


class _Homes:
    """Where terms are.

    Args:
      flat: the program.
      placement: where it runs.
    """

    def __init__(self, flat: FlatProgram, placement: Placement) -> None:
        self._producer, self.placement = flat.index.producer, placement
        self._padded: dict[Var, int] = {}
        of_inputs = {v: placement.home[v] for v in flat.invars}
        # Of what is computed wherever it is read: where the inputs are that it is computed of.
        self._of_cloned: dict[Var, frozenset[int | None]] = {}
        for n in flat.nodes:
            if placement.reason.get(n) == "cloned":
                places = set[int | None]()
                for v in n.inputs:
                    if v in self._of_cloned:
                        places |= self._of_cloned[v]
                    elif nbytes(v.aval) > NUMBER:
                        places.add(of_inputs.get(v))
                self._of_cloned.update(dict.fromkeys(n.outputs, frozenset(places)))

    def note_padded(self, terms: Sequence[Var], uses: Counter[Var]) -> None:
        """Terms that are parts padded with zeros are where the parts are, if a sum there has fewer bytes than all that it is of.

        The gradient of what tasks elsewhere read whole and in part is such a sum.
        """
        sent: dict[int, int] = defaultdict(int)
        padded: dict[Var, int] = {}
        for v in dict.fromkeys(terms):
            made = self._producer.get(v)
            if made is not None and made.task is None and made.primitive == "pad" and uses[v] == 1:
                at = self.placement.home.get(made.inputs[0]) if len(made.inputs) == 1 else None
                if at is not None and self.placement.home.get(v) != at:
                    padded[v] = at
                    sent[at] += nbytes(made.inputs[0].aval)
                    continue
            if (home := self.placement.home.get(v)) is not None:
                sent[home] += nbytes(v.aval)
        self._padded.update((v, at) for v, at in padded.items() if sent[at] > nbytes(v.aval))

    def get(self, v: Var) -> int | None:
        """The submesh of a term; None for what is in no place.

        The square of a small weight's norm is computed wherever it is read; it is where the weight is, which is larger.
        """
        if v in self._padded:
            return self._padded[v]
        places = self._of_cloned.get(v, frozenset())
        if len(places) == 1 and None not in places:
            return next(iter(places))
        return self.placement.home.get(v)

    def is_anywhere(self, v: Var) -> bool:
        """Whether a value is computed wherever it is read."""
        return v in self._of_cloned


def _is_grouped(nodes: Sequence[Node], homes: _Homes, readers: Sequence[Node]) -> bool:
    """Whether the sum already adds up locally: at most (submeshes - 1) additions, and readers of it, read from elsewhere.

    Args:
      nodes: its additions.
      homes: where terms are.
      readers: what reads the sum. If all of it is on one submesh, the sum has to come there.
    """
    at = {v: homes.get(v) for n in nodes for v in n.inputs}
    places = {n: homes.placement.node.get(n, ()) for n in nodes}
    crossing = sum(any(at[v] is not None and at[v] not in places[n] for v in n.inputs) for n in nodes)
    there = {k for k in at.values() if k is not None}
    goes_to = {k for n in readers for k in homes.placement.node.get(n, ())}
    if len(goes_to) == 1:
        crossing += goes_to.isdisjoint(places[nodes[0]])
        there |= goes_to
    return crossing <= max(len(there) - 1, 0)


def summed(xs: Sequence[Any]) -> jax.Array:
    """Values added up in order."""
    total = xs[0]
    for x in xs[1:]:
        total = lax.add(total, x)
    new: jax.Array = total
    return new


def _by_submesh(terms: Sequence[Var], homes: _Homes) -> dict[int, list[Var]]:
    groups: dict[int, list[Var]] = defaultdict(list)
    for t in terms:
        at = homes.get(t)
        groups[-1 if at is None else at].append(t)
    return dict(sorted(groups.items()))
