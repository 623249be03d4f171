"""A weight that every microbatch casts to a smaller type is cast once a call.

In mixed precision a task takes float32 weights and begins with a cast to bfloat16, and so does its backward pass. In one
executable that is one cast a step; in a pipeline it is two for each microbatch, each of which reads the weight in full.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from .._compat import AbstractJaxpr, Atom, Eqn, Var
from .._mark import constraint_p
from .._program._calls import call_body, is_rewritable
from .._program._flat import FlatProgram
from .._program._nodes import Node
from .._program._rewrite import reading, trace_nodes, with_atoms

# They only move or name the elements of their first operand, or pick some of them.
_CONSTRAINTS = {"sharding_constraint", constraint_p.name}
_MOVES = {"copy", "reshape", "squeeze", "transpose"} | _CONSTRAINTS
_PICKS = {"slice", "dynamic_slice", "split", "unstack"}


def cast_once(flat: FlatProgram) -> FlatProgram:
    """Casts before a loop what comes from outside and is only read in a smaller type by a task or a cast of its body."""
    worker = _Worker(flat)
    nodes = [new for n in flat.nodes for new in worker.look_at(n)]
    return replace(flat, nodes=tuple(nodes), placement=None) if worker.casts else flat


class _Worker:
    """Goes through the nodes in order.

    Attributes:
      casts: (value from outside a loop, type) -> what it is cast to.
      env: result of a cast in a body -> what was cast outside.
      moved: (value, result of an equation that moves its elements) -> the same made outside.
      made: nodes outside of loops, to be put before the one that is looked at.
    """

    def __init__(self, flat: FlatProgram) -> None:
        self.index = flat.index
        self.casts: dict[tuple[Var, Any], Var] = {}
        self.env: dict[Var, Atom] = {}
        self.moved: dict[tuple[Var, Var], Var] = {}
        self.made: list[Node] = []
        self.bodies = _Bodies()

    def look_at(self, n: Node) -> list[Node]:
        """What a node becomes."""
        if n.loop is None:
            return [n]
        n, self.made = reading(n, self.env), []
        if n.task is not None:
            n = self._task(n)
        elif (dtype := _cast_to(n.eqn)) is not None and n.outputs and self._source(n.inputs[0], n.loop):
            self.env[n.outputs[0]] = self._cast(n.inputs[0], dtype, n)
        return [*self.made, n]

    def _task(self, n: Node) -> Node:
        jaxpr = n.eqn.params["jaxpr"]
        smaller: dict[int, Any] = {}
        casts: dict[int, Var] = {}
        for k, v in enumerate(n.eqn.invars):
            if not _compat.is_var(v) or self._source(v, n.loop) is None:
                continue
            dtype = self.bodies.read_as(jaxpr, k)
            if dtype is not None:
                smaller[k], casts[k] = dtype, self._cast(v, dtype, n)
        if not casts:
            return n
        new = self.bodies.with_smaller(jaxpr, smaller)
        for k, v in enumerate(n.eqn.outvars):
            found = self.bodies.handed_through(new, k) if _compat.is_var(v) else None
            if found is not None and found[0] in casts:  # kept for a backward pass; it is there for all microbatches
                self.env[v] = self._moved(casts[found[0]], [Node(e) for e in found[1]])
        invars = [casts.get(k, v) for k, v in enumerate(n.eqn.invars)]
        return replace(n, eqn=n.eqn.replace(invars=invars, params={**n.eqn.params, "jaxpr": new}))

    def _source(self, v: Var, loop: int | None) -> tuple[Var, list[Node]] | None:
        """What a value is made of outside of a loop, and the nodes of the body that only move its elements or take a part; else None.

        A constraint that stands for one in a task is left out: the task has it.
        """
        moves: list[Node] = []
        while self.index.scope.get(v) == loop:
            n = self.index.producer.get(v)
            if n is None or n.task is not None or n.primitive not in _MOVES | {"slice"}:
                return None
            if n.colocated_with is None or n.primitive not in _CONSTRAINTS:
                moves.append(n)
            (v,) = n.inputs
        return v, moves[::-1]

    def _cast(self, v: Var, dtype: Any, reader: Node) -> Var:
        """A value that comes from outside of a loop, cast there."""
        found = self._source(v, reader.loop)
        assert found is not None, "it comes from outside"
        source, moves = found
        # What is left of a weight, or of a data set, is cast, not all of it.
        parts = max((k for k, n in enumerate(moves, 1) if n.primitive == "slice"), default=0)
        source, moves = self._moved(source, moves[:parts]), moves[parts:]
        if (source, dtype) not in self.casts:
            nodes, (cast,) = trace_nodes(lambda x: jax.lax.convert_element_type(x, dtype), [source])
            self.made += nodes
            self.casts[source, dtype] = cast
        return self._moved(self.casts[source, dtype], moves)

    def _moved(self, v: Var, moves: Sequence[Node]) -> Var:
        """What nodes that move elements make of a value outside of the loop."""
        for n in moves:
            key = v, n.outputs[0]
            if key not in self.moved:
                self.moved[key] = _in_type(n.outputs[0], _compat.dtype(v))
                eqn = n.eqn.replace(invars=[v, *n.eqn.invars[1:]], outvars=[self.moved[key]])
                self.made.append(replace(n, eqn=eqn, loop=None, backward=False, guard=()))
            v = self.moved[key]
        return v


class _Body:
    """A jaxpr taken apart, and who makes and reads its variables."""

    def __init__(self, jaxpr: AbstractJaxpr) -> None:
        self.jaxpr = jaxpr  # kept alive: its id is a key
        self.parts = _compat.open_jaxpr(jaxpr)
        self.operand = {v: k for k, v in enumerate(self.parts.invars)}
        self.producer = {v: e for e in self.parts.eqns for v in e.outvars if _compat.is_var(v)}
        self.readers: dict[Var, list[Eqn]] = defaultdict(list)
        for e in self.parts.eqns:
            for v in dict.fromkeys(filter(_compat.is_var, e.invars)):
                self.readers[v].append(e)
        self.returned = {v for v in self.parts.outvars if _compat.is_var(v)}


class _Bodies:
    """In which types jaxprs read their operands, and the same jaxprs with operands of smaller types; each found once."""

    def __init__(self) -> None:
        self._open: dict[int, _Body] = {}
        self._read_as: dict[tuple[int, int], Any] = {}
        self._made: dict[tuple[int, tuple[tuple[int, Any], ...]], AbstractJaxpr] = {}

    def _opened(self, jaxpr: AbstractJaxpr) -> _Body:
        if id(jaxpr) not in self._open:
            self._open[id(jaxpr)] = _Body(jaxpr)
        return self._open[id(jaxpr)]

    def read_as(self, jaxpr: AbstractJaxpr, position: int) -> Any:
        """The one type that all readers of an operand cast it to, if it is a smaller one; else None."""
        key = id(jaxpr), position
        if key not in self._read_as:
            body = self._opened(jaxpr)
            types = self._types(body.parts.invars[position], body)
            self._read_as[key] = types.pop() if len(types) == 1 else None
        return self._read_as[key]

    def _types(self, v: Var, body: _Body) -> set[Any]:
        """The types that a value is cast to; with None where something reads or returns it as it is."""
        if v in body.returned:
            return {None}
        found: set[Any] = set()
        for e in body.readers.get(v, ()):
            dtype = _cast_to(e)
            if dtype is not None:
                found.add(dtype)
            elif e.primitive.name in _MOVES | _PICKS and v not in e.invars[1:]:
                for part in filter(_compat.is_var, e.outvars):
                    found |= self._types(part, body)
            elif (inner := _operands_of_body(e)) is not None:
                called, positions = inner
                at = [p for p, o in zip(positions, e.invars, strict=True) if o is v]
                found |= {None if p is None else self.read_as(called, p) for p in at}
            else:
                found.add(None)
        return found

    def handed_through(self, jaxpr: AbstractJaxpr, position: int) -> tuple[int, list[Eqn]] | None:
        """The operand that a result is, and the equations that move its elements before; None for any other result.

        Constraints are left out: what a task hands through lies there as it says.
        """
        body = self._opened(jaxpr)
        v, moves = body.parts.outvars[position], list[Eqn]()
        while _compat.is_var(v) and v not in body.operand:
            e = body.producer.get(v)
            if e is not None and e.primitive.name in _MOVES:
                moves += [e] if e.primitive.name not in _CONSTRAINTS else []
                v = e.invars[0]
            elif e is not None and (inner := _operands_of_body(e)) is not None:
                called, positions = inner
                found = self.handed_through(called, e.outvars.index(v))
                # What each round of a scan gets of an operand and hands out is that operand; a constant is not.
                if found is None or found[1] or found[0] not in positions or _is_constant_of_scan(e, found[0]):
                    return None
                v = e.invars[found[0]]
            else:
                return None
        return (body.operand[v], moves[::-1]) if _compat.is_var(v) else None

    def with_smaller(self, jaxpr: AbstractJaxpr, types: Mapping[int, Any]) -> AbstractJaxpr:
        """The jaxpr that takes operands as they are once they were cast; position -> type."""
        key = id(jaxpr), tuple(sorted(types.items(), key=lambda item: item[0]))
        if key not in self._made:
            self._made[key] = self._rewritten(jaxpr, types)
        return self._made[key]

    def _rewritten(self, jaxpr: AbstractJaxpr, types: Mapping[int, Any]) -> AbstractJaxpr:
        parts = _compat.open_jaxpr(jaxpr)
        env: dict[Var, Atom] = {}
        small: dict[Atom, Any] = {}  # variable of the jaxpr that is made smaller -> its type

        def smaller(v: Var, dtype: Any) -> Var:
            small[v] = dtype
            env[v] = new = _in_type(v, dtype)
            return new

        invars = [smaller(v, types[k]) if k in types else v for k, v in enumerate(parts.invars)]
        eqns: list[Eqn] = []
        for e in parts.eqns:
            there = {k: small[v] for k, v in enumerate(e.invars) if _compat.is_var(v) and v in small}
            if not there:
                eqns.append(with_atoms(e, env) if any(v in env for v in e.invars if _compat.is_var(v)) else e)
            elif _cast_to(e) is not None:
                env[e.outvars[0]] = with_atoms(e, env).invars[0]
            elif e.primitive.name in _MOVES | _PICKS:
                outvars = [smaller(v, there[0]) if _compat.is_var(v) else v for v in e.outvars]
                eqns.append(with_atoms(e, env, outvars))
            else:
                inner = _operands_of_body(e)
                assert inner is not None, "it reads them in a smaller type"
                body, positions = inner
                new = self.with_smaller(
                    body, {p: there[k] for k, p in enumerate(positions) if k in there and p is not None}
                )
                eqns.append(_compat.with_jaxprs(with_atoms(e, env), functools.partial(_exchanged, {id(body): new})))
        results: list[Atom] = [env.get(v, v) if _compat.is_var(v) else v for v in parts.outvars]
        rewritten: AbstractJaxpr = _compat.with_body(jaxpr, invars, results, eqns)
        return rewritten


def _exchanged(new: Mapping[int, AbstractJaxpr], jaxpr: AbstractJaxpr) -> AbstractJaxpr:
    return new.get(id(jaxpr), jaxpr)


def _in_type(v: Var, dtype: Any) -> Var:
    """A new variable like another one, but for its type."""
    aval: Any = v.aval
    return _compat.new_var(aval.update(dtype=jnp.dtype(dtype), weak_type=False))


def _operands_of_body(eqn: Eqn) -> tuple[AbstractJaxpr, Sequence[int | None]] | None:
    """The body of a call or scan, and which of its operands each operand of the equation is; None for one that is carried."""
    if eqn.primitive.name == "scan":
        scan = _compat.scan_parts(eqn)
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        return scan.jaxpr, [None if first <= k < last else k for k in range(len(eqn.invars))]
    body = call_body(eqn) if is_rewritable(eqn) else None
    return None if body is None else (body, range(len(eqn.invars)))


def _is_constant_of_scan(eqn: Eqn, position: int) -> bool:
    return eqn.primitive.name == "scan" and position < _compat.scan_parts(eqn).num_consts


def _cast_to(eqn: Eqn) -> Any:
    """The type that an equation casts to, if it is a smaller floating-point one; else None."""
    if eqn.primitive.name != "convert_element_type" or not _compat.is_var(eqn.invars[0]):
        return None
    before, after = _compat.dtype(eqn.invars[0]), jnp.dtype(eqn.params["new_dtype"])
    is_float = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
    return after if is_float and after.itemsize < before.itemsize else None
