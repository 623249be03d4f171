"""Dead code in the flat program, also inside tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .. import _compat
from .._compat import Atom, Var
from .._program._flat import FlatProgram
from .._program._nodes import Loop, Node
from .._program._rewrite import rename


def remove_dead(flat: FlatProgram) -> FlatProgram:
    """Drops every equation whose results nobody reads, and the unread results of tasks.

    Loops keep only the carries and collected values that are read after them. This repeats until nothing changes,
    because a dropped carry can free what only it read.
    """
    flat = _name_once(flat)
    while True:
        slim = _drop_from_loops(_drop_nodes(flat))
        if slim is flat:
            return flat
        flat = slim


def _name_once(flat: FlatProgram) -> FlatProgram:
    """Reads a value that a task returns twice under one name: as its result and, say, as what a checkpoint's policy saves."""
    alias: dict[Var, Atom] = {}
    for node in flat.nodes:
        if node.task is not None:
            outvars, first = _compat.open_jaxpr(node.eqn.params["jaxpr"]).outvars, dict[Var, Var]()
            for v, inner in zip(node.eqn.outvars, outvars, strict=True):
                if _compat.is_var(v) and _compat.is_var(inner) and (known := first.setdefault(inner, v)) is not v:
                    alias[v] = known
    return rename(flat, alias)


def _drop_nodes(flat: FlatProgram) -> FlatProgram:
    live = set(flat.index.leaving)
    kept: list[Node] = []
    for node in reversed(flat.nodes):
        used = [_compat.is_var(v) and v in live for v in node.eqn.outvars]
        if not any(used) and not node.eqn.effects:
            continue
        if (node.task is not None and not all(used)) or _reads_in_vain(node):
            node = _trim(node, used)
        live.update(node.inputs)
        kept.append(node)
    nodes = tuple(kept[::-1])
    return flat if nodes == flat.nodes else replace(flat, nodes=nodes, placement=None)


def _drop_from_loops(flat: FlatProgram) -> FlatProgram:
    index = flat.index
    read = index.results | index.readers.keys() | index.enters_loop.keys()
    loops = tuple(_slim(loop, index.bodies[i], read) for i, loop in enumerate(flat.loops))
    return flat if loops == flat.loops else replace(flat, loops=loops, placement=None)


def _slim(loop: Loop, body: Sequence[Node], read: frozenset[Var]) -> Loop:
    """The loop without the carries and pieces that nobody reads."""
    # A carry is alive if its final value is read, or if something other than its own update reads it.
    read_by_others = _read_by_others(loop, body)
    carries = tuple(c for c in loop.carries if c.final in read or c.inner in read_by_others)
    left = {c.out for c in carries}
    xs = tuple(p for p in loop.xs if p.inner in read or p.inner in left)
    ys = tuple(p for p in loop.ys if any(v in read for v in p.outer if _compat.is_var(v)))
    if (carries, xs, ys) == (loop.carries, loop.xs, loop.ys):
        return loop
    return replace(loop, carries=carries, xs=xs, ys=ys)


def _read_by_others(loop: Loop, body: Sequence[Node]) -> set[Var]:
    """What the body reads of the carries, but for the equations that only make a carry's next value of it.

    What another carry takes over as it is, or the loop collects, counts as well.
    """
    out = {c.inner: c.out for c in loop.carries}
    found = {v for node in body for v in node.inputs if v in out and not all(made is out[v] for made in node.outputs)}
    found.update(c.out for c in loop.carries if c.out in out and c.out is not c.inner)
    found.update(p.inner for p in loop.ys if p.inner in out)
    return found


def _reads_in_vain(node: Node) -> bool:
    """Whether a task, or each iteration of a scan, leaves one of its operands unread, as of all parameters of a model."""
    if node.task is not None:
        body = _compat.without_consts(node.eqn.params["jaxpr"])
        return not all(_compat.dce(body, [True] * len(body.outvars))[1])
    if node.primitive != "scan":
        return False
    scan = _compat.scan_parts(node.eqn)
    inner = _compat.open_jaxpr(scan.jaxpr)
    read = {v for e in inner.eqns for v in e.invars if _compat.is_var(v)}.union(filter(_compat.is_var, inner.outvars))
    carry = slice(scan.num_consts, scan.num_consts + scan.num_carry)  # which may be there for its results alone
    return not read.union(inner.invars[carry]).issuperset(inner.invars)


def _trim(node: Node, used: list[bool]) -> Node:
    """The equation without the results that nobody reads; operands it then needs no more go too."""
    outs = [v for v, u in zip(node.eqn.outvars, used, strict=True) if u]
    invars = list(dict.fromkeys(node.inputs))
    small, _ = _compat.dce(_compat.new_jaxpr(invars, outs, [node.eqn]), [True] * len(outs))
    (eqn,) = small.eqns
    return replace(node, eqn=eqn)
