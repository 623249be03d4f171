"""Conditionals and scans over values of several submeshes: each part where its values are.

``optax.MultiSteps``, say, updates every parameter inside one ``lax.cond``, and ``optax.lbfgs`` goes through its history in a
``lax.scan``. As one equation it would pull all parameters to one submesh in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .. import _compat
from .._compat import Atom, Var
from .._program._calls import inlined_jaxpr
from .._program._flat import FlatProgram
from .._program._groups import Groups
from .._program._nodes import Node, nbytes, nodes_where
from .._program._rewrite import rename
from ._flatten import UNROLLED, Env, Flattener
from ._hoist import SMALL
from ._inner import is_inner

MOST = 4096  # equations that the iterations of a scan may become


def spread_control_flow(flat: FlatProgram) -> FlatProgram:
    """Opens every conditional whose values are on several submeshes, and every short scan that comes apart by them.

    Needs the placement. What is cheap of all branches then runs, the rest where it is in the branch that is taken; what one
    submesh holds stays as it is.
    """
    opens = {"cond": _spans, "scan": _comes_apart}
    found = {n for n in flat.nodes if n.task is None and n.primitive in opens and opens[n.primitive](n, flat)}
    return open_control_flow(flat, _with_later_rounds(flat, found))


def _with_later_rounds(flat: FlatProgram, chosen: set[Node]) -> list[Node]:
    """What is opened, and the conditionals that take its results for the same again, as in the next iteration of a loop.

    They would be opened once the one before is, for then their values are on several submeshes, too. In a chain of many, one
    at a time, each would have the whole program placed anew. The iterations of an unrolled scan share their branches.
    """
    given: dict[Var, object] = {}  # results of conditionals that are opened -> their branches
    found = []
    for n in flat.nodes if chosen else ():
        branches = n.eqn.params.get("branches")
        again = n.task is None and branches is not None and any(given.get(v) is branches for v in n.inputs)
        if again or n in chosen:
            found.append(n)
            given.update(dict.fromkeys(n.outputs, branches))
    return found


def open_control_flow(flat: FlatProgram, nodes: Iterable[Node]) -> FlatProgram:
    """Replaces conditionals by their branches and selections between the results, and scans by their iterations."""
    opened: dict[Node, tuple[Node, ...]] = {}
    alias: dict[Var, Atom] = {}
    consts, stacked = dict(flat.consts), dict(flat.stacked)
    for n in nodes:
        found = _open(flat, n)
        opened[n] = found.nodes
        alias.update(found.alias)
        consts.update(found.consts)
        stacked.update(found.stacked)
    if not opened:
        return flat
    invars = (*consts, *flat.invars[len(flat.consts) :])
    changed = nodes_where(flat.nodes, opened)
    return rename(replace(flat, invars=invars, nodes=changed, consts=consts, stacked=stacked, placement=None), alias)


@dataclass(frozen=True)
class _Opened:
    """What a conditional or a scan becomes.

    Attributes:
      nodes: the equations in its place.
      alias: its results -> what stands for them.
      consts: constants that it closes over, which become inputs.
      stacked: stacks of what its iterations gave -> their parts.
    """

    nodes: tuple[Node, ...]
    alias: Mapping[Var, Atom]
    consts: Mapping[Var, object]
    stacked: Mapping[Var, tuple[Atom, ...]]


def _open(flat: FlatProgram, node: Node) -> _Opened:
    worker = Flattener(flat.tasks, {}, flat.registered)
    env: Env = {}
    worker.guard = node.guard
    worker.selected.update((n.eqn.outvars[0], n.eqn) for n in flat.nodes if n.primitive == "select_n")
    opens = worker.select if node.primitive == "cond" else worker.unroll
    opens(node.eqn, env, node.stack, node.loop)
    nodes = (n if node.backward or not is_inner(n) else replace(n, backward=False) for n in worker.nodes)
    return _Opened(tuple(nodes), env, worker.held.values, worker.stacked)


def _spans(node: Node, flat: FlatProgram) -> bool:
    """Whether values that are worth a thought come from, or go to, more than one submesh."""
    placement, readers = flat.placement, flat.index.readers
    assert placement is not None, "conditionals are opened by where their values are"
    held = Counter[int]()  # submesh -> bytes, of one large value or of many small ones
    for v in node.inputs:
        if v in placement.home:
            held[placement.home[v]] += nbytes(v.aval)
    for v in node.outputs:
        for s in {s for n in readers.get(v, ()) for s in placement.node[n]}:
            held[s] += nbytes(v.aval)
    return sum(n > SMALL for n in held.values()) > 1


def is_short(node: Node) -> bool:
    """Whether a scan outside of loops over microbatches becomes a bearable number of equations where it is opened."""
    scan = _compat.scan_parts(node.eqn)
    if node.loop is not None or scan.length > UNROLLED:
        return False
    return scan.length * len(inlined_jaxpr(scan.jaxpr)[0]) <= MOST


def _comes_apart(node: Node, flat: FlatProgram) -> bool:
    """Whether the large values of a scan are on several submeshes, and some of them never meet the others.

    A scan in a loop over microbatches is part of a model; it stays.
    """
    scan, homes = _compat.scan_parts(node.eqn), flat.placement.home if flat.placement is not None else {}
    given = {homes[v] for v in node.inputs if nbytes(v.aval) > SMALL and v in homes}
    if len(given) < 2 or not is_short(node):
        return False
    inner = _compat.open_jaxpr(scan.jaxpr)
    eqns, outs = inlined_jaxpr(inner)
    groups = Groups[Var]()
    carry = inner.invars[scan.num_consts : scan.num_consts + scan.num_carry]
    for together in [*zip(carry, outs[: scan.num_carry], strict=True), *((*e.invars, *e.outvars) for e in eqns)]:
        large = [v for v in together if _compat.is_var(v) and nbytes(v.aval) > SMALL]
        for v in large[1:]:
            groups.join(v, large[0])
    found: dict[Var, set[int]] = {}  # values that meet -> where they are
    for operand, v in zip(node.eqn.invars, inner.invars, strict=True):
        if _compat.is_var(operand) and operand in homes and nbytes(v.aval) > SMALL:
            found.setdefault(groups.find(v), set()).add(homes[operand])
    # A state that the scan alone reads is where the scan is, so that only what others made says where it belongs.
    return len(set(map(frozenset, found.values()))) > 1
